"""Scores -> weights -> mix. Pure mathematics on tensors; rows are tokens; no 1/sqrt(d) anywhere (fold it into W_Q)."""

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from fixedformer.errors import SpecError

Mask = Tensor | Literal["causal"] | None


def resolve_mask(mask: Mask, tokens: int, device: torch.device | str = "cpu") -> Tensor | None:
    """Turn "causal" or a boolean array into a mask that broadcasts against scores (..., heads, tokens, tokens).

    mask: None (every token sees every token), "causal" (token i sees j <= i), or a bool tensor (..., tokens, tokens),
    True = attend; leading axes are those of the batch. Returns None or a bool tensor (..., 1, tokens, tokens).
    Raises SpecError for another shape or dtype, and for a row that may attend to nothing (its softmax is 0/0).
    """
    if mask is None:
        return None
    if isinstance(mask, str):
        if mask != "causal":
            raise SpecError(f"mask must be None, 'causal' or a bool tensor, got '{mask}'")
        return torch.ones(1, tokens, tokens, dtype=torch.bool, device=device).tril()
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise SpecError(f"a mask must be a bool tensor (True = attend), got {kind}; convert it with mask.bool()")
    if mask.ndim < 2 or mask.shape[-2:] != (tokens, tokens):
        raise SpecError(f"a mask for {tokens} tokens must end in ({tokens}, {tokens}), got {tuple(mask.shape)}")
    empty = ~mask.any(-1)
    if empty.any():
        where = [int(i) for i in empty.nonzero()[0]]
        raise SpecError(
            f"mask row {where} lets its token attend to nothing, so its softmax is undefined; let every token attend "
            "to at least itself"
        )
    return mask.unsqueeze(-3).to(device)


def softmax_weights(scores: Tensor, mask: Tensor | None = None) -> Tensor:
    """Row-wise softmax of `scores` (..., queries, keys); entries where `mask` is False get weight exactly 0."""
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return torch.softmax(scores, dim=-1)


def attention_weights(query: Tensor, key: Tensor, mask: Tensor | None = None) -> Tensor:
    """softmax(query key^T) with masked entries exactly 0: `softmax_weights` of the scores, in one buffer.

    query (..., queries, d), key (..., keys, d) -> (..., queries, keys). The tokens x tokens scores are what attention
    holds in memory: they are masked as they are made, and where no gradient is wanted normalised in place.
    """
    if mask is not None and mask.ndim == 3 and query.ndim > 3:  # one mask for all: the product can start from it
        bias = torch.zeros(mask.shape[-2:], dtype=query.dtype, device=query.device).masked_fill_(~mask[0], -torch.inf)
        flat = query.reshape(-1, *query.shape[-2:]), key.reshape(-1, *key.shape[-2:]).mT
        scores = torch.baddbmm(bias.expand(flat[0].shape[0], *bias.shape), *flat).view(*query.shape[:-1], key.shape[-2])
    else:
        scores = query @ key.mT
        if mask is not None:
            scores.masked_fill_(~mask, -torch.inf)  # the product's gradient does not need its value
    if scores.requires_grad:
        return torch.softmax(scores, dim=-1)
    return torch.softmax(scores, dim=-1, out=scores)


def mix(query: Tensor, key: Tensor, rows: Tensor, mask: Mask, allowed: Tensor | None) -> Tensor:
    """A^h rows for every head: query, key (..., heads, tokens, d), rows (..., tokens, k) -> (..., heads, tokens, k).

    The rows are shared by all heads. Fused where they are no wider than d; else one product for all heads, (heads *
    tokens, tokens) times rows, with no copy of the rows for each head.
    """
    if rows.shape[-1] <= query.shape[-1]:
        shared = rows.unsqueeze(-3).expand(*query.shape[:-1], rows.shape[-1])
        return attend(query, key, shared, mask, allowed)
    attention = attention_weights(query, key, allowed)
    moved: Tensor = (attention.flatten(-3, -2) @ rows).unflatten(-2, attention.shape[-3:-1])
    return moved


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Mask, allowed: Tensor | None) -> Tensor:
    """softmax(query key^T) value by PyTorch's fused kernel, which holds no tokens x tokens matrix.

    query, key (..., heads, tokens, d), value (..., heads, tokens, v); mask as the caller gave it, allowed as resolved.
    The kernel wants one width, so the narrower of d and v is padded with zeros: worth it while they are of one order.
    """
    width, wanted = max(query.shape[-1], value.shape[-1]), value.shape[-1]
    query, key, value = (pad(x, (0, width - x.shape[-1])) for x in (query, key, value))
    causal = isinstance(mask, str)
    out = scaled_dot_product_attention(
        query, key, value, attn_mask=None if causal else allowed, is_causal=causal, scale=1.0
    )
    return out[..., :wanted]


def hardmax_weights(scores: Tensor, mask: Tensor | None = None) -> Tensor:
    """Average-hard attention: equal weight on every key whose score is the row's maximum, 0 elsewhere.

    Ties must be exact: scores that should tie have to be equal as floating-point numbers (use integers).
    """
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    best = (scores == scores.amax(-1, keepdim=True)).to(scores.dtype)
    return best / best.sum(-1, keepdim=True)


def rotate(x: Tensor, base: float = 10000.0) -> Tensor:
    """Rotary position encoding of queries or keys x (..., tokens, d), d even, positions 0, 1, 2, ...

    Channels i and i + d/2 form a plane that turns by position * base^(-2 i / d) (the half-split convention of GPT-NeoX
    and Llama). Angles are computed in float64 and rounded once.
    """
    tokens, width = x.shape[-2:]
    if width % 2:
        raise SpecError(f"rotary positions turn channels in pairs: d_head must be even, got {width}")
    rate = base ** (-torch.arange(0, width, 2, dtype=torch.float64, device=x.device) / width)  # (d/2,)
    angle = torch.arange(tokens, dtype=torch.float64, device=x.device)[:, None] * rate  # (tokens, d/2)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
