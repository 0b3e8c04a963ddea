"""Read what a person calls an attention layer into the sections of a prompt; refuse what does not fit, in words."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fixedformer.attention import Mask, resolve_mask
from fixedformer.errors import SpecError
from fixedformer.inputs import finite
from fixedformer.prompt.sizes import SizeClass

QueryKey = Any  # A, or a pair (W_Q, W_K)
Scale = float | Literal["sqrt"] | None


@dataclass(frozen=True)
class PromptTarget:
    """The prompt's matrices by section name (..., rows, columns), and the number of rows that X has."""

    sections: dict[str, Tensor]
    rows: int


def read_target(
    size: SizeClass, query_key: QueryKey, value: Any, X: Any, output: Any, mask: Mask, scale: Scale
) -> PromptTarget:
    """Check everything and lay it out; see AttentionSimulator.compile for shapes and errors."""
    sections: dict[str, Tensor] = {}
    data, rows = _read_input(size, X)
    sections["X"] = torch.nn.functional.pad(data, (0, size.columns - size.d, 0, size.n - rows))
    for head, matrices in enumerate(zip(*[part.unbind(-3) for part in _read_scores(size, query_key, scale)])):
        sections |= {f"{kind}{head}": matrix for kind, matrix in zip("QK" if size.d_k else "A", matrices)}
    values = _tensor(value, "value", (size.heads, size.d, size.d_v), size)
    sections |= {f"V{head}": matrix for head, matrix in enumerate(values.unbind(-3))}
    if size.d_out is not None:
        if output is None:
            raise SpecError(
                f"this size class has an output matrix: give output ({size.heads}, {size.d_v}, {size.d_out})"
            )
        outputs = _tensor(output, "output", (size.heads, size.d_v, size.d_out), size)
        sections |= {f"O{head}": matrix for head, matrix in enumerate(outputs.unbind(-3))}
    elif output is not None:
        raise SpecError("this size class has no output matrix; make the simulator with d_out=")
    if size.mask == "given":
        sections["mask"] = prompt_mask(mask, rows, size.n).to(size.dtype)
    elif mask is not None and not (isinstance(mask, str) and mask == size.mask):
        raise SpecError("a mask belongs to the size class: make the simulator with mask='causal', or with "
                        "mask='given' to put any mask in the prompt")  # fmt: skip
    return PromptTarget(sections, rows)


def prompt_mask(mask: Mask, rows: int, n: int) -> Tensor:
    """A mask as the prompt holds it: bool (..., n, n).

    mask: None, "causal", bool (..., rows, rows), or a padding mask bool (rows) or (..., 1, rows), True = may be
    attended. Rows that X lacks may not be attended; as queries they attend to row 0, whose answer nobody reads.
    """
    if isinstance(mask, Tensor) and mask.shape[-1:] == (rows,) and (mask.ndim == 1 or mask.shape[-2] == 1):
        mask = mask.expand(*mask.shape[:-2], rows, rows)
    allowed = resolve_mask(mask, rows)
    inner = torch.ones(rows, rows, dtype=torch.bool) if allowed is None else allowed.squeeze(-3)
    full = torch.nn.functional.pad(inner, (0, n - rows, 0, n - rows))
    full[..., rows:, 0] = True
    return full


def score_scale(size: SizeClass, scale: Scale) -> float:
    """The number that multiplies A or W_Q."""
    if scale is None:
        return 1.0
    if scale == "sqrt":
        if size.d_k is None:
            raise SpecError(
                "scale='sqrt' means 1/sqrt(width of W_Q): it needs a size class with d_k; else give a number"
            )
        return float(size.d_k**-0.5)
    if isinstance(scale, str) or not torch.isfinite(torch.tensor(float(scale))):
        raise SpecError(f"scale must be None, 'sqrt' or a finite number, got {scale!r}")
    return float(scale)


def _read_input(size: SizeClass, X: Any) -> tuple[Tensor, int]:
    data = torch.as_tensor(X)
    if data.ndim < 2 or data.shape[-1] != size.d or not 0 < data.shape[-2] <= size.n:
        hint = "the sequence is empty" if data.ndim >= 2 and data.shape[-2] == 0 else f"got {tuple(data.shape)}"
        raise SpecError(f"X must be ({size.n}, {size.d}) for this size class, {hint}")
    rows = data.shape[-2]
    if rows < size.n and size.mask != "given":
        raise SpecError(f"X has {rows} rows, this size class has n = {size.n}; make the simulator with n={rows}, or "
                        "with mask='given' to take shorter inputs")  # fmt: skip
    return _number(data, "X", size), rows


def _read_scores(size: SizeClass, query_key: QueryKey, scale: Scale) -> list[Tensor]:
    """[A], or [W_Q, W_K] in a size class with d_k; `scale` is multiplied in."""
    factor = score_scale(size, scale)
    if not isinstance(query_key, tuple | list) or len(query_key) != 2:
        if size.d_k is not None:
            raise SpecError("this size class reads W_Q and W_K: give query_key=(W_Q, W_K), or make it without d_k")
        return [_tensor(query_key, "query_key", (size.heads, size.d, size.d), size) * factor]
    if size.d_k is not None:
        shape = (size.heads, size.d, size.d_k)
        query, key = (_tensor(part, name, shape, size) for part, name in zip(query_key, ("W_Q", "W_K")))
        return [query * factor, key]
    width = torch.as_tensor(query_key[0]).shape[-1]
    shape = (size.heads, size.d, width)
    query, key = (_tensor(part, name, shape, size) for part, name in zip(query_key, ("W_Q", "W_K")))
    return [query @ key.mT * factor]


def _tensor(data: Any, name: str, shape: tuple[int, int, int], size: SizeClass) -> Tensor:
    tensor = torch.as_tensor(data)
    if size.heads == 1 and tensor.ndim == 2:
        tensor = tensor.unsqueeze(0)
    if tensor.shape[-3:] != shape:
        raise SpecError(f"{name} must be {shape} (heads, rows, columns) for this size class, got {tuple(tensor.shape)}")
    return _number(tensor, name, size)


def _number(tensor: Tensor, name: str, size: SizeClass) -> Tensor:
    if tensor.dtype == torch.bool or tensor.is_complex():
        raise SpecError(f"{name} must hold real numbers, got {tensor.dtype}")
    finite(tensor, name)
    return finite(tensor.detach().to("cpu", size.dtype), f"{name}, rounded to {size.dtype},")
