"""Cells, ids and tables against their definitions; moduli against functions whose moduli are known."""

from fractions import Fraction as F
from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fixedformer.errors import CapacityError, SpecError
from fixedformer.loop.examples import product, spread, wave
from fixedformer.loop.extract import encode
from fixedformer.loop.grid import Grid, require_equivariant, tabulate
from fixedformer.loop.moduli import Lipschitz, lipschitz, moduli, theorem_bound

from . import oracles

GRIDS = [(1, 1, 2), (1, 2, 5), (2, 1, 3), (2, 2, 2), (1, 3, 4), (3, 1, 2), (2, 3, 2)]


@pytest.mark.parametrize(("d", "tokens", "n"), GRIDS)
def test_entries_follow_the_definition_for_every_ordering(d: int, tokens: int, n: int) -> None:
    grid = Grid(d, tokens, n)
    for ids in oracles.reached(d, tokens, n):
        for order in permutations(ids):
            assert grid.entries(order) == oracles.contextual_ids(order, d, n)


@pytest.mark.parametrize(("d", "tokens", "n"), GRIDS)
def test_entries_tell_all_tokens_of_all_sequences_apart(d: int, tokens: int, n: int) -> None:
    grid = Grid(d, tokens, n)
    sequences = list(grid.sorted_sequences())
    assert len(sequences) == grid.sequences
    assert sorted(sequences) == sorted(oracles.reached(d, tokens, n))
    used = [k for ids in sequences for k in set(grid.entries(ids))]
    assert len(used) == len(set(used))
    assert min(used) >= 0
    assert max(used) < grid.size


@pytest.mark.parametrize(("d", "tokens", "n"), [*GRIDS, (1, 2, 16), (1, 4, 8), (2, 2, 4)])
def test_entries_further_apart_than_one_are_at_least_n_apart_unless_one_cell_moved(d: int, tokens: int, n: int) -> None:
    """The gap lemma behind equation (59): a gap below n means that one coordinate of one token moved by one cell."""
    grid = Grid(d, tokens, n)
    owner = {k: (z, ids) for ids in grid.sorted_sequences() for z, k in zip(ids, grid.entries(ids))}
    order = sorted(owner)
    for left, right in pairwise(order):
        if right - left < n:
            (z, before), (z_after, after) = owner[left], owner[right]
            assert z == z_after
            moved = [(a, b) for a, b in zip(before, after) if a != b]
            assert [b - a for a, b in moved] == [1]
            assert right - left == 1


def test_representatives_are_corners_of_their_cells() -> None:
    grid = Grid(2, 1, 3)
    assert grid.coordinates(5) == (1, 2)
    assert grid.corner(5) == (F(1, 3), F(2, 3))
    assert grid.points([5, 0]).tolist() == [[1 / 3, 2 / 3], [0.0, 0.0]]


@pytest.mark.parametrize(
    ("sizes", "error", "match"),
    [
        ((0, 1, 2), SpecError, "d must be an integer >= 1, got 0"),
        ((1, 1, 1), SpecError, "resolution must be an integer >= 2, got 1"),
        ((1, 2.0, 4), SpecError, "tokens must be an integer >= 1, got 2.0"),
        ((1, 3, 2), CapacityError, r"3 tokens need as many distinct cells.* has 2; take a resolution of at least 3"),
    ],
)
def test_impossible_sizes_are_refused(sizes: tuple, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        Grid(*sizes)


def test_a_table_that_does_not_fit_is_refused_before_anything_is_allocated() -> None:
    with pytest.raises(CapacityError, match=r"a table of \d+ entries needs \d+ bytes"):
        tabulate(product, Grid(4, 4, 64))


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (lambda X: X[:1], r"must map an array \(2, 1\) to \(2, 1\), it returned \(1, 1\)"),
        (lambda X: X / 0 if X.min() == 0 else X, "the function is NaN or infinite at X ="),
        (lambda X: X[:, 5], r"the function failed at X = .*: IndexError: index 5"),
        (lambda _: "word", "must return an array .* of numbers, got str"),
        (lambda _: None, r"must map an array \(2, 1\) to \(2, 1\)|of numbers, got NoneType"),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
def test_functions_that_do_not_fit_are_refused(function: object, match: str) -> None:
    with pytest.raises(SpecError, match=match):
        tabulate(function, Grid(1, 2, 3))


def test_functions_that_depend_on_the_order_are_refused() -> None:
    with pytest.raises(SpecError, match="permuting the tokens must permute the outputs"):
        require_equivariant(lambda X: X * np.arange(len(X))[:, None], Grid(1, 3, 4))


def test_functions_may_not_change_their_input_under_us() -> None:
    def careless(X: np.ndarray) -> np.ndarray:
        X += 1
        return X

    table = tabulate(careless, Grid(1, 1, 2))
    assert table.values.ravel().tolist() == [1.0, 1.5]


@given(seed=st.integers(0, 1000))
def test_steps_follow_their_broken_line(seed: int) -> None:
    """encode against the oracle's one-by-one floors."""
    random = np.random.default_rng(seed)
    values = {k: F(float(random.normal())) for k in sorted(random.choice(20, 4, replace=False).tolist())}
    corners = sorted(values.items())
    steps = encode([corners], 20)
    line = [F(float(v)) for v in np.interp(range(20), list(values), [float(v) for v in values.values()])]
    assert abs(float(steps.step[0]) - max(abs(float(b - a)) for a, b in pairwise(line))) < 1e-12
    total = 0
    for k in range(20):
        total += (steps.ups[0][k - 1] - steps.downs[0][k - 1]) if k else 0
        assert abs(steps.start[0] + steps.step[0] * (F(1, 2) + total) - line[k]) <= steps.step[0] / 2 + F(1, 10**12)
    assert not any(up and down for up, down in zip(steps.ups[0], steps.downs[0]))


def linear(own: float, mean: float):
    return lambda X: own * X + mean * X.mean(0, keepdims=True)


@pytest.mark.parametrize(("own", "mean"), [(1.0, 0.5), (-1.0, 2.0), (0.0, 1.0)])
def test_sampled_moduli_come_close_from_below(own: float, mean: float) -> None:
    """f = own x + mean · average, two tokens, d = 1: every modulus is known. A search finds 90 % of it and no more."""
    grid = Grid(1, 2, 4)
    found = moduli(linear(own, mean), grid)
    far = np.sqrt(2) / 4
    truth = {
        "sequence": max(abs(own), abs(own + mean)) * far,
        "token": abs(own + mean / 2) / 4,
        "context": abs(mean / 2) * far,
        "diameter": max(abs(own), abs(own + mean)) * np.sqrt(2),
    }
    assert found.kind == "sampled"
    for name, value in truth.items():
        assert 0.9 * value <= getattr(found, name) <= value * (1 + 1e-9) + 1e-15, name


@pytest.mark.parametrize("function", [wave, product, spread])
@pytest.mark.parametrize(("d", "tokens"), [(1, 1), (1, 2), (2, 2), (1, 3), (2, 3)])
def test_declared_constants_are_above_what_a_search_finds(function: object, d: int, tokens: int) -> None:
    grid = Grid(d, tokens, 4)
    declared, found = moduli(function, grid), moduli(lambda X: function(X), grid, seed=1)
    assert (declared.kind, found.kind) == ("declared", "sampled")
    for name in ("sequence", "token", "context", "diameter"):
        assert getattr(found, name) <= getattr(declared, name) * (1 + 1e-9), name
    # The constants bound derivatives, so they are near the truth over short distances only, and for several tokens.
    assert tokens == 1 or found.sequence >= 0.2 * declared.sequence
    assert tokens == 1 or found.context >= 0.2 * declared.context


def test_bound_adds_its_terms() -> None:
    """By hand: N = 3, d = 1, n = 4, constants 1, p = 2, ramps of 1/64 of the square of 4."""

    @lipschitz(1.0, 1.0, 1.0)
    def function(X: np.ndarray) -> np.ndarray:
        return X

    grid = Grid(1, 3, 4)
    bound = theorem_bound(moduli(function, grid), grid, edge=1 / 64)
    step, size = 0.25 + 0.25 * 3**0.5, 3**0.5
    outside = size * (3**0.5 + step)
    by_hand = [size * step, 0.25 * 3**0.5, (3 / 4) ** 0.5 * outside, (3 * 4 / 64) ** 0.5 * outside]
    assert list(bound.terms.values()) == pytest.approx(by_hand, rel=1e-12)
    assert bound.total == pytest.approx(sum(by_hand), rel=1e-12)


def test_equal_tokens_cost_nothing_up_to_two() -> None:
    grid = Grid(1, 2, 4)
    assert theorem_bound(moduli(product, grid), grid, edge=0.0).terms["tokens that share a cell"] == 0


def test_lipschitz_constants_must_be_numbers() -> None:
    with pytest.raises(SpecError, match="token Lipschitz constant must be finite and not negative, got -1"):
        Lipschitz(1.0, -1, 1.0)
