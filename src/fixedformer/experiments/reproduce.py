"""Run a table row by row, resumably, and write it as CSV and Markdown; say what a row will take before it starts."""

import csv
import io
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

import numpy as np
import torch

from fixedformer.capacity import readable, require_memory
from fixedformer.embedding.sparse import SparseMachine
from fixedformer.experiments.looped import LoopedRecipe
from fixedformer.experiments.recipes import Recipe
from fixedformer.experiments.run import Run
from fixedformer.experiments.tables import Row
from fixedformer.files import load_target
from fixedformer.storage import write_atomic
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


def run_estimate(run: Run) -> Estimate | None:
    """What is ahead of a looped run; None for others. Raises CapacityError as `estimate` does."""
    if run.done or not isinstance(run.recipe, LoopedRecipe):
        return None
    seconds, fixed, activations = _step_cost(run.recipe, run.recipe.task, run.device)
    return Estimate(run.folder.name, seconds * run.recipe.schedule.steps, fixed, activations)


def _step_cost(recipe: Recipe | LoopedRecipe, name: str, device: str) -> tuple[float, int, int | None]:
    """Seconds of one step, bytes of parameters, moments and machine, and bytes of activations."""
    activations = None
    if isinstance(recipe, LoopedRecipe):
        activations = recipe.activation_bytes()
        if device == "cpu":
            remedy = "take a smaller batch, or --checkpointing nested"
            require_memory(activations, f"a training step of {name}", remedy)
        recipe = replace(recipe, train_size=None)  # a large training set need not be drawn to time a step
    machine = recipe.build_machine()
    model = recipe.build_model(machine)
    schedule = replace(recipe.schedule, validation=1)  # the validation set is not part of a step
    trainer = Trainer(model, recipe.build_tasks()[0], schedule, recipe.seed, recipe.mask, device)
    steps = iter(trainer)
    next(steps)
    began = time.perf_counter()
    next(steps)
    seconds = time.perf_counter() - began
    fixed = sum(tensor.nbytes for tensor in machine.tensors().values()) if machine is not None else 0
    return seconds, fixed + 5 * sum(p.nbytes for p in model.parameters()), activations


def runs(
    rows: list[Row], folder: Path, device: str = "cpu", look_only: bool = False, seed: int | None = None
) -> Iterator[tuple[Row, Run]]:
    """Every run of the rows, in order; finished ones train nothing when they are gone through again.

    look_only: only runs that have a folder already, so that looking makes none. seed: only runs of this seed.
    """
    for row in rows:
        for recipe in row.recipes:
            if seed is not None and recipe.seed != seed:
                continue
            place = folder / "runs" / row.name / f"seed-{recipe.seed}"
            if place.exists() or not look_only:
                yield row, Run(recipe, place, device)


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
    """What the finished runs of each row found, as text for a table; rows without a finished run are left out."""
    table = []
    for row in rows:
        finished = [run for _, run in runs([row], folder, look_only=True) if run.done]
        if not finished:
            continue
        done = [run.result() for run in finished]
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
                "compiled": _compiled(finished[0]),
            }
        )
    return table


def _compiled(run: Run) -> str:
    """What compile_run found, for a table."""
    path = run.folder / "compiled.json"
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
        "Accuracies in per cent, on 10,000 fresh sequences a seed; seconds of all seeds.",
        "",
    ]
    lines += ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(row[name] for name in COLUMNS) + " |" for row in table]
    write_atomic(folder / "table.md", ("\n".join(lines) + "\n").encode())
