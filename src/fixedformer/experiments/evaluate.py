"""A trained looped model at other numbers of loops, and what its states know after each loop."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fixedformer.capacity import require_memory
from fixedformer.errors import SpecError
from fixedformer.experiments.looped import LoopedRecipe
from fixedformer.loop.transformer import LoopedTransformer
from fixedformer.tasks.task import Examples, Measured
from fixedformer.training.fit import TEST, Trainer

RIDGE = 1e-3  # of the linear probe, relative to the mean square of the states
PROBED = 2000  # sequences for the linear probe to be fitted on, at most; as many others judge it
PLACES = 20_000  # scored places that are enough for it


@dataclass(frozen=True)
class AtLoops:
    """What a model does with so many loops."""

    loops: int
    accuracy: float
    loss: float
    measures: dict[str, float]


def at_loops(
    model: LoopedTransformer, recipe: LoopedRecipe, loops: Sequence[int], count: int, device: str = "cpu"
) -> list[AtLoops]:
    """The same test sequences with each number of loops; the model's own number is as before afterwards.

    Raises SpecError for a standard model, which has one loop, and for numbers below 1.
    """
    if recipe.spec().loops == 1:
        raise SpecError("a model of one loop (a standard transformer) has no other numbers of loops to compare")
    if min(loops) < 1:
        raise SpecError(f"loops must be at least 1, got {min(loops)}")
    train, held_out = recipe.build_tasks()
    trainer = Trainer(model, train, recipe.schedule, recipe.seed, None, device, held_out)
    examples, before, found = trainer.test_examples(count), model.loops, []
    try:
        for number in loops:
            model.loops = number
            seen = trainer.evaluate(examples)
            measures = held_out.measures(examples, seen.predictions) if isinstance(held_out, Measured) else {}
            found.append(AtLoops(number, seen.accuracy, seen.loss, measures))
    finally:
        model.loops = before
    return found


@dataclass(frozen=True)
class LoopProbe:
    """After each loop 0 .. r (0: before the first): what the model's own read-out gets right there, and what a linear
    read-out does that is fitted to that loop's states alone."""

    loops: tuple[int, ...]
    own: tuple[float, ...]
    linear: tuple[float, ...]


@torch.no_grad()
def probe_loops(
    model: LoopedTransformer, recipe: LoopedRecipe, loops: int | None = None, count: int = PROBED, device: str = "cpu"
) -> LoopProbe:
    """Read the label off the states after every loop, at scored places of held-out sequences.

    The linear read-out is ridge regression, on one-hot labels or on values; it is fitted on `count` sequences (fewer
    where they have about 20,000 scored places) and judged on as many others. CapacityError where states do not fit.
    """
    task = recipe.build_tasks()[1]
    places = max(1, int(task.sample(8, np.random.default_rng(0)).scored.sum(1).max()))
    count = min(count, max(50, PLACES // places))
    needed = 2 * 4 * count * places * recipe.spec().width * ((loops or model.loops) + 1)
    require_memory(needed, "the states after every loop", "probe fewer sequences (--count)")
    halves = [task.sample(count, np.random.default_rng([recipe.seed, TEST, 10 + half])) for half in range(2)]
    fitted, judged = (_states(model.to(device), half, loops) for half in halves)
    labels = [torch.from_numpy(half.labels)[torch.from_numpy(half.scored)] for half in halves]
    own = [_share(model.read(state.to(device)).cpu(), labels[1]) for state in judged]
    linear = [_linear(one, labels[0], two, labels[1]) for one, two in zip(fitted, judged)]
    return LoopProbe(tuple(range(len(judged))), tuple(own), tuple(linear))


def _states(model: LoopedTransformer, examples: Examples, loops: int | None) -> Tensor:
    """States at scored places, (loops + 1, places, width)."""
    scored, parts = torch.from_numpy(examples.scored), []
    for X, place in zip(torch.from_numpy(examples.inputs).split(250), scored.split(250)):
        parts.append(model.states(X.to(model.embed.device), loops=loops)[:, place.to(model.embed.device)].cpu())
    return torch.cat(parts, 1)


def _linear(states: Tensor, labels: Tensor, others: Tensor, truth: Tensor) -> float:
    """Ridge regression from states (places, width) and a constant, judged on other states."""
    values = labels.is_floating_point()
    targets = labels[:, None] if values else torch.nn.functional.one_hot(labels, int(labels.max()) + 1)
    X = torch.cat([states.double(), torch.ones(len(states), 1, dtype=torch.float64)], 1)
    weight = RIDGE * X.square().mean() * len(X) * torch.eye(X.shape[1], dtype=torch.float64)
    solution = torch.linalg.solve(X.mT @ X + weight, X.mT @ targets.double())
    told = torch.cat([others.double(), torch.ones(len(others), 1, dtype=torch.float64)], 1) @ solution
    return _share(told, truth)


def _share(told: Tensor, truth: Tensor) -> float:
    """As Examples.accuracy: share right, or share of the mean square explained."""
    if truth.is_floating_point():
        return float((1 - (told[:, 0] - truth).square().mean() / truth.square().mean()).clamp_min(0))
    return float((told.argmax(-1) == truth).float().mean())


def as_json(rows: list[AtLoops], probe: LoopProbe | None) -> dict[str, Any]:
    """Both as plain data."""
    body: dict[str, Any] = {"loops": [vars(row) for row in rows]}
    if probe is not None:
        body["probe"] = {"loops": probe.loops, "own": probe.own, "linear": probe.linear}
    return body
