"""Parenthesis balancing (Dyck-1), after the generator of Zhong and Andreas (2024) that the paper uses (appendix H.1).

A string of up to 2 * pairs parentheses, "?", the answer, padding. With probability 1/3 the string is random, of length
1..2*pairs; else balanced, with 1..pairs pairs, grown by wrapping or splitting (half each). Then, maybe, mutations: a
mask in {0..3} says whether places are swapped and whether parentheses are flipped, each a geometric(1/2) number of
times (1, 2, ..); in the balanced branch the mask is cleared with probability 1/2. About half of all are balanced.
"""

from dataclasses import dataclass

import numpy as np

from fixedformer.errors import SpecError
from fixedformer.tasks.task import Examples, Flags, Ids

PAD, OPEN, CLOSE, QUERY = range(4)


@dataclass(frozen=True)
class Dyck:
    """Is the string before "?" balanced? ")" for yes, "(" for no, read at "?" (or, with everywhere=True, the next token
    is scored at every place up to the answer, as in the paper's next-token loss)."""

    pairs: int = 30
    everywhere: bool = False

    name = "dyck"

    def __post_init__(self) -> None:
        if self.pairs < 1:
            raise SpecError(f"pairs must be at least 1, got {self.pairs}")

    vocabulary = (".", "(", ")", "?")

    @property
    def tokens(self) -> int:
        """Length of the inputs: the full 2 * pairs + 3 without the last."""
        return 2 * self.pairs + 2

    def sample(self, count: int, generator: np.random.Generator) -> Examples:
        strings, lengths = self._strings(count, generator)
        rows = np.arange(count)
        answers = np.where(_balanced(strings, lengths), CLOSE, OPEN)
        whole = np.full((count, 2 * self.pairs + 3), PAD, dtype=np.int64)
        whole[:, : 2 * self.pairs] = strings
        whole[rows, lengths] = QUERY
        whole[rows, lengths + 1] = answers
        place = np.arange(self.tokens)
        scored = place <= lengths[:, None] if self.everywhere else place == lengths[:, None]
        return Examples(whole[:, :-1], whole[:, 1:], scored)

    def solve(self, inputs: list[int]) -> list[int]:
        depth, answer, labels = 0, True, [*inputs[1:], PAD]
        for place, token in enumerate(inputs):
            if token == QUERY:
                labels[place] = CLOSE if answer and depth == 0 else OPEN
                break
            depth += 1 if token == OPEN else -1
            answer = answer and depth >= 0
        return labels

    def trivial_rules(self, examples: Examples) -> dict[str, float]:
        """Judged at "?" only: always yes; yes if the length is even; yes if it is even, starts "(" and ends ")"."""
        rows = np.arange(len(examples.inputs))
        lengths = (examples.inputs == QUERY).argmax(1)
        truth = examples.labels[rows, lengths] == CLOSE
        even = lengths % 2 == 0
        ends = (examples.inputs[:, 0] == OPEN) & (examples.inputs[rows, np.maximum(lengths - 1, 0)] == CLOSE)
        rules = {"always balanced": np.ones_like(truth), "even length": even, "even, starts ( and ends )": even & ends}
        return {name: float((guess == truth).mean()) for name, guess in rules.items()}

    def _strings(self, count: int, generator: np.random.Generator) -> tuple[Ids, Ids]:
        """Parentheses (count, 2 * pairs), PAD behind the end, and their lengths."""
        longest = 2 * self.pairs
        random = generator.random(count) < 1 / 3
        grown, pair_count = self._balanced_strings(count, generator)
        lengths = np.where(random, generator.integers(1, longest + 1, count), 2 * pair_count)
        noise = generator.integers(OPEN, CLOSE + 1, (count, longest))
        strings = np.where(random[:, None], noise, grown)
        mutation = generator.integers(0, 4, count)
        mutation[~random & (generator.random(count) < 0.5)] = 0
        _swap(strings, lengths, np.where(mutation & 1, generator.geometric(0.5, count), 0), generator)
        _flip(strings, lengths, np.where(mutation & 2, generator.geometric(0.5, count), 0), generator)
        strings[np.arange(longest) >= lengths[:, None]] = PAD
        return strings, lengths

    def _balanced_strings(self, count: int, generator: np.random.Generator) -> tuple[Ids, Ids]:
        """Balanced strings (count, 2 * pairs) of 1..pairs pairs each, all grown at once, and their pair counts.

        Each row keeps a stack: a number k > 0 stands for "k pairs go here", 0 for a ")" that is due. Popping k either
        splits it into k1 + k2, or writes "(" and pushes k - 1 (if any) above the 0.
        """
        pair_count = generator.integers(1, self.pairs + 1, count)
        strings = np.full((count, 2 * self.pairs), PAD, dtype=np.int64)
        stack = np.zeros((count, 2 * self.pairs + 2), dtype=np.int64)
        stack[:, 0], height, written = pair_count, np.ones(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
        while True:
            rows = np.flatnonzero(height)
            if not rows.size:
                return strings, pair_count
            top = height[rows] - 1
            todo = stack[rows, top]
            split = (todo > 1) & (generator.random(rows.size) < 0.5)
            first = generator.integers(1, np.maximum(todo, 2))  # 1..todo-1 where it is used
            close, wrap = todo == 0, (todo > 0) & ~split
            strings[rows[~split], written[rows[~split]]] = np.where(close[~split], CLOSE, OPEN)
            written[rows[~split]] += 1
            stack[rows[split], top[split]] = (todo - first)[split]
            stack[rows[split], top[split] + 1] = first[split]
            stack[rows[wrap], top[wrap]] = 0
            inner = wrap & (todo > 1)
            stack[rows[inner], top[inner] + 1] = todo[inner] - 1
            height[rows] += split.astype(np.int64) + inner - close


def _swap(strings: Ids, lengths: Ids, times: Ids, generator: np.random.Generator) -> None:
    """In each row exchange two places, `times` times."""
    while (rows := np.flatnonzero(times)).size:
        one, two = (generator.integers(0, lengths[rows]) for _ in range(2))
        strings[rows, one], strings[rows, two] = strings[rows, two], strings[rows, one]
        times[rows] -= 1


def _flip(strings: Ids, lengths: Ids, times: Ids, generator: np.random.Generator) -> None:
    """In each row turn one parenthesis round, `times` times."""
    while (rows := np.flatnonzero(times)).size:
        place = generator.integers(0, lengths[rows])
        strings[rows, place] = OPEN + CLOSE - strings[rows, place]
        times[rows] -= 1


def _balanced(strings: Ids, lengths: Ids) -> Flags:
    inside = np.arange(strings.shape[1]) < lengths[:, None]
    depth = np.where(inside, np.where(strings == OPEN, 1, -1), 0).cumsum(1)
    balanced: Flags = (depth.min(1) >= 0) & (depth[:, -1] == 0)
    return balanced
