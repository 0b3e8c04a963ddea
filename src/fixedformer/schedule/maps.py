"""Words of one shape, all moved at once: the compiled inner loop with shapes that a solver likes.

A *word* is K segments; segment k runs block `order[k]` for a signed duration. All words of a search have the same
order, so durations are an array (words, K). Word w starts at node Z_w (sequences, size); size = tokens * d.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from fixedformer.schedule.field import Array
from fixedformer.schedule.kernels import move_words, undo_steps

Want = Literal["ends", "state", "all"]
_WANT = {"ends": 0, "state": 1, "all": 2}
UNDO_ROUNDS = 50
UNDONE = 1e-12
"""Largest relative defect of an undone step; a larger one means that the step was not invertible near there."""


@dataclass(frozen=True)
class WordMaps:
    """End points of words and their derivatives.

    scores, values: (2, d, d). order: (K,) blocks of a word's segments. substeps: steps a segment. finite: residual
    steps, else Runge-Kutta steps. ties: (r, s, count), sequences whose first `count` numbers are the same for ever.
    """

    scores: Array
    values: Array
    tokens: int
    order: Array
    substeps: int
    finite: bool = True
    causal: bool = False
    ties: tuple[tuple[int, int, int], ...] = ()

    def tied(self, nodes: Array) -> Array:
        """Nodes with shared prefixes made equal again to the last bit: the solver cannot pull them together."""
        nodes = nodes.copy()
        for earlier, later, count in self.ties:
            nodes[:, later, :count] = nodes[:, earlier, :count]
        return nodes

    def redundant(self, size: int) -> tuple[int, ...]:
        """Coordinates (sequence * size + place) of second copies, whose last joint closes with the first copy's."""
        return tuple(later * size + place for _, later, count in self.ties for place in range(count))

    def __call__(self, nodes: Array, durations: Array, want: Want = "ends") -> tuple[Array, Array]:
        """Ends (words, sequences, size) and tangents (words, sequences, size, columns) of all words.

        columns: none for "ends"; size for "state" (d end / d start); size + K for "all" (and d end / d durations).
        """
        words, sequences, size = nodes.shape
        K = durations.shape[1]
        columns = {"ends": 0, "state": size, "all": size + K}[want]
        ends = np.array(nodes, dtype=np.float64, order="C").reshape(words * sequences, size)
        tangents = np.empty((words * sequences, size, columns))
        of = np.repeat(np.arange(words), sequences)
        move_words(
            ends,
            np.ascontiguousarray(durations),
            of,
            self.order,
            np.array(self.scores),  # a writable copy: numba compiles again for read-only arrays
            np.array(self.values),
            self.tokens,
            self.causal,
            self.substeps,
            0 if self.finite else 1,
            _WANT[want],
            tangents,
        )
        return ends.reshape(nodes.shape), tangents.reshape(words, sequences, size, columns)


def rollout(maps: WordMaps, X: Array, durations: Array) -> tuple[Array, Array]:
    """Nodes (words, sequences, size) that X (sequences, size) passes through, word after word, and where it ends."""
    nodes, state = np.empty((len(durations), *X.shape)), X[None]
    for w in range(len(durations)):
        nodes[w] = state[0]
        state, _ = maps(state, durations[w : w + 1])
    return nodes, state[0]


def undo(maps: WordMaps, end: Array, durations: Array) -> tuple[Array, float]:
    """States (sequences, size) before words of these durations (words, K), and the worst relative defect of a step.

    Residual steps only. A step that was not one-to-one may be undone to another state than it came from.
    """
    state, worst = np.array(end, order="C"), np.empty(len(end))
    undo_steps(
        state,
        durations.reshape(-1).copy(),
        np.tile(maps.order, len(durations)),
        np.array(maps.scores),  # writable copies: numba compiles again for read-only arrays
        np.array(maps.values),
        maps.tokens,
        maps.causal,
        maps.substeps,
        UNDO_ROUNDS,
        worst,
    )
    return state, float(worst.max(initial=0.0))


def amplification(state: Array) -> float:
    """Largest singular value, over sequences, of the product of all words' `state` (words, sequences, size, size).

    It is how much an error at the start has grown at the end, and what float64 loses.
    """
    product = state[0]
    with np.errstate(over="ignore", invalid="ignore"):
        for step in state[1:]:
            product = step @ product
        if not np.isfinite(product).all():
            return float("inf")
        return float(np.linalg.norm(product, 2, axis=(-2, -1)).max())


def amplification_back(state: Array) -> float:
    """The same for the schedule run backwards: how much an error at the end has grown at the start."""
    if not np.isfinite(state).all():
        return float("inf")
    try:
        return amplification(np.linalg.inv(state)[::-1])
    except np.linalg.LinAlgError:
        return float("inf")
