"""Attention layers as they are found in files: `nn.MultiheadAttention`, and self-attention of `transformers` models.

Every one of them is Y = sum_h softmax(scale * (X W_Q^h + b_Q^h)(X W_K^h + b_K^h)^T) (X W_V^h + b_V^h) W_O^h + b_O. A
column of ones in X takes the biases of queries, keys and values as one more row of their matrices; one more value
column, which is 1, carries b_O (the rows of softmax sum to 1). What a model adds around it (norms, residuals, rotary or
relative positions) is not part of the layer. A state dict tells neither the scale nor the positions: notes say what to
check. Weights that change the scores themselves (norms of queries and keys, sinks) are refused.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fixedformer.errors import SpecError, StorageError
from fixedformer.inputs import finite

# name of the query matrix -> names of (query, key, value) and of the output, relative to the layer. Rows are outputs
# (torch.nn.Linear) everywhere but in GPT-2's fused c_attn, whose rows are inputs.
# "../": beside the module that holds the queries, BERT's `self` or ViT's inner `attention`.
_SEPARATE = {
    "query": (("query", "key", "value"), ("../output.dense", "dense", "out_proj")),
    "q_proj": (("q_proj", "k_proj", "v_proj"), ("out_proj", "o_proj")),
    "q_lin": (("q_lin", "k_lin", "v_lin"), ("out_lin",)),
}
_ANCHORS = ("in_proj_weight", "q_proj_weight", "c_attn.weight", *(f"{name}.weight" for name in _SEPARATE))
# Modules and parameters inside a layer that change its scores, so that what is simulated would be another layer.
_FOREIGN = ("q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_layernorm", "key_layernorm", "sinks")
_NOTES = {
    "o_proj": "layers with o_proj usually rotate queries and keys; this simulates the layer without positions",
    "out_proj": "positions inside the layer (rotary, as in GPT-J) and a score scale other than 1/sqrt(head width) "
                "(GPT-Neo's is 1) are not in the file; this simulates the layer without positions: check both",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """One self-attention layer, biases folded in.

    query, key (heads, d, d_k); value (heads, d, d_v); output (heads, d_v, d_out) or None. ones: X needs a last column
    of ones (`extend` adds it). name: where it stood. scale: what multiplies the scores; `query` does not contain it.
    note: a sentence for the person, or "".
    """

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor | None
    ones: bool
    name: str
    scale: float
    note: str = ""

    @property
    def heads(self) -> int:
        return self.query.shape[0]

    @property
    def d_in(self) -> int:
        """Columns that an input must have."""
        return self.query.shape[1] - self.ones

    def extend(self, X: Tensor) -> Tensor:
        """X (..., n, d_in), with the column of ones where the layer has biases. SpecError for another width."""
        if X.ndim < 2 or X.shape[-1] != self.d_in:
            raise SpecError(f"layer {self.name!r} takes inputs (..., n, {self.d_in}), got {tuple(X.shape)}")
        return torch.cat([X, X.new_ones(*X.shape[:-1], 1)], dim=-1) if self.ones else X


def read_layer(
    tensors: Mapping[str, Tensor], heads: int, layer: str | None = None, scale: float | None = None
) -> AttentionLayer:
    """Find the attention layer in a state dict and split it into heads.

    heads: the number of query heads (a state dict does not say). layer: the start of its names, where the file holds
    more than one. scale: what multiplies the scores, 1/sqrt(head width) when left out (a state dict does not say that
    either). Fewer key heads than query heads (grouped queries) are repeated. Raises StorageError where no layer is
    found, SpecError where several are, where the shapes contradict `heads`, and for a layer that normalises queries or
    keys.
    """
    if scale is not None and not (math.isfinite(scale) and scale > 0):
        raise SpecError(f"scale must be a positive number, got {scale!r}; leave it out for 1/sqrt(head width)")
    prefix, anchor = _find(tensors, layer)
    (query, key, value), output, note = _parts(tensors, prefix, anchor)
    width = query[0].shape[0]
    if heads < 1 or width % heads:
        raise SpecError(f"layer {prefix or '(root)'!r} has {width} query rows, which {heads} heads cannot share; give "
                        "the layer's number of heads")  # fmt: skip
    d_k = width // heads
    d_in = query[0].shape[1]
    groups = key[0].shape[0] // d_k  # heads of keys and values: fewer than `heads` for grouped queries
    split = [
        _by_head(query, "query", heads, heads, d_in),
        _by_head(key, "key", groups, heads, d_in),
        _by_head(value, "value", groups, heads, d_in),
    ]
    if split[1][0].shape[2] != d_k:
        raise SpecError(f"queries have width {d_k} a head, keys {split[1][0].shape[2]}; they must agree")
    ones = output is not None and output[1] is not None
    ones |= any(bias is not None for _, bias in (query, key, value))
    query_by_head, key_by_head, value_by_head = (_with_bias(weight, bias, ones) for weight, bias in split)
    out = None
    if output is not None:
        value_by_head, out = _output(value_by_head, output, heads, prefix)
        finite(out, "the layer's output")
    return AttentionLayer(
        finite(query_by_head, "the layer's query"),
        finite(key_by_head, "the layer's key"),
        finite(value_by_head, "the layer's value"),
        out,
        ones,
        prefix,
        float(d_k**-0.5 if scale is None else scale),
        note,
    )


_Linear = tuple[Tensor, Tensor | None]  # weight (out, in), bias (out)


def _find(tensors: Mapping[str, Tensor], layer: str | None) -> tuple[str, str]:
    found = sorted(
        (name[: -len(anchor)], anchor)
        for name in tensors
        for anchor in _ANCHORS
        if name == anchor or name.endswith(f".{anchor}")
    )
    if layer is not None:
        start = layer.rstrip(".") + "."
        found = [(prefix, anchor) for prefix, anchor in found if prefix.startswith(start)]
    if not found:
        seen = ", ".join(sorted(tensors)[:6]) or "nothing"
        where = f" under {layer!r}" if layer is not None else ""
        raise StorageError(
            f"no attention layer{where}: needed in_proj_weight (torch), query/key/value, q_proj/k_proj/v_proj, q_lin "
            f"or c_attn weights (transformers); the file holds {seen}"
        )
    if len(found) > 1:
        names = ", ".join(repr(prefix.rstrip(".")) for prefix, _ in found[:8])
        raise SpecError(f"the file holds {len(found)} attention layers; choose one of {names} ...")
    return found[0]


def _parts(tensors: Mapping[str, Tensor], prefix: str, anchor: str) -> tuple[list[_Linear], _Linear | None, str]:
    """Query, key and value, the output, and a note."""

    def get(name: str) -> Tensor | None:
        tensor = tensors.get(prefix + name)
        return None if tensor is None else tensor.detach().to(torch.float64)

    def need(name: str, rank: int = 2) -> Tensor:
        tensor = get(name)
        if tensor is None or tensor.ndim != rank:
            raise StorageError(f"the layer needs a tensor {prefix + name!r} with {rank} axes, got "
                               f"{'none' if tensor is None else tuple(tensor.shape)}")  # fmt: skip
        return tensor

    foreign = sorted(name for name in tensors if name.startswith(prefix)
                     and name.removeprefix(prefix).split(".")[0] in _FOREIGN)  # fmt: skip
    if foreign:
        raise SpecError(f"needed a layer whose scores are queries times keys, got one with {', '.join(foreign)} too "
                        "(norms of queries and keys, or sinks), which the simulator has no place for; choose a layer "
                        "without")  # fmt: skip
    if anchor in ("in_proj_weight", "q_proj_weight"):
        if get("bias_k") is not None:
            raise SpecError("this layer has bias_k and bias_v (an extra key), which the simulator has no place for")
        weights = (
            list(need("in_proj_weight").chunk(3))
            if anchor == "in_proj_weight"
            else [need(f"{name}_proj_weight") for name in "qkv"]
        )
        bias = get("in_proj_bias")
        biases = [None] * 3 if bias is None else list(bias.chunk(3))
        return list(zip(weights, biases)), (need("out_proj.weight"), get("out_proj.bias")), ""
    if anchor == "c_attn.weight":
        bias = get("c_attn.bias")
        biases = [None] * 3 if bias is None else list(bias.chunk(3))
        fused = need("c_attn.weight").mT.chunk(3)
        return list(zip(fused, biases)), (need("c_proj.weight").mT, get("c_proj.bias")), ""
    names, outputs = _SEPARATE[anchor.removesuffix(".weight")]
    linears = [(need(f"{name}.weight"), get(f"{name}.bias")) for name in names]
    places = {output: _outside(tensors, prefix) + output[3:] if output.startswith("../") else prefix + output
              for output in outputs}  # fmt: skip
    for output, place in places.items():
        if f"{place}.weight" in tensors:
            inside = {name: tensors.get(f"{place}.{name}") for name in ("weight", "bias")}
            weight, bias = (None if part is None else part.detach().to(torch.float64) for part in inside.values())
            assert weight is not None  # its name is in the file
            return linears, (weight, bias), _NOTES.get(output, "")
    looked = ", ".join(f"{place}.weight" for place in places.values())
    return linears, None, f"no output projection found: heads are concatenated (looked for {looked})"


def _outside(tensors: Mapping[str, Tensor], prefix: str) -> str:
    """The module around the one that holds the queries: BERT's ends in "attention.self.", ViT's in
    "attention.attention.", which is "attention." in the state dict of the attention alone. A module with
    `intermediate.dense` is a whole block, whose `output.dense` belongs to its MLP."""
    for inner in ("self.", "attention."):
        outside = prefix.removesuffix(inner)
        if outside != prefix and f"{outside}intermediate.dense.weight" not in tensors:
            return outside
    return prefix


def _by_head(part: _Linear, name: str, groups: int, heads: int, d_in: int) -> _Linear:
    """Rows of a linear map split into `groups`, repeated to `heads`: (heads, in, width), bias (heads, 1, width)."""
    weight, bias = part
    if weight.shape[1] != d_in or not groups or heads % groups or weight.shape[0] % groups:
        raise SpecError(f"the layer's {name} has shape {tuple(weight.shape)}, which does not fit {heads} heads and "
                        f"{d_in} inputs (cross-attention is not simulated)")  # fmt: skip
    split = weight.reshape(groups, -1, d_in).mT.repeat_interleave(heads // groups, dim=0)
    if bias is None:
        return split, None
    return split, bias.reshape(groups, 1, -1).repeat_interleave(heads // groups, dim=0)


def _with_bias(weight: Tensor, bias: Tensor | None, ones: bool) -> Tensor:
    """One more row for the column of ones in X."""
    if not ones:
        return weight.contiguous()
    row = weight.new_zeros(weight.shape[0], 1, weight.shape[2]) if bias is None else bias
    return torch.cat([weight, row], dim=1)


def _output(value: Tensor, output: _Linear, heads: int, prefix: str) -> tuple[Tensor, Tensor]:
    """Values and W_O by head; a bias travels in one more value column, whose value is 1 (in head 0 alone it counts)."""
    weight, bias = output
    if weight.shape[1] != heads * value.shape[2]:
        raise SpecError(f"the output of layer {prefix!r} takes {weight.shape[1]} numbers, its heads give "
                        f"{heads * value.shape[2]}")  # fmt: skip
    split = weight.mT.reshape(heads, value.shape[2], weight.shape[0])
    if bias is None:
        return value, split.contiguous()
    column = value.new_zeros(heads, value.shape[1], 1)
    column[0, -1] = 1.0
    row = split.new_zeros(heads, 1, weight.shape[0])
    row[0, 0] = bias
    return torch.cat([value, column], dim=2), torch.cat([split, row], dim=1)
