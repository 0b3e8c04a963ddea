"""Targets with real blocks and their programs on disk, and machines rebuilt from what a program says of its own."""

from dataclasses import asdict
from typing import Any

import torch

from fixedformer import storage
from fixedformer.embedding.blocks.dense import RandomBlockMachine
from fixedformer.embedding.blocks.layout import Layout
from fixedformer.embedding.blocks.machine import BlockMachine
from fixedformer.embedding.blocks.program import BlockProgram, BlockReport
from fixedformer.embedding.blocks.sparse import SparseBlockMachine
from fixedformer.embedding.blocks.spec import BlockSpec
from fixedformer.embedding.blocks.target import BlockTarget, weight_shapes
from fixedformer.errors import SpecError, StorageError
from fixedformer.files import one_float_type, read_card
from fixedformer.storage import Header, PathLike


def save_block_target(target: BlockTarget, path: PathLike) -> None:
    """Write a target (weights, spec, card) atomically; raises StorageError where the place is not writable."""
    body = {"spec": asdict(target.spec), "card": asdict(target.card), "d_model": target.d_model}
    body["d_value"] = target.weights["value"].shape[3]
    storage.write(path, "block target", target.weights, body)


def load_block_target(path: PathLike) -> BlockTarget:
    """Read a target. Header and shapes are validated before a tensor is loaded; raises StorageError."""

    def expect(header: Header) -> dict[str, tuple[int, ...]]:
        def shapes() -> dict[str, tuple[int, ...]]:
            d_model, d_value = int(header.body["d_model"]), int(header.body["d_value"])
            return weight_shapes(BlockSpec(**header.body["spec"]), d_model, d_value)

        one_float_type(path, header)
        return storage.parse_body(path, shapes)

    header, tensors = storage.read(path, "block target", expect)
    return storage.parse_body(
        path, lambda: BlockTarget(BlockSpec(**header.body["spec"]), card=read_card(header.body["card"]), **tensors)
    )


def save_block_program(program: BlockProgram, path: PathLike) -> None:
    """Write a program (E_a, e_b, spec, machine description, report, card) atomically."""
    body = {
        "spec": asdict(program.spec),
        "card": asdict(program.card),
        "machine": program.machine,
        "machine_fingerprint": program.machine_fingerprint,
        "report": program.report.as_dict(),
    }
    storage.write(path, "block program", {"embedding": program.embedding, "constants": program.constants}, body)


def load_block_program(path: PathLike) -> BlockProgram:
    """Read a program. Header and shapes are validated before a tensor is loaded; raises StorageError."""

    def expect(header: Header) -> dict[str, tuple[int, ...]]:
        def shapes() -> dict[str, tuple[int, ...]]:
            spec, machine = BlockSpec(**header.body["spec"]), header.body["machine"]
            return {"embedding": (spec.d_in, int(machine["width"])), "constants": (int(machine["constants"]),)}

        one_float_type(path, header)
        return storage.parse_body(path, shapes)

    header, tensors = storage.read(path, "block program", expect)
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise StorageError(f"{path}: the {name} holds NaN or infinity; compile it again")
    body = header.body
    return storage.parse_body(
        path,
        lambda: BlockProgram(
            tensors["embedding"],
            tensors["constants"],
            BlockSpec(**body["spec"]),
            dict(body["machine"]),
            str(body["machine_fingerprint"]),
            BlockReport(**body["report"]),
            read_card(body["card"]),
        ),
    )


def build_block_machine(spec: BlockSpec, description: dict[str, Any]) -> BlockMachine:
    """The machine that a program's description names; raises SpecError for one that is not of this family."""
    kind = description.get("kind") if description.get("family") == "blocks" else None
    if kind == "sparse":
        return SparseBlockMachine(spec)
    if kind == "random":
        return RandomBlockMachine(
            spec,
            seed=description["seed"],
            width=description["width"],
            neurons_per_target=description["neurons_per_target"],
            distribution=description["distribution"],
        )
    raise SpecError(f"no machine with MLPs is described by {description}; {Layout(spec).width} is the least width")
