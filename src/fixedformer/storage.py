"""Files: safetensors with a versioned header. Validate first, then load; write whole or not at all; never a pickle.

Every file of ours is a safetensors file whose header metadata holds
    format = "fixedformer", version, kind ("target", "program", ...), body (JSON: spec, fingerprint, ...),
    digest (SHA-256 over names, dtypes, shapes and bytes of all tensors and the body).
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as safetensors_bytes
from torch import Tensor

from fixedformer.errors import StorageError

FORMAT, VERSION = "fixedformer", 1
PathLike = str | os.PathLike[str]
Read = TypeVar("Read")


@dataclass(frozen=True)
class Header:
    """What a file says of itself, read without loading a tensor."""

    kind: str
    body: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]
    digest: str


def digest(tensors: Mapping[str, Tensor], text: str = "") -> str:
    """SHA-256 (hex) over `text` and every tensor's name, dtype, shape and bytes, in the order of the names."""
    state = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous().cpu()
        state.update(f"\0{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        if tensor.numel():
            state.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()


def write_atomic(path: PathLike, data: bytes) -> None:
    """Write `data` so that `path` holds either its old content or all of the new, whenever the process is killed.

    A temporary file in the same folder is written, fsynced and renamed. Raises StorageError when that is impossible.
    """
    target = Path(path)
    temporary = ""
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, target)
        _sync_folder(target.parent)
    except OSError as error:
        raise StorageError(
            f"cannot write {target}: {error.strerror or error}; is the folder there and writable?"
        ) from None
    finally:
        if temporary and os.path.exists(temporary):
            os.unlink(temporary)


def write(path: PathLike, kind: str, tensors: Mapping[str, Tensor], body: Mapping[str, Any]) -> None:
    """Write tensors and a JSON-able body as one file of ours, atomically."""
    # A tensor that shares memory with another, or is not contiguous, is stored as a copy of its own.
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    text = json.dumps(dict(body), sort_keys=True, allow_nan=False)
    metadata = {"format": FORMAT, "version": str(VERSION), "kind": kind, "body": text, "digest": digest(plain, text)}
    write_atomic(path, safetensors_bytes(plain, metadata))


def read_header(path: PathLike, kind: str | None = None) -> Header:
    """Read and validate the header only. `kind`, when given, must match."""
    return _open(path, lambda handle: _header(path, handle, kind))


def read(
    path: PathLike, kind: str, expect: Callable[[Header], Mapping[str, tuple[int, ...]]]
) -> tuple[Header, dict[str, Tensor]]:
    """Load a file of ours: header, then `expect(header)` -> the shapes it must have, then tensors, then digest.

    `expect` sees the header before a tensor is loaded, may raise StorageError, and names every tensor with its shape.
    """

    def load(handle: Any) -> tuple[Header, dict[str, Tensor]]:
        header = _header(path, handle, kind)
        shapes = dict(expect(header))
        if shapes != header.shapes:
            wrong = sorted(set(shapes.items()) ^ set(header.shapes.items()))[0][0]
            raise StorageError(
                f"{path}: tensor '{wrong}' should be {shapes.get(wrong, 'absent')} by the header, the file has "
                f"{header.shapes.get(wrong, 'none')}; the file was not written by fixedformer or was changed"
            )
        tensors = {name: handle.get_tensor(name) for name in shapes}
        if digest(tensors, handle.metadata()["body"]) != header.digest:
            raise StorageError(f"{path}: content does not match its digest; the file is damaged, get it again")
        return header, tensors

    return _open(path, load)


def parse_body(path: PathLike, build: Callable[[], Read]) -> Read:
    """Run `build`, which reads a header's body; whatever is missing or malformed there becomes a StorageError."""
    try:
        return build()
    except (KeyError, TypeError, ValueError) as error:
        raise StorageError(
            f"{path}: the header is malformed ({error}); the file was not written by fixedformer"
        ) from None


def _open(path: PathLike, then: Callable[[Any], Read]) -> Read:
    try:
        with safe_open(os.fspath(path), framework="pt") as handle:
            return then(handle)
    except FileNotFoundError:
        raise StorageError(f"{path}: no such file") from None
    except (SafetensorError, OSError, json.JSONDecodeError) as error:
        raise StorageError(f"{path}: not a whole safetensors file ({error}); get or write it again") from None


def _header(path: PathLike, handle: Any, kind: str | None) -> Header:
    metadata = handle.metadata() or {}
    if metadata.get("format") != FORMAT:
        raise StorageError(f"{path}: a safetensors file, but not one of fixedformer's (no format in its header)")
    if metadata.get("version") != str(VERSION):
        raise StorageError(f"{path}: file version {metadata.get('version')}, this release reads version {VERSION}")
    if missing := {"kind", "body", "digest"} - metadata.keys():
        raise StorageError(f"{path}: the header lacks {', '.join(sorted(missing))}; the file is damaged")
    if kind is not None and metadata["kind"] != kind:
        raise StorageError(f"{path}: holds a {metadata['kind']}, a {kind} was needed")
    body = json.loads(metadata["body"])
    if not isinstance(body, dict):
        raise StorageError(f"{path}: the header's body is no JSON object; the file is damaged")
    slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118 (no mapping)
    return Header(
        kind=metadata["kind"],
        body=body,
        shapes={name: tuple(part.get_shape()) for name, part in slices.items()},
        dtypes={name: str(part.get_dtype()) for name, part in slices.items()},
        digest=metadata["digest"],
    )


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable, where the system lets a folder be opened."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
