"""The shipped target is as good as said, on strings drawn for this test alone."""

import numpy as np
import pytest
import torch

from fixedformer.experiments.demo import demo, shipped_target
from fixedformer.tasks.dyck import Dyck


def test_shipped_target_answers_fresh_strings():
    target, task = shipped_target(), Dyck()
    assert (target.spec.heads, target.spec.layers, target.spec.d_in, target.spec.d_head) == (4, 2, 4, 24)
    assert target.card.mask == "causal"
    examples = task.sample(4000, np.random.default_rng(987))
    single = target.to(dtype=torch.float32)
    told = torch.cat([single(part, "causal").argmax(-1) for part in torch.from_numpy(examples.inputs).split(500)])
    assert examples.accuracy(told.numpy()) >= 0.999


@pytest.mark.slow
def test_demo_accuracy():
    """Target and both machines agree on all 1,000 strings, target >= 99.9%."""
    result = demo()
    target, *machines = result.rows
    assert target.accuracy >= 0.999
    for row in machines:
        assert row.agree == 1000
        assert row.accuracy == target.accuracy
    assert all(of.certificate.holds for of in result.compiled)
    sparse, random = machines
    assert sparse.output < 1e-11
    assert random.output < 1e-8
