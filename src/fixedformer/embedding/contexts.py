"""Places that the first layer cannot tell apart: same token, same counts of the tokens they see.

Without positions, a layer's output at a place depends on its own state and on *how often* each other state occurs where
it may look. So after the first layer there are only as many states as there are distinct (token, counts) pairs: of the
62,000 places of a batch of 1,000 parenthesis strings, 31,530 matter to the answers, and 1,555 differ. Whatever costs
much a place, such as an MLP, is done once a context.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fixedformer.attention import Mask
from fixedformer.embedding.engines import counts_suffice
from fixedformer.target import TargetSpec


@dataclass(frozen=True, eq=False)
class Sight:
    """What a layer's places see of the states below.

    own (places,): the index of each one's own state. seen (places, k): indices of states, times (places, k): how often
    each is seen, 0 for not at all. An index may occur more than once.
    """

    own: Tensor
    seen: Tensor
    times: Tensor

    def weights(self, query: Tensor, key: Tensor) -> Tensor:
        """Attention (heads, places, states), for query and key (states, heads, d).

        Equal states have equal keys, so it is the softmax of S[own, u] + log(times of u).
        """
        scores = torch.einsum("phd,uhd->hpu", query.index_select(0, self.own), key)
        index = self.seen.expand(len(scores), -1, -1)
        seen = torch.softmax(scores.gather(2, index) + self.times.to(scores.dtype).log(), dim=-1)
        return torch.zeros_like(scores).scatter_add(2, index, seen)


@dataclass(frozen=True, eq=False)
class Contexts:
    """The distinct contexts of a batch X (batch, tokens) of token ids.

    tokens (contexts,): each one's own token. counts (contexts, d_in): how often each token of the vocabulary occurs
    where it may look, itself included. where (batch, tokens): the context of every place.
    """

    tokens: Tensor
    counts: Tensor
    where: Tensor

    @classmethod
    def of(cls, X: Tensor, d_in: int, mask: Mask, needed: Tensor | None = None) -> "Contexts":
        """For mask None or "causal". Places outside `needed` (batch, tokens) are not counted and share some context."""
        one_hot = torch.nn.functional.one_hot(X, d_in)
        seen = one_hot.cumsum(-2) if mask is not None else one_hot.sum(-2, keepdim=True).expand_as(one_hot)
        digits = (X.shape[-1] + 1) ** torch.arange(d_in, device=X.device)  # base tokens + 1: no two counts collide
        keys = (seen @ digits) * d_in + X
        if needed is not None:
            keys = torch.where(needed, keys, keys[needed][0])
        distinct, where = torch.unique(keys, return_inverse=True)
        counts = (distinct // d_in)[:, None] // digits % (X.shape[-1] + 1)
        return cls(distinct % d_in, counts, where)

    @staticmethod
    def fit(tokens: int, d_in: int) -> bool:
        """Whether token and counts fit one 63-bit number, which is what `of` needs."""
        return bool(d_in * (tokens + 1) ** d_in < 2**63)

    @property
    def sight(self) -> Sight:
        """What the first layer's places see of the vocabulary."""
        vocabulary = torch.arange(self.counts.shape[1], device=self.counts.device)
        return Sight(self.tokens, vocabulary.expand_as(self.counts), self.counts)

    def seen_from(self, places: Tensor, mask: Mask) -> Sight:
        """What the flagged places (batch, tokens) see of the contexts."""
        row, place = places.nonzero(as_tuple=True)
        columns = torch.arange(self.where.shape[1], device=place.device)
        times = torch.ones_like(self.where[row]) if mask is None else (columns <= place[:, None]).to(self.where.dtype)
        return Sight(self.where[row, place], self.where[row], times)


def contexts_apply(spec: TargetSpec, X: Tensor, mask: Mask) -> bool:
    """Whether the first layer's states are those of its distinct contexts, and `Contexts.of` can tell them apart."""
    return counts_suffice(spec, X, mask) and X.ndim == 2 and Contexts.fit(X.shape[1], spec.d_in)


def two_sights(spec: TargetSpec, X: Tensor, mask: Mask, places: Tensor) -> tuple[Sight, Sight] | None:
    """What the two layers of a machine see if only the flagged places (batch, tokens) are wanted.

    None where that is no short way: other than two layers, positions, vectors, a large vocabulary, or nothing wanted.
    """
    if spec.layers != 2 or not contexts_apply(spec, X, mask) or not bool(places.any()):
        return None
    needed = places.flip(-1).cummax(-1).values.flip(-1) if mask is not None else torch.ones_like(places)
    contexts = Contexts.of(X, spec.d_in, mask, needed)
    return contexts.sight, contexts.seen_from(places, mask)
