"""Fixed linear maps on rows: a matrix, or a 0/1 matrix stored as the list of its ones."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fixedformer.embedding import accurate
from fixedformer.embedding.accurate import Pair


@dataclass(frozen=True, eq=False)
class IndexMap:
    """A {0,1} matrix (rows x columns) with ones at (source[i], target[i]).

    No row holds two ones (each coordinate goes to at most one place); a column may, and then it sums.
    """

    source: Tensor  # int64 (ones,)
    target: Tensor  # int64 (ones,)
    rows: int
    columns: int

    def apply(self, x: Tensor) -> Tensor:
        """x @ matrix for x (..., rows)."""
        out = x.new_zeros(*x.shape[:-1], self.columns)
        return out.index_add_(-1, self.target, x.index_select(-1, self.source))

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The matrix itself, (rows, columns)."""
        matrix = torch.zeros(self.rows, self.columns, dtype=dtype, device=self.source.device)
        matrix[self.source, self.target] = 1
        return matrix

    def to(self, device: torch.device | str) -> "IndexMap":
        return IndexMap(self.source.to(device), self.target.to(device), self.rows, self.columns)


Map = Tensor | IndexMap
Chain = tuple[Map, ...]  # applied left to right: x @ chain[0] @ chain[1] ...


def dense(chain: Chain, dtype: torch.dtype = torch.float64) -> Tensor:
    """The matrix that a chain multiplies by."""
    first, *rest = (factor.dense(dtype) if isinstance(factor, IndexMap) else factor.to(dtype) for factor in chain)
    for factor in rest:
        first = first @ factor
    return first


def apply_plainly(chain: Chain, x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """x times every factor of the chain, in x's own precision; x is one tensor (..., rows) in a tuple."""
    (out,) = x
    for factor in chain:
        out = factor.apply(out) if isinstance(factor, IndexMap) else out @ factor.to(out.dtype)
    return (out,)


def apply_accurately(chain: Chain, x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The same with twenty digits; x is the two parts of a `Pair`."""
    hi, lo = x
    for factor in chain:
        if isinstance(factor, IndexMap):
            # At most one summand of each column is not zero on a compiled program's paths (the masks see to that), so
            # adding the parts separately is exact.
            hi, lo = factor.apply(hi), factor.apply(lo)
        else:
            hi, lo = accurate.matmul(Pair(hi, lo), factor.to(torch.float64))
    return hi, lo
