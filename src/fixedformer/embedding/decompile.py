"""The converse of universality: every program of an attention-only machine is an ordinary transformer of small width.

decompile reads a program back as that transformer; shrink does the same for a target, without a machine in between.
Statements and proofs: docs/theory/decompile.md.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fixedformer.attention import Mask
from fixedformer.capacity import require_memory
from fixedformer.certificate import peak
from fixedformer.embedding.distil import Agreement, DistilStep, distil, measure
from fixedformer.embedding.hankel import (
    EPS,
    ROUNDING,
    Futures,
    ReadoutFutures,
    StateFutures,
    column_scales,
    probe,
    show,
)
from fixedformer.embedding.machine import Machine
from fixedformer.embedding.program import Program
from fixedformer.embedding.reach import Subject, readout_gap, token_gap
from fixedformer.embedding.realise import Cut, Layered, fit_tokens, realise
from fixedformer.embedding.states import Data, mask_of, state_factor
from fixedformer.embedding.tree import PathTree
from fixedformer.embedding.truncate import Truncation, truncate
from fixedformer.errors import SpecError
from fixedformer.inputs import finite
from fixedformer.target import Card, Target

EXACT = 1e-5  # relative: rounding, of float32 programs too

Progress = Callable[[DistilStep], None]


@dataclass(frozen=True, eq=False)
class DecompileReport:
    """What decompiling or shrinking found and did.

    source_width: of the machine or target that was read. cuts: what was decided at every cut 0..L, exactly.
    exact_width: of the narrowest equal; width: of the result, less when truncated. value_widths: rank of every head's
    value map, by layer (exact); where it exceeds d_head the result's d_value does too. gauge: "any" (equal read-outs,
    so equal for all inputs) or "tokens" (equal for one-hot tokens). error: of the exact step, the largest change of any
    kind of read-out column over all paths, relative to that column (for the tokens gauge of scores and outputs, all
    pairs of paths). truncation, agreement, distilled: None, None, 0 unless asked for; agreement is with the program, on
    the data given.
    """

    source_width: int
    cuts: tuple[Cut, ...]
    exact_width: int
    width: int
    value_widths: tuple[tuple[int, ...], ...]
    d_head: int
    gauge: Literal["any", "tokens"]
    error: float
    truncation: Truncation | None
    agreement: Agreement | None
    distilled: int
    seconds: float

    @property
    def ranks(self) -> tuple[int, ...]:
        """Rank of the Hankel matrix at every cut."""
        return tuple(cut.rank for cut in self.cuts)

    @property
    def d_value(self) -> int:
        """The widest value that the exact result needs."""
        return max(width for layer in self.value_widths for width in layer)

    def __str__(self) -> str:
        exact = self.error <= EXACT
        how = "exactly" if exact else f"but for {self.error:.1e}, which the tolerance allowed"
        lines = [f"width        {self.source_width} -> {self.exact_width}"
                 + (f" {how} -> {self.width} truncated" if self.truncation else f", {how}")]  # fmt: skip
        for at, cut in enumerate(self.cuts):
            kept = "nothing" if cut.smallest_kept is None else f"{cut.smallest_kept:.1e}"
            dropped = "nothing" if cut.largest_dropped is None else f"{cut.largest_dropped:.1e}"
            lines.append(f"cut {at}        rank {cut.rank}, smallest kept {kept}, tolerance {cut.tolerance:.1e}, "
                         f"largest dropped {dropped}")  # fmt: skip
        values = f"value width  {self.d_value}"
        if self.d_value > self.d_head:
            values += f", wider than queries and keys ({self.d_head}): no target with d_value = d_head shows the same"
        which = "equal for one-hot tokens only" if self.gauge == "tokens" else "equal for all inputs"
        which = which if exact else "so not equal: give a smaller tolerance"
        lines += [values, f"error        {self.error:.1e} before any truncation, relative; {which}"]
        if self.truncation is not None:
            cut_off = self.truncation
            bound = "no bound proven" if cut_off.bound is None else f"bound {cut_off.bound:.3g}"
            lines.append(f"truncation   read-outs moved by {cut_off.error:.3g} of {cut_off.size:.3g} ({bound}), "
                         f"{cut_off.weighting} weights")  # fmt: skip
        if self.distilled:
            lines.append(f"distilled    {self.distilled} steps")
        if self.agreement is not None:
            lines.append(f"agreement    {self.agreement}")
        return "\n".join(lines)


class Decompiled(Target):
    """A target that knows how it was found: `report`. Files keep the target, not the report."""

    report: DecompileReport

    def __init__(self, target: Target, report: DecompileReport) -> None:
        super().__init__(target.spec, **target.weights.named(), card=target.card)
        object.__setattr__(self, "report", report)


@dataclass(frozen=True, eq=False)
class _Wish:
    """Options that `decompile` and `shrink` share; their docstrings say what each is."""

    width: int | None
    data: Any
    where: Any
    mask: Mask | Literal["card"]
    tokens: bool
    tolerance: float | None
    steps: int
    rate: float
    seed: int
    progress: Progress | None

    def __post_init__(self) -> None:
        if self.width is not None and (not isinstance(self.width, int) or self.width < 1):
            raise SpecError(
                f"width must be a whole number of at least 1, or None for the exact one, got {self.width!r}"
            )
        if self.tolerance is not None and not 0 <= self.tolerance < 1:
            raise SpecError(f"tolerance is relative to the largest singular value, in [0, 1), got {self.tolerance}")
        if self.steps < 0:
            raise SpecError(f"steps must not be negative, got {self.steps}")
        if self.data is None and (self.steps or self.where is not None):
            raise SpecError("distillation steps and `where` speak of data; pass data=")


def decompile(
    machine: Machine,
    program: Program,
    width: int | None = None,
    data: Any = None,
    *,
    where: Any = None,
    mask: Mask | Literal["card"] = "card",
    tokens: bool = False,
    tolerance: float | None = None,
    steps: int = 0,
    rate: float = 1e-3,
    seed: int = 0,
    progress: Progress | None = None,
) -> Decompiled:
    """The narrowest transformer that computes what `program` makes `machine` compute: same attention, same outputs.

    Any machine of this family and any width, compiled or trained program, its trained unembedding included. Returns a
    Target in the program's precision, with `.report` (ranks, tolerances, gaps, widths; print it).

    width: None for the exact one; else states of at most `width` dimensions: the best by the read-outs' norm, or, with
    `data`, by what happens on it (token ids (..., tokens), vectors (..., tokens, d_in), or a list of these).
    where: bool (..., tokens), the places whose outputs count; mask: for the data, the card's unless given.
    steps: so many steps of distillation on the data afterwards (`rate`, `seed`; `progress` gets each record).
    tokens: be exact for one-hot tokens only, which removes up to B^l - 1 dimensions at cut l.
    tolerance: singular values below tolerance times the largest of their cut count as zero; None for what the program's
    own rounding explains.

    Raises SpecError for a program of another machine, NaN, a width below 1, distillation without data; CapacityError
    where memory would not do. MLPs and normalisation have no place in a TargetSpec: path space, and with it this
    theorem, ends at the first nonlinearity of the state.
    """
    began = time.perf_counter()
    wish = _Wish(width, data, where, mask, tokens, tolerance, steps, rate, seed, progress)
    subject = Subject.of((machine, program))
    futures, shown, unsure = _futures(machine, program)
    layered, cuts = realise(futures, tolerance)
    if shown is None or unsure is None:
        error = readout_gap(subject, _as_subject(layered, subject))
    else:
        error = _column_gap(shown, unsure, show(layered, layered.embed, machine.tree), machine.tree)
    return _finish(subject, layered, cuts, error, program.card, wish, began)


def shrink(
    target: Target,
    width: int | None = None,
    data: Any = None,
    *,
    where: Any = None,
    mask: Mask | Literal["card"] = "card",
    tokens: bool = False,
    tolerance: float | None = None,
    steps: int = 0,
    rate: float = 1e-3,
    seed: int = 0,
    progress: Progress | None = None,
) -> Decompiled:
    """The narrowest target with the same attention and outputs; options, result and errors as for `decompile`.

    No program is built: what states can be (left of a cut) and what they still show (right of it) are Gramians of the
    target's own width. Cost and memory are polynomial in widths and depth; the program has heads^layers columns.
    """
    began = time.perf_counter()
    wish = _Wish(width, data, where, mask, tokens, tolerance, steps, rate, seed, progress)
    subject = Subject.of(target)
    layered, cuts = realise(StateFutures(subject.stack, subject.start, PathTree.of(target.spec)), tolerance)
    error = readout_gap(subject, _as_subject(layered, subject))
    return _finish(subject, layered, cuts, error, target.card, wish, began)


def hankel_spectrum(
    source: Machine | Target,
    program: Program | None = None,
    data: Any = None,
    *,
    mask: Mask | Literal["card"] = "card",
) -> tuple[Tensor, ...]:
    """Singular values of the Hankel matrix at every cut 0..L, largest first: the width that each layer really uses.

    source: a machine with its program, or a target alone. Without data all paths and inputs count alike (the Frobenius
    norm of the read-outs); with data and mask (as for `decompile`) the states that occur there, per token.
    Values that the rounding of the program explains are left out. Raises SpecError as `decompile` does.
    """
    subject = Subject.of(source if program is None else (source, program))
    tree = PathTree.of(subject.spec)
    if isinstance(source, Machine) and program is not None:
        layered, _ = realise(_futures(source, program)[0])
    else:
        layered, _ = realise(StateFutures(subject.stack, subject.start, tree))
    futures = StateFutures(layered, layered.embed, tree, scaled=False)
    reach = list(futures.reach)
    if data is not None:
        seen = Data.of(subject.spec, data, None, mask_of(mask, subject.card), layered.embed.device)
        reach = [state_factor(layered, subject.spec, seen, cut) for cut in range(tree.layers + 1)]
    spectra = []
    for factor, observe in zip(reach, futures.observe):
        values = torch.linalg.svdvals(factor @ observe)
        spectra.append(values[values > ROUNDING * EPS * (tree.layers + 1) * factor.norm() * observe.norm()])
    return tuple(spectra)


def _futures(machine: Machine, program: Program) -> tuple[Futures, Tensor | None, Tensor | None]:
    """Hankel rows of a program, as read-outs (then E R_all and the read-outs of its roundings) or, where these would
    outgrow it, as machine states."""
    embedding = finite(program.embedding, "the program's embedding").to(torch.float64)
    if program.unembedding is not None:
        finite(program.unembedding, "the program's unembedding")
    stack, tree, noise = machine.stack(program), machine.tree, probe(program.embedding)
    remedy = "take a smaller spec: nothing narrower than the paths is known of a program before it is read"
    if machine.spec.d_in * tree.count > 4 * machine.width**2:  # a handful of m x m factors are smaller
        require_memory(
            8 * machine.width**2 * (3 * machine.spec.layers + 8), f"reading a program of {machine!r}", remedy
        )
        return StateFutures(stack, embedding, tree, noise=noise), None, None
    leaves = (machine.spec.d_in + len(noise)) * tree.branching**tree.layers * machine.width
    require_memory(8 * (3 * leaves + 6 * machine.spec.d_in * tree.count), f"the read-outs of {machine!r}", remedy)
    whole = show(stack, torch.cat([embedding, noise]), tree)
    shown, unsure = whole[: len(embedding)], whole[len(embedding) :]
    return ReadoutFutures(shown, unsure, tree), shown, unsure


def _column_gap(shown: Tensor, unsure: Tensor, again: Tensor, tree: PathTree) -> float:
    """The largest change of any kind of read-out column over all paths and inputs, relative to that column.

    A column of rounding noise (hankel.column_scales) is judged by the others of its depth.
    """
    worst = 0.0
    for depth in range(tree.layers + 1):
        columns = tree.columns(depth).to(shown.device)
        change = (shown - again)[:, columns].square().sum((0, 1)).sqrt()
        size, noise = (rows[:, columns].square().sum((0, 1)).sqrt() for rows in (shown, unsure))
        counts = column_scales(size, ROUNDING * (tree.layers + 1) * noise, tree, depth) > 0
        size = torch.where(counts, size, size.max())
        worst = peak(worst, float(torch.where(change == 0, change, change / size).max()))
    return worst


def _as_subject(layered: Layered, like: Subject) -> Subject:
    """In float64, whatever precision the result will be stored in: what is measured here is the method's error."""
    target = layered.target(like.spec, torch.float64)
    return Subject(like.spec, layered, layered.embed, torch.float64, target)


def _finish(
    subject: Subject, layered: Layered, cuts: tuple[Cut, ...], error: float, card: Card, wish: _Wish, began: float
) -> Decompiled:
    """From the exact narrow network to what was asked for."""
    spec, tree = subject.spec, PathTree.of(subject.spec)
    device = layered.embed.device
    if wish.tokens:
        exact = _as_subject(layered, subject)
        fitted = fit_tokens(layered, spec.residual)
        layered, cuts = realise(StateFutures(fitted, fitted.embed, tree), wish.tolerance)
        error = peak(error, token_gap(exact, _as_subject(layered, subject)))
    full = layered.target(spec, subject.dtype, card)
    exact_width, value_widths = full.weights.d_model, layered.value_widths
    data = None
    if wish.data is not None:
        data = Data.of(spec, wish.data, wish.where, mask_of(wish.mask, card), device)
    truncation = None
    if wish.width is not None and wish.width < exact_width:
        layered, truncation = truncate(layered, spec, wish.width, data)
        layered, _ = realise(StateFutures(layered, layered.embed, tree))  # value maps of full rank again
    result = layered.target(spec, subject.dtype, card)
    if wish.steps and data is not None:
        for record, student in distil(result, full, data, steps=wish.steps, rate=wish.rate, seed=wish.seed):
            result = student
            if wish.progress is not None:
                wish.progress(record)
    report = DecompileReport(
        source_width=subject.width,
        cuts=cuts,
        exact_width=exact_width,
        width=result.weights.d_model,
        value_widths=value_widths,
        d_head=spec.d_head,
        gauge="tokens" if wish.tokens else "any",
        error=error,
        truncation=truncation,
        agreement=None if data is None else measure(result, full, data),
        distilled=wish.steps,
        seconds=time.perf_counter() - began,
    )
    return Decompiled(result, report)
