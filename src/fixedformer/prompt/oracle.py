"""What a single attention layer computes, in plain Python on lists: the judge of the simulator.

Shares no code with the network. Every sum is `math.fsum` (correctly rounded), so the only errors are those of single
products, of exp and of one division: see `certify` for what they add up to.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

Matrix = Sequence[Sequence[float]]


@dataclass(frozen=True)
class HeadResult:
    """One head: attention weights P, output O = P X V, and the sizes of the numbers that went into them.

    score_size: the largest |X| |A| |X|^T (absolute values throughout). output_size: P (|X| |V|), entry by entry.
    score_largest: the largest |S|.
    """

    weights: list[list[float]]
    output: list[list[float]]
    score_size: float
    score_largest: float
    output_size: list[list[float]]


def multiply(left: Matrix, right: Matrix) -> list[list[float]]:
    """The matrix product."""
    columns = list(zip(*right))
    return [[math.fsum(a * b for a, b in zip(row, column)) for column in columns] for row in left]


def transpose(matrix: Matrix) -> list[list[float]]:
    """Rows become columns."""
    return [list(column) for column in zip(*matrix)]


def absolute(matrix: Matrix) -> list[list[float]]:
    """Entry by entry."""
    return [[abs(entry) for entry in row] for row in matrix]


def softmax_row(scores: Sequence[float], allowed: Sequence[bool]) -> list[float]:
    """exp(s - max) over its sum, on the allowed places; 0 on the others."""
    top = max(score for score, use in zip(scores, allowed) if use)
    powers = [math.exp(score - top) if use else 0.0 for score, use in zip(scores, allowed)]
    total = math.fsum(powers)
    return [power / total for power in powers]


def attention_head(
    scores_from: tuple[Matrix, ...], value: Matrix, X: Matrix, mask: Sequence[Sequence[bool]], scale: float
) -> HeadResult:
    """softmax(scale * X A X^T) X V for scores_from = (A,), or with A = W_Q W_K^T for scores_from = (W_Q, W_K)."""
    if len(scores_from) == 1:
        left, right = multiply(X, scores_from[0]), X
        left_size, right_size = multiply(absolute(X), absolute(scores_from[0])), absolute(X)
    else:
        left, right = multiply(X, scores_from[0]), multiply(X, scores_from[1])
        left_size, right_size = (multiply(absolute(X), absolute(part)) for part in scores_from)
    scores = [[scale * entry for entry in row] for row in multiply(left, transpose(right))]
    sizes = multiply(left_size, transpose(right_size))
    weights = [softmax_row(row, allowed) for row, allowed in zip(scores, mask)]
    return HeadResult(
        weights=weights,
        output=multiply(weights, multiply(X, value)),
        score_size=abs(scale) * max(max(row) for row in sizes),
        score_largest=max(abs(entry) for row in scores for entry in row),
        output_size=multiply(weights, multiply(absolute(X), absolute(value))),
    )


def sum_matrices(matrices: Sequence[Matrix]) -> list[list[float]]:
    """Entry by entry."""
    return [[math.fsum(entries) for entries in zip(*rows)] for rows in zip(*matrices)]
