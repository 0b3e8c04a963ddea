"""fit: train a module on a task, step by step, so that any step can be the last and the next process goes on from it.

What a step does depends on (schedule, seed, step number, state) alone: the batch of step s is drawn from the generator
seeded (seed, 0, s), the rate is a formula of s, and `Trainer.state()` is the rest. So a run that was killed and resumed
from any state ends, on the same CPU and number of threads, bit for bit as the undisturbed one.
"""

import math
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from fixedformer.errors import DivergedError, SpecError, StorageError
from fixedformer.tasks.task import Array, Curriculum, Examples, Halved, Task

TRAIN, VALIDATE, TEST = range(3)  # streams of random numbers; nothing is chosen by the last


@dataclass(frozen=True)
class Schedule:
    """How long, how fast, and when to stop.

    rate: AdamW's, after `warmup` linear steps; decay: "constant", "linear" or "cosine" to `final_rate` at `steps`
    (linear over all steps, the cosine from the end of the warm-up). betas: AdamW's. clip: gradient norm, 0 for none.
    validate_every: steps between accuracies on `validation` fixed sequences; stop_at: stop once one of them reaches
    this accuracy (None: never). precision: "float32", or "bfloat16" for autocast.
    """

    steps: int = 10_000
    batch: int = 128
    rate: float = 1e-3
    warmup: int = 50
    decay: Literal["constant", "linear", "cosine"] = "constant"
    clip: float = 1.0
    weight_decay: float = 0.01
    validate_every: int = 250
    validation: int = 2000
    stop_at: float | None = None
    precision: Literal["float32", "bfloat16"] = "float32"
    final_rate: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "validate_every", "validation"):
            if getattr(self, name) < 1:
                raise SpecError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.rate > 0 or min(self.warmup, self.clip, self.weight_decay) < 0:
            raise SpecError("rate must be positive, warmup, clip and weight_decay at least 0")
        if self.decay not in ("constant", "linear", "cosine"):
            raise SpecError(f"decay must be constant, linear or cosine, got {self.decay!r}")
        if self.precision not in ("float32", "bfloat16"):
            raise SpecError(f"precision must be float32 or bfloat16, got {self.precision!r}")
        if self.stop_at is not None and not 0 <= self.stop_at <= 1:
            raise SpecError(f"stop_at is an accuracy, 0..1, got {self.stop_at}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise SpecError(f"betas are two numbers in [0, 1), got {self.betas}")
        if not 0 <= self.final_rate <= self.rate:
            raise SpecError(f"final_rate must lie in 0..rate = {self.rate}, got {self.final_rate}")
        object.__setattr__(self, "betas", tuple(self.betas))  # a list where it was read from JSON

    def rate_at(self, step: int) -> float:
        """The learning rate of step 0, 1, .."""
        grown = min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0
        if self.decay == "linear":
            return (self.final_rate + (self.rate - self.final_rate) * (1 - step / self.steps)) * grown
        if self.decay == "cosine":
            gone = max(0, step - self.warmup) / max(1, self.steps - self.warmup)
            return (self.final_rate + (self.rate - self.final_rate) * (1 + math.cos(math.pi * gone)) / 2) * grown
        return self.rate * grown


@dataclass(frozen=True)
class Record:
    """After `step` steps. accuracy (`Examples.accuracy`): on the validation sequences, when this step measured it.
    best: the best so far."""

    step: int
    loss: float
    rate: float
    accuracy: float | None
    best: float
    sequences_per_second: float

    @property
    def measured(self) -> bool:
        return self.accuracy is not None


@runtime_checkable
class ScoredReadouts(Protocol):
    """A model with several read-outs in its loss, computed at scored places only: (read-outs, places, d_out)."""

    def readouts(
        self, X: Tensor, mask: Literal["causal"] | None, *, which: Literal["loss"], scored: Tensor
    ) -> Tensor: ...


@runtime_checkable
class Paced(Protocol):
    """A model whose training depends on the step: told the number before each (0, 1, ..)."""

    def pace(self, step: int) -> None: ...


class Evaluation(NamedTuple):
    """accuracy as in `Examples.accuracy`; loss: mean over scored places, cross-entropy (nats) or squared error;
    predictions (count, tokens): the likeliest label, or the value said, at scored places, and 0 elsewhere."""

    accuracy: float
    loss: float
    predictions: Array


class Trainer:
    """Trains `model` (token ids or vectors, mask -> logits) on `task`; keeps the parameters that validated best.

    The loss is cross-entropy at scored places, or the squared error where labels are values (d_out = 1 then); a model
    with `ScoredReadouts` is judged by the mean over its read-outs. A task with a `Curriculum` is asked at every step.

    for record in trainer: one step each, until the schedule ends or the task is solved. Between records, `state()` is
    everything needed to go on; `load(state)` goes on from there.
    """

    def __init__(
        self, model: nn.Module, task: Task, schedule: Schedule, seed: int, mask: Literal["causal"] | None = "causal",
        device: str = "cpu", held_out: Task | None = None,
    ) -> None:  # fmt: skip
        """held_out: where validation and test sequences come from, when not from the task itself."""
        self.model, self.task, self.schedule, self.seed, self.mask = model.to(device), task, schedule, seed, mask
        self.held_out = held_out or task
        self.device = torch.device(device)
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(), lr=schedule.rate, weight_decay=schedule.weight_decay, betas=schedule.betas,
            fused=True,
        )  # fmt: skip
        self.step, self.best, self.solved = 0, -1.0, False
        self.kept = {name: p.detach().clone() for name, p in self.parameters.items()}
        self._validation = self._draw(VALIDATE, 0, schedule.validation)

    def __iter__(self) -> Iterator[Record]:
        schedule = self.schedule
        with ThreadPoolExecutor(1) as pool:  # the next batch is drawn while this one trains
            upcoming = self._order(pool)
            while self.step < schedule.steps and not self.solved:
                began = time.perf_counter()
                examples, upcoming = upcoming.result(), self._order(pool, ahead=1)
                loss = self._update(examples)
                self.step += 1
                if not math.isfinite(loss):
                    raise DivergedError(
                        f"the loss is {loss} at step {self.step}: training has diverged; take a smaller rate than "
                        f"{schedule.rate:g} (--rate), or a longer warm-up, and another folder"
                    )
                accuracy = None
                if self.step % schedule.validate_every == 0 or self.step == schedule.steps:
                    accuracy = self.accuracy(self._validation)
                    if accuracy > self.best or (self.best <= 0 and accuracy == self.best):  # nothing yet: the latest
                        self.best = accuracy
                        self.kept = {name: p.detach().clone() for name, p in self.parameters.items()}
                    self.solved = schedule.stop_at is not None and accuracy >= schedule.stop_at
                speed = schedule.batch / (time.perf_counter() - began)
                yield Record(self.step, loss, schedule.rate_at(self.step - 1), accuracy, self.best, speed)

    def _order(self, pool: ThreadPoolExecutor, ahead: int = 0) -> "Future[Examples]":
        return pool.submit(self._draw, TRAIN, self.step + ahead, self.schedule.batch)

    def _draw(self, stream: int, step: int, count: int) -> Examples:
        source = self.task if stream == TRAIN else self.held_out
        if stream == TRAIN and isinstance(source, Curriculum):
            source = source.at(step)
        elif stream != TRAIN and isinstance(source, Halved):
            source = source.half(0 if stream == VALIDATE else 1)
        return source.sample(count, np.random.default_rng([self.seed, stream, step]))

    def _update(self, examples: Examples) -> float:
        inputs, labels, scored = (torch.from_numpy(a).to(self.device) for a in (
            examples.inputs, examples.labels, examples.scored
        ))  # fmt: skip
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule.rate_at(self.step)
        self.model.train()
        if isinstance(self.model, Paced):
            self.model.pace(self.step)
        self.optimizer.zero_grad(set_to_none=True)
        with self._autocast():
            if isinstance(self.model, ScoredReadouts):
                told = self.model.readouts(inputs, self.mask, which="loss", scored=scored)
            else:
                told = self._answers(inputs, scored)[None]
        right = labels[scored].expand(told.shape[:2])
        loss = _loss(told.flatten(0, 1), right.flatten())
        loss.backward()
        if self.schedule.clip:
            nn.utils.clip_grad_norm_(self.parameters.values(), self.schedule.clip)
        self.optimizer.step()
        return float(loss.detach())

    def _answers(self, inputs: Tensor, scored: Tensor) -> Tensor:
        """Outputs (places, d_out) at the scored places, by the model's own short way to them where it has one."""
        at = getattr(self.model, "at", None)
        told: Tensor = at(inputs, self.mask, scored) if at else self.model(inputs, self.mask)[scored]
        return told

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.schedule.precision == "bfloat16")

    @torch.no_grad()
    def evaluate(self, examples: Examples, batch: int | None = None) -> Evaluation:
        """Accuracy, loss and predictions, in float32 whatever the training's precision."""
        self.model.eval()
        arrays = (torch.from_numpy(a) for a in (examples.inputs, examples.labels, examples.scored))
        predictions, total = torch.zeros(examples.labels.shape, dtype=torch.from_numpy(examples.labels).dtype), 0.0
        size = batch or min(250, 2 * self.schedule.batch)
        for part, (inputs, labels, scored) in zip(predictions.split(size), zip(*(a.split(size) for a in arrays))):
            out = self._answers(inputs.to(self.device), scored.to(self.device)).float().cpu()
            if len(out):
                total += float(_loss(out, labels[scored])) * len(out)
                part[scored] = out[:, 0] if examples.values else out.argmax(-1)
        told = predictions.numpy()
        return Evaluation(examples.accuracy(told), total / int(examples.scored.sum()), told)

    def accuracy(self, examples: Examples) -> float:
        """Share of scored places that the current parameters get right."""
        return self.evaluate(examples).accuracy

    def use_best(self) -> None:
        """Put the parameters that validated best back into the model."""
        with torch.no_grad():
            for name, p in self.parameters.items():
                p.copy_(self.kept[name])

    def test(self, count: int) -> tuple[float, dict[str, float]]:
        """Accuracy of the current parameters on `count` sequences nothing was chosen by, and the trivial rules'."""
        examples = self.test_examples(count)
        return self.accuracy(examples), self.task.trivial_rules(examples)

    def test_examples(self, count: int) -> Examples:
        """The first `count` sequences of the test stream."""
        return self._draw(TEST, 0, count)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and numbers from which `load` goes on: parameters, the best ones, optimiser moments, the step."""
        tensors = {f"now.{name}": p.detach() for name, p in self.parameters.items()}
        tensors |= {f"best.{name}": p for name, p in self.kept.items()}
        for name, p in self.parameters.items():
            tensors |= {f"adam.{key}.{name}": value for key, value in self.optimizer.state[p].items()}
        return tensors, {"step": self.step, "best": self.best, "solved": self.solved}

    def load(self, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        """Go on from a `state()` of the same model and schedule; StorageError where the names do not fit."""
        moments: dict[str, dict[str, Tensor]] = {name: {} for name in self.parameters}
        for name, value in tensors.items():
            kind, _, rest = name.partition(".")
            if kind == "adam":
                key, _, parameter = rest.partition(".")
                moments.setdefault(parameter, {})[key] = value.to(self.device).clone()  # fused: steps too
        if {f"now.{name}" for name in self.parameters} - tensors.keys() or moments.keys() != self.parameters.keys():
            raise StorageError("the checkpoint's parameters are not this model's; it belongs to another recipe")
        with torch.no_grad():
            for name, p in self.parameters.items():
                p.copy_(tensors[f"now.{name}"])
                self.kept[name] = tensors[f"best.{name}"].to(self.device).clone()
                if moments[name]:
                    self.optimizer.state[p] = moments[name]
        self.step, self.best, self.solved = int(numbers["step"]), float(numbers["best"]), bool(numbers["solved"])


def _loss(told: Tensor, right: Tensor) -> Tensor:
    """Mean over places: told (places, d_out) logits against ids, or (places, 1) values against numbers."""
    if right.is_floating_point():
        return nn.functional.mse_loss(told.float()[:, 0], right)
    return nn.functional.cross_entropy(told.float(), right)
