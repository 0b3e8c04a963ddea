"""What `compile` returns: the table, and what the machine needs of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fixedformer.loop.extract import Steps
from fixedformer.loop.grid import Array, Grid, Table

Variant = Literal["bits", "timestep"]


@dataclass(frozen=True, eq=False)
class LoopProgram:
    """A target as a looped machine holds it.

    bits:      `steps`, which become weights: of the block, or of L1 (`LoopedApproximator.load`), and L2.
    timestep:  `clock` (K, d) float64, the values of η(t) on step 3's output rows in its K loops.
    table:     the target at the reached entries, what both were made of.
    report:    sizes and seconds, for people.
    """

    grid: Grid
    variant: Variant
    table: Table
    machine_fingerprint: str
    steps: Steps | None = None
    clock: Array | None = None
    report: Mapping[str, Any] = field(default_factory=dict)
