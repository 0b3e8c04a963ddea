"""Lemmas A.5, A.6, A.9 and 4.1, Corollary A.7, Theorem 4.2: exact equality on all grid points and permutations."""

from fractions import Fraction as F
from itertools import pairwise, permutations, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fixedformer.errors import SpecError
from fixedformer.loop.block import Clock, LoopedNetwork
from fixedformer.loop.context import contextual_network, sequence_network
from fixedformer.loop.dense import FractionRows, run_float64, run_rational
from fixedformer.loop.extract import Steps, bit_sum_network, encode, value_network
from fixedformer.loop.memorise import memory_network
from fixedformer.loop.quantise import quantiser_network
from fixedformer.loop.scaled import run_scaled

from . import oracles

FORMS = ["paper", "slim"]
QUARTERS = [F(0), F(1, 4), F(-1, 4)]


def exactly(network: LoopedNetwork, X: list[list[list[F | int]]]) -> FractionRows:
    """The answer of both exact engines, which must agree."""
    answer = run_rational(network, X)
    assert run_scaled(network, X) == answer
    return answer


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("d", "n"), [(1, 2), (1, 3), (1, 8), (2, 3), (3, 2)])
def test_quantiser_is_right_from_each_corner_to_the_ramp(d: int, n: int, form: str) -> None:
    """Lemma A.5 at both ends of [kδ, (k+1)δ - ε] for every cell."""
    edge = F(1, 8 * n)
    network = quantiser_network(d, n, edge, form)
    cells = list(product(range(n), repeat=d))
    for inside in (F(0), F(1, n) - edge):
        tokens = [[F(c, n) + inside for c in cell] for cell in cells]
        assert exactly(network, [tokens]) == [[list(cell) for cell in cells]]
        floats = run_float64(network, torch.tensor([[[float(v) for v in t] for t in tokens]], dtype=torch.float64))
        # A corner may round to just below its threshold, into the ramp: 2^-53 of 1/ε.
        truth = torch.tensor([cells], dtype=torch.float64)
        torch.testing.assert_close(floats, truth, rtol=0, atol=2.0**-50 * n * float(1 / edge))
    assert network.loops == n - 1
    assert (len(network.block.rows), network.block.width) == ((5 * d, 7 * d) if form == "paper" else (2 * d, 2 * d))
    assert network.block.largest_weight <= max(1 / edge, n)


def test_quantiser_at_one_is_right_in_the_slim_form_only() -> None:
    """x = 1 lies in no cell (20). Counting thresholds gives n - 1; the paper's last rectangle has ended."""
    assert exactly(quantiser_network(1, 4, F(1, 64), "slim"), [[[1]]]) == [[[3]]]
    assert exactly(quantiser_network(1, 4, F(1, 64), "paper"), [[[1]]]) == [[[0]]]


@pytest.mark.parametrize(("base", "tokens"), [(2, 1), (2, 2), (4, 2), (4, 3), (5, 4)])
def test_sequence_ids_for_every_ordering(base: int, tokens: int) -> None:
    """Lemma A.6: every sequence of distinct ids, in every order; five rows, width 3, one head, N loops."""
    sequences = list(permutations(range(base), tokens))
    network = sequence_network(base, tokens)
    expected = [[[oracles.sequence_id(ids, base)]] * tokens for ids in sequences]
    assert exactly(network, [[[z] for z in ids] for ids in sequences]) == expected
    floats = run_float64(network, torch.tensor(sequences, dtype=torch.float64)[..., None])
    assert floats.tolist() == expected
    assert (len(network.block.rows), network.block.width, len(network.block.heads)) == (5, 3, 1)
    assert network.loops == tokens


@pytest.mark.parametrize(("n", "d", "tokens"), [(2, 1, 2), (4, 1, 3), (2, 2, 2), (2, 2, 3), (3, 2, 2)])
def test_extended_sequence_ids_for_every_ordering(n: int, d: int, tokens: int) -> None:
    """Corollary A.7; eight rows, width 5, two heads. In float64 too, with no rounding at all."""
    base = n**d
    sequences = [[(z, oracles.coordinates(z, d, n)[-1]) for z in ids] for ids in permutations(range(base), tokens)]
    network = contextual_network(base, tokens)
    expected = [[[oracles.extended_id(sequence, base)]] * tokens for sequence in sequences]
    assert exactly(network, [[list(token) for token in sequence] for sequence in sequences]) == expected
    floats = run_float64(network, torch.tensor(sequences, dtype=torch.float64))
    assert floats.tolist() == [[[float(v) for v in token] for token in sequence] for sequence in expected]
    assert (len(network.block.rows), network.block.width, len(network.block.heads)) == (8, 5, 2)


def test_equal_pairs_have_an_id_of_their_own_and_equal_triples_collide() -> None:
    """Why N = 2 needs no O(N^{2/p} δ^{d/p}) term, and N = 3 does."""
    base = 4
    pairs = sequence_network(base, 2)
    ids = [exactly(pairs, [[[a], [b]]])[0][0][0] for a in range(base) for b in range(a + 1)]
    assert ids == [base * a + b for a in range(base) for b in range(a + 1)]
    triples = sequence_network(base, 3)
    first, second = (exactly(triples, [[[z] for z in ids]]) for ids in ((3, 3, 1), (3, 1, 1)))
    assert first == second


@given(bits=st.lists(st.integers(0, 1), min_size=1, max_size=24))
@settings(max_examples=40)
def test_bit_sums(bits: list[int]) -> None:
    """Lemma A.9 in rationals and float64 alike; six rows, width 9."""
    network = bit_sum_network(bits)
    everywhere = [[k] for k in range(len(bits) + 1)]
    expected = [[sum(bits[:k])] for k in range(len(bits) + 1)]
    assert exactly(network, [everywhere]) == [expected]
    assert run_float64(network, torch.tensor([everywhere])).tolist() == [expected]
    assert (len(network.block.rows), network.block.width, network.loops) == (6, 9, len(bits) + 1)


def test_bit_sums_of_a_thousand_bits() -> None:
    bits = np.random.default_rng(0).integers(0, 2, 1000).tolist()
    assert exactly(bit_sum_network(bits), [[[k] for k in (0, 1, 499, 999, 1000)]]) == [
        [[sum(bits[:k])] for k in (0, 1, 499, 999, 1000)]
    ]


def test_one_loop_less_misses_the_last_bit() -> None:
    """The paper's r loops reach ξ_r, whose sum stops at l = r - 1: r + 1 are needed."""
    network = bit_sum_network([0, 0, 1])
    assert run_rational(network, [[[3]]], loops=3) == [[[0]]]
    assert run_rational(network, [[[3]]], loops=4) == [[[1]]]


def random_lines(seed: int, size: int, d: int) -> list[list[tuple[int, F]]]:
    random = np.random.default_rng(seed)
    places = sorted(int(k) for k in random.choice(size, max(2, size // 3), replace=False))
    return [[(k, F(float(random.normal()))) for k in places] for _ in range(d)]


def on_lines(corners: list[tuple[int, F]], k: int) -> F:
    """The broken line at k, in plain fractions."""
    if k <= corners[0][0]:
        return corners[0][1]
    for (left, a), (right, b) in pairwise(corners):
        if left <= k <= right:
            return a + (b - a) * F(k - left, right - left)
    return corners[-1][1]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("off", QUARTERS)
@pytest.mark.parametrize(("d", "size"), [(1, 2), (1, 40), (2, 33), (3, 16)])
def test_values_are_within_half_a_step_whatever_the_quarter(d: int, size: int, off: F, form: str) -> None:
    """Lemma 4.1 for every k, and the same answers when k is off by up to 1/4 on either side."""
    lines = random_lines(size, size, d)
    steps = encode(lines, size)
    network = value_network(steps, form)
    answers = exactly(network, [[[k + off] for k in range(size)]])[0]
    for i, corners in enumerate(lines):
        largest = max(abs(on_lines(corners, k) - on_lines(corners, k - 1)) for k in range(1, size))
        assert steps.step[i] == largest
        errors = [abs(answers[k][i] - on_lines(corners, k)) for k in range(size)]
        assert max(errors) <= largest / 2
        assert max(errors) > largest / 10  # the bound is not idle
    expected = (12 * d, 18 * d) if form == "paper" else (2 + 5 * d, 3 + 10 * d)
    assert (len(network.block.rows), network.block.width) == expected
    assert network.loops == size


@pytest.mark.parametrize("form", FORMS)
def test_ids_off_by_more_than_a_quarter_give_other_values(form: str) -> None:
    """The tolerance is 1/4 on either side, and no more: the gate opens at 1/4 and is open at 3/4."""
    steps = Steps((F(0),), (F(1),), ((1,) * 7,), ((0,) * 7,))
    network = value_network(steps, form)
    for off in (F(1, 4), F(-1, 4)):
        assert exactly(network, [[[3 + off]]]) == [[[F(7, 2)]]]
        assert exactly(network, [[[3 + off * F(21, 20)]]]) != [[[F(7, 2)]]]


def test_a_constant_is_kept_exactly() -> None:
    steps = encode([[(1, F(2, 3)), (3, F(2, 3))]], 5)
    assert exactly(value_network(steps), [[[k] for k in range(5)]]) == [[[F(2, 3)]] * 5]


@pytest.mark.parametrize("values", ["trapezoid", "ratio"])
@pytest.mark.parametrize(("d", "size"), [(1, 1), (1, 20), (2, 9), (3, 5)])
def test_memory_gives_every_value_back(d: int, size: int, values: str) -> None:
    """Theorem 4.2, all k, exactly; zero and repeated values included."""
    random = np.random.default_rng(size)
    table = [[F(int(v), 7) for v in row] for row in random.integers(-7, 8, (size, d))]
    network = memory_network(table, values)
    assert run_rational(network, [[[k] for k in range(size)]]) == [table]
    expected = (1 + d, 4) if values == "trapezoid" else (4 * d, 6 * d)
    assert (len(network.block.rows), network.block.width) == expected
    assert network.loops == size


@pytest.mark.parametrize("values", ["trapezoid", "ratio"])
def test_memory_is_one_block_for_every_table(values: str) -> None:
    tables = [[[F(k)] for k in range(5)], [[F(-k, 3)] for k in range(9)]]
    assert len({memory_network(table, values, bound=9).block for table in tables}) == 1


def test_without_loop_zero_the_first_value_is_lost() -> None:
    """The paper's K - 1 loops start at η(1): nothing ever writes y_0."""
    table = [[F(1, 2)], [F(1, 3)], [F(1, 4)]]
    whole = memory_network(table, "ratio")
    assert run_rational(whole, [[[0]]]) == [[[F(1, 2)]]]
    clock = Clock(whole.clock.rows, whole.clock.values[1:])
    late = LoopedNetwork(whole.block, whole.first, whole.last, 2, clock=clock)
    assert run_rational(late, [[[0]]]) != [[[F(1, 2)]]]


def test_values_beyond_the_bound_are_refused() -> None:
    with pytest.raises(SpecError, match=r"built for values within ±1, the table holds 3; build it with a larger"):
        memory_network([[F(3)]], "ratio", bound=1)


def test_no_bits_are_refused() -> None:
    with pytest.raises(SpecError, match="at least one bit, each 0 or 1"):
        bit_sum_network([])
    with pytest.raises(SpecError, match="at least one bit, each 0 or 1"):
        bit_sum_network([0, 2])
