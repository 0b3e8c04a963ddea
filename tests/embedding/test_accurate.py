"""Products to twenty digits, against exact fractions."""

from fractions import Fraction

import pytest
import torch

from fixedformer.embedding.accurate import Pair, matmul, two_sum


def exact(pair, i, j):
    return Fraction(float(pair.hi[i, j])) + Fraction(float(pair.lo[i, j]))


@pytest.mark.parametrize("inner", [1, 2, 3, 30, 257])
@pytest.mark.parametrize("spread", [0, 3, 20])
def test_matmul_against_fractions(inner, spread, generator):
    """Also with entries of one row 2^(20 * 4) apart, where slices below the largest entry carry little."""

    def wide(*shape):
        size = torch.exp2(spread * torch.randn(*shape, generator=generator, dtype=torch.float64))
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * size

    a, b = wide(3, inner), wide(inner, 4)
    left = Pair(*two_sum(a, a * 1e-17))
    got = matmul(left, b)
    bits = (53 - max(inner - 1, 1).bit_length()) // 2
    for i in range(3):
        for j in range(4):
            want = sum(exact(left, i, k) * Fraction(float(b[k, j])) for k in range(inner))
            limit = inner * Fraction(2) ** (5 - 4 * bits) * Fraction(float(a[i].abs().max() * b[:, j].abs().max()))
            # 2^-104 of the result itself is what a pair can hold
            assert abs(exact(got, i, j) - want) <= limit + abs(want) * Fraction(2) ** -104


def test_it_sees_what_float64_cannot():
    """1 + 1e-20 - 1 is 1e-20."""
    a = torch.tensor([[1.0, 1e-10, -1.0]], dtype=torch.float64)
    b = torch.tensor([[1.0], [1e-10], [1.0]], dtype=torch.float64)
    assert float(a @ b) == 0.0
    got = matmul(Pair.of(a), b)
    assert float(got.hi) == pytest.approx(1e-20, rel=1e-9)


def test_minus_cancels_to_the_last_part():
    x = Pair(*two_sum(torch.tensor([1.0], dtype=torch.float64), torch.tensor([2.0**-60], dtype=torch.float64)))
    assert float(x.minus(Pair.of(torch.ones(1)))) == 2.0**-60
    zeros = matmul(Pair.of(torch.zeros(2, 3)), torch.zeros(3, 2, dtype=torch.float64))
    assert not zeros.hi.any()
    assert not zeros.lo.any()
