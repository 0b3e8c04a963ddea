"""Read-outs: what an embedding shows along every path.

A *stack* is anything linear between its attention matrices: a target (state width d_model) or a machine (width m). With
M^p the product of the layer maps along path p, its read-outs from start rows S are
    S M^p [Q^{t+1,1..H} | K^{t+1,1..H}] for |p| = t < L,   and   S M^p U for |p| = L.
A machine with embedding E computes what a target with embed W_E computes, for all inputs, lengths and masks, as soon as
the two lists agree: E R_all = W_all (docs/theory/embedding.md, theorem 1).
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from fixedformer.embedding.accurate import Pair
from fixedformer.embedding.maps import Chain, apply_accurately, apply_plainly
from fixedformer.embedding.tree import PathTree
from fixedformer.target import Target

Apply = Callable[[Chain, tuple[Tensor, ...]], tuple[Tensor, ...]]


class Stack(Protocol):
    """The linear maps between the attention matrices; layers and heads count from 0."""

    def reader(self, layer: int) -> Chain:
        """(state, 2Hd): queries of all heads, then keys of all heads."""
        ...

    def mover(self, layer: int, head: int) -> Chain:
        """(state, state): the value path of one head."""
        ...

    def exit(self) -> Chain:
        """(state, d_out): the unembedding."""
        ...


class TargetStack:
    """A target's weights as a stack, in float64."""

    def __init__(self, target: Target) -> None:
        self.weights = target.weights.map(lambda tensor: tensor.to(torch.float64))

    def reader(self, layer: int) -> Chain:
        both = torch.cat([self.weights.query[layer], self.weights.key[layer]])  # (2H, d_model, d)
        return (both.transpose(0, 1).flatten(1),)

    def mover(self, layer: int, head: int) -> Chain:
        return (self.weights.value[layer, head], self.weights.output[layer, head])

    def exit(self) -> Chain:
        return (self.weights.unembed,)


class OtherExit:
    """A stack read out through another unembedding: a machine whose U was trained along with E."""

    def __init__(self, stack: Stack, unembedding: Tensor) -> None:
        self.reader, self.mover = stack.reader, stack.mover
        self._exit = unembedding

    def exit(self) -> Chain:
        return (self._exit,)


def readouts(stack: Stack, start: Tensor, tree: PathTree, apply: Apply = apply_accurately) -> tuple[Tensor, ...]:
    """All read-outs (rows, N) from `start` (rows, state), depth by depth: a pair hi, lo by default (twenty digits).

    With `apply=apply_plainly` one tensor in ordinary arithmetic. Memory: B^L rows of the stack's state.
    """
    state: tuple[Tensor, ...] = tuple(part.unsqueeze(0) for part in Pair.of(start))  # each (B^t, rows, state)
    if apply is apply_plainly:
        state = (start.unsqueeze(0),)
    whole = tuple(part.new_empty(start.shape[0], tree.count) for part in state)

    def place(depth: int, values: tuple[Tensor, ...]) -> None:  # each (nodes, rows, own)
        columns = tree.columns(depth).flatten().to(start.device)
        for target, value in zip(whole, values):
            target[:, columns] = value.transpose(0, 1).flatten(1)

    for layer in range(tree.layers):
        place(layer, apply(stack.reader(layer), state))
        branches = [state] if tree.residual else []
        branches += [apply(stack.mover(layer, head), state) for head in range(tree.heads)]
        state = tuple(torch.stack(parts, dim=1).flatten(0, 1) for parts in zip(*branches))
    place(tree.layers, apply(stack.exit(), state))
    return whole


def relative_residual(error: Tensor, scale: Tensor) -> float:
    """The largest |error| / scale, where 0/0 is 0 (nothing wanted, nothing shown) and x/0 is infinite."""
    return float(torch.where(error == 0, torch.zeros_like(error), error.abs() / scale).max())
