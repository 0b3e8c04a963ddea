"""`LoopedApproximator`: one transformer block whose loops compute a permutation-equivariant function.

The machine is built from sizes alone; `compile` tabulates a function; `run` and `certify` as in every family. Where the
program lives depends on the variant, and it is said plainly:

bits      Theorem 3.6. The program is in the WEIGHTS: K bits an output coordinate, in the block ("impulse") or in L1
          ("preshift"), and the step sizes in L2. Only the rest of the block is the same for every function.
timestep  Theorem 4.2 behind the same steps 1 and 2. Block, L1 and L2 are fixed; η(t) is the program.
"""

import hashlib
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from fixedformer.certificate import Certificate
from fixedformer.errors import CapacityError, SpecError
from fixedformer.inputs import finite
from fixedformer.loop import composite, extract, memorise
from fixedformer.loop.block import Attention, LoopedNetwork
from fixedformer.loop.context import required_sharpness
from fixedformer.loop.dense import FractionRows, Sequences, Tick, Watch, run_float64, run_rational
from fixedformer.loop.extract import Steps
from fixedformer.loop.grid import Function, Grid, Progress, require_equivariant, tabulate
from fixedformer.loop.memorise import Values
from fixedformer.loop.program import LoopProgram, Variant
from fixedformer.loop.quantise import EDGE, Form
from fixedformer.loop.scaled import run_scaled

Arithmetic = Literal["exact", "float64"]
Engine = Literal["fast", "dense"]
Choice = TypeVar("Choice", bound=str)
FLOAT_BITS: dict[Form, int] = {"slim": 52, "paper": 27}
"""The largest K whose bits float64 holds, whatever the order of its sums. There are K - 1 bits and ε = 2^-K. slim: the
step reads odd integers up to 2^{K+1}, so K + 1 <= 53. paper: W2 adds a fraction of K - 1 bits to two terms of size
2^{K-1} before these cancel, so 2K - 2 <= 53."""
FLOAT_TIMESTEPS = 2**24
"""The largest K of the timestep variant in float64: an impulse late in the run adds numbers up to 16 K² < 2^53."""


@dataclass(frozen=True)
class Trace:
    """The state through the loops: `states` (len(loops), tokens, rows) float64, one for each number in `loops`."""

    rows: tuple[str, ...]
    loops: tuple[int, ...]
    states: Tensor

    def after(self, loops: int, row: str) -> Tensor:
        """One row at every token (tokens,), after that many loops."""
        return self.states[self.loops.index(loops), :, self.rows.index(row)]


class LoopedApproximator:
    """One block, looped n + N + K times, K = 2 n^{d(N+1)}: approximates any permutation-equivariant function.

    d, tokens, resolution: entries a token, tokens a sequence (N), cells a coordinate (n = 1/δ).
    variant: "bits" or "timestep" (above). arithmetic: "exact" (rationals), "float64", or "auto": float64 where it holds
    the bits, else exact.
    form: "paper" (state 17d+9, width <= 49d+25; for timestep, the ratio form), "slim" (ours), or "auto": the paper's
    for bits in exact arithmetic, ours otherwise.
    attention: "hard", or "soft" with key weight `sharpness` (default: `required_sharpness`, enough for every id).
    edge: the ramps' length in cells, ε/δ. value_bound: |values| that the ratio form's fixed weights are built for.

    Raises SpecError and CapacityError for sizes, options or combinations that cannot work, with the reason.
    """

    def __init__(
        self,
        d: int,
        tokens: int,
        resolution: int,
        variant: Variant = "bits",
        arithmetic: Arithmetic | Literal["auto"] = "auto",
        *,
        form: Form | Literal["auto"] = "auto",
        attention: Attention = "hard",
        sharpness: float | None = None,
        edge: float | Fraction = EDGE,
        value_bound: float = 1.0,
    ) -> None:
        self.grid = Grid(d, tokens, resolution)
        self.variant = one_of("variant", variant, ("bits", "timestep"))
        self.attention = one_of("attention", attention, ("hard", "soft"))
        if not 0 < edge < 1:
            raise SpecError(f"edge is the ramps' share of a cell, between 0 and 1, got {edge}")
        if not (np.isfinite(value_bound) and value_bound > 0):
            raise SpecError(f"value_bound must be positive and finite, got {value_bound}")
        if sharpness is not None and not (np.isfinite(sharpness) and sharpness > 0):
            raise SpecError(f"sharpness must be positive and finite, got {sharpness}")
        one_of("arithmetic", arithmetic, ("auto", "exact", "float64"))
        one_of("form", form, ("auto", "paper", "slim"))
        self.arithmetic: Arithmetic = self._choose_arithmetic(arithmetic, form)
        paper = form == "paper" or (form == "auto" and variant == "bits" and self.arithmetic == "exact")
        self.form: Form = "paper" if paper else "slim"
        self.value_bound = Fraction(value_bound)
        # In float64 an impulse would round the fractions away; exactly, both ways work and the paper's is the first.
        self.load: composite.Load = "impulse" if self.arithmetic == "exact" else "preshift"
        self.sharpness = required_sharpness(self.grid) if sharpness is None else float(sharpness)
        self.layout = composite.Layout(
            self.grid,
            self.form,
            Fraction(edge) / resolution,
            attention,
            Fraction(self.sharpness) if attention == "soft" else Fraction(1),
        )

    @property
    def loops(self) -> int:
        """n + N + K."""
        return self.grid.loops

    @property
    def values(self) -> Values:
        """Which of Theorem 4.2's networks the timestep variant uses."""
        return "ratio" if self.form == "paper" else "trapezoid"

    def sizes(self) -> dict[str, int]:
        """State rows, hidden width and heads of the block."""
        return composite.sizes(self._fixed().block)

    def fingerprint(self) -> str:
        """Hex digest of what no function changes.

        timestep: all weights of block, L1 and L2. bits: the block and L1 with the table's entries left at zero, because
        there the program itself sits in the weights (see the module's first lines); L2 holds it too and is not counted.
        """
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        fixed = self._fixed()
        parts = [self.variant, self.attention, self.load, fixed.block.digest(), fixed.first.digest()]
        if self.variant == "timestep":
            parts.append(fixed.last.digest())
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def compile(self, function: Function, progress: Progress | None = None) -> LoopProgram:
        """Tabulate `function`, which maps an array (tokens, d) with entries in [0, 1] to one of the same shape.

        Raises SpecError for a wrong shape, NaN or infinity, and a function that is not permutation-equivariant.
        """
        began = time.perf_counter()
        require_equivariant(function, self.grid)
        table = tabulate(function, self.grid, progress)
        steps, clock = None, None
        if self.variant == "bits":
            steps = extract.encode(table.corners(), self.grid.size)
        else:
            clock = table.filled(self.grid.size)
            if self.values == "ratio":  # refuses values beyond the bound here, not at the first run
                memorise.shift_up([[Fraction(v) for v in row] for row in table.values.tolist()], self.value_bound)
        report: dict[str, Any] = {
            "loops": self.loops,
            "entries": self.grid.size,
            "reached entries": len(table.entries),
            "arithmetic": self.arithmetic,
            **self.sizes(),
            "seconds": time.perf_counter() - began,
        }
        program = LoopProgram(self.grid, self.variant, table, self.fingerprint(), steps, clock, report)
        if self.variant == "bits":
            report["weight bits"] = self.network(program).weight_bits
        return program

    def network(self, program: LoopProgram) -> LoopedNetwork:
        """The whole looped network, weights and all: what `run(engine="dense")` multiplies out."""
        self.require_own(program)
        if program.steps is not None:
            return composite.bits_network(self.layout, program.steps, self.load)
        return composite.timestep_network(self.layout, clock_table(program), self.values, self.value_bound)

    def run(
        self,
        program: LoopProgram,
        X: Any,
        loops: int | None = None,
        engine: Engine = "fast",
        progress: Progress | None = None,
    ) -> Tensor:
        """Outputs (..., tokens, d) for X (..., tokens, d) with entries in [0, 1], float64.

        loops: stop early, after that many of the n + N + K loops. engine: "dense" multiplies out every row in every
        loop (the definition); "fast" runs steps 1 and 2 on all tokens and step 3 once for each contextual id met.
        Exact arithmetic takes X as the exact values of its floats and rounds the outputs once.
        """
        inputs = self._inputs(X)
        flat = inputs.reshape(-1, *inputs.shape[-2:])
        if self.arithmetic == "float64":
            self.require_own(program)
            return self._run_float(program, flat, loops, engine, ticker(progress)).reshape(inputs.shape)
        rows = [[[Fraction(v) for v in token] for token in sequence] for sequence in flat.tolist()]
        out = self.run_exact(program, rows, loops, engine, progress)
        return torch.stack([rounded(sequence) for sequence in out]).reshape(inputs.shape)

    def run_exact(
        self,
        program: LoopProgram,
        X: Sequences,
        loops: int | None = None,
        engine: Engine = "fast",
        progress: Progress | None = None,
    ) -> FractionRows:
        """The same in rationals: X (sequences, tokens, d) of ints or fractions in [0, 1] -> fractions.

        Raises SpecError for an approximator that is not exact, or a shape or value that does not fit.
        """
        self.require_own(program)
        one_of("engine", engine, ("fast", "dense"))
        if self.arithmetic != "exact":
            raise SpecError("this approximator runs in float64; build it with arithmetic='exact' for rational results")
        grid = self.grid
        for sequence in X:
            if len(sequence) != grid.tokens or any(len(token) != grid.d for token in sequence):
                raise SpecError(f"each sequence needs {grid.tokens} tokens of {grid.d} entries")
            if any(not 0 <= v <= 1 for token in sequence for v in token):
                raise SpecError("inputs must lie in [0, 1]; rescale them first")
        rows = self._below_one(X)
        loops = self._resolve_loops(loops)
        if engine == "dense":
            return run_rational(self.network(program), rows, loops, tick=ticker(progress))
        ids = run_scaled(composite.contextual_id_network(self.layout), rows)
        distinct = sorted({token[0] for sequence in ids for token in sequence})
        network = self.value_network(program)
        later = max(0, loops - self.layout.idle)
        runner = run_scaled if network.clock is None else run_rational
        values = dict(zip(distinct, runner(network, [[[k] for k in distinct]], later, tick=ticker(progress))[0]))
        return [[values[token[0]] for token in sequence] for sequence in ids]

    def trace(
        self,
        program: LoopProgram,
        X: Any,
        when: Collection[int] | None = None,
        progress: Progress | None = None,
    ) -> Trace:
        """The state of one sequence X (tokens, d) after the numbers of loops in `when` (all of them when left out).

        The whole network runs, every row in every loop.
        """
        inputs = self._inputs(X)
        if inputs.ndim != 2:
            raise SpecError(f"a trace follows one sequence (tokens, d), got shape {tuple(inputs.shape)}")
        if when is not None and not when:
            raise SpecError("a trace needs at least one number of loops in `when`; leave it out for all of them")
        for loops in when or ():
            self._resolve_loops(loops)
        network, seen = self.network(program), dict[int, Tensor]()
        if self.arithmetic == "float64":
            run_float64(network, inputs, watch=Watch(seen.__setitem__, when), tick=ticker(progress))
        else:
            rows = self._below_one([[[Fraction(v) for v in token] for token in inputs.tolist()]])
            runner = run_scaled if network.clock is None else run_rational
            watch = Watch(lambda t, state: seen.__setitem__(t, rounded(state[0])), when)
            runner(network, rows, watch=watch, tick=ticker(progress))
        return Trace(network.block.rows, tuple(seen), torch.stack(list(seen.values())))

    def certify(
        self,
        program: LoopProgram,
        function: Function,
        inputs: Any = None,
        samples: int = 1000,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> Certificate:
        """Measure the machine against its table, the table against `function`, and the L2 error against the theorem.

        inputs: (..., tokens, d) for the L2 error, `samples` uniform ones when left out. See `certify.certify`.
        """
        from fixedformer.loop.certify import certify  # it needs this class

        self.require_own(program)
        return certify(self, program, function, inputs, samples, seed, progress)

    def _choose_arithmetic(self, wanted: str, form: str) -> Arithmetic:
        """Resolve "auto"; refuse float64 where it cannot hold the numbers and exact where they are irrational."""
        entries = self.grid.size
        if self.attention == "soft" and wanted == "exact":
            raise SpecError("exact arithmetic needs attention='hard': softmax weights are irrational")
        limit = FLOAT_TIMESTEPS if self.variant == "timestep" else FLOAT_BITS["paper" if form == "paper" else "slim"]
        if wanted == "exact" or (wanted == "auto" and entries > limit and self.attention == "hard"):
            return "exact"
        if entries <= limit:
            return "float64"
        what = "two terms of size 16 K²" if self.variant == "timestep" else "a binary fraction of K bits"
        instead = ("arithmetic='exact'" if self.attention == "hard" else "attention='hard' with arithmetic='exact'") + (
            "" if self.variant == "timestep" else " or variant='timestep'"
        )
        raise CapacityError(
            f"float64 holds {what} up to K = {limit} in this form, d={self.grid.d}, tokens={self.grid.tokens}, "
            f"resolution={self.grid.resolution} needs K = {entries}; use {instead}, or a lower resolution"
        )

    def _fixed(self) -> LoopedNetwork:
        """The network of no function at all."""
        if self.variant == "timestep":
            return composite.timestep_block(self.layout, self.values, self.value_bound)
        d, zeros = self.grid.d, (0,) * (self.grid.size - 1)
        blank = Steps((Fraction(0),) * d, (Fraction(0),) * d, (zeros,) * d, (zeros,) * d)
        return composite.bits_network(self.layout, blank, self.load)

    def value_network(self, program: LoopProgram) -> LoopedNetwork:
        """Step 3 alone, k -> values: Lemma 4.1's or Theorem 4.2's network with this program."""
        self.require_own(program)
        if program.steps is not None:
            return extract.value_network(program.steps, self.form)
        return memorise.memory_network(clock_table(program), self.values, self.value_bound)

    def _run_float(
        self, program: LoopProgram, X: Tensor, loops: int | None, engine: Engine, tick: Tick | None
    ) -> Tensor:
        one_of("engine", engine, ("fast", "dense"))
        loops = self._resolve_loops(loops)
        if engine == "dense":
            return run_float64(self.network(program), X, loops, tick=tick)
        ids = run_float64(composite.contextual_id_network(self.layout), X)  # (sequences, tokens, 1)
        distinct, where = torch.unique(ids, return_inverse=True)
        later = max(0, loops - self.layout.idle)
        values = run_float64(self.value_network(program), distinct[None, :, None], later, tick=tick)[0]
        return values[where.squeeze(-1)]

    def _inputs(self, X: Any) -> Tensor:
        """Checked inputs (..., tokens, d), float64; the paper's step 1 takes 1 as the last value below it."""
        N, d = self.grid.tokens, self.grid.d
        inputs = torch.as_tensor(X).detach().cpu()
        if inputs.is_complex() or inputs.dtype == torch.bool:
            raise SpecError(f"inputs are real numbers, got {inputs.dtype}")
        if inputs.ndim < 2 or inputs.shape[-2:] != (N, d):
            raise SpecError(f"inputs must have shape (..., {N}, {d}) for tokens={N}, d={d}, got {tuple(inputs.shape)}")
        if not inputs.numel():
            raise SpecError(f"the input holds no sequence: its shape is {tuple(inputs.shape)}")
        inputs = finite(inputs.to(torch.float64), "the input")
        low, high = float(inputs.min()), float(inputs.max())
        if low < 0 or high > 1:
            raise SpecError(f"inputs must lie in [0, 1], got {low:g}..{high:g}; rescale them first")
        return inputs.clamp(max=1 - float(self.layout.edge)) if self.form == "paper" else inputs

    def _below_one(self, X: Sequences) -> FractionRows:
        """In the paper's form x = 1 lies in no cell (20): take it as 1 - ε, which does."""
        top = 1 - self.layout.edge if self.form == "paper" else Fraction(1)
        return [[[min(Fraction(v), top) for v in token] for token in sequence] for sequence in X]

    def _resolve_loops(self, loops: int | None) -> int:
        if loops is None:
            return self.loops
        if not 0 <= loops <= self.loops:
            raise SpecError(f"this machine runs 0 to {self.loops} loops, got {loops}; leave it out to run all")
        return loops

    def require_own(self, program: LoopProgram) -> None:
        """Raise SpecError for a program that another machine compiled."""
        if program.machine_fingerprint != self.fingerprint():
            raise SpecError(
                f"this program was compiled for another machine (d={program.grid.d}, tokens={program.grid.tokens}, "
                f"resolution={program.grid.resolution}, variant={program.variant}, or other options); compile it again"
            )


def ticker(progress: Progress | None) -> Tick | None:
    """Loop counts as progress."""
    return None if progress is None else lambda done, of: progress("looping", done, of)


def clock_table(program: LoopProgram) -> Tensor:
    assert program.clock is not None  # a timestep program has one
    return torch.from_numpy(program.clock)


def rounded(tokens: Sequence[Sequence[Fraction]]) -> Tensor:
    """Fractions as float64, each rounded once. What is beyond its range becomes infinite: a trace only shows it."""

    def nearest(value: Fraction) -> float:
        try:
            return float(value)
        except OverflowError:
            return float("inf") if value > 0 else float("-inf")

    return torch.tensor([[nearest(v) for v in token] for token in tokens], dtype=torch.float64)


def one_of(name: str, value: Choice, allowed: Sequence[str]) -> Choice:
    if value not in allowed:
        raise SpecError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
    return value
