"""Two evaluations of a machine. `run_dense` is the definition; `run_paths` never forms an m-wide state.

With P_p = A^{l,h_l} .. A^{1,h_1} X the state of the machine after l layers is sum_p P_p (E R_V^p), so all that the
machine ever shows of E are its read-outs (tree.py). Path space carries P (tokens x d_in per path) and multiplies it
with them: queries and keys of a layer are one product, and m has left the cost. docs/theory/embedding.md, section 5.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fixedformer.attention import Mask, attend, attention_weights, mix, resolve_mask, rotate, softmax_weights
from fixedformer.embedding.tree import PathTree
from fixedformer.inputs import embed_rows, one_hot_rows
from fixedformer.target import TargetSpec

Watch = Callable[[Tensor], None] | None


class DenseWeights(Protocol):
    """The machine's matrices as the definition writes them; layers and heads count from 0."""

    spec: TargetSpec

    def dense_query(self, layer: int, head: int, dtype: torch.dtype) -> Tensor: ...

    def dense_key(self, layer: int, head: int, dtype: torch.dtype) -> Tensor: ...

    def dense_value(self, layer: int, head: int, dtype: torch.dtype) -> Tensor: ...

    def dense_unembed(self, dtype: torch.dtype) -> Tensor: ...


def run_dense(
    machine: DenseWeights,
    embedding: Tensor,
    X: Tensor,
    mask: Mask = None,
    watch: Watch = None,
    unembedding: Tensor | None = None,
) -> Tensor:
    """The definition, literally: state (..., tokens, m), one m x m product a head and layer.

        A^{l,h} = softmax(X~ R_Q^{l,h} (X~ R_K^{l,h})^T),   X~ <- [X~ +] sum_h A^{l,h} X~ R_V^{l,h},   out = X~ U

    X comes from `as_input`. `watch` is called with each layer's attention (..., heads, tokens, tokens). unembedding
    replaces U.
    """
    spec, dtype = machine.spec, embedding.dtype
    state = embed_rows(X, embedding)
    allowed = resolve_mask(mask, state.shape[-2], state.device)
    if allowed is not None:
        allowed = allowed.squeeze(-3)  # one head at a time here
    for layer in range(spec.layers):
        update, seen = torch.zeros_like(state), []
        for head in range(spec.heads):
            query = state @ machine.dense_query(layer, head, dtype)
            key = state @ machine.dense_key(layer, head, dtype)
            if spec.positions == "rotary":
                query, key = rotate(query, spec.rotary_base), rotate(key, spec.rotary_base)
            attention = softmax_weights(query @ key.mT, allowed)
            update = update + attention @ (state @ machine.dense_value(layer, head, dtype))
            if watch is not None:
                seen.append(attention)
        if watch is not None:
            watch(torch.stack(seen, dim=-3))
        state = state + update if spec.residual else update
    return state @ (machine.dense_unembed(dtype) if unembedding is None else unembedding)


@dataclass(frozen=True, eq=False)
class PathWeights:
    """Read-outs arranged for multiplication; differentiable in whatever they were made from.

    Paths of one depth are ordered by their *last* branch first, so that one layer more is a concatenation.
    inner[t]: (B^t d_in, 2Hd), all queries and keys of layer t + 1. leaves: (B^{L-1} d_in, B, d_out), the last branch in
    an axis of its own.
    """

    inner: tuple[Tensor, ...]
    leaves: Tensor

    @classmethod
    def of(cls, readouts: Tensor, tree: PathTree) -> "PathWeights":
        """From E R_all (d_in, N), columns in the order of the tree."""

        def block(depth: int) -> Tensor:  # (b_depth, .., b_1, d_in, own)
            columns = tree.columns(depth).to(readouts.device)
            nodes = readouts[:, columns.flatten()].reshape(-1, *(tree.branching,) * depth, columns.shape[1])
            return nodes.permute(*range(depth, 0, -1), 0, depth + 1)

        inner = tuple(block(depth).flatten(0, -2).contiguous() for depth in range(tree.layers))
        last = block(tree.layers).reshape(tree.branching, -1, tree.d_out)  # (B, B^{L-1} d_in, d_out)
        return cls(inner, last.transpose(0, 1).contiguous())

    def with_leaves(self, leaves: Tensor) -> "PathWeights":
        """The same inner read-outs with other leaves (b_1, .., b_L, d_in, d_out)."""
        depth = leaves.ndim - 2
        last = leaves.permute(*reversed(range(depth)), depth, depth + 1)
        last = last.reshape(leaves.shape[0], -1, leaves.shape[-1])
        return PathWeights(self.inner, last.transpose(0, 1).contiguous())


def run_paths(spec: TargetSpec, weights: PathWeights, X: Tensor, mask: Mask = None, watch: Watch = None) -> Tensor:
    """The same function as `run_dense`, from the read-outs alone. X comes from `as_input`.

    Differentiable in the weights. The last layer goes the other way round (values first, then attention): d_out columns
    a head, not B^{L-1} d_in. The first layer, on token ids without positions, needs no tokens x tokens matrix.
    """
    leaves = weights.leaves
    residual = leaves.shape[1] > spec.heads
    d_in = leaves.shape[0] // leaves.shape[1] ** (spec.layers - 1)
    paths = one_hot_rows(X, d_in, leaves.dtype)  # (..., tokens, B^t d_in), B^0 to start with
    allowed = resolve_mask(mask, paths.shape[-2], paths.device)
    for layer, inner in enumerate(weights.inner):
        last = layer == spec.layers - 1
        if layer == 0 and not last and watch is None and counts_suffice(spec, X, mask):
            heads = first_layer_by_counts(inner, paths, mask, spec.heads)
            paths = torch.cat([paths, heads], dim=-1) if residual else heads
            continue
        both = inner[X] if layer == 0 and not X.is_floating_point() else paths @ inner
        query, key = both.unflatten(-1, (2, spec.heads, spec.d_head)).movedim((-3, -2), (0, -3))
        if spec.positions == "rotary":
            query, key = rotate(query, spec.rotary_base), rotate(key, spec.rotary_base)
        if last:
            return _last_layer(query, key, paths, leaves, (mask, allowed), watch)
        del both
        if watch is not None:
            watch(attention_weights(query, key, allowed))
        moved = mix(query, key, paths, mask, allowed)  # (..., heads, tokens, B^t d_in)
        del query, key  # what is carried on must not wait beside what is no longer needed
        heads = moved.movedim(-3, -2).flatten(-2)  # (..., tokens, H B^t d_in): the last branch counts most
        paths = torch.cat([paths, heads], dim=-1) if residual else heads
    raise AssertionError("a spec has at least one layer")


def _last_layer(
    query: Tensor, key: Tensor, paths: Tensor, leaves: Tensor, masks: tuple[Mask, Tensor | None], watch: Watch
) -> Tensor:
    """sum over branches of A^b P leaves_b, values first: (..., tokens, d_out). Fused, unless attention is watched."""
    values = (paths @ leaves.flatten(1)).unflatten(-1, leaves.shape[1:])  # (..., tokens, B, d_out)
    skips = leaves.shape[1] - query.shape[-3]
    heads = values[..., skips:, :].movedim(-2, -3)  # (..., heads, tokens, d_out)
    if watch is None and heads.shape[-1] <= 2 * query.shape[-1]:
        mixed = attend(query, key, heads, *masks)
    else:
        attention = attention_weights(query, key, masks[1])
        if watch is not None:
            watch(attention)
        mixed = attention @ heads
    out = mixed.sum(-3)
    return out + values[..., 0, :] if skips else out


def counts_suffice(spec: TargetSpec, X: Tensor, mask: Mask) -> bool:
    """Whether layer 1 sees tokens only through how often each occurs: ids, no positions, causal mask or none."""
    return not X.is_floating_point() and spec.positions is None and (mask is None or isinstance(mask, str))


def first_layer_by_counts(inner: Tensor, one_hot: Tensor, mask: Mask, heads: int) -> Tensor:
    """A^{1,h} X of every head (..., tokens, heads * d_in) for one-hot X, without a tokens x tokens matrix.

    Equal tokens have equal keys, so row i of A^h X is, over the tokens c of the vocabulary, the softmax of
    S^h[token i, c] + log(how often c occurs where i may look).
    """
    query, key = inner.reshape(inner.shape[0], 2, heads, -1).unbind(1)  # (d_in, heads, d)
    table = torch.einsum("vhd,chd->vhc", query, key)
    seen = one_hot.cumsum(-2) if mask is not None else one_hot.sum(-2, keepdim=True)
    logits = (one_hot @ table.flatten(1)).unflatten(-1, table.shape[1:])  # (..., tokens, heads, d_in)
    return torch.softmax(logits + seen.log().unsqueeze(-2), dim=-1).flatten(-2)
