"""Matrices as sequences: one token an entry, row-major, one section a matrix, and channels that say where a token is.

Position channels hold integers: "one", "id" (which section), "row", "col" and their squares. A *fetch* head asks for
the token at a target place t: score 2 t·k - |k|^2 = |t|^2 - |t - k|^2 for a key at place k. So the maximum is the token
at t alone, and every other score is at least 1 less: places are distinct integer vectors (docs/theory/prompt.md,
Lemma 1).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fixedformer.errors import CapacityError
from fixedformer.prompt.builder import Form, NetworkBuilder, combine

COORDINATES = ("id", "row", "col")
SQUARES = {name: f"{name}^2" for name in COORDINATES}
POSITIONS = ("one", *COORDINATES, *SQUARES.values())
Place = tuple[float | Form, float | Form, float | Form]


@dataclass(frozen=True)
class Layout:
    """Sections (rows, columns) in order; section number = position in the tuple = channel "id"."""

    sections: tuple[tuple[int, int], ...]

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First token of each section, and the total length at the end."""
        starts = [0]
        for rows, columns in self.sections:
            starts.append(starts[-1] + rows * columns)
        return tuple(starts)

    @property
    def tokens(self) -> int:
        return self.starts[-1]

    def coordinates(self) -> Tensor:
        """Integers (tokens, 3): id, row, col."""
        parts = []
        for number, (rows, columns) in enumerate(self.sections):
            row, col = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
            parts.append(torch.stack([torch.full_like(row, number), row, col], dim=-1).reshape(-1, 3))
        return torch.cat(parts)

    def positions(self, dtype: torch.dtype) -> Tensor:
        """The channels POSITIONS (tokens, 7). CapacityError where a square would not be an exact integer of `dtype`."""
        places = self.coordinates()
        require_exact(2 * int(places.square().sum(-1).max()), dtype, "the longest squared position")
        places = places.to(dtype)
        return torch.cat([places.new_ones(len(places), 1), places, places.square()], dim=1)

    def encode(self, matrices: Sequence[Tensor]) -> Tensor:
        """Matrices (..., rows, columns), one a section, as a sequence (..., tokens)."""
        batch: torch.Size = torch.broadcast_shapes(*[matrix.shape[:-2] for matrix in matrices])
        return torch.cat([matrix.expand(*batch, *matrix.shape[-2:]).flatten(-2) for matrix in matrices], dim=-1)

    def decode(self, sequence: Tensor, section: int) -> Tensor:
        """Section `section` of a sequence (..., tokens) as a matrix (..., rows, columns)."""
        part = sequence[..., self.starts[section] : self.starts[section + 1]]
        return part.reshape(*part.shape[:-1], *self.sections[section])


def require_exact(largest: int, dtype: torch.dtype, what: str) -> None:
    """Refuse integers that `dtype` does not hold exactly: 2^53 for float64, 2^24 for float32, 2^8 for bfloat16."""
    limit = round(2 / torch.finfo(dtype).eps)
    if largest > limit:
        raise CapacityError(f"{what} is {largest}, {dtype} holds whole numbers only up to {limit} exactly; use a wider "
                            "dtype or a smaller size")  # fmt: skip


def matching(targets: Mapping[str, float | Form]) -> tuple[list[Form], list[Form]]:
    """Queries and keys whose score is |t|^2 - |t - k|^2 over the named coordinates (less the query's own |t|^2).

    targets: coordinate -> a number, or a form that the query token evaluates on its own channels.
    """
    query: list[Form] = []
    for target in targets.values():
        form: Form = {"one": float(target)} if isinstance(target, int | float) else target
        query.append(combine((2.0, form)))
    key: list[Form] = list(targets)
    return [*query, {"one": -1.0}], [*key, {SQUARES[name]: 1.0 for name in targets}]


def fetch(builder: NetworkBuilder, place: Place, value: Form | Sequence[Form], into: str | Sequence[str]) -> None:
    """A head by which each token reads `value` from the token at `place` = (id, row, col) into channel `into`."""
    builder.head(*matching(dict(zip(COORDINATES, place))), value, into)
