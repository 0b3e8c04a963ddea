"""A target as a machine meets it: gains, shifts, centring and grouped heads folded into plain matrices.

With z = x / sigma and sigma = sqrt(mean((x Pi)^2) + eps), N(x) = z Pi diag(gain) + shift, Pi = I - 11^T / D for
LayerNorm and I for RMSNorm. So every map that reads N(x) reads z through Pi diag(gain) W, plus the constant
bias + shift W. The constants of the values reach the stream unchanged, whatever the attention: its rows sum to 1.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fixedformer.embedding.blocks.target import BlockTarget


@dataclass(frozen=True, eq=False)
class FoldedLayer:
    """query, key (H, D, d); move M (H, D, D); gate, up (D, r), down (r, D) or None; the rest are the constants."""

    query: Tensor
    key: Tensor
    move: Tensor
    gate: Tensor | None
    up: Tensor | None
    down: Tensor | None
    query_bias: Tensor  # (H, d)
    key_bias: Tensor  # (H, d)
    attend_bias: Tensor  # (D,), what attention adds to every token
    gate_bias: Tensor | None  # (r,)
    up_bias: Tensor | None  # (r,); 1 for an ungated MLP, whose up neuron is a constant
    down_bias: Tensor | None  # (D,)


@dataclass(frozen=True, eq=False)
class Folded:
    """embed (d_in, D), layers, unembed (D, d_out), unembed_bias (d_out,); all float64."""

    embed: Tensor
    layers: tuple[FoldedLayer, ...]
    unembed: Tensor
    unembed_bias: Tensor

    @classmethod
    def of(cls, target: BlockTarget) -> "Folded":
        w = {name: tensor.to(torch.float64) for name, tensor in target.weights.items()}
        read = _Reader(target, w)
        return cls(
            w["embed"],
            tuple(_layer(target, w, read, layer) for layer in range(target.spec.layers)),
            read.weight("final", None, w["unembed"]),
            read.bias("final", None, w["unembed"], w.get("unembed_bias")),
        )


@dataclass(frozen=True, eq=False)
class _Reader:
    """What a map behind a norm becomes as a map of z."""

    target: BlockTarget
    weights: dict[str, Tensor]

    def weight(self, place: str, layer: int | None, matrix: Tensor) -> Tensor:
        """Pi diag(gain) W."""
        norm = self.target.spec.norm
        if norm is None or f"{place}_gain" not in self.weights:
            return matrix
        scaled = self._at(f"{place}_gain", layer)[:, None] * matrix
        return scaled - scaled.mean(-2, keepdim=True) if norm == "layer" else scaled

    def bias(self, place: str, layer: int | None, matrix: Tensor, bias: Tensor | None) -> Tensor:
        """b + shift W."""
        out = matrix.new_zeros(*matrix.shape[:-2], matrix.shape[-1]) if bias is None else bias
        shifted = f"{place}_shift" in self.weights
        return out + self._at(f"{place}_shift", layer) @ matrix if shifted else out

    def _at(self, name: str, layer: int | None) -> Tensor:
        return self.weights[name] if layer is None else self.weights[name][layer]


def _layer(target: BlockTarget, w: dict[str, Tensor], read: _Reader, layer: int) -> FoldedLayer:
    spec = target.spec
    repeat = spec.heads // spec.key_heads

    def at(name: str) -> Tensor | None:
        return w[name][layer] if name in w else None

    key, value = (w[name][layer].repeat_interleave(repeat, dim=0) for name in ("key", "value"))
    key_bias, value_bias = (
        None if (bias := at(f"{name}_bias")) is None else bias.repeat_interleave(repeat, dim=0)
        for name in ("key", "value")
    )
    query, output = w["query"][layer], w["output"][layer]
    constant = read.bias("attention", layer, value, value_bias).unsqueeze(-2) @ output  # (H, 1, D)
    output_bias = at("output_bias")
    gate, up, up_bias = at("gate"), at("up"), None
    if gate is not None:
        up_bias = read.bias("mlp", layer, up, at("up_bias")) if up is not None else torch.ones_like(gate[0])
    return FoldedLayer(
        query=read.weight("attention", layer, query),
        key=read.weight("attention", layer, key),
        move=read.weight("attention", layer, value) @ output,
        gate=None if gate is None else read.weight("mlp", layer, gate),
        up=None if up is None else read.weight("mlp", layer, up),
        down=at("down"),
        query_bias=read.bias("attention", layer, query, at("query_bias")),
        key_bias=read.bias("attention", layer, key, key_bias),
        attend_bias=constant.sum((0, 1)) + (0 if output_bias is None else output_bias),
        gate_bias=None if gate is None else read.bias("mlp", layer, gate, at("gate_bias")),
        up_bias=up_bias,
        down_bias=at("down_bias") if spec.bias else None,
    )
