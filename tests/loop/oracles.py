"""Definitions in plain Python, straight from the statements. Nothing here imports the code under test."""

from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import combinations
from math import floor

Number = Fraction | int


def rect(x: Number, start: Number, stop: Number, edge: Number) -> Number | None:
    """1, 0, or None on the ramps."""
    if start <= x <= stop - edge:
        return 1
    if x <= start - edge or x >= stop:
        return 0
    return None


def sequence_id(ids: Sequence[int], base: int) -> int:
    return sum(z * base ** (len(ids) - j) for j, z in enumerate(sorted(ids, reverse=True), 1))


def extended_id(tokens: Sequence[tuple[int, int]], base: int) -> int:
    """2 s less the last coordinate of the least id; tokens are (id, last coordinate)."""
    least = min(tokens)
    return 2 * sequence_id([z for z, _ in tokens], base) - least[1]


def coordinates(z: int, d: int, n: int) -> list[int]:
    digits = []
    for _ in range(d):
        z, digit = divmod(z, n)
        digits.append(digit)
    return digits[::-1]


def contextual_ids(ids: Sequence[int], d: int, n: int) -> list[int]:
    """Equation (46) with the corrections of the errata: k of each token, in the tokens' order."""
    base = n**d
    extended = extended_id([(z, coordinates(z, d, n)[-1]) for z in ids], base)
    return [2 * base ** len(ids) * z + extended for z in ids]


def reached(d: int, tokens: int, n: int) -> list[tuple[int, ...]]:
    """Sequences with entries of their own, tokens sorted: distinct ids, and equal pairs for two tokens."""
    base = n**d
    found = [tuple(reversed(c)) for c in combinations(range(base), tokens)]
    return found + ([(z, z) for z in range(base)] if tokens == 2 else [])


class ReferenceTable:
    """The values that Theorem 3.6's network must give, one index at a time, by the formulas of Lemma 4.1."""

    def __init__(self, function: Callable, d: int, tokens: int, n: int) -> None:
        self.d, self.n, self.size = d, n, 2 * n ** (d * (tokens + 1))
        known: dict[int, list[Fraction]] = {}
        for ids in reached(d, tokens, n):
            rows = function([[c / n for c in coordinates(z, d, n)] for z in ids])
            for k, row in zip(contextual_ids(ids, d, n), rows):
                known[k] = [Fraction(float(v)) for v in row]
        order = sorted(known)
        self.values = []  # (K, d), lines between known entries
        for k in range(self.size):
            right = next((o for o in order if o >= k), order[-1])
            left = max((o for o in order if o <= k), default=order[0])
            share = Fraction(k - left, right - left) if right > left else Fraction(0)
            self.values.append([a + share * (b - a) for a, b in zip(known[left], known[right])])
        self.step = [max(abs(self.values[k][i] - self.values[k - 1][i]) for k in range(1, self.size)) for i in range(d)]

    def answer(self, k: int) -> list[Fraction]:
        """y_0 + step (floor((y_k - y_0)/step) + 1/2), per dimension."""
        out = []
        for i in range(self.d):
            start, step = self.values[0][i], self.step[i]
            out.append(start + step * (floor((self.values[k][i] - start) / step) + Fraction(1, 2)) if step else start)
        return out
