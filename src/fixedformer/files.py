"""Targets on disk. Every family keeps the files of its own programs; `storage` does the reading and writing."""

from dataclasses import asdict
from typing import Any

import torch

from fixedformer import storage
from fixedformer.errors import StorageError
from fixedformer.storage import Header, PathLike
from fixedformer.target import Card, Target, TargetSpec, weight_shapes

DTYPES = {"F64": torch.float64, "F32": torch.float32}


def save_target(target: Target, path: PathLike) -> None:
    """Write a target (weights, spec, card) atomically; raises StorageError where the place is not writable."""
    body = {"spec": asdict(target.spec), "card": asdict(target.card), "d_model": target.weights.d_model}
    storage.write(path, "target", target.weights.named(), body | {"d_value": target.weights.d_value})


def load_target(path: PathLike) -> Target:
    """Read a target. Header and shapes are validated before a tensor is loaded; raises StorageError."""

    def expect(header: Header) -> dict[str, tuple[int, ...]]:
        def shapes() -> dict[str, tuple[int, ...]]:
            d_model, d_value = int(header.body["d_model"]), int(header.body["d_value"])
            return weight_shapes(read_spec(header.body["spec"]), d_model, d_value)

        one_float_type(path, header)
        return storage.parse_body(path, shapes)

    header, tensors = storage.read(path, "target", expect)
    return storage.parse_body(
        path, lambda: Target(read_spec(header.body["spec"]), **tensors, card=read_card(header.body["card"]))
    )


def read_spec(body: dict[str, Any]) -> TargetSpec:
    """The spec in a header; raises SpecError or TypeError for anything else (parse_body turns both into one)."""
    return TargetSpec(**body)


def read_card(body: dict[str, Any]) -> Card:
    """The card in a header."""
    names = body["vocabulary"]
    if names is not None and not all(isinstance(name, str) for name in names):
        raise TypeError("the vocabulary must be a list of strings")
    if body["mask"] not in (None, "causal"):
        raise ValueError(f"unknown mask {body['mask']!r}")
    return Card(None if names is None else tuple(names), body["mask"], str(body["description"]))


def one_float_type(path: PathLike, header: Header) -> torch.dtype:
    """The one dtype of a file's tensors; StorageError where they are mixed or not float64 or float32."""
    kinds = set(header.dtypes.values())
    if len(kinds) != 1 or not kinds <= DTYPES.keys():
        raise StorageError(f"{path}: tensors must be all float64 or all float32, the file has {sorted(kinds)}")
    return DTYPES[kinds.pop()]
