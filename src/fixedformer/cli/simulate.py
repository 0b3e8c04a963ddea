"""simulate: a real attention layer, given as weights, runs as the prompt of a fixed network."""

import io
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from cyclopts import Parameter
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as tensor_bytes
from torch import Tensor

import fixedformer as ff
from fixedformer.certificate import Certificate
from fixedformer.errors import SpecError, StorageError
from fixedformer.prompt.certify import merge
from fixedformer.prompt.layers import AttentionLayer, read_layer
from fixedformer.storage import write_atomic

DTYPES = {"float64": torch.float64, "float32": torch.float32}


def simulate(
    weights: Path,
    input_: Annotated[Path, Parameter(name="INPUT")],
    *,
    out: Annotated[Path, Parameter(name=["--out", "-o"])],
    heads: int,
    layer: str | None = None,
    scale: float | None = None,
    mask: Literal["none", "causal"] = "none",
    backend: Literal["hard", "stock", "soft"] = "hard",
    dtype: Literal["float64", "float32"] = "float64",
    json: Path | None = None,
) -> int:
    """Read one attention layer and inputs, run the layer on the universal simulator, certify, write the outputs.

    Args:
        weights: safetensors file with the state dict of an nn.MultiheadAttention or of a transformers model.
        input_: .npy or .safetensors with X (n, d) or (batch, n, d).
        out: .npy or .safetensors; the outputs (n, d_out) or (batch, n, d_out).
        heads: the layer's number of heads (a state dict does not say).
        layer: start of the layer's names, where the file holds several layers.
        scale: what multiplies the scores, 1/sqrt(head width) when left out (a state dict does not say; GPT-Neo: 1).
        mask: causal lets token i attend to tokens up to i.
        backend: hard (average-hard attention), stock (the same weights on softmax), soft (softmax heads, three blocks).
        dtype: arithmetic of the simulator.
        json: where to write the certificate.
    """
    if out.suffix not in (".npy", ".safetensors"):
        raise SpecError(f"{out}: an output is a .npy or .safetensors file, got '{out.suffix}'")
    with _one_thread(), _beat("reading") as phase:
        found = read_layer(_tensors(weights), heads, layer, scale)
        X, batched = _input(input_, found)
        if found.note:
            print(f"note: {found.note}", file=sys.stderr)
        phase("building the fixed network")
        simulator = ff.AttentionSimulator(
            X.shape[1],
            found.query.shape[1],
            found.value.shape[2],
            found.heads,
            backend,
            d_k=found.query.shape[2],
            d_out=None if found.output is None else found.output.shape[2],
            mask=None if mask == "none" else "causal",
            dtype=DTYPES[dtype],
        )
        phase("finding its fixed attention patterns")
        assert simulator.margin >= 1.0  # the certificate measures it again
        outputs, certificates = [], []
        for number, sequence in enumerate(X, 1):
            phase(f"sequence {number} of {len(X)}")
            output, certificate = _one(simulator, found, sequence)
            outputs.append(output)
            certificates.append(certificate)
    certificate = merge(certificates)
    result = torch.stack(outputs)
    _write(out, result if batched else result[0])
    if json is not None:
        write_atomic(json, certificate.to_json().encode())
    _report(simulator, found, certificate, out)
    return 0 if certificate.holds else 1


def _one(simulator: ff.AttentionSimulator, layer: AttentionLayer, X: Tensor) -> tuple[Tensor, Certificate]:
    pair = (layer.query, layer.key)
    options = {"output": layer.output, "scale": layer.scale}
    prompt = simulator.compile(pair, layer.value, X, **options)  # type: ignore[arg-type]
    output = simulator.run(prompt)
    if layer.output is None:  # heads side by side, as these layers concatenate them
        output = output.movedim(0, 1).flatten(1)
    return output, simulator.certify(prompt, pair, layer.value, X, **options)  # type: ignore[arg-type]


def _report(simulator: ff.AttentionSimulator, layer: AttentionLayer, certificate: Certificate, out: Path) -> None:
    cost = simulator.cost()
    size = simulator.size
    print(f"layer        {layer.name.rstrip('.') or '(root)'}: {layer.heads} heads of width {size.d_k}, {layer.d_in} "
          f"inputs{', biases as a column of ones' if layer.ones else ''}"
          f"{', no output projection: heads are concatenated' if layer.output is None else ''}")  # fmt: skip
    usual = layer.scale == layer.query.shape[2] ** -0.5
    print(f"scores       times {layer.scale:g} ({'1/sqrt(head width)' if usual else '--scale'})")
    print(f"machine      {cost['blocks']} blocks, heads {' + '.join(map(str, cost['heads']))}, {cost['channels']} "
          f"channels, backend {size.backend}, {size.dtype}".replace("torch.", ""))  # fmt: skip
    print(f"fingerprint  {simulator.fingerprint()[:16]} (a function of the sizes alone)")
    print(f"prompt       {cost['tokens']} tokens: X {size.n} x {size.columns}, then the weights")
    print(f"output       {out}")
    print(certificate)


def _tensors(path: Path) -> dict[str, Tensor]:
    try:
        return dict(load_tensors(path.read_bytes()))
    except FileNotFoundError:
        raise StorageError(f"{path}: no such file") from None
    except (SafetensorError, ValueError, OSError) as error:
        raise StorageError(f"{path}: not a whole safetensors file ({error}); write a state dict with "
                           "safetensors.torch.save_file") from None  # fmt: skip


def _load(path: Path) -> Tensor:
    if path.suffix == ".safetensors":
        tensors = _tensors(path)
        if len(tensors) != 1 and "X" not in tensors:
            raise SpecError(f"{path}: needed one tensor, or one named X, got {', '.join(sorted(tensors)) or 'none'}")
        return tensors["X"] if "X" in tensors else next(iter(tensors.values()))
    if path.suffix != ".npy":
        raise SpecError(f"{path}: an input is a .npy or .safetensors file, got '{path.suffix}'")
    try:
        return torch.from_numpy(np.load(path, allow_pickle=False))
    except FileNotFoundError:
        raise StorageError(f"{path}: no such file") from None
    except (ValueError, EOFError, OSError, TypeError) as error:
        raise StorageError(f"{path}: cannot be read as .npy ({error})") from None


def _input(path: Path, layer: AttentionLayer) -> tuple[Tensor, bool]:
    """X (batch, n, d) in float64, with the layer's column of ones; and whether the file had the batch axis."""
    X = _load(path)
    if X.ndim not in (2, 3) or X.numel() == 0:
        raise SpecError(f"{path}: needed X (n, {layer.d_in}) or (batch, n, {layer.d_in}), got {tuple(X.shape)}")
    if not X.is_floating_point():
        raise SpecError(f"{path}: needed real vectors, got {X.dtype}")
    return layer.extend((X if X.ndim == 3 else X[None]).to(torch.float64)), X.ndim == 3


def _write(path: Path, result: Tensor) -> None:
    if path.suffix == ".safetensors":
        write_atomic(path, tensor_bytes({"output": result.contiguous()}))
        return
    buffer = io.BytesIO()
    np.save(buffer, result.numpy())
    write_atomic(path, buffer.getvalue())


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread for torch: the work is thousands of small operations, and on a busy machine threads that wait for each
    other make it several times slower (6 s became 30 s where other work kept two cores busy)."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _beat(first: str, patience: float = 3.0) -> Iterator["_Phase"]:
    """Say on stderr, from `patience` seconds on, what is being done; silent when all is done sooner."""
    phase = _Phase(first)
    done = threading.Event()

    def speak() -> None:
        while not done.wait(patience):
            print(f"{phase.text}, {time.monotonic() - phase.start:.0f} s", file=sys.stderr, flush=True)

    thread = threading.Thread(target=speak, daemon=True)
    thread.start()
    try:
        yield phase
    finally:
        done.set()
        thread.join()


class _Phase:
    """What is being done now; call it to change that."""

    def __init__(self, text: str) -> None:
        self.text, self.start = text, time.monotonic()

    def __call__(self, text: str) -> None:
        self.text = text
