"""The fast exact way: each row and neuron has a denominator of its own, found beforehand, and loops are integers.

A row i whose values are always multiples of 1/D_i is kept as the integer D_i x_i. The D_i follow from the starting
values by closing them under the block's weights (`denominators`): a neuron's H_j is the least common multiple of the
denominators of its terms w/D_i, and D_i in turn must absorb those of w/H_j. The constructions close after a few rounds,
because their loops double and subtract but never divide again; a block that does not close is refused, and the
definition (`dense.run_rational`) is there for it.

Rows that hold one value for all tokens (the binary fractions of step 3, thousands of bits long) are single integers, so
their cost does not grow with the number of tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from typing import Any

import numpy as np

from fixedformer.errors import SpecError
from fixedformer.loop.block import LoopedNetwork, Terms
from fixedformer.loop.dense import TICK, FractionRows, Sequences, Tick, Watch

Column = Any  # an int, the same for all tokens, or an object array (sequences, tokens) of ints
IntTerms = list[tuple[int, int]]
ROUNDS = 64
"""Rounds after which `denominators` gives up; the constructions of this package close within ten."""


@dataclass(frozen=True)
class ScaledHead:
    """A head on integers: positive factors of queries and keys change no maximum, so only the output is rescaled."""

    query: IntTerms
    key: IntTerms
    value: IntTerms
    output: IntTerms  # weights on lcm(1..tokens) times the mean value


@dataclass(frozen=True)
class ScaledNeuron:
    reads: IntTerms
    bias: int
    writes: IntTerms


@dataclass(frozen=True)
class ScaledBlock:
    neurons: list[ScaledNeuron]
    heads: list[ScaledHead]
    bias: list[int]
    denominators: list[int]
    shares: int  # lcm(1..tokens): a mean over ties stays whole


def run_scaled(
    network: LoopedNetwork,
    X: Sequences,
    loops: int | None = None,
    watch: Watch | None = None,
    tick: Tick | None = None,
) -> FractionRows:
    """What `dense.run_rational` returns, for networks without a clock.

    X (sequences, tokens, size_in): all sequences of one length. Raises SpecError for soft attention, a clock, or
    denominators that do not close.
    """
    if network.attention != "hard" or network.clock is not None:
        raise SpecError("scaled integers run hard attention without a clock; use the dense engine for this network")
    loops = network.resolve_loops(loops)
    shape = (len(X), len(X[0]))
    start = first_states(network, X)
    block = scale_block(network, [lcm(*(v.denominator for v in row)) for row in start], shape[1])
    state = [as_column(row, D, shape) for row, D in zip(start, block.denominators)]
    for t in range(loops):
        if tick is not None and t % TICK == 0:
            tick(t, loops)
        if watch is not None and watch.wants(t):
            watch.see(t, as_fractions(state, block.denominators, shape))
        attend(block, state, shape)
        step(block, state)
    if watch is not None and watch.wants(loops):
        watch.see(loops, as_fractions(state, block.denominators, shape))
    return read_out(network, as_fractions(state, block.denominators, shape))


def first_states(network: LoopedNetwork, X: Sequences) -> list[list[Fraction]]:
    """L1, by row: (rows, sequences * tokens)."""
    tokens = [token for sequence in X for token in sequence]
    return [
        [sum((w * token[i] for i, w in terms), bias) for token in tokens] if terms else [bias] * len(tokens)
        for terms, bias in zip(network.first.weights, network.first.bias)
    ]


def read_out(network: LoopedNetwork, states: FractionRows) -> FractionRows:
    """L2 on fractions (sequences, tokens, rows)."""
    maps = list(zip(network.last.weights, network.last.bias))
    return [
        [[sum((w * token[row] for row, w in terms), bias) for terms, bias in maps] for token in sequence]
        for sequence in states
    ]


def scale_block(network: LoopedNetwork, start: Sequence[int], tokens: int) -> ScaledBlock:
    """The block on integers; `start` are the denominators of the rows' first values."""
    block, shares = network.block, lcm(*range(1, tokens + 1))
    rows, neurons, heads = denominators(network, start, shares)
    scaled_heads = []
    for head, scale in zip(block.heads, heads):
        # Queries and keys get any common positive scale: only comparisons use them.
        scored = (whole(part, rows, scale_of(part, rows)) for part in (head.query, head.key))
        query, key = scored
        output = [(row, exact(w * rows[row] / (scale * shares))) for row, w in head.output]
        scaled_heads.append(ScaledHead(query, key, whole(head.value, rows, scale), output))
    return ScaledBlock(
        neurons=[
            ScaledNeuron(
                whole(neuron.reads, rows, scale),
                exact(neuron.bias * scale),
                [(row, exact(w * rows[row] / scale)) for row, w in neuron.writes],
            )
            for neuron, scale in zip(block.neurons, neurons)
        ],
        heads=scaled_heads,
        bias=[exact(bias * scale) for bias, scale in zip(block.bias, rows)],
        denominators=rows,
        shares=shares,
    )


def denominators(network: LoopedNetwork, start: Sequence[int], shares: int) -> tuple[list[int], list[int], list[int]]:
    """Denominators of rows, neurons and head values that the block never leaves; SpecError when there are none."""
    block = network.block
    rows = [lcm(D, bias.denominator) for D, bias in zip(start, block.bias)]
    for _ in range(ROUNDS):
        neurons = [lcm(scale_of(n.reads, rows), n.bias.denominator) for n in block.neurons]
        heads = [scale_of(head.value, rows) for head in block.heads]
        grown = list(rows)
        for neuron, scale in zip(block.neurons, neurons):
            for row, weight in neuron.writes:
                grown[row] = lcm(grown[row], (weight / scale).denominator)
        for head, scale in zip(block.heads, heads):
            for row, weight in head.output:
                grown[row] = lcm(grown[row], (weight / (scale * shares)).denominator)
        if grown == rows:
            return rows, neurons, heads
        rows = grown
    raise SpecError(
        f"the rows of this block have no common denominators after {ROUNDS} rounds (a weight divides in every loop); "
        "use the dense engine"
    )


def scale_of(terms: Terms, rows: Sequence[int]) -> int:
    """The least H for which every H w / D is whole."""
    return lcm(*((weight / rows[row]).denominator for row, weight in terms))


def whole(terms: Terms, rows: Sequence[int], scale: int) -> IntTerms:
    return [(row, exact(weight * scale / rows[row])) for row, weight in terms]


def exact(value: Fraction) -> int:
    assert value.denominator == 1  # what `denominators` closes under
    return value.numerator


def combine(state: list[Column], terms: Iterable[tuple[int, int]], bias: int = 0) -> Column:
    """bias + Σ weight · row; weights of 1 cost no multiplication (rows can be thousands of bits long)."""
    total: Column = bias
    for row, weight in terms:
        total = total + (state[row] if weight == 1 else state[row] * weight)
    return total


def step(block: ScaledBlock, state: list[Column]) -> None:
    """state += W2 ReLU(W1 state + b1) + b2, in place. All neurons read before any row changes."""
    updates: dict[int, Column] = {row: bias for row, bias in enumerate(block.bias) if bias}
    for neuron in block.neurons:
        hidden = combine(state, neuron.reads, neuron.bias)
        hidden = np.maximum(hidden, 0) if isinstance(hidden, np.ndarray) else max(hidden, 0)
        if isinstance(hidden, int) and hidden == 0:
            continue
        for row, weight in neuron.writes:
            change = hidden if weight == 1 else hidden * weight
            updates[row] = updates[row] + change if row in updates else change
    for row, change in updates.items():
        state[row] = state[row] + change


def attend(block: ScaledBlock, state: list[Column], shape: tuple[int, int]) -> None:
    """state += attention, in place: each query takes the mean value over the keys with the largest score."""
    mixes = [mean_of_best(block, head, state, shape) for head in block.heads]
    for head, mix in zip(block.heads, mixes):
        for row, weight in head.output:
            state[row] = state[row] + mix * weight


def mean_of_best(block: ScaledBlock, head: ScaledHead, state: list[Column], shape: tuple[int, int]) -> Column:
    """`shares` times the mean value of the best keys, for each query."""
    value = combine(state, head.value)
    if isinstance(value, int):
        return value * block.shares  # the same whatever is attended to
    query, key = combine(state, head.query), combine(state, head.key)
    if isinstance(key, int) and isinstance(query, int):
        return np.broadcast_to(value.sum(-1, keepdims=True) * (block.shares // shape[1]), shape)
    query, key = np.broadcast_to(query, shape), np.broadcast_to(key, shape)
    scores = query[:, :, None] * key[:, None, :]  # (sequences, attending, attended to)
    best = scores == scores.max(-1, keepdims=True)
    counts = best.sum(-1)
    totals = np.where(best, value[:, None, :], 0).sum(-1)
    return totals * np.array([block.shares // int(c) for c in counts.flat], dtype=object).reshape(shape)


def as_column(values: Sequence[Fraction], denominator: int, shape: tuple[int, int]) -> Column:
    whole_values = [exact(v * denominator) for v in values]
    if all(v == whole_values[0] for v in whole_values):
        return whole_values[0]
    return np.array(whole_values, dtype=object).reshape(shape)


def as_fractions(state: list[Column], scales: Sequence[int], shape: tuple[int, int]) -> FractionRows:
    """(sequences, tokens, rows) as fractions."""
    columns = []
    for column, scale in zip(state, scales):
        whole_values = column.ravel().tolist() if isinstance(column, np.ndarray) else [column] * (shape[0] * shape[1])
        columns.append([Fraction(int(v), scale) for v in whole_values])
    tokens = [list(token) for token in zip(*columns)]
    return [tokens[n * shape[1] : (n + 1) * shape[1]] for n in range(shape[0])]
