"""All loops as one function: the operations one by one, forwards and backwards, in every switch that it takes."""

import copy
import pickle

import pytest
import torch

from fixedformer.loop import transformer
from fixedformer.loop.branch_parts import Workspace
from fixedformer.loop.low_attention import BLOCK, LONGEST
from fixedformer.loop.transformer import LoopedTransformer

BASE = {"d_in": 9, "width": 24, "heads": 2, "loops": 4, "tokens": BLOCK + 6}
SWITCHES = [
    {}, {"injection": "none"}, {"biases": True}, {"timestep": "adaln"}, {"timestep": "free", "loss_over": "all"},
    {"timestep": "constant", "biases": True}, {"norm_gain": False, "causal": True}, {"positions": "rotary"},
    {"positions": "rotary", "causal": True, "timestep": "adaln", "biases": True, "layers": 2, "loss_over": 2},
    {"layers": 3, "mlp_width": 60, "injection": "none", "loops": 1}, {"backprop_loops": 2, "timestep": "adaln"},
    {"layers": 2, "backprop_loops": 3, "loss_over": 2, "causal": True}, {"tied": True, "mlp_width": 70},
]  # fmt: skip


def model_of(changes, seed=0, away=0.3):
    model = LoopedTransformer(**{**BASE, **changes}, seed=seed).double()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for p in model.parameters():
            p += away * torch.randn(p.shape, generator=generator, dtype=torch.float64)
    return model


@pytest.fixture(autouse=True)
def in_every_format(monkeypatch):
    """It serves bfloat16; here float64 goes through it too, so that the mathematics shows."""
    monkeypatch.setattr(transformer, "runs_whole", lambda spec, *_: spec.norm == "pre")


def one_by_one(model, monkeypatch):
    monkeypatch.setattr(model, "_runs_whole", lambda _: False)


def taken(monkeypatch):
    """A list that grows with every whole run."""
    calls, real = [], transformer.whole_run
    monkeypatch.setattr(transformer, "whole_run", lambda *given: calls.append(given) or real(*given))
    return calls


def data(batch=3, tokens=BASE["tokens"], seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(9, (batch, tokens), generator=generator), torch.rand(batch, tokens, generator=generator) < 0.3


def step(model, X, scored, low=False):
    """Read-outs and every parameter's gradient."""
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        out = model.readouts(X, which="loss", scored=scored)
    out.to(model.embed.dtype).sin().sum().backward()
    return out.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("changes", SWITCHES, ids=lambda changes: "-".join(f"{k}={v}" for k, v in changes.items()))
@pytest.mark.parametrize("places", ["some", "every", "unsaid"])
def test_it_is_the_operations_one_by_one(changes, places, monkeypatch):
    model, (X, scored) = model_of(changes), data()
    scored = {"some": scored, "every": torch.ones_like(scored), "unsaid": None}[places]
    calls = taken(monkeypatch)
    got, ours = step(model, X, scored)
    assert len(calls) == 1
    one_by_one(model, monkeypatch)
    want, theirs = step(model, X, scored)
    assert len(calls) == 1
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert (ours[name] - theirs[name]).norm() <= 1e-11 * theirs[name].norm() + 1e-13, name


@pytest.mark.parametrize("changes", [{}, {"timestep": "adaln", "causal": True, "positions": "rotary", "layers": 2}])
def test_bfloat16_is_about_as_exact_as_one_by_one(changes, monkeypatch):
    sums = []
    for seed in range(4):
        model, (X, scored) = model_of(changes, seed, away=0.1), data(seed=seed)
        _, exact = step(model, X, scored)
        model.float()
        whole = step(model, X, scored, low=True)[1]
        one_by_one(model, monkeypatch)
        single = step(model, X, scored, low=True)[1]
        sums.append([
            sum(float((found[n] - exact[n]).norm() / exact[n].norm()) for n in exact) for found in (whole, single)
        ])  # fmt: skip
    ours, theirs = map(sum, zip(*sums))
    assert ours <= 1.25 * theirs


def test_states_and_inputs_have_their_gradients(monkeypatch):
    model = model_of({"injection": "add"})
    embedded = torch.randn(2, 5, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    X, _ = data(2, 5)
    found = []
    for _ in range(2):
        states, last = model.states(X), model.final_state(embedded)
        found.append(
            (states, last, *torch.autograd.grad(last.sin().sum() + states.cos().sum(), [embedded, model.embed]))
        )
        one_by_one(model, monkeypatch)
    for whole, single in zip(*found):
        torch.testing.assert_close(whole, single, rtol=1e-10, atol=1e-12)


def test_memory_is_used_again_and_leaves_nothing_behind():
    """A larger and a smaller batch in between, two runs at once, one that is dropped: every gradient as if alone."""
    model, (X, scored) = model_of({"timestep": "adaln"}), data()
    _, alone = step(model, X, scored)
    for other in (data(5), data(1, 7)):
        step(model, *other)
        _, again = step(model, X, scored)
        assert all(torch.equal(alone[name], again[name]) for name in alone)
    dropped = model(X)  # never goes backwards
    first, second = model(X).sin().sum(), model(data(seed=1)[0]).sin().sum()
    model.zero_grad()
    second.backward()
    first.backward()
    together = model.embed.grad.clone()
    model.zero_grad()
    model(X).sin().sum().backward()
    model(data(seed=1)[0]).sin().sum().backward()
    torch.testing.assert_close(together, model.embed.grad, rtol=1e-12, atol=1e-12)
    assert len(model._idle._idle) == 2
    del dropped
    assert len(model._idle._idle) == 3


def test_backward_goes_once_and_sees_what_changed():
    model, (X, _) = model_of({}), data()
    loss = model(X).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="ran twice"):
        loss.backward()
    loss = model(X).sum()
    with torch.no_grad():
        model.layers[0].outward *= 2
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    (gradient,) = torch.autograd.grad(model(X).sum(), model.embed, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_leaving_training_gives_the_memory_back():
    model, (X, scored) = model_of({}), data()
    step(model, X, scored)
    assert len(model._idle._idle) == 1
    assert model.eval() is model
    assert not model._idle._idle


def test_copies_and_pickles_leave_the_memory_out():
    model, (X, scored) = model_of({}), data()
    step(model, X, scored)
    assert len(model._idle._idle) == 1
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not other._idle._idle
        assert torch.equal(other(X), model(X))


@pytest.mark.parametrize(("changes", "how"), [
    ({}, "mask"), ({}, "no_grad"), ({}, "float32"), ({"checkpointing": "loop"}, ""), ({"norm": "none"}, ""),
    ({}, "long"),
])  # fmt: skip
def test_what_it_leaves_to_the_operations(changes, how, monkeypatch):
    monkeypatch.undo()  # as it is decided outside of these tests
    calls = taken(monkeypatch)
    model = model_of({**changes, "positions": "none"}).float()
    X, _ = data(1, LONGEST + 1 if how == "long" else 8)
    mask = torch.ones(8, 8, dtype=torch.bool).tril() if how == "mask" else None
    with torch.set_grad_enabled(how != "no_grad"), torch.autocast("cpu", torch.bfloat16, enabled=how != "float32"):
        assert model(X, mask).isfinite().all()
        assert not calls
        if not how and not changes.get("norm"):
            LoopedTransformer(**BASE)(X)
            assert len(calls) == 1


def test_backward_under_autocast_is_not_rounded_further():
    model, (X, _) = model_of({}).float(), data()
    found = []
    for inside in (False, True):
        model.zero_grad()
        loss = model.states(X).square().sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            loss.backward()
        found.append(model.layers[0].inward.grad.clone())
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)


def test_workspace_grows_and_hands_out_the_same_memory():
    space = Workspace()
    one = space.take("a", (2, 3), torch.float32).fill_(1)
    assert space.take("a", (3, 2), torch.float32).data_ptr() == one.data_ptr()
    assert space.take("a", (2, 3), torch.float64).data_ptr() != one.data_ptr()
    assert space.take("a", (4, 4), torch.float32).shape == (4, 4)
    assert torch.equal(one, torch.ones(2, 3))
