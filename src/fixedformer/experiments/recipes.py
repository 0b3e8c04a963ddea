"""One recipe a training run: everything that decides its result, as data.

`Recipe` is what `fixedformer train` takes as flags and what a run folder records. `paper_recipe` fills in appendix H of
"Fixed Universal Transformers" (tables 5 and 6) where it speaks, and says where it does not.
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from fixedformer.embedding.coordinates import CoordinateProgram
from fixedformer.embedding.dense import RandomMachine
from fixedformer.embedding.machine import Machine
from fixedformer.embedding.rule import Rule
from fixedformer.embedding.sparse import SparseMachine
from fixedformer.embedding.trainable import TrainableProgram
from fixedformer.errors import SpecError
from fixedformer.target import TargetSpec
from fixedformer.tasks.dyck import Dyck
from fixedformer.tasks.khop import KHop
from fixedformer.tasks.own import OwnData
from fixedformer.tasks.task import Task
from fixedformer.training.fit import Schedule
from fixedformer.training.full import TrainableTarget

# (heads, layers, d_head) of the paper's experiments; d_in is the task's vocabulary.
SHAPES = {"dyck": (4, 2, 24), "1-hop": (2, 2, 28), "2-hop": (2, 3, 28), "3-hop": (2, 4, 30), "4-hop": (2, 4, 30)}
TASKS = tuple(SHAPES)
OWN_SHAPE = (2, 2, 16)  # for one's own data, unless told otherwise


@dataclass(frozen=True)
class Recipe:
    """A training run: task, what is trained, how its layers are put together, and the schedule.

    task: dyck, 1-hop .. 4-hop, or a .jsonl or .csv file of one's own (tasks/own.py).
    machine: "sparse" or "random" (E is trained, and U with train_unembedding; everything else is fixed), or "full" (a
    target of hidden width d_model, every weight trained). heads, layers, d_head: None for the paper's. width: the
    machine's; None for the smallest. residual_weights: a machine built for residual targets (else the paper's variant:
    residual connections around weights made for none). norm, final_norm: LayerNorm without scale or shift. mlp_width: a
    frozen random GELU MLP (trained for "full"); mlp_ramp: the steps between which training lets it in, first and last
    (None: it is there from the start). positions: None or "rotary". mask: "causal" or None (the paper states
    neither). seed: of the parameters, the data and the random machine.
    """

    task: str = "dyck"
    machine: Literal["sparse", "random", "full"] = "sparse"
    heads: int | None = None
    layers: int | None = None
    d_head: int | None = None
    d_model: int = 64
    width: int | None = None
    looped: bool = False
    residual: bool = False
    residual_weights: bool = False
    norm: Literal["pre", "post"] | None = None
    final_norm: bool = False
    mlp_width: int = 0
    mlp_ramp: tuple[int, int] | None = None
    positions: Literal["rotary"] | None = None
    mask: Literal["causal"] | None = "causal"
    train_unembedding: bool = False
    deviation: float = 0.02
    everywhere: bool = False
    seed: int = 0
    schedule: Schedule = field(default_factory=Schedule)

    def __post_init__(self) -> None:
        if self.task not in SHAPES and not self.task.endswith((".jsonl", ".csv")):
            raise SpecError(f"task must be one of {', '.join(TASKS)}, or a .jsonl or .csv file, got {self.task!r}")
        if self.machine not in ("sparse", "random", "full"):
            raise SpecError(f"machine must be 'sparse', 'random' or 'full', got {self.machine!r}")
        if self.mlp_ramp is not None:
            object.__setattr__(self, "mlp_ramp", tuple(self.mlp_ramp))  # a list where it was read from JSON
            self._check_ramp()
        if self.residual_weights and not self.residual:
            raise SpecError("residual_weights needs residual")

    def _check_ramp(self) -> None:
        ramp = self.mlp_ramp or ()
        if self.machine == "full":
            raise SpecError("mlp_ramp is for a machine's frozen MLP; a full target trains its own")
        if not (self.residual and self.mlp_width):
            raise SpecError("mlp_ramp needs residual connections and an MLP (mlp_width)")
        if len(ramp) != 2 or not all(isinstance(x, int) for x in ramp) or not 0 <= ramp[0] <= ramp[1]:
            raise SpecError(f"mlp_ramp is two steps, the first not after the last, got {list(ramp)}")
        if ramp[1] >= self.schedule.steps:
            raise SpecError(
                f"mlp_ramp ends at step {ramp[1]}, but training ends at {self.schedule.steps}; leave some for the MLP"
            )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, body: dict[str, Any]) -> "Recipe":
        return cls(**{**body, "schedule": Schedule(**body["schedule"])})

    def build_tasks(self) -> tuple[Task, Task]:
        """Where training sequences come from, and where those of validation and test do."""
        if self.task not in SHAPES:
            return OwnData.read(Path(self.task))
        task: Task = Dyck(everywhere=self.everywhere) if self.task == "dyck" else KHop(int(self.task[0]))
        return task, task

    def spec(self) -> TargetSpec:
        """The class of targets that the machine serves, or that a full target belongs to."""
        heads, layers, d_head = SHAPES.get(self.task, OWN_SHAPE)
        vocabulary = len(self.build_tasks()[0].vocabulary)
        residual = self.residual if self.machine == "full" else self.residual_weights
        return TargetSpec(
            heads=self.heads or heads,
            layers=self.layers or layers,
            d_in=vocabulary,
            d_head=self.d_head or d_head,
            residual=residual,
            positions=self.positions,
        )

    def rule(self) -> Rule:
        return Rule(self.residual, self.norm, self.final_norm, self.mlp_width, self.seed)

    def build_machine(self) -> Machine | None:
        """The fixed machine, float32; None for a full target."""
        if self.machine == "full":
            return None
        if self.machine == "sparse":
            return SparseMachine(self.spec(), self.looped, self.width)
        return RandomMachine(self.spec(), self.seed, self.width, self.looped, dtype=torch.float32)

    def build_model(self, machine: Machine | None) -> nn.Module:
        """What is trained: a TrainableTarget, a TrainableProgram, or, with an MLP, a CoordinateProgram."""
        if machine is None:
            return TrainableTarget(self.spec(), self.d_model, self.seed, self.norm, self.final_norm, self.mlp_width)
        rest = (machine, self.rule(), self.train_unembedding, self.deviation, self.seed)
        if self.mlp_width:
            return CoordinateProgram(*rest, mlp_ramp=self.mlp_ramp)
        return TrainableProgram(*rest)


def paper_recipe(task: str, machine: Literal["sparse", "random", "full"], **changes: Any) -> Recipe:
    """Appendix H: E and U trained from N(0, 0.02^2), AdamW with warm-up, fresh data at every step.

    dyck: rate 1e-3, 50 warm-up steps, 10,000 steps of 1,000. k-hop: rate 1e-4, 1,000 warm-up steps, batch 128, and
    10,000, 15,000, 60,000, 60,000 steps for k = 1..4. Not stated there, ours: constant rate after warm-up, gradient
    clipping at 1, causal mask, no positions, loss at "?" for dyck, and the full target's hidden width.
    """
    if task == "dyck":
        schedule = Schedule(steps=10_000, batch=1000, rate=1e-3, warmup=50)
    else:
        steps = {"2-hop": 15_000, "3-hop": 60_000, "4-hop": 60_000}.get(task, 10_000)
        schedule = Schedule(steps=steps, batch=128, rate=1e-4, warmup=1000)
    heads, _, d_head = SHAPES.get(task, OWN_SHAPE)
    fields: dict[str, Any] = {"train_unembedding": machine != "full", "d_model": heads * d_head, "schedule": schedule}
    return Recipe(task=task, machine=machine, **{**fields, **changes})
