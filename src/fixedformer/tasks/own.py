"""Your own data: token sequences and labels from a JSONL or CSV file.

JSONL: one object a line, {"tokens": [..], "labels": [..]}; a label of null is not scored. CSV: a header
"tokens,labels", tokens separated by spaces in both columns, "-" for a label that is not scored. Tokens are words or
numbers; the vocabulary is what occurs, sorted, behind a padding token of its own that is never scored.
"""

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fixedformer.errors import SpecError
from fixedformer.tasks.task import Examples, half_of

PADDING = "<pad>"
HELD_OUT = 5  # every fifth distinct line of a fixed shuffle is kept for validation and test
Line = tuple[list[str], list[str | None]]


@dataclass(frozen=True, eq=False)
class OwnData:
    """A fixed set of examples; `sample` draws rows with replacement. `read` makes two: to train on, and held out.

    The solver of these labels is not known here: `solve` looks the sequence up.
    """

    name: str
    vocabulary: tuple[str, ...]
    examples: Examples

    @property
    def tokens(self) -> int:
        return int(self.examples.inputs.shape[1])

    @classmethod
    def read(cls, path: Path) -> tuple["OwnData", "OwnData"]:
        """The training part and the held-out part of a file, with one vocabulary; no sequence is in both.

        Raises SpecError, naming the line, for what does not fit; for fewer than two distinct sequences; for no label.
        """
        lines = [line for line in _lines(path) if any(label is not None for label in line[1])]
        if not lines:
            raise SpecError(f"{path}: has no scored label")
        words = sorted({word for tokens, labels in lines for word in (*tokens, *labels) if word is not None})
        vocabulary = (PADDING, *words)
        distinct = sorted({tuple(tokens) for tokens, _ in lines})
        if len(distinct) < 2:
            raise SpecError(f"{path}: needs at least two different sequences, to train on and to hold out")
        order = np.random.default_rng(0).permutation(len(distinct))
        kept = {distinct[i] for i in order[:: max(2, min(HELD_OUT, len(distinct)))]}
        length = max(len(tokens) for tokens, _ in lines)
        parts = [[line for line in lines if (tuple(line[0]) in kept) is held] for held in (False, True)]
        made = [cls(path.stem, vocabulary, _examples(part, vocabulary, length)) for part in parts]
        return made[0], made[1]

    def sample(self, count: int, generator: np.random.Generator) -> Examples:
        rows = generator.integers(0, len(self.examples.inputs), count)
        whole = self.examples
        return Examples(whole.inputs[rows], whole.labels[rows], whole.scored[rows])

    def half(self, which: int) -> "OwnData":
        """Every other sequence, from the first or the second on (the same where there is only one)."""
        whole = self.examples
        rows = half_of(whole.inputs, which)
        return OwnData(self.name, self.vocabulary, Examples(whole.inputs[rows], whole.labels[rows], whole.scored[rows]))

    def solve(self, inputs: list[int]) -> list[int]:
        rows = np.flatnonzero((self.examples.inputs == np.asarray(inputs)).all(1))
        if not rows.size:
            raise SpecError(f"the sequence {inputs} is not in {self.name}")
        return [int(label) for label in self.examples.labels[rows[0]]]

    def trivial_rules(self, examples: Examples) -> dict[str, float]:
        """Always the commonest scored label; copy the token at the place."""
        common = np.bincount(self.examples.labels[self.examples.scored]).argmax()
        guesses = {"commonest label": np.full_like(examples.labels, common), "copy x[i]": examples.inputs}
        return {name: examples.accuracy(guess) for name, guess in guesses.items()}


def _examples(lines: list[Line], vocabulary: tuple[str, ...], length: int) -> Examples:
    index = {word: i for i, word in enumerate(vocabulary)}
    inputs = np.zeros((len(lines), length), dtype=np.int64)
    labels_of, scored = np.zeros_like(inputs), np.zeros(inputs.shape, dtype=np.bool_)
    for row, (tokens, labels) in enumerate(lines):
        inputs[row, : len(tokens)] = [index[word] for word in tokens]
        for place, label in enumerate(labels):
            if label is not None:
                labels_of[row, place], scored[row, place] = index[label], True
    return Examples(inputs, labels_of, scored)


def _lines(path: Path) -> Iterator[Line]:
    """Tokens and labels of every line, checked."""
    if path.suffix not in (".jsonl", ".csv"):
        raise SpecError(f"{path}: data is a .jsonl or a .csv file, got '{path.suffix}'")
    if not path.is_file():
        raise SpecError(f"{path}: no such file")
    found = 0
    for number, (tokens, labels) in enumerate(_jsonl(path) if path.suffix == ".jsonl" else _csv(path), 1):
        if not tokens:
            raise SpecError(f"{path}, sequence {number}: holds no token")
        if len(tokens) != len(labels):
            raise SpecError(
                f"{path}, sequence {number}: {len(tokens)} tokens and {len(labels)} labels; write null (JSONL) or - "
                "(CSV) where nothing is scored"
            )
        if PADDING in tokens or PADDING in labels:
            raise SpecError(f"{path}, sequence {number}: '{PADDING}' is taken; name that token otherwise")
        found += 1
        yield tokens, labels
    if not found:
        raise SpecError(f"{path}: holds no sequence")


def _jsonl(path: Path) -> Iterator[Line]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            body = json.loads(line)
            tokens, labels = body["tokens"], body["labels"]
            yield [str(word) for word in tokens], [None if word is None else str(word) for word in labels]
        except (ValueError, KeyError, TypeError):
            raise SpecError(f'{path}, line {number}: needed {{"tokens": [..], "labels": [..]}}') from None


def _csv(path: Path) -> Iterator[Line]:
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if reader.fieldnames is None or {"tokens", "labels"} - set(reader.fieldnames):
            raise SpecError(f"{path}: needed a header with the columns tokens and labels, got {reader.fieldnames}")
        for row in reader:
            yield row["tokens"].split(), [None if word == "-" else word for word in row["labels"].split()]
