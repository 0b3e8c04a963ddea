"""Targets against the definition in plain Python, and what they refuse."""

import numpy as np
import oracle
import pytest
import torch

import fixedformer as ff
from fixedformer.attention import attention_weights, hardmax_weights, rotate, softmax_weights
from fixedformer.target import weight_shapes


@pytest.mark.parametrize("mask", [None, "causal", "random"])
@pytest.mark.parametrize(
    "spec",
    [
        ff.TargetSpec(heads=1, layers=1, d_in=3, d_head=2),
        ff.TargetSpec(heads=2, layers=2, d_in=3, d_head=4, d_out=2, positions="rotary"),
        ff.TargetSpec(heads=3, layers=2, d_in=2, d_head=1, d_out=4, residual=True),
        ff.TargetSpec(heads=2, layers=3, d_in=4, d_head=2, residual=True, positions="rotary", rotary_base=100.0),
    ],
)
def test_forward_is_the_definition(spec, mask, generator):
    target = ff.Target.random(spec, seed=3, d_model=5, d_value=3)
    X = torch.randn(6, spec.d_in, generator=generator, dtype=torch.float64)
    allowed = None
    if mask == "causal":
        allowed = [[j <= i for j in range(6)] for i in range(6)]
    elif mask == "random":
        mask = (torch.rand(6, 6, generator=generator) < 0.5) | torch.eye(6, dtype=torch.bool)
        allowed = mask.tolist()
    weights = {name: tensor.tolist() for name, tensor in target.weights.named().items()}
    want, seen = oracle.run(
        weights,
        X.tolist(),
        heads=spec.heads,
        layers=spec.layers,
        residual=spec.residual,
        rotary_base=spec.rotary_base if spec.positions else None,
        allowed=allowed,
    )
    assert torch.allclose(target(X, mask), torch.tensor(want, dtype=torch.float64), rtol=0, atol=1e-13)
    assert torch.allclose(target.attention(X, mask), torch.tensor(seen, dtype=torch.float64), rtol=0, atol=1e-14)


def test_token_ids_are_one_hot_rows_and_batches_are_rows():
    target = ff.Target.random(ff.TargetSpec(heads=2, layers=2, d_in=5, d_head=3), seed=1)
    ids = torch.tensor([[0, 4, 2], [1, 1, 3]])
    rows = torch.nn.functional.one_hot(ids, 5).double()
    assert torch.allclose(target(ids), target(rows), rtol=0, atol=1e-15)
    assert torch.allclose(target(ids)[1], target(ids[1]), rtol=0, atol=1e-15)
    assert torch.equal(target(ids), target(ids.numpy())), "numpy arrays of ids are welcome"
    assert target.attention(ids).shape == (2, 2, 2, 3, 3)
    each = torch.stack([torch.eye(3), torch.ones(3, 3).tril()]).bool()
    assert torch.allclose(target(ids, each)[1], target(ids[1], "causal"), rtol=0, atol=1e-15)


def test_learned_positions_are_extra_one_hot_inputs(generator):
    spec = ff.TargetSpec(heads=2, layers=1, d_in=3 + 4, d_head=2, d_out=3)
    target = ff.Target.random(spec, seed=2, d_model=6)
    X = ff.one_hot([2, 0, 1], 3, positions=4)
    table, places = target.weights.embed[:3], target.weights.embed[3:]
    bare = ff.TargetSpec(heads=2, layers=1, d_in=6, d_head=2, d_out=3)
    same = ff.Target(bare, **{k: v for k, v in target.weights.named().items() if k != "embed"})
    assert torch.allclose(target(X), same(table[[2, 0, 1]] + places[:3]), rtol=0, atol=1e-14)
    with pytest.raises(ff.SpecError, match="5 tokens need 5 positions, the table has 4"):
        ff.one_hot([0] * 5, 3, positions=4)


def test_rotary_scores_depend_on_distance_only(generator):
    q, k = torch.randn(2, 8, generator=generator, dtype=torch.float64)
    at = lambda x: rotate(x.expand(10, 8))  # noqa: E731
    scores = at(q) @ at(k).T
    for shift in range(1, 5):
        diagonal = torch.diagonal(scores, shift)
        assert torch.allclose(diagonal, diagonal[0].expand_as(diagonal), rtol=0, atol=1e-12)
    assert not torch.allclose(torch.diagonal(scores, 1)[0], torch.diagonal(scores, 2)[0])


def test_attention_in_one_buffer_is_softmax_of_the_scores(generator):
    q, k = torch.randn(2, 3, 7, 4, generator=generator, dtype=torch.float64)
    mask = torch.ones(7, 7, dtype=torch.bool).tril()
    want = softmax_weights(q @ k.mT, mask)
    assert torch.equal(attention_weights(q, k, mask), want)
    assert torch.equal(want, torch.softmax((q @ k.mT).masked_fill(~mask, -torch.inf), -1))
    q.requires_grad_()
    attention_weights(q, k, mask).square().sum().backward()
    slow = q.detach().clone().requires_grad_()
    softmax_weights(slow @ k.mT, mask).square().sum().backward()
    assert torch.allclose(q.grad, slow.grad, rtol=0, atol=1e-15)


def test_hardmax_averages_ties():
    scores = torch.tensor([[1.0, 3.0, 3.0], [2.0, 1.0, 0.0]])
    assert hardmax_weights(scores).tolist() == [[0, 0.5, 0.5], [1, 0, 0]]
    mask = torch.tensor([[True, True, False], [False, True, True]])
    assert hardmax_weights(scores, mask).tolist() == [[0, 1, 0], [0, 1, 0]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 0}, "heads must be a whole number of at least 1, got 0"),
        ({"d_head": 2.0}, "d_head must be a whole number"),
        ({"positions": "learned"}, "positions must be None or 'rotary'"),
        ({"positions": "rotary", "d_head": 3}, "d_head must be even, got 3"),
        ({"residual": 1}, "residual must be True or False"),
    ],
)
def test_spec_refuses(change, message):
    with pytest.raises(ff.SpecError, match=message):
        ff.TargetSpec(**({"heads": 2, "layers": 1, "d_in": 3, "d_head": 2} | change))


def _weights(spec, d_model=4, d_value=2):
    return {n: torch.ones(s, dtype=torch.float64) for n, s in weight_shapes(spec, d_model, d_value).items()}


def test_target_refuses_what_does_not_chain():
    spec = ff.TargetSpec(heads=2, layers=1, d_in=3, d_head=2)
    good = _weights(spec)
    ff.Target(spec, **good)
    with pytest.raises(ff.SpecError, match=r"key must have shape \(1, 2, 4, 2\).*got \(1, 2, 5, 2\)"):
        ff.Target(spec, **(good | {"key": torch.ones(1, 2, 5, 2, dtype=torch.float64)}))
    with pytest.raises(ff.SpecError, match=r"query must be a tensor \(layers, heads, rows, columns\), got \(4, 2\)"):
        ff.Target(spec, **(good | {"query": torch.ones(4, 2)}))
    with pytest.raises(ff.SpecError, match="embed may be left out only where it is the identity"):
        ff.Target(spec, **(good | {"embed": None}))
    with pytest.raises(ff.SpecError, match="all weights must be float64, or all float32"):
        ff.Target(spec, **(good | {"output": good["output"].float()}))
    bad = good["value"].clone()
    bad[0, 0, 0, 0] = torch.nan
    with pytest.raises(ff.SpecError, match="the target's value holds 1 NaN or infinite entries"):
        ff.Target(spec, **(good | {"value": bad}))
    with pytest.raises(ff.SpecError, match="the vocabulary names 2 tokens, d_in is 3"):
        ff.Target(spec, **good, card=ff.Card(("a", "b")))


@pytest.mark.parametrize(
    ("X", "mask", "message"),
    [
        (torch.zeros(0, dtype=torch.long), None, "the sequence is empty"),
        (torch.zeros(0, 3), None, "the sequence is empty"),
        (torch.zeros(0, 2, 3), None, "the input holds no sequence"),
        (torch.tensor([0, 3]), None, r"token ids must lie in 0..2 \(d_in = 3\), got 0..3"),
        (torch.tensor([-1]), None, "token ids must lie in 0..2"),
        (torch.zeros(2, 4), None, r"vectors must have 3 entries a token \(d_in\), got 4"),
        (torch.tensor([[0.0, torch.inf, 0.0]]), None, "the input holds 1 NaN or infinite"),
        (torch.tensor([True]), None, "inputs are integer token ids or real vectors, got torch.bool"),
        (torch.tensor(1), None, "needed token ids"),
        (torch.tensor([0, 1]), torch.ones(3, 3, dtype=torch.bool), r"must end in \(2, 2\), got \(3, 3\)"),
        (torch.tensor([0, 1]), torch.ones(2, 2), "a mask must be a bool tensor"),
        (torch.tensor([0, 1]), "casual", "mask must be None, 'causal' or a bool tensor, got 'casual'"),
        (torch.tensor([0, 1]), torch.tensor([[True, False], [False, False]]), r"mask row \[1\] lets its token attend"),
    ],
)
def test_inputs_refused(X, mask, message):
    target = ff.Target.random(ff.TargetSpec(heads=2, layers=1, d_in=3, d_head=2))
    with pytest.raises(ff.SpecError, match=message):
        target(X, mask)


def test_restricted_to_some_tokens():
    target = ff.Target.random(ff.TargetSpec(heads=2, layers=2, d_in=5, d_head=4, positions="rotary"), seed=1)
    few = target.on_tokens([4, 1, 2])
    assert (few.spec.d_in, few.spec.d_out) == (3, 5)
    ids = torch.tensor([[0, 2, 1, 0], [1, 1, 2, 0]])
    assert torch.allclose(few(ids), target(torch.tensor([4, 1, 2])[ids]), rtol=0, atol=1e-15)
    both = target.on_tokens([4, 1, 2], outputs=[3, 0])
    assert torch.allclose(both(ids), few(ids)[..., [3, 0]], rtol=0, atol=1e-15)
    with pytest.raises(ff.SpecError, match="outputs must be different ids"):
        target.on_tokens([0], outputs=[9])
    for bad in ([], [1, 1], [0, 5], [-1]):
        with pytest.raises(ff.SpecError, match=r"different ids in 0..4"):
            target.on_tokens(bad)


def test_random_target_is_reproducible_and_moves():
    spec = ff.TargetSpec(heads=2, layers=1, d_in=3, d_head=2)
    one, two, other = (ff.Target.random(spec, seed=s) for s in (5, 5, 6))
    assert torch.equal(one.weights.query, two.weights.query)
    assert not torch.equal(one.weights.query, other.weights.query)
    single = one.to(dtype=torch.float32)
    assert single.dtype == torch.float32
    X = np.eye(3)
    assert torch.allclose(single(X).double(), one(X), atol=1e-6)


def test_an_input_that_float32_cannot_hold_is_refused():
    target = ff.Target.random(ff.TargetSpec(heads=1, layers=1, d_in=3, d_head=2), seed=0).to(torch.float32)
    with pytest.raises(ff.SpecError, match="the input, in float32, holds 6 NaN or infinite entries"):
        target(torch.full((2, 3), 1e300, dtype=torch.float64))
