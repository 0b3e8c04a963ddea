"""The size class of a universal simulator: everything the fixed network depends on, and its cost by formula."""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from fixedformer.errors import CapacityError, SpecError
from fixedformer.prompt.layout import Layout

Backend = Literal["hard", "stock", "soft"]
MaskKind = Literal["causal", "given"]

# Row-maximum heads add GUARD to the score of an allowed key of the right row. Two wrong keys can differ by at most
# max S - min S <= 2 max|S|, so the right row wins whenever |S| < GUARD / 2. The retrieved maximum may be too small by
# the rounding of GUARD * row^2 terms (softmax does not change under a shift; only overflow matters): see `shift_error`.
GUARD = {torch.float64: 2.0**20, torch.float32: 2.0**12}
# exp(64) * n is finite in float32 for every n that passes.
MOST_SHIFT = 64.0


@dataclass(frozen=True)
class SizeClass:
    """Sizes (n, d, d_v, heads) and options of a simulator; the network is a function of these alone.

    n: rows of X. d: its columns. d_v: columns of each head's value matrix. d_k: None when a head is given as one matrix
    A = W_Q W_K^T, else the width of W_Q and W_K, which the network then multiplies itself. d_out: None, or the columns
    of an output matrix W_O (heads, d_v, d_out). mask: None; "causal" (fixed in the network); "given" (the prompt holds
    an n x n mask: padding, or any other). guard: subtract each row's maximum before exp. sharpness: factor on the
    scores of backend "stock".
    """

    n: int
    d: int
    d_v: int
    heads: int = 1
    d_k: int | None = None
    d_out: int | None = None
    mask: MaskKind | None = None
    guard: bool = True
    backend: Backend = "hard"
    sharpness: float = 1000.0
    dtype: torch.dtype = torch.float64

    def __post_init__(self) -> None:
        for name in ("n", "d", "d_v", "heads", "d_k", "d_out"):
            value = getattr(self, name)
            if value is None and name in ("d_k", "d_out"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise SpecError(f"{name} must be a whole number of at least 1, got {value!r}")
        if self.mask not in (None, "causal", "given"):
            raise SpecError(f"mask must be None, 'causal' or 'given' (the prompt holds it), got {self.mask!r}")
        if self.backend not in ("hard", "stock", "soft"):
            raise SpecError(f"backend must be 'hard', 'stock' or 'soft', got {self.backend!r}")
        if self.backend == "soft" and self.mask == "given":
            raise SpecError("backend 'soft' masks by a fixed boolean mask, so the prompt cannot hold one; use 'hard'")
        if self.dtype not in GUARD:
            raise SpecError(f"dtype must be torch.float64 or torch.float32, got {self.dtype}")
        if not self.sharpness >= 20 or not float(self.sharpness).is_integer():
            raise SpecError("sharpness must be a whole number, so that scores that tie stay equal, and at least 20 (a "
                            f"wrong token then weighs e^-20 = 2e-9), got {self.sharpness}")  # fmt: skip
        if self.backend != "soft" and self.guard and self.shift_error > MOST_SHIFT:
            raise CapacityError(f"for n = {self.n} the row maximum may be off by {self.shift_error:.0f} in "
                                f"{self.dtype}, {MOST_SHIFT:.0f} is safe; use float64 or guard=False")  # fmt: skip

    @property
    def shift_error(self) -> float:
        """How far below the maximum the row-maximum head may pick, by rounding.

        Multiples of GUARD add exactly; three additions involve S, each rounding a partial sum below 2.5 GUARD n^2 by
        eps / 2 of it; two keys are compared: 2 * 3 * 2.5 / 2 = 7.5 < 8.
        """
        return 8 * GUARD[self.dtype] * self.n**2 * torch.finfo(self.dtype).eps

    @property
    def score_limit(self) -> float:
        """|S| must stay below this: GUARD / 2, or where there is no guard, what exp and a sum of n can hold."""
        if self.backend == "soft":
            return float("inf")
        return GUARD[self.dtype] / 2 if self.guard else math.log(torch.finfo(self.dtype).max / self.n)

    @property
    def columns(self) -> int:
        """Columns c of the grid that holds X and everything computed from it."""
        return max(self.n, self.d, self.d_v, self.d_k or 1, self.d_out or 1)

    def section_names(self) -> list[tuple[str, int, int]]:
        """The prompt's sections in order: name, rows, columns."""
        sections = [("X", self.n, self.columns)]
        for head in range(self.heads):
            if self.d_k is None:
                sections.append((f"A{head}", self.d, self.d))
            else:
                sections += [(f"Q{head}", self.d, self.d_k), (f"K{head}", self.d, self.d_k)]
            sections.append((f"V{head}", self.d, self.d_v))
            if self.d_out is not None:
                sections.append((f"O{head}", self.d_v, self.d_out))
        if self.mask == "given":
            sections.append(("mask", self.n, self.n))
        return sections

    def layout(self) -> Layout:
        return Layout(tuple((rows, columns) for _, rows, columns in self.section_names()))

    def section_ids(self) -> dict[str, int]:
        return {name: number for number, (name, _, _) in enumerate(self.section_names())}

    @property
    def tokens(self) -> int:
        """n c + H (d^2 + d d_v), with 2 d d_k for d^2 where W_Q, W_K are given, + H d_v d_out, + n^2 for a mask."""
        weights = self.d**2 if self.d_k is None else 2 * self.d * self.d_k
        per_head = weights + self.d * self.d_v + self.d_v * (self.d_out or 0)
        return self.n * self.columns + self.heads * per_head + (self.n**2 if self.mask == "given" else 0)

    @property
    def head_counts(self) -> tuple[int, ...]:
        """Heads of each block, by formula (docs/theory/prompt.md, Theorem 2); tests compare it with the network."""
        n, d, d_v, heads, d_k = self.n, self.d, self.d_v, self.heads, self.d_k
        first = d + heads * (2 * d if d_k is None else 3 * d) + (self.mask == "given")
        scores = d + heads * d if d_k is None else 2 * heads * d_k
        if self.backend == "soft":
            return (first, scores + heads * d_v, heads, *((heads * d_v,) if self.d_out else ()))
        guard = (heads,) if self.guard else ()
        output = (2 * heads * d_v,) if self.d_out else ()
        return (first, scores, *guard, 0, heads, 2 * heads * n, *output)

    @property
    def depth(self) -> int:
        """Blocks: 6 (hard, stock), 3 (soft), one less without the guard, one more with an output matrix."""
        return len(self.head_counts)
