"""Step 3 with the program in the clock: Theorem 4.2. The block is fixed; η(t) says what each loop writes.

trapezoid  ours: a counter that starts at k and loses 1 a loop, and s_i += η_i(l) trapezoid(counter) with η_i(l) = y_l:
           1 + d rows, 4 neurons, no weight above 4 outside η. Only the loop with l = k writes, so s = y_k to the bit.
ratio      the paper's: a register walks y_0, y_1, .. through η = y_l/y_{l-1} - 1, and an impulse copies it out in loop
           k: 4d rows, 6d neurons. Values are shifted so that none is near 0; M > max |y| after the shift.

Two corrections to Appendix B: b1 = (0, 0, M, -M, 1/2, -1/2) (its second entry is 0, not -1), and a loop 0 with
η(0) = (0, 1, 0, 1) comes before the K - 1 loops, or y_0 is never written.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Literal

from torch import Tensor

from fixedformer.errors import SpecError
from fixedformer.loop.block import BlockBuilder, Clock, LoopedNetwork, Weight, enter, leave
from fixedformer.loop.gadgets import add_trapezoid

Values = Literal["trapezoid", "ratio"]
Table = Sequence[Sequence[Fraction]]  # (K, d)
SHIFT = 2
"""The ratio form adds SHIFT · bound to values in [-bound, bound]: then 1 <= y / bound <= 3."""


def add_memory(builder: BlockBuilder, d: int, values: Values, bound: Weight = 1) -> None:
    """Rows and neurons of step 3. `bound` >= |y| is built into the ratio form's weights (M = 2 (SHIFT + 1) bound)."""
    if values == "trapezoid":
        builder.add_rows("k", *(f"s{i}" for i in range(d)))
        builder.add_drift("k", -1)
        add_trapezoid(builder, {"k": 1}, {f"s{i}": 1 for i in range(d)})
        return
    # The impulse needs M > |y|; twice that keeps it flat for counters within 1/4 of an integer.
    M = 2 * (SHIFT + 1) * Fraction(bound)
    for i in range(d):
        index, k, y, s = (f"{name}{i}" for name in ("index", "k", "y", "s"))
        builder.add_rows(index, k, y, s)
        builder.add_drift(k, -1)
        builder.add_neuron({y: 1}, 0, {y: 1})
        builder.add_neuron({y: -1}, 0, {y: -1})
        builder.add_neuron({y: 1, k: 2 * M}, M, {s: 1})
        builder.add_neuron({y: 1, k: 2 * M}, -M, {s: -1})
        builder.add_neuron({k: 1}, Fraction(1, 2), {s: -2 * M})
        builder.add_neuron({k: 1}, Fraction(-1, 2), {s: 2 * M})


def counter_rows(d: int, values: Values) -> list[str]:
    """The rows that must hold k when step 3 starts."""
    return ["k"] if values == "trapezoid" else [f"k{i}" for i in range(d)]


def clock_rows(d: int, values: Values) -> list[str]:
    """The rows whose η changes from loop to loop; every other row has η = 1."""
    return [f"s{i}" for i in range(d)] if values == "trapezoid" else [f"{n}{i}" for i in range(d) for n in "ys"]


def clock_values(table: Table, bound: Weight = 1) -> list[tuple[Fraction, ...]]:
    """The ratio form's η(l) for l = 0 .. K-1, in the order of `clock_rows`. (The trapezoid form's is the table.)"""
    shifted = shift_up(table, bound)
    first = tuple(Fraction(v) for _ in shifted[0] for v in (0, 1))
    rows = [first]
    for before, now in pairwise(shifted):
        ratios = [b / a for a, b in zip(before, now)]
        rows.append(tuple(v for ratio in ratios for v in (ratio - 1, ratio)))
    return rows


def fractions(table: Table | Tensor) -> Table:
    """The table's exact values."""
    return [[Fraction(v) for v in row] for row in table.tolist()] if isinstance(table, Tensor) else table


def shift_up(table: Table, bound: Weight) -> list[list[Fraction]]:
    """The table plus SHIFT · bound. Raises SpecError for a value beyond ±bound, which the fixed weights cannot hold."""
    worst = max(abs(v) for row in table for v in row)
    if worst > bound:
        raise SpecError(
            f"the ratio form was built for values within ±{float(bound):g}, the table holds {float(worst):g}; build it "
            "with a larger value_bound, or use the trapezoid form, which has no such bound"
        )
    return [[v + SHIFT * Fraction(bound) for v in row] for row in table]


def read_out(d: int, values: Values, bound: Weight = 1) -> list[tuple[Mapping[str, Weight], Weight]]:
    """L2 per dimension: s, less the shift."""
    shift = SHIFT * Fraction(bound) if values == "ratio" else Fraction(0)
    return [({f"s{i}": 1}, -shift) for i in range(d)]


def memory_network(table: Table | Tensor, values: Values = "trapezoid", bound: Weight = 1) -> LoopedNetwork:
    """Theorem 4.2 alone: k -> y_k for k = 0 .. K-1, in K loops. The block depends on d (and `bound`) only.

    table (K, d): fractions, or a float64 tensor, which stands for the exact values of its floats. In the ratio form L1
    holds y_0, as in the paper: (k, k, y_0, 0).
    """
    d = len(table[0])
    builder = BlockBuilder()
    add_memory(builder, d, values, bound)
    block = builder.build()
    copies: dict[str, dict[int, Weight]] = {row: {0: 1} for row in counter_rows(d, values)}
    start: dict[str, Weight] = {}
    if values == "ratio":
        copies |= {f"index{i}": {0: 1} for i in range(d)}
        table = fractions(table)
        start = {f"y{i}": y for i, y in enumerate(shift_up(table, bound)[0])}
    rows = tuple(block.row(name) for name in clock_rows(d, values))
    clock = Clock(rows, table if values == "trapezoid" else clock_values(fractions(table), bound))
    last = leave(block, read_out(d, values, bound))
    return LoopedNetwork(block, enter(block, 1, copies, start), last, loops=len(table), clock=clock)
