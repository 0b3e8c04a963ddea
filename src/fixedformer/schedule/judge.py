"""What found durations are worth, by running them again: the error, what errors grow to, and whether X comes back.

The error is by the definition (`field.py`), which shares no code with the search.
"""

from dataclasses import dataclass

import numpy as np

from fixedformer.schedule import words
from fixedformer.schedule.field import Array, adaptive_flow, residual_step
from fixedformer.schedule.maps import UNDONE, amplification, amplification_back, rollout, undo
from fixedformer.schedule.problem import FLOW_STEPS, Problem

RETURN, RETURN_LIMIT = 1e-6, 1e6
"""A finite schedule with both amplifications below the limit should, run backwards, return X to this."""
SPARE_LIMIT = 64
"""Largest D of problems for which more is tried where a solution does not return X."""


@dataclass(frozen=True)
class Verdict:
    """Error of the re-run, amplifications forwards and backwards, and the error of X run there and back."""

    error: float
    amplification: float
    amplification_back: float
    returns: float

    def as_entry(self) -> dict[str, float]:
        return {
            "error": self.error,
            "amplification": self.amplification,
            "amplification backwards": self.amplification_back,
            "backwards error": self.returns,
        }


def assess(problem: Problem, durations: Array) -> Verdict:
    """What a finished attempt is worth."""
    grown, back = grown_by(problem, durations)
    returns = returned(problem, durations) if max(grown, back) < RETURN_LIMIT else float("inf")
    return Verdict(judge(problem, durations), grown, back, returns)


def should_return(problem: Problem, verdict: Verdict) -> bool:
    """Whether X is expected back: a solution at finite depth that amplifies little, both ways, of a small problem."""
    quiet = max(verdict.amplification, verdict.amplification_back) < RETURN_LIMIT
    small = problem.X.size <= SPARE_LIMIT
    return quiet and small and problem.mode == "finite" and verdict.error <= problem.tolerance


def returned(problem: Problem, durations: Array) -> float:
    """max |X - (end, run backwards)|; infinity where a step could not be undone. Not for the flow, which is invertible.

    Residual steps of this size need not be one-to-one: then the way back may take another branch.
    """
    if problem.mode == "continuous":
        return float("inf")
    X, _ = problem.flat
    back, defect = undo(problem.maps, rollout(problem.maps, X, durations)[1], durations)
    return float(np.abs(back - X).max()) if defect <= UNDONE else float("inf")


def judge(problem: Problem, durations: Array) -> float:
    """max |end - Y| by the definition (`field.py`), which shares no code with the search; infinity where it diverges.

    Finite depth: residual steps, and the compiled roll-out beside them; the larger error counts. Continuous: DOP853.
    """
    end = run_definition(problem, durations)
    errors = [np.abs(end - problem.Y).max()]
    if problem.mode == "finite":
        X, Y = problem.flat
        errors.append(np.abs(rollout(problem.maps, X, durations)[1] - Y).max())
    return float(max(errors)) if np.isfinite(errors).all() else float("inf")


def run_definition(problem: Problem, durations: Array) -> Array:
    """The roll-out from X by `field.py`."""
    X = problem.X
    order, substeps = words.order_of(problem.settings.half), problem.settings.substeps
    with np.errstate(over="ignore", invalid="ignore"):
        for word in durations:
            for block, t in zip(order, word):
                if problem.mode == "continuous":
                    X = adaptive_flow(X, t, problem.scores[block], problem.values[block], problem.causal)
                    continue
                for _ in range(substeps):
                    X = residual_step(X, t / substeps, problem.scores[block], problem.values[block], problem.causal)
    return X


def grown_by(problem: Problem, durations: Array) -> tuple[float, float]:
    """End-to-end amplification max_i |d end / d X_i| along the roll-out, and that of the schedule run backwards."""
    near = problem.maps if problem.mode == "finite" else problem.maps_with(FLOW_STEPS["join"])
    nodes, _ = rollout(near, problem.flat[0], durations)
    if not np.isfinite(nodes).all():
        return float("inf"), float("inf")
    state = near(nodes, durations, "state")[1]
    return amplification(state), amplification_back(state)
