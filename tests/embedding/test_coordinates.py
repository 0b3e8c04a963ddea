"""The coordinate engine equals the definition, outputs and gradients, with MLPs and without."""

import pytest
import torch
from machines import build
from test_trainable import VARIANTS, layer_norm

import fixedformer as ff
from fixedformer.embedding.coordinates import CoordinateProgram
from fixedformer.embedding.rule import Rule
from fixedformer.embedding.trainable import TrainableProgram

WITH_MLP = {
    "mlp alone": Rule(mlp_width=5),
    "residual, mlp": Rule(residual=True, mlp_width=5),
    "pre-norm, mlp": Rule(residual=True, norm="pre", final_norm=True, mlp_width=5, mlp_seed=3),
    "post-norm, mlp": Rule(residual=True, norm="post", mlp_width=5),
}


def definition(machine, rule, mlps, E, U, X):
    spec, dtype, n = machine.spec, E.dtype, X.shape[-1]
    allowed = torch.ones(n, n, dtype=torch.bool).tril()
    state = E[X]
    for layer in range(spec.layers):
        read, update = layer_norm(state) if rule.norm == "pre" else state, 0
        for head in range(spec.heads):
            scores = read @ machine.dense_query(layer, head, dtype) @ (read @ machine.dense_key(layer, head, dtype)).mT
            weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
            update = update + weights @ read @ machine.dense_value(layer, head, dtype)
        state = state + update if rule.residual else update
        if rule.mlp_width:
            first, bias, second, shift = mlps[layer]
            hidden = (layer_norm(state) if rule.norm == "pre" else state) @ first.T + bias
            update = (hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5))) @ second.T + shift
            state = state + update if rule.residual else update
        state = layer_norm(state) if rule.norm == "post" else state
    return (layer_norm(state) if rule.final_norm else state) @ U


@pytest.mark.parametrize("train_unembedding", [False, True])
@pytest.mark.parametrize("rule", [*WITH_MLP.values(), *VARIANTS.values()], ids=str)
@pytest.mark.parametrize("kind", ["sparse", "sparse looped", "random"])
def test_outputs_and_gradients_equal_the_definition(kind, rule, train_unembedding):
    machine = build(kind, ff.TargetSpec(heads=2, layers=2, d_in=3, d_head=2, d_out=4))
    model = CoordinateProgram(machine, rule, train_unembedding, deviation=0.7, dtype=torch.float64)
    X = torch.randint(3, (2, 6), generator=torch.Generator().manual_seed(1))
    U = model.fixed_unembedding if model.unembedding is None else model.unembedding
    want = definition(machine, rule, model.mlps, model.embedding, U, X)
    out = model(X)
    assert float(((out - want).abs().max() / want.abs().max()).detach()) <= 1e-11
    parameters = list(model.parameters())
    for a, b in zip(
        torch.autograd.grad(out.square().sum(), parameters), torch.autograd.grad(want.square().sum(), parameters)
    ):
        assert float((a - b).abs().max() / b.abs().max()) <= 1e-9


@pytest.mark.parametrize("mask", ["causal", None])
@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("rule", [*WITH_MLP.values(), Rule(), VARIANTS["pre-norm"]], ids=str)
@pytest.mark.parametrize("kind", ["sparse", "random"])
def test_the_short_way_to_some_places_changes_nothing(kind, rule, layers, mask):
    """`at` merges places with equal contexts and drops what no wanted place sees: same outputs, same gradients."""
    machine = build(kind, ff.TargetSpec(heads=2, layers=layers, d_in=3, d_head=2, d_out=4))
    model = CoordinateProgram(machine, rule, True, deviation=0.7, dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    X = torch.randint(3, (5, 7), generator=generator)
    places = torch.rand(5, 7, generator=generator) < 0.3
    places[0] = False  # a sequence that nothing is asked about
    vectors = torch.nn.functional.one_hot(X, 3).double()  # no token ids: the way that merges nothing
    want, out = model(vectors, mask)[places], model.at(X, mask, places)
    assert out.shape == (int(places.sum()), 4)
    assert float(((out - want).abs().max() / want.abs().max()).detach()) <= 1e-11
    parameters = list(model.parameters())
    for a, b in zip(
        torch.autograd.grad(out.square().sum(), parameters), torch.autograd.grad(want.square().sum(), parameters)
    ):
        assert float((a - b).abs().max() / b.abs().max()) <= 1e-9


def test_no_wanted_place_gives_no_outputs():
    model = CoordinateProgram(build("sparse", ff.TargetSpec(heads=2, layers=2, d_in=3, d_head=2)), Rule(residual=True))
    X = torch.tensor([[0, 1, 2, 1]])
    assert model.at(X, "causal", torch.zeros(1, 4, dtype=torch.bool)).shape == (0, 3)


def test_both_engines_start_alike():
    """One seed gives the same parameters, so a run may change engine without changing what it computes."""
    machine = ff.SparseMachine(ff.TargetSpec(heads=2, layers=2, d_in=3, d_head=2))
    X = torch.tensor([[0, 1, 2, 1]])
    one, two = (kind(machine, Rule(residual=True), True, 0.3, seed=4) for kind in (TrainableProgram, CoordinateProgram))
    assert torch.equal(one.embedding, two.embedding)
    assert torch.allclose(one(X), two(X), rtol=0, atol=1e-5)


@pytest.mark.parametrize("rule", [Rule(True, mlp_width=7), Rule(True, "pre", True, 7), Rule(True, "post", mlp_width=7)])
@pytest.mark.parametrize(("step", "share"), [(0, 0.0), (4, 0.0), (5, 0.25), (7, 0.75), (8, 1.0), (99, 1.0)])
def test_on_its_ramp_the_model_adds_a_share_of_its_mlps(rule, step, share):
    machine = build("sparse", ff.TargetSpec(heads=2, layers=2, d_in=3, d_head=2, d_out=4))
    model = CoordinateProgram(machine, rule, False, deviation=0.7, dtype=torch.float64, mlp_ramp=(4, 8))
    X = torch.randint(3, (2, 6), generator=torch.Generator().manual_seed(1))
    places = torch.ones(2, 6, dtype=torch.bool)

    def defined(share):
        mlps = [(into, bias, share * out, share * shift) for into, bias, out, shift in model.mlps]
        return definition(machine, rule, mlps, model.embedding, model.fixed_unembedding, X)

    torch.testing.assert_close(model(X), defined(1.0), rtol=1e-11, atol=1e-11)  # nobody has said which step it is
    model.pace(step)
    torch.testing.assert_close(model(X), defined(share), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(model.at(X, "causal", places), defined(share).flatten(0, 1), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(model.eval()(X), defined(1.0), rtol=1e-11, atol=1e-11)


def test_a_ramp_of_no_length_is_a_step():
    machine = ff.SparseMachine(ff.TargetSpec(heads=2, layers=1, d_in=3, d_head=2))
    model = CoordinateProgram(machine, Rule(residual=True, mlp_width=7), mlp_ramp=(5, 5))
    shares = []
    for step in (0, 4, 5, 6):
        model.pace(step)
        shares.append(model.share)
    assert shares == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("rule", "ramp"), [(Rule(mlp_width=7), (0, 1)), (Rule(True), (0, 1)), (Rule(True, mlp_width=7), (3, 2))]
)
def test_a_ramp_without_residual_or_mlp_or_backwards_is_refused(rule, ramp):
    with pytest.raises(ff.SpecError, match="mlp_ramp needs residual=True, an MLP, and 0 <= first <= last"):
        CoordinateProgram(ff.SparseMachine(ff.TargetSpec(heads=2, layers=1, d_in=3, d_head=2)), rule, mlp_ramp=ramp)


def test_the_mlp_is_drawn_as_pytorch_draws_linear_layers():
    machine = ff.SparseMachine(ff.TargetSpec(heads=2, layers=1, d_in=3, d_head=2))
    model = CoordinateProgram(machine, Rule(mlp_width=400))
    into, bias, out, shift = model.mlps[0]
    reference = torch.nn.Linear(machine.width, 400)
    assert into.shape == reference.weight.shape
    assert float(into.std()) == pytest.approx(float(reference.weight.detach().std()), rel=0.05)
    assert float(into.abs().max()) <= machine.width**-0.5
    assert float(out.abs().max()) <= 400**-0.5
    assert bias.shape == (400,)
    assert shift.shape == (machine.width,)
    assert not any(p.shape == into.shape for p in model.parameters())
