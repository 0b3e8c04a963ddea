"""The bricks of the simulator, each a fixed network of its own: transpose, product, softmax, MaxMin, ReLU, head moves.

A brick reads matrices as one token an entry and is called like a function:

    product = matrix_product(2, 3, 4)
    product(A, B)                     # A B, with A (..., 2, 3) and B (..., 3, 4)

Names after the paper's lemmas (transpose: 3, softmax: 4, product: 5, MaxMin and activations: 7; identify and shift: in
its Theorem 9). Only a summary of the paper is public: the constructions here are this package's own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from fixedformer.errors import SpecError
from fixedformer.inputs import finite
from fixedformer.prompt.builder import NetworkBuilder
from fixedformer.prompt.construction import GRID, softmax_rows
from fixedformer.prompt.engine import Engine
from fixedformer.prompt.layout import POSITIONS, Layout, fetch
from fixedformer.prompt.network import Network
from fixedformer.prompt.sizes import GUARD


@dataclass(frozen=True, eq=False)
class Brick:
    """A fixed network with its encoding: the first `given` sections hold the arguments, the rest start at 0.

    extra: position channels beyond POSITIONS (name -> values (tokens,)), functions of the sizes. result: (section,
    rows, columns) of the answer, read from channel `out`.
    """

    name: str
    network: Network
    layout: Layout
    given: int
    result: tuple[int, int, int]
    extra: dict[str, Tensor]
    score_limit: float = float("inf")
    out: str = "out"

    @cached_property
    def _engine(self) -> Engine:
        positions = self.layout.positions(torch.float64)
        return Engine(self.network, torch.cat([positions, *[column[:, None] for column in self.extra.values()]], dim=1))

    def fingerprint(self) -> str:
        """SHA-256 over the fixed weights."""
        return self.network.fingerprint()

    def __call__(self, *matrices: Tensor) -> Tensor:
        """Apply the brick to float64 matrices (..., rows, columns); batch axes broadcast. SpecError for others."""
        shapes = self.layout.sections[: self.given]
        if len(matrices) != self.given:
            raise SpecError(f"{self.name} takes {self.given} matrices, got {len(matrices)}")
        for matrix, shape in zip(matrices, shapes):
            if matrix.shape[-2:] != shape or matrix.dtype != torch.float64:
                raise SpecError(f"{self.name} takes float64 matrices {', '.join(map(str, shapes))}, got "
                                f"{tuple(matrix.shape)} in {matrix.dtype}")  # fmt: skip
            if not float(finite(matrix, f"an argument of {self.name}").abs().max()) < self.score_limit:
                raise SpecError(f"{self.name} needs entries below {self.score_limit:g} in absolute value (the guard "
                                f"against overflow), got {float(matrix.abs().max()):g}; scale them down")  # fmt: skip
        rest = [torch.zeros(shape, dtype=torch.float64) for shape in self.layout.sections[self.given :]]
        sequence = self.layout.encode([*matrices, *rest])
        out = self._engine.read(sequence.reshape(-1, self.layout.tokens, 1), [self.out])[..., 0]
        section, rows, columns = self.result
        start = self.layout.starts[section]
        return out[:, start : start + rows * columns].reshape(*sequence.shape[:-1], rows, columns)


def _brick(
    name: str,
    builder: NetworkBuilder,
    sections: Sequence[tuple[int, int]],
    given: int,
    result: tuple[int, int, int],
    extra: dict[str, Tensor] | None = None,
    score_limit: float = float("inf"),
    out: str = "out",
) -> Brick:
    return Brick(name, builder.build(), Layout(tuple(sections)), given, result, extra or {}, score_limit, out)


def transpose(rows: int, columns: int) -> Brick:
    """A (rows, columns) -> A^T, bit-exact. One block, one head: slot s of A^T asks for (s mod rows, s div rows)."""
    slots = torch.arange(rows * columns)
    extra = {"from_row": (slots % rows).double(), "from_col": (slots // rows).double()}
    builder = NetworkBuilder((*POSITIONS, *extra), ("s",))
    builder.block()
    fetch(builder, (0, "from_row", "from_col"), "s", "out")
    return _brick("transpose", builder, [(rows, columns)], 1, (0, columns, rows), extra)


def matrix_product(rows: int, inner: int, columns: int) -> Brick:
    """A (rows, inner), B (inner, columns) -> A B. One block, 2 inner heads; exact where float64 arithmetic is."""
    builder = NetworkBuilder(POSITIONS, ("s",))
    builder.block()
    for k in range(inner):
        fetch(builder, (0, "row", k), "s", f"A.{k}")
        fetch(builder, (1, k, "col"), "s", f"B.{k}")
    for k in range(inner):
        builder.unit("out", f"A.{k}", f"B.{k}")
    return _brick("matrix_product", builder, [(rows, inner), (inner, columns), (rows, columns)], 2, (2, rows, columns))


def row_softmax(rows: int, columns: int) -> Brick:
    """S (rows, columns) -> softmax of each row. Three blocks with 1, 0 and 1 heads; |S| < 2^19."""
    extra = {GRID: torch.ones(rows * columns, dtype=torch.float64)}
    builder = NetworkBuilder((*POSITIONS, *extra), ("S",))
    guard = GUARD[torch.float64]
    softmax_rows(builder, [""], GRID, columns, guard)
    return _brick("row_softmax", builder, [(rows, columns)], 1, (0, rows, columns), extra, guard / 2, "P")


def max_min(rows: int, pairs: int) -> Brick:
    """X (rows, 2 pairs) -> each pair (a, b) as (max, min). One block, one head: b + relu(a - b) and a - relu(a - b)."""
    places = Layout(((rows, 2 * pairs),)).coordinates()[:, 2]
    even = (places % 2 == 0).double()
    extra = {"partner": (places + 1 - 2 * (places % 2)).double(), "first": even, "second": 1 - even}
    builder = NetworkBuilder((*POSITIONS, *extra), ("s",))
    builder.block()
    fetch(builder, (0, "row", "partner"), "s", "other")
    builder.unit("out", "other")
    builder.unit("out", {"s": 1.0, "other": -1.0}, "first", "relu")
    builder.unit({"out": -1.0}, {"other": 1.0, "s": -1.0}, "second", "relu")
    return _brick("max_min", builder, [(rows, 2 * pairs)], 1, (0, rows, 2 * pairs), extra)


def leaky_relu(rows: int, columns: int, slope: float) -> Brick:
    """X -> max(x, 0) + slope min(x, 0), entry by entry. One block, no head."""
    builder = NetworkBuilder(POSITIONS, ("s",))
    builder.block()
    builder.unit("out", "s", activation="relu")
    if slope:
        builder.unit({"out": -slope}, {"s": -1.0}, activation="relu")
    return _brick("leaky_relu", builder, [(rows, columns)], 1, (0, rows, columns))


def relu(rows: int, columns: int) -> Brick:
    """X -> max(x, 0), entry by entry. One block, no head."""
    return leaky_relu(rows, columns, 0.0)


def identify(heads: int, rows: int, columns: int, head: int) -> Brick:
    """Of `heads` matrices stacked as (heads * rows, columns), keep number `head` and set the others to 0.

    Two blocks, no head: the flag [h = head] is a hat function of the integer h, then a product.
    """
    _require_head(heads, head)
    builder, extra = _stacked(heads, rows, columns)
    builder.block()
    for shift_by, factor in ((1.0, 1.0), (0.0, -2.0), (-1.0, 1.0)):
        builder.unit({"chosen": factor}, {"head": 1.0, "one": shift_by - head}, activation="relu")
    builder.block()
    builder.unit("out", "s", "chosen")
    return _brick("identify", builder, [(heads * rows, columns)], 1, (0, heads * rows, columns), extra)


def shift(heads: int, rows: int, columns: int, by: int) -> Brick:
    """Of `heads` matrices stacked as (heads * rows, columns), move each to place h + by; vacated places become 0.

    Two blocks, one head: the fetch, then a product with the flag [0 <= h - by < heads].
    """
    if not isinstance(by, int) or abs(by) >= heads:
        raise SpecError(f"a shift of {heads} heads is a whole number between {1 - heads} and {heads - 1}, got {by!r}")
    builder, extra = _stacked(heads, rows, columns)
    builder.block()
    fetch(builder, (0, {"row": 1.0, "one": -float(by * rows)}, "col"), "s", "moved")
    low, high = max(by, 0), heads - 1 + min(by, 0)
    builder.unit("inside", {"head": 1.0, "one": 1.0 - low}, activation="relu")  # [h >= low] on integers
    builder.unit({"inside": -1.0}, {"head": 1.0, "one": -float(low)}, activation="relu")
    builder.unit({"inside": -1.0}, {"head": 1.0, "one": -float(high)}, activation="relu")  # - [h > high]
    builder.unit("inside", {"head": 1.0, "one": -1.0 - high}, activation="relu")
    builder.block()
    builder.unit("out", "moved", "inside")
    return _brick("shift", builder, [(heads * rows, columns)], 1, (0, heads * rows, columns), extra)


def relu_product(knots: int, bound: float = 4.0) -> Brick:
    """(a, b) (1, 2) -> about a b (1, 1) by ReLU units alone: why the map has gates. Error up to h^2 / 16, h = knot gap.

    a b = ((a + b)^2 - (a - b)^2) / 4 with each square interpolated at `knots` points of [-2 bound, 2 bound].
    """
    if knots < 2:
        raise SpecError(f"interpolation needs at least 2 knots, got {knots}")
    builder = NetworkBuilder(POSITIONS, ("s",))
    builder.block()
    fetch(builder, (0, 0, 0), "s", "a")
    fetch(builder, (0, 0, 1), "s", "b")
    gap = 4 * bound / (knots - 1)
    points = [-2 * bound + gap * k for k in range(knots)]
    slopes = [(right * right - left * left) / gap for left, right in pairwise(points)]
    for sign, total in ((1.0, {"a": 1.0, "b": 1.0}), (-1.0, {"a": 1.0, "b": -1.0})):
        previous = 0.0
        builder.unit({"out": sign * points[0] ** 2 / 4}, "one")
        for point, slope in zip(points, slopes):
            form = {**total, "one": -point}
            builder.unit({"out": sign * (slope - previous) / 4}, form, activation="relu")
            previous = slope
    return _brick("relu_product", builder, [(1, 2)], 1, (0, 1, 1))


def _stacked(heads: int, rows: int, columns: int) -> tuple[NetworkBuilder, dict[str, Tensor]]:
    extra = {"head": (torch.arange(heads * rows * columns) // (rows * columns)).double()}
    return NetworkBuilder((*POSITIONS, *extra), ("s",)), extra


def _require_head(heads: int, head: int) -> None:
    if not isinstance(head, int) or not 0 <= head < heads:
        raise SpecError(f"head must be a whole number in 0..{heads - 1}, got {head!r}")
