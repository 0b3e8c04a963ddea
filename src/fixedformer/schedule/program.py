"""A schedule: the program of two frozen blocks. Order, sign and duration of each segment, and nothing else."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from fixedformer.errors import SpecError
from fixedformer.schedule.field import Array

Mode = Literal["finite", "continuous"]


@dataclass(frozen=True)
class Schedule:
    """Segments (block, signed duration), run one after the other, the same for all sequences.

    order: (segments,) uint8, 0 or 1. durations: (segments,) float64, signed. remainders: (segments,) float64, added to
    the durations in extended precision only (zeros where nothing was refined). substeps: residual steps a segment; each
    has eta = duration / substeps. mode: "finite" (residual steps) or "continuous" (X' = sign F(X)). report: what the
    search says: status, error, amplification, depth, timings.
    """

    order: Array
    durations: Array
    remainders: Array
    substeps: int
    mode: Mode
    machine_fingerprint: str
    report: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shape = self.durations.shape
        if len(shape) != 1 or self.order.shape != shape or self.remainders.shape != shape:
            raise SpecError(
                f"a schedule needs one block, duration and remainder a segment, got {self.order.shape}, {shape}, "
                f"{self.remainders.shape}"
            )
        if self.substeps < 1 or self.mode not in ("finite", "continuous"):
            raise SpecError(f"needed substeps >= 1 and mode finite or continuous, got {self.substeps}, {self.mode!r}")
        if not (np.isfinite(self.durations).all() and np.isfinite(self.remainders).all()):
            raise SpecError("durations must be finite numbers")
        if not np.isin(self.order, (0, 1)).all():
            raise SpecError("blocks are 0 and 1")

    @property
    def depth(self) -> int:
        """Residual steps of a finite schedule: the depth of the network that it makes."""
        return len(self.durations) * self.substeps

    @property
    def duration(self) -> float:
        """Total time, sum |t|."""
        return float(np.abs(self.durations).sum())

    @property
    def largest_eta(self) -> float:
        """max |eta| of a finite schedule's steps."""
        return float(np.abs(self.durations).max(initial=0.0)) / self.substeps
