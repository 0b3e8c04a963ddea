"""Programs on disk, and machines rebuilt from the description that a program carries."""

from dataclasses import asdict
from typing import Any

import torch

from fixedformer import storage
from fixedformer.embedding.dense import RandomMachine
from fixedformer.embedding.machine import Machine
from fixedformer.embedding.program import CompileReport, Program
from fixedformer.embedding.sparse import SparseMachine
from fixedformer.errors import SpecError, StorageError
from fixedformer.files import one_float_type, read_card, read_spec
from fixedformer.storage import Header, PathLike
from fixedformer.target import TargetSpec


def save_program(program: Program, path: PathLike) -> None:
    """Write a program (E, a trained U if there is one, spec, machine description, report, card) atomically."""
    body = {
        "spec": asdict(program.spec),
        "card": asdict(program.card),
        "machine": program.machine,
        "machine_fingerprint": program.machine_fingerprint,
        "report": program.report.as_dict(),
    }
    tensors = {"embedding": program.embedding}
    if program.unembedding is not None:
        tensors["unembedding"] = program.unembedding
    storage.write(path, "program", tensors, body)


def load_program(path: PathLike) -> Program:
    """Read a program. Header and shapes are validated before a tensor is loaded; raises StorageError."""

    def expect(header: Header) -> dict[str, tuple[int, ...]]:
        one_float_type(path, header)
        spec = storage.parse_body(path, lambda: read_spec(header.body["spec"]))
        width = storage.parse_body(path, lambda: int(header.body["machine"]["width"]))
        shapes: dict[str, tuple[int, ...]] = {"embedding": (spec.d_in, width)}
        if "unembedding" in header.shapes:
            shapes["unembedding"] = (width, spec.d_out)
        return shapes

    header, tensors = storage.read(path, "program", expect)
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise StorageError(f"{path}: the {name} holds NaN or infinity; compile or train it again")
    body = header.body
    return storage.parse_body(
        path,
        lambda: Program(
            tensors["embedding"],
            read_spec(body["spec"]),
            dict(body["machine"]),
            str(body["machine_fingerprint"]),
            CompileReport(**body["report"]),
            read_card(body["card"]),
            tensors.get("unembedding"),
        ),
    )


def build_machine(spec: TargetSpec, description: dict[str, Any]) -> Machine:
    """The machine that a program's description names; raises SpecError for one that cannot be rebuilt from words."""
    kind = description.get("kind")
    if kind == "sparse":
        return SparseMachine(spec, looped=description["looped"], width=description["width"])
    if kind == "random":
        return RandomMachine(
            spec,
            seed=description["seed"],
            width=description["width"],
            looped=description["looped"],
            distribution=description["distribution"],
            dtype=getattr(torch, description["dtype"]),
        )
    raise SpecError(
        f"a machine of kind {kind!r} cannot be rebuilt from its description: its weights are your own; build it with "
        "fixedformer.FrozenMachine in Python and run the program there"
    )
