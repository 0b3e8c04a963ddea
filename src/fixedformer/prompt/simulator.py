"""One fixed attention network per size class; it computes any single-layer attention whose weights its prompt holds.

Construction for this package, after "On the Existence of Universal Simulators of Attention" (Dutta et al., 2026; only a
summary of that paper is public). Statement and proof: docs/theory/prompt.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from fixedformer.attention import Mask
from fixedformer.capacity import require_memory
from fixedformer.certificate import Certificate
from fixedformer.errors import SpecError
from fixedformer.prompt.construction import build_network, position_channels
from fixedformer.prompt.engine import Engine, run_dense
from fixedformer.prompt.layout import require_exact
from fixedformer.prompt.network import Network
from fixedformer.prompt.sizes import Backend, MaskKind, SizeClass
from fixedformer.prompt.target import QueryKey, Scale, read_target

EngineKind = Literal["fast", "dense"]


@dataclass(frozen=True, eq=False)
class Prompt:
    """A target and its input as a sequence of real numbers: what the fixed network reads.

    values: (..., tokens), one number a token (the positions belong to the machine). rows: how many rows X had (fewer
    than n only where the size class takes a mask from the prompt). machine_fingerprint: whose prompt it is.
    """

    values: Tensor
    rows: int
    machine_fingerprint: str

    @property
    def tokens(self) -> int:
        return self.values.shape[-1]


class AttentionSimulator:
    """U, the universal simulator of one size class (n, d, d_v, heads).

    Its weights depend on the sizes alone: `fingerprint()` is the same before, after and between any targets. Verbs as
    in every family: `compile` (target and input -> prompt), `run` (prompt -> outputs), `certify`.

    backend: "hard", average-hard attention; "stock", the same weights on ordinary softmax attention with its scores
    times `sharpness`; "soft", three blocks, the last of which is one softmax head per head of the target.
    d_k, d_out, mask, guard: see SizeClass. It computes on the CPU, without gradients. Raises SpecError for sizes that
    make no sense, CapacityError for a size that does not fit in memory or whose positions `dtype` cannot hold exactly.
    """

    def __init__(
        self,
        n: int,
        d: int,
        d_v: int,
        heads: int = 1,
        backend: Backend = "hard",
        *,
        d_k: int | None = None,
        d_out: int | None = None,
        mask: MaskKind | None = None,
        guard: bool = True,
        sharpness: float = 1000.0,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.size = SizeClass(n, d, d_v, heads, d_k, d_out, mask, guard, backend, sharpness, dtype)
        _require_room(self.size)
        _, self._positions = position_channels(self.size)
        if backend == "stock":
            furthest = int(self.size.layout().coordinates().square().sum(-1).max())
            require_exact(
                2 * int(sharpness) * furthest, dtype, "sharpness times the longest squared position, doubled,"
            )

    @cached_property
    def network(self) -> Network:
        """The weights."""
        return build_network(self.size)

    @cached_property
    def _engine(self) -> Engine:
        return Engine(self.network, self._positions)

    @cached_property
    def _fingerprint(self) -> str:
        return self.network.fingerprint()

    def fingerprint(self) -> str:
        """SHA-256 over every fixed tensor: identical for every target, since the weights are a function of sizes."""
        return self._fingerprint

    @property
    def margin(self) -> float:
        """Smallest score difference between the tokens that a position head picks and all others, over all of them."""
        return self._engine.margin

    def cost(self) -> dict[str, Any]:
        """Measured on the network: blocks, heads of each block, tokens, channels, numbers in the weights."""
        return {
            "blocks": self.network.depth,
            "heads": self.network.head_counts,
            "tokens": self.size.tokens,
            "channels": self.network.width,
            "weights": self.network.parameters,
        }

    def compile(
        self,
        query_key: QueryKey,
        value: Any,
        X: Any,
        *,
        output: Any = None,
        mask: Mask = None,
        scale: Scale = None,
    ) -> Prompt:
        """Write a target and its input as a prompt. Nothing is computed but the two products named below.

        query_key: A (heads, d, d), scores X A X^T; or a pair (W_Q, W_K), each (heads, d, d_k). A pair is multiplied
        here, A = W_Q W_K^T, unless the size class has d_k: then the prompt holds both and the network multiplies.
        value: (heads, d, d_v). X: (n, d). output: W_O (heads, d_v, d_out) where the size class has d_out. All may have
        leading batch axes, which broadcast. One head may come without its axis. scale: None for scores as they are, a
        number, or "sqrt" for 1/sqrt(width of W_Q); it multiplies A or W_Q here. mask, for mask="given": None, "causal",
        a bool (..., n, n), or a padding mask (n) or (..., 1, n), True = may
        be attended; X may then have fewer than n rows.

        Raises SpecError for shapes that do not fit the size class, NaN, infinity, an empty input, or a masked row.
        """
        target = read_target(self.size, query_key, value, X, output, mask, scale)
        matrices: Sequence[Tensor] = [target.sections[name] for name, _, _ in self.size.section_names()]
        return Prompt(self.size.layout().encode(matrices), target.rows, self.fingerprint())

    def run(self, prompt: Prompt, engine: EngineKind = "fast") -> Tensor:
        """The network's output: (..., heads, n, d_v), or (..., n, d_out) in a size class with an output matrix.

        engine: "dense" evaluates the definition literally, "fast" the same numbers sooner. Raises SpecError for a
        prompt of another size class, for scores beyond the guard, and where the arithmetic overflows.
        """
        heads = range(self.size.heads)
        if self.size.d_out is not None:
            return self._grid(self._states(prompt, ["Y"], engine), self.size.d_out)[..., 0, : prompt.rows, :]
        if self.size.backend != "soft":
            grid = self._grid(self._states(prompt, [f"O@{head}" for head in heads], engine), self.size.d_v)
            return grid[..., : prompt.rows, :]
        names = [f"O@{head}.{j}" for head in heads for j in range(self.size.d_v)]
        first = self._grid(self._states(prompt, names, engine), 1)[..., 0]  # (..., heads * d_v, n)
        by_head = first.reshape(*first.shape[:-2], self.size.heads, self.size.d_v, self.size.n)
        return by_head.mT[..., : prompt.rows, :]

    def attention(self, prompt: Prompt) -> Tensor:
        """The attention weights (..., heads, n, n) as the network computed them; not for backend "soft"."""
        if self.size.backend == "soft":
            raise SpecError("backend 'soft' holds its attention weights in a head, not in tokens; use backend='hard'")
        names = [f"P@{head}" for head in range(self.size.heads)]
        return self._grid(self._states(prompt, names, "fast"), self.size.n)[..., : prompt.rows, : prompt.rows]

    def certify(
        self,
        prompt: Prompt,
        query_key: QueryKey,
        value: Any,
        X: Any,
        *,
        output: Any = None,
        mask: Mask = None,
        scale: Scale = None,
    ) -> Certificate:
        """Run the prompt and hold the result against direct evaluation of the target in plain Python.

        Takes the target as `compile` does (no batch axes). See certify.py for the checks and their bounds.
        """
        from fixedformer.prompt.certify import certify

        return certify(self, prompt, query_key, value, X, output, mask, scale)

    def _grid(self, states: Tensor, columns: int) -> Tensor:
        """(..., tokens, channels) -> (..., channels, n, columns): the first `columns` columns of the grid of X."""
        grid = states[..., : self.size.n * self.size.columns, :]
        grid = grid.reshape(*states.shape[:-2], self.size.n, self.size.columns, states.shape[-1])
        return grid[..., :columns, :].movedim(-1, -3)

    def _states(self, prompt: Prompt, names: list[str], engine: EngineKind) -> Tensor:
        """The named channels (..., tokens, channels) after the last block."""
        if not isinstance(prompt, Prompt) or prompt.machine_fingerprint != self.fingerprint():
            raise SpecError("this prompt was compiled for a simulator of another size class; compile it for this one")
        if prompt.values.shape[-1] != self.size.tokens or prompt.values.numel() == 0:
            raise SpecError(f"a prompt of this size class has {self.size.tokens} tokens, got "
                            f"{tuple(prompt.values.shape)}")  # fmt: skip
        inputs = prompt.values.reshape(-1, self.size.tokens, 1)
        scores = [] if self.size.backend == "soft" else [f"S@{head}" for head in range(self.size.heads)]
        wanted = [*names, *scores]
        if engine == "dense":
            states = run_dense(self.network, self._positions, inputs)[..., [self.network.channel(c) for c in wanted]]
        elif engine == "fast":
            states = self._engine.read(inputs, wanted)
        else:
            raise SpecError(f"engine must be 'fast' or 'dense', got {engine!r}")
        self._require_scores(states[..., len(names) :])
        result = states[..., : len(names)]
        if not torch.isfinite(result[:, : self.size.n * self.size.columns]).all():
            raise SpecError("the simulated attention overflowed; scale the weights or X down")
        return result.reshape(*prompt.values.shape[:-1], *result.shape[1:])

    def _require_scores(self, scores: Tensor) -> None:
        if not scores.numel():
            return
        largest = float(scores[:, : self.size.n * self.size.columns].abs().max())
        if not largest < self.size.score_limit:
            remedy = "use backend='soft'" if self.size.guard else "use guard=True"
            raise SpecError(
                f"scores must stay below {self.size.score_limit:g} in absolute value ("
                f"{'half the guard' if self.size.guard else 'no guard against overflow'}), got {largest:g}; scale the "
                f"queries down or {remedy}"
            )


def memory_needed(size: SizeClass) -> int:
    """Bytes of the weights and of one state. Heads and units write about a channel each; a fetch head is 4 wide."""
    heads = sum(size.head_counts)
    width = 10 + heads + 8 * size.heads
    numbers = width * (heads * 13 + 3 * size.tokens)  # 4 + 4 + 1 + 1 a head, 3 a unit with a unit for a head
    if size.backend == "soft":
        numbers += width * size.heads * 2 * (max(size.d, size.d_k or 1) + size.d_v) + size.tokens**2 // 8
    return numbers * torch.finfo(size.dtype).bits // 8


def _require_room(size: SizeClass) -> None:
    """Refuse a size class whose weights or whose state do not fit, before anything is allocated."""
    what = f"the simulator for {size.tokens} tokens and {sum(size.head_counts)} heads"
    require_memory(memory_needed(size), what, "use smaller sizes")
