"""Train a small target to answer as a large one does on given data."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fixedformer.attention import Mask
from fixedformer.embedding.reach import Subject
from fixedformer.embedding.states import Data, mask_of
from fixedformer.errors import SpecError
from fixedformer.target import Target, TargetSpec, Weights, forward

CHUNK = 1 << 13  # tokens a forward pass


@dataclass(frozen=True)
class Agreement:
    """How two networks agree on data, and only there: nothing is said of other inputs.

    places: outputs looked at. same: how many have their largest entry at the same index. error: root mean square of the
    outputs' difference, relative to that of the reference.
    """

    sequences: int
    places: int
    same: int
    error: float

    @property
    def share(self) -> float:
        return self.same / self.places

    def __str__(self) -> str:
        return (f"{self.same} of {self.places} outputs on these {self.sequences} sequences have the same largest "
                f"entry, relative error {self.error:.1e}; measured on this data, not proven for other")  # fmt: skip


@dataclass(frozen=True)
class DistilStep:
    """One record of distillation: loss is the mean square error of a batch relative to the reference's mean square."""

    step: int
    steps: int
    loss: float
    seconds: float


def agreement(
    first: Any, second: Any, data: Any, *, where: Any = None, mask: Mask | Literal["card"] = "card"
) -> Agreement:
    """How two of Target, (machine, program) agree on data: outputs at the places that count, `second` the reference.

    data, where, mask: as for `decompile`, the card being the reference's. Raises SpecError where inputs or outputs have
    different widths.
    """
    one, two = Subject.of(first), Subject.of(second)
    if (one.spec.d_in, one.spec.d_out) != (two.spec.d_in, two.spec.d_out):
        raise SpecError(f"inputs and outputs have widths {one.spec.d_in}, {one.spec.d_out} and {two.spec.d_in}, "
                        f"{two.spec.d_out}: nothing can be compared")  # fmt: skip
    return measure(first, second, Data.of(one.spec, data, where, mask_of(mask, two.card), one.start.device))


def measure(first: Any, second: Any, data: Data) -> Agreement:
    """`agreement` on data that were checked already."""
    pair = Subject.of(first), Subject.of(second)
    places = same = 0
    error = size = 0.0
    for X, where in data.chunks(CHUNK):
        outs = (subject.run(X, data.mask).to(torch.float64) for subject in pair)
        mine, wanted = (out[where] if where is not None else out.flatten(0, -2) for out in outs)
        places += len(wanted)
        same += int((mine.argmax(-1) == wanted.argmax(-1)).sum())
        error += float((mine - wanted).square().sum())
        size += float(wanted.square().sum())
    return Agreement(data.sequences, places, same, (error / size) ** 0.5 if size else error**0.5)


def distil(
    student: Target, teacher: Target, data: Data, *, steps: int, rate: float = 1e-3, batch: int = 64, seed: int = 0
) -> Iterator[tuple[DistilStep, Target]]:
    """Adam steps on the mean square error of the outputs at the places that count; cosine decay to zero.

    Yields after every step its record and the student so far (weights shared with the training: keep the last).
    Batches are drawn with `seed`, from one batch of the data at a time, in proportion to its sequences. Raises
    SpecError for fewer than one step.
    """
    if steps < 1:
        raise SpecError(f"steps must be at least 1, got {steps}")
    generator = torch.Generator().manual_seed(seed)
    leaves = {name: t.detach().clone().requires_grad_() for name, t in student.weights.named().items()}
    optimiser = torch.optim.Adam(leaves.values(), lr=rate)
    shares = torch.tensor([float(len(X)) for X, _ in data.batches])
    scale = _mean_square(teacher, data)
    began = time.perf_counter()
    for step in range(steps):
        X, where = data.batches[int(torch.multinomial(shares, 1, generator=generator))]
        rows = torch.randint(len(X), (min(batch, len(X)),), generator=generator).to(X.device)
        X, where = X[rows], None if where is None else where[rows]
        with torch.no_grad():
            wanted = _outputs(teacher.spec, teacher.weights, X, where, data)
        loss = (_outputs(student.spec, Weights(**leaves), X, where, data) - wanted).square().mean() / scale
        for group in optimiser.param_groups:
            group["lr"] = rate * 0.5 * (1 + math.cos(math.pi * step / steps))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        record = DistilStep(step + 1, steps, float(loss.detach()), time.perf_counter() - began)
        yield record, Target(student.spec, **{name: t.detach() for name, t in leaves.items()}, card=student.card)


def _mean_square(teacher: Target, data: Data) -> float:
    """Mean square output of the reference over the data; 1 where it is 0."""
    total, count = 0.0, 0
    with torch.no_grad():
        for X, where in data.chunks(CHUNK):
            out = _outputs(teacher.spec, teacher.weights, X, where, data)
            total, count = total + float(out.square().sum()), count + out.numel()
    return total / count if total else 1.0


def _outputs(spec: TargetSpec, weights: Weights, X: Tensor, where: Tensor | None, data: Data) -> Tensor:
    """Outputs at the places that count: (places, d_out)."""
    typed = X.to(weights.query.dtype) if X.is_floating_point() else X
    out = forward(spec, weights, typed, data.mask)
    return out[where] if where is not None else out.flatten(0, -2)
