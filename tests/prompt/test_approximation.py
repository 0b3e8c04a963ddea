"""MaxMin networks: exact on the grid, within the bound everywhere, of the promised order, and the bound is reached."""

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from fixedformer.errors import CapacityError, SpecError
from fixedformer.prompt.approximation import LipschitzNetwork

FUNCTIONS = {
    "abs": (1, 1.0, 1.0, lambda x: abs(x[0] - 0.37)),
    "sine": (1, 3.0, 1.0, lambda x: math.sin(3 * x[0])),
    "root": (1, 1.0, 0.5, lambda x: math.sqrt(abs(x[0] - 1 / 3))),
    "two": (2, 2.0, 1.0, lambda x: abs(x[0] - x[1]) * 0.5 + math.sin(x[0] + 0.5 * x[1])),
    "two, root": (2, 1.5, 0.5, lambda x: math.sqrt(abs(x[0] - 0.5 * x[1]))),
}


def errors(function: Callable, network: LipschitzNetwork) -> torch.Tensor:
    fine = torch.linspace(0, 1, 401 if network.d == 1 else 61, dtype=torch.float64)
    X = torch.cartesian_prod(*[fine] * network.d).reshape(-1, network.d)
    return (network(X) - torch.tensor([function(x) for x in X.tolist()], dtype=torch.float64)).abs()


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("points", [2, 3, 6])
def test_within_the_bound_and_exact_on_the_grid(name: str, points: int) -> None:
    d, constant, exponent, function = FUNCTIONS[name]
    network = LipschitzNetwork(function, d, points, constant, exponent)
    assert float(errors(function, network).max()) <= network.error_bound
    on_grid = network(torch.tensor(network.grid, dtype=torch.float64))
    assert (on_grid - torch.tensor(network.values, dtype=torch.float64)).abs().max() <= 1e-14


@pytest.mark.parametrize("points", [3, 9])
def test_the_lipschitz_bound_is_reached(points: int) -> None:
    """f falls from each grid point to the middle as fast as it may, the extension rises: the error is the bound."""

    def valleys(x: list[float]) -> float:
        return -min(x[0] * (points - 1) % 1, -x[0] * (points - 1) % 1) / (points - 1)

    network = LipschitzNetwork(valleys, 1, points, 1.0)
    middle = network.spacing / 2
    error = float(network(torch.tensor([[middle]], dtype=torch.float64)) - valleys([middle]))
    assert network.error_bound * 0.999 <= error <= network.error_bound * 1.001


@pytest.mark.parametrize(("name", "order"), [("sine", 1.0), ("root", 0.5), ("two", 1.0)])
def test_order_of_the_error(name: str, order: float) -> None:
    """Log-log slope of the largest error against the spacing, at least the promised exponent (less 0.1)."""
    d, constant, exponent, function = FUNCTIONS[name]
    sizes = (9, 17, 33, 65) if d == 1 else (3, 5, 9)
    networks = [LipschitzNetwork(function, d, points, constant, exponent) for points in sizes]
    worst = [float(errors(function, network).max()) for network in networks]
    slope = math.log(worst[0] / worst[-1]) / math.log(networks[0].spacing / networks[-1].spacing)
    assert slope >= order - 0.1
    assert all(network.width < other.width for network, other in pairwise(networks))


@pytest.mark.parametrize(("d", "points", "depth"), [(1, 2, 3), (1, 9, 6), (2, 4, 7), (3, 3, 9)])
def test_depth_is_logarithmic(d: int, points: int, depth: int) -> None:
    network = LipschitzNetwork(lambda _: 0.0, d, points, 1.0).network
    assert network.depth == depth == 2 + math.ceil(math.log2(d)) + math.ceil(math.log2(points**d))
    assert sum(network.head_counts) == 0


def test_refusals() -> None:
    with pytest.raises(SpecError, match=r"neighbours on the grid differ by 1, constant \* h\^exponent = 0.5"):
        LipschitzNetwork(lambda x: 2 * x[0], 1, 3, 1.0)
    with pytest.raises(SpecError, match="NaN"):
        LipschitzNetwork(lambda _: float("nan"), 1, 3, 1.0)
    with pytest.raises(SpecError, match="points must be a whole number of at least 2"):
        LipschitzNetwork(lambda _: 0.0, 1, 1, 1.0)
    with pytest.raises(SpecError, match=r"exponent in \(0, 1\]"):
        LipschitzNetwork(lambda _: 0.0, 1, 3, 1.0, 1.5)
    with pytest.raises(CapacityError, match="bytes"):
        LipschitzNetwork(lambda _: 0.0, 4, 100, 1.0)
    network = LipschitzNetwork(lambda x: x[0], 1, 3, 1.0)
    with pytest.raises(SpecError, match=r"must lie in \[0, 1\]\^1, got coordinates from 0 to 1.5"):
        network(torch.tensor([[0.0], [1.5]]))
    with pytest.raises(SpecError, match=r"needed points \(..., 1\)"):
        network(torch.tensor([[0.0, 1.0]]))
