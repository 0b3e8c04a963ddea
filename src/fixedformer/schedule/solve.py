"""The search as a whole: attempts, each an initial path, a relaxation, a finish and a judgement by re-run.

`search` yields after every step, and what it yields can be saved and given back: it goes on with the same numbers.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from scipy.linalg import qr

from fixedformer.errors import SpecError
from fixedformer.schedule import feasible, words
from fixedformer.schedule.field import Array, adaptive_flow, residual_step
from fixedformer.schedule.finish import join, shoot
from fixedformer.schedule.kernels import undo_steps
from fixedformer.schedule.maps import WordMaps, amplification, amplification_back, rollout
from fixedformer.schedule.program import Mode
from fixedformer.schedule.relax import Record, Settings, State, relax
from fixedformer.schedule.runner import UNDO_ROUNDS, UNDONE

RETURN, RETURN_LIMIT = 1e-6, 1e6
"""A finite schedule with both amplifications below the limit should, run backwards, return X to this."""
SPARE_ATTEMPTS, SPARE_LIMIT = 6, 64
"""Attempts after a first solution that does not return X, for problems of at most so many coordinates."""
LEADS, LEAD_STRAIN = 16, 12.0
"""Tries at the words that move the first tokens; the one whose words strain the other tokens least leads, if that
strain, max |log singular value| of a word, is below this."""
DEPTH_PER_COORDINATE = 256
"""Default bound on the depth, times D = sequences * tokens * d."""
FLOW_STEPS = {"relax": 4, "join": 16, "judge": 512}
"""Runge-Kutta steps a segment: rough for directions, fine for what is solved. DOP853 judges."""


@dataclass(frozen=True)
class Problem:
    """What is to be solved, and how hard to try. X, Y (sequences, tokens, d)."""

    scores: Array
    values: Array
    causal: bool
    X: Array
    Y: Array
    mode: Mode
    tolerance: float
    seed: int
    attempts: int
    settings: Settings

    @property
    def maps(self) -> WordMaps:
        return self.maps_with(self.settings.substeps if self.mode == "finite" else FLOW_STEPS["relax"])

    def maps_with(self, steps: int) -> WordMaps:
        order = words.order_of(self.settings.half)
        finite = self.mode == "finite"
        d = self.X.shape[2]
        ties = tuple((r, s, d * count) for r, s, count in feasible.prefix_ties(self.X)) if self.causal else ()
        return WordMaps(self.scores, self.values, self.X.shape[1], order, steps, finite, self.causal, ties)

    @property
    def flat(self) -> tuple[Array, Array]:
        """X and Y as (sequences, size)."""
        return self.X.reshape(len(self.X), -1), self.Y.reshape(len(self.Y), -1)


@dataclass(frozen=True)
class Search:
    """Where a search stands. status: "searching", "solved" or "exhausted"."""

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

    def timed(self, phase: str, since: float) -> "Search":
        spent = self.seconds.get(phase, 0.0) + time.perf_counter() - since
        return replace(self, seconds={**self.seconds, phase: spent})


def settings_for(d: int, D: int, mode: Mode, eta_max: float, max_depth: int | None, **changes: Any) -> Settings:
    """Settings for D = sequences * tokens * d unknown coordinates within `max_depth` (256 D) and |eta| <= `eta_max`.

    Raises SpecError where not even one word fits.
    """
    if not (np.isfinite(eta_max) and eta_max > 0):
        raise SpecError(f"eta_max must be a positive number, got {eta_max}")
    base = replace(Settings(), amplitude=0.25, largest=0.6) if d <= 2 else Settings()
    base = replace(base, **changes)
    if mode == "continuous":
        return base if "words" in changes else replace(base, words=2 * D)
    substeps = base.substeps
    while base.largest / substeps > eta_max:
        substeps *= 2
    depth = DEPTH_PER_COORDINATE * D if max_depth is None else max_depth
    most = depth // (2 * base.half * substeps)
    if most < 2:
        raise SpecError(
            f"max_depth {depth} holds {most} words of {2 * base.half} segments, {substeps} steps of |eta| <= {eta_max} "
            f"each; allow a depth of {4 * base.half * substeps} or more"
        )
    return replace(base, substeps=substeps, words=min(most, changes.get("words", most)))


def search(problem: Problem, start: Search | None = None) -> Iterator[tuple[Search, Record]]:
    """Yield (search, record) after each step, until the status is no longer "searching"."""
    at = start or Search()
    while at.status == "searching":
        if at.state is None:
            began = time.perf_counter()
            at = replace(at, state=begin(problem, at.attempt)).timed("start", began)
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
        if at.state.best_nodes is not None and at.state.best_durations is not None:
            for durations, record in _finish(problem, at):
                found = durations
                at = at.timed("finish", began)
                began = time.perf_counter()
                yield at, record
        if found is not None:
            error, (grown, back) = judge(problem, found), grown_by(problem, found)
            at = at.timed("judge", began)
            entry |= {"error": error, "amplification": grown, "amplification backwards": back}
            returns = returned(problem, found) if max(grown, back) < RETURN_LIMIT else float("inf")
            entry["backwards error"] = returns
            if better(problem, error, returns, at):
                at = replace(
                    at, durations=found, error=error, amplification=grown, amplification_back=back, returns=returns
                )
        at = replace(at, log=(*at.log, entry))
        status = status_of(problem, at)
        at = replace(at, status=status, attempt=at.attempt + 1, state=None)
        yield at, Record("judge", at.attempt - 1, 0, at.error, np.nan, at.amplification, 0.0)


def better(problem: Problem, error: float, returns: float, at: Search) -> bool:
    """Whether a finished attempt replaces the best: solved first, then one that returns X, then the smaller error."""
    ranks = [(e > problem.tolerance, r > RETURN, e) for e, r in ((error, returns), (at.error, at.returns))]
    return ranks[0] < ranks[1]


def status_of(problem: Problem, at: Search) -> str:
    """Solved, or worth another attempt, or exhausted. A solution that does not return X gets a few more attempts."""
    solved = sum(entry.get("error", np.inf) <= problem.tolerance for entry in at.log)
    last = at.attempt + 1 >= problem.attempts
    if not solved:
        return "exhausted" if last else "searching"
    reversible = problem.mode == "continuous" or at.returns <= RETURN or problem.X.size > SPARE_LIMIT
    return "solved" if reversible or last or solved > SPARE_ATTEMPTS else "searching"


def returned(problem: Problem, durations: Array) -> float:
    """max |X - (end, run backwards)|; infinity where a step could not be undone. Not for the flow, which is invertible.

    Residual steps of this size need not be one-to-one: then the way back may take another branch.
    """
    if problem.mode == "continuous":
        return float("inf")
    X, _ = problem.flat
    state, worst = rollout(problem.maps, X, durations)[1].copy(), np.empty(len(X))
    order = np.tile(words.order_of(problem.settings.half), len(durations))
    maps = problem.maps
    undo_steps(
        state,
        durations.reshape(-1).copy(),
        order,
        np.array(maps.scores),
        np.array(maps.values),
        maps.tokens,
        maps.causal,
        maps.substeps,
        UNDO_ROUNDS,
        worst,
    )
    return float(np.abs(state - X).max()) if (worst <= UNDONE).all() else float("inf")


def begin(problem: Problem, attempt: int) -> State:
    """The attempt's path and its calmest words; before them, where it helps, words that move the first tokens."""
    generator = np.random.default_rng([problem.seed, attempt])
    one_map = bool(feasible.linear_places(problem.X, problem.causal)) and (problem.causal or problem.X.shape[1] == 1)
    chosen, start, led = problem.settings, problem.X, lead(problem, attempt)
    if led is not None:
        start = led[2].reshape(problem.X.shape)
    path = words.plan_path(start, problem.Y, attempt, generator, one_map)
    rest = chosen.words - (0 if led is None else len(led[1]))
    nodes, durations = words.initial_words(problem.maps, path, rest, chosen.amplitude, generator, chosen.candidates)
    if led is not None:
        nodes, durations = np.concatenate([led[0], nodes]), np.concatenate([led[1], durations])
    # Where words would not join, a weaker strain at first may let them: every other attempt starts with a third of it.
    return State(nodes, durations, strength=chosen.strength / (3 if attempt % 2 else 1))


def lead(problem: Problem, attempt: int) -> tuple[Array, Array, Array] | None:
    """Words that carry the first tokens to their targets, and the others wherever that takes them.

    Under a causal mask d independent first tokens must follow one given linear map. Words near the identity reach most
    of its d^2 directions only through brackets of high order, so along a straight path they run into their bounds; as
    a problem of their own, one token in d sequences, they join at once, and what is left keeps them where they are.
    Returns nodes (words, sequences, size), durations (words, K) and the end (sequences, size); None where the first
    tokens leave freedom, where the words are too few, or where none was found.
    """
    X, d = problem.X, problem.X.shape[2]
    first = X[:, 0]
    count = 2 * d * d
    if not problem.causal or X.shape[1] == 1 or np.linalg.matrix_rank(first) < d or 2 * count > problem.settings.words:
        return None
    some = qr(first.T, mode="r", pivoting=True)[1][:d]  # d independent ones
    alone = replace(
        problem,
        X=X[some, :1],
        Y=problem.Y[some, :1],
        attempts=1,
        settings=replace(problem.settings, words=count),
    )
    best: tuple[Array, Array, Array] | None = None
    least = LEAD_STRAIN
    for trial in range(LEADS):
        at = Search()
        for at, _ in search(replace(alone, seed=problem.seed + 100 * attempt + trial)):  # noqa: B007
            pass
        if at.durations is None or at.status != "solved":
            continue
        nodes, end = rollout(problem.maps, problem.flat[0], at.durations)
        if not (np.isfinite(nodes).all() and np.isfinite(end).all()):
            continue
        values = np.linalg.svd(problem.maps(nodes, at.durations, "state")[1], compute_uv=False)
        strained = float(np.abs(np.log(np.maximum(values, 1e-300))).max())
        if strained < least:
            best, least = (nodes, at.durations, end), strained
    return best


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
