"""The same loop, with several read-outs in the loss, values for labels, and a task that grows."""

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, mse_loss

import fixedformer as ff
from fixedformer.tasks.strings import LongestCommonSubsequence
from fixedformer.tasks.trees import DecisionTrees
from fixedformer.training.fit import Schedule, Trainer

LCS = LongestCommonSubsequence(5, letters=2)
TREES = DecisionTrees(depth=2, dimensions=3, points=8, first_dimensions=2, first_points=4, point_step=2, every=5)


def trainer(task=LCS, steps=12, **switches):
    values = task is TREES
    sizes = {"d_in": 3, "d_out": 1, "causal": True} if values else {"d_in": len(task.vocabulary)}
    model = ff.LoopedTransformer(**{"width": 16, "heads": 2, "loops": 3, "tokens": task.tokens, **sizes, **switches})
    schedule = Schedule(steps=steps, batch=8, rate=0.01, warmup=3, validate_every=4, validation=40)
    return Trainer(model, task, schedule, seed=1, mask=None)


@pytest.mark.parametrize("over", ["last", "all", 2])
def test_the_loss_is_the_mean_over_the_loops_named(over):
    run = trainer(loss_over=over)
    examples = run._draw(0, 0, 8)
    inputs, labels, scored = map(torch.from_numpy, (examples.inputs, examples.labels, examples.scored))
    with torch.no_grad():
        whole = run.model.readouts(inputs, which=range(1, 4))
        named = {"last": [2], "all": [0, 1, 2], 2: [1, 2]}[over]
        want = sum(float(cross_entropy(whole[t][scored], labels[scored])) for t in named) / len(named)
    assert next(iter(run)).loss == pytest.approx(want, rel=1e-5)


def test_values_are_judged_by_squared_error():
    run = trainer(TREES, loss_over="all")
    examples = TREES.at(0).sample(8, np.random.default_rng([1, 0, 0]))
    inputs, labels, scored = map(torch.from_numpy, (examples.inputs, examples.labels, examples.scored))
    with torch.no_grad():
        whole = run.model.readouts(inputs, which=range(1, 4))[..., 0]
        want = sum(float(mse_loss(state[scored], labels[scored])) for state in whole) / 3
    records = list(run)
    assert records[0].loss == pytest.approx(want, rel=1e-5)
    test = run.test_examples(30)
    found = run.evaluate(test)
    assert found.predictions.shape == test.labels.shape
    assert found.accuracy == test.accuracy(found.predictions)
    assert found.loss == pytest.approx(np.square(found.predictions - test.labels)[test.scored].mean(), rel=1e-4)


def test_training_follows_the_curriculum_and_validation_does_not():
    run = trainer(TREES)
    assert [run._draw(0, step, 2).inputs.shape[1] for step in (0, 4, 5, 11, 40)] == [7, 7, 11, 15, 15]
    assert run._draw(1, 0, 2).inputs.shape[1] == 15


def test_stopped_and_loaded_is_the_undisturbed_looped_run():
    switches = {"timestep": "adaln", "loss_over": "all", "checkpointing": "nested", "positions": "rotary"}
    whole = trainer(**switches)
    for _ in whole:
        pass
    first = trainer(**switches)
    for record in first:
        if record.step == 7:
            break
    tensors, numbers = first.state()
    second = trainer(**switches)
    second.load({name: tensor.clone() for name, tensor in tensors.items()}, numbers)
    for _ in second:
        pass
    want, got = whole.state(), second.state()
    assert want[1] == got[1]
    assert all(torch.equal(want[0][name], got[0][name]) for name in want[0])


def test_schedules_that_end_above_zero():
    linear = Schedule(steps=100, rate=1.0, warmup=0, decay="linear", final_rate=0.2)
    assert linear.rate_at(0) == 1
    assert linear.rate_at(50) == pytest.approx(0.6)
    cosine = Schedule(steps=110, rate=1.0, warmup=10, decay="cosine", final_rate=0.1)
    assert cosine.rate_at(9) == 1
    assert cosine.rate_at(60) == pytest.approx(0.55)
    assert cosine.rate_at(110) == pytest.approx(0.1)
    assert Schedule(betas=[0.9, 0.95]).betas == (0.9, 0.95)
    with pytest.raises(ff.SpecError, match="final_rate must lie in 0"):
        Schedule(rate=1.0, final_rate=2.0)


@pytest.mark.parametrize(("changes", "message"), [
    ({"decay": "cosin"}, "decay must be"), ({"precision": "bf16"}, "precision must be"), ({"stop_at": 2.0}, "stop_at"),
    ({"betas": (0.9,)}, "two numbers"), ({"weight_decay": -1.0}, "weight_decay"),
])  # fmt: skip
def test_schedules_refuse_what_they_would_not_do(changes, message):
    with pytest.raises(ff.SpecError, match=message):
        Schedule(**changes)
