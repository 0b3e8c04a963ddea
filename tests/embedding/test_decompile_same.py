"""When two networks are shown to be one: whatever cannot be seen may differ, whatever can be seen may not."""

import pytest
import torch
from machines import relative
from programs import a_machine, a_program

import fixedformer as ff

KINDS = ["plain", "residual", "rotary", "residual rotary"]


def a_target(kind, seed=1, **options):
    spec = ff.TargetSpec(3, 3, 4, 2, 3, "residual" in kind, "rotary" if "rotary" in kind else None)
    return ff.Target.random(spec, seed, **({"d_model": 6, "d_value": 3} | options))


def disguised(target, seed=0):
    """Another basis of the state, other bases of queries with keys and of values, heads in another order."""
    spec, generator = target.spec, torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    w = target.weights.named()
    turn = draw(spec.layers, spec.heads, spec.d_head, spec.d_head)
    if spec.positions == "rotary":  # what commutes with turning a plane: turns and stretches of that plane
        a, b = turn[..., 0, 0], turn[..., 0, 1]
        turn = torch.stack([torch.stack([a, b], -1), torch.stack([-b, a], -1)], -2)
    w["query"], w["key"] = w["query"] @ turn, w["key"] @ torch.linalg.inv(turn).mT
    inner = draw(spec.layers, spec.heads, target.weights.d_value, target.weights.d_value)
    w["value"], w["output"] = w["value"] @ inner, torch.linalg.inv(inner) @ w["output"]
    basis = draw(target.weights.d_model, target.weights.d_model)
    inverse = torch.linalg.inv(basis)
    w |= {name: inverse @ w[name] for name in ("query", "key", "value", "unembed")}
    w |= {name: w[name] @ basis for name in ("output", "embed")}
    order = [torch.randperm(spec.heads, generator=generator) for _ in range(spec.layers)]
    for name in ("query", "key", "value", "output"):
        w[name] = torch.stack([w[name][layer, heads] for layer, heads in enumerate(order)])
    return ff.Target(spec, **w), order


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_a_disguise_is_seen_through(kind, seed):
    target = a_target(kind, seed)
    other, order = disguised(target, seed)
    X = torch.randint(4, (2, 6), generator=torch.Generator().manual_seed(0))
    assert relative(other(X, "causal"), target(X, "causal")) <= 1e-9, "the disguise itself is right"
    told = ff.same_program(target, other)
    assert told.equal
    assert bool(told)
    assert told.differs_on is None
    for layer, pairs in enumerate(told.heads):
        assert {b[0]: a[0] for a, b in pairs} == {i: int(h) for i, h in enumerate(order[layer])}
    machine = a_machine(target.spec, "1.5N")
    assert ff.same_program((machine, machine.compile(target)), other)
    assert str(told).startswith("equal: all scores and outputs agree")


@pytest.mark.parametrize("name", ["query", "key", "value", "output", "embed", "unembed"])
@pytest.mark.parametrize("kind", KINDS)
def test_any_changed_weight_is_found_with_an_input_that_shows_it(kind, name):
    target = a_target(kind)
    other, _ = disguised(target)
    w = other.weights.named()
    w[name] = w[name].clone()
    w[name][(-1,) * (w[name].ndim - 2)][0, 0] += 1e-2 * float(w[name].abs().max())
    told = ff.same_program(target, changed := ff.Target(target.spec, **w))
    assert not told
    assert told.gap <= told.tolerance or "differ by" in told.reason
    X, mask = told.differs_on
    gap = (target(X, mask) - changed(X, mask)).abs().max()
    assert float(gap) > 0
    assert f"{told.difference:.1e}" in str(told)
    assert "not shown equal" in str(told)


def test_split_and_dead_heads_change_nothing():
    """A head may be two heads with its scores that share its work; one that brings nothing may be there or not."""
    target = a_target("plain")
    w = target.weights.named()
    wider = ff.TargetSpec(5, 3, 4, 2, 3)
    more = {name: torch.cat([w[name], w[name][:, :1], w[name][:, 1:2]], dim=1) for name in ("query", "key", "value")}
    more["output"] = torch.cat([w["output"], w["output"][:, :1] * 0.25, w["output"][:, 1:2] * 0], dim=1)
    more["output"][:, 0] *= 0.75
    more["query"][:, 4] += 1  # scores of its own, but what it brings is 0
    other = ff.Target(wider, **more, embed=w["embed"], unembed=w["unembed"])
    assert ff.same_program(target, other)
    assert ff.same_program(other, target)
    more["output"][:, 4] += 0.1
    assert not ff.same_program(target, ff.Target(wider, **more, embed=w["embed"], unembed=w["unembed"]))


def test_equal_on_tokens_alone():
    machine = a_machine(ff.TargetSpec(2, 2, 3, 2, 4), "sparse")
    program = a_program(machine)
    small = ff.decompile(machine, program, tokens=True)
    assert ff.same_program((machine, program), small, tokens=True)
    told = ff.same_program((machine, program), small)
    assert not told
    assert told.differs_on[0].is_floating_point(), "only vectors can tell them apart"


def test_not_shown_equal_is_not_shown_different():
    """A constant added to all keys leaves softmax as it is: the scores differ, no input does, and it says just that."""
    spec = ff.TargetSpec(1, 1, 3, 2, 3)
    target = ff.Target.random(spec)
    w = target.weights.named()
    # On tokens, adding c to every row of the embedding's keys adds a constant to each key
    w["key"] = w["key"] + torch.linalg.pinv(w["embed"]) @ torch.ones(3, 2, dtype=torch.float64)
    told = ff.same_program(target, ff.Target(spec, **w), tokens=True)
    assert not told
    assert told.differs_on is None
    assert told.difference is None
    assert "no input on which they differ was found" in str(told)


def test_small_differences_are_seen_relative_to_the_tolerance():
    target = a_target("plain")
    w = target.weights.named()
    w["unembed"] = w["unembed"] * (1 + 1e-6)
    other = ff.Target(target.spec, **w)
    assert not ff.same_program(target, other)
    assert ff.same_program(target, other, tolerance=1e-5)
    single = target.to(dtype=torch.float32)
    assert ff.same_program(target, single), "float32 has half as many digits to agree on"
    assert not ff.same_program(target, single, tolerance=1e-10)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"layers": 2}, "layers is 3 and 2"),
        ({"residual": True}, "residual is False and True"),
        ({"positions": "rotary"}, "positions is None and rotary"),
    ],
)
def test_other_architectures_are_sampled_only(change, reason):
    base = {"heads": 3, "layers": 3, "d_in": 4, "d_head": 2, "d_out": 3}
    other = ff.Target.random(ff.TargetSpec(**(base | change)), d_model=6)
    told = ff.same_program(a_target("plain"), other)
    assert not told
    assert told.reason == reason
    assert told.differs_on is not None


def test_refusals():
    target = a_target("plain")
    with pytest.raises(ff.SpecError, match="d_out is 3 and 4"):
        ff.same_program(target, ff.Target.random(ff.TargetSpec(3, 3, 4, 2, 4)))
    with pytest.raises(ff.SpecError, match="needed a Target or a pair"):
        ff.same_program(target, "target")
    with pytest.raises(ff.SpecError, match="only networks of one spec can be equal"):
        ff.certify_equal(target, ff.Target.random(ff.TargetSpec(2, 3, 4, 2, 3)))
    with pytest.raises(ff.SpecError, match="nothing can be compared"):
        ff.agreement(target, ff.Target.random(ff.TargetSpec(3, 3, 5, 2, 3)), torch.tensor([[0]]))


@pytest.mark.parametrize("kind", ["sparse", "looped", "1.5N", "N/2", "residual", "rotary"])
def test_certificates_hold_and_fail(kind):
    """Exact results hold with room to spare; one weight off by 1e-9 does not."""
    spec = ff.TargetSpec(2, 2, 4, 2, 3, "residual" in kind, "rotary" if "rotary" in kind else None)
    machine = a_machine(spec, kind)
    program = a_program(machine)
    target = ff.decompile(machine, program)
    certificate = ff.certify_equal((machine, program), target)
    assert certificate.holds
    first = certificate.checks[0]
    assert first.scope.startswith("exhaustive")
    assert first.cases == 2 * 8 + 3
    assert first.measured > 0
    for name in ("query", "key", "value", "output", "embed", "unembed"):
        w = target.weights.named()
        w[name] = w[name] * (1 + 1e-9)
        if name == "query":
            w["query"][0] /= 1 + 1e-9  # only the second layer's
        assert not ff.certify_equal((machine, program), ff.Target(spec, **w)).checks[0].holds
