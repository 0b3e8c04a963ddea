"""Where an attempt starts: its path, and the words on it."""

from dataclasses import dataclass

import numpy as np

from fixedformer.schedule import feasible, words
from fixedformer.schedule.field import Array
from fixedformer.schedule.problem import Problem
from fixedformer.schedule.relax import State


@dataclass(frozen=True)
class Lead:
    """Words that carry the first tokens to their targets: nodes (words, sequences, size), durations (words, K), the end
    (sequences, size), and how much they strain all tokens: max |log singular value| of a word."""

    nodes: Array
    durations: Array
    end: Array
    strain: float


def begin(problem: Problem, attempt: int, led: Lead | None = None) -> State:
    """The attempt's path and its calmest words, after the words that lead, if any do."""
    generator = np.random.default_rng([problem.seed, attempt])
    one_map = bool(feasible.linear_places(problem.X, problem.causal)) and (problem.causal or problem.X.shape[1] == 1)
    chosen = problem.settings
    start = problem.X if led is None else led.end.reshape(problem.X.shape)
    path = words.plan_path(start, problem.Y, attempt, generator, one_map)
    rest = chosen.words - (0 if led is None else len(led.durations))
    nodes, durations = words.initial_words(problem.maps, path, rest, chosen.amplitude, generator, chosen.candidates)
    if led is not None:
        nodes, durations = np.concatenate([led.nodes, nodes]), np.concatenate([led.durations, durations])
    # Where words would not join, a weaker strain at first may let them: every other attempt starts with a third of it.
    return State(nodes, durations, strength=chosen.strength / (3 if attempt % 2 else 1))
