"""A program's data flow as a drawing: Graphviz text, or a picture with matplotlib (imported only when it is drawn)."""

from os import PathLike
from pathlib import Path

from fixedformer.prompt.language.expressions import Expr
from fixedformer.prompt.language.program import Program

# What moves information between positions is drawn apart from what happens at one position.
_ATTENTION = {"select", "select_all", "both", "aggregate", "first", "count", "length"}
_INFIX = {"add": "+", "multiply": "*", "and": "&", "or": "|", "both": "&"}


def label(step: Expr) -> str:
    """A few words for one step; constants stand in it, "·" for each argument that has an arrow of its own."""
    if step.op == "constant":
        return str(step.data)
    if step.op == "symbol":
        return repr(step.data)
    if step.op == "lookup":
        return "lookup " + " ".join(f"{name}:{value}" for name, value in step.data)
    args = [label(arg) if _inline(arg) else "·" for arg in step.args]
    if step.op in _INFIX:
        return f" {_INFIX[step.op]} ".join(args)
    if step.op in ("compare", "select"):
        return f"{step.op} {args[0]} {step.data} {args[1]}"
    return f"{step.op}({', '.join(args)})" if any(arg != "·" for arg in args) else step.op


def _inline(step: Expr) -> bool:
    return step.op in ("constant", "symbol")


def drawn(program: Program) -> list[Expr]:
    """The steps that get a node: all but constants, which stand in the labels of what uses them."""
    return [step for step in program.steps if step is program.output or not _inline(step)]


def to_dot(program: Program) -> str:
    """Graphviz text: boxes for attention, ovals for maps, one arrow an argument, the output doubled."""
    steps = drawn(program)
    numbers = {id(step): number for number, step in enumerate(steps)}
    lines = [f'digraph "{program.name}" {{', "  rankdir=LR;"]
    for step in steps:
        shape = "box" if step.op in _ATTENTION else "oval"
        rings = ", peripheries=2" if step is program.output else ""
        text = label(step).replace("\\", "\\\\").replace('"', '\\"')
        lines.append(f'  n{numbers[id(step)]} [shape={shape}, label="{text}\\n{step.type}"{rings}];')
    for step in steps:
        lines += [f"  n{numbers[id(arg)]} -> n{numbers[id(step)]};" for arg in step.args if id(arg) in numbers]
    return "\n".join([*lines, "}", ""])


def levels(program: Program) -> list[list[Expr]]:
    """Steps by their distance from the inputs: the columns of the picture."""
    depth: dict[int, int] = {}
    columns: list[list[Expr]] = []
    for step in drawn(program):
        depth[id(step)] = max((depth[id(arg)] + 1 for arg in step.args if id(arg) in depth), default=0)
        while len(columns) <= depth[id(step)]:
            columns.append([])
        columns[depth[id(step)]].append(step)
    return columns


def draw(program: Program, path: str | PathLike[str]) -> None:
    """Write the picture to `path` (.png, .svg or .pdf)."""
    from matplotlib.figure import Figure

    columns = levels(program)
    place = {id(step): (float(x), (len(column) - 1) / 2 - y) for x, column in enumerate(columns)
             for y, step in enumerate(column)}  # fmt: skip
    tallest = max(len(column) for column in columns)
    figure = Figure(figsize=(1.9 * len(columns), 0.8 * tallest + 0.8), layout="constrained")
    axes = figure.add_subplot()
    for step in drawn(program):
        for arg in step.args:
            if id(arg) not in place:
                continue
            distance = place[id(step)][0] - place[id(arg)][0]  # long arrows pass around what lies between
            arrow = {"arrowstyle": "->", "color": "0.6", "shrinkA": 22, "shrinkB": 22,
                     "connectionstyle": f"arc3,rad={0.0 if distance <= 1 else 0.12}"}  # fmt: skip
            axes.annotate("", place[id(step)], place[id(arg)], arrowprops=arrow, zorder=1)
        color = "#cfe2f3" if step.op in _ATTENTION else "#f3f3f3"
        edge = "black" if step is program.output else "0.5"
        axes.text(*place[id(step)], label(step), ha="center", va="center", fontsize=8,
                  zorder=3, bbox={"boxstyle": "round", "facecolor": color, "edgecolor": edge})  # fmt: skip
    axes.set_xlim(-0.6, len(columns) - 0.4)
    axes.set_ylim(-tallest / 2 - 0.2, tallest / 2 + 0.2)
    axes.set_axis_off()
    axes.set_title(f"{program.name}: {program.description}", fontsize=9)
    figure.savefig(Path(path), dpi=150)
