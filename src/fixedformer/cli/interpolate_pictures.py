"""Pictures of a schedule at work, as PNG and GIF bytes. matplotlib is imported when one is drawn, without a display."""

import io
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

import fixedformer as ff
from fixedformer.schedule.field import Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POINTS = 3000
"""States along the schedule that the picture joins up."""
FRAMES, FRAME_MS = 90, 50
TAIL = 25
"""States behind each token that the animation still shows."""
COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown", "tab:pink", "tab:olive")
Place = tuple[int, int]
"""Sequence and token."""
MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")


def plane(states: Array, ends: Array) -> tuple[Array, Array, tuple[str, str]]:
    """Two coordinates of states (points, sequences, tokens, d) and of ends (2, sequences, tokens, d), with axis names.

    d = 2: as they are. d = 1: the number over the share of the schedule. More: the first two principal components of X
    and Y, so that both ends are seen.
    """
    d = states.shape[-1]
    if d == 1:
        share = np.broadcast_to(np.linspace(0, 1, len(states))[:, None, None, None], states.shape)
        edge = np.broadcast_to(np.array([0.0, 1.0])[:, None, None, None], ends.shape)
        return np.concatenate([share, states], -1), np.concatenate([edge, ends], -1), ("share of the schedule", "token")
    if d == 2:
        return states, ends, ("entry 1", "entry 2")
    rows = ends.reshape(-1, d)
    axes = np.linalg.svd(rows - rows.mean(0), full_matrices=False)[2][:2].T
    return states @ axes, ends @ axes, ("principal component 1 of X and Y", "principal component 2")


def trajectory_picture(machine: ff.FrozenBlocks, schedule: ff.Schedule, X: Tensor, Y: Tensor) -> bytes:
    """Every token's path from X (hollow) to Y (filled): one panel a sequence, one colour a token."""
    from matplotlib.figure import Figure

    states, ends, names = plane(*_states(machine, schedule, X, Y, POINTS))
    count = states.shape[1]
    figure = Figure(figsize=(3.6 * min(count, 4) + 0.6, 3.6 * -(-count // 4) + 0.7), layout="constrained")
    axes = figure.subplots(-(-count // 4), min(count, 4), squeeze=False)
    for panel in axes.flat[count:]:
        panel.set_axis_off()
    for s, axis in zip(range(count), axes.flat):
        for i in range(states.shape[2]):
            colour = COLOURS[i % len(COLOURS)]
            axis.plot(*states[:, s, i].T, color=colour, linewidth=0.5, alpha=0.6)
            axis.plot(*ends[0, s, i], MARKS[0], color=colour, markerfacecolor="white", markersize=7, zorder=3)
            axis.plot(*ends[1, s, i], MARKS[0], color=colour, markersize=7, zorder=3, label=f"token {i + 1}")
        axis.set_title(f"sequence {s + 1}", fontsize=9)
    axes[0, 0].legend(fontsize=7)
    axes[-1, 0].set_xlabel(names[0], fontsize=8)
    axes[0, 0].set_ylabel(names[1], fontsize=8)
    figure.suptitle(_title(schedule), fontsize=9)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()


def animation(machine: ff.FrozenBlocks, schedule: ff.Schedule, X: Tensor, Y: Tensor) -> bytes:
    """The tokens on their way, all sequences in one plane, as a GIF that repeats."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image

    states, ends, names = plane(*_states(machine, schedule, X, Y, 10 * FRAMES))
    both = np.concatenate([states.reshape(-1, 2), ends.reshape(-1, 2)])
    low, high = both.min(0), both.max(0)
    margin = 0.05 * np.maximum(high - low, 1e-9)
    figure = Figure(figsize=(5, 5), dpi=80)
    canvas: Any = FigureCanvasAgg(figure)
    axis = figure.add_axes((0.13, 0.1, 0.84, 0.82))
    axis.set(xlim=(low[0] - margin[0], high[0] + margin[0]), ylim=(low[1] - margin[1], high[1] + margin[1]))
    axis.set_xlabel(names[0], fontsize=8)
    axis.set_ylabel(names[1], fontsize=8)
    tails, dots = _draw_tokens(axis, states, ends)
    images = []
    for now in np.linspace(0, len(states) - 1, FRAMES).astype(int):
        axis.set_title(f"{100 * now // (len(states) - 1)}% of {_title(schedule)}", fontsize=8)
        for (s, i), dot in dots.items():
            tails[s, i].set_data(*states[max(0, now - TAIL) : now + 1, s, i].T)
            dot.set_data(*states[now : now + 1, s, i].T)
        canvas.draw()
        images.append(Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3].copy()))
    buffer = io.BytesIO()
    still = [images[0]] * 8 + images + [images[-1]] * 20
    still[0].save(buffer, format="GIF", save_all=True, append_images=still[1:], duration=FRAME_MS, loop=0)
    return buffer.getvalue()


def _draw_tokens(axis: "Axes", states: Array, ends: Array) -> tuple[dict[Place, Any], dict[Place, Any]]:
    """Targets hollow, tokens filled with a short tail: colour by token, shape by sequence. Returns tails and tokens."""
    tails, dots = {}, {}
    for s in range(states.shape[1]):
        for i in range(states.shape[2]):
            colour, mark = COLOURS[i % len(COLOURS)], MARKS[s % len(MARKS)]
            axis.plot(*ends[1, s, i], mark, color=colour, markerfacecolor="white", markersize=9)
            (tails[s, i],) = axis.plot([], [], color=colour, linewidth=0.8, alpha=0.5)
            (dots[s, i],) = axis.plot([], [], mark, color=colour, markersize=6)
    return tails, dots


def _states(machine: ff.FrozenBlocks, schedule: ff.Schedule, X: Tensor, Y: Tensor, points: int) -> tuple[Array, Array]:
    states = machine.trajectory(schedule, X, points).numpy()
    return states, np.stack([X.double().numpy(), Y.double().numpy()])


def _title(schedule: ff.Schedule) -> str:
    size = f"depth {schedule.depth}" if schedule.mode == "finite" else f"time {schedule.duration:.1f}"
    error = schedule.report.get("error")
    return f"{len(schedule.durations)} segments of two frozen blocks, {size}" + (
        "" if error is None else f", error {error:.0e}"
    )
