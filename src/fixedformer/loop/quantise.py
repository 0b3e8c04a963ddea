"""Step 1: cells of the input space (Lemma A.5). A token x in [0, 1]^d gets its cell's coordinates, by counting.

slim   rows (u, S) per dimension, 2 neurons: u starts at x - δ; each loop S += step_ε(u), u -= δ. After n - 1 loops S
       is the number of thresholds δ, 2δ, .., (n-1)δ that are <= x: the coordinate, for x = 1 too.
paper  rows (kx, k², k, x, S), 7 neurons: S += h_k(x) = k rect_k(x) for k = 1 .. n-1, h_k being linear in (kx, k², k).

Both are right outside the ramps, x in (kδ - ε, kδ). The paper's interval end "+1" in (123), (126) and in rows 5, 6 of
W1 must be (k+1)δ, and its start (0,0,0,x,0) must be (x,1,1,x,0), or k runs one behind after n - 1 loops.
"""

from collections.abc import Mapping
from fractions import Fraction
from typing import Literal

from fixedformer.errors import SpecError
from fixedformer.loop.block import BlockBuilder, LoopedNetwork, Weight, enter, leave
from fixedformer.loop.gadgets import add_step

Form = Literal["paper", "slim"]
Copies = dict[str, dict[int, Weight]]
EDGE = Fraction(1, 2**20)
"""Default ε as a fraction of δ: ramps hold 2^-20 of a coordinate's range, and 1/ε stays exact in float64."""


def coordinate_row(dimension: int) -> str:
    """The row that holds a token's cell coordinate once step 1 is done."""
    return f"S{dimension}"


def add_quantiser(
    builder: BlockBuilder, d: int, resolution: int, edge: Weight, form: Form
) -> tuple[Copies, Mapping[str, Weight]]:
    """Rows and neurons of step 1; returns what L1 must put there: copies of the input, and constants.

    edge: ε, with 0 < ε < δ = 1/resolution. 5d rows and 7d neurons ("paper") or 2d and 2d ("slim").
    """
    if not 0 < edge < Fraction(1, resolution):
        raise SpecError(f"the edge ε must lie between 0 and δ = 1/{resolution}, got {edge}")
    copies: Copies = {}
    start: dict[str, Weight] = {}
    for i in range(d):
        if form == "slim":
            add_count(builder, i, resolution, edge)
            copies[f"u{i}"] = {i: 1}
            start[f"u{i}"] = Fraction(-1, resolution)
        else:
            add_rectangles(builder, i, resolution, edge)
            copies |= {f"multiple{i}": {i: 1}, f"input{i}": {i: 1}}
            start |= {f"square{i}": 1, f"round{i}": 1}
    return copies, start


def add_count(builder: BlockBuilder, i: int, resolution: int, edge: Weight) -> None:
    """The slim form for dimension i."""
    u, S = f"u{i}", coordinate_row(i)
    builder.add_rows(u, S)
    add_step(builder, {u: 1}, 0, {S: 1}, edge)
    builder.add_drift(u, Fraction(-1, resolution))


def add_rectangles(builder: BlockBuilder, i: int, resolution: int, edge: Weight) -> None:
    """The paper's form for dimension i: the seven neurons of Lemma A.5, corrected."""
    kx, kk, k, x, S = f"multiple{i}", f"square{i}", f"round{i}", f"input{i}", coordinate_row(i)
    builder.add_rows(kx, kk, k, x, S)
    delta, slope = Fraction(1, resolution), 1 / Fraction(edge)
    builder.add_neuron({x: 1}, 0, {kx: 1})
    builder.add_neuron({k: 2}, 0, {kk: 1})
    builder.add_neuron({kx: slope, kk: -delta * slope, k: 1}, 0, {S: 1})
    builder.add_neuron({kx: slope, kk: -delta * slope}, 0, {S: -1})
    builder.add_neuron({kx: -slope, kk: delta * slope, k: delta * slope}, 0, {S: 1})
    builder.add_neuron({kx: -slope, kk: delta * slope, k: (delta - edge) * slope}, 0, {S: -1})
    builder.add_neuron({k: 1}, 0, {S: -1})
    builder.add_drift(kk, 1)
    builder.add_drift(k, 1)


def quantiser_network(d: int, resolution: int, edge: Weight | None = None, form: Form = "paper") -> LoopedNetwork:
    """Lemma A.5 alone: tokens x in [0, 1]^d -> cell coordinates in {0 .. n-1}^d, in n - 1 loops."""
    builder = BlockBuilder()
    copies, start = add_quantiser(builder, d, resolution, edge or EDGE / resolution, form)
    block = builder.build()
    outputs = [({coordinate_row(i): 1}, 0) for i in range(d)]
    return LoopedNetwork(block, enter(block, d, copies, start), leave(block, outputs), loops=resolution - 1)
