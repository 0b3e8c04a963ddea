"""loop: looped transformers. `loop approximate` builds one for a function and shows how close it comes."""

import importlib
import json as jsonlib
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from cyclopts import App
from rich.console import Console
from rich.table import Table

from fixedformer.cli.loop_pictures import approximation_picture, drawn_loops, trace_picture
from fixedformer.cli.options import Count, Seed
from fixedformer.errors import CapacityError, SpecError
from fixedformer.loop import Lipschitz, LoopedApproximator, LoopProgram, Trace
from fixedformer.loop.certify import Rate, rates, slope, theorem_slope
from fixedformer.loop.expression import Expression
from fixedformer.loop.files import save_loop_program
from fixedformer.loop.grid import Function
from fixedformer.loop.moduli import ATTRIBUTE
from fixedformer.storage import write_atomic

app = App(name="loop", help="Looped transformers: one block whose loops compute a function.")
QUIET_SECONDS = 2.0
"""Nothing is said on stderr before this, nor more often."""


@app.command
def approximate(
    function: str,
    *,
    d: int = 1,
    tokens: int = 2,
    resolution: int = 8,
    variant: Literal["bits", "timestep"] = "bits",
    arithmetic: Literal["auto", "exact", "float64"] = "auto",
    form: Literal["auto", "paper", "slim"] = "auto",
    attention: Literal["hard", "soft"] = "hard",
    sharpness: float | None = None,
    value_bound: float = 1.0,
    lipschitz: tuple[float, float, float] | None = None,
    samples: Count = 1000,
    seed: Seed = 0,
    out: Path = Path("loop-approximation"),
    json: bool = False,
) -> int:
    """One transformer block, looped, approximates FUNCTION: error against loops, a certificate, two pictures.

    FUNCTION is an expression in the token x, such as `m = mean(tanh(2*x)); 0.5*sin(3*x) + 0.5*m*x`, or module:function
    with a function that maps an array (tokens, d) to another. Exit status: 0 the certificate holds, 1 it does not.

    Args:
        function: expression or module:function.
        d: entries a token.
        tokens: tokens a sequence.
        resolution: cells a coordinate; the table also shows its halves.
        variant: bits (the program is in the weights) or timestep (it is in the loop's clock).
        arithmetic: exact, float64, or auto: float64 where it holds the bits.
        form: paper (its sizes), slim (ours), or auto.
        attention: hard, or soft at the sharpness that makes every id right.
        sharpness: another key weight for soft attention.
        value_bound: largest |value| that the timestep variant's paper form is built for.
        lipschitz: the function's constants for sequence, token and context, which make the bound one that is proved.
        samples: random inputs for the L2 error.
        seed: their seed.
        out: folder for approximation.png, trace.png, certificate.json, program.safetensors.
        json: print table and certificate as JSON.
    """
    target = read_function(function, d, lipschitz)
    if samples < 1:
        raise SpecError(f"samples must be at least 1, got {samples}")
    options: dict[str, Any] = {
        "variant": variant, "arithmetic": arithmetic, "form": form, "attention": attention, "sharpness": sharpness,
        "value_bound": value_bound,
    }  # fmt: skip
    progress = Progress()
    machine = LoopedApproximator(d, tokens, resolution, **options)
    # No work before everything that can be refused has been: the folder too.
    out.mkdir(parents=True, exist_ok=True)
    coarser = [machine_at(n, d, tokens, options) for n in halves(resolution)]
    lines = list(rates(target, [m for m in coarser if m is not None] + [machine], samples, seed, progress))
    program = machine.compile(target, progress)
    certificate = machine.certify(program, target, samples=samples, seed=seed, progress=progress)
    example = torch.rand(tokens, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    trace = machine.trace(program, example, sorted({*moments(machine), *drawn_loops(machine)}), progress)
    if json:
        print(jsonlib.dumps({"rates": [vars(line) for line in lines], "slope": slope_of(lines),
                             "certificate": jsonlib.loads(certificate.to_json())}, indent=2))  # fmt: skip
    else:
        show(lines, machine, example, trace)
        print(f"\n{certificate}")
    write_all(out, target, machine, program, trace, certificate.to_json())
    return 0 if certificate.holds and all(line.within for line in lines) else 1


def read_function(text: str, d: int, constants: tuple[float, float, float] | None) -> Function:
    """The function that the command line names. Raises SpecError for one that cannot be found or parsed."""
    target: Any = imported(text) if is_module(text) else Expression(text, d)
    if constants is not None:
        target = partial(target)  # a function of one's own to write on; the module's is left as it is
        setattr(target, ATTRIBUTE, Lipschitz(*constants))
    return target  # type: ignore[no-any-return]


def is_module(text: str) -> bool:
    """Whether `text` looks like package.module:function."""
    module, colon, name = text.partition(":")
    return bool(colon) and name.isidentifier() and all(part.isidentifier() for part in module.split("."))


def imported(text: str) -> Function:
    module, _, name = text.partition(":")
    # As `python -m` does: a module in the folder that the command is run in is found.
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = getattr(importlib.import_module(module), name)
    except AttributeError:
        raise SpecError(f"module '{module}' has no '{name}'") from None
    except Exception as error:  # whatever a module does when it is imported
        reason = f"{type(error).__name__}: {error}"
        raise SpecError(f"cannot import '{module}' ({reason}); is it installed, or in this folder?") from error
    if not callable(found):
        raise SpecError(f"'{text}' is a {type(found).__name__}, a function is needed")
    return found  # type: ignore[no-any-return]


def halves(resolution: int) -> list[int]:
    """.., n/4, n/2 down to 2, for the table: 8 -> 2, 4."""
    found = []
    while (resolution := resolution // 2) >= 2:
        found.append(resolution)
    return found[::-1]


def machine_at(n: int, d: int, tokens: int, options: dict[str, Any]) -> LoopedApproximator | None:
    """The machine at a lower resolution, or None where that has too few cells for the tokens."""
    try:
        return LoopedApproximator(d, tokens, n, **options)
    except CapacityError:
        return None


class Progress:
    """Says on stderr what is being done, once it has taken more than a moment, and seldom."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def __call__(self, what: str, done: int, of: int) -> None:
        now = time.monotonic()
        if now - self._last >= QUIET_SECONDS:
            self._last = now
            print(f".. {what}: {done} of {of}", file=sys.stderr, flush=True)


def slope_of(lines: Sequence[Rate]) -> float | None:
    """The measured slope of log error over log loops, where there is one."""
    return slope(lines) if len(lines) > 1 and all(line.error > 0 for line in lines) else None


def show(lines: Sequence[Rate], machine: LoopedApproximator, example: torch.Tensor, trace: Trace) -> None:
    """Print the table of error against loops, its slope, and the trace at the loops where something happens."""
    wide = Console(width=max(Console().width, 120), soft_wrap=True)
    grid = machine.grid
    table = Table(title=f"Error against loops: {machine.variant}, d = {grid.d}, {grid.tokens} token(s)")
    names = ("resolution", "table entries", "loops", "state rows", "width", "arithmetic", "L2 error", "bound")
    for name in names:
        table.add_column(name, justify="right")
    for line in lines:
        numbers = (line.resolution, line.entries, line.loops, line.state, line.width, line.arithmetic)
        table.add_row(*map(str, numbers), f"{line.error:.4f}", f"{line.bound:.4f}")
    wide.print(table)
    if lines[0].kind == "sampled":
        print("The bound uses sampled moduli of continuity, lower estimates; --lipschitz declares constants.")
    measured = slope_of(lines)
    if measured is not None:
        print(f"Slope of log error over log loops: {measured:.3f}; the theorem's bound has {theorem_slope(grid):.3f}.")
    print(f"\nState of the first token of X = {[[round(v, 3) for v in row] for row in example.tolist()]}:")
    wide.print(trace_table(machine, trace))


def moments(machine: LoopedApproximator) -> dict[int, str]:
    """Numbers of loops after which something has happened, and what."""
    layout, steps = machine.layout, machine.loops - machine.layout.idle
    found = {0: "start", layout.first_load: "cells known", layout.first_load + 1: "ids loaded"}
    found |= {layout.first_load + 1 + j: f"{j} picked" for j in range(1, machine.grid.tokens)}
    found |= {layout.idle: "table entry k loaded"}
    found |= {layout.idle + steps * j // 4: f"{j}/4 of the table read" for j in (1, 2, 3)}
    return found | {machine.loops: "end"}


def trace_table(machine: LoopedApproximator, trace: Trace) -> Table:
    shown = ("S0", "id", "key", "picked", "s", counter_row(trace), *sum_rows(trace))
    table = Table(title="Trace")
    for name in ("after loops", "", *shown):
        table.add_column(name, justify="right")
    for loops, name in sorted(moments(machine).items()):
        table.add_row(str(loops), name, *(f"{float(trace.after(loops, row)[0]):.6g}" for row in shown))
    return table


def counter_row(trace: Trace) -> str:
    return next(row for row in ("k", "k0", "k0.up") if row in trace.rows)


def sum_rows(trace: Trace) -> list[str]:
    """The rows of dimension 0 that L2 reads."""
    return [row for row in ("sum0", "sum0.up", "sum0.down", "s0") if row in trace.rows]


def write_all(
    out: Path, target: Function, machine: LoopedApproximator, program: LoopProgram, trace: Trace, certificate: str
) -> None:
    write_atomic(out / "approximation.png", approximation_picture(target, machine, program))
    write_atomic(out / "trace.png", trace_picture(machine, trace))
    write_atomic(out / "certificate.json", certificate.encode())
    save_loop_program(machine, program, out / "program.safetensors")
    print(f"wrote approximation.png, certificate.json, program.safetensors, trace.png to {out}", file=sys.stderr)
