"""What every task offers, and what some offer beside."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Flags = NDArray[np.bool_]
Floats = NDArray[np.float32]
Array = NDArray[Any]  # ids (int64), or numbers (float32)


@dataclass(frozen=True, eq=False)
class Examples:
    """inputs: ids (count, tokens) or vectors (count, tokens, d_in); labels (count, tokens): the right answer at each
    place, an id or a number; scored: where it counts."""

    inputs: Array
    labels: Array
    scored: Flags

    @property
    def values(self) -> bool:
        """Whether labels are numbers to come close to, rather than ids to hit."""
        return self.labels.dtype.kind == "f"

    def accuracy(self, predictions: Array) -> float:
        """Share of scored places where `predictions` (count, tokens) equals the label; for values the share of their
        mean square that is explained, 1 - squared error / mean square, 0 where that is negative."""
        told, right = predictions[self.scored], self.labels[self.scored]
        if not self.values:
            return float((told == right).mean())
        error = np.square(told.astype(np.float64) - right).mean()
        return float(max(0.0, 1 - error / np.square(right.astype(np.float64)).mean()))


class Task(Protocol):
    """A generator of examples over a small vocabulary; one generator state always gives the same examples."""

    @property
    def name(self) -> str: ...

    @property
    def vocabulary(self) -> tuple[str, ...]: ...

    @property
    def tokens(self) -> int:
        """Length of every input."""
        ...

    def sample(self, count: int, generator: np.random.Generator) -> Examples:
        """`count` fresh examples, drawn as arrays."""
        ...

    def solve(self, inputs: list[int]) -> list[int]:
        """Labels of one sequence, in plain Python that shares nothing with `sample` (an oracle for tests)."""
        ...

    def trivial_rules(self, examples: Examples) -> dict[str, float]:
        """Accuracy on `examples` of rules that understand nothing."""
        ...


@runtime_checkable
class Measured(Protocol):
    """A task that says more of predictions than the share of right places."""

    def measures(self, examples: Examples, predictions: Array) -> dict[str, float]:
        """Named numbers, e.g. whole sequences right, or a squared error."""
        ...


@runtime_checkable
class Curriculum(Protocol):
    """A task whose training examples change as training goes on; validation and test are its own `sample`."""

    def at(self, step: int) -> Task:
        """What training step `step` (from 0) draws from."""
        ...


@runtime_checkable
class Halved(Protocol):
    """Held-out data that are given, not drawn: validation takes one half of them, the test the other."""

    def half(self, which: int) -> Task:
        """The half 0 or 1; no example is in both, where there are two."""
        ...


def half_of(inputs: Array, which: int) -> Ids:
    """Rows of every other different input, from the first or the second on; all rows where there is only one."""
    _, number = np.unique(inputs, axis=0, return_inverse=True)
    number = number.reshape(-1)
    rows: Ids = np.flatnonzero((number % 2 == which) | (number.max() == 0))
    return rows


@runtime_checkable
class Vectors(Protocol):
    """A task whose inputs are vectors of `d_in` entries, and whose labels are numbers."""

    @property
    def d_in(self) -> int: ...
