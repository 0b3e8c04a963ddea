"""Records -> figures, as PNG bytes. matplotlib is imported when a figure is drawn, and no display is needed."""

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from fixedformer.experiments.demo import Demo

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def attention_picture(demo: Demo) -> bytes:
    """Attention of the target, of each machine, and how far they differ, for one string, every layer and head."""
    from matplotlib.figure import Figure

    target, X = demo.target, demo.example
    spec, mask = target.spec, target.card.mask
    truth = target.attention(X, mask)  # (layers, heads, tokens, tokens)
    text = "".join(target.card.vocabulary[i] for i in X.tolist()) if target.card.vocabulary else ""
    panels = [("target", truth, "viridis", (0.0, 1.0))]
    for of in demo.compiled:
        seen = of.machine.attention(of.program, X, mask)
        gap = (seen - truth).abs()
        digits = gap.clamp_min(1e-18).log10()
        panels.append((f"{of.name} machine", seen, "viridis", (0.0, 1.0)))
        panels.append((f"log10 |difference|\nat most {float(gap.max()):.1e}", digits, "magma", (-18.0, -10.0)))
    columns = spec.layers * spec.heads
    figure = Figure(figsize=(1.35 * columns + 1.6, 1.45 * len(panels) + 0.9), layout="constrained")
    axes = figure.subplots(len(panels), columns, squeeze=False)
    for number, (row, (name, values, colours, (low, high))) in enumerate(zip(axes, panels)):
        for place, axis in enumerate(row):
            layer, head = divmod(place, spec.heads)
            image = axis.imshow(values[layer, head].numpy(), cmap=colours, vmin=low, vmax=high)
            axis.set_xticks([])
            axis.set_yticks([])
            if number == 0:
                axis.set_title(f"layer {layer + 1}, head {head + 1}", fontsize=8)
        row[0].set_ylabel(name, fontsize=8)
        figure.colorbar(image, ax=row.tolist(), shrink=0.85, pad=0.01).ax.tick_params(labelsize=6)
    figure.suptitle(f"Who looks at whom in  {text}  (rows: looking, columns: looked at)", fontsize=9)
    return _png(figure)


def bars(table: list[dict[str, str]]) -> bytes:
    """One bar a row of a reproduced table: accuracy in per cent, with the best trivial rule as a line beside it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 0.5 * len(table) + 1.4), layout="constrained")
    axis = figure.subplots()
    for place, row in enumerate(table):
        axis.barh(place, float(row["ours"]), color="tab:blue")
        trivial = float(row["trivial rules"].rsplit(": ", 1)[1])
        axis.plot([trivial, trivial], [place - 0.4, place + 0.4], color="black", linestyle=":")
        axis.text(float(row["ours"]) + 1, place, f"{row['ours']}%, m = {row['width']}", va="center", fontsize=8)
    axis.set_yticks(range(len(table)), [f"{row['task']}, {row['variant']}" for row in table], fontsize=8)
    axis.set_xlim(0, 115)
    axis.set_xlabel("accuracy, per cent (dotted: the best trivial rule)")
    axis.invert_yaxis()
    return _png(figure)


def spectrum_picture(spectra: Sequence[Tensor], title: str = "") -> bytes:
    """Singular values of the Hankel matrix at every cut (`hankel_spectrum`): what width each layer really uses."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axis = figure.subplots()
    for cut, values in enumerate(spectra):
        kept = values[values > 0].tolist()
        name = "before layer 1" if cut == 0 else f"after layer {cut}"
        axis.semilogy(
            range(1, len(kept) + 1), kept, marker="o", markersize=3, linewidth=1, label=f"{name}: {len(kept)}"
        )
    axis.set_xlabel("dimension of the state")
    axis.set_ylabel("singular value of the Hankel matrix")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(visible=True, which="major", linewidth=0.3)
    axis.legend(title="cut: dimensions used", fontsize=8, title_fontsize=8)
    axis.set_title(title, fontsize=9)
    return _png(figure)


def width_bounds(layers: list[int], curves: dict[str, list[int]], title: str) -> bytes:
    """Widths against the number of layers, on a logarithmic axis; names that start with "lower" are dashed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axis = figure.subplots()
    for name, values in curves.items():
        axis.semilogy(layers, values, "--o" if name.startswith("lower") else "-s", label=name, markersize=4)
    axis.set_xticks(layers)
    axis.set_xlabel("layers")
    axis.set_ylabel("width m")
    axis.set_title(title, fontsize=10)
    axis.legend(fontsize=8)
    return _png(figure)


def train_against_test(table: list[dict[str, str]]) -> bytes:
    """One point a row of a looped table: accuracy on the training set and on fresh sequences, in per cent."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 4.6), layout="constrained")
    axis = figure.subplots()
    for row in table:
        x, y = float(row["train"]), float(row["ours"])
        axis.plot(x, y, "s" if "timestep" in row["model"] else "o", label=f"{row['task']}, {row['model']}")
    low, high = axis.get_xlim()
    axis.axline((low, low), (high, high), color="black", linewidth=0.5, linestyle=":")
    axis.set_xlabel("accuracy on the training set, per cent")
    axis.set_ylabel("accuracy on fresh sequences, per cent")
    axis.legend(fontsize=7)
    return _png(figure)


def loops_picture(curves: Mapping[str, tuple[Sequence[int], Sequence[float]]], trained: int, title: str) -> bytes:
    """Named curves over the number of loops (1, 2, ..); a line marks the number that was trained with."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axis = figure.subplots()
    for name, (loops, values) in curves.items():
        axis.plot(loops, values, marker="o", markersize=3, linewidth=1, label=name)
    axis.axvline(trained, color="black", linestyle=":", linewidth=0.8, label=f"trained with {trained} loops")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_xlabel("loops")
    axis.set_ylabel("share right, or explained")
    axis.set_title(title, fontsize=9)
    axis.legend(fontsize=8)
    return _png(figure)


def _png(figure: "Figure") -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()
