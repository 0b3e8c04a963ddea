"""Evaluate a network on a batch: `run_dense` is the definition, `Engine` the fast way; tests hold them together.

The fast way uses three facts and no approximation: most entries of the weights are 0; heads with equal W_Q and W_K
share their attention pattern; and where W_Q and W_K read position channels only, the pattern is the same for every
input, so it is computed once, on the distinct queries.
"""

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from fixedformer.errors import SpecError
from fixedformer.prompt.network import ACTIVATIONS, Activation, Block, GatedMap, Head, Network, activate
from fixedformer.prompt.patterns import PIECE, Pattern, Sliced, as_slice, attention_weights, find_patterns, signature


def initial_state(network: Network, constants: Tensor, inputs: Tensor) -> Tensor:
    """x before the first block: constants (tokens, #constants), inputs (batch, tokens, #inputs), zeros elsewhere."""
    batch, tokens = inputs.shape[:2]
    if constants.shape != (tokens, len(network.constants)) or inputs.shape[2] != len(network.inputs):
        raise SpecError(
            f"needed constants ({tokens}, {len(network.constants)}) and inputs (batch, {tokens}, "
            f"{len(network.inputs)}), got {tuple(constants.shape)} and {tuple(inputs.shape)}"
        )
    state = constants.new_zeros(batch, tokens, network.width)
    state[..., : len(network.constants)] = constants
    state[..., len(network.constants) : len(network.constants) + len(network.inputs)] = inputs
    return state


def run_dense(network: Network, constants: Tensor, inputs: Tensor) -> Tensor:
    """The definition, literally: every head's full score matrix, every weight matrix in full.

    Returns x (batch, tokens, width) after the last block.
    """
    state = initial_state(network, constants, inputs)
    for block in network.blocks:
        update = torch.zeros_like(state)
        for head in block.heads:
            scores = (state @ head.query) @ (state @ head.key).mT  # (batch, tokens, tokens)
            update += attention_weights(block, scores) @ (state @ head.value) @ head.output
        state = state + update
        if block.map is not None:
            state = state + _apply_map(block.map, state)
    return state


def _apply_map(token_map: GatedMap, state: Tensor) -> Tensor:
    gate = state @ token_map.gate
    acted = torch.stack([activate(gate[..., unit], kind) for unit, kind in enumerate(token_map.activations)], dim=-1)
    return (acted * (state @ token_map.up)) @ token_map.down


@dataclass(frozen=True)
class _HeadGroup:
    """Heads of one block with the same W_Q and W_K: sum_h P V_h O_h = P [V_1 V_2 ..][O_1; O_2; ..]."""

    query: Sliced
    key: Sliced
    value: Sliced
    output: Tensor  # (values, written channels)
    writes: Tensor
    pattern: Pattern | None


@dataclass(frozen=True)
class _FastMap:
    gate: Sliced
    up: Sliced  # one column where all units have the same
    down: Tensor | None  # (units, written channels); None where unit k alone writes channel k, with factor 1
    writes: Tensor | slice
    spans: tuple[tuple[Activation, slice], ...]  # units sorted by activation

    @classmethod
    def of(cls, token_map: GatedMap) -> "_FastMap":
        order = sorted(range(token_map.units), key=lambda unit: token_map.activations[unit])
        kinds = [token_map.activations[unit] for unit in order]
        spans = tuple((kind, slice(kinds.index(kind), kinds.index(kind) + kinds.count(kind)))
                      for kind in ACTIVATIONS if kind in kinds)  # fmt: skip
        gate, up = token_map.gate[:, order], token_map.up[:, order]
        if bool((up == up[:, :1]).all()):
            up = up[:, :1]
        down = token_map.down[order]
        writes = down.any(0).nonzero()[:, 0]
        kept = down[:, writes].contiguous()
        plain = kept.shape[0] == kept.shape[1] and torch.equal(kept, torch.eye(len(kept), dtype=kept.dtype))
        return cls(Sliced.of(gate), Sliced.of(up), None if plain else kept, as_slice(writes), spans)

    def add_to(self, state: Tensor) -> None:
        hidden = self.gate(state)
        for kind, span in self.spans:
            if kind != "identity":
                hidden[..., span] = activate(hidden[..., span], kind)
        hidden *= self.up(state)
        state[..., self.writes] += hidden if self.down is None else hidden @ self.down


class Engine:
    """A network made ready for inputs of one length.

    constants: (tokens, #constants), the position channels. Building it finds the fixed attention patterns; `run` then
    takes any number of inputs. `margin` is the smallest difference, over all heads with a fixed pattern and all
    queries, between the largest score and the largest score below it (inf where all keys tie).
    """

    def __init__(self, network: Network, constants: Tensor) -> None:
        self.network, self.constants = network, constants
        self.margin = float("inf")
        self.fixed_heads = 0
        self._state = initial_state(network, constants, constants.new_zeros(1, len(constants), len(network.inputs)))[0]
        self._blocks = [
            (block, self._groups(block), _FastMap.of(block.map) if block.map is not None else None)
            for block in network.blocks
        ]

    def run(self, inputs: Tensor) -> Tensor:
        """x (batch, tokens, width) after the last block, for inputs (batch, tokens, #inputs)."""
        return torch.cat([self._run(part) for part in self._slices(inputs)])

    def read(self, inputs: Tensor, channels: list[str]) -> Tensor:
        """Only the named channels (batch, tokens, len(channels)) of the result: little memory for large batches."""
        places = [self.network.channel(name) for name in channels]
        return torch.cat([self._run(part)[..., places] for part in self._slices(inputs)])

    def _slices(self, inputs: Tensor) -> tuple[Tensor, ...]:
        """The batch in parts whose state stays within a piece."""
        return torch.split(inputs, max(1, PIECE // (inputs.shape[1] * self.network.width)))

    def _run(self, inputs: Tensor) -> Tensor:
        state = initial_state(self.network, self.constants, inputs)
        for block, groups, token_map in self._blocks:
            updates = [(group.writes, self._attend(block, group, state)) for group in groups]
            for writes, update in updates:  # after all heads have read
                state[..., writes] += update
            if token_map is not None:
                token_map.add_to(state)
        return state

    def _attend(self, block: Block, group: _HeadGroup, state: Tensor) -> Tensor:
        values = group.value(state)  # (batch, tokens, values)
        if group.pattern is not None:
            return (group.pattern.mix(values) @ group.output)[:, group.pattern.inverse]
        query, key = group.query(state), group.key(state).mT
        batch, tokens = state.shape[:2]
        rows = max(1, PIECE // (batch * tokens))
        pieces = [
            attention_weights(block, query[:, start : start + rows] @ key, slice(start, start + rows)) @ values
            for start in range(0, tokens, rows)
        ]
        return torch.cat(pieces, dim=1) @ group.output

    def _groups(self, block: Block) -> list[_HeadGroup]:
        members: dict[bytes, list[Head]] = defaultdict(list)
        for head in block.heads:
            members[signature(head.query, head.key)].append(head)
        sets = list(members.values())
        fixed = len(self.network.constants)
        patterns, margin = find_patterns(block, [heads[0] for heads in sets], self._state, fixed)
        self.margin = min(self.margin, margin)
        groups = []
        for heads, pattern in zip(sets, patterns):
            self.fixed_heads += len(heads) if pattern is not None else 0
            output = torch.cat([head.output for head in heads])
            writes = output.any(0).nonzero()[:, 0]
            groups.append(
                _HeadGroup(
                    query=Sliced.of(heads[0].query),
                    key=Sliced.of(heads[0].key),
                    value=Sliced.of(torch.cat([head.value for head in heads], dim=1)),
                    output=output[:, writes].contiguous(),
                    writes=writes,
                    pattern=pattern,
                )
            )
        return groups
