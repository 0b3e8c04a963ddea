"""A program for a machine with MLPs, and how it came about."""

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from fixedformer.embedding.blocks.engines import ReadOuts
from fixedformer.embedding.blocks.spec import BlockSpec
from fixedformer.target import Card


@dataclass(frozen=True)
class BlockReport:
    """What compiling did.

    width: columns of E_a. columns: s_0, the conditions on each of its rows. constants: width of e_b. bytes: size of the
    program. ratio: numbers in the program / numbers in the target. condition: of P_0 and of the constants' system with
    columns scaled to unit length, the larger (1 for sparse machines). neuron_condition: the largest of any B_j (what a
    target neuron's universal neurons write) in each layer, multiplied over the layers: the up weights of one layer
    pass through the alphas of all later ones (1 for sparse machines). residual: the largest |E_a P_0 - W_E C_0|
    relative to |E_a| |P_0|, constants included. norm: the largest |entry|. seconds: wall time.
    """

    width: int
    columns: int
    constants: int
    bytes: int
    ratio: float
    condition: float
    neuron_condition: float
    residual: float
    norm: float
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(eq=False)
class BlockProgram:
    """E = blockdiag(E_a, e_b): embedding E_a (d_in, width), and constants e_b, which every token gets (a feature 1)."""

    embedding: Tensor
    constants: Tensor
    spec: BlockSpec
    machine: dict[str, Any]
    machine_fingerprint: str
    report: BlockReport
    card: Card = field(default_factory=Card)
    _cache: tuple[tuple[tuple[int, int], ...], ReadOuts] | None = field(default=None, repr=False)

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    def cached(self) -> ReadOuts | None:
        """Read-outs made from these very tensors, or None when they were replaced or written to since."""
        return self._cache[1] if self._cache is not None and self._cache[0] == self._stamp() else None

    def keep(self, shown: ReadOuts) -> ReadOuts:
        self._cache = (self._stamp(), shown)
        return shown

    def _stamp(self) -> tuple[tuple[int, int], ...]:
        return tuple((tensor.data_ptr(), tensor._version) for tensor in (self.embedding, self.constants))
