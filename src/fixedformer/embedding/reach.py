"""Two networks fed the same inputs, side by side: what their states can be together, path by path.

Row k of (first, second) holds the states that one path gives in the two networks. Equal scores and outputs on all such
rows mean equal functions, and neither rotations of the state nor those of queries and keys enter: the test for weighted
automata (Schuetzenberger 1961), polynomial in the widths. docs/theory/decompile.md, section 7.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fixedformer.attention import Mask
from fixedformer.certificate import peak
from fixedformer.embedding.hankel import EPS, ROUNDING, compress, precede, times
from fixedformer.embedding.machine import Machine
from fixedformer.embedding.maps import Chain, IndexMap
from fixedformer.embedding.program import Program
from fixedformer.embedding.readouts import Stack
from fixedformer.embedding.realise import Layered
from fixedformer.errors import SpecError
from fixedformer.target import Card, Target, TargetSpec

# What a product of sums may be off by, relative to the product of the factors' norms, a layer.
CANCELLED = ROUNDING * EPS
Groups = Sequence[Sequence[int]]  # heads, by group


@dataclass(frozen=True, eq=False)
class Subject:
    """A target, or a program on its machine, as what both are: a stack with start rows."""

    spec: TargetSpec
    stack: Stack
    start: Tensor
    dtype: torch.dtype
    source: "Target | tuple[Machine, Program]"

    @classmethod
    def of(cls, source: Any) -> "Subject":
        """From a Target, or a pair (machine, program). Raises SpecError for anything else."""
        if isinstance(source, Target):
            layered = Layered.of(source)
            return cls(source.spec, layered, layered.embed, source.dtype, source)
        if isinstance(source, tuple) and len(source) == 2 and isinstance(source[1], Program):
            machine, program = source
            machine._own(program)
            start = program.embedding.to(torch.float64)
            return cls(machine.spec, machine.stack(program), start, program.dtype, (machine, program))
        raise SpecError(f"needed a Target or a pair (machine, program), got {type(source).__name__}")

    @property
    def card(self) -> Card:
        return self.source.card if isinstance(self.source, Target) else self.source[1].card

    @property
    def width(self) -> int:
        """The widest state."""
        return self.source.weights.d_model if isinstance(self.source, Target) else self.source[0].width

    def run(self, X: Tensor, mask: Mask) -> Tensor:
        if isinstance(self.source, Target):
            return self.source(X, mask)
        machine, program = self.source
        return machine.run(program, X, mask)

    def attention(self, X: Tensor, mask: Mask) -> Tensor:
        if isinstance(self.source, Target):
            return self.source.attention(X, mask)
        machine, program = self.source
        return machine.attention(program, X, mask)


class Magnitude:
    """A stack with every entry of every factor replaced by its size: what rounding each once can do, at most."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack

    def reader(self, layer: int) -> Chain:
        return _sizes(self.stack.reader(layer))

    def mover(self, layer: int, head: int) -> Chain:
        return _sizes(self.stack.mover(layer, head))

    def exit(self) -> Chain:
        return _sizes(self.stack.exit())


def _sizes(chain: Chain) -> Chain:
    return tuple(factor if isinstance(factor, IndexMap) else factor.to(torch.float64).abs() for factor in chain)


@dataclass(frozen=True, eq=False)
class Joint:
    """States of two stacks at one cut, in step. `rows` carry all combinations that inputs and paths can give.

    tokens=False: a factor of the joint reachability Gramian, so that norms over the rows are norms over all paths and
    inputs. tokens=True: `anchor` (one row) and `rows` (differences) span what one-hot tokens reach.
    """

    rows: tuple[Tensor, Tensor]
    anchor: tuple[Tensor, Tensor] | None

    @classmethod
    def of(cls, first: Tensor, second: Tensor, tokens: bool) -> "Joint":
        if not tokens:
            return cls(_shrunk(first, second), None)
        means = (first.mean(0, keepdim=True), second.mean(0, keepdim=True))
        return cls(_shrunk(first - means[0], second - means[1]), means)

    def all(self) -> tuple[Tensor, Tensor]:
        """Every row: the anchor, where there is one, first."""
        if self.anchor is None:
            return self.rows
        return torch.cat([self.anchor[0], self.rows[0]]), torch.cat([self.anchor[1], self.rows[1]])

    def step(self, stacks: tuple[Stack, Stack], layer: int, groups: tuple[Groups, Groups], residual: bool) -> "Joint":
        """Behind one layer whose heads act in groups: groups[0][i] of the first as groups[1][i] of the second."""

        def moved(rows: Tensor, stack: Stack, group: Sequence[int]) -> Tensor:
            total = rows.new_zeros(rows.shape)
            parts = [times(rows, stack.mover(layer, head)) for head in group]
            return torch.stack(parts).sum(0) if parts else total

        def branches(side: int, rows: Tensor) -> list[Tensor]:
            return ([rows] if residual else []) + [moved(rows, stacks[side], group) for group in groups[side]]

        first, second = (branches(side, rows) for side, rows in enumerate(self.rows))
        anchor = None
        if self.anchor is not None:
            sums = [torch.stack(branches(side, rows)).sum(0) for side, rows in enumerate(self.anchor)]
            anchor = (sums[0], sums[1])
        return Joint(_shrunk(torch.cat(first), torch.cat(second)), anchor)


def _shrunk(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    both = compress(torch.cat([first, second], dim=1))
    return both[:, : first.shape[1]], both[:, first.shape[1] :]


@dataclass(frozen=True, eq=False)
class Scores:
    """Queries and keys that rows show to every head: (heads, planes, rows, channels).

    Rotary positions turn each plane of channels on its own, so a plane counts as one complex channel; else there is one
    plane with d_head real channels. What the softmax sees of two rows is the sum over planes of q k^H (turned).
    """

    query: Tensor
    key: Tensor
    rounding: Tensor  # (heads,), what every score may be off by, in the Frobenius norm over pairs of rows

    @classmethod
    def of(cls, rows: Tensor, stack: Stack, layer: int, spec: TargetSpec) -> "Scores":
        weights = precede(stack.reader(layer), None)
        both = (rows @ weights).unflatten(-1, (2, spec.heads, spec.d_head)).movedim(0, -2)
        sizes = weights.unflatten(-1, (2, spec.heads, spec.d_head)).square().sum((0, -1)).sqrt()  # (2, heads)
        rounding = CANCELLED * (layer + 1) * rows.norm() ** 2 * sizes[0] * sizes[1]
        if spec.positions == "rotary":
            half = spec.d_head // 2
            both = torch.complex(both[..., :half], both[..., half:]).mT.unsqueeze(-1)  # (2, heads, planes, rows, 1)
        else:
            both = both.unsqueeze(-3)
        return cls(both[0], both[1], rounding)

    @property
    def size(self) -> Tensor:
        """|q| |k| of every head, in the Frobenius norm over rows: (heads,)."""
        norms: Tensor = self.query.flatten(1).norm(dim=1) * self.key.flatten(1).norm(dim=1)
        return norms

    def gap(self, head: int, other: "Scores", at: int) -> tuple[float, float]:
        """Norms over all pairs of rows: of the difference of two heads' scores, and of the larger of the two.

        Formed from triangular factors of [q, q'] and [k, k'], so no rows x rows matrix is needed.
        """
        one, two = self.query.shape[-1], other.query.shape[-1]
        queries = _triangle(torch.cat([self.query[head], other.query[at]], dim=-1))
        keys = _triangle(torch.cat([self.key[head], other.key[at]], dim=-1))
        mine = queries[..., :one] @ keys[..., :one].mH
        theirs = queries[..., one:] @ keys[..., one:].mH
        assert queries.shape[-1] == one + two
        return float((mine - theirs).norm()), max(float(mine.norm()), float(theirs.norm()))


def _triangle(rows: Tensor) -> Tensor:
    triangle: Tensor = torch.linalg.qr(rows, mode="r").R
    return triangle


def readout_gap(one: Subject, two: Subject) -> float:
    """The largest change of any kind of read-out column over all paths and inputs, relative to that column of `one`.

    Relative to |T| |w| for a column T w that cancels down to rounding.
    """
    joint, worst = Joint.of(one.start, two.start, tokens=False), 0.0
    alone = [[head] for head in range(one.spec.heads)]
    for layer in range(one.spec.layers + 1):
        last = layer == one.spec.layers
        chains = [s.stack.exit() if last else s.stack.reader(layer) for s in (one, two)]
        mine, theirs = (times(rows, chain) for rows, chain in zip(joint.all(), chains))
        change, size = (mine - theirs).norm(dim=0), mine.norm(dim=0)
        whole = joint.rows[0].norm() * precede(chains[0], None).norm(dim=0)
        size = torch.where(size > CANCELLED * (layer + 1) * whole, size, whole)
        worst = peak(worst, float(torch.where(change == 0, change, change / size).max()))
        if not last:
            joint = joint.step((one.stack, two.stack), layer, (alone, alone), one.spec.residual)
    return worst


def token_gap(one: Subject, two: Subject) -> float:
    """The same for one-hot tokens: scores of every head over all pairs of paths, relative to |q| |k|, and outputs.

    Scores that cancel down to rounding on both sides count as equal.
    """
    joint, worst = Joint.of(one.start, two.start, tokens=True), 0.0
    alone = [[head] for head in range(one.spec.heads)]
    for layer in range(one.spec.layers):
        pair = [Scores.of(rows, s.stack, layer, s.spec) for rows, s in zip(joint.all(), (one, two))]
        for head in range(one.spec.heads):
            gap, _ = pair[0].gap(head, pair[1], head)
            size = max(float(scores.size[head]) for scores in pair)
            if size > max(float(scores.rounding[head]) for scores in pair):
                worst = peak(worst, gap / size)
        joint = joint.step((one.stack, two.stack), layer, (alone, alone), one.spec.residual)
    mine, theirs = (times(rows, s.stack.exit()) for rows, s in zip(joint.all(), (one, two)))
    change = float((mine - theirs).norm())
    return peak(worst, change / float(mine.norm()) if change else 0.0)
