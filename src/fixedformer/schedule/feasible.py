"""Which problems have a schedule at all: the obstructions, each with its reason, found before any search.

Every flow here is invertible and treats tokens alike, so what is equal in X stays equal and what differs stays
different. Where attention has only one thing to look at it is the identity, and the token moves by one linear map x ->
x G common to all sequences, det G > 0. Statements and proofs: docs/theory/schedule.md, section 3.
"""

from dataclasses import dataclass

import numpy as np

from fixedformer.schedule.field import Array

SAME = 1e-12
"""Numbers that agree to this share of the largest entry count as equal: closer pairs cannot be told apart in float64.
"""
LINEAR = 1e-9
"""A linear relation that is broken by less than this share is rounding of the targets."""


@dataclass(frozen=True)
class Feasibility:
    """`feasible`, and the reasons where it is not (empty otherwise). `feasible` means: no known obstruction."""

    reasons: tuple[str, ...]

    @property
    def feasible(self) -> bool:
        return not self.reasons

    def __bool__(self) -> bool:
        return self.feasible

    def __str__(self) -> str:
        return "no obstruction" if self.feasible else "; ".join(self.reasons)


def check(X: Array, Y: Array, causal: bool) -> Feasibility:
    """All obstructions between X and Y (sequences, tokens, d), both finite."""
    reasons = ties_of_prefixes(X, Y) if causal else ties_of_sequences(X, Y) + ties_of_tokens(X, Y)
    if not causal and X.shape[2] == 1:
        reasons += order_on_a_line(X, Y)
    return Feasibility(tuple(reasons + linear_obstructions(X, Y, causal)))


def close(a: Array, b: Array) -> bool:
    """Equal to rounding, in the scale of the entries."""
    return bool(
        np.abs(a - b).max(initial=0.0) <= SAME * max(np.abs(a).max(initial=0.0), np.abs(b).max(initial=0.0), 1.0)
    )


def ties_of_tokens(X: Array, Y: Array) -> list[str]:
    """Without a mask, equal tokens of one sequence see the same and stay equal; different ones stay different."""
    reasons = []
    for s, (x, y) in enumerate(zip(X, Y)):
        for i in range(len(x)):
            for j in range(i):
                before, after = close(x[i], x[j]), close(y[i], y[j])
                if before != after:
                    reasons.append(
                        f"sequence {s}: tokens {j} and {i} are equal in {'X' if before else 'Y'} but not in "
                        f"{'Y' if before else 'X'}, and equal tokens stay equal"
                    )
    return reasons


def same_tokens(x: Array, y: Array) -> list[int] | None:
    """A permutation p with x[i] = y[p[i]], or None. Greedy is enough: equality is (to rounding) transitive."""
    left = list(range(len(y)))
    found = []
    for token in x:
        match = next((j for j in left if close(token, y[j])), None)
        if match is None:
            return None
        left.remove(match)
        found.append(match)
    return found


def ties_of_sequences(X: Array, Y: Array) -> list[str]:
    """Without a mask a sequence is a set: two that hold the same tokens, in any order, move alike."""
    reasons = []
    for s in range(len(X)):
        for r in range(s):
            for name, other, of, to in (("X", "Y", X, Y), ("Y", "X", Y, X)):
                order = same_tokens(of[s], of[r])
                if order is not None and not close(to[s], to[r][order]):
                    reasons.append(
                        f"sequences {r} and {s} hold the same tokens in {name} but not, in the same order, in {other}: "
                        "a permutation tie"
                    )
    return reasons


def ties_of_prefixes(X: Array, Y: Array) -> list[str]:
    """Under a causal mask sequences that begin alike stay alike as far as they did, and no further."""
    reasons = []
    for s in range(len(X)):
        for r in range(s):
            before, after = shared_prefix(X[s], X[r]), shared_prefix(Y[s], Y[r])
            if before != after:
                reasons.append(
                    f"sequences {r} and {s} share a prefix of {before} token(s) in X and of {after} in Y: under a "
                    "causal mask shared prefixes stay shared, and only they"
                )
    return reasons


def shared_prefix(x: Array, y: Array) -> int:
    """Number of leading tokens that agree."""
    return next((i for i in range(len(x)) if not close(x[i], y[i])), len(x))


def prefix_ties(X: Array) -> tuple[tuple[int, int, int], ...]:
    """(r, s, tokens) for each sequence s that shares its longest prefix with an earlier sequence r."""
    found = []
    for s in range(1, len(X)):
        shared = [shared_prefix(X[s], X[r]) for r in range(s)]
        if max(shared):
            found.append((int(np.argmax(shared)), s, max(shared)))
    return tuple(found)


def order_on_a_line(X: Array, Y: Array) -> list[str]:
    """d = 1, no mask: tokens of a sequence follow one field on a line, so they never pass each other."""
    return [
        f"sequence {s}: with d = 1 the tokens keep their order, and X and Y order them differently"
        for s, (x, y) in enumerate(zip(X[..., 0], Y[..., 0]))
        if any((x[i] - x[j]) * (y[i] - y[j]) < 0 for i in range(len(x)) for j in range(i))
    ]


def linear_places(X: Array, causal: bool) -> list[tuple[int, int]]:
    """(sequence, token) of tokens that see only copies of themselves, so that attention is the identity there."""
    sequences, tokens, _ = X.shape
    if causal:
        return [
            (s, i) for s in range(sequences) for i in range(tokens) if all(close(X[s, i], X[s, j]) for j in range(i))
        ]
    return [(s, 0) for s in range(sequences) if all(close(X[s, 0], X[s, j]) for j in range(tokens))]


def linear_obstructions(X: Array, Y: Array, causal: bool) -> list[str]:
    """Tokens that see only themselves move by one linear map with positive determinant."""
    places = linear_places(X, causal)
    if linear_places(Y, causal) != places:
        return ["tokens equal to all that they attend to stay so, and only they; X and Y have them at different places"]
    if not places:
        return []
    first, last = (np.array([of[s, i] for s, i in places]) for of in (X, Y))
    where = "first tokens (they attend only to themselves)" if causal else "tokens that see only copies of themselves"
    for (s, _), x, y in zip(places, first, last):
        if (np.abs(x).max() == 0) != (np.abs(y).max() == 0):
            return [f"sequence {s}: a zero vector among the {where} stays zero, and only it"]
    scale, d = max(np.abs(last).max(), 1e-300), X.shape[2]
    G = np.linalg.pinv(first) @ last
    broken = float(np.abs(first @ G - last).max())
    if broken > LINEAR * scale:
        return [f"the {where} move by one linear map X_1 -> X_1 G, and the best G misses Y_1 by {broken:.2g}"]
    rank, after = np.linalg.matrix_rank(first), np.linalg.matrix_rank(last)
    if rank != after:
        return [
            f"the {where} span {rank} dimension(s) in X and {after} in Y; an invertible linear map keeps that number"
        ]
    if rank == d and np.linalg.det(G) <= 0:
        return [f"the {where} need the linear map G with det G = {np.linalg.det(G):.2g}; flows have det G > 0"]
    return []
