"""Inputs of every machine: token ids or vectors, checked once at the door."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fixedformer.errors import SpecError


def finite(tensor: Tensor, what: str) -> Tensor:
    """Return `tensor`, or raise SpecError when it holds NaN or infinity."""
    if not torch.isfinite(tensor).all():
        bad = int((~torch.isfinite(tensor)).sum())
        raise SpecError(f"{what} holds {bad} NaN or infinite entries of {tensor.numel()}; clean it first")
    return tensor


def as_input(data: Any, d_in: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Check an input: token ids (..., tokens), any integer dtype, or vectors (..., tokens, d_in), cast to `dtype`.

    Raises SpecError for an empty sequence, an id outside 0..d_in-1, another width, NaN or infinity.
    """
    if isinstance(data, np.ndarray) and not data.dtype.isnative:
        data = data.astype(data.dtype.newbyteorder("="))
    X: Tensor = torch.as_tensor(data, device=device)
    if X.dtype == torch.bool or X.is_complex():
        raise SpecError(f"inputs are integer token ids or real vectors, got {X.dtype}")
    ids = not X.is_floating_point()
    if X.ndim < (1 if ids else 2):
        raise SpecError(f"needed token ids (..., tokens) or vectors (..., tokens, {d_in}), got shape {tuple(X.shape)}")
    if X.shape[-1 if ids else -2] == 0:
        raise SpecError("the sequence is empty: attention needs at least one token")
    if X.numel() == 0:
        raise SpecError(f"the input holds no sequence: its shape is {tuple(X.shape)}")
    if ids:
        X = X.long()  # least and largest of uint16 and its like are not implemented; 2^63 and more become negative
        low, high = int(X.min()), int(X.max())
        if low < 0 or high >= d_in:
            raise SpecError(f"token ids must lie in 0..{d_in - 1} (d_in = {d_in}), got {low}..{high}")
        return X
    if X.shape[-1] != d_in:
        raise SpecError(f"vectors must have {d_in} entries a token (d_in), got {X.shape[-1]}")
    cast = finite(X, "the input").to(dtype)
    return cast if cast.dtype == X.dtype else finite(cast, f"the input, in {str(dtype).removeprefix('torch.')},")


def embed_rows(X: Tensor, matrix: Tensor) -> Tensor:
    """X E for X from `as_input`: ids select rows of `matrix` (d_in, width), vectors multiply it."""
    return torch.nn.functional.embedding(X, matrix) if not X.is_floating_point() else X @ matrix


def one_hot_rows(X: Tensor, d_in: int, dtype: torch.dtype) -> Tensor:
    """X from `as_input` as vectors (..., tokens, d_in)."""
    if X.is_floating_point():
        return X
    return torch.nn.functional.one_hot(X, d_in).to(dtype)


def one_hot(tokens: Any, vocabulary: int, positions: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Token ids (..., n) as vectors (..., n, vocabulary + positions): a 1 for the token, and a 1 for its place.

    With `positions` > 0 row i also has a 1 at vocabulary + i: so a target with learned positions is one whose `embed`
    stacks its token table (vocabulary, d_model) on its position table (positions, d_model).
    """
    ids = as_input(tokens, vocabulary, dtype)
    if ids.is_floating_point():
        raise SpecError(f"one_hot needs integer token ids, got {ids.dtype}")
    rows = torch.nn.functional.one_hot(ids, vocabulary).to(dtype)
    if not positions:
        return rows
    length = ids.shape[-1]
    if length > positions:
        raise SpecError(f"{length} tokens need {length} positions, the table has {positions}")
    place = torch.eye(positions, dtype=dtype)[:length].expand(*rows.shape[:-1], positions)
    return torch.cat([rows, place], dim=-1)
