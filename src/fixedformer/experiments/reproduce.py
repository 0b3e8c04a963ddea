"""Run a table row by row, resumably, and write it as CSV and Markdown; say what a row will take before it starts."""

import csv
import io
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import numpy as np
import torch

from fixedformer.capacity import readable
from fixedformer.embedding.sparse import SparseMachine
from fixedformer.experiments.recipes import Recipe
from fixedformer.experiments.run import Run
from fixedformer.experiments.tables import Row
from fixedformer.files import load_target
from fixedformer.storage import write_atomic
from fixedformer.training.fit import TEST, Trainer

COMPILED_ON = 10_000  # sequences on which a compiled program's predictions are compared with its target's


@dataclass(frozen=True)
class Estimate:
    """seconds for all seeds of a row on this machine, from one timed step; bytes of parameters, moments and machine."""

    name: str
    seconds: float
    bytes: int

    def __str__(self) -> str:
        return f"{self.name}: about {self.seconds / 60:.0f} minutes, {readable(self.bytes)} and the batch's activations"


def estimate(row: Row, device: str = "cpu") -> Estimate:
    """Build the row's first recipe, time a step after a warm-up step, and multiply."""
    recipe = row.recipes[0]
    machine = recipe.build_machine()
    model = recipe.build_model(machine)
    trainer = Trainer(model, recipe.build_tasks()[0], recipe.schedule, recipe.seed, recipe.mask, device)
    steps = iter(trainer)
    next(steps)
    began = time.perf_counter()
    next(steps)
    seconds = (time.perf_counter() - began) * sum(r.schedule.steps for r in row.recipes)
    fixed = sum(tensor.nbytes for tensor in machine.tensors().values()) if machine is not None else 0
    return Estimate(row.name, seconds, fixed + 5 * sum(p.nbytes for p in model.parameters()))


def runs(rows: list[Row], folder: Path, device: str = "cpu") -> Iterator[tuple[Row, Run]]:
    """Every run of the rows, in order; finished ones yield nothing new when they are gone through again."""
    for row in rows:
        for recipe in row.recipes:
            yield row, Run(recipe, folder / "runs" / row.name / f"seed-{recipe.seed}", device)


def compiled_accuracy(target_file: Path, recipe: Recipe) -> dict[str, float | int]:
    """Compile a trained target onto the sparse machine of its own spec and let both answer the same test sequences."""
    target = load_target(target_file)
    machine = SparseMachine(target.spec)
    program = machine.compile(target)
    task = recipe.build_tasks()[0]
    examples = task.sample(COMPILED_ON, np.random.default_rng([recipe.seed, TEST, 1]))
    same = right = scored = 0
    inputs, labels, places = (torch.from_numpy(a) for a in (examples.inputs, examples.labels, examples.scored))
    for X, label, place in zip(inputs.split(100), labels.split(100), places.split(100)):
        told = machine.run(program, X, recipe.mask).argmax(-1)
        truth = target(X, recipe.mask).argmax(-1)
        same += int((told == truth)[place].sum())
        right += int((told == label)[place].sum())
        scored += int(place.sum())
    return {"width": machine.width, "accuracy": right / scored, "same_as_target": same / scored, "predictions": scored}


COLUMNS = ("task", "variant", "machine", "ours", "paper", "seeds", "steps", "seconds", "width", "trivial rules")


def collect(rows: list[Row], folder: Path) -> list[dict[str, str]]:
    """What the finished runs of each row found, as text for a table; rows without a finished run are left out."""
    table = []
    for row in rows:
        done = [run.result() for _, run in runs([row], folder) if run.done]
        if not done:
            continue
        best = max(done[0]["trivial_rules"].items(), key=lambda pair: pair[1])
        table.append(
            {
                "task": row.task,
                "variant": row.variant,
                "machine": row.machine,
                "ours": f"{100 * mean(r['accuracy'] for r in done):.1f}",
                "paper": "" if row.paper is None else f"{row.paper:.1f}",
                "seeds": str(len(done)),
                "steps": str(max(r["steps"] for r in done)),
                "seconds": f"{sum(r['seconds'] for r in done):.0f}",
                "width": "" if done[0]["width"] is None else str(done[0]["width"]),
                "trivial rules": f"{best[0]}: {100 * best[1]:.1f}",
            }
        )
    return table


def write_tables(table: list[dict[str, str]], folder: Path, title: str) -> None:
    """table.csv and table.md, whole or not at all."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, COLUMNS)
    writer.writeheader()
    writer.writerows(table)
    write_atomic(folder / "table.csv", buffer.getvalue().encode())
    lines = [f"# {title}", "", "Accuracies in per cent, on 10,000 fresh sequences a seed.", ""]
    lines += ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(row[name] for name in COLUMNS) + " |" for row in table]
    write_atomic(folder / "table.md", ("\n".join(lines) + "\n").encode())
