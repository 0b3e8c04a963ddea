"""Looped transformers on disk."""

from dataclasses import asdict

from fixedformer import storage
from fixedformer.loop.looped_spec import LoopedSpec
from fixedformer.loop.transformer import LoopedTransformer
from fixedformer.storage import Header, PathLike


def save_looped(model: LoopedTransformer, path: PathLike) -> None:
    """Write a model (spec, parameters, number of loops) atomically; StorageError where the place is not writable."""
    body = {"spec": asdict(model.spec), "loops": model.loops}
    storage.write(path, "looped", dict(model.named_parameters()), body)


def load_looped(path: PathLike) -> LoopedTransformer:
    """Read a model; header and shapes are validated before a tensor is loaded. Raises StorageError."""

    def build(header: Header) -> LoopedTransformer:
        return storage.parse_body(path, lambda: LoopedTransformer(LoopedSpec(**header.body["spec"])))

    def expect(header: Header) -> dict[str, tuple[int, ...]]:
        return {name: tuple(p.shape) for name, p in build(header).named_parameters()}

    header, tensors = storage.read(path, "looped", expect)
    model = build(header)
    model.to(tensors["embed"].dtype).load_state_dict(tensors)
    model.loops = storage.parse_body(path, lambda: int(header.body["loops"]))
    return model
