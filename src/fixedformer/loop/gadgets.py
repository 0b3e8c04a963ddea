"""Piecewise linear gadgets of a few ReLUs each: step, rectangle, trapezoid, impulse (Propositions A.2-A.4).

Each `add_*` writes a gadget into a builder: `writes` rows gain the gadget's value times their weight, once a loop. Each
`*_network` is the same gadget alone: a block of one loop whose output row starts at 0.

With ramp_ε(u) = ReLU(u/ε + 1) - ReLU(u/ε), which is 0 for u <= -ε, 1 for u >= 0, linear between:

    step_ε(u)  = ramp_ε(u)
    rect(u)    = 1 on [start, stop - ε], 0 up to start - ε and from stop on; ramps on (start - ε, start) and
                 (stop - ε, stop). (The paper's note gives other intervals, and "four ReLU" for the step: it takes two.)
    trapezoid  = 1 for |u| <= 1/4, 0 for |u| >= 1/2
    impulse    = u in the loop whose counter is θ, 0 in every other loop
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction

from fixedformer.errors import SpecError
from fixedformer.loop.block import HALF, BlockBuilder, LoopedNetwork, Weight, enter, leave

Reads = Mapping[str, Weight]


def scaled(reads: Reads, factor: Weight) -> dict[str, Fraction]:
    """Every weight times `factor`."""
    return {name: Fraction(weight) * factor for name, weight in reads.items()}


def add_step(builder: BlockBuilder, reads: Reads, bias: Weight, writes: Reads, edge: Weight) -> None:
    """writes += step_edge(reads · x + bias): two neurons, largest weight 1/edge (Proposition A.3)."""
    slope = 1 / _positive(edge, "edge of a step")
    builder.add_neuron(scaled(reads, slope), bias * slope + 1, writes)
    builder.add_neuron(scaled(reads, slope), bias * slope, scaled(writes, -1))


def add_rect(builder: BlockBuilder, reads: Reads, start: Weight, stop: Weight, edge: Weight, writes: Reads) -> None:
    """writes += rect(reads · x) on [start, stop]: four neurons and a drift of -1 (Proposition A.2, eq. 115).

    Raises SpecError unless 0 < edge < stop - start.
    """
    if not 0 < edge < stop - start:
        raise SpecError(f"a rectangle needs 0 < edge < stop - start, got edge {edge}, start {start}, stop {stop}")
    slope = 1 / Fraction(edge)
    up, down = scaled(reads, slope), scaled(reads, -slope)
    builder.add_neuron(up, (edge - start) * slope, writes)
    builder.add_neuron(up, -start * slope, scaled(writes, -1))
    builder.add_neuron(down, stop * slope, writes)
    builder.add_neuron(down, (stop - edge) * slope, scaled(writes, -1))
    for name, weight in writes.items():
        builder.add_drift(name, -weight)


def add_trapezoid(builder: BlockBuilder, reads: Reads, writes: Reads) -> None:
    """writes += trapezoid(reads · x), 1 within 1/4 of 0 and 0 from 1/2 on: four neurons, largest weight 4."""
    for bias, sign in ((2, 1), (1, -1), (-1, -1), (-2, 1)):
        builder.add_neuron(scaled(reads, 4), bias, scaled(writes, sign))


def add_impulse(
    builder: BlockBuilder, counter: str, when: int, bound: Weight, loads: Sequence[tuple[Reads, Weight, str]]
) -> None:
    """For each (reads, bias, row) in `loads`: row += reads · x + bias, in the loop where `counter` is `when` only.

    Two neurons a load and two shared ones (Proposition A.4, eq. 119). A value v = reads · x + bias needs v <= bound in
    every loop before `when`, v >= -bound in every loop after it, and |v| <= bound in it: the paper's condition
    v in [-bound, bound] at all times is more than is needed, and our registers break it late in the run.
    """
    double = 2 * _positive(bound, "bound of an impulse")
    for reads, bias, row in loads:
        for shift, sign in ((HALF, 1), (-HALF, -1)):
            builder.add_neuron({**reads, counter: double}, bias + double * (shift - when), {row: sign})
    # A row that is loaded twice is compensated twice.
    compensation: dict[str, Fraction] = {}
    for _, _, row in loads:
        compensation[row] = compensation.get(row, Fraction(0)) - double
    builder.add_neuron({counter: 1}, HALF - when, compensation)
    builder.add_neuron({counter: 1}, -HALF - when, scaled(compensation, -1))


def step_network(edge: Weight) -> LoopedNetwork:
    """x -> step_edge(x)."""
    builder = _scalar_builder()
    add_step(builder, {"x": 1}, 0, {"out": 1}, edge)
    return _one_loop(builder)


def rect_network(start: Weight, stop: Weight, edge: Weight) -> LoopedNetwork:
    """x -> rect(x) on [start, stop] with ramps of length edge."""
    builder = _scalar_builder()
    add_rect(builder, {"x": 1}, start, stop, edge, {"out": 1})
    return _one_loop(builder)


def trapezoid_network() -> LoopedNetwork:
    """x -> trapezoid(x)."""
    builder = _scalar_builder()
    add_trapezoid(builder, {"x": 1}, {"out": 1})
    return _one_loop(builder)


def impulse_network(when: int, bound: Weight) -> LoopedNetwork:
    """(x, t) -> x where t = when, else 0, for |x| <= bound and integers t."""
    builder = _scalar_builder("t")
    add_impulse(builder, "t", when, bound, [({"x": 1}, 0, "out")])
    return _one_loop(builder, "t")


def _scalar_builder(*more: str) -> BlockBuilder:
    builder = BlockBuilder()
    builder.add_rows("x", *more, "out")
    return builder


def _one_loop(builder: BlockBuilder, *more: str) -> LoopedNetwork:
    block = builder.build()
    copies: dict[str, dict[int, Weight]] = {name: {i: 1} for i, name in enumerate(("x", *more))}
    return LoopedNetwork(block, enter(block, 1 + len(more), copies, {}), leave(block, [({"out": 1}, 0)]), loops=1)


def _positive(value: Weight, what: str) -> Fraction:
    if not value > 0:
        raise SpecError(f"the {what} must be positive, got {value}")
    return Fraction(value)
