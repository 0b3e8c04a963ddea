"""The search as a whole: attempts, each an initial path, a relaxation, a finish and a judgement by re-run.

`search` yields after every step, and what it yields can be saved and given back: it goes on with the same numbers.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from scipy.linalg import qr

from fixedformer.schedule.field import Array
from fixedformer.schedule.finish import join, shoot
from fixedformer.schedule.judge import RETURN, Verdict, assess, should_return
from fixedformer.schedule.maps import rollout
from fixedformer.schedule.problem import FLOW_STEPS, Problem
from fixedformer.schedule.relax import Record, State, relax
from fixedformer.schedule.reversible import Unfolding, unfold
from fixedformer.schedule.start import Lead, begin

SPARE_ATTEMPTS = 6
"""Attempts after a first solution that should return X but does not."""
LEADS, LEAD_STRAIN = 16, 12.0
"""Tries at the words that move the first tokens; the one whose words strain the other tokens least leads, if that
strain, max |log singular value| of a word, is below this."""


@dataclass(frozen=True)
class Search:
    """Where a search stands. status: "searching", "solved" or "exhausted".

    problem: the digest of what it is a search for. leads, led: tries at leading words and the best of them, before the
    attempt's state is there; unfolding: once it is finished, solved and does not return X.
    """

    attempt: int = 0
    state: State | None = None
    durations: Array | None = None
    error: float = float("inf")
    amplification: float = float("inf")
    amplification_back: float = float("inf")
    returns: float = float("inf")
    status: str = "searching"
    log: tuple[Mapping[str, Any], ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    problem: str = ""
    leads: int = 0
    led: Lead | None = None
    unfolding: Unfolding | None = None

    def or_better(self, problem: Problem, durations: Array, found: Verdict) -> "Search":
        """With these durations, where they beat the best: solved first, then one that returns X, then the error."""
        ranks = [(v.error > problem.tolerance, v.returns > RETURN, v.error) for v in (found, self)]
        return replace(self, durations=durations, **asdict(found)) if ranks[0] < ranks[1] else self

    def timed(self, phase: str, since: float) -> "Search":
        spent = self.seconds.get(phase, 0.0) + time.perf_counter() - since
        return replace(self, seconds={**self.seconds, phase: spent})


def search(problem: Problem, start: Search | None = None) -> Iterator[tuple[Search, Record]]:
    """Yield (search, record) after each step, until the status is no longer "searching"."""
    at = replace(start or Search(), problem=problem.digest())
    while at.status == "searching":
        if at.state is None:
            for started, record in _start(problem, at):
                at = started
                yield at, record
        assert at.state is not None  # set just above
        began = time.perf_counter()
        steps = relax(problem.maps, problem.flat[1], at.state, problem.settings, (problem.seed, at.attempt))
        for state, record in steps:
            at = replace(at, state=state).timed("relax", began)
            began = time.perf_counter()
            yield at, record
        assert at.state is not None
        entry: dict[str, Any] = {"attempt": at.attempt, "steps": at.state.iteration, "ended": at.state.finished}
        found: Array | None = None
        if at.unfolding is None and at.state.best_nodes is not None:
            for durations, record in _finish(problem, at):
                found = durations
                at = at.timed("finish", began)
                began = time.perf_counter()
                yield at, record
        if found is not None:
            verdict = assess(problem, found)
            entry |= verdict.as_entry()
            at = at.or_better(problem, found, verdict).timed("judge", began)
            if should_return(problem, verdict) and verdict.returns > RETURN:
                at = replace(at, unfolding=Unfolding(found))
        if at.unfolding is not None:
            began, found = time.perf_counter(), at.unfolding.durations
            for unfolding, record in unfold(problem, at.unfolding, at.attempt):
                at, found = replace(at, unfolding=unfolding).timed("unfold", began), unfolding.durations
                began = time.perf_counter()
                yield at, record
            verdict = assess(problem, found)
            entry |= verdict.as_entry()
            at = replace(at.or_better(problem, found, verdict), unfolding=None)
        at = replace(at, log=(*at.log, entry))
        status = status_of(problem, at)
        at = replace(at, status=status, attempt=at.attempt + 1, state=None)
        yield at, Record("judge", at.attempt - 1, 0, at.error, np.nan, at.amplification, 0.0)


def status_of(problem: Problem, at: Search) -> str:
    """Solved, or worth another attempt, or exhausted. A solution that should return X but does not gets a few more."""
    solved = [entry.get("error", np.inf) <= problem.tolerance for entry in at.log]
    last = at.attempt + 1 >= problem.attempts
    if not any(solved):
        return "exhausted" if last else "searching"
    best = Verdict(at.error, at.amplification, at.amplification_back, at.returns)
    enough = at.returns <= RETURN or not should_return(problem, best)
    spent = len(solved) - 1 - solved.index(True) >= SPARE_ATTEMPTS
    return "solved" if enough or last or spent else "searching"


def _start(problem: Problem, at: Search) -> Iterator[tuple[Search, Record]]:
    """Words that lead, try by try, then the attempt's first state."""
    began = time.perf_counter()
    for tried, led, record in lead(problem, at.attempt, at.leads, at.led):
        at = replace(at, leads=tried, led=led).timed("start", began)
        began = time.perf_counter()
        yield at, record
    at = replace(at, state=begin(problem, at.attempt, at.led), leads=0, led=None).timed("start", began)
    yield at, Record("start", at.attempt, 0, np.nan, np.nan, np.nan, 1.0)


def lead(
    problem: Problem, attempt: int, tried: int = 0, best: Lead | None = None
) -> Iterator[tuple[int, Lead | None, Record]]:
    """Words that carry the first tokens to their targets, and the others wherever that takes them.

    Under a causal mask d independent first tokens must follow one given linear map. Words near the identity reach most
    of its d^2 directions only through brackets of high order, so along a straight path they run into their bounds; as
    a problem of their own, one token in d sequences, they join at once, and what is left keeps them where they are.
    Yields (tries made, the best words so far or None, record): "lead" within a try, "led" after it, from where it can
    go on. Nothing at all where the first tokens leave freedom, or where the words are too few.
    """
    X, d = problem.X, problem.X.shape[2]
    first = X[:, 0]
    count = 2 * d * d
    if not problem.causal or X.shape[1] == 1 or np.linalg.matrix_rank(first) < d or 2 * count > problem.settings.words:
        return
    some = qr(first.T, mode="r", pivoting=True)[1][:d]  # d independent ones
    alone = replace(
        problem,
        X=X[some, :1],
        Y=problem.Y[some, :1],
        attempts=1,
        settings=replace(problem.settings, words=count),
    )
    for trial in range(tried, LEADS):
        at = Search()
        for at, record in search(replace(alone, seed=problem.seed + 100 * attempt + trial)):  # noqa: B007
            yield trial, best, replace(record, phase="lead", attempt=attempt, iteration=trial)
        if at.durations is not None and at.status == "solved":
            led = _led(problem, at.durations)
            if led.strain < (LEAD_STRAIN if best is None else best.strain):
                best = led
        yield trial + 1, best, Record("led", attempt, trial, np.nan, np.nan, np.nan, 1.0)


def _led(problem: Problem, durations: Array) -> Lead:
    """These words with where they take all of X; an infinite strain where they diverge."""
    nodes, end = rollout(problem.maps, problem.flat[0], durations)
    if not (np.isfinite(nodes).all() and np.isfinite(end).all()):
        return Lead(nodes, durations, end, np.inf)
    values = np.linalg.svd(problem.maps(nodes, durations, "state")[1], compute_uv=False)
    return Lead(nodes, durations, end, float(np.abs(np.log(np.maximum(values, 1e-300))).max()))


def _finish(problem: Problem, at: Search) -> Iterator[tuple[Array, Record]]:
    """Join the best relaxed words, then shoot; yields the best durations (words, K) so far."""
    X, Y = problem.flat
    state, largest = at.state, problem.settings.largest
    assert state is not None
    assert state.best_nodes is not None
    assert state.best_durations is not None
    near = problem.maps if problem.mode == "finite" else problem.maps_with(FLOW_STEPS["join"])
    fine = problem.maps if problem.mode == "finite" else problem.maps_with(FLOW_STEPS["judge"])
    best, least = state.best_durations, np.inf
    for joined, record in join(near, fine, Y, state.best_nodes, best, problem.settings, at.attempt):
        best = joined.durations
        yield best, record
    for durations, error, record in shoot(near, fine, X, Y, best, largest, at.attempt):
        if error < least:
            best, least = durations, error
        yield best, record
