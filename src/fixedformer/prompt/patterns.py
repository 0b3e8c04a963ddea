"""Attention that looks at positions only is the same for every input: find it once, on the distinct queries."""

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from fixedformer.attention import hardmax_weights, softmax_weights
from fixedformer.prompt.network import Block, Head

# Score matrices are made in pieces of at most this many numbers (64 MB in float64), and batches in slices to match.
PIECE = 1 << 23
# exp of less than this below the best score is 0 in float64 (and in float32, from -104 on): softmax is then one-hot.
_VANISHES = 746.0


@dataclass(frozen=True)
class Sliced:
    """A matrix without its zero rows: x @ matrix = x[..., reads] @ part."""

    reads: Tensor | slice
    part: Tensor

    @classmethod
    def of(cls, matrix: Tensor) -> "Sliced":
        reads = matrix.any(1).nonzero()[:, 0]
        return cls(as_slice(reads), matrix[reads].contiguous())

    def __call__(self, state: Tensor) -> Tensor:
        return state[..., self.reads] @ self.part


@dataclass(frozen=True)
class Pattern:
    """Fixed attention weights: row `inverse[i]` of `weights` (distinct queries, tokens) belongs to token i.

    Where every row has a single 1, `pick` holds its place, `weights` is None and mixing is a gather.
    """

    inverse: Tensor
    weights: Tensor | None
    pick: Tensor | None

    def mix(self, values: Tensor) -> Tensor:
        """Mixed values (batch, distinct queries, values) of values (batch, tokens, values)."""
        if self.weights is None:
            return values[:, self.pick]
        return self.weights @ values


def as_slice(places: Tensor) -> Tensor | slice:
    """Consecutive places as a slice: indexing with it makes no copy."""
    if len(places) and int(places[-1]) - int(places[0]) == len(places) - 1:
        return slice(int(places[0]), int(places[-1]) + 1)
    return places


def attention_weights(block: Block, scores: Tensor, rows: slice = slice(None)) -> Tensor:
    """Weights by the block's rule, for the score rows `rows` (..., queries, tokens)."""
    mask = None if block.mask is None else block.mask[rows]
    return hardmax_weights(scores, mask) if block.rule == "hard" else softmax_weights(scores, mask)


def find_patterns(block: Block, heads: list[Head], state: Tensor, positions: int) -> tuple[list[Pattern | None], float]:
    """The pattern of each head, None for heads that look at more than the first `positions` channels; the margin.

    state: (tokens, width), of which only the position channels are read. The margin is the smallest difference between
    a query's best score and the best score below it, over all patterns found.
    """
    patterns: list[Pattern | None] = [None] * len(heads)
    margin = float("inf")
    alike: dict[bytes, list[int]] = defaultdict(list)  # heads with equal keys share one score matrix
    for number, head in enumerate(heads):
        if block.mask is None and not head.query[positions:].any() and not head.key[positions:].any():
            alike[signature(head.key)].append(number)
    for members in alike.values():
        keys = Sliced.of(heads[members[0]].key)(state).mT  # (head width, tokens)
        queries, inverses = zip(*[_distinct(Sliced.of(heads[number].query)(state)) for number in members])
        best, places = _best_two(torch.cat(queries), keys)
        start = 0
        for number, query, inverse in zip(members, queries, inverses):
            rows = slice(start, start + len(query))
            start += len(query)
            gap = float((best[rows, 0] - best[rows, 1]).min())
            if gap > (0.0 if block.rule == "hard" else _VANISHES):
                patterns[number] = Pattern(inverse, None, places[rows, 0])
            else:
                scores = query @ keys
                below = torch.where(scores == best[rows, :1], -torch.inf, scores).amax(-1)
                gap = float((best[rows, 0] - below).min())
                patterns[number] = Pattern(inverse, attention_weights(block, scores), None)
            margin = min(margin, gap)
    return patterns, margin


def signature(*matrices: Tensor) -> bytes:
    """Equal for equal matrices."""
    parts = []
    for matrix in matrices:
        places = matrix.nonzero()
        parts += [places.numpy().tobytes(), matrix[places[:, 0], places[:, 1]].numpy().tobytes()]
        parts.append(repr(tuple(matrix.shape)).encode())
    return b"|".join(parts)


def _best_two(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Per query the two best scores and their places, each (queries, 2); one key counts twice where it is the only."""
    tokens = keys.shape[1]
    if tokens == 1:
        score = queries @ keys
        return score.expand(-1, 2), torch.zeros(len(queries), 2, dtype=torch.long)
    parts = [(part @ keys).topk(2, dim=-1) for part in torch.split(queries, max(1, PIECE // tokens))]
    return torch.cat([part.values for part in parts]), torch.cat([part.indices for part in parts])


def _distinct(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct rows, and for each row the place of its equal there (torch.unique sorts, which is slower)."""
    places: dict[bytes, int] = {}
    inverse = [places.setdefault(row.tobytes(), len(places)) for row in rows.contiguous().numpy()]
    first = {place: index for index, place in reversed(list(enumerate(inverse)))}
    return rows[[first[place] for place in range(len(places))]], torch.tensor(inverse)
