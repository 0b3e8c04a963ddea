"""The last Newton steps with many digits: the schedule exists exactly, and only float64 keeps us from it.

The residual comes from a roll-out in flint's numbers, the derivative from float64, the correction goes to durations
held as pairs of floats. A derivative that is right to a few digits gains those digits in every step.
"""

from dataclasses import dataclass

import numpy as np

from fixedformer.schedule import words
from fixedformer.schedule.enclose import EXTENDED_BITS, residual, roll_out
from fixedformer.schedule.field import Array
from fixedformer.schedule.finish import end_jacobian, shortest_change
from fixedformer.schedule.maps import rollout
from fixedformer.schedule.problem import Problem
from fixedformer.schedule.relax import duration_scale

STEPS = 8
ENOUGH = 1e-20
NEAR, FAR = 1e-1, 1e14
"""Worth trying: float64 is near already, and its derivative is not yet noise at this amplification."""


@dataclass(frozen=True)
class Refined:
    """Durations as pairs (words, K), and the error of the roll-out that holds them exactly."""

    durations: Array
    remainders: Array
    error: float
    steps: int


def worthwhile(error: float, amplification: float) -> bool:
    """Whether extended precision could help: a finite, small error at an amplification that float64 can follow."""
    return bool(error < NEAR and amplification < FAR)


def refine(problem: Problem, durations: Array) -> Refined:
    """Newton steps of least norm with residuals to 57 digits; the best of at most 8."""
    X, _ = problem.flat
    size, settings = X.shape[1], problem.settings
    order = np.tile(words.order_of(settings.half), len(durations))
    high, low = durations, np.zeros_like(durations)
    best = Refined(high, low, float("inf"), 0)
    for step in range(STEPS + 1):
        ends = roll_out(
            problem.X,
            order,
            high.reshape(-1),
            low.reshape(-1),
            settings.substeps,
            problem.scores,
            problem.values,
            problem.causal,
            EXTENDED_BITS,
            rigorous=False,
        )
        gap = residual(ends, problem.Y, EXTENDED_BITS)
        error = float(np.abs(gap).max())
        if error < best.error:
            best = Refined(high, low, error, step)
        if error < ENOUGH or error > 2 * best.error:
            break
        nodes, _ = rollout(problem.maps, X, high)
        _, tangents = problem.maps(nodes, high, "all")
        jacobian = end_jacobian(tangents[..., :size], tangents[..., size:])
        change = shortest_change(jacobian, gap, duration_scale(high, settings.largest))
        high, low = add(high, low, change)
    return best


def add(high: Array, low: Array, change: Array) -> tuple[Array, Array]:
    """(high + low) + change as a pair: the sum's rounding error is kept (two-sum, Knuth)."""
    total = high + change
    back = total - high
    error = (high - (total - back)) + (change - back) + low
    top = total + error
    return top, error - (top - total)
