"""One thread a test worker, torch's and numba's: two workers on two cores must not fight over them."""

import os

import pytest
import torch

torch.set_num_threads(1)
os.environ.setdefault("NUMBA_NUM_THREADS", "1")  # before numba is imported, with the first search


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
