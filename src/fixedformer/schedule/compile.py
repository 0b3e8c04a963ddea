"""compile: X, Y -> Schedule. Limits, clock and report around the search of `solve.py`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fixedformer.errors import SpecError
from fixedformer.schedule import refine, words
from fixedformer.schedule.field import Array
from fixedformer.schedule.judge import grown_by, judge
from fixedformer.schedule.problem import Problem, settings_for
from fixedformer.schedule.program import Mode, Schedule
from fixedformer.schedule.relax import Record
from fixedformer.schedule.solve import Search, search, status_of
from fixedformer.schedule.start import begin

if TYPE_CHECKING:
    from fixedformer.schedule.blocks import FrozenBlocks

MODES = ("finite", "continuous")
ATTEMPTS = ((12, 30), (24, 8), (40, 5), (10**9, 3))
"""(largest D, attempts): small problems are tried often, since a try takes a second."""
ITERATIONS = 250
QUIET, LOUD = 1e12, 1e14
"""float64 ends about 1e-15 times the amplification off: below tolerance * QUIET it is not worth lowering any more,
above tolerance * LOUD it must be lowered."""
UNBROKEN = ("join", "shoot", "lead")
"""Steps of phases of a second or so that keep no state of their own: the clock waits for their end."""
SAVE_SECONDS = 20.0
"""Time between checkpoints of a running search."""
LEAST, MOST = 3e2, 1e5
"""Bounds of the amplification that a search aims at; at most 1e5, so that schedules can be run backwards."""


def compile_schedule(
    blocks: FrozenBlocks,
    X: Array,
    Y: Array,
    *,
    tolerance: float,
    mode: Mode,
    eta_max: float,
    max_seconds: float | None,
    max_depth: int | None,
    seed: int,
    attempts: int | None,
    iterations: int | None,
    resume: Search | None,
    progress: Callable[[Record], None] | None,
    checkpoint: Callable[[Search], None] | None,
) -> Schedule:
    """`FrozenBlocks.compile`, after the checks of feasibility."""
    if mode not in MODES:
        raise SpecError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    if not (np.isfinite(tolerance) and tolerance > 0):
        raise SpecError(f"tolerance must be a positive number, got {tolerance}")
    limit = int(ITERATIONS if iterations is None else iterations)
    target = min(max(tolerance * QUIET, LEAST), MOST)
    changes = {"iterations": limit, "target": target, "loud": tolerance * LOUD}
    settings = settings_for(blocks.d, X.size, mode, eta_max, max_depth, **changes)
    tries = next(count for D, count in ATTEMPTS if X.size <= D) if attempts is None else attempts
    if tries < 1 or limit < 1:
        raise SpecError(f"attempts and iterations must be at least 1, got {tries} and {limit}")
    arrays = blocks.arrays
    problem = Problem(arrays.scores, arrays.values, blocks.causal, X, Y, mode, tolerance, seed, tries, settings)
    began = saved = time.perf_counter()
    at = start = _checked(resume, problem)
    try:
        for step, record in search(problem, start):
            at, now = step, time.perf_counter()
            if progress is not None:
                progress(record)
            if at.status != "searching" or record.phase in UNBROKEN:
                continue
            if max_seconds is not None and now - began > max_seconds:
                at = replace(at, status="time is up")
                break
            if checkpoint is not None and now - saved > SAVE_SECONDS:
                saved = now
                checkpoint(at)
    except KeyboardInterrupt:
        if checkpoint is not None:
            checkpoint(at)
        raise
    if at.status != "solved" and checkpoint is not None:
        checkpoint(replace(at, status="searching"))
    return _schedule(blocks, problem, at, eta_max, time.perf_counter() - began)


def _checked(resume: Search | None, problem: Problem) -> Search:
    """The search to go on with; SpecError when it is a search for something else."""
    if resume is None:
        return Search()
    if resume.problem != problem.digest():
        raise SpecError(
            "the search to resume is for another problem; give the X, Y, blocks, mode, causal, eta_max, max_depth and "
            "seed that it was started with (tolerance, attempts, iterations and max_seconds may change)"
        )
    done = bool(resume.log) and status_of(problem, replace(resume, attempt=resume.attempt - 1)) == "solved"
    return replace(resume, status="solved") if done else resume  # the tolerance may be larger now


def _schedule(blocks: FrozenBlocks, problem: Problem, at: Search, eta_max: float, seconds: float) -> Schedule:
    """The best durations with their report. A search that joined nothing still returns its last iterate, judged."""
    durations, error, grown, back = at.durations, at.error, at.amplification, at.amplification_back
    if durations is None:
        durations = at.state.durations if at.state is not None else begin(problem, 0).durations
        error, (grown, back) = judge(problem, durations), grown_by(problem, durations)
    extended: dict[str, Any] = {}
    remainders = np.zeros_like(durations)
    if at.status != "solved" and problem.mode == "finite" and refine.worthwhile(error, grown):
        refined = refine.refine(problem, durations)
        extended = {"extended error": refined.error, "extended steps": refined.steps}
        if refined.error <= problem.tolerance:
            durations, remainders = refined.durations, refined.remainders
            error, (grown, back) = judge(problem, durations), grown_by(problem, durations)
    status = "solved" if error <= problem.tolerance else at.status  # refining may have done it
    count, settings = len(durations), problem.settings
    finite = problem.mode == "finite"
    report: dict[str, Any] = {
        "status": status,
        "error": error if np.isfinite(error) else None,
        "tolerance": problem.tolerance,
        "judged by": "residual steps, re-run by the definition" if finite else "DOP853, rtol 1e-13",
        "amplification": grown if np.isfinite(grown) else None,
        "amplification backwards": back if np.isfinite(back) else None,
        **extended,
        "depth": count * len(durations[0]) * settings.substeps if finite else None,
        "eta_max": eta_max if finite else None,
        "duration": float(np.abs(durations).sum()),
        "sequences": problem.X.shape[0],
        "tokens": problem.X.shape[1],
        "seed": problem.seed,
        "restarts": max(len(at.log) - 1, 0),
        "backwards error": at.returns if np.isfinite(at.returns) else None,
        "attempts": [{k: v if v != np.inf else None for k, v in entry.items()} for entry in at.log],
        "seconds": seconds,
        "phases": dict(at.seconds),
    }
    order = np.tile(words.order_of(settings.half), count).astype(np.uint8)
    return Schedule(
        order,
        durations.reshape(-1),
        remainders.reshape(-1),
        settings.substeps,
        problem.mode,
        blocks.fingerprint(),
        report,
    )
