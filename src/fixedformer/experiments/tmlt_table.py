"""Finished looped runs -> a table, with the paper's number and the best trivial rule beside ours."""

import csv
import io
import math
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

from fixedformer.experiments.reproduce import finished, kept
from fixedformer.experiments.tables import Row
from fixedformer.storage import write_atomic

COLUMNS = (
    "task", "model", "ours", "spread", "what", "paper", "seeds", "parameters", "steps", "seconds", "train",
    "trivial rules",
)  # fmt: skip


def headline(task: str, result: dict[str, Any]) -> tuple[str, float]:
    """What a task is judged by: its name, and its value in a run's result."""
    measures = result["measures"]
    if task.startswith("sudoku"):
        return "% of grids", 100 * measures["whole grids"]
    if task.startswith("countdown"):
        return "% right answers", 100 * measures["right answers"]
    if task.startswith("trees"):
        return "squared error", measures["squared error"]
    if task.startswith("language"):
        return "perplexity", math.exp(result["loss"])
    return "% right", 100 * result["accuracy"]


def trivial(task: str, result: dict[str, Any]) -> str:
    """The best trivial rule, in the headline's terms where it can be."""
    if task.startswith("trees"):
        rules = {name: value for name, value in result["measures"].items() if name.startswith("squared error, ")}
        rules.pop("squared error, all points", None)
        name = min(rules, key=lambda rule: rules[rule])
        return f"{name.removeprefix('squared error, ')}: {rules[name]:.3f}"
    name, share = max(result["trivial_rules"].items(), key=lambda pair: pair[1])
    places = " of places" if task.startswith(("sudoku", "countdown", "language")) else ""
    return f"{name}: {100 * share:.1f}%{places}"


def collect(rows: list[Row], folder: Path) -> list[dict[str, str]]:
    """One line a row with a finished run, and what `kept` keeps; spread is the standard deviation over seeds."""
    table = []
    for row in rows:
        done = [result for _, result in finished(row, folder)]
        if not done:
            continue
        values = [headline(row.task, result)[1] for result in done]
        digits = 1 if headline(row.task, done[0])[0].startswith("%") else 3
        train = [result["train_accuracy"] for result in done if result.get("train_accuracy") is not None]
        table.append(
            {
                "task": row.task,
                "model": f"{row.machine}, {row.variant}",
                "ours": f"{mean(values):.{digits}f}",
                "spread": f"{pstdev(values):.{digits}f}" if len(values) > 1 else "",
                "what": headline(row.task, done[0])[0],
                "paper": "" if row.paper is None else f"{row.paper:g}",
                "seeds": str(len(done)),
                "parameters": str(done[0]["parameters"]),
                "steps": str(max(r["steps"] for r in done)),
                "seconds": f"{sum(r['seconds'] for r in done):.0f}",
                "train": f"{100 * mean(train):.1f}" if train else "",
                "trivial rules": trivial(row.task, done[0]),
            }
        )
    return kept(table, folder, ("task", "model"), rows)


def write_table(table: list[dict[str, str]], folder: Path, title: str, notes: list[str]) -> None:
    """table.csv and table.md, whole or not at all; notes are lines above the Markdown table."""
    if not table:
        return
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    write_atomic(folder / "table.csv", buffer.getvalue().encode())
    used = [name for name in COLUMNS if any(row[name] for row in table)]
    lines = [f"# {title}", "", *notes, ""]
    lines += ["| " + " | ".join(used) + " |", "|" + "---|" * len(used)]
    lines += ["| " + " | ".join(row[name] for name in used) + " |" for row in table]
    write_atomic(folder / "table.md", ("\n".join(lines) + "\n").encode())
