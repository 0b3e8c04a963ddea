"""Do two programs, or targets, say the same? Equality up to what no input can see."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fixedformer.attention import Mask
from fixedformer.certificate import peak
from fixedformer.embedding.hankel import EPS, ROUNDING, StateFutures, precede, times
from fixedformer.embedding.reach import Joint, Scores, Subject
from fixedformer.embedding.tree import PathTree
from fixedformer.errors import SpecError

LENGTHS = (1, 2, 3, 7, 16)
BATCH = 16


@dataclass(frozen=True, eq=False)
class Comparison:
    """equal: shown, for all inputs (or all token sequences), lengths and masks; a Comparison is true when it is.

    reason: one sentence. gap: the largest relative difference of scores or outputs met, tolerance: what was allowed.
    heads: for every layer, which heads of the first do what which heads of the second do. differs_on: an input with its
    mask on which the outputs differ by `difference`, relative to the larger of the two; None: none needed or found.
    """

    equal: bool
    reason: str
    gap: float
    tolerance: float
    heads: tuple[tuple[tuple[tuple[int, ...], tuple[int, ...]], ...], ...]
    differs_on: tuple[Tensor, Mask] | None = None
    difference: float | None = None

    def __bool__(self) -> bool:
        return self.equal

    def __str__(self) -> str:
        if self.equal:
            return f"equal: {self.reason} (largest relative difference {self.gap:.1e}, allowed {self.tolerance:.1e})"
        found = "no input on which they differ was found"
        if self.differs_on is not None:
            X, mask = self.differs_on
            found = f"outputs differ by {self.difference:.1e} (relative) on {X.tolist()}, mask {mask or 'none'}"
        return f"not shown equal: {self.reason}; {found}"


class _Unequal(Exception):
    """Carries the reason out of the layer-by-layer comparison."""


def same_program(
    first: Any, second: Any, tokens: bool = False, tolerance: float | None = None, seed: int = 0
) -> Comparison:
    """Compare two of: Target, (machine, program). They may differ in widths, machines, head order and head count.

    Equal means: heads can be matched, layer by layer, so that matched heads have the same scores on all pairs of paths
    and inputs, carry on the same, and the outputs along all paths agree (up to `tolerance`, relative; None for half the
    digits of the coarser of the two). Rotations of states, of queries with keys and of values cannot hide that, nor can
    heads split in two or heads that do nothing. tokens: only one-hot tokens count as inputs, which equates more.

    The converse is not claimed: networks may compute the same by scores that differ (a constant added to all keys
    leaves softmax as it is). So the other answer is "not shown equal", with an input where outputs differ if a search
    over random inputs (from `seed`) finds one. Raises SpecError where inputs or outputs have different widths.
    """
    one, two = Subject.of(first), Subject.of(second)
    for name in ("d_in", "d_out"):
        if getattr(one.spec, name) != getattr(two.spec, name):
            raise SpecError(f"{name} is {getattr(one.spec, name)} and {getattr(two.spec, name)}: no input or output "
                            "can be compared")  # fmt: skip
    limit = max(torch.finfo(kind).eps for kind in (one.dtype, two.dtype)) ** 0.5 if tolerance is None else tolerance
    found = _Match(one, two, tokens, limit)
    try:
        found.run()
    except _Unequal as reason:
        where, size = _search(one, two, tokens, limit, seed)
        return Comparison(False, str(reason), found.gap, limit, tuple(found.heads), where, size)
    scope = "token sequences" if tokens else "inputs"
    return Comparison(
        True, f"all scores and outputs agree, for all {scope}, lengths and masks", found.gap, limit, tuple(found.heads)
    )


class _Match:
    """The comparison in progress: joint states, layer by layer."""

    def __init__(self, one: Subject, two: Subject, tokens: bool, tolerance: float) -> None:
        self.one, self.two, self.tokens, self.tolerance = one, two, tokens, tolerance
        self.gap = 0.0
        self.heads: list[tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]] = []

    def run(self) -> None:
        one, two = self.one.spec, self.two.spec
        for name in ("layers", "residual", "positions"):
            if getattr(one, name) != getattr(two, name):
                raise _Unequal(f"{name} is {getattr(one, name)} and {getattr(two, name)}")
        if one.positions == "rotary" and (one.rotary_base, one.d_head) != (two.rotary_base, two.d_head):
            raise _Unequal("rotary positions turn at different rates")
        joint = Joint.of(self.one.start, self.two.start, self.tokens)
        stacks = (self.one.stack, self.two.stack)
        for layer in range(one.layers):
            pairs = self._pair(joint, layer)
            self.heads.append(tuple((tuple(a), tuple(b)) for a, b in pairs))
            groups = ([a for a, _ in pairs], [b for _, b in pairs])
            joint = joint.step(stacks, layer, groups, one.residual)
        shown = [times(rows, stack.exit()) for rows, stack in zip(joint.all(), stacks)]
        size = max(float(part.norm()) for part in shown)
        parts = [rows.norm() * precede(stack.exit(), None).norm() for rows, stack in zip(joint.all(), stacks)]
        change = float((shown[0] - shown[1]).norm())
        if size <= ROUNDING * EPS * float(max(parts)):
            return  # all outputs cancel down to rounding
        self.gap = peak(self.gap, change / size)
        if change > self.tolerance * size:
            raise _Unequal(f"outputs along some path differ by {change / size:.1e}, relative to all paths together")

    def _pair(self, joint: Joint, layer: int) -> list[tuple[list[int], list[int]]]:
        """Groups of heads with equal scores, first beside second; heads without effect are left out."""
        rows = joint.all()
        subjects = (self.one, self.two)
        scores = [Scores.of(r, s.stack, layer, s.spec) for r, s in zip(rows, subjects)]
        groups = [self._groups(score) for score in scores]
        pairs, left = [], list(groups[1])
        for group in groups[0]:
            match = next((g for g in left if self._equal(scores[0], group[0], scores[1], g[0])), None)
            if match is not None:
                left.remove(match)
                pairs.append((group, match))
            elif not _dead(self.one, rows[0], layer, group):
                raise _Unequal(f"no head of the second scores as head {group[0] + 1} of layer {layer + 1} of the first")
        for group in left:
            if not _dead(self.two, rows[1], layer, group):
                raise _Unequal(f"no head of the first scores as head {group[0] + 1} of layer {layer + 1} of the second")
        return pairs

    def _groups(self, scores: Scores) -> list[list[int]]:
        groups: list[list[int]] = []
        for head in range(scores.query.shape[0]):
            home = next((g for g in groups if self._equal(scores, g[0], scores, head)), None)
            if home is None:
                groups.append([head])
            else:
                home.append(head)
        return groups

    def _equal(self, scores: Scores, head: int, others: Scores, at: int) -> bool:
        gap, size = scores.gap(head, others, at)
        floor = float(max(scores.rounding[head], others.rounding[at]))
        if size <= floor:
            return True  # both are nothing but rounding
        if gap <= self.tolerance * size:
            self.gap = peak(self.gap, gap / size)
            return True
        return False


def _dead(subject: Subject, rows: Tensor, layer: int, group: list[int]) -> bool:
    """Nothing later shows what these heads bring."""
    futures = StateFutures(subject.stack, subject.start, PathTree.of(subject.spec), scaled=False)
    brought = torch.stack([times(rows, subject.stack.mover(layer, head)) for head in group]).sum(0)
    observe = futures.observe[layer + 1]
    return float((brought @ observe).norm()) <= futures.tolerance(layer + 1) + ROUNDING * EPS * float(
        rows.norm() * observe.norm()
    )


def _search(
    one: Subject, two: Subject, tokens: bool, tolerance: float, seed: int
) -> tuple[tuple[Tensor, Mask] | None, float | None]:
    """The random input on which outputs differ most, if by more than the tolerance."""
    generator = torch.Generator().manual_seed(seed)
    best: tuple[Tensor, Mask] | None = None
    most = tolerance
    for length in LENGTHS:
        cases = [torch.randint(one.spec.d_in, (BATCH, length), generator=generator)]
        if not tokens:
            cases.append(torch.randn(BATCH, length, one.spec.d_in, generator=generator, dtype=torch.float64))
        for X in cases:
            for mask in (None, "causal"):
                mine, theirs = (subject.run(X, mask).to(torch.float64) for subject in (one, two))
                size = max(float(mine.abs().max()), float(theirs.abs().max()))
                change = (mine - theirs).abs().flatten(1).amax(1)
                if size and float(change.max()) / size > most:
                    most = float(change.max()) / size
                    best = (X[int(change.argmax())], mask)
    return best, most if best is not None else None
