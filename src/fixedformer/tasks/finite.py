"""A training set of a fixed size, drawn once from a task; what is held out shares no sequence with it."""

from dataclasses import dataclass, field

import numpy as np

from fixedformer.errors import SpecError
from fixedformer.tasks.task import Array, Examples, Ids, Task

TRIES = 20


@dataclass(frozen=True, eq=False)
class FiniteSet:
    """`size` different sequences of `task`, drawn with `seed`; `sample` draws rows with replacement.

    Raises SpecError where the task does not have so many different sequences.
    """

    task: Task
    size: int
    seed: int
    examples: Examples = field(init=False)

    def __post_init__(self) -> None:
        if self.size < 1:
            raise SpecError(f"a training set needs at least one sequence, got {self.size}")
        generator, seen = np.random.default_rng([self.seed, 7]), set[bytes]()
        parts: list[Examples] = []
        idle = 0  # draws in a row without anything new
        while len(seen) < self.size and idle < TRIES:
            drawn = self.task.sample(max(self.size - len(seen), 64), generator)
            new = []
            for row, key in enumerate(_keys(drawn.inputs)):
                if key not in seen and len(seen) < self.size:
                    seen.add(key)
                    new.append(row)
            parts.append(_rows(drawn, np.array(new, dtype=np.int64)))
            idle = 0 if new else idle + 1
        if len(seen) < self.size:
            raise SpecError(
                f"{self.task.name} gave {len(seen)} different sequences, {self.size} were asked for; ask for fewer"
            )
        drawn = _joined(parts)
        whole = Examples(_small(drawn.inputs), _small(drawn.labels), drawn.scored)
        object.__setattr__(self, "examples", whole)
        object.__setattr__(self, "_seen", seen)

    @property
    def name(self) -> str:
        return self.task.name

    @property
    def vocabulary(self) -> tuple[str, ...]:
        return self.task.vocabulary

    @property
    def tokens(self) -> int:
        return self.task.tokens

    def sample(self, count: int, generator: np.random.Generator) -> Examples:
        rows = _rows(self.examples, generator.integers(0, self.size, count))
        if rows.values:
            return rows
        return Examples(rows.inputs.astype(np.int64), rows.labels.astype(np.int64), rows.scored)

    def solve(self, inputs: list[int]) -> list[int]:
        return self.task.solve(inputs)

    def trivial_rules(self, examples: Examples) -> dict[str, float]:
        return self.task.trivial_rules(examples)

    def measures(self, examples: Examples, predictions: Array) -> dict[str, float]:
        told: dict[str, float] = self.task.measures(examples, predictions) if hasattr(self.task, "measures") else {}
        return told

    def knows(self, inputs: Array) -> list[bool]:
        """Which of these sequences are in the training set."""
        seen: set[bytes] = self._seen  # type: ignore[attr-defined]
        return [key in seen for key in _keys(inputs)]


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Fresh sequences of a training set's task, less those that are in the set."""

    train: FiniteSet

    @property
    def name(self) -> str:
        return self.train.name

    @property
    def vocabulary(self) -> tuple[str, ...]:
        return self.train.vocabulary

    @property
    def tokens(self) -> int:
        return self.train.tokens

    def sample(self, count: int, generator: np.random.Generator) -> Examples:
        parts, found, idle = [], 0, 0
        while found < count and idle < TRIES:
            drawn = self.train.task.sample(max(count, 64), generator)
            fresh = np.flatnonzero(~np.array(self.train.knows(drawn.inputs)))[: count - found]
            parts.append(_rows(drawn, fresh))
            found, idle = found + len(fresh), 0 if len(fresh) else idle + 1
        if found < count:
            raise SpecError(f"nothing of {self.name} is found outside of the training set; make it smaller")
        return _joined(parts)

    def solve(self, inputs: list[int]) -> list[int]:
        return self.train.solve(inputs)

    def trivial_rules(self, examples: Examples) -> dict[str, float]:
        return self.train.trivial_rules(examples)

    def measures(self, examples: Examples, predictions: Array) -> dict[str, float]:
        return self.train.measures(examples, predictions)


def _keys(inputs: Array) -> list[bytes]:
    """One hashable value a sequence."""
    small = inputs if inputs.dtype.kind == "f" else inputs.astype(np.int32)
    return [row.tobytes() for row in small]


def _rows(examples: Examples, rows: Ids) -> Examples:
    return Examples(examples.inputs[rows], examples.labels[rows], examples.scored[rows])


def _joined(parts: list[Examples]) -> Examples:
    names = ("inputs", "labels", "scored")
    return Examples(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def _small(array: Array) -> Array:
    """Ids in the smallest type that holds them: a million sequences are kept."""
    return array.astype(np.min_scalar_type(array.max())) if array.dtype.kind == "i" else array
