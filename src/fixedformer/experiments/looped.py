"""One recipe a training run of a looped (or standard) transformer: task, switches, schedule, as data."""

import math
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np

from fixedformer.errors import SpecError
from fixedformer.experiments.task_names import CAUSAL, build_task
from fixedformer.loop.looped_spec import LoopedSpec
from fixedformer.loop.low_attention import BLOCK, LONGEST, kept_attention
from fixedformer.loop.transformer import LoopedTransformer
from fixedformer.loop.whole_run import runs_whole
from fixedformer.tasks.finite import FiniteSet, HeldOut, Reserved
from fixedformer.tasks.task import Curriculum, Task, Vectors
from fixedformer.training.fit import Schedule

TAKEN = {"d_in", "d_out", "tokens"}  # switches that the task decides


@dataclass(frozen=True)
class LoopedRecipe:
    """A training run of a `LoopedTransformer`.

    task: a name of experiments/task_names.py, or a .jsonl or .csv file; options: that task's own fields, e.g.
    {"length": 40}. switches: fields of LoopedSpec but for those the task decides; causal is the task's unless given.
    train_size: a training set of so many different sequences instead of fresh ones at every step. Nothing trained on is
    in validation or test. seed: of parameters and data. test_count: sequences of the final test. compiled: by
    torch.compile.
    """

    task: str = "edit-distance"
    options: dict[str, Any] = field(default_factory=dict)
    switches: dict[str, Any] = field(default_factory=dict)
    train_size: int | None = None
    seed: int = 0
    schedule: Schedule = field(default_factory=Schedule)
    test_count: int = 10_000
    compiled: bool = False

    mask = None  # the spec says whether attention is causal

    def __post_init__(self) -> None:
        allowed = {f.name for f in fields(LoopedSpec)} - TAKEN
        if unknown := self.switches.keys() - allowed:
            raise SpecError(f"unknown switches {', '.join(sorted(unknown))}; there are {', '.join(sorted(allowed))}")
        if self.test_count < 1:
            raise SpecError(f"test_count must be at least 1, got {self.test_count}")

    def as_dict(self) -> dict[str, Any]:
        return {"kind": "looped", **asdict(self)}

    @classmethod
    def from_dict(cls, body: dict[str, Any]) -> "LoopedRecipe":
        rest = {name: value for name, value in body.items() if name != "kind"}
        return cls(**{**rest, "schedule": Schedule(**body["schedule"])})

    @cached_property
    def drawn(self) -> tuple[Task, Task]:
        """The task and where its validation and test sequences come from, which may be the same."""
        return build_task(self.task, self.options)

    @cached_property
    def tasks(self) -> tuple[Task, Task]:
        train, held_out = self.drawn
        if self.train_size is None:
            endless = train is held_out and not isinstance(train, Vectors)  # no two draws of numbers are alike
            return (Reserved(train, held_out=False), Reserved(train, held_out=True)) if endless else (train, held_out)
        if isinstance(train, Curriculum) and train.at(0) is not train:
            raise SpecError(f"{self.task} changes as training goes on: it has no set of fixed size (train_size)")
        finite = FiniteSet(train, self.train_size, self.seed)
        return finite, HeldOut(finite, held_out)

    def build_tasks(self) -> tuple[Task, Task]:
        """Where training sequences come from, and where those of validation and test do; none is in both."""
        return self.tasks

    def spec(self) -> LoopedSpec:
        task = self.drawn[0]
        sizes: dict[str, Any] = {"d_in": len(task.vocabulary), "tokens": task.tokens}
        if isinstance(task, Vectors):
            sizes |= {"d_in": task.d_in, "d_out": 1}
        return LoopedSpec(**{"causal": self.task in CAUSAL or "." in self.task, **sizes, **self.switches})

    def build_machine(self) -> None:
        """Nothing is fixed here: every weight is trained."""
        return

    def build_model(self, machine: object = None) -> LoopedTransformer:  # noqa: ARG002
        model = LoopedTransformer(self.spec(), self.seed)
        if self.compiled:
            model.compile_readouts()
        return model

    def activation_bytes(self, device: str = "cpu") -> int:
        """What one training step keeps for its backward pass, about (see `kept_bytes`)."""
        size = 2 if self.schedule.precision == "bfloat16" else 4
        spec = self.spec()
        task = self.drawn[0]  # at its last step, where it is longest
        task = task.at(self.schedule.steps) if isinstance(task, Curriculum) else task
        scored = float(task.sample(8, np.random.default_rng(0)).scored.mean())
        return kept_bytes(spec, self.schedule.batch, spec.tokens, size, device == "cpu", scored)


def kept_bytes(spec: LoopedSpec, batch: int, tokens: int, size: int = 4, cpu: bool = False,
               scored: float = 1.0) -> int:  # fmt: skip
    """Bytes kept for the backward pass, about: `size` bytes an entry inside a layer, 4 in states and read-outs.

    A layer keeps two normed states, queries, keys and values, the mixed values twice (as the attention made them and in
    one piece), the hidden layer before and after its GELU, and, with a clock, its scaled matrices. In bfloat16 on a CPU
    it keeps the attention too, one layer at a time in float32 (low_attention.py), and where all loops are one function
    (whole_run.py) one mixed state, two gradients, and with a clock four states instead of matrices. scored: the share
    of places with a label; read-outs there are held four times: as they come, in one piece, as log-probabilities and as
    their gradient.
    """
    loops = min(spec.loops, spec.backprop_loops or spec.loops)
    rows, width, hidden = batch * tokens, spec.width, spec.hidden
    whole = cpu and runs_whole(spec, tokens, size == 2)
    clocked = spec.timestep in ("adaln", "free")
    attention = held = 0
    if cpu and size == 2 and tokens <= LONGEST:
        attention = batch * spec.heads * kept_attention(tokens, spec.causal)
        held = 4 * batch * spec.heads * tokens * (min(BLOCK, tokens) if spec.causal else tokens)
    if whole:
        states, matrices = (12 if clocked else 8) * width, 0
    else:
        states, matrices = 7 * width + 2 * spec.heads, (4 * width**2 + 2 * width * hidden) * clocked
    layer = size * (rows * (states + 2 * hidden) + matrices + attention)
    state = 4 * rows * width
    inside, between = {
        "none": (loops * spec.layers * layer, 0),
        "loop": (spec.layers * layer, loops * state),
        "nested": (spec.layers * layer, 2 * math.isqrt(max(0, loops - 1)) * state + 2 * state),
    }[spec.checkpointing]
    read = len(spec.loss_loops(spec.loops)) * 4 * rows * scored * (4 * spec.outputs + 2 * width)
    before = layer if loops < spec.loops else 0  # loops without a gradient, one layer at a time
    return int(inside + between + held + read + before)
