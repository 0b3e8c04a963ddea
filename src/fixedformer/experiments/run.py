"""A training run on disk: a folder that can be killed at any moment and gone on with.

recipe.json          what is run; once there is a checkpoint the folder belongs to one recipe for good
data.sha256          of the file that the task reads, if it reads one: another under its name is refused
checkpoint           the trainer's whole state, written atomically every few steps
metrics.jsonl        one line a logged step; lines beyond the checkpoint are dropped when a run goes on
result.json          test accuracy beside the trivial rules, fingerprints before and after; its presence means: done
program.safetensors, target.safetensors, model.safetensors    what was trained: Program, Target, looped transformer
"""

import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import nn

from fixedformer import storage
from fixedformer.embedding.files import save_program
from fixedformer.embedding.machine import Machine
from fixedformer.embedding.trainable import TrainableProgram
from fixedformer.errors import CertificateError, StorageError
from fixedformer.experiments.looped import LoopedRecipe
from fixedformer.experiments.recipes import Recipe
from fixedformer.files import save_target
from fixedformer.loop.looped_files import save_looped
from fixedformer.loop.transformer import LoopedTransformer
from fixedformer.target import Card
from fixedformer.tasks.finite import FiniteSet
from fixedformer.tasks.task import Measured, Task
from fixedformer.training.fit import TEST, Record, Schedule, Trainer
from fixedformer.training.full import TrainableTarget

LOG_EVERY = 25


class AnyRecipe(Protocol):
    """What a run needs of its recipe: `Recipe` and `LoopedRecipe` have it."""

    @property
    def schedule(self) -> Schedule: ...

    @property
    def seed(self) -> int: ...

    @property
    def mask(self) -> Literal["causal"] | None: ...

    def as_dict(self) -> dict[str, Any]: ...

    def build_tasks(self) -> tuple[Task, Task]: ...

    def build_machine(self) -> Machine | None: ...

    def build_model(self, machine: Any) -> nn.Module: ...


def read_recipe(folder: Path) -> Recipe | LoopedRecipe:
    """The recipe of a run's folder; StorageError where there is none, or it cannot be read."""
    path = folder / "recipe.json"
    if not path.is_file():
        raise StorageError(f"{folder} is not a run's folder: it holds no recipe.json")
    try:
        body = json.loads(path.read_text())
        return LoopedRecipe.from_dict(body) if body.get("kind") == "looped" else Recipe.from_dict(body)
    except (ValueError, TypeError, KeyError) as error:
        raise StorageError(f"{path}: not a recipe of ours ({error})") from None


class Run:
    """`for record in run.go()` trains what is left of the recipe; `run.result()` is the finished run's result.

    checkpoint_seconds: at most this much work is lost to a kill. Raises StorageError where the folder holds another
    recipe's run.
    """

    def __init__(
        self,
        recipe: AnyRecipe,
        folder: Path,
        device: str = "cpu",
        checkpoint_seconds: float = 20.0,
        test_count: int | None = None,
    ) -> None:
        self.recipe, self.folder, self.device = recipe, folder, device
        self.checkpoint_seconds = checkpoint_seconds
        usual: int = getattr(recipe, "test_count", 10_000)
        self.test_count = test_count or usual
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(recipe.as_dict(), indent=2)
        path = folder / "recipe.json"
        begun = self.done or (folder / "checkpoint").exists()  # a recipe that was only tried leaves neither
        if begun and read_recipe(folder).as_dict() != read_back(recipe).as_dict():
            raise StorageError(f"{folder} holds a run of another recipe; name another folder, or remove it")
        if begun:
            same_data(folder, recipe)
        elif (digest := data_digest(recipe)) is not None:
            storage.write_atomic(folder / "data.sha256", f"{digest}\n".encode())
        storage.write_atomic(path, text.encode())

    @property
    def steps_done(self) -> int:
        """Steps up to the checkpoint."""
        path = self.folder / "checkpoint"
        return int(storage.read_header(path).body["step"]) if path.exists() else 0

    @property
    def done(self) -> bool:
        return (self.folder / "result.json").exists()

    def result(self) -> dict[str, Any]:
        """What a finished run found (see `go`)."""
        found: dict[str, Any] = json.loads((self.folder / "result.json").read_text())
        return found

    def go(self) -> Iterator[Record]:
        """Train on from the checkpoint, if there is one; writes checkpoints, metrics and at the end the result."""
        if self.done:
            return
        machine = self.recipe.build_machine()
        before = None if machine is None else machine.fingerprint()
        trainer = self._trainer(machine)
        spent = self._resume(trainer)
        began = saved = time.perf_counter()
        with open(self.folder / "metrics.jsonl", "a", encoding="utf-8") as log:
            for record in trainer:
                if record.measured or record.step % LOG_EVERY == 0:
                    log.write(json.dumps(asdict(record)) + "\n")
                    log.flush()
                now = time.perf_counter()
                if now - saved >= self.checkpoint_seconds:
                    self._save(trainer, spent + now - began)
                    saved = now
                yield record
        seconds = spent + time.perf_counter() - began
        self._save(trainer, seconds)
        self._finish(trainer, machine, before, seconds)

    def _trainer(self, machine: Machine | None) -> Trainer:
        recipe = self.recipe
        model = recipe.build_model(machine)
        task, held_out = recipe.build_tasks()
        return Trainer(model, task, recipe.schedule, recipe.seed, recipe.mask, self.device, held_out)

    def _save(self, trainer: Trainer, seconds: float) -> None:
        tensors, numbers = trainer.state()
        storage.write(self.folder / "checkpoint", "checkpoint", tensors, {**numbers, "seconds": seconds})

    def _resume(self, trainer: Trainer) -> float:
        """Load the checkpoint and cut the metrics back to it; returns the seconds already spent."""
        path = self.folder / "checkpoint"
        if not path.exists():
            (self.folder / "metrics.jsonl").unlink(missing_ok=True)
            return 0.0
        header, tensors = storage.read(path, "checkpoint", lambda header: header.shapes)
        trainer.load(tensors, header.body)
        log = self.folder / "metrics.jsonl"
        if log.exists():
            kept = [line for line in log.read_text().splitlines() if _step(line) <= trainer.step]
            storage.write_atomic(log, "".join(line + "\n" for line in kept).encode())
        return float(header.body["seconds"])

    def _finish(self, trainer: Trainer, machine: Machine | None, before: str | None, seconds: float) -> None:
        after = None if machine is None else machine.fingerprint()
        if before != after:
            raise CertificateError(f"the machine's tensors changed while its program was trained: {before} -> {after}")
        trainer.use_best()
        examples = trainer.test_examples(self.test_count)
        found, trivial = trainer.evaluate(examples), trainer.task.trivial_rules(examples)
        judge = trainer.held_out
        measures = judge.measures(examples, found.predictions) if isinstance(judge, Measured) else {}
        card = Card(trainer.task.vocabulary, self.recipe.mask, f"{trainer.task.name}, trained, seed {self.recipe.seed}")
        model = trainer.model
        if isinstance(model, LoopedTransformer):
            save_looped(model, self.folder / "model.safetensors")
        if isinstance(model, TrainableTarget) and model.plain:
            save_target(model.to_target(card), self.folder / "target.safetensors")
        if isinstance(model, TrainableProgram) and model.rule.plain and machine is not None \
                and model.rule.residual == machine.spec.residual:  # fmt: skip
            save_program(model.to_program(card), self.folder / "program.safetensors")
        result = {
            "accuracy": found.accuracy,
            "train_accuracy": _seen(trainer, self.test_count),
            "loss": found.loss,
            "measures": measures,
            "tested_on": self.test_count,
            "trivial_rules": trivial,
            "best_validation": trainer.best,
            "steps": trainer.step,
            "solved": trainer.solved,
            "seconds": seconds,
            "width": None if machine is None else machine.width,
            "fingerprint_before": before,
            "fingerprint_after": after,
            "parameters": sum(p.numel() for p in trainer.parameters.values()),
            "threads": torch.get_num_threads(),
            "recipe": self.recipe.as_dict(),
        }
        storage.write_atomic(self.folder / "result.json", json.dumps(result, indent=2).encode())


def data_digest(recipe: AnyRecipe) -> str | None:
    """SHA-256 of the file that a recipe's task reads, if it reads one."""
    body = recipe.as_dict()
    task, path = str(body.get("task")), dict(body.get("options", {})).get("path")
    name = task if task.endswith((".jsonl", ".csv")) else path
    if name is None or not Path(name).is_file():
        return None
    with open(name, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def same_data(folder: Path, recipe: AnyRecipe) -> None:
    """StorageError where the file that the recipe names is not the one that the run in `folder` began with."""
    path, now = folder / "data.sha256", data_digest(recipe)
    if path.exists() and now is not None and path.read_text().strip() != now:
        raise StorageError(
            f"the data file of {folder} is no longer the one it was trained on; put that one back (its path is from "
            "where you are), or train anew in another folder"
        )


def read_back(recipe: AnyRecipe) -> Recipe | LoopedRecipe:
    """The recipe as it comes back from JSON, where tuples are lists."""
    body = json.loads(json.dumps(recipe.as_dict()))
    return LoopedRecipe.from_dict(body) if body.get("kind") == "looped" else Recipe.from_dict(body)


def _seen(trainer: Trainer, count: int) -> float | None:
    """Accuracy on sequences of the training set, where there is a finite one."""
    if not isinstance(trainer.task, FiniteSet):
        return None
    return trainer.accuracy(trainer.task.sample(count, np.random.default_rng([trainer.seed, TEST, 2])))


def _step(line: str) -> int:
    """The step of a metrics line; a line cut off by a kill counts as beyond any checkpoint."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return 1 << 62
