"""Schedules that can be run backwards: find the residual steps that are not one-to-one where X passes, and move them.

X + eta F(X) is one-to-one while |eta| |F'| < 1. A bound on eta does not ensure that: where attention switches from one
token to another, |F'| is large, and the image of a step may have a second preimage. The way back then takes the wrong
branch, and no inverse can know better. A schedule has thousands of such steps and a handful of them fold. Most fold
late in a segment that pushes across a switch, so a slightly shorter segment avoids it; the joints close again by the
same Newton steps that closed them before.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from fixedformer.schedule.field import Array
from fixedformer.schedule.finish import join, shoot
from fixedformer.schedule.judge import RETURN_LIMIT, grown_by
from fixedformer.schedule.maps import UNDONE, WordMaps, rollout, undo
from fixedformer.schedule.problem import Problem
from fixedformer.schedule.relax import Record, move_durations

ROUNDS = 60
"""Tries at moving folded steps, of one Newton solve each."""
SHORTER, SHAKEN = 0.35, 0.03
"""Every other try makes folded segments shorter by a random share up to the first, or else adds normal durations of
the second's size to all segments of their words."""
SMALLEST_SHARE = 0.05
"""Changes shrink to this share of that where joints do not close."""
CLOSING = 10
"""Newton steps within which joints close after such a change, if they do: 2 to 5 usually."""
SAME = 1e-7
"""A step undone to within this found the preimage that it came from: other branches are 1e-2 and more away."""


@dataclass(frozen=True)
class Unfolding:
    """Where the moving of folded steps stands: durations (words, K) with no more folds than before, tries made, and how
    large the next one is."""

    durations: Array
    trial: int = 0
    share: float = 1.0


Fold = tuple[int, int]
"""(word, segment) with a step that is not undone."""


def folds(problem: Problem, durations: Array) -> list[Fold]:
    """Segments on the way of X with a step whose inverse, started from its exact image, misses where it came from."""
    maps = problem.maps
    nodes, end = rollout(maps, problem.flat[0], durations)
    found = []
    for word, after in enumerate([*nodes[1:], end]):
        back, defect = undo(maps, after, durations[word : word + 1])
        if defect > UNDONE or np.abs(back - nodes[word]).max() > SAME:
            found += [(word, segment) for segment in _folded(maps, nodes[word], durations[word])]
    return found


def unfold(problem: Problem, start: Unfolding, attempt: int) -> Iterator[tuple[Unfolding, Record]]:
    """Move folded steps, a random share at a time; yields (where it stands, record) after each try.

    A try shortens folded segments and their mirror images in the word, or shakes their words, closes the joints, and is
    kept if it solves the problem, amplifies below the limit and folds no more often. The record's `residual` is the
    number of folds.
    """
    durations, share, where = start.durations, start.share, folds(problem, start.durations)
    for trial in range(start.trial, ROUNDS):
        if not where:
            return
        change = share * _change(where, durations, trial, np.random.default_rng([problem.seed, attempt, trial]))
        moved, error = _closed(problem, durations, change, attempt)
        good = error <= problem.tolerance and max(grown_by(problem, moved)) < RETURN_LIMIT
        again = folds(problem, moved) if good else None
        if again is not None and len(again) <= len(where):
            durations, where = moved, again
        # Where joints do not close, smaller changes may let them; those add up, since the half of them only shortens.
        share = min(1.0, 1.5 * share) if good else max(0.7 * share, SMALLEST_SHARE)
        record = Record("unfold", attempt, trial, float(len(where)), np.nan, np.nan, 1.0)
        yield Unfolding(durations, trial + 1, share), record


def _closed(problem: Problem, durations: Array, change: Array, attempt: int) -> tuple[Array, float]:
    """Durations after a change, with the joints closed again, and the error of the roll-out."""
    X, Y = problem.flat
    settings, maps = problem.settings, problem.maps
    moved, nodes = move_durations(durations, change, settings.largest), rollout(maps, X, durations)[0]
    for joined, record in join(maps, maps, Y, nodes, moved, settings, attempt):
        moved = joined.durations
        if record.iteration >= CLOSING:
            break
    best, least = moved, np.inf
    for candidate, error, _ in shoot(maps, maps, X, Y, moved, settings.largest, attempt):
        if error < least:
            best, least = candidate, error
    return best, float(least)


def _change(where: list[Fold], durations: Array, trial: int, generator: np.random.Generator) -> Array:
    """What a try adds to the durations."""
    change, last = np.zeros_like(durations), durations.shape[1] - 1
    for word, segment in where:
        if trial % 2:
            change[word] = SHAKEN * generator.standard_normal(last + 1)
            continue
        for k in (segment, last - segment):  # both halves, or the word would no longer nearly return
            change[word, k] = -generator.uniform(0, SHORTER) * durations[word, k]
    return change


def _folded(maps: WordMaps, start: Array, durations: Array) -> list[int]:
    """The segments of one word with a step that is not undone. start (sequences, size), durations (K,)."""
    found, state = [], start
    for segment, t in enumerate(durations):
        step = replace(maps, order=maps.order[segment : segment + 1], substeps=1, ties=())
        eta, folded = np.array([[t / maps.substeps]]), False
        for _ in range(maps.substeps):
            after = step(state[None], eta)[0][0]
            back, defect = undo(step, after, eta)
            folded |= bool(defect > UNDONE or np.abs(back - state).max() > SAME)
            state = after
        if folded:
            found.append(segment)
    return found
