"""Lower bounds, the rank that proves them, and the machine that meets them."""

import itertools
import math

import pytest
import torch
from machines import relative

import fixedformer as ff
from fixedformer.embedding.shared_attention import rank_certificate


def definition(machine, program, X, attention):
    """X~ <- sum_h A^{l,h} X~ R_V^{l,h}, word for word."""
    spec, state = machine.spec, X @ program.embedding
    for layer in range(spec.layers):
        state = sum(attention[..., layer, h, :, :] @ state @ machine.dense_value(layer, h) for h in range(spec.heads))
    return state @ program.unembedding


@pytest.mark.parametrize("d_in", [1, 2])
@pytest.mark.parametrize("layers", range(1, 7))
@pytest.mark.parametrize("heads", [2, 3])
def test_exact_at_half_the_exponent(heads, layers, d_in, generator):
    if heads == 3 and layers > 4 and d_in == 2:
        d_in = 1  # the dense oracle's matrices
    spec = ff.TargetSpec(heads=heads, layers=layers, d_in=d_in, d_head=2)
    machine = ff.SharedAttentionMachine(spec)
    assert machine.width == heads ** math.ceil(layers / 2) * d_in
    X = torch.randn(2, 5, d_in, dtype=torch.float64, generator=generator)
    for seed in (1, 2):
        target = ff.Target.random(spec, seed=seed)
        program = machine.compile(target)
        attention = target.attention(X, "causal")
        truth = target(X, "causal")
        assert relative(machine.run(program, X, attention), truth) <= 1e-12
        assert relative(definition(machine, program, X, attention), truth) <= 1e-12
        assert program.machine_fingerprint == machine.fingerprint()
        assert set(machine.dense_value(layers - 1, 0).unique().tolist()) <= {0.0, 1.0}


def test_serves_any_attention_and_wider_targets(generator):
    """The identity holds for every matrix put in place of the attention, and d_model may exceed d_in."""
    spec = ff.TargetSpec(heads=2, layers=3, d_in=2, d_head=1, d_out=3)
    machine = ff.SharedAttentionMachine(spec, state=5, width=30)
    target = ff.Target.random(spec, d_model=4)
    program = machine.compile(target)
    A = torch.randn(3, 2, 4, 4, dtype=torch.float64, generator=generator)
    X = torch.randn(4, 2, dtype=torch.float64, generator=generator)
    w, state = target.weights, X @ target.weights.embed
    for layer in range(3):
        state = sum(A[layer, h] @ state @ w.value[layer, h] @ w.output[layer, h] for h in range(2))
    assert relative(machine.run(program, X, A), state @ w.unembed) <= 1e-12


@pytest.mark.parametrize(("heads", "layers"), list(itertools.product((2, 3), (2, 4))))
def test_the_bound_is_met_for_even_depth(heads, layers):
    spec = ff.TargetSpec(heads=heads, layers=layers, d_in=1, d_head=1)
    bound = ff.lower_bound(spec)
    machine = ff.SharedAttentionMachine(spec)
    assert machine.width == bound.shared_attention
    assert machine.width**2 == bound.paths == heads**layers
    assert machine.certify().holds, "all of m^2 is used: the matrix of paths is square and regular"
    with pytest.raises(ff.CapacityError, match=f"impossible.*m\\^2 = {(machine.width - 1) ** 2} < H\\^L"):
        ff.SharedAttentionMachine(spec, width=machine.width - 1)


def test_between_bound_and_construction():
    spec = ff.TargetSpec(heads=2, layers=3, d_in=2, d_head=1)  # bound 3, construction 8
    for width in (3, 7):
        with pytest.raises(ff.CapacityError, match=f"width {width} is below this construction.* only widths under 3"):
            ff.SharedAttentionMachine(spec, width=width)
    with pytest.raises(ff.CapacityError, match="width 2 is impossible"):
        ff.SharedAttentionMachine(spec, width=2)
    assert ff.SharedAttentionMachine(spec, width=9).width == 9


def test_rank_certificate_holds_at_the_bound_for_random_weights_and_not_below(generator):
    def movers(width, residual=False):
        heads = [[torch.randn(width, width, generator=generator) for _ in range(2)] for _ in range(4)]
        return [[torch.eye(width), *layer] if residual else layer for layer in heads]

    assert rank_certificate(movers(4)).holds  # 4^2 = 2^4
    below = rank_certificate(movers(3))
    assert not below.holds
    assert below.context["rank"] == 9, "no more than m^2"
    assert rank_certificate(movers(9, residual=True)).holds  # 9^2 = 3^4
    assert not rank_certificate(movers(8, residual=True)).holds
    same = [[torch.eye(4)] * 2] * 4
    assert rank_certificate(same).context["rank"] == 1


def test_targets_span_all_paths(generator):
    """The other half of the bound: tensors v^1 x .. x v^L span R^{B^L}, with v_0 = 1 (residual) too."""
    for residual in (False, True):
        vectors = torch.randn(200, 3, 2, dtype=torch.float64, generator=generator)
        if residual:
            vectors = torch.cat([torch.ones(200, 3, 1, dtype=torch.float64), vectors], dim=-1)
        tensors = torch.einsum("ni,nj,nk->nijk", *vectors.unbind(1)).flatten(1)
        bound = ff.lower_bound(ff.TargetSpec(heads=2, layers=3, d_in=1, d_head=1, residual=residual))
        assert int(torch.linalg.matrix_rank(tensors)) == bound.paths == (2 + residual) ** 3


def test_lower_bounds_lie_below_the_constructions():
    for heads, layers, d_out, residual in itertools.product((1, 2, 4), (1, 2, 3), (1, 5), (False, True)):
        spec = ff.TargetSpec(heads=heads, layers=layers, d_in=3, d_head=2, d_out=d_out, residual=residual)
        bound = ff.lower_bound(spec)
        assert bound.shared_attention <= bound.embedding_only <= ff.widths(spec).minimal
        assert (bound.shared_attention - 1) ** 2 < bound.paths <= bound.shared_attention**2


def test_refusals(generator):
    spec = ff.TargetSpec(heads=2, layers=2, d_in=2, d_head=1)
    machine = ff.SharedAttentionMachine(spec)
    with pytest.raises(ff.SpecError, match="residual=True"):
        ff.SharedAttentionMachine(ff.TargetSpec(heads=2, layers=2, d_in=2, d_head=1, residual=True))
    with pytest.raises(ff.SpecError, match="build it with state=6"):
        machine.compile(ff.Target.random(spec, d_model=6))
    with pytest.raises(ff.SpecError, match="this machine serves"):
        machine.compile(ff.Target.random(ff.TargetSpec(heads=3, layers=2, d_in=2, d_head=1)))
    with pytest.raises(ff.SpecError, match="state must be"):
        ff.SharedAttentionMachine(spec, state=0)
    program = machine.compile(ff.Target.random(spec))
    with pytest.raises(ff.SpecError, match="another machine"):
        ff.SharedAttentionMachine(spec, state=3).run(program, torch.zeros(2, 2), torch.zeros(2, 2, 2, 2))
    with pytest.raises(ff.SpecError, match="attention must be"):
        machine.run(program, torch.zeros(2, 2), torch.zeros(1, 2, 2, 2))
