"""One transformer block as exact weights, and the looped network L2 ∘ TF^r ∘ L1 that is built from it.

A block has residual attention with heads of size 1, then a residual feed-forward layer (section 2.1 of the paper):

    X' = X + Σ_h O_h (V_h X) σ[(K_h X)ᵀ (Q_h X)],      TF(X) = X' + η(t) ⊙ (W2 ReLU(W1 X' + b1) + b2)

with η = 1 except in Theorem 4.2. Weights are `Fraction`s, stored as the few entries that are not zero; `matrices` and
`tensors` write them out. Rows have names, so that a construction reads like its proof. See docs/theory/loop.md.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from fixedformer.errors import SpecError

Weight = int | Fraction
Terms = tuple[tuple[int, Fraction], ...]  # (row, weight) where the weight is not zero, by row
Attention = Literal["hard", "soft"]
HALF = Fraction(1, 2)


@dataclass(frozen=True)
class Neuron:
    """One hidden unit: `writes` · ReLU(`reads` · x + `bias`). A row of W1 and b1, a column of W2."""

    reads: Terms
    bias: Fraction
    writes: Terms


@dataclass(frozen=True)
class Head:
    """An attention head of size 1: four vectors over the block's rows (W_Q, W_K, W_V are rows, W_O is a column)."""

    query: Terms
    key: Terms
    value: Terms
    output: Terms


@dataclass(frozen=True)
class Matrices:
    """A block written out in full, in exact rationals: W1 (width, rows), b1, W2 (rows, width), b2, heads (4, rows)."""

    W1: list[list[Fraction]]
    b1: list[Fraction]
    W2: list[list[Fraction]]
    b2: list[Fraction]
    heads: list[tuple[list[Fraction], list[Fraction], list[Fraction], list[Fraction]]]


@dataclass(frozen=True)
class Block:
    """The weights of one transformer block. `rows` name its state; `bias` is b2."""

    rows: tuple[str, ...]
    neurons: tuple[Neuron, ...]
    bias: tuple[Fraction, ...]
    heads: tuple[Head, ...] = ()

    @property
    def width(self) -> int:
        """Hidden units of the feed-forward layer: the paper's q."""
        return len(self.neurons)

    def row(self, name: str) -> int:
        return self.rows.index(name)

    @cached_property
    def largest_weight(self) -> Fraction:
        """The paper's M for this block: the largest absolute value of any weight or bias."""
        every = [abs(value) for value in self.bias]
        for neuron in self.neurons:
            every += [abs(neuron.bias), *(abs(w) for _, w in neuron.reads + neuron.writes)]
        for head in self.heads:
            every += [abs(w) for _, w in head.query + head.key + head.value + head.output]
        return max(every, default=Fraction(0))

    def matrices(self) -> Matrices:
        """W1, b1, W2, b2 and heads with all their zeros: what the definition multiplies."""
        size = len(self.rows)
        written = [written_out(neuron.writes, size) for neuron in self.neurons]  # columns of W2
        return Matrices(
            W1=[written_out(neuron.reads, size) for neuron in self.neurons],
            b1=[neuron.bias for neuron in self.neurons],
            W2=[[column[row] for column in written] for row in range(size)],
            b2=list(self.bias),
            heads=[
                (
                    written_out(head.query, size),
                    written_out(head.key, size),
                    written_out(head.value, size),
                    written_out(head.output, size),
                )
                for head in self.heads
            ],
        )

    def tensors(self) -> dict[str, Tensor]:
        """The same in float64, each weight rounded once: W1, b1, W2, b2; query, key, value, output (heads, rows)."""
        full = self.matrices()
        heads = {
            name: float_tensor([head[i] for head in full.heads], (len(self.heads), len(self.rows)))
            for i, name in enumerate(("query", "key", "value", "output"))
        }
        return {
            "W1": float_tensor(full.W1, (self.width, len(self.rows))),
            "b1": float_tensor(full.b1, (self.width,)),
            "W2": float_tensor(full.W2, (len(self.rows), self.width)),
            "b2": float_tensor(full.b2, (len(self.rows),)),
        } | heads

    def digest(self) -> str:
        """SHA-256 (hex) over every row name and exact weight."""
        parts = ["|".join(self.rows), hex_text(self.bias)]
        parts += [hex_text((n.bias,)) + terms_text(n.reads, n.writes) for n in self.neurons]
        parts += [terms_text(h.query, h.key, h.value, h.output) for h in self.heads]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


class BlockBuilder:
    """Collects rows, neurons, drifts and heads by row name; `build` returns the block.

    Constructions write into one builder, side by side: this is how several lemmas become one feed-forward layer.
    """

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}
        self._neurons: list[Neuron] = []
        self._bias: dict[int, Fraction] = {}
        self._heads: list[Head] = []

    def add_rows(self, *names: str) -> None:
        for name in names:
            if name in self._rows:
                raise SpecError(f"a block's rows need distinct names, '{name}' is there already")
            self._rows[name] = len(self._rows)

    def add_neuron(self, reads: Mapping[str, Weight], bias: Weight, writes: Mapping[str, Weight]) -> None:
        """`writes` · ReLU(`reads` · x + `bias`)."""
        self._neurons.append(Neuron(self._terms(reads), Fraction(bias), self._terms(writes)))

    def add_drift(self, row: str, amount: Weight) -> None:
        """Add `amount` to `row` in every loop (an entry of b2)."""
        index = self._rows[row]
        self._bias[index] = self._bias.get(index, Fraction(0)) + amount

    def add_head(self, query: str, key: str, value: str, output: str, sharpness: Weight = 1) -> None:
        """A head that reads one row each; `sharpness` is its key weight (only soft attention feels it)."""
        unit = {query: Fraction(1)}
        self._heads.append(
            Head(
                self._terms(unit),
                self._terms({key: Fraction(sharpness)}),
                self._terms({value: Fraction(1)}),
                self._terms({output: Fraction(1)}),
            )
        )

    def build(self) -> Block:
        bias = tuple(self._bias.get(index, Fraction(0)) for index in range(len(self._rows)))
        return Block(tuple(self._rows), tuple(self._neurons), bias, tuple(self._heads))

    def _terms(self, weights: Mapping[str, Weight]) -> Terms:
        found = ((self._rows[name], Fraction(weight)) for name, weight in weights.items())
        return tuple(sorted((row, weight) for row, weight in found if weight))


@dataclass(frozen=True)
class Affine:
    """A token-wise affine map: output i is `weights[i]` · x + `bias[i]`."""

    weights: tuple[Terms, ...]
    bias: tuple[Fraction, ...]
    size_in: int

    def digest(self) -> str:
        """SHA-256 (hex) over every exact weight and bias."""
        return hashlib.sha256((hex_text(self.bias) + terms_text(*self.weights)).encode()).hexdigest()

    def tensors(self) -> tuple[Tensor, Tensor]:
        """The matrix (out, in) and the bias (out,) in float64."""
        full = [written_out(terms, self.size_in) for terms in self.weights]
        return float_tensor(full, (len(self.weights), self.size_in)), float_tensor(self.bias, (len(self.bias),))


def enter(
    block: Block, size_in: int, copies: Mapping[str, Mapping[int, Weight]], start: Mapping[str, Weight]
) -> Affine:
    """L1: row `name` starts at `copies[name]` · input + `start[name]`; a row in neither starts at 0."""
    copied = {name: tuple(sorted((i, Fraction(w)) for i, w in terms.items())) for name, terms in copies.items()}
    weights = tuple(copied.get(name, ()) for name in block.rows)
    return Affine(weights, tuple(Fraction(start.get(name, 0)) for name in block.rows), size_in)


def leave(block: Block, outputs: Sequence[tuple[Mapping[str, Weight], Weight]]) -> Affine:
    """L2: output i is `terms` · state + `bias`, for each pair (terms by row name, bias) in `outputs`."""
    weights = tuple(tuple(sorted((block.row(name), Fraction(w)) for name, w in terms.items())) for terms, _ in outputs)
    return Affine(weights, tuple(Fraction(bias) for _, bias in outputs), len(block.rows))


@dataclass(frozen=True, eq=False)
class Clock:
    """η(t) of Theorem 4.2: in loop t the update of `rows[i]` is multiplied by `values[t][i]`; other rows have η = 1.

    values (loops, rows): fractions, or a float64 tensor, which takes a tenth of the memory and is as exact where η is
    made of floats anyway.
    """

    rows: tuple[int, ...]
    values: Sequence[Sequence[Fraction]] | Tensor

    def at(self, t: int) -> list[Fraction]:
        """η(t) on `rows`, exactly."""
        row = self.values[t]
        return [Fraction(v) for v in (row.tolist() if isinstance(row, Tensor) else row)]

    @cached_property
    def tensor(self) -> Tensor:
        """All of η in float64, (loops, rows)."""
        if isinstance(self.values, Tensor):
            return self.values
        return float_tensor(self.values, (len(self.values), len(self.rows)))


@dataclass(frozen=True)
class LoopedNetwork:
    """L2 ∘ TF^loops ∘ L1, with the kind of attention and, for Theorem 4.2, its clock η."""

    block: Block
    first: Affine
    last: Affine
    loops: int
    attention: Attention = "hard"
    clock: Clock | None = None

    def __post_init__(self) -> None:
        if self.clock is not None and len(self.clock.values) < self.loops:
            raise SpecError(f"η must be given for all {self.loops} loops, got {len(self.clock.values)}")

    @property
    def weight_bits(self) -> int:
        """Bits of the longest numerator or denominator in the block or L1: the paper's bit complexity."""
        terms = [term for n in self.block.neurons for term in (*n.reads, *n.writes)]
        terms += [term for row in self.first.weights for term in row]
        weights = [w for _, w in terms] + [n.bias for n in self.block.neurons] + [*self.block.bias, *self.first.bias]
        return max(max(abs(w.numerator).bit_length(), w.denominator.bit_length()) for w in weights)

    def resolve_loops(self, loops: int | None) -> int:
        """`loops`, or all of them when it is None. Raises SpecError for a number that the network cannot run."""
        if loops is None:
            return self.loops
        if not 0 <= loops <= self.loops:
            raise SpecError(f"this network runs 0 to {self.loops} loops, got {loops}; leave it out to run all")
        return loops


def hex_text(values: Sequence[Fraction]) -> str:
    """Exact numbers as text. In hexadecimal: Python refuses to write integers of thousands of digits in decimal."""
    return ",".join(f"{v.numerator:x}/{v.denominator:x}" for v in values) + ";"


def terms_text(*several: Terms) -> str:
    return "".join(",".join(f"{row}:{hex_text((weight,))}" for row, weight in terms) + ";" for terms in several)


def written_out(terms: Terms, size: int) -> list[Fraction]:
    """Sparse terms as a full vector."""
    full = [Fraction(0)] * size
    for index, weight in terms:
        full[index] = weight
    return full


def float_tensor(values: Sequence[Fraction] | Sequence[Sequence[Fraction]], shape: tuple[int, ...]) -> Tensor:
    """Exact numbers as a float64 tensor of `shape`, each rounded once. Raises SpecError beyond float64's range."""
    flat = [v for part in values for v in (part if isinstance(part, Sequence) else (part,))]
    try:
        return torch.tensor([float(v) for v in flat], dtype=torch.float64).reshape(shape)
    except OverflowError:
        raise SpecError(
            "a weight of this block is beyond float64's range (about 1.8e308); run it in exact arithmetic"
        ) from None
