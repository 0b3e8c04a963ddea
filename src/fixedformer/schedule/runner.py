"""Running a schedule: compiled, by the definition, backwards, or with many digits."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from fixedformer.errors import SpecError
from fixedformer.schedule.field import Array, adaptive_flow, residual_step, undo_residual_step
from fixedformer.schedule.program import Schedule

FLOW_STEPS = 512
"""Runge-Kutta steps a segment for the flow."""


@dataclass(frozen=True)
class Blocks:
    """A and V of both blocks, (2, d, d), and whether attention is causal."""

    scores: Array
    values: Array
    causal: bool


def run(blocks: Blocks, schedule: Schedule, X: Array, backwards: bool, fast: bool) -> Array:
    """End of X (sequences, tokens, d) under the schedule, or under its inverse."""
    with np.errstate(over="ignore", invalid="ignore"):
        if backwards and schedule.mode == "finite":
            return _undo_fast(blocks, schedule, X) if fast else _undo_definition(blocks, schedule, X)
        order, durations = schedule.order, schedule.durations
        if backwards:
            order, durations = order[::-1], -durations[::-1]
        if not fast:
            return _run_definition(blocks, schedule, order, durations, X)
        ends = _segments(blocks, schedule, order, durations, X)
    if not np.isfinite(ends).all():
        raise SpecError("the states left float64's range; this schedule does not fit these inputs")
    return ends


def trajectory(blocks: Blocks, schedule: Schedule, X: Array, points: int) -> Array:
    """States (points + 1, sequences, tokens, d) at equal shares of the segments; fewer if these are fewer."""
    cuts = np.unique(np.linspace(0, len(schedule.durations), points + 1).astype(int))
    states = [X]
    for start, stop in pairwise(cuts):
        part = slice(start, stop)
        states.append(_segments(blocks, schedule, schedule.order[part], schedule.durations[part], states[-1]))
    return np.stack(states)


def run_extended(blocks: Blocks, schedule: Schedule, X: Array) -> Array:
    """The same with flint's numbers of `EXTENDED_BITS`, durations with their remainders; rounded once, at the end."""
    from fixedformer.schedule.enclose import EXTENDED_BITS, as_balls, roll_out

    states = roll_out(
        X,
        schedule.order,
        schedule.durations,
        schedule.remainders,
        schedule.substeps,
        blocks.scores,
        blocks.values,
        blocks.causal,
        EXTENDED_BITS,
        rigorous=False,
    )
    return as_balls(states, EXTENDED_BITS).middle


def _segments(blocks: Blocks, schedule: Schedule, order: Array, durations: Array, X: Array) -> Array:
    """Some segments, compiled: one word that all sequences share."""
    from fixedformer.schedule.maps import WordMaps

    finite = schedule.mode == "finite"
    steps = schedule.substeps if finite else FLOW_STEPS
    maps = WordMaps(blocks.scores, blocks.values, X.shape[1], order.astype(np.int64), steps, finite, blocks.causal)
    return maps(X.reshape(1, len(X), -1), durations[None])[0].reshape(X.shape)


def _run_definition(blocks: Blocks, schedule: Schedule, order: Array, durations: Array, X: Array) -> Array:
    for block, t in zip(order, durations):
        if schedule.mode == "continuous":
            X = adaptive_flow(X, t, blocks.scores[block], blocks.values[block], blocks.causal)
            continue
        for _ in range(schedule.substeps):
            X = residual_step(X, t / schedule.substeps, blocks.scores[block], blocks.values[block], blocks.causal)
    return X


def _undo_definition(blocks: Blocks, schedule: Schedule, X: Array) -> Array:
    for block, t in zip(schedule.order[::-1], schedule.durations[::-1]):
        for _ in range(schedule.substeps):
            X = undo_residual_step(X, t / schedule.substeps, blocks.scores[block], blocks.values[block], blocks.causal)
    if not np.isfinite(X).all():
        raise SpecError(
            "a residual step could not be undone there; run backwards only from states that the schedule reaches"
        )
    return X


def _undo_fast(blocks: Blocks, schedule: Schedule, X: Array) -> Array:
    from fixedformer.schedule.maps import UNDONE, WordMaps, undo

    order = schedule.order.astype(np.int64)
    maps = WordMaps(
        blocks.scores, blocks.values, X.shape[1], order, schedule.substeps, finite=True, causal=blocks.causal
    )
    states, defect = undo(maps, X.reshape(len(X), -1), schedule.durations[None])
    if not defect <= UNDONE:
        raise SpecError(
            "a residual step could not be undone there; run backwards only from states that the schedule reaches"
        )
    return states.reshape(X.shape)
