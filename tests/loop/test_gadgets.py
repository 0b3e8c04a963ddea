"""Gadgets alone, as weights of a real block: exact rationals and float64 against their definitions."""

from fractions import Fraction as F

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fixedformer.errors import SpecError
from fixedformer.loop.block import BlockBuilder, LoopedNetwork
from fixedformer.loop.dense import run_float64, run_rational
from fixedformer.loop.gadgets import add_rect, impulse_network, rect_network, step_network, trapezoid_network
from fixedformer.loop.scaled import run_scaled

from . import oracles

small = st.fractions(min_value=-4, max_value=4, max_denominator=64)


def value(network: LoopedNetwork, *inputs: F | int) -> F:
    """The network's answer to one token; both exact engines must agree."""
    exact = run_rational(network, [[list(inputs)]])
    assert run_scaled(network, [[list(inputs)]]) == exact
    return exact[0][0][0]


def floats(network: LoopedNetwork, rows: list[list[float]]) -> list[float]:
    return run_float64(network, torch.tensor([rows], dtype=torch.float64))[0, :, 0].tolist()


@given(x=small, edge=st.fractions(min_value=F(1, 64), max_value=2, max_denominator=64))
def test_step_is_zero_then_a_ramp_then_one(x: F, edge: F) -> None:
    got = value(step_network(edge), x)
    if x >= 0:
        assert got == 1
    elif x <= -edge:
        assert got == 0
    else:
        assert got == (x + edge) / edge


@given(x=small, start=small, length=st.fractions(min_value=F(1, 8), max_value=4, max_denominator=64))
def test_rect_is_one_inside_and_zero_outside(x: F, start: F, length: F) -> None:
    edge = length / 3
    got = value(rect_network(start, start + length, edge), x)
    expected = oracles.rect(x, start, start + length, edge)
    assert got == expected if expected is not None else 0 < got < 1


def test_the_ramps_of_a_rect_lie_where_we_say_and_not_where_the_paper_does() -> None:
    """(t1 - ε, t1) and (t2 - ε, t2): just inside them the value is between 0 and 1, at their ends it is not."""
    network, tiny = rect_network(F(0), F(1), F(1, 4)), F(1, 1000)
    assert [value(network, x) for x in (F(-1, 4), F(0), F(3, 4), F(1))] == [0, 1, 1, 0]
    assert all(0 < value(network, x) < 1 for x in (-F(1, 4) + tiny, -tiny, F(3, 4) + tiny, 1 - tiny))


@given(u=small)
def test_trapezoid_is_flat_within_a_quarter(u: F) -> None:
    got = value(trapezoid_network(), u)
    assert got == (1 if abs(u) <= F(1, 4) else 0 if abs(u) >= F(1, 2) else 2 - 4 * abs(u))


@given(x=st.fractions(min_value=-5, max_value=5, max_denominator=64), t=st.integers(0, 9), when=st.integers(0, 9))
def test_impulse_passes_its_value_in_one_loop_only(x: F, t: int, when: int) -> None:
    assert value(impulse_network(when, 5), x, t) == (x if t == when else 0)


@pytest.mark.parametrize(("x", "t", "leaks"), [(9, 2, True), (-9, 2, False), (9, 4, False), (-9, 4, True)])
def test_impulse_needs_its_bound_on_one_side_only(x: int, t: int, leaks: bool) -> None:
    """Beyond the bound 5 it still is silent for small values before its loop and for large ones after it."""
    assert (value(impulse_network(3, 5), x, t) != 0) == leaks


def test_gadgets_in_float64() -> None:
    assert floats(step_network(F(1, 8)), [[-1.0], [-0.125], [-0.0625], [0.0], [7.0]]) == [0, 0, 0.5, 1, 1]
    assert floats(trapezoid_network(), [[-0.5], [-0.25], [0.0], [0.25], [0.375], [0.5], [1e6]]) == [
        0,
        1,
        1,
        1,
        0.5,
        0,
        0,
    ]
    assert floats(rect_network(F(1, 2), F(1), F(1, 8)), [[0.25], [0.5], [0.875], [1.0]]) == [0, 1, 1, 0]
    assert floats(impulse_network(2, 4), [[3.5, t] for t in range(5)]) == [0, 0, 3.5, 0, 0]


def test_neurons_and_weights_are_what_the_propositions_say() -> None:
    sizes = [step_network(F(1, 8)), rect_network(0, 1, F(1, 8)), trapezoid_network(), impulse_network(1, 4)]
    assert [network.block.width for network in sizes] == [2, 4, 4, 4]
    assert step_network(F(1, 8)).block.largest_weight == 8
    assert trapezoid_network().block.largest_weight == 4


def test_impossible_gadgets_are_refused() -> None:
    with pytest.raises(SpecError, match="edge of a step must be positive, got 0"):
        step_network(0)
    with pytest.raises(SpecError, match="0 < edge < stop - start, got edge 2"):
        add_rect(BlockBuilder(), {}, 0, 1, 2, {})
    with pytest.raises(SpecError, match="bound of an impulse must be positive"):
        impulse_network(0, -1)
