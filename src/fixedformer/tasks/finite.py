"""Parts of a task to train on and to test on, without a sequence in both."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from fixedformer.errors import SpecError
from fixedformer.tasks.task import Array, Examples, Flags, Ids, Measured, Task

TRIES = 20
CHUNK = 100_000  # sequences drawn at once: a generator may take ten times the memory of what it returns


class _OfTask:
    """What a part of a task takes over from it."""

    task: Task

    @property
    def name(self) -> str:
        return self.task.name

    @property
    def vocabulary(self) -> tuple[str, ...]:
        return self.task.vocabulary

    @property
    def tokens(self) -> int:
        return self.task.tokens

    def solve(self, inputs: list[int]) -> list[int]:
        return self.task.solve(inputs)

    def trivial_rules(self, examples: Examples) -> dict[str, float]:
        return self.task.trivial_rules(examples)

    def measures(self, examples: Examples, predictions: Array) -> dict[str, float]:
        return self.task.measures(examples, predictions) if isinstance(self.task, Measured) else {}


@dataclass(frozen=True, eq=False)
class FiniteSet(_OfTask):
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
            drawn = self.task.sample(min(CHUNK, max(self.size - len(seen), 64)), generator)
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

    def sample(self, count: int, generator: np.random.Generator) -> Examples:
        rows = _rows(self.examples, generator.integers(0, self.size, count))
        if rows.values:
            return rows
        return Examples(rows.inputs.astype(np.int64), rows.labels.astype(np.int64), rows.scored)

    def knows(self, inputs: Array) -> list[bool]:
        """Which of these sequences are in the training set."""
        seen: set[bytes] = self._seen  # type: ignore[attr-defined]
        return [key in seen for key in _keys(inputs)]


@dataclass(frozen=True, eq=False)
class HeldOut(_OfTask):
    """Sequences of `task` less those that are in a training set."""

    train: FiniteSet
    task: Task

    def sample(self, count: int, generator: np.random.Generator) -> Examples:
        return _drawn(self, count, generator, lambda inputs: ~np.array(self.train.knows(inputs)))


@dataclass(frozen=True, eq=False)
class Reserved(_OfTask):
    """Half of a task without end, so that nothing trained on is tested: a sixteenth of all sequences, told by a hash of
    the sequence, is held out, the rest is for training."""

    task: Task
    held_out: bool

    def sample(self, count: int, generator: np.random.Generator) -> Examples:
        return _drawn(
            self, count, generator, lambda inputs: _hash(inputs) % 16 == 0 if self.held_out else _hash(inputs) % 16 > 0
        )


def _drawn(of: _OfTask, count: int, generator: np.random.Generator, fits: Callable[[Array], Flags]) -> Examples:
    """`count` examples whose inputs fit, in the order they are drawn."""
    parts, found, idle = [], 0, 0
    while found < count and idle < TRIES:
        drawn = of.task.sample(max(count, 64), generator)
        fresh = np.flatnonzero(fits(drawn.inputs))[: count - found]
        parts.append(_rows(drawn, fresh))
        found, idle = found + len(fresh), 0 if len(fresh) else idle + 1
    if found < count:
        raise SpecError(
            f"{of.name} has too few different sequences left to train on some and test on others; make it larger, or "
            "make the training set smaller"
        )
    return _joined(parts)


def _hash(inputs: Array) -> Ids:
    """A number 0 .. 2^31 - 1 of each sequence of ids, the same everywhere."""
    odd = np.random.default_rng(31).integers(1, 2**63, inputs.shape[1], dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    mixed = (inputs.astype(np.uint64) * odd).sum(1, dtype=np.uint64)
    mixed ^= mixed >> np.uint64(29)
    found: Ids = ((mixed * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(33)).astype(np.int64)
    return found


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
