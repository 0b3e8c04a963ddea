"""Countdown: reach a target from four numbers with + - * /, each number used once.

    58 84 48 62 96 | 62 - 58 = 4 48 / 4 = 12 84 + 12 = 96 .

The five numbers are given, then fifteen blanks and the full stop; the answer is read where the blanks stand. All 1152
ways of putting four numbers together are evaluated for a whole batch at once; one that hits the target is the label,
drawn uniformly or the first of them; pairs of numbers and target without one are drawn again. Sums, products and
quotients stay within 1..largest; the larger operand comes first. A tenth of the targets is kept for validation and
test.
"""

from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fixedformer.errors import SpecError
from fixedformer.tasks.task import Array, Examples, Ids

SIGNS = "+-*/"
GIVEN, ANSWER = 5, 15
CHUNK = 256  # problems at once: their 1152 results stay in the cache
Equation = tuple[int, str, int, int]


@cache
def _table(largest: int) -> NDArray[np.int64]:
    """Larger op smaller for the four signs, packed: entry a * (largest + 1) + b is four int16, 0 where not allowed.

    0 is no result (results are 1..largest), and what comes of it is 0 again.
    """
    a, b = np.meshgrid(np.arange(largest + 1), np.arange(largest + 1), indexing="ij")
    high, low = np.maximum(a, b), np.minimum(a, b)
    safe = np.maximum(low, 1)
    made = np.stack([high + low, high - low, high * low, np.where(high % safe == 0, high // safe, 0)], axis=-1)
    made[(low == 0) | (high == 0)] = 0
    made[(made < 1) | (made > largest)] = 0
    packed: NDArray[np.int64] = made.astype(np.int16).reshape(-1, 4).view(np.int64)[:, 0]
    return packed


def _combine(one: NDArray[Any], two: NDArray[Any], largest: int) -> NDArray[Any]:
    """(..., 4): what the four signs make of two numbers each, 0 where that is not allowed."""
    packed = _table(largest).take(one.astype(np.intp) * (largest + 1) + two)
    made: NDArray[Any] = packed.view(np.int16).reshape(*packed.shape, 4)
    return made


def _rest(count: int, pair: tuple[int, int]) -> list[int]:
    return [i for i in range(count) if i not in pair]


def _ways() -> list[tuple[tuple[int, int], int, tuple[int, int], int, int]]:
    """Every way: first pair and sign, second pair and sign (of what is then left, the new number last), last sign."""
    return [
        (pair, sign, second, other, last)
        for pair in combinations(range(4), 2) for sign in range(4)
        for second in combinations(range(3), 2) for other in range(4) for last in range(4)
    ]  # fmt: skip


WAYS = _ways()


def results(numbers: Ids, largest: int) -> NDArray[Any]:
    """What each of the 1152 ways makes of four numbers (count, 4): (count, 1152), 0 where a step is not allowed."""
    whole = np.empty((len(numbers), 6, 4, 3, 4, 4), dtype=np.int16)
    for number, pair in enumerate(combinations(range(4), 2)):
        first = _combine(numbers[:, pair[0]], numbers[:, pair[1]], largest)  # (count, 4)
        left = [np.broadcast_to(numbers[:, i : i + 1], first.shape) for i in _rest(4, pair)] + [first]
        for then, second in enumerate(combinations(range(3), 2)):
            made = _combine(left[second[0]], left[second[1]], largest)  # (count, 4, 4)
            spare = np.broadcast_to(left[_rest(3, second)[0]][:, :, None], made.shape)
            whole[:, number, :, then] = _combine(spare, made, largest)
    return whole.reshape(len(numbers), -1)


@dataclass(frozen=True)
class Countdown:
    """numbers: inputs are uniform in 1..numbers. low, high: of the target. largest: of any number on the way (one token
    each). held: which targets are drawn: "train", "test" (every tenth, by split_seed), or "all". label: which of the
    ways that hit is the label: "drawn", any of them, or "first", the first of `WAYS`, so that it is a function of the
    input: a model that says all fifteen places at once cannot agree with itself on one of several."""

    numbers: int = 99
    low: int = 10
    high: int = 100
    largest: int = 100
    held: str = "train"
    split_seed: int = 0
    label: str = "drawn"

    name = "countdown"
    tokens = GIVEN + ANSWER + 1

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high <= self.largest or not 1 <= self.numbers <= self.largest:
            raise SpecError(
                f"needed 1 <= low <= high <= largest and numbers <= largest, got low {self.low}, high {self.high}, "
                f"numbers {self.numbers}, largest {self.largest}"
            )
        if self.largest > 181:
            raise SpecError(f"largest is at most 181 (products are held in 16 bits), got {self.largest}")
        if self.held not in ("train", "test", "all"):
            raise SpecError(f"held must be train, test or all, got {self.held!r}")
        if self.label not in ("drawn", "first"):
            raise SpecError(f"label must be drawn or first, got {self.label!r}")

    def held_out(self) -> "Countdown":
        """The same game with the targets that training never sees."""
        return replace(self, held="test")

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """Number k is token k; then the signs, = and the full stop."""
        return (*(str(k) for k in range(self.largest + 1)), *SIGNS, "=", ".")

    @property
    def targets(self) -> Ids:
        """The targets that are drawn."""
        every = np.arange(self.low, self.high + 1)
        kept = np.random.default_rng([10, self.split_seed]).permutation(every)[: max(1, len(every) // 10)]
        if self.held == "all":
            return every
        return np.sort(kept) if self.held == "test" else np.setdiff1d(every, kept)

    def sample(self, count: int, generator: np.random.Generator) -> Examples:
        parts, left = [], count
        while left > 0:
            numbers = generator.integers(1, self.numbers + 1, (min(CHUNK, max(16, 2 * left)), 4))
            target = generator.choice(self.targets, len(numbers))
            hits = results(numbers, self.largest) == target[:, None]
            solvable = np.flatnonzero(hits.any(1))[:left]
            hits = hits[solvable]
            if self.label == "first":
                ways = hits.argmax(1)
            else:  # a uniform one of them: the first after ordering them at random
                ways = np.where(hits, generator.random(hits.shape, dtype=np.float32), 2).argmin(1)
            parts.append(self._write(numbers[solvable], target[solvable], ways))
            left -= len(solvable)
        inputs, labels = (np.concatenate([part[i] for part in parts]) for i in range(2))
        scored = np.zeros(inputs.shape, dtype=np.bool_)
        scored[:, GIVEN : GIVEN + ANSWER] = True
        return Examples(inputs, labels, scored)

    def _write(self, numbers: Ids, target: Ids, ways: Ids) -> tuple[Ids, Ids]:
        labels = np.zeros((len(numbers), self.tokens), dtype=np.int64)
        labels[:, :4], labels[:, 4], labels[:, -1] = numbers, target, self.largest + 6
        for row, way in enumerate(ways.tolist()):
            at = GIVEN
            for high, sign, low, result in equations(numbers[row].tolist(), way):
                plus = self.largest + 1
                labels[row, at : at + 5] = [high, plus + SIGNS.index(sign), low, plus + 4, result]
                at += 5
        inputs = labels.copy()
        inputs[:, GIVEN : GIVEN + ANSWER] = 0
        return inputs, labels

    def solve(self, inputs: list[int]) -> list[int]:
        """One right answer, by plain search; the label may be another."""
        found = search(inputs[:4], inputs[4], self.largest)
        if found is None:
            raise SpecError(f"no way to make {inputs[4]} of {inputs[:4]}")
        plus, labels = self.largest + 1, list(inputs[:GIVEN])
        for high, sign, low, result in found:
            labels += [high, plus + SIGNS.index(sign), low, plus + 4, result]
        return [*labels, inputs[-1]]

    def right(self, inputs: list[int], answer: list[int]) -> bool:
        """Whether fifteen answer tokens are three right equations, the four numbers used once, the target last."""
        bag, plus = list(inputs[:4]), self.largest + 1
        for start in (0, 5, 10):
            one, sign, two, equals, result = answer[start : start + 5]
            if equals != plus + 4 or not plus <= sign < plus + 4 or max(one, two, result) > self.largest:
                return False
            if one not in bag:
                return False
            bag.remove(one)
            if two not in bag:
                return False
            bag.remove(two)
            fits = {"+": one + two == result, "-": one - two == result, "*": one * two == result,
                    "/": two != 0 and one == two * result}[SIGNS[sign - plus]]  # fmt: skip
            if not fits:
                return False
            bag.append(result)
        return bag == [inputs[4]]

    def measures(self, examples: Examples, predictions: Array) -> dict[str, float]:
        """Share of sequences answered exactly as the label, and share answered rightly, in whatever way."""
        exact = ((predictions == examples.labels) | ~examples.scored).all(1)
        answers = predictions[:, GIVEN : GIVEN + ANSWER].tolist()
        right = [self.right(given, answer) for given, answer in zip(examples.inputs.tolist(), answers)]
        return {"exactly the label": float(exact.mean()), "right answers": float(np.mean(right))}

    def trivial_rules(self, examples: Examples) -> dict[str, float]:
        """Places right for: always 0; the numbers in order with + between and the target last."""
        guess = np.zeros_like(examples.labels)
        plus, inputs = self.largest + 1, examples.inputs
        for equation in range(3):
            start = GIVEN + 5 * equation
            guess[:, start] = inputs[:, equation]
            guess[:, start + 1], guess[:, start + 3] = plus, plus + 4
            guess[:, start + 2] = inputs[:, equation + 1]
        guess[:, GIVEN + ANSWER - 1] = inputs[:, 4]
        return {"always 0": examples.accuracy(np.zeros_like(guess)), "signs and target": examples.accuracy(guess)}


def equations(numbers: list[int], way: int) -> list[Equation]:
    """The three equations (larger, sign, smaller, result) of one of the ways."""
    pair, sign, second, other, last = WAYS[way]
    found = [_equation(numbers[pair[0]], numbers[pair[1]], sign)]
    left = [numbers[i] for i in _rest(4, pair)] + [found[0][3]]
    found.append(_equation(left[second[0]], left[second[1]], other))
    found.append(_equation(left[_rest(3, second)[0]], found[1][3], last))
    return found


def _equation(one: int, two: int, sign: int) -> Equation:
    high, low = max(one, two), min(one, two)
    result = (high + low, high - low, high * low, high // low if low else 0)[sign]
    return high, SIGNS[sign], low, result


def search(numbers: list[int], target: int, largest: int) -> list[Equation] | None:
    """Depth-first search for equations, within 1..largest; None where there is none (an oracle for tests)."""
    if len(numbers) == 1:
        return [] if numbers[0] == target else None
    for i, j in combinations(range(len(numbers)), 2):
        high, low = max(numbers[i], numbers[j]), min(numbers[i], numbers[j])
        rest = [n for k, n in enumerate(numbers) if k not in (i, j)]
        options = [("+", high + low), ("-", high - low), ("*", high * low)]
        options += [("/", high // low)] if low and high % low == 0 else []
        for sign, result in options:
            if not 1 <= result <= largest:
                continue
            after = search([*rest, result], target, largest)
            if after is not None:
                return [(high, sign, low, result), *after]
    return None
