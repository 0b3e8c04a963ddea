"""Run a table row by row, resumably, and write it as CSV and Markdown; say what a row will take before it starts."""

import csv
import io
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch

from fixedformer.capacity import readable, require_memory
from fixedformer.embedding.sparse import SparseMachine
from fixedformer.experiments.looped import LoopedRecipe
from fixedformer.experiments.recipes import Recipe
from fixedformer.experiments.run import Run, read_back, read_recipe
from fixedformer.experiments.tables import Row
from fixedformer.files import load_target
from fixedformer.storage import write_atomic
from fixedformer.tasks.task import Curriculum
from fixedformer.training.fit import TEST, Trainer

COMPILED_ON = 10_000  # sequences on which a compiled program's predictions are compared with its target's


@dataclass(frozen=True)
class Estimate:
    """seconds for all seeds of a row on this machine, from one timed step; bytes of parameters, moments and machine.

    activations: bytes that a step keeps for its backward pass, where the recipe can say; else None.
    """

    name: str
    seconds: float
    bytes: int
    activations: int | None = None

    def __str__(self) -> str:
        kept = "the batch's activations" if self.activations is None else f"{readable(self.activations)} of activations"
        return f"{self.name}: about {self.seconds / 60:.0f} minutes, {readable(self.bytes)} and {kept}"


def estimate(row: Row, device: str = "cpu") -> Estimate:
    """Build the row's first recipe, time a step after a warm-up step, and multiply.

    Raises CapacityError where a CPU's memory does not hold what a step keeps; nothing large has been allocated then.
    """
    recipe = row.recipes[0]
    seconds, fixed, activations = _step_cost(recipe, row.name, device)
    return Estimate(row.name, seconds * sum(r.schedule.steps for r in row.recipes), fixed, activations)


def run_estimate(run: Run, name: str) -> Estimate:
    """What is left of a run, from one timed step. Raises CapacityError as `estimate` does."""
    assert isinstance(run.recipe, Recipe | LoopedRecipe)
    seconds, fixed, activations = _step_cost(run.recipe, name, run.device)
    return Estimate(name, seconds * (run.recipe.schedule.steps - run.steps_done), fixed, activations)


def _step_cost(recipe: Recipe | LoopedRecipe, name: str, device: str) -> tuple[float, int, int | None]:
    """Seconds of one step, bytes of parameters, moments and machine, and bytes of activations."""
    activations = None
    if isinstance(recipe, LoopedRecipe):
        activations = recipe.activation_bytes(device)
        if device == "cpu":
            remedy = "take a smaller batch, or --checkpointing nested"
            require_memory(activations, f"a training step of {name}", remedy)
        if recipe.train_size is not None:  # it need not be drawn to time a step
            recipe = replace(recipe, train_size=None)
    elif recipe.mlp_ramp is not None:  # the first steps would be timed without the MLP: with it, an upper bound
        recipe = replace(recipe, mlp_ramp=None)
    machine = recipe.build_machine()
    model = recipe.build_model(machine)
    # The validation set is not part of a step, and a schedule of one step is timed as well.
    schedule = replace(recipe.schedule, validation=1, steps=max(2, recipe.schedule.steps), stop_at=None)
    task = recipe.build_tasks()[0]
    if isinstance(task, Curriculum):  # its last step: an upper bound
        task = task.at(schedule.steps - 1)
    trainer = Trainer(model, task, schedule, recipe.seed, recipe.mask, device)
    steps = iter(trainer)
    next(steps)
    began = time.perf_counter()
    next(steps)
    seconds = time.perf_counter() - began
    fixed = sum(tensor.nbytes for tensor in machine.tensors().values()) if machine is not None else 0
    return seconds, fixed + 5 * sum(p.nbytes for p in model.parameters()), activations


def place_of(row: Row, recipe: Recipe | LoopedRecipe, folder: Path) -> Path:
    """The folder of one run."""
    return folder / "runs" / row.name / f"seed-{recipe.seed}"


def finished(row: Row, folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Folders and results of a row's finished runs; those of another recipe, as one was before, are left out."""
    found = []
    for recipe in row.recipes:
        place = place_of(row, recipe, folder)
        if not (place / "result.json").exists():
            continue
        result = json.loads((place / "result.json").read_text())
        if read_recipe(place).as_dict() == read_back(recipe).as_dict():
            found.append((place, result))
    return found


def kept(table: list[dict[str, str]], folder: Path, key: tuple[str, ...], order: list[Row]) -> list[dict[str, str]]:
    """The table with those rows of the folder's table.csv that have no finished run there: runs/ may be elsewhere.

    key: the columns that name a row, after the task those of its machine and variant.
    """
    path = folder / "table.csv"
    if not path.exists():
        return table
    with open(path, newline="", encoding="utf-8") as stream:
        before = list(csv.DictReader(stream))
    own = {tuple(line[name] for name in key) for line in table}
    columns = set(table[0]) if table else set()
    table = table + [line for line in before if set(line) >= columns and tuple(line[name] for name in key) not in own]
    places: dict[tuple[str, ...], int] = {}
    for i, row in enumerate(order):
        places |= {(row.task, row.variant, row.machine): i, (row.task, f"{row.machine}, {row.variant}"): i}
    return sorted(table, key=lambda line: places.get(tuple(line[name] for name in key), len(places)))


def compile_run(run: Run) -> None:
    """Compile a finished run's target onto the sparse machine of its own spec and let both answer fresh sequences.

    What was found is kept as compiled.json. Nothing happens for runs that trained no Target, or where it is done.
    """
    source, found = run.folder / "target.safetensors", run.folder / "compiled.json"
    if not source.exists() or found.exists():
        return
    target, recipe = load_target(source), run.recipe
    machine = SparseMachine(target.spec)
    program = machine.compile(target)
    examples = recipe.build_tasks()[1].sample(COMPILED_ON, np.random.default_rng([recipe.seed, TEST, 1]))
    same = right = scored = 0
    inputs, labels, places = (torch.from_numpy(a) for a in (examples.inputs, examples.labels, examples.scored))
    for X, label, place in zip(inputs.split(100), labels.split(100), places.split(100)):
        told = machine.run(program, X, recipe.mask).argmax(-1)[place]
        same += int((told == target(X, recipe.mask).argmax(-1)[place]).sum())
        right += int((told == label[place]).sum())
        scored += int(place.sum())
    body = {"width": machine.width, "right": right, "same_as_target": same, "predictions": scored,
            "sequences": COMPILED_ON, "residual": program.report.residual}  # fmt: skip
    write_atomic(found, json.dumps(body, indent=2).encode())


COLUMNS = (
    "task", "variant", "machine", "ours", "by seed", "paper", "steps", "seconds", "width", "trivial rules", "compiled",
)  # fmt: skip


def collect(rows: list[Row], folder: Path) -> list[dict[str, str]]:
    """What the finished runs of each row found, as text for a table, and what `kept` keeps; other rows are left out."""
    table = []
    for row in rows:
        found = finished(row, folder)
        if not found:
            continue
        done = [result for _, result in found]
        best = max(done[0]["trivial_rules"].items(), key=lambda pair: pair[1])
        table.append(
            {
                "task": row.task,
                "variant": row.variant,
                "machine": row.machine,
                "ours": f"{100 * mean(r['accuracy'] for r in done):.1f}",
                "by seed": ", ".join(f"{100 * r['accuracy']:.2f}" for r in done),
                "paper": "" if row.paper is None else f"{row.paper:.1f}",
                "steps": str(max(r["steps"] for r in done)),
                "seconds": f"{sum(r['seconds'] for r in done):.0f}",
                "width": "" if done[0]["width"] is None else str(done[0]["width"]),
                "trivial rules": f"{best[0]}: {100 * best[1]:.1f}",
                "compiled": _compiled(found[0][0]),
            }
        )
    return kept(table, folder, ("task", "variant", "machine"), rows)


def _compiled(place: Path) -> str:
    """What compile_run found, for a table."""
    path = place / "compiled.json"
    if not path.exists():
        return ""
    found = json.loads(path.read_text())
    share = 100 * found["right"] / found["predictions"]
    return f"{share:.1f} at m = {found['width']}, {found['same_as_target']} of {found['predictions']} as the target"


def write_tables(table: list[dict[str, str]], folder: Path, title: str, note: str) -> None:
    """table.csv and table.md, whole or not at all. note: how and when they were made."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, COLUMNS)
    writer.writeheader()
    writer.writerows(table)
    write_atomic(folder / "table.csv", buffer.getvalue().encode())
    lines = [
        f"# {title}",
        "",
        note,
        "Accuracies in per cent, on 10,000 fresh sequences a seed (compiled: on 10,000 others); seconds of all seeds.",
        "",
    ]
    lines += ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(row[name] for name in COLUMNS) + " |" for row in table]
    write_atomic(folder / "table.md", ("\n".join(lines) + "\n").encode())
