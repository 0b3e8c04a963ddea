"""All three steps in one block (section "Concatenated into a Single Transformer Layer" of Appendix A.1).

Rows [loop | step 1 | step 2 | step 3]; `loop` counts loops (the paper's x0). All steps run in every loop; what makes
them a sequence is when their rows are loaded, by two impulses on the counter:

    loop n - 1       step 1 is done: id <- z, key <- z + 1 (onto its resting value -1), last <- last coordinate
    loop n + N - 1   step 2's last loop: k <- 2 B^N id + 2 (B s + picked) - last_picked, read ahead from X'

Step 3 starts in loop n + N and takes K loops, so r = n + N + K. Until then its counter falls by 1 a loop; the load adds
those n + N back. Its binary fractions are loaded by the same impulse ("impulse", the paper's way: the program is in the
block's weights), or L1 starts them at 2^-(n+N) of their size and the idle loops double them into place ("preshift": the
program is in L1, the block is the same for every function, and no bit is lost in float64, where an impulse of size M
rounds a fraction to M 2^-52).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor

from fixedformer.loop import extract, memorise
from fixedformer.loop.block import (
    Attention,
    Block,
    BlockBuilder,
    Clock,
    LoopedNetwork,
    Weight,
    enter,
    leave,
)
from fixedformer.loop.context import add_ceiling, add_last_coordinate, add_picker
from fixedformer.loop.extract import Steps
from fixedformer.loop.gadgets import Reads, add_impulse
from fixedformer.loop.grid import Grid
from fixedformer.loop.memorise import Values
from fixedformer.loop.quantise import Form, add_quantiser, coordinate_row

Load = Literal["impulse", "preshift"]


@dataclass(frozen=True)
class Layout:
    """How the block is built, apart from any function.

    edge: ε of step 1, in units of 1. sharpness: key weight of both heads, for soft attention.
    """

    grid: Grid
    form: Form
    edge: Fraction
    attention: Attention = "hard"
    sharpness: Fraction = Fraction(1)

    @property
    def first_load(self) -> int:
        """θ_1: the loop that hands the token ids to step 2."""
        return self.grid.resolution - 1

    @property
    def second_load(self) -> int:
        """θ_2: the loop that hands the contextual ids to step 3, which starts one loop later."""
        return self.grid.resolution + self.grid.tokens - 1

    @property
    def idle(self) -> int:
        """Loops before step 3 starts."""
        return self.second_load + 1


@dataclass
class Draft:
    """A block in the making, with what L1 must put into it."""

    builder: BlockBuilder
    copies: dict[str, dict[int, Weight]] = field(default_factory=dict)
    start: dict[str, Weight] = field(default_factory=dict)


def begin(layout: Layout) -> Draft:
    """The counter, step 1, step 2 and the first impulse."""
    grid, builder = layout.grid, BlockBuilder()
    builder.add_rows("loop")
    builder.add_drift("loop", 1)
    copies, start = add_quantiser(builder, grid.d, grid.resolution, layout.edge, layout.form)
    add_picker(builder, grid.base, layout.sharpness)
    add_last_coordinate(builder, layout.sharpness)
    add_ceiling(builder, grid.base, grid.tokens)
    token_id: Reads = {coordinate_row(i): grid.resolution ** (grid.d - 1 - i) for i in range(grid.d)}
    add_impulse(
        builder,
        "loop",
        layout.first_load,
        # z < B and a coordinate < n; 4nB leaves room for coordinates inside a ramp.
        4 * grid.resolution * grid.base,
        [(token_id, 0, "id"), (token_id, 1, "key"), ({coordinate_row(grid.d - 1): 1}, 0, "last")],
    )
    # Keys rest at -1: below 0, so the picker is silent, and equal, so attention averages ids that are all 0.
    return Draft(builder, dict(copies), dict(start) | {"key": -1, "one": 1})


def add_second_load(
    draft: Draft, layout: Layout, counters: list[str], constants: Mapping[str, Fraction], counted: int
) -> None:
    """k into each counter, plus `counted` for what it loses by the start of step 3; constants into their rows."""
    grid = layout.grid
    contextual_id: Reads = {
        "id": 2 * grid.base**grid.tokens,
        "s": 2 * grid.base,
        "picked": 2,
        "last_picked": -1,
    }
    nothing: Reads = {}
    add_impulse(
        draft.builder,
        "loop",
        layout.second_load,
        # k + n + N <= 8K before and in loop θ_2; after it s may be B times larger, but the load only falls to -n there.
        8 * grid.size,
        [(contextual_id, counted, row) for row in counters]
        + [(nothing, value, row) for row, value in constants.items()],
    )


def finish(
    draft: Draft, layout: Layout, loops: int, outputs: list[tuple[Mapping[str, Weight], Weight]]
) -> LoopedNetwork:
    block = draft.builder.build()
    first = enter(block, layout.grid.d, draft.copies, draft.start)
    return LoopedNetwork(block, first, leave(block, outputs), loops, layout.attention)


def contextual_id_network(layout: Layout) -> LoopedNetwork:
    """Steps 1 and 2 with their impulses: X -> k at every token, in n + N loops. The composite less its step 3."""
    draft = begin(layout)
    draft.builder.add_rows("k")
    draft.builder.add_drift("k", -1)
    add_second_load(draft, layout, ["k"], {}, layout.idle)
    return finish(draft, layout, layout.idle, [({"k": 1}, 0)])


def bits_network(layout: Layout, steps: Steps, load: Load) -> LoopedNetwork:
    """Theorem 3.6: the whole network with the program in the weights. r = n + N + K loops."""
    draft = begin(layout)
    # One bit more than Lemma A.9 needs: in loop θ_2 a preshifted fraction stands at β_1/2 < 1/2, by 2^-(r+1) or more.
    extract.add_extractor(draft.builder, steps.d, Fraction(1, 2**steps.size), layout.form)
    fractions = extract.fraction_rows(steps, layout.form)
    if load == "preshift":
        draft.start |= {row: value / 2**layout.idle for row, value in fractions.items()}
        fractions = {}
    counters = extract.counter_rows(steps.d, layout.form)
    add_second_load(draft, layout, counters, fractions, layout.idle)
    return finish(draft, layout, layout.idle + steps.size, extract.read_out(steps, layout.form))


def timestep_block(layout: Layout, values: Values, bound: Weight) -> LoopedNetwork:
    """The fixed part of the timestep variant: block, L1 and L2, which no function changes (no clock, no loops yet)."""
    draft = begin(layout)
    d = layout.grid.d
    memorise.add_memory(draft.builder, d, values, bound)
    if values == "ratio":
        draft.start |= {f"y{i}": 1 for i in range(d)}  # loop θ_2 turns it into y_0
    add_second_load(draft, layout, memorise.counter_rows(d, values), {}, layout.idle)
    return finish(draft, layout, 0, memorise.read_out(d, values, bound))


def timestep_network(layout: Layout, table: Tensor, values: Values, bound: Weight = 1) -> LoopedNetwork:
    """Theorem 4.2 behind steps 1 and 2: the block of `timestep_block`, and the program as its clock η.

    table (K, d) float64, standing for the exact values of its floats.
    """
    fixed = timestep_block(layout, values, bound)
    rows = tuple(fixed.block.row(name) for name in memorise.clock_rows(layout.grid.d, values))
    if values == "trapezoid":
        waiting = torch.zeros(layout.idle, len(rows), dtype=torch.float64)
        clock = Clock(rows, torch.cat([waiting, table]))
    else:
        exact = memorise.fractions(table)
        still = [(Fraction(0),) * len(rows)] * (layout.idle - 1)
        # y <- y + η y from 1 to y_0, in the last idle loop.
        begin_at = tuple(v for y in memorise.shift_up(exact[:1], bound)[0] for v in (y - 1, Fraction(0)))
        clock = Clock(rows, [*still, begin_at, *memorise.clock_values(exact, bound)])
    return LoopedNetwork(fixed.block, fixed.first, fixed.last, layout.idle + len(table), fixed.attention, clock)


def paper_rows(d: int) -> int:
    """State rows of the paper's block: 17 d + 9."""
    return 17 * d + 9


def paper_width(d: int) -> int:
    """Hidden width of the paper's block: 49 d + 25, an upper bound on ours."""
    return 49 * d + 25


def sizes(block: Block) -> dict[str, int]:
    return {"state": len(block.rows), "width": block.width, "heads": len(block.heads)}
