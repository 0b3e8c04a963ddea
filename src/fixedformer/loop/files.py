"""Files of loop programs (kind "loop-program"): what `compile` returned, and the machine's sizes and options."""

from __future__ import annotations

from dataclasses import asdict
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from fixedformer import storage
from fixedformer.errors import FixedformerError, StorageError
from fixedformer.loop.approximator import LoopedApproximator
from fixedformer.loop.extract import Steps
from fixedformer.loop.grid import Table
from fixedformer.loop.program import LoopProgram
from fixedformer.storage import Header, PathLike

KIND = "loop-program"


def save_loop_program(machine: LoopedApproximator, program: LoopProgram, path: PathLike) -> None:
    """Write a program and its machine's sizes, atomically. Raises SpecError for another machine's program."""
    machine.require_own(program)
    tensors = {
        "entries": torch.from_numpy(program.table.entries),
        "values": torch.from_numpy(program.table.values),
    }
    body: dict[str, Any] = {
        "machine": options_of(machine),
        "fingerprint": program.machine_fingerprint,
        "report": dict(program.report),
    }
    if program.steps is not None:
        tensors["ups"] = torch.tensor(program.steps.ups, dtype=torch.uint8)
        tensors["downs"] = torch.tensor(program.steps.downs, dtype=torch.uint8)
        body |= {"start": [str(v) for v in program.steps.start], "step": [str(v) for v in program.steps.step]}
    else:
        tensors["clock"] = torch.from_numpy(np.ascontiguousarray(program.clock))
    storage.write(path, KIND, tensors, body)


def load_loop_program(path: PathLike) -> tuple[LoopedApproximator, LoopProgram]:
    """Read a program and rebuild its machine. Raises StorageError for a damaged, foreign or inconsistent file."""
    machines: list[LoopedApproximator] = []

    def expect(header: Header) -> dict[str, tuple[int, ...]]:
        machine = storage.parse_body(path, lambda: rebuild(header))
        machines.append(machine)
        d, K = machine.grid.d, machine.grid.size
        count = header.shapes.get("entries", (0,))[0]
        shapes: dict[str, tuple[int, ...]] = {"entries": (count,), "values": (count, d)}
        if machine.variant == "bits":
            return shapes | {"ups": (d, K - 1), "downs": (d, K - 1)}
        return shapes | {"clock": (K, d)}

    header, tensors = storage.read(path, KIND, expect)
    machine = machines[0]
    entries, values = tensors["entries"].numpy(), tensors["values"].numpy()
    if entries.dtype != np.int64 or values.dtype != np.float64 or not np.isfinite(values).all():
        raise StorageError(f"{path}: the table must be int64 entries and finite float64 values")
    steps = clock = None
    if machine.variant == "bits":
        steps = storage.parse_body(
            path,
            lambda: Steps(
                tuple(Fraction(v) for v in header.body["start"]),
                tuple(Fraction(v) for v in header.body["step"]),
                *(tuple(tuple(row) for row in tensors[name].tolist()) for name in ("ups", "downs")),
            ),
        )
        if len(steps.start) != machine.grid.d or len(steps.step) != machine.grid.d:
            raise StorageError(f"{path}: start and step must have one entry for each of {machine.grid.d} dimension(s)")
        if any(bit > 1 for rows in (steps.ups, steps.downs) for row in rows for bit in row):
            raise StorageError(f"{path}: ups and downs must be bits; the file was not written by fixedformer")
    else:
        clock = tensors["clock"].numpy()
        if clock.dtype != np.float64 or not np.isfinite(clock).all():
            raise StorageError(f"{path}: the clock must be finite float64 values")
    report = header.body.get("report", {})
    return machine, LoopProgram(
        machine.grid, machine.variant, Table(entries, values), machine.fingerprint(), steps, clock, report
    )


def options_of(machine: LoopedApproximator) -> dict[str, Any]:
    """Everything that the constructor needs to build this machine again."""
    return asdict(machine.grid) | {
        "variant": machine.variant,
        "arithmetic": machine.arithmetic,
        "form": machine.form,
        "attention": machine.attention,
        "sharpness": machine.sharpness,
        "edge": str(machine.layout.edge * machine.grid.resolution),
        "value_bound": float(machine.value_bound),
    }


def rebuild(header: Header) -> LoopedApproximator:
    """The machine that a header describes; its fingerprint must be the one that the header states."""
    given = dict(header.body["machine"])
    try:
        machine = LoopedApproximator(**(given | {"edge": Fraction(given["edge"])}))
    except FixedformerError as error:
        raise ValueError(str(error)) from None
    if machine.fingerprint() != header.body["fingerprint"]:
        raise ValueError("the machine it describes has another fingerprint than it states; compile again")
    return machine
