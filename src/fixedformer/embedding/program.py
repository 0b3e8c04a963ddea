"""A program: the input embedding E that makes a fixed machine compute a target, and how it came about."""

from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fixedformer.embedding.engines import PathWeights
from fixedformer.target import Card, TargetSpec


@dataclass(frozen=True)
class CompileReport:
    """What compiling did; for a program that was trained, condition and residual are None.

    width: m, columns of E. columns: N, conditions that were met. bytes: size of E. condition: 2-norm condition number
    of R_all with columns scaled to unit length (1 for sparse machines). residual: the largest entry of
    |E R_all - W_all| relative to |E| |R_all|, in the program's own precision (one rounding is 1.1e-16 for float64).
    norm: the largest |entry| of E. seconds: wall time, the machine's factorisation included when it was made here.
    """

    width: int
    columns: int
    bytes: int
    condition: float | None
    residual: float | None
    norm: float
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(eq=False)
class Program:
    """E (d_in, width) for one machine. `machine` describes that machine so that a file can rebuild it.

    unembedding: None, or a matrix (width, d_out) that replaces the machine's U: programs that were trained, not
    compiled, may have one. Attention is the fixed machine's either way.
    """

    embedding: Tensor
    spec: TargetSpec
    machine: dict[str, Any]
    machine_fingerprint: str
    report: CompileReport
    card: Card = field(default_factory=Card)
    unembedding: Tensor | None = None
    _cache: tuple[tuple[tuple[int, int], ...], PathWeights] | None = field(default=None, repr=False)

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    def cached_paths(self) -> PathWeights | None:
        """The path weights made from this very embedding, or None when it was replaced or written to since."""
        return self._cache[1] if self._cache is not None and self._cache[0] == self._stamp() else None

    def keep_paths(self, paths: PathWeights) -> PathWeights:
        self._cache = (self._stamp(), paths)
        return paths

    def to(self, device: torch.device | str) -> "Program":
        """The same program in another place."""
        out = self.unembedding
        return replace(
            self,
            embedding=self.embedding.to(device),
            unembedding=None if out is None else out.to(device),
            _cache=None,
        )

    def _stamp(self) -> tuple[tuple[int, int], ...]:
        tensors = [self.embedding] + ([] if self.unembedding is None else [self.unembedding])
        return tuple((tensor.data_ptr(), tensor._version) for tensor in tensors)
