"""LoopedTransformer: one block of a few layers, applied again and again; what a loop knows of its number is a switch.

Section 4.2 of Xu and Sato (arXiv 2410.01405), as one module with every choice open (`LoopedSpec`). A loop t is

    X' = X + γ1(t) ⊙ Attn(α1(t) ⊙ X / rms(X)),    X'' = X' + γ2(t) ⊙ FF(α2(t) ⊙ X' / rms(X'))

How it is made cheap: α and γ are folded into the matrices they stand beside (a scaled d x 3d matrix instead of a scaled
batch x tokens x d state), all clocks are computed at once, residual sums happen inside the matrix products, the norm
keeps its output only, and read-outs, and all of the last loop behind its attention, are computed at scored places only.
tests/loop/looped_reference.py is the definition, written out.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, silu
from torch.utils.checkpoint import checkpoint

from fixedformer.attention import Mask, attention_weights, resolve_mask, rotate
from fixedformer.errors import SpecError
from fixedformer.inputs import as_input, embed_rows
from fixedformer.loop.branch_parts import Workspaces
from fixedformer.loop.looped_parts import (
    Layer,
    Matrices,
    add_product,
    drawer,
    normalise,
    product_format,
    select,
    sinusoid,
    turned,
)
from fixedformer.loop.looped_spec import LoopedSpec
from fixedformer.loop.low_attention import attend
from fixedformer.loop.whole_run import Plan, runs_whole, whole_run


class LoopTrace(NamedTuple):
    """states (loops + 1, batch, tokens, width): before the first loop and after each; attention (loops, layers, batch,
    heads, tokens, tokens)."""

    states: Tensor
    attention: Tensor


class _Given(NamedTuple):
    """What every loop of a run is given: the embedding, who may look at whom (a bool mask; True: causal; False: all),
    the cosines and sines of rotary positions, and the rows of (batch * tokens) that the last state is wanted at."""

    embedded: Tensor
    allowed: Tensor | bool
    turn: tuple[Tensor, Tensor] | None
    rows: Tensor | None


class LoopedTransformer(nn.Module):
    """Token ids (batch, tokens) or vectors (batch, tokens, d_in) -> read-outs (batch, tokens, d_out).

        model = LoopedTransformer(LoopedSpec(d_in=30, loops=16, timestep="adaln"), seed=0)
        model = LoopedTransformer(d_in=30, loops=16, timestep="adaln")       # the same
        logits = model(X);  logits = model(X, loops=32);  model.loops = 32   # loops may change at any time

    seed: of the starting weights. Raises SpecError for sizes and switches that do not fit.
    """

    def __init__(self, spec: LoopedSpec | None = None, seed: int = 0, **switches: Any) -> None:
        super().__init__()
        if (spec is None) == (not switches):
            raise SpecError("give a LoopedSpec, or its fields by name, and not both")
        self.spec = spec = spec or LoopedSpec(**switches)
        self.loops = spec.loops
        self._idle = Workspaces()
        draw = drawer(torch.Generator().manual_seed(seed), spec.deviation)
        width = spec.width
        self.embed = draw(spec.d_in, width, rows=width)
        if spec.positions == "learned":
            self.places = draw(spec.tokens, width, rows=width)
        self.layers = nn.ModuleList(Layer(spec, draw) for _ in range(spec.layers))
        self.readout = None if spec.tied else draw(width, spec.outputs)
        self.final_gain = nn.Parameter(torch.zeros(width)) if spec.final_norm else None  # the gain less one
        # α - 1 of both norms, then γ of both: zeros, so that α starts at one and γ at zero
        if spec.timestep == "none":
            gained = spec.norm == "pre" and spec.norm_gain
            self.gain = nn.Parameter(torch.zeros(spec.layers, 2, width)) if gained else None
        elif spec.timestep == "adaln":
            self.clock_in, self.clock_out = draw(width, width, rows=width), draw(width, width, rows=width)
            self.clock_in_bias, self.clock_out_bias = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.zeros(width))
            self.modulate = nn.Parameter(torch.zeros(width, spec.layers * 4 * width))
            self.modulate_bias = nn.Parameter(torch.zeros(spec.layers * 4 * width))
        else:
            count = 1 if spec.timestep == "constant" else spec.loops
            self.modulation = nn.Parameter(torch.zeros(count, spec.layers, 4, width))

    def forward(self, X: Tensor, mask: Mask = None, loops: int | None = None) -> Tensor:
        """Read-outs (batch, tokens, d_out) after the last loop. mask: more than the spec's causal; loops: this once."""
        return self.readouts(X, mask, loops, which=())[0]

    def readouts(
        self,
        X: Tensor,
        mask: Mask = None,
        loops: int | None = None,
        which: range | tuple[int, ...] | Literal["loss"] = (),
        scored: Tensor | None = None,
    ) -> Tensor:
        """Read-outs after each of the loops in `which` (numbers from 1; always the last too), stacked in front.

        which="loss": those of `spec.loss_over`. scored: bool (batch, tokens): only these places, so (loops named,
        places, d_out) instead of (loops named, batch, tokens, d_out).
        """
        count = self._count(loops)
        named = self.spec.loss_loops(count) if which == "loss" else which
        wanted = sorted({*named, count})
        if wanted[0] < 1 or wanted[-1] > count:
            raise SpecError(f"loops are numbered from 1 to {count}, got {wanted}")
        rows = None if scored is None else scored.flatten().nonzero()[:, 0]
        every = rows is not None and len(rows) == X.shape[0] * X.shape[1]
        rows = None if every else rows  # nothing to choose
        states = self._loop(self._given(self.embedded(X), X, mask, rows), count, set(wanted))
        if rows is not None:  # the last state holds these rows only already
            states = [*(select(state, rows) for state in states[:-1]), states[-1]]
        told = torch.stack([self.read(state) for state in states])
        return told.flatten(1, 2) if every else told

    @torch.no_grad()
    def trace(self, X: Tensor, mask: Mask = None, loops: int | None = None) -> LoopTrace:
        """Hidden states and attention of every loop."""
        count, states, attention = self._count(loops), [], []
        given = self._given(self.embedded(X), X, mask)
        state, raw = self._start(given.embedded), self._modulation(count)
        states.append(state)
        for t in range(count):
            seen: list[Tensor] = []
            state = self._once(state, given, self._matrices(raw, t), seen=seen)
            states.append(state)
            attention.append(torch.stack(seen))
        return LoopTrace(torch.stack(states), torch.stack(attention))

    def states(self, X: Tensor, mask: Mask = None, loops: int | None = None) -> Tensor:
        """States before the first loop and after each, (loops + 1, batch, tokens, width)."""
        count, embedded = self._count(loops), self.embedded(X)
        found = self._loop(self._given(embedded, X, mask), count, set(range(1, count + 1)))
        return torch.stack([self._start(embedded), *found])

    def final_state(self, embedded: Tensor, mask: Mask = None, loops: int | None = None) -> Tensor:
        """The state (batch, tokens, width) after the last loop, of an input given as its embedding (`embedded`)."""
        count = self._count(loops)
        return self._loop(self._given(embedded, embedded, mask), count, {count})[0]

    def compile_readouts(self) -> None:
        """torch.compile the run and its read-outs; shapes and numbers of loops are compiled as they first occur."""
        compiled = torch.compile(self.readouts)

        def readouts(X: Tensor, *given: Any, **named: Any) -> Tensor:
            """Inputs are checked outside of compiled code."""
            told: Tensor = compiled(as_input(X, self.spec.d_in, self.embed.dtype, self.embed.device), *given, **named)
            return told

        self.readouts = readouts  # type: ignore[method-assign]

    def train(self, mode: bool = True) -> Self:
        """As every module; leaving training gives back the memory that steps on a CPU use again and again."""
        if not mode:
            self._idle.clear()
        return super().train(mode)

    def _count(self, loops: int | None) -> int:
        count = self.loops if loops is None else loops
        if count < 1:
            raise SpecError(f"loops must be at least 1, got {count}")
        return count

    # -- one run ------------------------------------------------------------------------------------------------------

    def _loop(self, given: _Given, count: int, keep: set[int]) -> list[Tensor]:
        """The states after the loops in `keep`, in order; the last at `given.rows` only, where they are named."""
        raw = self._modulation(count)
        shared = None if raw is not None and raw.shape[0] > 1 else self._matrices(raw, 0)

        def once(state: Tensor, t: int) -> Tensor:
            return self._once(state, given, shared or self._matrices(raw, t), last=t == count - 1)

        def stretch(state: Tensor, start: int, stop: int, levels: int) -> list[Tensor]:
            """Loops start+1 .. stop: the kept states among them, then the last state (again, if it is kept).

            levels: 0 keeps everything for the backward pass, 1 the state before each loop, more: the state before each
            of n^(1/levels) parts, each of which is run again when its turn comes, and kept with one level less.
            """
            found: list[Tensor] = []
            if levels < 2:
                for t in range(start, stop):
                    state = _again(once, state, t) if levels else once(state, t)
                    found += [state] if t + 1 in keep else []
                return [*found, state]
            size = math.ceil((stop - start) ** ((levels - 1) / levels) - 1e-9)
            for part in range(start, stop, size):
                *kept, state = _again(stretch, state, part, min(part + size, stop), levels - 1)
                found += kept
            return [*found, state]

        state, first, states, back = self._start(given.embedded), 0, [], self.spec.backprop_loops
        if back is not None and torch.is_grad_enabled():
            first = max(0, count - back)
            with torch.no_grad():
                *states, state = stretch(state, 0, first, 0)
        if self._runs_whole(given):
            layers = shared or [layer.matrices(None, None) for layer in self.layers]  # type: ignore[operator]
            clock = None if shared else raw
            return states + self._whole(state, given, layers, clock, range(first, count), keep)
        levels = {"none": 0, "loop": 1, "nested": 2 if count - first <= 16 else 3}[self.spec.checkpointing]
        levels = levels if count - first > 1 else 0  # run again, one loop would keep as much as it does at first
        return states + stretch(state, first, count, levels if torch.is_grad_enabled() else 0)[:-1]

    def _runs_whole(self, given: _Given) -> bool:
        """Whether `whole_run` does what is left: a step on a CPU that keeps everything for its backward pass."""
        plain = torch.is_grad_enabled() and not torch.compiler.is_compiling() and isinstance(given.allowed, bool)
        low = product_format(given.embedded) == torch.bfloat16
        return plain and given.embedded.device.type == "cpu" and runs_whole(self.spec, given.embedded.shape[1], low)

    def _whole(
        self, state: Tensor, given: _Given, layers: list[Matrices], clock: Tensor | None, run: range, keep: set[int]
    ) -> list[Tensor]:
        """The kept states of the loops in `run` (from 0), by `whole_run`. clock: α and γ of `_modulation`, where they
        are not in the matrices."""
        alpha = gamma = None
        if clock is not None:
            alpha, gamma = 1 + clock[run.start : run.stop, :, :2], clock[run.start : run.stop, :, 2:]
        kept = frozenset(t - run.start for t in keep if t > run.start)
        causal = bool(given.allowed)
        plan = Plan(len(run), kept, self.spec.heads, causal, given.turn, given.rows, product_format(state))
        injected = given.embedded if self.spec.injection == "add" else None
        return whole_run(plan, self._idle, state, injected, alpha, gamma, layers)

    def _once(
        self, state: Tensor, given: _Given, matrices: list[Matrices], last: bool = False, seen: Any = None
    ) -> Tensor:
        """One loop. last: go on with `given.rows` only once attention is done; seen: a list that gets the attention."""
        if self.spec.injection == "add":
            state = state + given.embedded
        for number, layer in enumerate(matrices, 1):
            heads = self._normed(state) @ layer.inward
            if layer.inward_bias is not None:
                heads = heads + layer.inward_bias
            mixed = self._attend(heads, given, seen)
            if last and given.rows is not None and number == len(matrices):
                state, mixed = select(state, given.rows), select(mixed, given.rows)
            state = add_product(state, mixed, layer.outward, layer.outward_bias)
            hidden = self._normed(state) @ layer.widen
            if layer.widen_bias is not None:
                hidden = hidden + layer.widen_bias
            state = add_product(state, gelu(hidden), layer.narrow, layer.narrow_bias)
        return state

    def _attend(self, heads: Tensor, given: _Given, seen: list[Tensor] | None) -> Tensor:
        query, key, value = heads.unflatten(-1, (3, self.spec.heads, -1)).permute(2, 0, 3, 1, 4)
        if given.turn is not None:
            query, key = (turned(x, *given.turn).to(heads.dtype) for x in (query, key))
        allowed = given.allowed
        causal = isinstance(allowed, bool) and allowed
        if seen is not None:
            shown = resolve_mask("causal", query.shape[-2], query.device) if causal else allowed
            seen.append(
                attention_weights(query * query.shape[-1] ** -0.5, key, None if isinstance(shown, bool) else shown)
            )
        out: Tensor = attend(query, key, value, allowed).transpose(1, 2).flatten(2)
        return out

    # -- its parts ----------------------------------------------------------------------------------------------------

    def embedded(self, X: Tensor) -> Tensor:
        """Embedding of the input with its positions, (batch, tokens, width)."""
        spec = self.spec
        if not torch.compiler.is_compiling():  # `compile_readouts` checks before
            X = as_input(X, spec.d_in, self.embed.dtype, self.embed.device)
        if X.ndim != (3 if X.is_floating_point() else 2):
            raise SpecError(f"needed ids (batch, tokens) or vectors (batch, tokens, {spec.d_in}), got {tuple(X.shape)}")
        embedded: Tensor = embed_rows(X, self.embed).to(self.embed.dtype)  # autocast's product of vectors is rounded
        tokens = X.shape[1]
        if spec.positions == "learned":
            if tokens > spec.tokens:
                raise SpecError(f"{tokens} tokens need as many positions, this model learned {spec.tokens}")
            places: Tensor = self.places
            embedded = embedded + places[:tokens]
        elif spec.positions == "sinusoidal":
            scale = self.spec.width**-0.5 if spec.deviation is None else spec.deviation
            embedded = embedded + scale * sinusoid(torch.arange(tokens, device=X.device), spec.width).to(embedded)
        return embedded

    def _start(self, embedded: Tensor) -> Tensor:
        return torch.zeros_like(embedded) if self.spec.injection == "add" else embedded

    def _given(self, embedded: Tensor, X: Tensor, mask: Mask, rows: Tensor | None = None) -> _Given:
        turn = None
        if self.spec.positions == "rotary":
            ones = torch.ones(X.shape[1], self.spec.width // self.spec.heads, dtype=torch.float64, device=X.device)
            # rotate (1, .., 1, 0, .., 0) and read cos and sin off its halves
            ones[:, ones.shape[1] // 2 :] = 0
            cos, sin = rotate(ones).to(embedded.dtype).chunk(2, -1)
            turn = (cos, sin)
        return _Given(embedded, self._allowed(X, mask), turn, rows)

    def _allowed(self, X: Tensor, mask: Mask) -> Tensor | bool:
        if isinstance(mask, Tensor):
            allowed = resolve_mask(mask, X.shape[1], X.device)
            assert allowed is not None
            # with the causal one no row may be empty either; and never the caller's own tensor
            both = allowed[..., 0, :, :].tril() if self.spec.causal else allowed[..., 0, :, :].clone()
            checked = resolve_mask(both, X.shape[1], X.device)
            assert checked is not None
            return checked
        if mask not in (None, "causal"):
            raise SpecError(f"mask must be None, 'causal' or a bool tensor, got {mask!r}")
        return self.spec.causal or mask == "causal"

    def _modulation(self, count: int) -> Tensor | None:
        """α1 - 1, α2 - 1, γ1, γ2 of loops 1 .. count, (count or 1, layers, 4, width); None without a timestep."""
        spec = self.spec
        if spec.timestep == "none":
            return None
        if spec.timestep == "adaln":
            clock = sinusoid(torch.arange(1, count + 1, device=self.embed.device), spec.width).to(self.embed)
            with torch.autocast(clock.device.type, enabled=False):  # a few rows, which every state hangs on
                encoded = silu(clock @ self.clock_in + self.clock_in_bias) @ self.clock_out + self.clock_out_bias
                raw = silu(encoded) @ self.modulate + self.modulate_bias
            return raw.view(count, spec.layers, 4, spec.width)
        if spec.timestep == "free" and count > spec.loops:
            raise SpecError(f"timestep 'free' has parameters for {spec.loops} loops, got {count}; 'adaln' goes further")
        return self.modulation

    def _matrices(self, raw: Tensor | None, t: int) -> list[Matrices]:
        """The matrices of loop t (from 0)."""
        found = []
        for number, layer in enumerate(self.layers):
            alpha = gamma = None
            if raw is not None:
                now = raw[min(t, raw.shape[0] - 1), number]  # one clock for all loops: "constant"
                alpha, gamma = 1 + now[:2], now[2:]
            elif self.gain is not None:
                alpha = 1 + self.gain[number]
            found.append(layer.matrices(alpha, gamma))  # type: ignore[operator]
        return found

    def _normed(self, x: Tensor) -> Tensor:
        return normalise(x, product_format(x)) if self.spec.norm == "pre" else x

    def read(self, state: Tensor) -> Tensor:
        """Read-outs (..., d_out) of states (..., width)."""
        matrix: Tensor = self.embed.mT if self.readout is None else self.readout
        if self.final_gain is not None:
            state, matrix = normalise(state, product_format(state)), (1 + self.final_gain)[:, None] * matrix
        return state @ matrix


def _again(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run `function`, keep its arguments only, and run it again when the backward pass needs its inside."""
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
