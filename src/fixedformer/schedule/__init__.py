"""Two attention blocks, frozen before any task, interpolate: the program is order, sign and duration.

After "Universal interpolation for deep residual self-attention networks" (abstract; the search is ours). See
docs/schedule.md and, for statements and proofs, docs/theory/schedule.md.
"""

from fixedformer.schedule.blocks import FrozenBlocks
from fixedformer.schedule.feasible import Feasibility
from fixedformer.schedule.program import Schedule

__all__ = ["Feasibility", "FrozenBlocks", "Schedule"]
