"""The main job on real input: a trained transformer, compiled onto two fixed machines, beside them on fresh strings."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.resources import as_file, files
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fixedformer.certificate import Certificate, peak
from fixedformer.embedding.dense import RandomMachine
from fixedformer.embedding.machine import Machine
from fixedformer.embedding.program import Program
from fixedformer.embedding.sparse import SparseMachine
from fixedformer.files import load_target
from fixedformer.target import Target, forward
from fixedformer.tasks.dyck import Dyck
from fixedformer.tasks.task import Examples

CHUNK = 100  # strings at once: 100 x 2 layers x 4 heads x 62 x 62 attention entries are 25 MB
CERTIFIED = 64  # strings that the certificates look at; the strings' table looks at all

Evaluate = Callable[[Tensor, Callable[[Tensor], None]], Tensor]


@dataclass(frozen=True)
class Row:
    """One evaluator on all strings. bytes: of the part that was made for this target (all weights, or E).

    attention, output: largest absolute difference from the target; agree: strings answered as the target does.
    """

    name: str
    width: int
    bytes: int
    compile_seconds: float | None
    run_seconds: float
    accuracy: float
    agree: int
    attention: float
    output: float
    condition: float | None


class Compiled(NamedTuple):
    name: str
    machine: Machine
    program: Program
    certificate: Certificate


@dataclass(frozen=True)
class Demo:
    """rows: target first. strings: how many. example: token ids of one balanced string, for a picture."""

    target: Target
    compiled: tuple[Compiled, ...]
    rows: tuple[Row, ...]
    strings: int
    seed: int
    trivial: dict[str, float]
    example: Tensor


def shipped_target() -> Target:
    """The trained parenthesis-balancing target that comes with the package (tools/train_demo_target.py), in float64."""
    with as_file(files("fixedformer").joinpath("data", "dyck.safetensors")) as path:
        return load_target(path).to(torch.float64)


def demo(strings: int = 1000, seed: int = 0, say: Callable[[str], None] = lambda _: None) -> Demo:
    """Compile the shipped target onto the sparse and a random machine, run all three on fresh strings, certify both.

    The strings are drawn from (seed, 1_000_000): a stream that training and selection never saw. `say` is told each
    step as it begins.
    """
    target, task = shipped_target(), Dyck()
    examples = task.sample(strings, np.random.default_rng([seed, 1_000_000]))
    inputs = torch.from_numpy(examples.inputs)
    compiled = []
    for name, machine in (("sparse", SparseMachine(target.spec)), ("random", RandomMachine(target.spec, seed))):
        say(f"compiling the target onto the {name} machine")
        program = machine.compile(target)
        say(f"certifying the program of the {name} machine")
        certificate = machine.certify(program, target, inputs[:CERTIFIED], target.card.mask, seed)
        compiled.append(Compiled(name, machine, program, certificate))
    say(f"running the target and {len(compiled)} machines on {strings} fresh strings")
    rows = _compare(target, tuple(compiled), examples)
    balanced = np.flatnonzero((examples.inputs[:, 16] == 3) & (examples.labels[:, 16] == 2))
    chosen = inputs[balanced[0] if balanced.size else 0]
    example = chosen[: int((chosen == 3).int().argmax()) + 1]
    return Demo(target, tuple(compiled), rows, strings, seed, task.trivial_rules(examples), example)


def _compare(target: Target, compiled: tuple[Compiled, ...], examples: Examples) -> tuple[Row, ...]:
    """Run everything chunk by chunk, so that all attention matrices can be compared without being kept."""
    mask = target.card.mask

    def truth(X: Tensor, watch: Callable[[Tensor], None]) -> Tensor:
        return forward(target.spec, target.weights, X, mask, watch)

    def machine(of: Compiled, X: Tensor, watch: Callable[[Tensor], None]) -> Tensor:
        return of.machine.evaluate(of.program, X, mask, "path", watch)

    runs: list[Evaluate] = [truth, *(partial(machine, of) for of in compiled)]
    seconds, attention, output = ([0.0] * len(runs) for _ in range(3))
    answers: list[list[Tensor]] = [[] for _ in runs]
    scored = torch.from_numpy(examples.scored)
    for X, place in zip(torch.from_numpy(examples.inputs).split(CHUNK), scored.split(CHUNK)):
        outs, seens = [], []
        for i, evaluate in enumerate(runs):
            seen: list[Tensor] = []
            began = time.perf_counter()
            outs.append(evaluate(X, seen.append))
            seconds[i] += time.perf_counter() - began
            seens.append(seen)
            answers[i].append(outs[i][place].argmax(-1))
            attention[i] = peak(attention[i], *(float((a - b).abs().max()) for a, b in zip(seen, seens[0])))
            output[i] = peak(output[i], float((outs[i] - outs[0]).abs().max()))
    told = [torch.cat(parts).numpy() for parts in answers]
    labels = examples.labels[examples.scored]
    weights = sum(tensor.nbytes for tensor in target.weights.named().values())
    rows = []
    for i, of in enumerate([None, *compiled]):
        report = of.program.report if of else None
        rows.append(
            Row(
                name=f"{of.name} machine" if of else "target (trained)",
                width=report.width if report else target.weights.d_model,
                bytes=report.bytes if report else weights,
                compile_seconds=report.seconds if report else None,
                run_seconds=seconds[i],
                accuracy=float((told[i] == labels).mean()),
                agree=int((told[i] == told[0]).sum()),
                attention=attention[i],
                output=output[i],
                condition=report.condition if report else None,
            )
        )
    return tuple(rows)
