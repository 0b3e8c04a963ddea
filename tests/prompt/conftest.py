"""Seeded targets for the simulator and a direct evaluation in torch, independent of the network."""

import pytest
import torch
from torch import Tensor


def direct(A: Tensor, V: Tensor, X: Tensor, mask: Tensor | None = None) -> Tensor:
    """softmax(X A X^T) X V of every head, by the definition."""
    scores = X.unsqueeze(-3) @ A @ X.unsqueeze(-3).mT
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return torch.softmax(scores, dim=-1) @ (X.unsqueeze(-3) @ V)


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers in float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def relative(computed: Tensor, truth: Tensor) -> float:
    """Largest difference over the largest entry."""
    return float((computed.double() - truth).abs().max() / truth.abs().max())


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
