"""Attention as matrix products with a backward pass of their own: on a CPU, for bfloat16 heads and short sequences.

PyTorch's fused kernel turns bfloat16 blocks into float32 and back: at 84 tokens it takes twice as long as in float32,
at 20 tokens ten times. As plain products bfloat16 is what the processor multiplies fastest. Scores, softmax and its
gradient are in float32, as the kernel has them; attention is kept in bfloat16. Causal: blocks of queries, each against
the keys up to its end, so that little above the diagonal is computed. benchmarks/looped_step.py measures it.
"""

from collections.abc import Iterator, Sequence
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
        shape, tokens = query.shape, query.shape[-2]
        query, key, value = (x.reshape(-1, tokens, shape[-1]) for x in (query, key, value))
        attention = [value.new_empty(len(value), stop - start, seen) for start, stop, seen in blocks(tokens, causal)]
        out = torch.empty_like(value)
        with torch.autocast(query.device.type, enabled=False):  # it would make the float32 products bfloat16 again
            attend_blocks(query, key, value, causal, shape[-1] ** -0.5, attention, out)
        ctx.save_for_backward(query, key, value, *attention)
        ctx.shape, ctx.causal = shape, causal
        return out.view(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *attention = ctx.saved_tensors
        gradient, scale = gradients[0].reshape(query.shape), ctx.shape[-1] ** -0.5
        to_query, to_key, to_value = backward_blocks(query, key, value, ctx.causal, attention, gradient)
        return to_query.mul_(scale).view(ctx.shape), to_key.mul_(scale).view(ctx.shape), to_value.view(ctx.shape), None


def blocks(tokens: int, causal: bool) -> Iterator[tuple[int, int, int]]:
    """First query, end of queries and end of the keys that they see, of every block."""
    size = BLOCK if causal else tokens
    for start in range(0, tokens, size):
        stop = min(start + size, tokens)
        yield start, stop, stop if causal else tokens


def kept_attention(tokens: int, causal: bool) -> int:
    """Entries of attention that are kept for the backward pass, a head and sequence."""
    return sum((stop - start) * seen for start, stop, seen in blocks(tokens, causal))


def attend_blocks(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float, attention: Sequence[Tensor],
                  out: Tensor) -> None:  # fmt: skip
    """softmax(scale query key^T) value of (heads, tokens, d) into `out`, and every block's softmax into `attention`."""
    wide = torch.promote_types(query.dtype, torch.float32)
    queries, keys = query.to(wide) * scale if scale != 1 else query.to(wide), key.to(wide)
    for weights, (start, stop, seen) in zip(attention, blocks(query.shape[1], causal), strict=True):
        scores = torch.bmm(queries[:, start:stop], keys[:, :seen].mT)
        if causal:  # adding is quicker than masked_fill_
            later = torch.full((stop - start, stop - start), -torch.inf, dtype=wide, device=query.device)
            scores[..., start:] += later.triu_(1)
        weights.copy_(torch.softmax(scores, -1, out=scores))
        out[:, start:stop] = torch.bmm(weights, value[:, :seen])


def backward_blocks(query: Tensor, key: Tensor, value: Tensor, causal: bool, attention: Sequence[Tensor],
                    gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of scale * query, of key over scale, and of value, of that of the output (heads, tokens, d)."""
    to_query, to_key, to_value = torch.empty_like(query), key, value  # the latter two until the first block is done
    spans = list(blocks(query.shape[1], causal))
    for number in reversed(range(len(spans))):  # the last block sees every key, so it comes first
        weights, (start, stop, seen) = attention[number], spans[number]
        out = gradient[:, start:stop]
        to_scores = _to_scores(weights, torch.bmm(out, value[:, :seen].mT))
        to_query[:, start:stop] = torch.bmm(to_scores, key[:, :seen])
        part_key, part_value = torch.bmm(to_scores.mT, query[:, start:stop]), torch.bmm(weights.mT, out)
        if number == len(spans) - 1:
            to_key, to_value = part_key, part_value
        else:
            to_key[:, :seen] += part_key
            to_value[:, :seen] += part_value
    return to_query, to_key, to_value


def _to_scores(weights: Tensor, to_weights: Tensor) -> Tensor:
    """The gradient of the scores, computed in float32 at least; bfloat16 rows below 64 are quicker turned before."""
    wide = torch.promote_types(weights.dtype, torch.float32) if weights.shape[-1] < 64 else weights.dtype
    return torch._softmax_backward_data(to_weights.to(wide), weights.to(wide), -1, wide).to(weights.dtype)
