"""Each brick alone against plain torch; what can be bit-equal is."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fixedformer.errors import SpecError
from fixedformer.prompt import bricks

from .conftest import gaussian, relative

side = st.integers(1, 9)


def integers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(-1000, 1001, shape, generator=torch.Generator().manual_seed(seed)).double()


@settings(max_examples=40, deadline=None)
@given(side, side, st.integers(0, 1000))
def test_transpose_is_bit_exact(rows: int, columns: int, seed: int) -> None:
    A = gaussian(3, rows, columns, seed=seed) * 1e100
    brick = bricks.transpose(rows, columns)
    assert torch.equal(brick(A), A.mT)
    assert brick.network.head_counts == (1,)


@settings(max_examples=40, deadline=None)
@given(side, side, side, st.integers(0, 1000))
def test_integer_products_are_bit_exact(rows: int, inner: int, columns: int, seed: int) -> None:
    A, B = integers(rows, inner, seed=seed), integers(2, inner, columns, seed=seed + 1)
    brick = bricks.matrix_product(rows, inner, columns)
    assert torch.equal(brick(A, B), A @ B)
    assert brick.network.head_counts == (2 * inner,)


def test_real_products_are_accurate_to_rounding() -> None:
    A, B = gaussian(7, 9), gaussian(9, 5, seed=1)
    error = (bricks.matrix_product(7, 9, 5)(A, B) - A @ B).abs()
    assert bool((error <= 2 * 9 * torch.finfo(torch.float64).eps * (A.abs() @ B.abs())).all())


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 5), (8, 8), (5, 1)])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_row_softmax(rows: int, columns: int, scale: float) -> None:
    S = gaussian(4, rows, columns) * scale
    P = bricks.row_softmax(rows, columns)(S)
    assert relative(P, torch.softmax(S, -1)) <= 1e-14
    assert bricks.row_softmax(rows, columns).network.head_counts == (1, 0, 1)


def test_row_softmax_guard() -> None:
    with pytest.raises(SpecError, match=r"below 524288 in absolute value .* scale them down"):
        bricks.row_softmax(1, 2)(torch.tensor([[0.0, 2.0**19]], dtype=torch.float64))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 1000))
def test_max_min(rows: int, pairs: int, seed: int) -> None:
    X = integers(rows, 2 * pairs, seed=seed)
    truth = X.reshape(rows, pairs, 2).sort(-1, descending=True).values.reshape(rows, 2 * pairs)
    assert torch.equal(bricks.max_min(rows, pairs)(X), truth)


def test_activations() -> None:
    X = gaussian(3, 5, 4)
    assert torch.equal(bricks.relu(5, 4)(X), X.relu())
    for slope in (0.01, 0.5, -1.0):
        assert torch.equal(bricks.leaky_relu(5, 4, slope)(X), X.relu() - slope * (-X).relu())


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_identify_and_shift(heads: int) -> None:
    blocks = gaussian(heads, 3, 2)
    stacked = blocks.reshape(heads * 3, 2)
    for head in range(heads):
        truth = torch.zeros_like(blocks)
        truth[head] = blocks[head]
        assert torch.equal(bricks.identify(heads, 3, 2, head)(stacked), truth.reshape(-1, 2))
    for by in range(1 - heads, heads):
        truth = torch.zeros_like(blocks)
        for head in range(heads):
            if 0 <= head + by < heads:
                truth[head + by] = blocks[head]
        assert torch.equal(bricks.shift(heads, 3, 2, by)(stacked), truth.reshape(-1, 2))


@pytest.mark.parametrize(("knots", "low", "high"), [(16, 5e-2, 8e-2), (64, 3e-3, 5e-3), (256, 2e-4, 3e-4)])
def test_products_by_relu_alone_are_approximate(knots: int, low: float, high: float) -> None:
    """Two-sided: the error falls as 1 / knots^2, and it is there."""
    grid = torch.linspace(-4, 4, 101, dtype=torch.float64)
    pairs = torch.cartesian_prod(grid, grid)[:, None, :]
    error = (bricks.relu_product(knots)(pairs)[:, 0, 0] - pairs[:, 0].prod(-1)).abs().max()
    assert low < float(error) < high


def test_weights_do_not_depend_on_the_matrices() -> None:
    brick = bricks.matrix_product(2, 2, 2)
    before = brick.fingerprint()
    brick(integers(2, 2), integers(2, 2, seed=5))
    assert brick.fingerprint() == before == bricks.matrix_product(2, 2, 2).fingerprint()


def test_refusals() -> None:
    A = gaussian(2, 3)
    with pytest.raises(SpecError, match=r"takes float64 matrices \(3, 2\), got \(2, 3\)"):
        bricks.transpose(3, 2)(A)
    with pytest.raises(SpecError, match=r"takes float64 matrices .* in torch.float32"):
        bricks.transpose(2, 3)(A.float())
    with pytest.raises(SpecError, match="takes 2 matrices, got 1"):
        bricks.matrix_product(2, 3, 1)(A)
    with pytest.raises(SpecError, match="NaN"):
        bricks.relu(2, 3)(A * float("nan"))
    with pytest.raises(SpecError, match=r"whole number in 0\.\.1, got 2"):
        bricks.identify(2, 1, 1, 2)
    with pytest.raises(SpecError, match="between -1 and 1, got 2"):
        bricks.shift(2, 1, 1, 2)
    with pytest.raises(SpecError, match="at least 2 knots"):
        bricks.relu_product(1)
