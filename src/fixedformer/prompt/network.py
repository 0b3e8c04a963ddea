"""A fixed attention network as data: blocks of attention heads and a gated token-wise map over named channels.

    x <- x + sum_h weights(x W_Q^h (x W_K^h)^T) x W_V^h W_O^h          attention, rule "hard" or "softmax"
    x <- x + (act(x W_g) * (x W_u)) W_d                                token-wise map, act chosen per unit

Rows of x are tokens. There are no biases: a channel that is 1 on every token serves. Weight matrices are dense tensors,
as in any transformer; `engine` evaluates them. See docs/theory/prompt.md, section 2.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from fixedformer.errors import SpecError
from fixedformer.storage import digest

Activation = Literal["identity", "relu", "exp", "reciprocal"]
Rule = Literal["hard", "softmax"]
ACTIVATIONS: tuple[Activation, ...] = ("identity", "relu", "exp", "reciprocal")


@dataclass(frozen=True, eq=False)
class Head:
    """One attention head: query, key (width, head width); value (width, values); output (values, width)."""

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor


@dataclass(frozen=True, eq=False)
class GatedMap:
    """(act(x gate) * (x up)) down; gate, up (width, units), down (units, width), one activation a unit.

    With act = identity a unit is an exact product of two linear forms, which a ReLU network can only approximate.
    """

    gate: Tensor
    up: Tensor
    down: Tensor
    activations: tuple[Activation, ...]

    @property
    def units(self) -> int:
        return len(self.activations)


@dataclass(frozen=True, eq=False)
class Block:
    """Attention (any number of heads, none included), then a map (or none).

    rule: "hard" is average-hard attention (equal weight on all keys of maximal score), "softmax" the ordinary one.
    mask: None, or bool (tokens, tokens), True = attend.
    """

    heads: tuple[Head, ...]
    map: GatedMap | None
    rule: Rule = "hard"
    mask: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Network:
    """Blocks over named channels.

    constants: channels that hold the positions; no block may write them. inputs: channels that hold the data. scratch:
    channels that start at 0. The channel order is constants, inputs, scratch.
    """

    constants: tuple[str, ...]
    inputs: tuple[str, ...]
    scratch: tuple[str, ...]
    blocks: tuple[Block, ...]

    def __post_init__(self) -> None:
        if len(set(self.channels)) != self.width:
            twice = sorted({name for name in self.channels if self.channels.count(name) > 1})
            raise SpecError(f"channel names must differ, got {twice[0]!r} twice")
        for depth, block in enumerate(self.blocks, 1):
            self._check(depth, block)

    def _check(self, depth: int, block: Block) -> None:
        fixed = len(self.constants)
        for number, head in enumerate(block.heads, 1):
            where = f"block {depth}, head {number}"
            rows = {head.query.shape[0], head.key.shape[0], head.value.shape[0], head.output.shape[1]}
            if rows != {self.width} or head.query.shape != head.key.shape:
                raise SpecError(f"{where}: weights must act on {self.width} channels, got {sorted(rows)}")
            if head.value.shape[1] != head.output.shape[0]:
                raise SpecError(f"{where}: value and output do not chain")
            if head.output[:, :fixed].any():
                raise SpecError(f"{where} writes a position channel; positions must stay as they are")
        if block.map is not None:
            shapes = {tuple(block.map.gate.shape), tuple(block.map.up.shape), tuple(block.map.down.mT.shape)}
            if shapes != {(self.width, block.map.units)}:
                raise SpecError(f"block {depth}: the map must be {(self.width, block.map.units)}, got {sorted(shapes)}")
            if block.map.down[:, :fixed].any():
                raise SpecError(f"block {depth}: the map writes a position channel; positions must stay as they are")

    @cached_property
    def channels(self) -> tuple[str, ...]:
        return self.constants + self.inputs + self.scratch

    @cached_property
    def _index(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(self.channels)}

    @property
    def width(self) -> int:
        return len(self.channels)

    @property
    def depth(self) -> int:
        return len(self.blocks)

    @property
    def head_counts(self) -> tuple[int, ...]:
        """Number of attention heads of each block."""
        return tuple(len(block.heads) for block in self.blocks)

    @property
    def dtype(self) -> torch.dtype:
        return next(self._tensors())[1].dtype

    def channel(self, name: str) -> int:
        """Place of a named channel; SpecError for a name that is not there."""
        if name not in self._index:
            raise SpecError(f"this network has no channel {name!r}; it has {', '.join(self.channels[:12])}, ...")
        return self._index[name]

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for depth, block in enumerate(self.blocks):
            for number, head in enumerate(block.heads):
                for part in ("query", "key", "value", "output"):
                    yield f"{depth}.head{number}.{part}", getattr(head, part)
            if block.map is not None:
                for part in ("gate", "up", "down"):
                    yield f"{depth}.map.{part}", getattr(block.map, part)
            if block.mask is not None:
                yield f"{depth}.mask", block.mask

    def tensors(self) -> dict[str, Tensor]:
        """Every fixed tensor under a unique name."""
        return dict(self._tensors())

    @property
    def parameters(self) -> int:
        """How many numbers the weights hold (zeros included)."""
        return sum(tensor.numel() for _, tensor in self._tensors())

    def fingerprint(self) -> str:
        """SHA-256 (hex) over all weights, the channel names, the rules and the activations."""
        rules = [(block.rule, block.map.activations if block.map else ()) for block in self.blocks]
        return digest(self.tensors(), repr((self.constants, self.inputs, self.scratch, rules)))


def activate(values: Tensor, activation: Activation) -> Tensor:
    """Apply one activation entry by entry."""
    if activation == "relu":
        return values.relu()
    if activation == "exp":
        return values.exp()
    if activation == "reciprocal":
        return values.reciprocal()
    return values
