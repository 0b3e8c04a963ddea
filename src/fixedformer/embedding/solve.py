"""Solve E R_all = W_all for a machine of ordinary matrices: shortest E, refined until only its own rounding is left."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fixedformer.embedding.accurate import Pair
from fixedformer.embedding.maps import dense
from fixedformer.embedding.readouts import Stack, readouts, relative_residual
from fixedformer.embedding.tree import PathTree
from fixedformer.errors import CapacityError

# A column-scaled matrix of float64 entries with a condition number beyond this cannot be told from a singular one.
SINGULAR = 1e14
ROUNDS = 4


@dataclass(frozen=True, eq=False)
class Solution:
    """embedding E; condition: of the system; residual: the largest |E R_all - W_all| / (|E| |R_all|)."""

    embedding: Tensor
    condition: float
    residual: float


@dataclass(frozen=True, eq=False)
class Factorisation:
    """R_all D = Q T, D scaling columns to unit length, T upper triangular; condition: of R_all D, in the 2-norm."""

    all_columns: Tensor  # (width, N)
    scale: Tensor  # (N,), the diagonal of D
    basis: Tensor  # Q (width, N), orthonormal columns
    triangle: Tensor  # T (N, N)
    condition: float

    def shortest(self, right: Tensor) -> Tensor:
        """The E of least norm with E R_all = right (rows, N): right D T^-1 Q^T."""
        inner: Tensor = torch.linalg.solve_triangular(self.triangle, right * self.scale, upper=True, left=False)
        return inner @ self.basis.mT


def all_columns(stack: Stack, tree: PathTree) -> Tensor:
    """R_all (width, N) in float64, from the last layer back:

    C <- U;  for l = L..1:  C <- [ R_Q^{l,1..H} | R_K^{l,1..H} | (C if residual) | R_V^{l,h} C for each h ].
    """
    columns = dense(stack.exit())
    for layer in reversed(range(tree.layers)):
        parts = [dense(stack.reader(layer))]
        parts += [columns] if tree.residual else []
        parts += [dense(stack.mover(layer, head)) @ columns for head in range(tree.heads)]
        columns = torch.cat(parts, dim=1)
    return columns


def factorise(stack: Stack, tree: PathTree) -> Factorisation:
    """QR of the column-scaled R_all. Raises CapacityError for a machine whose columns are linearly dependent."""
    columns = all_columns(stack, tree)
    norms = columns.norm(dim=0)
    if (norms == 0).any():
        dead = int((norms == 0).sum())
        raise CapacityError(f"the machine's weights are rank-deficient: {dead} of the {tree.count} columns of R_all "
                            "are zero; draw again with another seed")  # fmt: skip
    scale = 1 / norms
    basis, triangle = torch.linalg.qr(columns * scale)
    condition = condition_number(triangle)
    if not condition < SINGULAR:
        rank = int(torch.linalg.matrix_rank(triangle))
        raise CapacityError(
            f"the machine's weights are rank-deficient: R_all has {tree.count} columns and numerical rank {rank} "
            f"(condition number {condition:.1e}); draw again with another seed or a larger width"
        )
    return Factorisation(columns, scale, basis, triangle, condition)


def condition_number(triangle: Tensor, block: int = 8, rounds: int = 12) -> float:
    """2-norm condition number of an upper triangular matrix, by block power iteration on T^T T and its inverse.

    Accurate to a few per cent from below: the largest singular value is approached from below, the smallest from above.
    """
    generator = torch.Generator(device="cpu").manual_seed(0)
    size = triangle.shape[0]
    start = torch.randn(size, min(block, size), generator=generator, dtype=triangle.dtype).to(triangle.device)
    large, small = start, start
    for _ in range(rounds):
        large = torch.linalg.qr(triangle.mT @ (triangle @ large)).Q
        lower = torch.linalg.solve_triangular(triangle.mT, small, upper=False)
        small = torch.linalg.qr(torch.linalg.solve_triangular(triangle, lower, upper=True)).Q
        if not torch.isfinite(small).all():
            return float("inf")
    return float(torch.linalg.svdvals(triangle @ large)[0] / torch.linalg.svdvals(triangle @ small)[-1])


def solve(stack: Stack, found: Factorisation, wanted: Pair, tree: PathTree, dtype: torch.dtype) -> Solution:
    """The shortest E in `dtype`, improved with residuals of twenty digits until only rounding E is left."""
    exact = found.shortest(wanted.hi)
    for _ in range(ROUNDS):
        embedding = exact.to(dtype)
        missing = wanted.minus(Pair(*readouts(stack, embedding.to(torch.float64), tree)))
        residual = relative_residual(missing, embedding.to(torch.float64).abs() @ found.all_columns.abs())
        if residual <= torch.finfo(dtype).eps / 2 or dtype != torch.float64:
            break  # in float32 the float64 solution has been rounded once already: nothing to improve
        exact = exact + found.shortest(missing)
    return Solution(embedding, found.condition, residual)
