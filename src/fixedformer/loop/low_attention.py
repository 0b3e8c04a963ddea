"""Attention of bfloat16 heads on a CPU, as matrix products with a backward pass of their own.

PyTorch's fused kernel turns bfloat16 blocks into float32 and back: at 84 tokens it takes twice as long as in float32,
at 20 tokens ten times. As plain products bfloat16 is what the processor multiplies fastest. Scores, softmax and its
gradient are in float32, as the kernel has them; attention is kept in bfloat16. Causal: blocks of queries, each against
the keys up to its end, so that little above the diagonal is computed. benchmarks/looped_step.py measures it.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

LONGEST = 512  # tokens; from there on the kernel catches up, and tokens^2 numbers a head are too many to keep
BLOCK = 64  # queries at a time, causal


def attend(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | bool) -> Tensor:
    """softmax(query key^T / sqrt(d)) value over (batch, heads, tokens, d), by PyTorch's fused kernel, or by `products`
    where they are faster. allowed: a bool mask, True: causal, or False: all."""
    if isinstance(allowed, Tensor):
        return scaled_dot_product_attention(query, key, value, attn_mask=allowed)
    low = query.dtype == torch.bfloat16 and query.device.type == "cpu"
    if low and 0 < query.shape[-2] <= LONGEST:
        return products(query, key, value, allowed)
    return scaled_dot_product_attention(query, key, value, is_causal=allowed)


def products(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    """The same, as products; query, key and value of one shape, in any format."""
    out: Tensor = _Products.apply(query, key, value, causal)  # type: ignore[no-untyped-call]
    return out


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
        with torch.autocast(query.device.type, enabled=False):  # it would make the float32 products bfloat16 again
            return _forward(ctx, query, key, value, causal)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *attention = ctx.saved_tensors
        gradient, wide = gradients[0].reshape(query.shape), torch.promote_types(query.dtype, torch.float32)
        to_query, to_key, to_value = torch.empty_like(query), key, value  # the latter two until the first block is done
        for number in reversed(range(len(attention))):  # the last block sees every key, so it comes first
            weights = attention[number]
            rows, stop = slice(number * ctx.size, number * ctx.size + weights.shape[1]), weights.shape[2]
            out = gradient[:, rows]
            to_weights = torch.bmm(out, value[:, :stop].mT)
            to_scores = torch._softmax_backward_data(to_weights.to(wide), weights.to(wide), -1, wide).to(query.dtype)
            to_query[:, rows] = torch.bmm(to_scores, key[:, :stop])
            part_key, part_value = torch.bmm(to_scores.mT, query[:, rows]), torch.bmm(weights.mT, out)
            if number == len(attention) - 1:
                to_key, to_value = part_key, part_value
            else:
                to_key[:, :stop] += part_key
                to_value[:, :stop] += part_value
        scale = ctx.shape[-1] ** -0.5
        return to_query.mul_(scale).view(ctx.shape), to_key.mul_(scale).view(ctx.shape), to_value.view(ctx.shape), None


def _forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    shape, tokens = query.shape, query.shape[-2]
    scale, size = shape[-1] ** -0.5, BLOCK if causal else tokens
    query, key, value = (x.reshape(-1, tokens, shape[-1]) for x in (query, key, value))
    wide = torch.promote_types(query.dtype, torch.float32)
    queries, keys = query.to(wide) * scale, key.to(wide)
    attention, outs = [], []
    for start in range(0, tokens, size):
        stop = min(start + size, tokens)
        scores = torch.bmm(queries[:, start:stop], keys[:, : stop if causal else tokens].mT)
        if causal:
            later = torch.ones(stop - start, stop - start, dtype=torch.bool, device=query.device).triu(1)
            scores[..., start:].masked_fill_(later, -torch.inf)
        attention.append(torch.softmax(scores, -1).to(value.dtype))
        outs.append(torch.bmm(attention[-1], value[:, : scores.shape[-1]]))
    ctx.save_for_backward(query, key, value, *attention)
    ctx.shape, ctx.size = shape, size
    return (outs[0] if len(outs) == 1 else torch.cat(outs, 1)).view(shape)


def kept_attention(tokens: int, causal: bool) -> int:
    """Entries of attention that `products` keeps for the backward pass, a head and sequence."""
    if not causal:
        return tokens**2
    stops = [min(start + BLOCK, tokens) for start in range(0, tokens, BLOCK)]
    return sum((stop - start) * stop for start, stop in zip(range(0, tokens, BLOCK), stops))
