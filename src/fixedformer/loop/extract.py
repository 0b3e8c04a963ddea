"""Step 3 with the program in the weights: bit extraction (Lemma A.9) and value mapping (Lemma 4.1).

A binary fraction β = 0.θ_1 θ_2 .. θ_r carries r bits. Every loop takes the leading bit, θ = step_ε(β - 1/2), and
doubles the rest, β <- 2β - θ; a counter that starts at k and loses 1 a loop says whether l <= k, and Σ_{l<=k} θ_l adds
up through θ·g = ReLU(θ + g - 1). One ReLU layer cannot nest two steps, so the product uses the bits of the loop before:
r + 1 loops (the paper says r). Values follow from two streams, y ~ start + step·(1/2 + Σ ups - Σ downs).

paper  6 rows and 9 neurons a stream: (k, β_l, β_{l+1}, θ, g, sum), corrected as docs/theory/loop.md lists.
slim   a counter k and a gate g for all streams and dimensions (3 neurons), β and θ for each stream, one signed sum for
       each dimension: 2 + 5d rows and 3 + 10d neurons, against 12d and 18d.

The gate is ReLU(2k - 1/2) - ReLU(2k - 3/2) before k loses its 1: it is 0 for k <= 1/4 and 1 for k >= 3/4, so an id that
softmax has moved by up to 1/4 gives the same values, exactly.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from fixedformer.errors import SpecError
from fixedformer.loop.block import HALF, BlockBuilder, LoopedNetwork, Weight, enter, leave
from fixedformer.loop.gadgets import add_step
from fixedformer.loop.quantise import Form

SIGNS: Mapping[str, int] = {"up": 1, "down": -1}


@dataclass(frozen=True)
class Steps:
    """A table y_0 .. y_{K-1} in R^d as start + step · (1/2 + ups - downs): what the binary fractions hold.

    start, step (d,) exact; ups, downs (d, K-1): bit l-1 says whether the value rises (falls) by one step from l-1 to l.
    """

    start: tuple[Fraction, ...]
    step: tuple[Fraction, ...]
    ups: tuple[tuple[int, ...], ...]
    downs: tuple[tuple[int, ...], ...]

    @property
    def d(self) -> int:
        return len(self.start)

    @property
    def size(self) -> int:
        """K, the number of values."""
        return len(self.ups[0]) + 1

    def streams(self) -> Iterator[tuple[int, str, tuple[int, ...]]]:
        """(dimension, "up" or "down", bits) for each of the 2d streams."""
        for i in range(self.d):
            yield i, "up", self.ups[i]
            yield i, "down", self.downs[i]


def encode(lines: Sequence[Sequence[tuple[int, Fraction]]], size: int) -> Steps:
    """Turn d broken lines into steps. Lines: corners (k, y) in order of k, constant beyond the ends.

    step_i is the largest |y_k - y_{k-1}|, so that consecutive floors of (y_k - y_0)/step differ by at most 1; then
    |start + step (1/2 + Σ ups - Σ downs) - y_k| <= step/2, half of what Lemma 4.1 promises (it has no 1/2). The paper
    floors y_k/ε; counting from y_0 keeps the integers small when y is nearly constant.
    """
    starts, steps, ups, downs = [], [], [], []
    for corners in lines:
        step = max((abs(b - a) / (right - left) for (left, a), (right, b) in pairs(corners)), default=Fraction(0))
        levels = level_of_each(corners, size, step)
        changes = [b - a for a, b in pairwise(levels)]
        starts.append(corners[0][1])
        steps.append(step)
        ups.append(tuple(int(change > 0) for change in changes))
        downs.append(tuple(int(change < 0) for change in changes))
    return Steps(tuple(starts), tuple(steps), tuple(ups), tuple(downs))


def pairs(corners: Sequence[tuple[int, Fraction]]) -> Iterator[tuple[tuple[int, Fraction], tuple[int, Fraction]]]:
    return pairwise(corners)


def level_of_each(corners: Sequence[tuple[int, Fraction]], size: int, step: Fraction) -> list[int]:
    """floor((y_k - y_0) / step) for k = 0 .. size-1, exactly; all 0 where step is 0."""
    if not step:
        return [0] * size
    levels = [0] * (corners[0][0] + 1)
    origin = corners[0][1]
    for (left, a), (right, b) in pairs(corners):
        # (y_k - y_0)/step = base + slope (k - left) over one common denominator: integers from here on.
        base, slope = (a - origin) / step, (b - a) / (step * (right - left))
        scale = base.denominator * slope.denominator
        top, rise = int(base * scale), int(slope * scale)
        levels += [(top + rise * t) // scale for t in range(1, right - left + 1)]
    return levels + [levels[-1]] * (size - len(levels))


def binary_fraction(bits: Sequence[int]) -> Fraction:
    """0.θ_1 θ_2 .. θ_r in base 2."""
    return Fraction(int("".join(map(str, bits)) or "0", 2), 2 ** len(bits))


def add_extractor(builder: BlockBuilder, d: int, edge: Weight, form: Form) -> None:
    """Rows and neurons of step 3 for d dimensions: ups and downs of each. `edge` is ε <= 2^-r."""
    if form == "paper":
        for i in range(d):
            for stream in SIGNS:
                add_paper_stream(builder, f"{i}.{stream}", edge)
        return
    builder.add_rows("k", "g")
    builder.add_drift("k", -1)
    add_gate(builder, "k", "g")
    for i in range(d):
        builder.add_rows(f"sum{i}")
        for stream, sign in SIGNS.items():
            beta, theta = f"beta{i}.{stream}", f"theta{i}.{stream}"
            builder.add_rows(beta, theta)
            builder.add_neuron({beta: 1}, 0, {beta: 1})
            builder.add_neuron({theta: 1}, 0, {beta: -1, theta: -1})
            add_step(builder, {beta: 2, theta: -1}, -HALF, {theta: 1}, edge)
            builder.add_neuron({theta: 1, "g": 1}, -1, {f"sum{i}": sign})


def add_gate(builder: BlockBuilder, k: str, g: str) -> None:
    """g <- 1 where k >= 3/4, 0 where k <= 1/4 (the counter before it loses its 1)."""
    builder.add_neuron({g: 1}, 0, {g: -1})
    builder.add_neuron({k: 2}, -HALF, {g: 1})
    builder.add_neuron({k: 2}, -HALF - 1, {g: -1})


def add_paper_stream(builder: BlockBuilder, stream: str, edge: Weight) -> None:
    """One stream of Lemma A.9: rows (k, β_l, β_{l+1}, θ, g, sum), nine neurons, W2 corrected in rows 4 and 5."""
    k, beta, ahead, theta, g, total = paper_rows(stream)
    builder.add_rows(k, beta, ahead, theta, g, total)
    builder.add_drift(k, -1)
    builder.add_neuron({beta: 1}, 0, {beta: 1})
    builder.add_neuron({theta: 1}, 0, {beta: -1, theta: -1})
    builder.add_neuron({ahead: 1}, 0, {ahead: 1})
    add_step(builder, {ahead: 1}, -HALF, {theta: 1, ahead: -1}, edge)
    add_gate(builder, k, g)
    builder.add_neuron({theta: 1, g: 1}, -1, {total: 1})


def paper_rows(stream: str) -> tuple[str, str, str, str, str, str]:
    k, beta, ahead, theta, g, total = (f"{name}{stream}" for name in ("k", "beta", "ahead", "theta", "g", "sum"))
    return k, beta, ahead, theta, g, total


def counter_rows(d: int, form: Form) -> list[str]:
    """The rows that must hold k when step 3 starts."""
    return ["k"] if form == "slim" else [f"k{i}.{stream}" for i in range(d) for stream in SIGNS]


def fraction_rows(steps: Steps, form: Form) -> dict[str, Fraction]:
    """What the β rows hold when step 3 starts: β_1 / 2, and in the paper's form β_1 one row ahead."""
    held: dict[str, Fraction] = {}
    for i, stream, bits in steps.streams():
        first = binary_fraction(bits)
        held[f"beta{i}.{stream}"] = first / 2
        if form == "paper":
            held[f"ahead{i}.{stream}"] = first
    return held


def read_out(steps: Steps, form: Form) -> list[tuple[Mapping[str, Weight], Weight]]:
    """L2 per dimension: start + step (1/2 + Σ ups - Σ downs)."""
    sums: Callable[[int], dict[str, int]] = (
        (lambda i: {f"sum{i}": 1})
        if form == "slim"
        else (lambda i: {f"sum{i}.{stream}": sign for stream, sign in SIGNS.items()})
    )
    return [
        ({row: sign * steps.step[i] for row, sign in sums(i).items()}, steps.start[i] + steps.step[i] / 2)
        for i in range(steps.d)
    ]


def bit_sum_network(bits: Sequence[int]) -> LoopedNetwork:
    """Lemma A.9 alone: k -> θ_1 + .. + θ_k for k = 0 .. r, in r + 1 loops (six rows, width 9, ε = 2^-r)."""
    if not bits or any(bit not in (0, 1) for bit in bits):
        raise SpecError("bit extraction needs at least one bit, each 0 or 1")
    builder = BlockBuilder()
    add_paper_stream(builder, "", Fraction(1, 2 ** len(bits)))
    block = builder.build()
    first = binary_fraction(bits)
    enters = enter(block, 1, {"k": {0: 1}}, {"beta": first / 2, "ahead": first})
    return LoopedNetwork(block, enters, leave(block, [({"sum": 1}, 0)]), loops=len(bits) + 1)


def value_network(steps: Steps, form: Form = "paper", edge: Weight | None = None) -> LoopedNetwork:
    """Lemma 4.1 alone: k -> start + step (1/2 + Σ ups - Σ downs), in K loops; k may be off by up to 1/4."""
    builder = BlockBuilder()
    add_extractor(builder, steps.d, edge or Fraction(1, 2 ** (steps.size - 1)), form)
    block = builder.build()
    copies: dict[str, dict[int, Weight]] = {row: {0: 1} for row in counter_rows(steps.d, form)}
    first = enter(block, 1, copies, fraction_rows(steps, form))
    return LoopedNetwork(block, first, leave(block, read_out(steps, form)), loops=steps.size)
