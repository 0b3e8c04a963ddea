"""What every task offers."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Examples:
    """inputs (count, tokens), labels (count, tokens): the right answer at each place; scored: where it counts."""

    inputs: Ids
    labels: Ids
    scored: Flags

    def accuracy(self, predictions: Ids) -> float:
        """Share of scored places where `predictions` (count, tokens) equals the label."""
        return float((predictions == self.labels)[self.scored].mean())


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
