"""The looped transformer against its definition, switch by switch; what its checkpointing keeps; what it refuses."""

import pytest
import torch

import fixedformer as ff
from fixedformer.loop.looped_parts import normalise
from fixedformer.loop.looped_spec import SETTINGS, LoopedSpec, setting
from fixedformer.loop.transformer import LoopedTransformer

from . import looped_reference as reference

BASE = {"d_in": 7, "d_out": 5, "width": 12, "heads": 2, "layers": 1, "loops": 3, "tokens": 6}
SWITCHES = [
    {}, {"injection": "none"}, {"norm": "none"}, {"norm_gain": False}, {"final_norm": False}, {"timestep": "constant"},
    {"timestep": "adaln"}, {"timestep": "free"}, {"positions": "none"}, {"positions": "sinusoidal"},
    {"positions": "rotary"}, {"causal": True}, {"d_out": None, "tied": True}, {"biases": True}, {"loss_over": "all"},
    {"loss_over": 2}, {"backprop_loops": 2}, {"backprop_loops": 2, "loss_over": 2, "checkpointing": "loop"},
    {"checkpointing": "loop"}, {"checkpointing": "nested", "loops": 5}, {"layers": 2, "mlp_width": 9},
    {"layers": 2, "timestep": "adaln", "biases": True, "checkpointing": "nested", "loss_over": "all", "causal": True},
    {"deviation": 0.02, "timestep": "adaln", "norm": "none"}, {"layers": 3, "loops": 1, "injection": "none"},
    *({**setting(name), "timestep": "adaln", "d_out": None} for name in SETTINGS),
]  # fmt: skip


def model_of(changes, seed=0, away=0.3):
    """In float64, and moved away from its start, where gates are closed and gains are one."""
    model = LoopedTransformer(LoopedSpec(**{**BASE, **changes}), seed).double()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for p in model.parameters():
            p += away * torch.randn(p.shape, generator=generator, dtype=torch.float64)
    return model


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("changes", SWITCHES, ids=lambda changes: "-".join(f"{k}={v}" for k, v in changes.items()))
@pytest.mark.parametrize("kind", ["ids", "vectors"])
def test_forward_and_backward_are_the_definitions(changes, kind):
    model = model_of(changes)
    generator = torch.Generator().manual_seed(3)
    X = torch.randint(7, (2, 4), generator=generator)
    if kind == "vectors":
        X = torch.randn(2, 4, 7, generator=generator, dtype=torch.float64)
    loops = model.spec.loops
    cut = loops - (model.spec.backprop_loops or loops)
    want = torch.stack([reference.run(model, x, loops, cut=cut)[0] for x in X], 1)  # (loops, batch, tokens, d_out)
    named = [t - 1 for t in model.spec.loss_loops(loops)]
    scored = torch.tensor([[True, False, True, True], [False, True, True, False]])
    got = model.readouts(X, which="loss", scored=scored)
    assert got.shape == (len(named), 5, model.spec.outputs)
    torch.testing.assert_close(got, want[named][:, scored], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(model(X), want[-1], rtol=1e-9, atol=1e-9)
    weigh = torch.randn(got.shape, generator=generator, dtype=torch.float64)
    ours = gradients(model, (weigh * model.readouts(X, which="loss", scored=scored)).sum())
    theirs = gradients(model, (weigh * want[named][:, scored]).sum())
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-7, atol=1e-8, msg=name)


@pytest.mark.parametrize("changes", [{}, {"causal": True, "positions": "rotary", "layers": 2, "timestep": "adaln"}])
def test_states_and_attention_are_captured(changes):
    model = model_of(changes)
    X = torch.randint(7, (2, 5), generator=torch.Generator().manual_seed(1))
    trace = model.trace(X, loops=4)
    assert trace.states.shape == (5, 2, 5, 12)
    assert trace.attention.shape == (4, model.spec.layers, 2, 2, 5, 5)
    for place, x in enumerate(X):
        _, states, attention = reference.run(model, x, 4)
        torch.testing.assert_close(trace.states[:, place], states.detach(), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(trace.attention[:, :, place], attention.detach(), rtol=1e-9, atol=1e-9)


def test_masks():
    model = model_of({})
    X = torch.randint(7, (2, 5), generator=torch.Generator().manual_seed(1))
    allowed = torch.rand(5, 5, generator=torch.Generator().manual_seed(2)) < 0.5
    allowed |= torch.eye(5, dtype=torch.bool)
    want = torch.stack([reference.run(model, x, 3, lambda i, j: bool(allowed[i, j]))[0][-1] for x in X])
    torch.testing.assert_close(model(X, allowed), want, rtol=1e-9, atol=1e-9)
    causal = model_of({"causal": True})
    torch.testing.assert_close(model(X, "causal"), causal(X))
    both = torch.stack([reference.run(causal, x, 3, lambda i, j: bool(allowed[i, j]))[0][-1] for x in X])
    torch.testing.assert_close(causal(X, allowed), both, rtol=1e-9, atol=1e-9)
    with pytest.raises(ff.SpecError, match="mask must be"):
        model(X, "full")


def test_loops_change_at_run_time():
    model = model_of({"timestep": "adaln"})
    X = torch.randint(7, (2, 4), generator=torch.Generator().manual_seed(0))
    whole = model.readouts(X, loops=9, which=range(1, 10))
    for loops in (1, 4, 9):
        torch.testing.assert_close(model(X, loops=loops), whole[loops - 1])
    model.loops = 7
    torch.testing.assert_close(model(X), whole[6])
    with pytest.raises(ff.SpecError, match="loops must be at least 1"):
        model(X, loops=0)
    with pytest.raises(ff.SpecError, match="numbered from 1 to 3"):
        model.readouts(X, loops=3, which=(5,))
    with pytest.raises(ff.SpecError, match="parameters for 3 loops, got 4"):
        model_of({"timestep": "free"})(X, loops=4)


@pytest.mark.parametrize("timestep", ["adaln", "free", "constant"])
def test_zero_gates_start_as_the_identity(timestep):
    """γ = 0: a loop adds nothing but what is injected."""
    X = torch.randint(7, (2, 4), generator=torch.Generator().manual_seed(0))
    for injection in ("none", "add"):
        model = LoopedTransformer(**{**BASE, "timestep": timestep, "injection": injection})
        states = model.trace(X).states
        embedded = model.embed[X] + model.places[:4]
        for t, state in enumerate(states):
            assert torch.allclose(state, t * embedded if injection == "add" else embedded, rtol=0, atol=1e-6)


def test_norm():
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True, generator=torch.Generator().manual_seed(0))
    assert torch.autograd.gradcheck(normalise, x)
    torch.testing.assert_close(normalise(x), torch.nn.functional.rms_norm(x, (8,), eps=1e-6))


def test_settings_are_recipes():
    assert {"paper", "code", "clean"} == set(SETTINGS)
    with pytest.raises(ff.SpecError, match="a setting is one of paper, code, clean"):
        setting("theirs")
    code = LoopedSpec(d_in=7, **setting("code"))
    assert (code.injection, code.norm_gain, code.tied, code.causal) == ("none", False, True, True)
    standard = LoopedSpec(d_in=7, timestep="adaln", loops=9).standard(4)
    assert (standard.layers, standard.loops, standard.timestep, standard.injection) == (4, 1, "none", "none")


@pytest.mark.parametrize("timestep", ["none", "adaln"])
def test_autocast_leaves_float64_alone(timestep):
    model = model_of({"timestep": timestep})
    X = torch.randint(7, (2, 6), generator=torch.Generator().manual_seed(0))
    without = model(X)
    with torch.autocast("cpu", torch.bfloat16):
        within = model(X)
    assert within.dtype == torch.float64
    assert torch.equal(within, without)


def test_the_norm_of_large_float16_is_not_lost():
    x = 20 * torch.randn(2, 256, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(normalise(x.half()).float(), normalise(x), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("timestep", ["none", "adaln"])
def test_bfloat16_follows_float32(timestep):
    model = LoopedTransformer(**{**BASE, "timestep": timestep}, seed=2)
    X = torch.randint(7, (2, 6), generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        low = model(X)
    assert (low.float() - model(X)).norm() < 0.03 * model(X).norm()


@pytest.mark.parametrize("timestep", ["none", "adaln"])
@pytest.mark.parametrize(("causal", "positions"), [(False, "learned"), (True, "learned"), (False, "rotary")])
def test_gradients_in_bfloat16_follow_float32(timestep, causal, positions):
    """On average over five draws: rounding is a matter of luck in one."""
    changes, gaps = {"timestep": timestep, "causal": causal, "tokens": 150, "positions": positions}, {}
    for seed in range(5):
        model = model_of(changes, seed, away=0.05).float()
        X = torch.randint(7, (2, 150), generator=torch.Generator().manual_seed(seed))
        exact = gradients(model, model(X).square().mean())
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(X).square().mean()
        for name, found in gradients(model, loss).items():
            gaps.setdefault(name, []).append(float((found - exact[name]).norm() / exact[name].norm()))
    for name, found in gaps.items():
        assert sum(found) / len(found) <= 0.02, (name, found)


@pytest.mark.parametrize(("changes", "message"), [
    ({"width": 10, "heads": 4}, "width must divide into 4 heads"), ({"loops": 0}, "loops must be at least 1"),
    ({"norm": "post"}, "norm must be one of none, pre"), ({"tied": True}, "a tied read-out needs d_out = d_in"),
    ({"backprop_loops": 2, "injection": "none"}, "needs injection 'add'"),
    ({"backprop_loops": 2, "loss_over": "all"}, "the loss looks at 3 loops, gradients reach 2"),
    ({"loss_over": 0}, "loss_over must be"), ({"loss_over": "some"}, "loss_over must be"),
    ({"mlp_width": 0}, "mlp_width must be at least 1"), ({"d_out": -2}, "d_out must be at least 1"),
    ({"loss_over": 1.5}, "loss_over must be"), ({"deviation": -1.0}, "deviation must be positive"),
    ({"width": 6, "heads": 2, "positions": "rotary"}, "an even number of channels"),
])  # fmt: skip
def test_spec_refuses(changes, message):
    with pytest.raises(ff.SpecError, match=message):
        LoopedSpec(**{**BASE, **changes})


def test_inputs_are_refused():
    model = LoopedTransformer(**BASE)
    refused = [
        (torch.zeros(2, 9, dtype=torch.long), "9 tokens need as many positions"),
        (torch.full((1, 2), 7), "token ids must lie in"),
        (torch.zeros(3, dtype=torch.long), "needed ids"),
        (torch.zeros(1, 2, 6), "vectors must have 7 entries"),
    ]
    for X, message in refused:
        with pytest.raises(ff.SpecError, match=message):
            model(X)
    with pytest.raises(ff.SpecError, match="and not both"):
        LoopedTransformer(LoopedSpec(d_in=3), width=8)


@pytest.mark.parametrize("loops", [0, -1])
def test_loops_below_one_are_refused_everywhere(loops):
    model, X = model_of({}), torch.zeros(1, 3, dtype=torch.long)
    for call in (model, model.trace, model.states, lambda X, loops: model.final_state(model.embedded(X), loops=loops)):
        with pytest.raises(ff.SpecError, match="loops must be at least 1"):
            call(X, loops=loops)


def test_a_mask_and_causal_leave_no_row_empty():
    model, X = model_of({"causal": True}), torch.zeros(1, 3, dtype=torch.long)
    mask = torch.ones(3, 3, dtype=torch.bool)
    mask[0, 0] = False  # sees later tokens only, which causal takes away
    with pytest.raises(ff.SpecError, match="attend to nothing"):
        model(X, mask)


@pytest.mark.parametrize("positions", ["none", "learned", "sinusoidal", "rotary"])
def test_vectors_keep_a_float32_state_under_autocast(positions):
    model = LoopedTransformer(**{**BASE, "positions": positions})
    X = torch.randn(2, 4, 7, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        assert model.states(X).dtype == torch.float32
