"""Finite-depth roll-outs in flint's ball arithmetic: enclosures that prove, and midpoints that are merely precise.

Weights, durations and inputs are floats, so they are exact balls; every operation rounds outwards. If the enclosure of
the output lies within a tolerance of Y, that is a proof for these inputs, whatever float64 would have said.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from flint import arb, arb_mat, ctx

from fixedformer.schedule.field import Array

EXTENDED_BITS = 192
"""Midpoints only: 57 digits, so an amplification of 1e30 leaves 27."""


@dataclass(frozen=True)
class Balls:
    """Outputs as text-free numbers: float64 midpoints, and radii around them that include the midpoints' rounding."""

    middle: Array  # (sequences, tokens, d)
    radius: Array  # (sequences, tokens, d)
    bits: int


def roll_out(
    X: Array,
    order: Array,
    durations: Array,
    remainders: Array,
    substeps: int,
    scores: Array,
    values: Array,
    causal: bool,
    bits: int,
    rigorous: bool,
) -> list[Any]:
    """End points of X (sequences, tokens, d) as arb matrices. rigorous: keep the balls; otherwise their midpoints.

    A segment's eta is (duration + remainder) / substeps, exactly.
    """
    with ctx.workprec(bits):
        A, V = ([matrix(block) for block in both] for both in (scores, values))
        states = [matrix(sequence) for sequence in X]
        for block, high, low in zip(order.tolist(), durations.tolist(), remainders.tolist()):
            step = V[block] * ((arb(high) + arb(low)) / substeps)
            for _ in range(substeps):
                states = [residual_step(x, A[block], step, causal) for x in states]
                if not rigorous:
                    states = [middle_of(x) for x in states]
        return states


def residual_step(x: Any, scores: Any, step: Any, causal: bool) -> Any:
    """x + softmax(x A x^T) x (eta V) in balls."""
    tokens = x.nrows()
    raw = (x * scores * x.transpose()).tolist()
    weights = []
    for i, row in enumerate(raw):
        top = max(range(tokens if not causal else i + 1), key=lambda j: float(row[j].mid()))
        seen = [(row[j] - row[top]).exp() if not causal or j <= i else arb(0) for j in range(tokens)]
        total = sum(seen, arb(0))
        weights.append([w / total for w in seen])
    return x + arb_mat(weights) * x * step


def matrix(values: Array) -> Any:
    """Floats as exact balls."""
    return arb_mat([[arb(v) for v in row] for row in values.tolist()])


def middle_of(x: Any) -> Any:
    return arb_mat([[v.mid() for v in row] for row in x.tolist()])


def as_balls(states: list[Any], bits: int) -> Balls:
    """Midpoints as float64, with radii that cover the rounding of the midpoints too."""
    rows = [x.tolist() for x in states]
    middle = np.array([[[float(v.mid()) for v in row] for row in x] for x in rows])
    with ctx.workprec(bits):
        radius = np.array(
            [
                [[float(abs(v - arb(m)).upper()) for v, m in zip(row, ms)] for row, ms in zip(x, mid)]
                for x, mid in zip(rows, middle.tolist())
            ]
        )
    return Balls(middle, np.nextafter(radius, np.inf), bits)


def distance(states: list[Any], Y: Array, bits: int) -> float:
    """An upper bound of max |end - Y| over everything in the balls; infinity where a ball is no longer finite."""
    with ctx.workprec(bits):
        worst = 0.0
        for x, y in zip(states, Y):
            for row, targets in zip(x.tolist(), y.tolist()):
                for v, target in zip(row, targets):
                    if not v.is_finite():
                        return float("inf")
                    worst = max(worst, float(np.nextafter(float(abs(v - arb(target)).upper()), np.inf)))
        return worst


def residual(states: list[Any], Y: Array, bits: int) -> Array:
    """Y - end, rounded to float64 after the subtraction: what a refining Newton step needs."""
    with ctx.workprec(bits):
        return np.array(
            [
                [[float((arb(t) - v).mid()) for v, t in zip(row, ts)] for row, ts in zip(x.tolist(), y.tolist())]
                for x, y in zip(states, Y)
            ]
        )
