"""Match2 and k-PARITY: no error on all small inputs and on 10,000 random ones, against plain Python."""

from itertools import combinations, product

import pytest
import torch
from torch import Tensor

from fixedformer.errors import CapacityError, SpecError
from fixedformer.prompt.tasks import KParity, Match2, Match2Simulated


def solve_match2(rows: list[list[int]], modulus: int) -> list[list[bool]]:
    return [[any((x + y) % modulus == 0 for y in row) for x in row] for row in rows]


def random_integers(high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("modulus", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_match2_on_all_small_inputs(modulus: int, n: int) -> None:
    rows = torch.tensor(list(product(range(modulus), repeat=n)))
    truth = solve_match2(rows.tolist(), modulus)
    assert Match2(modulus)(rows).tolist() == truth
    assert Match2Simulated(modulus, n)(rows).tolist() == truth


@pytest.mark.parametrize(("modulus", "n"), [(7, 10), (100, 32), (97, 20)])
def test_match2_on_10000_random_inputs(modulus: int, n: int) -> None:
    rows = random_integers(modulus, 10_000, n)
    assert Match2(modulus)(rows).tolist() == solve_match2(rows.tolist(), modulus)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["hard", "stock", "soft"])
def test_simulated_match2_on_10000_random_inputs(backend: str) -> None:
    rows = random_integers(23, 10_000, 12)
    task = Match2Simulated(23, 12, backend)
    truth = torch.tensor(solve_match2(rows.tolist(), 23))
    scores = task.scores(rows)
    assert torch.equal(scores > 0, truth)
    assert float(scores[truth].min()) >= (8 * 12 - 1) / (8 * 12 + 1) - 1e-9
    assert float(scores[~truth].max()) <= -7 / 9 + 1e-9


@pytest.mark.parametrize("backend", ["hard", "soft"])
def test_simulated_match2_margins(backend: str) -> None:
    """The proven margins hold; the one without a match is nearly reached (n misses at distance 1)."""
    task = Match2Simulated(100, 8, backend)
    tight = torch.tensor([[1] * 8, [99] + [2] * 7])  # 1 + 1 = 2; 99 + 2 = 101: all miss by 1 or 2
    scores = task.scores(torch.cat([random_integers(100, 200, 8), tight]))
    rows = torch.cat([random_integers(100, 200, 8), tight])
    truth = torch.tensor(solve_match2(rows.tolist(), 100))
    assert float(scores[truth].min()) >= 63 / 65 - 1e-9
    assert float(scores[~truth].max()) <= -7 / 9 + 1e-9
    assert float(scores[~truth].max()) > -0.9


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_parity_on_all_small_inputs(n: int) -> None:
    bits = torch.tensor(list(product(range(2), repeat=n)))
    for k in range(1, n + 1):
        task = KParity(k)
        for places in combinations(range(n), k):
            assert task(bits, places).tolist() == [sum(row[p] for p in places) % 2 == 1 for row in bits.tolist()]


@pytest.mark.parametrize(("n", "k"), [(20, 3), (50, 20), (100, 31)])
def test_parity_on_10000_random_inputs(n: int, k: int) -> None:
    bits = random_integers(2, 10_000, n)
    places = torch.randperm(n, generator=torch.Generator().manual_seed(1))[:k].tolist()
    truth = [sum(row[p] for p in places) % 2 == 1 for row in bits.tolist()]
    assert KParity(k)(bits, places).tolist() == truth


def test_costs() -> None:
    assert Match2(5).network.head_counts == (0, 0, 1)
    assert KParity(7).network.head_counts == (1,)
    assert Match2(5).network.fingerprint() == Match2(5).network.fingerprint() != Match2(6).network.fingerprint()


def test_refusals() -> None:
    with pytest.raises(SpecError, match=r"unknown token: needed whole numbers in 0\.\.4, got 0\.\.5"):
        Match2(5)([0, 5])
    with pytest.raises(SpecError, match="sequence is empty"):
        Match2(5)(torch.zeros(3, 0, dtype=torch.long))
    with pytest.raises(SpecError, match="needed whole numbers"):
        Match2(5)([0.5])
    with pytest.raises(SpecError, match="modulus must be"):
        Match2(1)
    with pytest.raises(CapacityError, match="4 modulus"):
        Match2(10**8)
    with pytest.raises(CapacityError, match="use backend='soft'"):
        Match2Simulated(10_000, 4)
    with pytest.raises(SpecError, match="takes 3 numbers, got 2"):
        Match2Simulated(5, 3)([1, 2])
    with pytest.raises(SpecError, match="needed 2 different places"):
        KParity(2)([0, 1, 1], [1, 1])
    with pytest.raises(SpecError, match="unknown token"):
        KParity(2)([0, 1, 1], [1, 3])
