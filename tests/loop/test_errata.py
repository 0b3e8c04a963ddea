"""What the paper's formulas do when they are taken literally: each corrected construction with one entry put back.

Numbers are those of the errata in docs/theory/loop.md. Every test shows the corrected block right on the same input.
"""

import dataclasses
from collections.abc import Mapping
from fractions import Fraction as F
from itertools import pairwise

import pytest
import torch

from fixedformer.loop import composite
from fixedformer.loop.approximator import LoopedApproximator
from fixedformer.loop.block import Block, BlockBuilder, Clock, Head, LoopedNetwork, Neuron, enter, leave
from fixedformer.loop.context import contextual_network, sequence_network
from fixedformer.loop.dense import Watch, run_float64, run_rational
from fixedformer.loop.examples import wave
from fixedformer.loop.extract import Steps, bit_sum_network, value_network
from fixedformer.loop.memorise import add_memory
from fixedformer.loop.quantise import quantiser_network

from . import oracles


def with_neuron(network: LoopedNetwork, index: int, **changes: Mapping[str, F | int]) -> LoopedNetwork:
    """The network with entries of one neuron changed: reads and writes by row name, bias as a number."""
    block, old = network.block, network.block.neurons[index]
    new: dict[str, object] = {}
    for field in ("reads", "writes"):
        entries = dict(getattr(old, field)) | {block.row(k): F(v) for k, v in changes.get(field, {}).items()}
        new[field] = tuple(sorted(entries.items()))
    new["bias"] = F(changes.get("bias", old.bias))
    neurons = (*block.neurons[:index], Neuron(**new), *block.neurons[index + 1 :])
    return with_block(network, dataclasses.replace(block, neurons=neurons))


def with_block(network: LoopedNetwork, block: Block) -> LoopedNetwork:
    return dataclasses.replace(network, block=block)


CORNERS = [[[F(c, 4)] for c in range(4)]]
CELLS = [[[c] for c in range(4)]]


def test_1_interval_ends_of_step_one() -> None:
    """(123), (126): with +1 for (k+1)δ no rectangle ever ends, and the cells below are counted too."""
    edge = F(1, 64)
    right = quantiser_network(1, 4, edge)
    literal = with_neuron(right, 4, reads={"round0": 1 / edge})
    literal = with_neuron(literal, 5, reads={"round0": (1 - edge) / edge})
    assert run_rational(right, CORNERS) == CELLS
    assert run_rational(literal, CORNERS) == [[[0], [1], [3], [6]]]


def test_2_start_of_step_one() -> None:
    """(171)-(173): from (0,0,0,x,0), n - 1 loops end one rectangle short, and the last cell is lost."""
    right = quantiser_network(1, 4, F(1, 64))
    literal = dataclasses.replace(right, first=enter(right.block, 1, {"input0": {0: 1}}, {}))
    assert run_rational(literal, CORNERS) == [[[0], [1], [2], [0]]]


SEQUENCE = [[[5, 1], [2, 0], [3, 1]]]  # (id, last coordinate), base 6 with two cells a coordinate


def test_11_keys_of_the_second_head() -> None:
    """(247): keyed by the last coordinate itself, it keeps naming the token with the largest one."""
    right = contextual_network(6, 3)
    assert run_rational(right, SEQUENCE) == [[[oracles.extended_id([(5, 1), (2, 0), (3, 1)], 6)]] * 3]
    first, second = right.block.heads
    literal_head = Head(second.query, second.value, second.value, second.output)
    literal = with_block(right, dataclasses.replace(right.block, heads=(first, literal_head)))
    assert run_rational(literal, SEQUENCE) != run_rational(right, SEQUENCE)


def test_12_second_head_must_not_touch_s() -> None:
    """A.7, W2 row 5, column 4: -1 subtracts every picked coordinate from s, and B-fold in the loops after."""
    right = contextual_network(6, 3)
    literal = with_neuron(right, 3, writes={"s": -1})
    difference = run_rational(right, SEQUENCE)[0][0][0] - run_rational(literal, SEQUENCE)[0][0][0]
    assert difference == 2 * (1 * 36 + 1 * 6 + 0)


def test_13_read_out_of_step_two() -> None:
    """(282): 2 x5 - x6 subtracts each token's own coordinate, so tokens of one sequence disagree about its id."""
    right = contextual_network(6, 3)
    literal = dataclasses.replace(right, last=leave(right.block, [({"s": 2, "last": -1}, 0)]))
    assert len({token[0] for token in run_rational(right, SEQUENCE)[0]}) == 1
    assert len({token[0] for token in run_rational(literal, SEQUENCE)[0]}) == 2


BITS = [1, 0, 1, 1, 0, 1]
COUNTS = [[k] for k in range(7)]
SUMS = [[sum(BITS[:k])] for k in range(7)]


def test_15_gate_must_not_clear_the_bit() -> None:
    """A.9, W2 row 4, column 6: -1 subtracts the gate from θ, and no bit is ever counted for k >= 1."""
    right = bit_sum_network(BITS)
    gate = next(i for i, n in enumerate(right.block.neurons) if n.reads == ((right.block.row("g"), F(1)),))
    literal = with_neuron(right, gate, writes={"theta": -1})
    assert run_rational(right, [COUNTS]) == [SUMS]
    assert run_rational(literal, [COUNTS]) != [SUMS]


def test_16_signs_of_the_gate() -> None:
    """A.9, W2 row 5, columns 7 and 8: with -1, +1 the gate is -1 where it should be 1: every sum is 0."""
    right = bit_sum_network(BITS)
    row = right.block.row("g")
    literal = right
    for index, neuron in enumerate(right.block.neurons):
        if any(read == right.block.row("k") for read, _ in neuron.reads):
            literal = with_neuron(literal, index, writes={"g": -dict(neuron.writes)[row]})
    assert run_rational(literal, [COUNTS]) == [[[0]] * 7]


def test_19_edge_of_the_bit_step() -> None:
    """ε must not exceed 2^-r: with a fixed ε, long fractions just below 1/2 are read as 1 in part."""
    steps = Steps((F(0),), (F(1),), ((0, 1, 1, 1, 1, 1),), ((0,) * 6,))
    right, literal = value_network(steps), value_network(steps, edge=F(1, 8))
    assert run_rational(right, [[[1]]]) == [[[F(1, 2)]]]
    assert run_rational(literal, [[[1]]]) != [[[F(1, 2)]]]


def test_20_valid_and_dummy_ids_overlap_as_written() -> None:
    """(40), (41): s_valid + b hits other valid ids; 2 (s - Z) + b, b in n .. 2n-1, does not, and fills all of (42)."""
    n, length = 2, 8
    valid = {2 * s - s % n for s in range(length)}
    literal = {2 * s - s % n + b for s in range(length) for b in range(n, 2 * n)}
    corrected = {2 * (s - s % n) + b for s in range(length) for b in range(n, 2 * n)}
    assert valid & literal
    assert not valid & corrected
    assert valid | corrected == set(range(2 * length))


@pytest.mark.parametrize(("fall", "silent"), [(None, True), (2 * 7 + F(1, 2), False)])
def test_26_fall_of_a_picked_key(fall: F | None, silent: bool) -> None:
    """M > (B-1)/ε is enough when `picked` is exact; off by 1/4 the fall halves, and a key may stay above 0.

    Ours (fall None) leaves every picked key at -1 or below and every other key where it was, off or not.
    """
    network = sequence_network(8, 1)
    block = dataclasses.replace(network.block, heads=())
    network = with_block(network, block)
    if fall is not None:
        network = with_neuron(network, 0, writes={"key": -fall})
    for off in (F(0), F(1, 4), F(-1, 4)):
        first = enter(block, 2, {"key": {0: 1}, "picked": {1: 1}}, {"picked": off})
        alone = LoopedNetwork(network.block, first, leave(block, [({"key": 1}, 0)]), loops=1)
        picked = [token[0] for token in run_rational(alone, [[[z, z] for z in range(8)]])[0]]
        assert all(key < 0 for key in picked) == (silent or off <= 0)
        assert fall is not None or max(picked) <= -1
        others = [[z, best] for best in range(8) for z in range(best)]
        assert [token[0] for token in run_rational(alone, [others])[0]] == [z for z, _ in others]


def test_29_without_a_ceiling_s_overflows(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = LoopedApproximator(1, 2, 8, "timestep")
    X = torch.tensor([[[0.3], [0.9]]], dtype=torch.float64)
    program = machine.compile(wave)
    assert torch.isfinite(machine.run(program, X, engine="dense")).all()
    monkeypatch.setattr(composite, "add_ceiling", lambda *_: None)
    states = []
    run_float64(machine.network(program), X, watch=Watch(lambda _, state: states.append(state)))
    assert not torch.isfinite(states[-1]).all()
    first = next(t for t, state in enumerate(states) if not torch.isfinite(state).all())
    assert 300 < first < 400  # 308 / log10(8) loops


def ratio_network(values: list[F], M: F) -> LoopedNetwork:
    """Theorem 4.2 without a shift: any values that are not 0, as the paper allows."""
    builder = BlockBuilder()
    add_memory(builder, 1, "ratio", M / 6)
    block = builder.build()
    first = enter(block, 1, {"k0": {0: 1}, "index0": {0: 1}}, {"y0": values[0]})
    ratios = [b / a for a, b in pairwise(values)]
    clock = Clock((block.row("y0"), block.row("s0")), ((F(0), F(1)), *((r - 1, r) for r in ratios)))
    return LoopedNetwork(block, first, leave(block, [({"s0": 1}, 0)]), len(values), clock=clock)


def test_31_bias_of_the_negative_part() -> None:
    """b1[2] = -1 takes one off the register whenever it is negative."""
    values = [F(-2), F(-3), F(5)]
    right = ratio_network(values, F(12))
    negative = next(i for i, n in enumerate(right.block.neurons) if n.reads == ((right.block.row("y0"), F(-1)),))
    assert run_rational(right, [[[k] for k in range(3)]]) == [[[v] for v in values]]
    literal = with_neuron(right, negative, bias=-1)
    assert run_rational(literal, [[[k] for k in range(3)]]) != [[[v] for v in values]]


def test_33_bound_of_the_impulse() -> None:
    """M > max y holds for every M >= 0 when all y are negative; M > max |y| is what the impulse needs."""
    values = [F(-2), F(-3), F(-1)]
    indices = [[k] for k in range(3)]
    assert run_rational(ratio_network(values, F(4)), [indices]) == [[[v] for v in values]]
    assert run_rational(ratio_network(values, F(1, 2)), [indices]) != [[[v] for v in values]]


def test_27_width_of_the_gate() -> None:
    """(94)-(100): the gate as the paper has it, step_ε(k - l), is open for k exactly whole only; ours within 1/4."""
    right = bit_sum_network(BITS)
    narrow = right
    edge = F(1, 2**6)
    k = right.block.row("k")
    gates = [i for i, n in enumerate(right.block.neurons) if any(row == k for row, _ in n.reads)]
    for index, bias in zip(gates, (1 - 1 / edge, -1 / edge)):
        narrow = with_neuron(narrow, index, reads={"k": 1 / edge}, bias=bias)
    off = [[row[0] - F(1, 4)] for row in COUNTS]
    assert run_rational(narrow, [COUNTS]) == [SUMS]
    assert run_rational(right, [off]) == [SUMS]
    assert run_rational(narrow, [off]) != [SUMS]
