"""The loop: deterministic, resumable at any step, honest about what it measures."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

import fixedformer as ff
from fixedformer.embedding.coordinates import CoordinateProgram
from fixedformer.embedding.rule import Rule
from fixedformer.embedding.trainable import TrainableProgram
from fixedformer.tasks.dyck import Dyck
from fixedformer.training.fit import Schedule, Trainer
from fixedformer.training.full import TrainableTarget

TASK = Dyck(pairs=4)
SPEC = ff.TargetSpec(heads=2, layers=2, d_in=4, d_head=3)


def trainer(steps=30, seed=1, ramp=None, **changes):
    model = TrainableProgram(ff.SparseMachine(SPEC), None, train_unembedding=True, deviation=0.3, seed=seed)
    if ramp:
        rule = Rule(residual=True, mlp_width=8)
        model = CoordinateProgram(ff.SparseMachine(SPEC), rule, deviation=0.3, seed=seed, mlp_ramp=ramp)
    options = {"batch": 16, "rate": 0.03, "warmup": 3, "decay": "linear", "validate_every": 5, "validation": 40}
    return Trainer(model, TASK, Schedule(steps=steps, **options | changes), seed)


def test_one_seed_one_run():
    runs = [list(trainer()) for _ in range(2)]
    assert [r.loss for r in runs[0]] == [r.loss for r in runs[1]]
    assert len(runs[0]) == 30
    assert [r.step for r in runs[0] if r.measured] == [5, 10, 15, 20, 25, 30]
    assert [r.loss for r in trainer(seed=2)] != [r.loss for r in runs[0]]
    assert runs[0][-1].loss < runs[0][0].loss


@pytest.mark.parametrize("ramp", [None, (5, 20)])
@pytest.mark.parametrize("stop", [1, 7, 10, 29])
def test_stopped_and_loaded_is_the_undisturbed_run(stop, ramp):
    whole = trainer(ramp=ramp)
    for _ in whole:
        pass
    first = trainer(ramp=ramp)
    for record in first:
        if record.step == stop:
            break
    tensors, numbers = first.state()
    saved = {name: tensor.clone() for name, tensor in tensors.items()}
    second = trainer(ramp=ramp)
    second.load(saved, numbers)
    for _ in second:
        pass
    want, got = whole.state(), second.state()
    assert want[1] == got[1]
    assert want[0].keys() == got[0].keys()
    for name in want[0]:
        assert torch.equal(want[0][name], got[0][name]), name


def test_state_of_another_model_is_refused():
    tensors, numbers = trainer().state()
    other = Trainer(TrainableTarget(SPEC, d_model=4), TASK, Schedule(), 0)
    with pytest.raises(ff.StorageError, match="belongs to another recipe"):
        other.load(tensors, numbers)


def test_best_parameters_are_kept():
    run = trainer(steps=40, rate=0.2, decay="constant")  # a rate at which accuracy goes up and down
    seen = {}
    for record in run:
        if record.measured:
            seen[record.step] = record.accuracy
    assert run.best == max(seen.values())
    run.use_best()
    assert run.accuracy(run._validation) == run.best


def test_it_stops_when_solved():
    run = trainer(steps=500, stop_at=0.5)
    records = list(run)
    assert run.solved
    assert records[-1].step < 500
    assert records[-1].accuracy >= 0.5
    assert list(run) == []


def test_rates():
    linear = Schedule(steps=100, rate=1.0, warmup=10, decay="linear")
    assert linear.rate_at(0) == pytest.approx(0.1)
    assert linear.rate_at(9) == pytest.approx(0.91)
    assert linear.rate_at(50) == pytest.approx(0.5)
    assert Schedule(rate=2.0, warmup=0).rate_at(77) == 2.0
    with pytest.raises(ff.SpecError, match="batch must be at least 1"):
        Schedule(batch=0)
    with pytest.raises(ff.SpecError, match="rate must be positive"):
        Schedule(rate=-1)


def test_streams_do_not_overlap():
    run = trainer()
    draws = [run._draw(stream, 0, 50).inputs for stream in range(3)]
    for one, two in itertools.combinations(draws, 2):
        assert not np.array_equal(one, two)


def test_test_accuracy_stands_beside_trivial_rules():
    accuracy, rules = trainer().test(200)
    assert 0 <= accuracy <= 1
    assert rules == TASK.trivial_rules(trainer()._draw(2, 0, 200))


def test_bfloat16_autocast_trains():
    records = list(trainer(steps=10, precision="bfloat16"))
    assert all(np.isfinite(record.loss) for record in records)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("positions", [None, "rotary"])
def test_a_trained_target_is_the_target_it_becomes(residual, positions):
    spec = ff.TargetSpec(heads=2, layers=2, d_in=4, d_head=4, residual=residual, positions=positions)
    model = TrainableTarget(spec, d_model=6, seed=3)
    X = torch.randint(4, (3, 9), generator=torch.Generator().manual_seed(0))
    target = model.to_target(ff.Card(mask="causal"))
    assert torch.allclose(model(X), target(X, "causal"), rtol=0, atol=1e-6)
    assert target.card.mask == "causal"


def test_full_variants_run_and_say_what_they_are_not():
    spec = ff.TargetSpec(heads=2, layers=2, d_in=4, d_head=4, residual=True)
    X = torch.randint(4, (3, 9), generator=torch.Generator().manual_seed(0))
    outs = []
    for options in ({}, {"norm": "pre", "final_norm": True}, {"norm": "post"}, {"mlp_width": 8}):
        model = TrainableTarget(spec, 6, seed=3, **options)
        outs.append(model(X))
        assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in model.parameters())
        if options:
            with pytest.raises(ff.SpecError, match="no attention-only Target"):
                model.to_target()
    for one, two in itertools.combinations(outs, 2):
        assert not torch.allclose(one, two)
    with pytest.raises(ff.SpecError, match="norm must be None"):
        TrainableTarget(spec, 6, norm="batch")
