"""A transformer with real blocks: its weights, and its forward pass as the definition says.

    x <- [x +] sum_h A^h N_1(x) W_V^h W_O^h + b_o,        A^h = softmax(q_h k_h^T),  q_h = N_1(x) W_Q^h + b_q, k_h alike
    x <- [x +] (phi(N_2(x) W_g + b_g) [* (N_2(x) W_u + b_u)]) W_d + b_d
    out = N_f(x) W_U + b_U

"[x +]" with residual=True, N the identity without a norm, values with a bias too; no 1/sqrt(d): fold it into `query`.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fixedformer.attention import Mask, attention_weights, resolve_mask, rotate
from fixedformer.embedding.blocks.spec import ACTIVATIONS, BlockSpec
from fixedformer.errors import SpecError
from fixedformer.inputs import as_input, embed_rows, finite
from fixedformer.target import FLOATS, Card


def weight_shapes(spec: BlockSpec, d_model: int, d_value: int) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a target of `spec`. Biases and gains are there only where the spec has them."""
    layers, heads, groups, d, r = spec.layers, spec.heads, spec.key_heads, spec.d_head, spec.mlp_width
    shapes: dict[str, tuple[int, ...]] = {
        "embed": (spec.d_in, d_model),
        "unembed": (d_model, spec.d_out),
        "query": (layers, heads, d_model, d),
        "key": (layers, groups, d_model, d),
        "value": (layers, groups, d_model, d_value),
        "output": (layers, heads, d_value, d_model),
    }
    if spec.bias:
        shapes |= {"query_bias": (layers, heads, d), "key_bias": (layers, groups, d)}
        shapes |= {"value_bias": (layers, groups, d_value), "output_bias": (layers, d_model)}
        shapes |= {"unembed_bias": (spec.d_out,)}
    if spec.mlp:
        shapes |= {"gate": (layers, d_model, r), "down": (layers, r, d_model)}
        shapes |= {"up": (layers, d_model, r)} if spec.mlp == "gated" else {}
        if spec.bias:
            shapes |= {"gate_bias": (layers, r), "down_bias": (layers, d_model)}
            shapes |= {"up_bias": (layers, r)} if spec.mlp == "gated" else {}
    if spec.norm:
        places: dict[str, tuple[int, ...]] = {"attention": (layers, d_model)}
        places |= {"mlp": (layers, d_model)} if spec.mlp else {}
        places |= {"final": (d_model,)} if spec.final_norm else {}
        for place, shape in places.items():
            shapes[f"{place}_gain"] = shape
            if spec.bias:
                shapes[f"{place}_shift"] = shape
    return shapes


@dataclass(frozen=True, eq=False, init=False)
class BlockTarget:
    """A transformer with real blocks. Call it like a `Target`: X or token ids in, (..., tokens, d_out) out."""

    spec: BlockSpec
    weights: dict[str, Tensor]
    card: Card = field(default_factory=Card)

    def __init__(self, spec: BlockSpec, *, card: Card | None = None, **weights: Tensor) -> None:
        """Check and hold the weights (names and shapes: `weight_shapes`; all float64 or all float32, one device).

        Biases and shifts that are left out are 0, gains 1, embed and unembed the identity where that fits. Raises
        SpecError for missing or unknown names, for shapes that do not chain, and for NaN and infinity.
        """
        object.__setattr__(self, "spec", spec)
        object.__setattr__(self, "weights", _checked(spec, weights))
        object.__setattr__(self, "card", card or Card())
        if self.card.vocabulary is not None and len(self.card.vocabulary) != spec.d_in:
            raise SpecError(f"the vocabulary names {len(self.card.vocabulary)} tokens, d_in is {spec.d_in}")

    @classmethod
    def random(
        cls, spec: BlockSpec, seed: int = 0, d_model: int | None = None, dtype: torch.dtype = torch.float64
    ) -> "BlockTarget":
        """A Gaussian target: maps keep the variance of what they get, biases have deviation 0.3, gains are near 1."""
        width = spec.d_model or d_model or max(spec.d_in, spec.d_out)
        generator = torch.Generator().manual_seed(seed)
        tensors = {}
        for name, shape in weight_shapes(spec, width, spec.d_head).items():
            draw = torch.randn(shape, generator=generator, dtype=torch.float64)
            if name.endswith("gain"):
                draw = 1 + 0.3 * draw
            elif name.endswith(("bias", "shift")):
                draw = 0.3 * draw
            else:
                inputs = shape[-2] * (spec.heads if name == "output" else 1)
                draw = draw * inputs**-0.5 * (spec.d_head**-0.25 if name in ("query", "key") else 1.0)
            tensors[name] = draw.to(dtype)
        return cls(spec, card=None, **tensors)

    @property
    def dtype(self) -> torch.dtype:
        return self.weights["query"].dtype

    @property
    def d_model(self) -> int:
        return self.weights["query"].shape[2]

    @property
    def parameters(self) -> int:
        """How many numbers the target has."""
        return sum(tensor.numel() for tensor in self.weights.values())

    def __call__(self, X: Any, mask: Mask = None) -> Tensor:
        """Outputs (..., tokens, d_out) for X (..., tokens, d_in) or token ids; mask: None, "causal" or bool."""
        return self.forward(X, mask)[0]

    def forward(self, X: Any, mask: Mask = None) -> tuple[Tensor, list[Tensor]]:
        """Outputs, and the residual stream (..., tokens, d_model) before the first and after every layer."""
        spec, w = self.spec, self.weights
        x = embed_rows(as_input(X, spec.d_in, self.dtype, w["embed"].device), w["embed"])
        allowed = resolve_mask(mask, x.shape[-2], x.device)
        streams = [x]
        for layer in range(spec.layers):
            seen = self._norm(x, "attention", layer)
            update = self._attention(seen, layer, allowed)
            x = x + update if spec.residual else update
            if spec.mlp:
                update = self._mlp(self._norm(x, "mlp", layer), layer)
                x = x + update if spec.residual else update
            streams.append(x)
        out = self._norm(x, "final", None) @ w["unembed"]
        return (out + w["unembed_bias"] if spec.bias else out), streams

    def _attention(self, seen: Tensor, layer: int, allowed: Tensor | None) -> Tensor:
        spec, w = self.spec, self.weights
        heads_in = seen.unsqueeze(-3)  # (..., 1, tokens, d_model)

        def into(name: str) -> Tensor:  # (..., heads, tokens, d): heads of keys and values repeated
            out = heads_in @ w[name][layer]
            out = out + w[f"{name}_bias"][layer].unsqueeze(-2) if spec.bias else out
            return out.repeat_interleave(spec.heads // out.shape[-3], dim=-3)

        query, key, value = into("query"), into("key"), into("value")
        if spec.positions == "rotary":
            query, key = rotate(query, spec.rotary_base), rotate(key, spec.rotary_base)
        mixed = attention_weights(query, key, allowed) @ value @ w["output"][layer]
        out: Tensor = mixed.sum(-3)
        return out + w["output_bias"][layer] if spec.bias else out

    def _mlp(self, seen: Tensor, layer: int) -> Tensor:
        spec, w = self.spec, self.weights

        def into(name: str) -> Tensor:
            out = seen @ w[name][layer]
            return out + w[f"{name}_bias"][layer] if spec.bias else out

        hidden = ACTIVATIONS[spec.activation](into("gate"))
        hidden = hidden * into("up") if spec.mlp == "gated" else hidden
        out = hidden @ w["down"][layer]
        return out + w["down_bias"][layer] if spec.bias else out

    def _norm(self, x: Tensor, place: str, layer: int | None) -> Tensor:
        spec, w = self.spec, self.weights
        if spec.norm is None or (place == "final" and not spec.final_norm):
            return x
        gain = w[f"{place}_gain"] if layer is None else w[f"{place}_gain"][layer]
        x = x - x.mean(-1, keepdim=True) if spec.norm == "layer" else x
        x = x / torch.sqrt(x.square().mean(-1, keepdim=True) + spec.norm_eps) * gain
        if spec.bias:
            x = x + (w[f"{place}_shift"] if layer is None else w[f"{place}_shift"][layer])
        return x


def _checked(spec: BlockSpec, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Fill in what may be left out, then check names, dtype, device, shapes and values."""
    for name in ("query", "value"):
        tensor = given.get(name)
        if not isinstance(tensor, Tensor) or tensor.ndim != 4:
            got = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise SpecError(f"{name} must be a tensor (layers, heads, rows, columns), got {got}")
    query = given["query"]
    d_model = query.shape[2]
    if spec.d_model is not None and spec.d_model != d_model:
        raise SpecError(f"the spec says d_model = {spec.d_model}, query has {d_model} rows")
    shapes = weight_shapes(spec, d_model, given["value"].shape[3])
    if unknown := given.keys() - shapes.keys():
        raise SpecError(f"no weights of that name in {spec}: {', '.join(sorted(unknown))}")
    tensors = {}
    for name, shape in shapes.items():
        tensor = given.get(name)
        if tensor is None and name.endswith(("bias", "shift", "gain")):
            tensor = query.new_full(shape, float(name.endswith("gain")))
        elif tensor is None and name in ("embed", "unembed") and shape[0] == shape[1]:
            tensor = torch.eye(d_model, dtype=query.dtype, device=query.device)
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != shape:
            got = tuple(tensor.shape) if isinstance(tensor, Tensor) else "nothing"
            raise SpecError(f"{name} must have shape {shape}, got {got}")
        if tensor.dtype not in FLOATS or tensor.dtype != query.dtype or tensor.device != query.device:
            raise SpecError(f"all weights must be float64, or all float32, on one device: {name} is {tensor.dtype} on "
                            f"{tensor.device}, query is {query.dtype} on {query.device}")  # fmt: skip
        tensors[name] = finite(tensor.detach(), f"the target's {name}")
    return tensors
