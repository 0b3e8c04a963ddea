"""Pictures of a looped approximation, as PNG bytes. matplotlib is imported when one is drawn; no display is needed."""

import io
from typing import TYPE_CHECKING

import numpy as np
import torch

from fixedformer.loop import LoopedApproximator, LoopProgram, Trace
from fixedformer.loop.grid import Array, Function, call

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CURVE, SQUARE = 801, 61
"""Points of a curve, and of each side of a square."""


def approximation_picture(function: Function, machine: LoopedApproximator, program: LoopProgram) -> bytes:
    """Function, approximation and error of the first output entry of the first token.

    One coordinate in all: curves. More: squares over the first two coordinates; the rest stand at fixed values, each in
    a cell of its own.
    """
    from matplotlib.figure import Figure

    flat = machine.grid.tokens * machine.grid.d
    if flat == 1:
        figure = Figure(figsize=(7, 5.5), layout="constrained")
        axes = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
        draw_curves(axes, function, machine, program)
    else:
        figure = Figure(figsize=(13, 4.2), layout="constrained")
        draw_squares(figure, function, machine, program)
    grid = machine.grid
    figure.suptitle(
        f"{machine.variant}, d = {grid.d}, {grid.tokens} token(s), resolution {grid.resolution}: {machine.loops} loops",
        fontsize=10,
    )
    return png(figure)


def draw_curves(axes: "list[Axes]", function: Function, machine: LoopedApproximator, program: LoopProgram) -> None:
    x = np.linspace(0, 1, CURVE)
    truth, got = answers(function, machine, program, x[:, None])
    axes[0].plot(x, truth, label="function")
    axes[0].plot(x, got, label="looped transformer", linewidth=1)
    axes[0].set_ylabel("output")
    axes[0].legend()
    axes[1].plot(x, got - truth, color="tab:red", linewidth=1)
    axes[1].axhline(0, color="gray", linewidth=0.5)
    axes[1].set_ylabel("error")
    axes[1].set_xlabel("x")


def draw_squares(figure: "Figure", function: Function, machine: LoopedApproximator, program: LoopProgram) -> None:
    side = (np.arange(SQUARE) + 0.5) / SQUARE
    rest = machine.grid.tokens * machine.grid.d - 2
    fixed = (np.arange(rest) + 0.5) / max(rest, 1)
    points = np.array([[a, b, *fixed] for b in side for a in side])
    truth, got = (part.reshape(SQUARE, SQUARE) for part in answers(function, machine, program, points))
    low, high = min(truth.min(), got.min()), max(truth.max(), got.max())
    worst = float(np.abs(got - truth).max()) or 1.0
    panels = [
        ("function", truth, "viridis", low, high),
        ("looped transformer", got, "viridis", low, high),
        (f"error, at most {worst:.3g} here", got - truth, "RdBu_r", -worst, worst),
    ]
    for axis, (title, values, colours, bottom, top) in zip(figure.subplots(1, 3), panels):
        image = axis.imshow(values, origin="lower", extent=(0, 1, 0, 1), cmap=colours, vmin=bottom, vmax=top)
        axis.set_title(title, fontsize=9)
        first, second = coordinate_names(machine)
        axis.set_xlabel(first)
        axis.set_ylabel(second)
        figure.colorbar(image, ax=axis, shrink=0.8)


def coordinate_names(machine: LoopedApproximator) -> tuple[str, str]:
    if machine.grid.d == 1:
        return "token 1", "token 2"
    return "token 1, entry 1", "token 1, entry 2"


def answers(
    function: Function, machine: LoopedApproximator, program: LoopProgram, points: Array
) -> tuple[Array, Array]:
    """First output entry of the first token, by the function and by the machine, at points (count, tokens * d)."""
    X = points.reshape(-1, machine.grid.tokens, machine.grid.d)
    truth = np.array([call(function, sequence)[0, 0] for sequence in X])
    return truth, machine.run(program, torch.from_numpy(X)).numpy()[:, 0, 0]


def trace_picture(machine: LoopedApproximator, trace: Trace) -> bytes:
    """Every row of the first token's state against loops, scaled row by row, with the two loads marked."""
    from matplotlib.figure import Figure

    wanted = drawn_loops(machine)
    states = trace.states[[trace.loops.index(loops) for loops in wanted], 0].numpy().T  # (rows, drawn loops)
    # A row that passes float64's range (a counter's square, late in a long run) is drawn at its last finite size.
    finite = np.nan_to_num(states, posinf=np.finfo(np.float64).max, neginf=-np.finfo(np.float64).max)
    size = np.abs(finite).max(1, keepdims=True)
    figure = Figure(figsize=(11, 1.5 + 0.19 * len(states)), layout="constrained")
    axis = figure.subplots()
    image = axis.imshow(
        finite / np.where(size > 0, size, 1), aspect="auto", cmap="RdBu_r", vmin=-1, vmax=1, interpolation="nearest"
    )
    axis.set_yticks(range(len(trace.rows)), labels=[f"{n} ({s:.3g})" for n, s in zip(trace.rows, size[:, 0])])
    axis.tick_params(axis="y", labelsize=6)
    ticks = np.linspace(0, len(wanted) - 1, 12).astype(int)
    axis.set_xticks(ticks, labels=[str(wanted[t]) for t in ticks])
    axis.set_xlabel("loops done (steps 1 and 2 loop by loop, step 3 thinned out)")
    marks = ((machine.layout.first_load, "ids loaded ", "right"), (machine.layout.second_load, " k loaded", "left"))
    for load, name, side in marks:
        axis.axvline(load + 0.5, color="black", linewidth=0.8)
        axis.text(load + 0.5, -0.7, name, fontsize=7, ha=side)
    figure.colorbar(image, ax=axis, shrink=0.6, label="value / the row's largest")
    axis.set_title("State of the first token (row's largest value in brackets)", fontsize=9, pad=14)
    return png(figure)


def drawn_loops(machine: LoopedApproximator) -> list[int]:
    """After which loops the trace is drawn: each of steps 1 and 2, then at most some hundred, evenly spread."""
    idle, last = machine.layout.idle, machine.loops
    later = np.unique(np.linspace(idle + 1, last, min(160, last - idle)).astype(int))
    return [*range(idle + 1), *later.tolist()]


def png(figure: "Figure") -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()
