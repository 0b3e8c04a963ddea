"""The definition of a looped network, multiplied out: every weight, every row, every loop.

`run_rational` does it in exact rationals (python-flint matrices), `run_float64` in torch. Nothing is skipped and
nothing is known about the constructions, so these two are what the fast ways are judged by.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import repeat
from typing import Any

import torch
from flint import fmpq, fmpq_mat
from torch import Tensor

from fixedformer.attention import hardmax_weights, softmax_weights
from fixedformer.errors import SpecError
from fixedformer.loop.block import Affine, LoopedNetwork, Matrices

Exact = int | Fraction
Sequences = Sequence[Sequence[Sequence[Exact]]]  # (sequences, tokens, size)
FractionRows = list[list[list[Fraction]]]  # (sequences, tokens, rows)
Tick = Callable[[int, int], None]  # loops done, of how many
TICK = 64
"""Loops between two calls of a `Tick`."""


@dataclass(frozen=True)
class Watch:
    """Who is shown the state after t loops, t = 0 first, by `see(t, state)`, for the t in `when` (None: every t)."""

    see: Callable[[int, Any], None]
    when: Collection[int] | None = None

    def wants(self, t: int) -> bool:
        return self.when is None or t in self.when


def run_rational(
    network: LoopedNetwork,
    X: Sequences,
    loops: int | None = None,
    watch: Watch | None = None,
    tick: Tick | None = None,
) -> FractionRows:
    """Outputs (sequences, tokens, size_out) as fractions. `watch` sees states (sequences, tokens, rows) of fractions.

    Raises SpecError for soft attention: exponentials of integers are not rational.
    """
    if network.attention != "hard":
        raise SpecError("exact arithmetic needs hard attention: exp is irrational; run soft attention in float64")
    loops = network.resolve_loops(loops)
    full = network.block.matrices()
    W1, W2 = matrix(full.W1), matrix(full.W2)
    b1, b2 = column(full.b1), column(full.b2)
    states = [affine(network.first, tokens) for tokens in X]
    for t in range(loops):
        if tick is not None and t % TICK == 0:
            tick(t, loops)
        if watch is not None and watch.wants(t):
            watch.see(t, [transposed(state) for state in states])
        for n, state in enumerate(states):
            state = state + attend(full, state)
            ones = fmpq_mat(1, state.ncols(), [1] * state.ncols())
            hidden = W1 * state + b1 * ones
            hidden = fmpq_mat(hidden.nrows(), hidden.ncols(), [max(v, fmpq(0)) for v in hidden.entries()])
            states[n] = state + clocked(network, t, W2 * hidden + b2 * ones)
    if watch is not None and watch.wants(loops):
        watch.see(loops, [transposed(state) for state in states])
    return [transposed(apply(network.last, state)) for state in states]


def attend(full: Matrices, state: fmpq_mat) -> fmpq_mat:
    """Σ_h O (V X) hardmax[(K X)ᵀ (Q X)], ties sharing the weight equally; state (rows, tokens)."""
    rows, tokens = state.nrows(), state.ncols()
    total = fmpq_mat(rows, tokens)
    for query, key, value, output in full.heads:
        queries, keys, values = (matrix([part]) * state for part in (query, key, value))  # (1, tokens)
        scores = (keys.transpose() * queries).tolist()  # (tokens attended to, tokens attending)
        weights = fmpq_mat(tokens, tokens)
        for i in range(tokens):
            best = max(scores[j][i] for j in range(tokens))
            winners = [j for j in range(tokens) if scores[j][i] == best]
            for j in winners:
                weights[j, i] = fmpq(1, len(winners))
        total = total + column(output) * (values * weights)
    return total


def clocked(network: LoopedNetwork, t: int, update: fmpq_mat) -> fmpq_mat:
    """η(t) ⊙ update."""
    if network.clock is not None:
        for row, scale in zip(network.clock.rows, network.clock.at(t)):
            for i in range(update.ncols()):
                update[row, i] = update[row, i] * rational(scale)
    return update


def rational(value: Exact) -> fmpq:
    return fmpq(value.numerator, value.denominator)


def matrix(values: Sequence[Sequence[Exact]]) -> fmpq_mat:
    return fmpq_mat([[rational(v) for v in row] for row in values])


def column(values: Sequence[Exact]) -> fmpq_mat:
    return fmpq_mat(len(values), 1, [rational(v) for v in values])


def affine(map_in: Affine, tokens: Sequence[Sequence[Exact]]) -> fmpq_mat:
    """L1 on one sequence: (rows, tokens)."""
    return apply(map_in, matrix(tokens).transpose())


def apply(map_: Affine, state: fmpq_mat) -> fmpq_mat:
    out = fmpq_mat(len(map_.weights), state.ncols())
    for i, (terms, bias) in enumerate(zip(map_.weights, map_.bias)):
        for j in range(state.ncols()):
            out[i, j] = sum((rational(w) * state[row, j] for row, w in terms), rational(bias))
    return out


def transposed(state: fmpq_mat) -> list[list[Fraction]]:
    """(tokens, rows) as fractions."""
    return [[Fraction(int(v.p), int(v.q)) for v in row] for row in state.transpose().tolist()]


@torch.no_grad()
def run_float64(
    network: LoopedNetwork,
    X: Tensor,
    loops: int | None = None,
    watch: Watch | None = None,
    tick: Tick | None = None,
) -> Tensor:
    """Outputs (..., tokens, size_out) for X (..., tokens, size_in), float64. `watch` sees states (.., tokens, rows)."""
    loops = network.resolve_loops(loops)
    block = network.block.tensors()
    W1, W2, b1, b2 = block["W1"].mT, block["W2"].mT, block["b1"], block["b2"]
    enter, start = network.first.tensors()
    state = X.to(torch.float64) @ enter.mT + start  # (..., tokens, rows)
    with threads_for(state.numel()):
        for t, scale in zip(range(loops), scales(network)):
            if tick is not None and t % TICK == 0:
                tick(t, loops)
            if watch is not None and watch.wants(t):
                watch.see(t, state.clone())
            if network.block.heads:
                state = state + attend_float64(network, block, state)
            flat = state.reshape(-1, state.shape[-1])
            update = torch.addmm(b2, torch.addmm(b1, flat, W1).relu_(), W2)
            state = flat.add_(update if scale is None else update.mul_(scale)).view_as(state)
    if watch is not None and watch.wants(loops):
        watch.see(loops, state.clone())
    leave, bias = network.last.tensors()
    result: Tensor = state @ leave.mT + bias
    return result


@contextmanager
def threads_for(numbers: int) -> Iterator[None]:
    """One torch thread while a small state is looped; the former number again afterwards.

    Thousands of products of a few microseconds each: on a busy machine, threads that wait for each other at every one
    cost far more than the arithmetic. The setting is the process's, so other threads that use torch meanwhile are held
    to one thread as well.
    """
    before = torch.get_num_threads()
    if numbers < SMALL:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


SMALL = 2**20
"""Numbers in a state from which on threads help."""


def attend_float64(network: LoopedNetwork, block: dict[str, Tensor], state: Tensor) -> Tensor:
    """Σ_h O (V X) σ[(K X)ᵀ (Q X)] for state (..., tokens, rows)."""
    weigh = hardmax_weights if network.attention == "hard" else softmax_weights
    queries, keys, values = ((state @ block[part].mT).mT for part in ("query", "key", "value"))  # (..., heads, tokens)
    weights = weigh(queries.unsqueeze(-1) * keys.unsqueeze(-2))  # (..., heads, tokens, tokens)
    mixed = (weights @ values.unsqueeze(-1)).squeeze(-1).mT  # (..., tokens, heads)
    result: Tensor = mixed @ block["output"]
    return result


def scales(network: LoopedNetwork) -> Iterator[Tensor | None]:
    """η(t) as a tensor (rows) for t = 0, 1, .., or None for ever without a clock; written out a few loops at a time."""
    clock = network.clock
    if clock is None:
        yield from repeat(None)
        return
    for first in range(0, len(clock.values), CHUNK):
        part = clock.tensor[first : first + CHUNK]
        full = torch.ones(len(part), len(network.block.rows), dtype=torch.float64)
        full[:, list(clock.rows)] = part
        yield from full


CHUNK = 4096
"""Loops whose η is written out at once."""
