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

    def seen_from(self, places: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        """For the flagged places (batch, tokens): their contexts (places,), and how often each context occurs where
        they may look (places, contexts)."""
        row, place = places.nonzero(as_tuple=True)
        columns = torch.arange(self.where.shape[1], device=place.device)
        allowed = torch.ones_like(self.where[row]) if mask is None else (columns <= place[:, None]).to(self.where.dtype)
        counts = torch.zeros(len(row), len(self.tokens), dtype=self.where.dtype, device=place.device)
        return self.where[row, place], counts.scatter_add_(1, self.where[row], allowed)
