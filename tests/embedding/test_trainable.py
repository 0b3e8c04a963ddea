"""Training in path space: outputs and the gradients of E and U equal the definition's, in every supported variant."""

import itertools

import pytest
import torch
from machines import build

import fixedformer as ff
from fixedformer.embedding.rule import EPSILON, Rule
from fixedformer.embedding.trainable import TrainableProgram

VARIANTS = {
    "attention only": Rule(),
    "residual": Rule(residual=True),
    "pre-norm": Rule(residual=True, norm="pre"),
    "pre-norm, final": Rule(residual=True, norm="pre", final_norm=True),
    "post-norm": Rule(residual=True, norm="post"),
    "residual, final norm": Rule(residual=True, final_norm=True),
}


def layer_norm(x):
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + EPSILON).sqrt()


def definition(machine, rule, E, U, X, mask):
    """The m-wide state, layer by layer, head by head; plain tensors, nothing shared with the fast evaluation."""
    spec, dtype = machine.spec, E.dtype
    state = E[X] if X.dtype == torch.long else X @ E
    n = state.shape[-2]
    allowed = torch.ones(n, n, dtype=torch.bool).tril() if mask == "causal" else torch.ones(n, n, dtype=torch.bool)
    for layer in range(spec.layers):
        read = layer_norm(state) if rule.norm == "pre" else state
        update = 0
        for head in range(spec.heads):
            query = read @ machine.dense_query(layer, head, dtype)
            key = read @ machine.dense_key(layer, head, dtype)
            if spec.positions == "rotary":
                query, key = turned(query), turned(key)
            scores = (query @ key.mT).masked_fill(~allowed, -torch.inf)
            update = update + scores.softmax(-1) @ (read @ machine.dense_value(layer, head, dtype))
        state = state + update if rule.residual else update
        state = layer_norm(state) if rule.norm == "post" else state
    state = layer_norm(state) if rule.final_norm else state
    return state @ U


def turned(x):
    half = x.shape[-1] // 2
    rate = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(x.shape[-2], dtype=torch.float64)[:, None] * rate
    spin = torch.polar(torch.ones_like(angle), angle) * torch.complex(x[..., :half], x[..., half:])
    return torch.cat([spin.real, spin.imag], -1)


CASES = [
    (kind, variant, residual_weights, positions)
    for kind, variant, residual_weights, positions in itertools.product(
        ["sparse", "sparse looped", "random", "random looped"], VARIANTS, [False, True], [None, "rotary"]
    )
    if not (residual_weights and ("looped" in kind or not VARIANTS[variant].residual))
]


@pytest.mark.parametrize("train_unembedding", [False, True])
@pytest.mark.parametrize(("kind", "variant", "residual_weights", "positions"), CASES)
def test_outputs_and_gradients_equal_the_definition(kind, variant, residual_weights, positions, train_unembedding):
    """To 1e-9 (float64), ids and vectors, causal and not; also the paper's residual around weights made for none."""
    spec = ff.TargetSpec(heads=2, layers=3, d_in=3, d_head=2, d_out=4, residual=residual_weights, positions=positions)
    machine, rule = build(kind, spec), VARIANTS[variant]
    model = TrainableProgram(machine, rule, train_unembedding, deviation=0.7, dtype=torch.float64)
    generator = torch.Generator().manual_seed(5)
    for X, mask in (
        (torch.randint(3, (2, 7), generator=generator), "causal"),
        (torch.randint(3, (2, 7), generator=generator), None),
        (torch.randn(2, 5, 3, generator=generator, dtype=torch.float64), "causal"),
    ):
        out = model(X, mask)
        weights = torch.randn(out.shape, generator=generator, dtype=torch.float64)
        parameters = list(model.parameters())
        got = torch.autograd.grad((out * weights).sum(), parameters)
        want_out = definition(machine, rule, model.embedding, model.exit(), X, mask)
        want = torch.autograd.grad((want_out * weights).sum(), parameters)
        assert float(((out - want_out).abs().max() / want_out.abs().max()).detach()) <= 1e-11
        for a, b in zip(got, want, strict=True):
            assert float((a - b).abs().max() / b.abs().max()) <= 1e-9


@pytest.mark.parametrize("mask", ["causal", None])
@pytest.mark.parametrize("train_unembedding", [False, True])
@pytest.mark.parametrize(("kind", "variant", "residual_weights", "positions"), CASES)
def test_the_short_way_to_some_places_changes_nothing(
    kind, variant, residual_weights, positions, train_unembedding, mask
):
    """`at` merges places with equal contexts and drops what no wanted place sees: same outputs, same gradients."""
    spec = ff.TargetSpec(heads=2, layers=2, d_in=3, d_head=2, d_out=4, residual=residual_weights, positions=positions)
    machine, rule = build(kind, spec), VARIANTS[variant]
    model = TrainableProgram(machine, rule, train_unembedding, deviation=0.7, dtype=torch.float64)
    generator = torch.Generator().manual_seed(5)
    X = torch.randint(3, (5, 7), generator=generator)
    places = torch.rand(5, 7, generator=generator) < 0.3
    places[0] = False  # a sequence that nothing is asked about
    want = definition(machine, rule, model.embedding, model.exit(), X, mask)[places]
    out = model.at(X, mask, places)
    assert float(((out - want).abs().max() / want.abs().max()).detach()) <= 1e-11
    parameters = list(model.parameters())
    for a, b in zip(
        torch.autograd.grad(out.square().sum(), parameters), torch.autograd.grad(want.square().sum(), parameters)
    ):
        assert float((a - b).abs().max() / b.abs().max()) <= 1e-9


@pytest.mark.parametrize("kind", ["sparse", "sparse looped", "random", "random looped"])
@pytest.mark.parametrize("train_unembedding", [False, True])
def test_a_trained_program_runs_as_it_trained(kind, train_unembedding):
    spec = ff.TargetSpec(heads=2, layers=2, d_in=3, d_head=2)
    machine = build(kind, spec)
    model = TrainableProgram(machine, None, train_unembedding, deviation=0.5, dtype=torch.float64)
    program = model.to_program(ff.Card(mask="causal"))
    X = torch.tensor([[0, 1, 2, 2], [1, 1, 0, 2]])
    for engine in ("dense", "path"):
        assert torch.allclose(machine.run(program, X, "causal", engine), model(X), rtol=0, atol=1e-12)


def test_the_machine_is_no_parameter():
    """Only E and U can be trained; the optimiser cannot even see the rest."""
    machine = ff.RandomMachine(ff.TargetSpec(heads=2, layers=2, d_in=3, d_head=2), dtype=torch.float32)
    before = machine.fingerprint()
    model = TrainableProgram(machine, None, train_unembedding=True)
    assert {name for name, _ in model.named_parameters()} == {"embedding", "unembedding"}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.tensor([[0, 1, 2]])).square().sum().backward()
        optimizer.step()
    assert machine.fingerprint() == before


def test_one_seed_one_start():
    machine = ff.SparseMachine(ff.TargetSpec(heads=2, layers=1, d_in=3, d_head=2))
    one, two, other = (TrainableProgram(machine, seed=s).embedding for s in (1, 1, 2))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    assert float(one.detach().std()) == pytest.approx(0.02, rel=0.4)


def test_refusals():
    spec = ff.TargetSpec(heads=2, layers=1, d_in=3, d_head=2)
    with pytest.raises(ff.SpecError, match="norm needs residual=True"):
        Rule(norm="pre")
    with pytest.raises(ff.SpecError, match="norm must be None, 'pre' or 'post'"):
        Rule(residual=True, norm="rms")
    residual = ff.SparseMachine(ff.TargetSpec(heads=2, layers=1, d_in=3, d_head=2, residual=True))
    with pytest.raises(ff.SpecError, match="is evaluated with its residual"):
        TrainableProgram(residual, Rule())
    with pytest.raises(ff.SpecError, match="ends path space"):
        TrainableProgram(ff.SparseMachine(spec), Rule(mlp_width=8))
    with pytest.raises(ff.SpecError, match="its programs live in training checkpoints"):
        TrainableProgram(ff.SparseMachine(spec), Rule(residual=True)).to_program()
