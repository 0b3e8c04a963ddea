"""One torch thread a test worker: two workers on two cores must not fight over them."""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
