"""Inputs that count, and the states that a network has on them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fixedformer.attention import Mask, attention_weights, resolve_mask, rotate
from fixedformer.embedding.hankel import compress, times
from fixedformer.embedding.realise import Layered
from fixedformer.errors import SpecError
from fixedformer.inputs import as_input, embed_rows
from fixedformer.target import Card, TargetSpec

TOKENS = 1 << 16  # tokens whose states are held at once


@dataclass(frozen=True, eq=False)
class Data:
    """Inputs that count. batches: checked inputs, each with the places (..., tokens) whose outputs matter, or None."""

    batches: tuple[tuple[Tensor, Tensor | None], ...]
    mask: Mask

    @classmethod
    def of(
        cls, spec: TargetSpec, data: object, where: object, mask: Mask, device: torch.device | str = "cpu"
    ) -> "Data":
        """data: token ids (..., tokens), vectors (..., tokens, d_in), or a list of such; where: bool alike, or None.

        Raises SpecError for data that do not fit, and for places that do not have the data's shape or hold no True.
        """
        listed = list(data) if isinstance(data, list | tuple) and len(data) and not _flat(data) else [data]
        places = list(where) if isinstance(where, list | tuple) else [where] * len(listed)
        if len(places) != len(listed):
            raise SpecError(f"where lists {len(places)} arrays, data {len(listed)}; give one for each")
        batches = []
        for X, place in zip(listed, places):
            X = as_input(X, spec.d_in, torch.float64, device)
            shape = X.shape[:-1] if X.is_floating_point() else X.shape
            if place is not None:
                place = torch.as_tensor(place, device=device)
                if place.dtype != torch.bool or place.shape != shape:
                    raise SpecError(f"where must be bool of shape {tuple(shape)}, like the data's tokens, got "
                                    f"{place.dtype} of shape {tuple(place.shape)}")  # fmt: skip
                place = place.reshape(-1, shape[-1])
            batches.append((X.reshape(-1, *X.shape[len(shape) - 1 :]), place))
        if all(place is not None and not place.any() for _, place in batches):
            raise SpecError("where holds no True: no output counts, so nothing can be measured")
        if isinstance(mask, Tensor) and mask.ndim != 2:
            raise SpecError(f"with data a mask is None, 'causal' or bool (tokens, tokens), got {tuple(mask.shape)}")
        return cls(tuple(batches), mask)

    @property
    def sequences(self) -> int:
        return sum(len(X) for X, _ in self.batches)

    def chunks(self, tokens: int = TOKENS) -> Iterable[tuple[Tensor, Tensor | None]]:
        """The batches cut to at most so many tokens (at least one sequence)."""
        for X, place in self.batches:
            count = max(1, tokens // X.shape[1])
            for first in range(0, len(X), count):
                part = slice(first, first + count)
                yield X[part], None if place is None else place[part]


def mask_of(mask: Mask | Literal["card"], card: Card) -> Mask:
    """The mask given, or the card's."""
    return card.mask if isinstance(mask, str) and mask == "card" else mask


def state_factor(layered: Layered, spec: TargetSpec, data: Data, cut: int) -> Tensor:
    """T (k, r) with T^T T the mean of x^T x over the data's tokens, x the states of a cut.

    At the last cut only the places that count are looked at.
    """
    factor = layered.embed.new_zeros(0, layered.widths[cut])
    count = 0
    for X, place in data.chunks():
        state = states(layered, spec, X, data.mask, cut)
        rows = state[place] if place is not None and cut == spec.layers else state.flatten(0, -2)
        factor = compress(torch.cat([factor, rows]))
        count += len(rows)
    mean: Tensor = factor / count**0.5
    return mean


def states(layered: Layered, spec: TargetSpec, X: Tensor, mask: Mask, cut: int) -> Tensor:
    """The state (..., tokens, r_cut) behind the first `cut` layers, X from `as_input` in float64."""
    state = embed_rows(X, layered.embed)
    allowed = resolve_mask(mask, state.shape[-2], state.device)
    for layer in range(cut):
        attention = attention_of(state, layered.readers[layer], spec, allowed)
        moved = [attention[..., h, :, :] @ times(state, layered.mover(layer, h)) for h in range(spec.heads)]
        update = torch.stack(moved).sum(0)
        state = state + update if spec.residual else update
    return state


def attention_of(state: Tensor, reader: Tensor, spec: TargetSpec, allowed: Tensor | None) -> Tensor:
    """Attention (..., heads, tokens, tokens) of a layer: state (..., tokens, r), reader (r, 2Hd)."""
    both = (state @ reader).unflatten(-1, (2, spec.heads, spec.d_head))
    query, key = both.movedim((-3, -2), (0, -3))  # (..., heads, tokens, d_head)
    if spec.positions == "rotary":
        query, key = rotate(query, spec.rotary_base), rotate(key, spec.rotary_base)
    return attention_weights(query, key, allowed)


def _flat(data: object) -> bool:
    """A plain list of numbers is one sequence, not a list of arrays."""
    return all(isinstance(item, int | float) for item in data)  # type: ignore[attr-defined]
