"""Matrix products with twice the digits of float64, from ordinary float64 products.

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

LEFT_SLICES, RIGHT_SLICES = 5, 3


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

    The error of an entry is below inner * 2^(2 - 5 bits) (largest |a| in its row) (largest |b| in its column), with
    bits = (53 - log2 inner) / 2: about 1e-26 relative to those for inner = 2,000, where float64 itself has 1e-16.
    """
    inner = b.shape[0]
    bits = (53 - math.ceil(math.log2(max(inner, 2)))) // 2
    left = _slices(a, bits, dim=-1, count=LEFT_SLICES)
    right = _slices(Pair.of(b), bits, dim=-2, count=RIGHT_SLICES)
    terms = sorted((i + j, i, j) for i in range(len(left)) for j in range(len(right)) if i + j < LEFT_SLICES)
    hi = torch.zeros(*a.hi.shape[:-1], b.shape[-1], dtype=torch.float64, device=b.device)
    lo = torch.zeros_like(hi)
    for _, i, j in terms:
        hi, error = two_sum(hi, left[i] @ right[j])  # the product itself is exact
        lo = lo + error
    return Pair(*two_sum(hi, lo))


def _slices(x: Pair, bits: int, dim: int, count: int) -> list[Tensor]:
    """Cut x into `count` float64 tensors of `bits` bits each, below the largest entry along `dim`; sum ~ x.

    Adding and subtracting 1.5 * 2^(52 - bits) * (a power of two above the largest entry) rounds to the slice's grid.
    """
    hi, lo = x
    largest = hi.abs().amax(dim, keepdim=True)
    _, exponent = torch.frexp(largest)
    parts = []
    for index in range(count):
        # Grid 2^(exponent - bits (index + 1) + 1): each slice holds at most `bits` bits, sign included.
        shift = torch.ldexp(torch.full_like(largest, 1.5), exponent - bits * (index + 1) + 1 + 52)
        part = (hi + shift) - shift
        hi, lo = two_sum(hi - part, lo)  # hi - part is exact: part is hi rounded to a coarser grid
        parts.append(part)
    return parts
