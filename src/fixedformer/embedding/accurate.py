"""Matrix products to some twenty digits, from ordinary float64 products.

A certificate about rounding errors must not itself drown in rounding errors. Here a number is an unevaluated sum
hi + lo of two float64, and products are made exact by slicing: each row of A (column of B) is cut into slices of `bits`
bits below its largest entry, so that a product of two slices, summed over the inner dimension, fits into 53 bits and
float64 hardware makes no error at all (the scheme of Ozaki, Ogita, Oishi, Rump 2012). Only the sums of slice products
round, and they are carried in pairs.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

SLICES = 4


class Pair(NamedTuple):
    """The number hi + lo, elementwise; |lo| is at most half a unit in the last place of hi."""

    hi: Tensor
    lo: Tensor

    @staticmethod
    def of(x: Tensor) -> "Pair":
        """x exactly."""
        x = x.to(torch.float64)
        return Pair(x, torch.zeros_like(x))

    def minus(self, other: "Pair") -> Tensor:
        """self - other, correctly rounded but for the last few bits of the pair, as float64."""
        total, error = two_sum(self.hi, -other.hi)
        return total + (error + (self.lo - other.lo))


def two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """a + b = sum + error exactly, for any float64 a, b (Knuth)."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def matmul(a: Pair, b: Tensor) -> Pair:
    """a @ b for a (..., rows, inner) and exact float64 b (inner, columns).

    The error of an entry is at most inner * 2^(5 - 4 bits) (largest |a| in its row) (largest |b| in its column), with
    bits = (53 - log2 inner) / 2 rounded down: 3e-21 relative to those for inner = 2,000, where float64 has 1e-16.
    (Dropped: pairs of slices i + j >= 4, and what lies below the fourth slice of either; each at most 2^(2 - 4 bits).)
    """
    inner = b.shape[0]
    bits = (53 - math.ceil(math.log2(max(inner, 2)))) // 2
    left = torch.stack(_slices(a, bits, dim=-1, count=SLICES))  # (slices, ..., rows, inner)
    hi = torch.zeros(*a.hi.shape[:-1], b.shape[-1], dtype=torch.float64, device=b.device)
    lo = torch.zeros_like(hi)
    for j, right in enumerate(_slices(Pair.of(b), bits, dim=-2, count=SLICES)):
        for product in left[: SLICES - j] @ right:  # each exact; the slices left out lie below the error bound
            hi, error = two_sum(hi, product)
            lo += error
    return Pair(*two_sum(hi, lo))


def _slices(x: Pair, bits: int, dim: int, count: int) -> list[Tensor]:
    """Cut x into `count` float64 tensors of `bits` bits each, below the largest entry along `dim`; sum ~ x.

    Adding and subtracting 1.5 * 2^(52 - bits) * (a power of two above the largest entry) rounds to the slice's grid.
    """
    rest, lo = x
    _, exponent = torch.frexp(rest.abs().amax(dim, keepdim=True))
    single = not bool(lo.any())
    parts = []
    for index in range(count):
        # Grid 2^(exponent - bits (index + 1) + 1): each slice holds at most `bits` bits, sign included.
        shift = torch.ldexp(torch.full_like(exponent, 1.5, dtype=torch.float64), exponent - bits * (index + 1) + 53)
        part = rest + shift
        part -= shift
        rest = rest - part  # exact: part is `rest` rounded to a coarser grid
        if not single:
            rest, lo = two_sum(rest, lo)
        parts.append(part)
    return parts
