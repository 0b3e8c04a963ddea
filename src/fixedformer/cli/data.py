"""Input and output files of `run` and `certify`: arrays, or token text for programs with a vocabulary."""

import io
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as tensor_bytes
from torch import Tensor

from fixedformer.errors import SpecError, StorageError
from fixedformer.storage import write_atomic

Vocabulary = tuple[str, ...] | None


def read_input(path: Path, vocabulary: Vocabulary) -> dict[str, Tensor]:
    """Named inputs of a file: .npy (one array), .safetensors (each tensor), .txt (lines of equal length together)."""
    try:
        if path.suffix == ".npy":
            array = np.load(path, allow_pickle=False)
            return {"input": torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))}
        if path.suffix == ".safetensors":
            tensors = load_tensors(path.read_bytes())
            if not tensors:
                raise StorageError(f"{path}: holds no tensor")
            return dict(tensors)
        if path.suffix == ".txt":
            return _read_text(path, vocabulary)
    except FileNotFoundError:
        raise StorageError(f"{path}: no such file") from None
    except (ValueError, TypeError, EOFError, SafetensorError, UnicodeDecodeError, OSError) as error:
        if isinstance(error, SpecError):
            raise
        raise StorageError(f"{path}: cannot be read as {path.suffix} ({error})") from None
    raise SpecError(f"{path}: an input is a .npy, .safetensors or .txt file, got '{path.suffix}'")


def need_folder(path: Path) -> None:
    """SpecError where the folder that `path` is to be written to is not there."""
    if not path.parent.is_dir():
        raise SpecError(f"cannot write {path}: no folder {path.parent}; make it first")


def check_output(path: Path, inputs: dict[str, Tensor], source: Path, vocabulary: Vocabulary, d_out: int) -> None:
    """SpecError where outputs for these inputs cannot be written as `path` says: before anything is computed."""
    if path.suffix not in (".npy", ".safetensors", ".txt"):
        raise SpecError(f"{path}: an output is a .npy, .safetensors or .txt file, got '{path.suffix}'")
    need_folder(path)
    if path.suffix == ".npy" and len(inputs) > 1:
        raise SpecError(f"{path}: {len(inputs)} outputs of different lengths do not make one array; write a "
                        ".safetensors or .txt file")  # fmt: skip
    if path.suffix == ".txt":
        names = _need(path, vocabulary)
        if d_out != len(names):
            raise SpecError(f"{path}: text needs a name for each of {d_out} outputs, the vocabulary has {len(names)}")
        if source.suffix != ".txt" and len(inputs) > 1:
            raise SpecError(f"{path}: {source} holds {len(inputs)} tensors, which make no one text; write .safetensors")


def write_output(path: Path, outputs: dict[str, Tensor], source: Path, vocabulary: Vocabulary) -> None:
    """Write outputs as .npy (one array), .safetensors (all, by name) or .txt (likeliest tokens), atomically."""
    if path.suffix == ".safetensors":
        write_atomic(path, tensor_bytes({name: out.contiguous() for name, out in outputs.items()}))
    elif path.suffix == ".npy":
        buffer = io.BytesIO()
        np.save(buffer, next(iter(outputs.values())).numpy())
        write_atomic(path, buffer.getvalue())
    else:
        names = _need(path, vocabulary)
        joint = "" if all(len(name) == 1 for name in names) else " "
        by_line: dict[int, str] = {}
        for label, out in outputs.items():
            likeliest = out.argmax(-1).reshape(-1, out.shape[-2])
            # Names of groups read from text list their line numbers; a tensor's own name means nothing here.
            lines = [int(n) for n in label.split()[1:]] if source.suffix == ".txt" else range(len(likeliest))
            by_line |= {n: joint.join(names[i] for i in row) for n, row in zip(lines, likeliest.tolist(), strict=True)}
        write_atomic(path, "".join(by_line[n] + "\n" for n in sorted(by_line)).encode())


def _read_text(path: Path, vocabulary: Vocabulary) -> dict[str, Tensor]:
    names = _need(path, vocabulary)
    index = {name: i for i, name in enumerate(names)}
    characters = all(len(name) == 1 for name in names)
    groups: dict[int, list[tuple[int, list[int]]]] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        tokens = [c for c in line if c in index or not c.isspace()] if characters else line.split()
        if not tokens:
            continue
        unknown = next((token for token in tokens if token not in index), None)
        if unknown is not None:
            raise SpecError(f"{path}, line {number}: '{unknown}' is not in the vocabulary ({' '.join(names)})")
        groups.setdefault(len(tokens), []).append((number, [index[token] for token in tokens]))
    if not groups:
        raise SpecError(f"{path}: holds no token; write one sequence a line")
    # The name of a group lists its line numbers, so that outputs can be put back in order.
    return {
        f"lines {' '.join(str(number) for number, _ in rows)}": torch.tensor([ids for _, ids in rows])
        for rows in groups.values()
    }


def _need(path: Path, vocabulary: Vocabulary) -> tuple[str, ...]:
    if vocabulary is None:
        raise SpecError(f"{path}: text needs a vocabulary, and this file's card has none; use .npy or .safetensors ids")
    return vocabulary
