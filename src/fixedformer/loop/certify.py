"""Certificates of looped approximators, and the table of error against loops.

Three claims, each with its own yardstick: the machine computes its table (arithmetic), the table is near the function
(Lemma 4.1 or Theorem 4.2), and the L2 error over random inputs is within the theorem (approximation). Reference values
are read from the table here, by index: no block, no loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fixedformer.certificate import Certificate, Check
from fixedformer.loop.grid import Array, Function, Grid, Progress, call
from fixedformer.loop.moduli import Bound, Moduli, moduli, theorem_bound, timestep_bound
from fixedformer.loop.program import LoopProgram

if TYPE_CHECKING:
    from fixedformer.loop.approximator import LoopedApproximator

CELLS = 4096
"""Sequences of cells that a certificate looks at; more than that are sampled."""
FLOAT_TOLERANCE = 1e-12
"""Bits in float64: one product and two sums in L2 over values of order 1; trapezoids are exact."""
RATIO_TOLERANCE = 1e-6
"""The ratio form drifts by a rounding a loop, and its impulse rounds at 2 M K."""
STEP_SLACK = 1e-9
"""Relative slack of measured steps and half-steps, which are computed in float64 here."""


@dataclass(frozen=True)
class CellErrors:
    """Per sequence of cells: the largest |machine - table| and |machine - f| over tokens and dimensions."""

    ids: list[tuple[int, ...]]
    from_table: Array
    from_function: Array
    exhaustive: bool


def certify(
    machine: LoopedApproximator,
    program: LoopProgram,
    function: Function,
    inputs: Any = None,
    samples: int = 1000,
    seed: int = 0,
    progress: Progress | None = None,
) -> Certificate:
    """The certificate of `LoopedApproximator.certify`."""
    found = moduli(function, machine.grid, seed)
    cells = cell_errors(machine, program, function, seed, progress)
    scope = "exhaustive, every sequence of cells" if cells.exhaustive else f"sampled cells, seed {seed}"
    checks = [
        Check(
            "machine = its table, at every cell's corner",
            table_tolerance(machine, program),
            float(cells.from_table.max()),
            len(cells.ids),
            scope,
            "exact arithmetic" if machine.arithmetic == "exact" else "float64 rounding",
        ),
        Check(
            "error per cell, at its corner",
            cell_bound(machine, program),
            float(cells.from_function.max()),
            len(cells.ids),
            scope,
            "Lemma 4.1, halved" if program.steps is not None else "Theorem 4.2",
        ),
    ]
    if program.steps is not None:
        checks.append(step_check(program, found))
    X = random_inputs(machine.grid, samples, seed) if inputs is None else torch.as_tensor(inputs, dtype=torch.float64)
    error, bound = l2_error(machine, program, function, X, progress), bound_of(machine, program, found)
    kind = f"sampled, {'seed ' + str(seed) if inputs is None else 'inputs given'}; {found.scope}"
    count = X.shape[:-2].numel()
    name = "Theorem 3.6" if program.steps is not None else "Theorem 4.2 with ω_f"
    checks.append(Check("L2 error on [0, 1]^(N d)", bound.total, error, count, kind, name))
    return Certificate(
        subject=f"looped approximator, {machine.variant}, d={machine.grid.d}, tokens={machine.grid.tokens}, "
        f"resolution={machine.grid.resolution}, {machine.loops} loops",
        checks=tuple(checks),
        consequences=consequences(bound, found),
        context={
            "fingerprint": program.machine_fingerprint,
            "arithmetic": machine.arithmetic,
            "form": machine.form,
            "attention": machine.attention,
            "seed": seed,
            "sharpness": machine.sharpness if machine.attention == "soft" else None,
            "moduli": found.kind,
            "moduli of continuity": {"sequence": found.sequence, "token": found.token, "context": found.context},
            "bound": dict(bound.terms),
            "worst cell": list(cells.ids[int(cells.from_function.argmax())]),
        },
    )


def consequences(bound: Bound, found: Moduli) -> dict[str, str]:
    terms = ", ".join(f"{name} {value:.3g}" for name, value in bound.terms.items())
    values = f"ω_f {found.sequence:.3g}, ω^tok {found.token:.3g}, ω^cont {found.context:.3g}, {found.kind}"
    if found.kind == "sampled":
        values += ": the bound is a lower estimate of the theorem's; declare Lipschitz constants"
    return {"the bound": terms, "moduli": values}


def table_tolerance(machine: LoopedApproximator, program: LoopProgram) -> float:
    """0 in exact arithmetic; else rounding, relative to the table's largest value."""
    if machine.arithmetic == "exact":
        return 0.0
    ratio = machine.variant == "timestep" and machine.values == "ratio"
    return (RATIO_TOLERANCE if ratio else FLOAT_TOLERANCE) * max(1.0, float(np.abs(program.table.values).max()))


def cell_bound(machine: LoopedApproximator, program: LoopProgram) -> float:
    """Half a step for bits, nothing for timesteps; plus rounding."""
    half = 0.0 if program.steps is None else max(float(step) for step in program.steps.step) / 2
    return half * (1 + STEP_SLACK) + max(table_tolerance(machine, program), 1e-15)


def step_check(program: LoopProgram, found: Moduli) -> Check:
    """Equation (59): neighbouring entries differ by at most ω^tok + ω^cont."""
    assert program.steps is not None  # bits only
    return Check(
        "largest step between table entries",
        (found.token + found.context) * (1 + STEP_SLACK),
        max(float(step) for step in program.steps.step),
        program.grid.size - 1,
        f"exhaustive; {found.scope}",
        "equation (59)",
    )


def bound_of(machine: LoopedApproximator, program: LoopProgram, found: Moduli) -> Bound:
    edge = float(machine.layout.edge)
    if program.steps is not None:
        return theorem_bound(found, machine.grid, edge)
    return timestep_bound(found, machine.grid, edge, float(np.abs(program.table.values).max()))


def table_values(program: LoopProgram, ids: Sequence[int]) -> list[list[Fraction]]:
    """What the machine must answer for a sequence of cells, (tokens, d), read from the program by index."""
    entries = program.grid.entries(ids)
    if program.clock is not None:
        return [[Fraction(v) for v in program.clock[k].tolist()] for k in entries]
    steps = program.steps
    assert steps is not None  # a program has one or the other
    half = Fraction(1, 2)
    return [
        [a + b * (half + sum(up[:k]) - sum(down[:k])) for a, b, up, down in
         zip(steps.start, steps.step, steps.ups, steps.downs)]
        for k in entries
    ]  # fmt: skip


def cell_errors(
    machine: LoopedApproximator,
    program: LoopProgram,
    function: Function,
    seed: int = 0,
    progress: Progress | None = None,
    limit: int = CELLS,
) -> CellErrors:
    """Errors at the corners of all sequences of cells that have entries, or of `limit` random ones among them."""
    grid = machine.grid
    exhaustive = grid.sequences <= limit
    ids = list(islice(grid.sorted_sequences(), limit)) if exhaustive else random_cells(grid, limit, seed)
    answers = at_corners(machine, program, ids, progress)
    from_table, from_function = np.zeros(len(ids)), np.zeros(len(ids))
    for n, (sequence, answer) in enumerate(zip(ids, answers)):
        expected = table_values(program, sequence)
        from_table[n] = max(float(abs(a - b)) for x, y in zip(answer, expected) for a, b in zip(x, y))
        given = np.array([[float(v) for v in token] for token in answer])
        from_function[n] = np.abs(given - call(function, grid.points(sequence))).max()
    return CellErrors(ids, from_table, from_function, exhaustive)


def at_corners(
    machine: LoopedApproximator,
    program: LoopProgram,
    ids: Sequence[Sequence[int]],
    progress: Progress | None = None,
) -> list[list[list[Fraction]]]:
    """The machine's answers at the corners of cells: from exact corners in exact arithmetic, else from rounded ones."""
    if machine.arithmetic == "exact":
        exact = [[machine.grid.corner(z) for z in sequence] for sequence in ids]
        return machine.run_exact(program, exact, progress=progress)
    corners = torch.from_numpy(np.stack([machine.grid.points(sequence) for sequence in ids]))
    answers = machine.run(program, corners, progress=progress).tolist()
    return [[[Fraction(v) for v in token] for token in sequence] for sequence in answers]


def random_cells(grid: Grid, count: int, seed: int) -> list[tuple[int, ...]]:
    random = np.random.default_rng(seed)
    return [
        tuple(sorted((int(z) for z in random.choice(grid.base, grid.tokens, replace=False)), reverse=True))
        for _ in range(count)
    ]


def random_inputs(grid: Grid, samples: int, seed: int) -> Tensor:
    """Uniform inputs (samples, tokens, d)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(samples, grid.tokens, grid.d, generator=generator, dtype=torch.float64)


def l2_error(
    machine: LoopedApproximator, program: LoopProgram, function: Function, X: Tensor, progress: Progress | None = None
) -> float:
    """(mean ‖machine(X) - f(X)‖_2²)^(1/2) over the sequences in X: the Monte Carlo estimate of the L2 norm."""
    flat = X.reshape(-1, *X.shape[-2:])
    answers = machine.run(program, flat, progress=progress).numpy()
    wanted = np.stack([call(function, sequence) for sequence in flat.numpy()])
    return float(np.sqrt(((answers - wanted) ** 2).sum((-2, -1)).mean()))


@dataclass(frozen=True)
class Rate:
    """One line of the table of error against loops."""

    resolution: int
    entries: int
    loops: int
    state: int
    width: int
    arithmetic: str
    error: float
    bound: float
    kind: str

    @property
    def within(self) -> bool:
        return self.error <= self.bound


def rates(
    function: Function,
    machines: Sequence[LoopedApproximator],
    samples: int = 1000,
    seed: int = 0,
    progress: Progress | None = None,
) -> Iterator[Rate]:
    """Compile `function` on each machine in turn and measure; yields a line as soon as it is known."""
    for machine in machines:
        program = machine.compile(function, progress)
        found = moduli(function, machine.grid, seed)
        error = l2_error(machine, program, function, random_inputs(machine.grid, samples, seed), progress)
        sizes = machine.sizes()
        bound = bound_of(machine, program, found).total
        yield Rate(machine.grid.resolution, machine.grid.size, machine.loops, sizes["state"], sizes["width"],
                   machine.arithmetic, error, bound, found.kind)  # fmt: skip


def slope(lines: Sequence[Rate]) -> float:
    """Least-squares slope of log error over log loops. Raises ValueError for fewer than two lines."""
    if len(lines) < 2:
        raise ValueError(f"a slope needs two resolutions or more, got {len(lines)}")
    return float(np.polyfit([np.log(r.loops) for r in lines], [np.log(r.error) for r in lines], 1)[0])


def theorem_slope(grid: Grid, p: float = 2.0) -> float:
    """Slope of the theorem's bound for a Lipschitz function: δ falls like loops^(-1/((N+1)d+1)), and the bound like δ.

    From three tokens on it has the term of tokens that share a cell, δ^{d/p}, which falls more slowly where d < p. (The
    paper has that term for two tokens as well; ours are tabulated.)
    """
    power = min(1.0, grid.d / p) if grid.tokens > 2 else 1.0
    return -power / ((grid.tokens + 1) * grid.d + 1)
