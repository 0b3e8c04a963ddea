"""Cells, token ids, contextual ids: which table entry each token of each sequence reads.

With n = 1/δ and B = n^d: a token in the cell with coordinates β has the id z = Σ_i β_i n^{d-i}. A sequence of distinct
ids, sorted z_(1) > .. > z_(N), has s = Σ_j z_(j) B^{N-j}; a token of it with id z reads entry

    k = 2 B^N z + 2 s - (last coordinate of z_(N))          of K = 2 B^{N+1} entries.

Only sorted sequences are reached, and only with ids z of their own; for N = 2 equal pairs (z, z) have an entry too (see
context.py). Everything between two reached entries is filled by a straight line: `corners`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from math import comb

import numpy as np
import torch
from numpy.typing import NDArray

from fixedformer.capacity import require_memory
from fixedformer.errors import CapacityError, SpecError

Array = NDArray[np.float64]
Function = Callable[[Array], object]  # (tokens, d) -> (tokens, d), anything np.asarray understands
Progress = Callable[[str, int, int], None]  # what is being done, done, of how many
BYTES_PER_ENTRY = 80
"""Of a table entry while it is encoded: a Python integer for its level, and pointers to that and to its two bits."""


@dataclass(frozen=True)
class Grid:
    """The sizes of one approximation: d entries a token, `tokens` tokens, `resolution` cells a coordinate."""

    d: int
    tokens: int
    resolution: int

    def __post_init__(self) -> None:
        for name, least in (("d", 1), ("tokens", 1), ("resolution", 2)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise SpecError(f"{name} must be an integer >= {least}, got {value!r}")
        if self.base < self.tokens:
            raise CapacityError(
                f"{self.tokens} tokens need as many distinct cells, resolution {self.resolution} in {self.d} "
                f"dimension(s) has {self.base}; take a resolution of at least {ceil_root(self.tokens, self.d)}"
            )

    @property
    def base(self) -> int:
        """B = n^d, the number of token ids."""
        return int(self.resolution**self.d)

    @property
    def size(self) -> int:
        """K = 2 B^{N+1}, the number of table entries."""
        return 2 * int(self.base ** (self.tokens + 1))

    @property
    def loops(self) -> int:
        """n + N + K."""
        return self.resolution + self.tokens + self.size

    @property
    def sequences(self) -> int:
        """How many sequences of cells have entries of their own, permutations counted once."""
        return comb(self.base, self.tokens) + (self.base if self.tokens == 2 else 0)

    def sorted_sequences(self) -> Iterator[tuple[int, ...]]:
        """Those sequences: ids in decreasing order."""
        yield from combinations(range(self.base - 1, -1, -1), self.tokens)
        if self.tokens == 2:
            yield from ((z, z) for z in range(self.base))

    def coordinates(self, z: int) -> tuple[int, ...]:
        """The d cell coordinates of token id z, most significant first."""
        return tuple(z // self.resolution ** (self.d - 1 - i) % self.resolution for i in range(self.d))

    def corner(self, z: int) -> tuple[Fraction, ...]:
        """The representative of cell z: its corner nearest to 0, exactly."""
        return tuple(Fraction(c, self.resolution) for c in self.coordinates(z))

    def points(self, ids: Sequence[int]) -> Array:
        """Representatives of a sequence of cells, (tokens, d), each coordinate rounded once."""
        return np.array([[c / self.resolution for c in self.coordinates(z)] for z in ids])

    def entries(self, ids: Sequence[int]) -> list[int]:
        """The table entry that each token of the sequence reads (ids in any order)."""
        in_order = sorted(ids, reverse=True)
        s = 0
        for z in in_order:
            s = s * self.base + z
        valid = 2 * s - self.coordinates(in_order[-1])[-1]
        return [2 * self.base**self.tokens * z + valid for z in ids]


@dataclass(frozen=True)
class Table:
    """The reached entries of a target, in order: `entries` (count,) int64 and `values` (count, d) float64."""

    entries: NDArray[np.int64]
    values: Array

    def filled(self, size: int) -> Array:
        """All entries 0 .. size-1, (size, d): straight lines between reached ones, constant beyond them."""
        where = np.arange(size)
        return np.stack([np.interp(where, self.entries, column) for column in self.values.T], axis=1)

    def corners(self) -> list[list[tuple[int, Fraction]]]:
        """Per dimension, the broken line through the reached entries, exactly."""
        ids = self.entries.tolist()
        return [[(k, Fraction(v)) for k, v in zip(ids, column)] for column in self.values.T.tolist()]


def call(function: Function, X: Array) -> Array:
    """function(X) as float64 (tokens, d). Raises SpecError when it fails, and for another shape, NaN or infinity."""
    try:
        returned = function(X.copy())
    except Exception as error:
        raise SpecError(f"the function failed at X = {X.tolist()}: {type(error).__name__}: {error}") from error
    if isinstance(returned, torch.Tensor):
        returned = returned.detach().cpu()
    try:
        Y = np.asarray(returned, dtype=np.float64)
    except (TypeError, ValueError):
        raise SpecError(
            f"the function must return an array {X.shape} of numbers, got {type(returned).__name__}"
        ) from None
    if Y.shape != X.shape:
        raise SpecError(f"the function must map an array {X.shape} to {X.shape}, it returned {Y.shape}")
    if not np.isfinite(Y).all():
        raise SpecError(f"the function is NaN or infinite at X = {X.tolist()}; it must be finite on all of [0, 1]")
    return Y


def require_equivariant(function: Function, grid: Grid, seed: int = 0, samples: int = 16) -> None:
    """Raise SpecError when permuting the tokens does not permute the outputs, at `samples` random inputs."""
    if grid.tokens == 1:
        return
    random = np.random.default_rng(seed)
    for _ in range(samples):
        X, order = random.random((grid.tokens, grid.d)), random.permutation(grid.tokens)
        straight, permuted = call(function, X)[order], call(function, X[order])
        gap = float(np.abs(straight - permuted).max())
        if gap > 1e-9 * max(1.0, float(np.abs(straight).max())):
            raise SpecError(
                "only permutation-equivariant functions compile: permuting the tokens must permute the outputs; "
                f"at X = {X.round(3).tolist()} with the order {order.tolist()} they differ by {gap:.3g}. Append the "
                "position to each token if the order matters"
            )


def tabulate(function: Function, grid: Grid, progress: Progress | None = None) -> Table:
    """The target at the representatives of every reached entry.

    Raises SpecError as `call` does, CapacityError when the table does not fit in memory.
    """
    require_memory(
        BYTES_PER_ENTRY * grid.size * grid.d,
        f"a table of {grid.size} entries",
        "take a lower resolution or fewer tokens",
    )
    found: dict[int, Array] = {}
    for done, ids in enumerate(grid.sorted_sequences()):
        if progress is not None and done % 1024 == 0:
            progress("tabulating", done, grid.sequences)
        Y = call(function, grid.points(ids))
        # An equal pair has one entry and, by equivariance, one value.
        found |= dict(zip(grid.entries(ids), Y))
    order = sorted(found)
    return Table(np.array(order, dtype=np.int64), np.array([found[k] for k in order]))


def ceil_root(value: int, degree: int) -> int:
    """The least r >= 2 with r^degree >= value."""
    r = 2
    while r**degree < value:
        r += 1
    return r
