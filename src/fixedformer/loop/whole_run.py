"""All loops of a bfloat16 training step on a CPU as one autograd function, with the backward pass written out.

What that saves beside one function an operation: matrices that all loops share get their gradient in one product over
all loops' tokens, so it is summed in float32 and read once; residual sums and activations are computed in place; what
the backward pass needs lies in memory that is kept from one step to the next; gradients overwrite what has been used.
α and γ that differ from loop to loop are applied to the state here, so that the matrices stay shared.

A layer is two branches of one form (LoopedTransformer's docstring has the definition):

    X' = X + γ ⊙ (f((α ⊙ X / rms(X)) A + a) B + b),    f: attention of the heads, or GELU

tests/loop/test_whole_run.py compares with the operations one by one; benchmarks/looped_step.py measures.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fixedformer.loop.branch_parts import Heads, Middle, Neurons, Workspace, Workspaces
from fixedformer.loop.looped_parts import EPSILON, Matrices
from fixedformer.loop.looped_spec import LoopedSpec
from fixedformer.loop.low_attention import LONGEST


def runs_whole(spec: LoopedSpec, tokens: int, low: bool) -> bool:
    """Whether a training step on a CPU is run so: with norms, everything kept, and products in a low format, bfloat16.

    In float32 it would be 2 to 4% quicker and keep a quarter more, attention among it, which the kernel does not keep.
    """
    return low and spec.norm == "pre" and spec.checkpointing == "none" and tokens <= LONGEST


class Plan(NamedTuple):
    """loops: how many; keep: after which (from 1) the state is returned, the last among them; turn: cosines and sines
    of rotary positions; rows: of batch * tokens, at which the last state is wanted, None for all; format: in which the
    products are taken."""

    loops: int
    keep: frozenset[int]
    heads: int
    causal: bool
    turn: tuple[Tensor, Tensor] | None
    rows: Tensor | None
    format: torch.dtype


def whole_run(plan: Plan, idle: Workspaces, state: Tensor, injected: Tensor | None, alpha: Tensor | None,
              gamma: Tensor | None, layers: Sequence[Matrices]) -> list[Tensor]:  # fmt: skip
    """The states (batch, tokens, width) after the loops in `plan.keep`; the last (rows, width) where rows are named.

    idle: memory of earlier runs, taken from and given back to. injected: added to the state before every loop. alpha,
    gamma: (loops, layers, 2, width), gains and gates of attention and of the MLP, or None for ones.
    """
    width = state.shape[-1]
    scale = torch.ones(3 * width, dtype=state.dtype, device=state.device)
    scale[:width] = (width // plan.heads) ** -0.5  # of the queries: in the matrix it costs nothing
    flat: list[Tensor | None] = []
    for layer in layers:
        bias = None if layer.inward_bias is None else layer.inward_bias * scale
        flat += layer._replace(inward=layer.inward * scale, inward_bias=bias)
    states: tuple[Tensor, ...] = _WholeRun.apply(plan, idle, state, injected, alpha, gamma, *flat)  # type: ignore[no-untyped-call]
    return list(states)


class Pair(NamedTuple):
    """A branch's matrices and biases."""

    inward: Tensor
    inward_bias: Tensor | None
    outward: Tensor
    outward_bias: Tensor | None


class _WholeRun(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Plan, idle: Workspaces, state: Tensor, *given: Tensor | None) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        with torch.autocast("cpu", enabled=False):
            ctx.run = _Run(plan, idle, state, *given)
            ctx.save_for_backward(*given)  # only so that PyTorch sees if one is changed before the backward pass
            return tuple(ctx.run.forward(state))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        _, run, ctx.run = ctx.saved_tensors, ctx.run, None
        if run is None:
            raise RuntimeError("backward ran twice through these loops: the first time overwrites what it needs")
        with torch.autocast("cpu", enabled=False):
            return None, None, *run.backward(gradients)


class _Run:
    """One forward and one backward pass."""

    def __init__(self, plan: Plan, idle: Workspaces, state: Tensor, injected: Tensor | None, alpha: Tensor | None,
                 gamma: Tensor | None, *flat: Tensor | None) -> None:  # fmt: skip
        self.plan, self.idle, self.shape = plan, idle, state.shape
        self.injected = None if injected is None else injected.flatten(0, 1)
        self.space = idle.take()
        rows = plan.loops * state.shape[0] * state.shape[1]
        self.branches: list[_Branch] = []
        for number in range(len(flat) // 8):
            layer, name = Matrices(*flat[8 * number : 8 * number + 8]), f"{number}."  # type: ignore[arg-type]
            heads = Heads(self.space, name, plan.loops, self.shape, plan.heads, plan.causal, plan.turn, plan.format)
            neurons = Neurons(self.space, name, rows, layer.widen.shape[1], plan.format)
            gains = [[None if x is None else x[:, number, half] for x in (alpha, gamma)] for half in range(2)]
            self.branches += [
                _Branch(self.space, f"{name}0.", plan, self.shape, heads, Pair(*layer[:4]), *gains[0]),
                _Branch(self.space, f"{name}1.", plan, self.shape, neurons, Pair(*layer[4:]), *gains[1]),
            ]

    def forward(self, state: Tensor) -> list[Tensor]:
        plan, kept, place = self.plan, [], len(self.branches) - 2
        state = state.flatten(0, 1).clone()
        for t in range(plan.loops):
            if self.injected is not None:
                state += self.injected
            for number, branch in enumerate(self.branches):
                ends = t == plan.loops - 1 and number == place  # behind the last attention only some rows go on
                state = branch.forward(t, state, plan.rows if ends else None)
            if t + 1 in plan.keep:
                last = t == plan.loops - 1
                kept.append(state if last else state.view(self.shape).clone())
        if plan.rows is None:
            kept[-1] = kept[-1].view(self.shape)
        return kept

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        plan, place = self.plan, len(self.branches) - 2
        given = dict(zip(sorted(plan.keep), gradients))
        rows = self.shape[0] * self.shape[1] if plan.rows is None else len(plan.rows)
        gradient = torch.zeros(rows, self.shape[-1], dtype=self.branches[0].wide)
        to_injected = None if self.injected is None else torch.zeros_like(self.injected)
        for t in reversed(range(plan.loops)):
            here = given.get(t + 1)
            if here is not None:
                gradient += here.reshape(gradient.shape)
            for number in reversed(range(len(self.branches))):
                ends = t == plan.loops - 1 and number == place
                gradient = self.branches[number].backward(t, gradient, plan.rows if ends else None)
            if to_injected is not None:
                to_injected += gradient
        flat = [x for branch in self.branches for x in branch.matrix_gradients()]
        to_alpha = _stacked([branch.to_alpha for branch in self.branches])
        to_gamma = _stacked([branch.to_gamma for branch in self.branches])
        to_injected = None if to_injected is None else to_injected.view(self.shape)
        return [gradient.view(self.shape), to_injected, to_alpha, to_gamma, *flat]

    def __del__(self) -> None:
        self.idle.give(self.space)  # once the graph is gone, whether its backward pass ran or not


def _stacked(found: list[list[Tensor]]) -> Tensor | None:
    """Of every branch a list of (width,), the last loop's first: (loops, layers, 2, width)."""
    if not found[0]:
        return None
    every = torch.stack([torch.stack(rows[::-1]) for rows in found], 1)
    return every.view(len(every), -1, 2, every.shape[-1])


class _Branch:
    """One branch of one layer, in all loops. Its memory holds a stretch of rows for every loop, one after another."""

    def __init__(self, space: Workspace, name: str, plan: Plan, shape: torch.Size, middle: Middle,
                 pair: Pair, alpha: Tensor | None, gamma: Tensor | None) -> None:  # fmt: skip
        self.space, self.name, self.middle = space, name, middle
        self.wide, self.format = pair.inward.dtype, plan.format
        self.pair = Pair(*(None if x is None else x.to(plan.format) for x in pair))  # type: ignore[arg-type]
        self.alpha, self.gamma = alpha, gamma
        self.tokens = shape[0] * shape[1]
        self.total, self.width = plan.loops * self.tokens, shape[-1]
        self.normed = self._memory("normed", self.width)
        self.scale = space.take(f"{name}scale", (self.total, 1), self.wide)
        self.entering = self.normed if alpha is None else self._memory("entering", self.width)
        self.mixed = self._memory("mixed", pair.outward.shape[0])
        self.leaving = None if gamma is None else self._memory("leaving", self.width)
        self.to_alpha: list[Tensor] = []  # gradients of them, the last loop's first
        self.to_gamma: list[Tensor] = []
        self.in_rows = self.out_rows = 0

    def _memory(self, what: str, columns: int) -> Tensor:
        return self.space.take(self.name + what, (self.total, columns), self.format)

    def _once(self, what: str, rows: int, columns: int, wide: bool = False) -> Tensor:
        """Memory that every branch and loop may overwrite."""
        return self.space.take(what, (rows, columns), self.wide if wide else self.format)

    def _widened(self, x: Tensor, what: str) -> Tensor:
        """x in the state's format; x itself where it is that already."""
        return x if x.dtype == self.wide else self._once(what, len(x), x.shape[1], wide=True).copy_(x)

    def forward(self, t: int, state: Tensor, chosen: Tensor | None) -> Tensor:
        """The state after it, in place of the one before; at the chosen rows only, where they are named."""
        count, start = len(state), t * self.tokens
        rows = slice(start, start + count)
        self._normalise(t, state, rows)
        _product(self.entering[rows], self.pair.inward, self.pair.inward_bias, self.middle.entry(rows))
        self.in_rows = rows.stop
        if chosen is None:
            self.middle.forward(rows, self.mixed[rows])
        else:
            every = self._once("every", count, self.mixed.shape[1])
            self.middle.forward(rows, every)
            state, rows = state.index_select(0, chosen), slice(start, start + len(chosen))
            torch.index_select(every, 0, chosen, out=self.mixed[rows])
        self.out_rows = rows.stop
        mixed = self.mixed[rows]
        if self.gamma is None and self.format == self.wide:
            state.addmm_(mixed, self.pair.outward)
            return state if self.pair.outward_bias is None else state.add_(self.pair.outward_bias)
        out = self._once("out", len(state), self.width) if self.leaving is None else self.leaving[rows]
        _product(mixed, self.pair.outward, self.pair.outward_bias, out)
        return state.add_(out) if self.gamma is None else state.addcmul_(self._widened(out, "left"), self.gamma[t])

    def _normalise(self, t: int, state: Tensor, rows: slice) -> None:
        """Fills normed, x / rms(x), scale, 1 / rms(x), and entering, α times normed."""
        length = torch.linalg.vector_norm(state, dim=-1, keepdim=True)
        scale = torch.rsqrt(length.square_().mul_(1 / self.width).add_(EPSILON), out=self.scale[rows])
        normed = torch.mul(state, scale, out=self._once("wide", len(state), self.width, wide=True))
        self.normed[rows] = normed
        if self.alpha is not None:
            self.entering[rows] = normed.mul_(self.alpha[t])

    def backward(self, t: int, gradient: Tensor, chosen: Tensor | None) -> Tensor:
        """The gradient of the state before it, of that of the state after it, in its place."""
        count, start = len(gradient), t * self.tokens
        rows = slice(start, start + count)
        low = self._memory("low", self.width)[rows]
        if self.gamma is None:
            low.copy_(gradient)
        else:
            assert self.leaving is not None
            wide = self._once("wide", count, self.width, wide=True)
            self.to_gamma.append(torch.mul(gradient, self._widened(self.leaving[rows], "left"), out=wide).sum(0))
            low.copy_(torch.mul(gradient, self.gamma[t], out=wide))
        to_mixed = torch.mm(low, self.pair.outward.mT, out=self._once("mixed", count, self.mixed.shape[1]))
        if chosen is not None:
            rows = slice(start, start + self.tokens)
            gradient, to_mixed = (
                torch.zeros(self.tokens, x.shape[1], dtype=x.dtype).index_copy_(0, chosen, x)
                for x in (gradient, to_mixed)
            )
        to_inner = self.middle.backward(rows, to_mixed)
        entering = torch.mm(to_inner, self.pair.inward.mT, out=self._once("entering", len(to_inner), self.width))
        return self._denormalise(t, rows, gradient, entering)

    def _denormalise(self, t: int, rows: slice, gradient: Tensor, entering: Tensor) -> Tensor:
        """gradient plus what came through α and the norm: scale (v - normed mean(v normed)) with v = α entering."""
        wide, normed = self._widened(entering, "wide"), self._widened(self.normed[rows], "wide normed")
        if self.alpha is not None:
            self.to_alpha.append((wide * normed).sum(0))
            wide *= self.alpha[t]
        both = torch.mul(wide, normed, out=self._once("both", len(wide), self.width, wide=True))
        along = both.sum(-1, keepdim=True).mul_(-1 / self.width)
        return gradient.addcmul_(wide.addcmul_(normed, along), self.scale[rows])

    def matrix_gradients(self) -> list[Tensor | None]:
        """Of inward, its bias, outward, its bias: over the tokens of all loops at once."""
        found: list[Tensor | None] = []
        low = self._memory("low", self.width)
        for before, after, count, bias in (
            (self.entering, self.middle.inner, self.in_rows, self.pair.inward_bias),
            (self.mixed, low, self.out_rows, self.pair.outward_bias),
        ):
            before, after = before[:count], after[:count]
            slim = before.shape[1] <= after.shape[1]  # the narrower one transposed is quicker
            product = torch.mm(before.mT, after) if slim else torch.mm(after.mT, before).mT
            found.append(product.to(self.wide).contiguous())
            found.append(None if bias is None else after.sum(0, dtype=self.wide))
        return found


def _product(x: Tensor, matrix: Tensor, bias: Tensor | None, out: Tensor) -> None:
    torch.mm(x, matrix, out=out)
    if bias is not None:
        out += bias
