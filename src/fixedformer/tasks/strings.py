"""Two strings and one number: edit distance and longest common subsequence, as looped transformers are tried on.

    a b a c | a c a <sep> . .      read at <sep>: the number, one token

Lengths vary, padding stands behind. All distances of a batch are computed at once, anti-diagonal by anti-diagonal: the
entries of one do not depend on each other.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fixedformer.errors import SpecError
from fixedformer.tasks.task import Examples, Ids

ALPHABET = "abcdefghijklmnopqrstuvwxyz"
PAD, BAR, SEP = range(3)
CHUNK = 1024  # pairs at once: three anti-diagonals of 1024 x 60 int16 stay in the cache
Letters = NDArray[np.uint8]


def distances(
    first: Letters, lengths: Ids, second: Letters, others: Ids, insert: int, delete: int, replace: int
) -> Ids:
    """Cheapest edits that turn row i of `first` (count, n) into row i of `second` (count, m).

    lengths, others (count,): how much of each row counts. Returns (count,). Longest common subsequence of a and b is
    (|a| + |b| - distance with costs 1, 1, 2) / 2.
    """
    found = np.zeros(len(first), dtype=np.int64)
    for start in range(0, len(first), CHUNK):
        part = slice(start, start + CHUNK)
        found[part] = _diagonals(first[part].T, lengths[part], second[part].T, others[part], (insert, delete, replace))
    return found


def _diagonals(first: Letters, lengths: Ids, second: Letters, others: Ids, costs: tuple[int, int, int]) -> Ids:
    """first (n, count), second (m, count). Diagonal k holds D[i, k - i], i = 0..n, for all pairs of the chunk."""
    insert, delete, replace = (np.int16(cost) for cost in costs)
    (n, count), m = first.shape, len(second)
    first, backwards = np.ascontiguousarray(first), np.ascontiguousarray(second[::-1])
    found, rows, ends = np.zeros(count, dtype=np.int64), np.arange(count), lengths + others
    before = np.zeros((n + 1, count), dtype=np.int16)  # diagonal k - 2
    last = np.zeros_like(before)  # k - 1
    for k in range(1, n + m + 1):
        low, high = max(0, k - m), min(n, k)
        now = np.empty_like(last)
        inner = slice(max(low, 1), min(high, k - 1) + 1)  # i >= 1 and k - i >= 1: all three edits are possible
        shifted = slice(inner.start - 1, inner.stop - 1)
        if inner.stop > inner.start:
            # second[k - i - 1] is backwards[m - k + i]
            differs = first[shifted] != backwards[m - k + inner.start : m - k + inner.stop]
            best = before[shifted] + differs * replace
            np.minimum(best, last[shifted] + delete, out=best)
            np.minimum(best, last[inner] + insert, out=now[inner])
        if low == 0:
            now[0] = k * insert
        if high == k:
            now[k] = k * delete
        here = rows[ends == k]
        found[here] = now[lengths[here], here]
        before, last = last, now
    return found


@dataclass(frozen=True)
class _Pairs:
    """What both tasks share: layout, vocabulary, and the rules that understand nothing."""

    length: int = 20
    letters: int = 26

    def __post_init__(self) -> None:
        if self.length < 4 or not 2 <= self.letters <= 26:
            raise SpecError(f"needed length >= 4 and 2..26 letters, got length {self.length}, letters {self.letters}")

    @property
    def longest(self) -> int:
        """Of the second string."""
        return self.length

    @property
    def largest(self) -> int:
        """The largest label."""
        return self.length

    @property
    def numbers(self) -> int:
        """Token of the label 0."""
        return 3 + self.letters

    @property
    def vocabulary(self) -> tuple[str, ...]:
        return (".", "|", "<sep>", *ALPHABET[: self.letters], *(str(k) for k in range(self.largest + 1)))

    @property
    def tokens(self) -> int:
        return self.length + self.longest + 2

    def pairs(self, count: int, generator: np.random.Generator) -> tuple[Letters, Ids, Letters, Ids]:
        """Two strings a row, letters 0, 1, .., and their lengths."""
        raise NotImplementedError

    def answers(self, first: Letters, lengths: Ids, second: Letters, others: Ids) -> Ids:
        raise NotImplementedError

    def sample(self, count: int, generator: np.random.Generator) -> Examples:
        first, lengths, second, others = self.pairs(count, generator)
        rows, place = np.arange(count)[:, None], np.arange(self.tokens)
        inputs = np.full((count, self.tokens), PAD, dtype=np.int64)
        inputs[:, : first.shape[1]] = 3 + first
        inputs[place == lengths[:, None]] = BAR
        within = np.arange(second.shape[1])
        keep = within < others[:, None]
        where = (lengths[:, None] + 1 + within)[keep]
        inputs[np.broadcast_to(rows, keep.shape)[keep], where] = 3 + second[keep]
        end = (lengths + 1 + others)[:, None]
        inputs[place == end] = SEP
        inputs[place > end] = PAD
        labels = np.zeros_like(inputs)
        scored = place == end
        labels[scored] = self.numbers + self.answers(first, lengths, second, others)
        return Examples(inputs, labels, scored)

    def split(self, inputs: list[int]) -> tuple[list[int], list[int], int]:
        """The two strings of a sequence and the place where the answer is read."""
        bar, end = inputs.index(BAR), inputs.index(SEP)
        return inputs[:bar], inputs[bar + 1 : end], end

    def trivial_rules(self, examples: Examples) -> dict[str, float]:
        """Always the commonest label; the commonest for as many equal places; for as many letters in common.

        What is commonest is counted on 20,000 other pairs.
        """
        labels = examples.labels[examples.scored]
        rules = {"commonest label": float((labels == self._common["all"][0]).mean())}
        for name, feature in self._features(examples.inputs).items():
            table = self._common[name]
            rules[name] = float((labels == table[np.minimum(feature, len(table) - 1)]).mean())
        return rules

    @cached_property
    def _common(self) -> dict[str, Ids]:
        """For each rule, the commonest label for each value of its feature."""
        examples = self.sample(20_000, np.random.default_rng([9, self.length]))
        labels = examples.labels[examples.scored]
        whole = np.bincount(labels).argmax()
        tables = {"all": np.array([whole])}
        for name, feature in self._features(examples.inputs).items():
            counts = np.zeros((feature.max() + 1, labels.max() + 1), dtype=np.int64)
            np.add.at(counts, (feature, labels), 1)
            tables[name] = np.where(counts.any(1), counts.argmax(1), whole)
        return tables

    def _features(self, inputs: Ids) -> dict[str, Ids]:
        place = np.arange(inputs.shape[1])
        bar, end = (inputs == BAR).argmax(1)[:, None], (inputs == SEP).argmax(1)[:, None]
        one, two = place < bar, (place > bar) & (place < end)
        source = np.minimum(place + bar + 1, inputs.shape[1] - 1)
        same = (np.take_along_axis(inputs, source, 1) == inputs) & one & (place + bar + 1 < end)
        common = sum(
            np.minimum(((inputs == 3 + c) & one).sum(1), ((inputs == 3 + c) & two).sum(1)) for c in range(self.letters)
        )
        return {"by equal places": same.sum(1), "by letters in common": np.asarray(common)}


@dataclass(frozen=True)
class EditDistance(_Pairs):
    """Algorithm 1 of the paper (after Feng et al. 2023): a first string of `length` over 3..10 of the letters; with
    probability 0.4 a random second one, length-3 .. length+2 long, else `length` random edits of the first, drawn again
    until the length fits. costs: insert, delete, replace. shorter_first: as the reference generator puts them."""

    costs: tuple[int, int, int] = (2, 2, 3)
    shorter_first: bool = True

    name = "edit-distance"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.letters < 3:
            raise SpecError(f"edit distance draws words over 3 letters or more, got {self.letters}")
        if len(self.costs) != 3 or not all(isinstance(cost, int) and cost > 0 for cost in self.costs):
            raise SpecError(f"costs are three whole numbers above 0 (insert, delete, replace), got {self.costs}")

    @property
    def longest(self) -> int:
        return self.length + 2

    @property
    def largest(self) -> int:
        insert, delete, replace = self.costs
        return self.length * min(replace, insert + delete) + 3 * max(insert, delete)

    def pairs(self, count: int, generator: np.random.Generator) -> tuple[Letters, Ids, Letters, Ids]:
        n = self.length
        sizes = generator.integers(3, min(10, self.letters) + 1, count)
        # `sizes` different letters a row: the first of a random order of the alphabet
        order = generator.random((count, self.letters), dtype=np.float32).argsort(1).astype(np.uint8)

        def letters(wanted: int) -> Letters:
            picks = (generator.random((count, wanted), dtype=np.float32) * sizes[:, None]).astype(np.intp)
            return np.take_along_axis(order, np.minimum(picks, sizes[:, None] - 1), axis=1)

        first, fresh, spare = letters(n), letters(n + 2), letters(n)
        random = generator.random(count) < 0.4
        kinds = self._kinds(count, generator)
        edited, lengths = _edit(first, kinds, spare, n + 2, generator)
        others = np.where(random, generator.integers(n - 3, n + 3, count), lengths)
        second = np.where(random[:, None], fresh, edited)
        whole = np.full(count, n, dtype=np.int64)
        if not self.shorter_first:
            return first, whole, second, others
        turn = others < n
        wide = np.zeros((count, n + 2), dtype=np.uint8)
        wide[:, :n] = first
        return (
            np.where(turn[:, None], second, wide),
            np.where(turn, others, n),
            np.where(turn[:, None], wide, second),
            np.where(turn, n, others),
        )

    def _kinds(self, count: int, generator: np.random.Generator) -> NDArray[np.int8]:
        """-1 pop, 0 substitute, 1 insert, (count, n): rows drawn again until the length ends in n-3 .. n+2."""
        kinds = np.zeros((count, self.length), dtype=np.int8)
        todo = np.arange(count)
        while todo.size:
            kinds[todo] = generator.integers(-1, 2, (todo.size, self.length), dtype=np.int8)
            change = kinds[todo].sum(1, dtype=np.int64)
            todo = todo[(change < -3) | (change > 2)]
        return kinds

    def answers(self, first: Letters, lengths: Ids, second: Letters, others: Ids) -> Ids:
        return distances(first, lengths, second, others, *self.costs)

    def solve(self, inputs: list[int]) -> list[int]:
        one, two, end = self.split(inputs)
        insert, delete, replace = self.costs
        row = [insert * j for j in range(len(two) + 1)]
        for i, a in enumerate(one, 1):
            above, row = row, [delete * i]
            for j, b in enumerate(two, 1):
                row.append(min(above[j] + delete, row[-1] + insert, above[j - 1] + (0 if a == b else replace)))
        labels = [0] * len(inputs)
        labels[end] = self.numbers + row[-1]
        return labels


def _edit(
    first: Letters, kinds: NDArray[np.int8], spare: Letters, wanted: int, generator: np.random.Generator
) -> tuple[Letters, Ids]:
    """Each row of `first` after its edits in turn, each at a random place of the string as it then is."""
    count, n = first.shape
    places = generator.random((n, count))
    parts = [slice(start, start + CHUNK) for start in range(0, count, CHUNK)]
    edited = [_edit_chunk(first[p], kinds[p], spare[p], wanted, places[:, p]) for p in parts]
    return np.concatenate([text for text, _ in edited]), np.concatenate([lengths for _, lengths in edited])


def _edit_chunk(
    first: Letters, kinds: NDArray[np.int8], spare: Letters, wanted: int, places: NDArray[np.float64]
) -> tuple[Letters, Ids]:
    count, n = first.shape
    room = max(wanted, int(n + np.maximum(kinds, 0).sum(1).max()) + 1)
    text = np.zeros((count, room), dtype=np.uint8)
    text[:, :n] = first
    small = np.uint8 if room < 256 else np.int16
    lengths, place = np.full(count, n), np.arange(room, dtype=small)
    for step in range(n):
        kind = kinds[:, step]
        at = (places[step] * lengths).astype(small)[:, None]
        here, behind = place == at, place > at
        moved = text.copy()
        np.copyto(moved[:, :-1], text[:, 1:], where=(kind == -1)[:, None] & (behind | here)[:, :-1])
        np.copyto(moved[:, 1:], text[:, :-1], where=(kind == 1)[:, None] & behind[:, 1:])
        np.copyto(moved, spare[:, step : step + 1], where=(kind != -1)[:, None] & here)
        text, lengths = moved, lengths + kind
    return text[:, :wanted], lengths


@dataclass(frozen=True)
class LongestCommonSubsequence(_Pairs):
    """Two uniform strings of `length` over `letters` letters (the paper gives no alphabet); label: the length of their
    longest common subsequence."""

    letters: int = 4

    name = "lcs"

    def pairs(self, count: int, generator: np.random.Generator) -> tuple[Letters, Ids, Letters, Ids]:
        strings = generator.integers(0, self.letters, (2, count, self.length), dtype=np.uint8)
        whole = np.full(count, self.length, dtype=np.int64)
        return strings[0], whole, strings[1], whole

    def answers(self, first: Letters, lengths: Ids, second: Letters, others: Ids) -> Ids:
        return (lengths + others - distances(first, lengths, second, others, 1, 1, 2)) // 2

    def solve(self, inputs: list[int]) -> list[int]:
        one, two, end = self.split(inputs)
        row = [0] * (len(two) + 1)
        for a in one:
            above, row = row, [0]
            for j, b in enumerate(two, 1):
                row.append(above[j - 1] + 1 if a == b else max(above[j], row[-1]))
        labels = [0] * len(inputs)
        labels[end] = self.numbers + row[-1]
        return labels
