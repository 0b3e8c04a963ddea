"""Certificates of schedules: run again with another integrator, run backwards, and, on request, prove.

No check here uses what the search measured. Finite depth: residual steps by the definition (`field.py`, NumPy), beside
the compiled roll-out. Continuous: scipy's DOP853 at rtol 1e-13, never the Runge-Kutta steps that the search used.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from fixedformer.certificate import Certificate, Check
from fixedformer.errors import SpecError
from fixedformer.schedule import runner
from fixedformer.schedule.field import Array
from fixedformer.schedule.program import Schedule

if TYPE_CHECKING:
    from fixedformer.schedule.blocks import FrozenBlocks

BACK = 1e-6
"""Running backwards must return X to this, where both amplifications are below 1e6."""
LOUD = 1e6
FIRST_BITS = 256
UNIT = np.finfo(np.float64).eps


def certify(
    blocks: FrozenBlocks,
    schedule: Schedule,
    X: Array,
    Y: Array,
    tolerance: float | None = None,
    rigorous: bool = False,
    max_bits: int = 16384,
) -> Certificate:
    """The certificate of `FrozenBlocks.certify`; X, Y (sequences, tokens, d)."""
    bound = float(schedule.report.get("tolerance", 1e-8) if tolerance is None else tolerance)
    finite = schedule.mode == "finite"
    cases, scope = len(X), "exhaustive, every sequence given"
    arrays = blocks.arrays
    end = runner.run(arrays, schedule, X, backwards=False, fast=False)
    source = "residual steps in NumPy" if finite else "DOP853, rtol 1e-13"
    checks = [Check("X is carried to Y", bound, largest(end - Y), cases, scope, source)]
    grown, grown_back = measured_amplification(arrays, schedule, X)
    fast = runner.run(arrays, schedule, X, backwards=False, fast=True)
    checks.append(
        Check("the compiled run carries X to Y", bound, largest(fast - Y), cases, scope, "run(engine='fast')")
    )
    if finite:
        limit = float(schedule.report.get("eta_max") or schedule.largest_eta)
        count = len(schedule.durations)
        checks.append(
            Check("|eta| of every step", limit, schedule.largest_eta, count, "exhaustive, every segment", "eta_max")
        )
    consequences = {}
    if max(grown, grown_back) < LOUD:
        back = undone(arrays, schedule, end)
        checks.append(
            Check("the end, run backwards, is X", BACK, largest(back - X), cases, scope, "amplification < 1e6")
        )
    else:
        consequences["backwards"] = f"not promised at amplifications {grown:.1e} forwards, {grown_back:.1e} backwards"
    if rigorous:
        check, sentence = proof(arrays, schedule, X, Y, bound, max_bits)
        checks.append(check)
        consequences["proof"] = sentence
    return Certificate(
        subject=f"schedule of {len(schedule.durations)} segments for {blocks!r}",
        checks=tuple(checks),
        consequences=consequences,
        context={
            "fingerprint": schedule.machine_fingerprint,
            "mode": schedule.mode,
            "amplification": grown if np.isfinite(grown) else None,
            "amplification backwards": grown_back if np.isfinite(grown_back) else None,
            "depth": schedule.depth if finite else None,
            "duration": schedule.duration,
            "blocks": {"d": blocks.d, "seed": blocks.seed, "scale": blocks.scale, "causal": blocks.causal},
        },
    )


def largest(values: Array) -> float:
    """max |v|, infinity where anything is not finite."""
    return float(np.abs(values).max()) if np.isfinite(values).all() else float("inf")


def undone(arrays: runner.Blocks, schedule: Schedule, end: Array) -> Array:
    """The schedule backwards from its end; NaN where a step could not be undone, so that the check fails."""
    try:
        return runner.run(arrays, schedule, end, backwards=True, fast=True)
    except SpecError:
        return np.full_like(end, np.nan)


def measured_amplification(arrays: runner.Blocks, schedule: Schedule, X: Array) -> tuple[float, float]:
    """max_i |d end / d X_i| and max_i |d X_i / d end|, from derivatives of the compiled run, multiplied out."""
    from fixedformer.schedule.maps import WordMaps, amplification, amplification_back

    finite = schedule.mode == "finite"
    steps = schedule.substeps if finite else runner.FLOW_STEPS // 16
    state, products = X.reshape(1, len(X), -1), []
    for start in range(0, len(schedule.durations), 16):
        part = slice(start, start + 16)
        maps = WordMaps(
            arrays.scores,
            arrays.values,
            X.shape[1],
            schedule.order[part].astype(np.int64),
            steps,
            finite,
            arrays.causal,
        )
        state, tangents = maps(state, schedule.durations[None, part], "state")
        products.append(tangents[0])
    if not products:
        return 1.0, 1.0
    return amplification(np.stack(products)), amplification_back(np.stack(products))


def proof(
    arrays: runner.Blocks, schedule: Schedule, X: Array, Y: Array, tolerance: float, max_bits: int
) -> tuple[Check, str]:
    """Enclose the finite-depth output with more and more bits until the ball is small or `max_bits` are reached."""
    from fixedformer.schedule.enclose import distance, roll_out

    if schedule.mode != "finite":
        raise SpecError("the rigorous check encloses residual steps; certify a finite-depth schedule")
    if max_bits < FIRST_BITS:
        raise SpecError(f"max_bits must be at least {FIRST_BITS}, got {max_bits}")
    began, bits, worst = time.perf_counter(), FIRST_BITS, float("inf")
    while bits <= max_bits and not worst <= tolerance:
        states = roll_out(
            X,
            schedule.order,
            schedule.durations,
            schedule.remainders,
            schedule.substeps,
            arrays.scores,
            arrays.values,
            arrays.causal,
            bits,
            rigorous=True,
        )
        worst = min(worst, distance(states, Y, bits))
        bits *= 2
    used = bits // 2
    check = Check(
        "X is carried to Y, enclosed", tolerance, worst, len(X), f"proof for these inputs, {used} bits", "flint balls"
    )
    if check.holds:
        what = "exact residual steps with these durations end within the bound of Y: enclosed, so proved"
    else:
        what = f"nothing proved with {used} bits: the enclosure, or the error, is wider than the tolerance"
    return check, f"{what} ({time.perf_counter() - began:.1f} s)"
