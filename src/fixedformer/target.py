"""What is simulated: an attention-only transformer, its weights and its forward pass, as the definition says.

    A^{l,h} = softmax(X W_Q^{l,h} (X W_K^{l,h})^T),   X <- [X +] sum_h A^{l,h} X W_V^{l,h} W_O^{l,h}

for l = 1..L, between `embed` (d_in x d_model) and `unembed` (d_model x d_out). "[X +]" with residual=True. There is no
1/sqrt(d) in the scores: fold it into `query`. See docs/theory/notation.md for the paper's symbols.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fixedformer.attention import Mask, attend, attention_weights, resolve_mask, rotate
from fixedformer.errors import SpecError
from fixedformer.inputs import as_input, embed_rows, finite

FLOATS = (torch.float64, torch.float32)


@dataclass(frozen=True)
class TargetSpec:
    """The class of transformers TF(H, L, d_in, d): everything but the weights and the hidden width d_model.

    heads, layers: H, L. d_in, d_out: width of inputs and outputs (d_out defaults to d_in). d_head: width d of queries
    and keys. residual: each layer adds to its input. positions: None, or "rotary" (queries and keys are turned by their
    place; d_head even; `rotary_base` is the base of the angles). Raises SpecError for anything else.
    """

    heads: int
    layers: int
    d_in: int
    d_head: int
    d_out: int = None  # type: ignore[assignment]  # an int after __post_init__
    residual: bool = False
    positions: Literal["rotary"] | None = None
    rotary_base: float = 10000.0

    def __post_init__(self) -> None:
        if self.d_out is None:
            object.__setattr__(self, "d_out", self.d_in)
        for name in ("heads", "layers", "d_in", "d_head", "d_out"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise SpecError(f"{name} must be a whole number of at least 1, got {value!r}")
        if not isinstance(self.residual, bool):
            raise SpecError(f"residual must be True or False, got {self.residual!r}")
        if self.positions not in (None, "rotary"):
            raise SpecError(f"positions must be None or 'rotary', got {self.positions!r}; learned positions are extra "
                            "one-hot inputs (fixedformer.one_hot)")  # fmt: skip
        if self.positions == "rotary" and self.d_head % 2:
            raise SpecError(f"rotary positions turn channels in pairs: d_head must be even, got {self.d_head}")
        if not self.rotary_base > 0:
            raise SpecError(f"rotary_base must be positive, got {self.rotary_base!r}")


@dataclass(frozen=True)
class Card:
    """What a person must know to use a target or its program; it travels with the files and changes no number.

    vocabulary: the tokens in the order of their ids, or None. mask: the mask that the target was trained with, which
    the command line uses unless told otherwise. description: one line of text.
    """

    vocabulary: tuple[str, ...] | None = None
    mask: Literal["causal"] | None = None
    description: str = ""


@dataclass(frozen=True)
class Weights:
    """Tensors of a target. query, key (layers, heads, d_model, d_head); value (layers, heads, d_model, d_value);
    output (layers, heads, d_value, d_model); embed (d_in, d_model); unembed (d_model, d_out)."""

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    embed: Tensor
    unembed: Tensor

    NAMES = ("query", "key", "value", "output", "embed", "unembed")

    @property
    def d_model(self) -> int:
        return self.query.shape[2]

    @property
    def d_value(self) -> int:
        return self.value.shape[3]

    def named(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in self.NAMES}

    def map(self, change: Callable[[Tensor], Tensor]) -> "Weights":
        return Weights(**{name: change(tensor) for name, tensor in self.named().items()})


def weight_shapes(spec: TargetSpec, d_model: int, d_value: int) -> dict[str, tuple[int, ...]]:
    """The shape that each tensor of `Weights` must have."""
    stack = (spec.layers, spec.heads)
    return {
        "query": (*stack, d_model, spec.d_head),
        "key": (*stack, d_model, spec.d_head),
        "value": (*stack, d_model, d_value),
        "output": (*stack, d_value, d_model),
        "embed": (spec.d_in, d_model),
        "unembed": (d_model, spec.d_out),
    }


def forward(
    spec: TargetSpec, weights: Weights, X: Tensor, mask: Mask = None, watch: Callable[[Tensor], None] | None = None
) -> Tensor:
    """The definition, differentiable in the weights; X comes from `as_input`.

    Returns (..., tokens, d_out). `watch` is called with each layer's attention weights (..., heads, tokens, tokens).
    """
    state = embed_rows(X, weights.embed)  # (..., tokens, d_model)
    for layer in range(spec.layers):
        update = layer_update(spec, weights, layer, state, mask, watch)
        state = state + update if spec.residual else update
    return state @ weights.unembed


def layer_update(
    spec: TargetSpec,
    weights: Weights,
    layer: int,
    state: Tensor,
    mask: Mask,
    watch: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """sum_h A^{l,h} X W_V^{l,h} W_O^{l,h} for X = state (..., tokens, d_model), layers from 0. Fused unless watched."""
    allowed = resolve_mask(mask, state.shape[-2], state.device)
    both = torch.cat([weights.query[layer], weights.key[layer]])  # (2 heads, d_model, d_head): one product for all
    joint = (state @ both.movedim(0, 1).flatten(1)).unflatten(-1, (2 * spec.heads, spec.d_head)).movedim(-2, -3)
    if spec.positions == "rotary":
        joint = rotate(joint, spec.rotary_base)
    query, key = joint.chunk(2, dim=-3)  # (..., heads, tokens, d_head)
    value = (state @ weights.value[layer].movedim(0, 1).flatten(1)).unflatten(-1, (spec.heads, -1)).movedim(-2, -3)
    if watch is None:
        mixed = attend(query, key, value, mask, allowed)
    else:
        attention = attention_weights(query, key, allowed)
        watch(attention)
        mixed = attention @ value
    # The sum over heads is one product with the output matrices below each other.
    return mixed.movedim(-3, -2).flatten(-2) @ weights.output[layer].flatten(0, 1)


@dataclass(frozen=True, eq=False, init=False)
class Target:
    """An attention-only transformer with its weights: what a program makes a fixed machine compute.

    Call it: `target(X, mask=None)` with X (..., tokens, d_in) or token ids (..., tokens) gives (..., tokens, d_out).
    """

    spec: TargetSpec
    weights: Weights
    card: Card = field(default_factory=Card)

    def __init__(
        self,
        spec: TargetSpec,
        *,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        embed: Tensor | None = None,
        unembed: Tensor | None = None,
        card: Card | None = None,
    ) -> None:
        """Check and hold the weights (shapes in `Weights`; all float64 or all float32, on one device).

        embed and unembed default to the identity, which needs d_in = d_model and d_out = d_model. The value width may
        differ from d_head: only the products W_V W_O matter. Raises SpecError for shapes that do not chain, for NaN
        and for infinity.
        """
        given: dict[str, Tensor | None] = {"query": query, "key": key, "value": value, "output": output}
        given |= {"embed": embed, "unembed": unembed}
        weights = _checked(spec, given)
        object.__setattr__(self, "spec", spec)
        object.__setattr__(self, "weights", weights)
        object.__setattr__(self, "card", card or Card())
        if self.card.vocabulary is not None and len(self.card.vocabulary) != spec.d_in:
            raise SpecError(f"the vocabulary names {len(self.card.vocabulary)} tokens, d_in is {spec.d_in}")

    @classmethod
    def random(
        cls,
        spec: TargetSpec,
        seed: int = 0,
        dtype: torch.dtype = torch.float64,
        d_model: int | None = None,
        d_value: int | None = None,
    ) -> "Target":
        """A Gaussian target whose scores, for inputs of unit variance, have a spread of about 1.

        d_model: hidden width; when it is left out and d_in = d_out, there is no embed or unembed. d_value defaults to
        d_head. One seed, spec and widths always give the same weights.
        """
        plain = d_model is None and spec.d_in == spec.d_out
        d_model = d_model or max(spec.d_in, spec.d_out)
        d_value = d_value or spec.d_head
        generator = torch.Generator().manual_seed(seed)
        scale = {
            "query": d_model**-0.5 * spec.d_head**-0.25,
            "key": d_model**-0.5 * spec.d_head**-0.25,
            "value": d_model**-0.5,
            "output": (d_value * spec.heads) ** -0.5,
            "embed": spec.d_in**-0.5,
            "unembed": d_model**-0.5,
        }
        tensors = {
            name: (torch.randn(shape, generator=generator, dtype=torch.float64) * scale[name]).to(dtype)
            for name, shape in weight_shapes(spec, d_model, d_value).items()
            if not (plain and name in ("embed", "unembed"))
        }
        return cls(spec, **tensors)

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.query.dtype

    @property
    def device(self) -> torch.device:
        return self.weights.query.device

    def to(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> "Target":
        """The same target in another precision or place."""
        moved = self.weights.map(lambda tensor: tensor.to(device=device, dtype=dtype))
        return Target(self.spec, **moved.named(), card=self.card)

    def on_tokens(self, tokens: Sequence[int], outputs: Sequence[int] | None = None) -> "Target":
        """The same target for inputs made of these tokens only, and, where given, for these outputs only.

        Token i of the new one is tokens[i] here, output j is outputs[j]; so d_in and d_out shrink, and the card loses
        its vocabulary. What never occurs in the data (a reserved token, a label that is never right) needs no
        dimension: `shrink` can then be narrower.
        """
        ids = _some(tokens, self.spec.d_in, "tokens")
        kept = range(self.spec.d_out) if outputs is None else _some(outputs, self.spec.d_out, "outputs")
        spec = replace(self.spec, d_in=len(ids), d_out=len(kept))
        changed = {"embed": self.weights.embed[ids], "unembed": self.weights.unembed[:, list(kept)]}
        words = "" if self.card.vocabulary is None else " (" + " ".join(self.card.vocabulary[i] for i in ids) + ")"
        card = Card(None, self.card.mask, f"{self.card.description}; tokens {ids}{words} only")
        return Target(spec, **{**self.weights.named(), **changed}, card=card)

    def __call__(self, X: Any, mask: Mask = None) -> Tensor:
        """Outputs (..., tokens, d_out) for X (..., tokens, d_in) or token ids; mask: None, "causal" or bool."""
        return forward(self.spec, self.weights, as_input(X, self.spec.d_in, self.dtype, self.device), mask)

    def attention(self, X: Any, mask: Mask = None) -> Tensor:
        """Attention matrices (..., layers, heads, tokens, tokens) of every layer and head."""
        seen: list[Tensor] = []
        forward(self.spec, self.weights, as_input(X, self.spec.d_in, self.dtype, self.device), mask, seen.append)
        return torch.stack(seen, dim=-4)


def _some(chosen: Sequence[int], count: int, what: str) -> list[int]:
    """Different ids below count, at least one; SpecError otherwise."""
    ids = list(chosen)
    if not ids or len(set(ids)) != len(ids) or min(ids) < 0 or max(ids) >= count:
        raise SpecError(f"{what} must be different ids in 0..{count - 1}, at least one, got {ids}")
    return ids


def _checked(spec: TargetSpec, given: Mapping[str, Tensor | None]) -> Weights:
    """Fill in the identities, then check dtype, device, shapes and values."""
    for name, rank in {"query": 4, "key": 4, "value": 4, "output": 4}.items():
        tensor = given[name]
        if not isinstance(tensor, Tensor) or tensor.ndim != rank:
            got = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise SpecError(f"{name} must be a tensor (layers, heads, rows, columns), got {got}")
    query, value = given["query"], given["value"]
    assert query is not None  # checked in the loop above
    assert value is not None
    d_model, d_value = query.shape[2], value.shape[3]
    tensors: dict[str, Tensor] = {}
    for name, shape in weight_shapes(spec, d_model, d_value).items():
        tensor = given[name]
        if tensor is None:
            if shape[0] != shape[1]:
                raise SpecError(
                    f"{name} may be left out only where it is the identity: it must map {shape[0]} to {shape[1]} "
                    f"channels (d_model = {d_model}, d_in = {spec.d_in}, d_out = {spec.d_out})"
                )
            tensor = torch.eye(d_model, dtype=query.dtype, device=query.device)
        if tuple(tensor.shape) != shape:
            raise SpecError(f"{name} must have shape {shape} for {spec} and d_model = {d_model}, got "
                            f"{tuple(tensor.shape)}")  # fmt: skip
        if tensor.dtype not in FLOATS or tensor.dtype != query.dtype or tensor.device != query.device:
            raise SpecError(
                f"all weights must be float64, or all float32, on one device: {name} is {tensor.dtype} on "
                f"{tensor.device}, query is {query.dtype} on {query.device}"
            )
        tensors[name] = finite(tensor.detach(), f"the target's {name}")
    return Weights(**tensors)
