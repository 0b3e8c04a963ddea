"""Certificates: they hold where they should, they fail where they should, and their bounds are not loose."""

import json
import math
import random

import pytest
import torch
from machines import KINDS, build, sampled_spec

import fixedformer as ff
from fixedformer.certificate import peak
from fixedformer.embedding.accurate import Pair
from fixedformer.embedding.bounds import propagate
from fixedformer.embedding.certify import Audit, path_by_path
from fixedformer.embedding.readouts import TargetStack, readouts

SPEC = ff.TargetSpec(heads=2, layers=2, d_in=3, d_head=2)


def replaced(program, embedding):
    return ff.Program(embedding, program.spec, program.machine, program.machine_fingerprint, program.report)


def overflowing(dtype):
    """A target whose scores overflow in float32, not in float64."""
    named = ff.Target.random(SPEC, seed=1).weights.named()
    named = {name: tensor * 1e20 if name in ("query", "key") else tensor for name, tensor in named.items()}
    return ff.Target(SPEC, **{name: tensor.to(dtype) for name, tensor in named.items()})


def test_nan_never_holds():
    """float32 outputs that are NaN everywhere: against NaN and against numbers, compiled or read back."""
    machine, target = ff.SparseMachine(SPEC), overflowing(torch.float32)
    program = machine.compile(target)
    assert machine.run(program, torch.tensor([[0, 1, 2]])).isnan().any()
    certificate = machine.certify(program, target)
    assert not certificate.holds
    assert any(check.measured != check.measured for check in certificate.checks)
    assert not ff.certify_equal((machine, program), overflowing(torch.float64)).holds
    assert not ff.certify_equal(overflowing(torch.float64), target).holds


@pytest.mark.parametrize("values", [(math.nan, 1.0), (1.0, math.nan), (0.0, math.inf, math.nan)])
def test_a_peak_with_nan_is_nan(values):
    assert math.isnan(peak(*values))
    assert peak(0.0, 3.0, 1.0) == 3.0


@pytest.mark.parametrize("mask", [None, "causal", "any"])
@pytest.mark.parametrize("kind", KINDS)
def test_it_holds(kind, mask, generator):
    machine, target = build(kind, SPEC), ff.Target.random(SPEC, seed=2)
    if mask == "any":
        mask = (torch.rand(5, 5, generator=generator) < 0.5) | torch.eye(5, dtype=torch.bool)
    certificate = machine.certify(machine.compile(target), target, mask=mask)
    assert certificate.holds
    assert certificate.require() is certificate
    first = certificate.checks[0]
    assert first.cases == ff.widths(SPEC).minimal
    assert first.bound == 2.0**-52
    assert "exhaustive" in first.scope
    assert [check.claim.split(",")[0] for check in certificate.checks[1:]] == ["attention", "output"] * 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_any_single_entry_changed_by_a_millionth_fails(kind, seed):
    draw = random.Random(seed)
    spec = sampled_spec(draw, residual=False, widest=300)
    machine, target = build(kind, spec), ff.Target.random(spec, seed=seed, d_model=9)
    program = machine.compile(target)
    wanted = Pair(*readouts(TargetStack(target), target.weights.embed, machine.tree))
    for _ in range(40):
        row, column = draw.randrange(spec.d_in), draw.randrange(machine.width)
        bent = program.embedding.clone()
        bent[row, column] *= 1 + 1e-6
        shown = Pair(*readouts(machine, bent, machine.tree))
        ratio = wanted.minus(shown).abs() / machine.readout_scale(replaced(program, bent))
        assert float(ratio.max()) > 2.0**-52
    # and the certificate itself says so, for the last of them
    certificate = machine.certify(replaced(program, bent), target)
    assert not certificate.holds
    assert not certificate.checks[0].holds
    with pytest.raises(ff.CertificateError, match="every column of E R_all = W_all' does not hold"):
        certificate.require()


def test_a_visible_change_fails_every_check():
    """The sampled checks are no ornament: a change of 1e-3 breaks all five."""
    for kind in ("sparse", "random"):
        machine, target = build(kind, SPEC), ff.Target.random(SPEC, seed=2)
        program = machine.compile(target)
        bent = replaced(program, program.embedding * (1 + 1e-3))
        certificate = machine.certify(bent, target)
        # Every check also against the tightest honest tolerance, since the derived bound grows with the change itself
        strict = machine.certify(bent, target, tolerance=1e-9)
        assert not certificate.checks[0].holds
        assert not any(check.holds for check in strict.checks)


def test_the_wrong_target_fails():
    machine = ff.SparseMachine(SPEC)
    program = machine.compile(ff.Target.random(SPEC, seed=1))
    certificate = machine.certify(program, ff.Target.random(SPEC, seed=2))
    assert not any(check.holds for check in certificate.checks)


def test_inputs_tolerance_and_refusals():
    machine, target = ff.SparseMachine(SPEC), ff.Target.random(SPEC)
    program = machine.compile(target)
    X = torch.randn(4, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 4
    certificate = machine.certify(program, target, X, tolerance=1e-10)
    assert certificate.holds
    assert {check.bound for check in certificate.checks[1:]} == {1e-10}
    assert {check.cases for check in certificate.checks[1:]} == {4}
    assert "on the inputs given" in certificate.checks[1].scope
    assert "1-norm at most" in certificate.consequences["follows"]
    with pytest.raises(ff.SpecError, match="tolerance must be positive"):
        machine.certify(program, target, tolerance=0)
    other = ff.Target.random(ff.TargetSpec(heads=1, layers=1, d_in=3, d_head=2))
    with pytest.raises(ff.SpecError, match="the machine serves"):
        machine.certify(program, other)


def test_json_and_text_say_the_same():
    machine, target = ff.SparseMachine(SPEC), ff.Target.random(SPEC)
    certificate = machine.certify(machine.compile(target), target, seed=7)
    body = json.loads(certificate.to_json())
    assert body["holds"] is True
    assert body["context"]["seed"] == 7
    assert len(body["checks"]) == 5
    text = str(certificate)
    assert text.count("\n  holds  ") == 5
    assert "36 cases, exhaustive: all 36 columns" in text


def test_nothing_checked_never_holds():
    assert not ff.Certificate("empty", ()).holds
    with pytest.raises(ff.CertificateError, match="nothing was checked"):
        ff.Certificate("empty", ()).require()
    for cases, measured in ((0, 0.0), (3, float("nan")), (3, 2.0)):
        check = ff.Check("x", 1.0, measured, cases, "s", "s")
        assert not check.holds
        assert not ff.Certificate("one", (check,)).holds
    wild = ff.Certificate("wild", (ff.Check("x", float("inf"), 1.0, 1, "s", "s"),))
    assert not wild.holds
    assert json.loads(wild.to_json())["checks"][0]["bound"] is None
    assert "FAILS" in str(wild)


@pytest.mark.parametrize("residual", [False, True])
def test_paths_are_the_tree_in_preorder(residual, generator):
    """The certificate's walk and the compiler's agree on what lies where (two pieces of code, one layout)."""
    spec = ff.TargetSpec(heads=2, layers=3, d_in=2, d_head=2, d_out=3, residual=residual)
    machine, target = ff.RandomMachine(spec), ff.Target.random(spec, d_model=4)
    for stack, start in ((TargetStack(target), target.weights.embed), (machine, torch.ones(2, machine.width))):
        walked = path_by_path(stack, start.double(), spec.layers, spec.heads, spec.residual)
        assert [path for path, _ in walked] == sorted(path for path, _ in walked)
        assert len(walked) == sum((2 + residual) ** t for t in range(4))
        whole = torch.cat([block.hi for _, block in walked], dim=1)
        assert torch.equal(whole, readouts(stack, start.double(), machine.tree)[0])


def test_small_memory_splits_the_walk(monkeypatch):
    machine, target = ff.SparseMachine(SPEC), ff.Target.random(SPEC)
    program = machine.compile(target)
    whole = Audit.of(machine, program, target)
    monkeypatch.setattr("fixedformer.embedding.certify.MEMORY", 1)
    assert torch.equal(Audit.of(machine, program, target).wanted, whole.wanted)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_propagated_bounds_hold_and_are_not_loose(seed, residual):
    """Random read-out errors of 1e-7: what is seen stays below the bound, and above 1/3000 of it.

    The bound takes the worst case of every sum, so it may not be reached; two layers of two heads lose a factor of
    some hundreds. A bound a thousand times looser would fail here.
    """
    spec = ff.TargetSpec(heads=2, layers=2, d_in=4, d_head=3, residual=residual)
    machine, target = ff.SparseMachine(spec), ff.Target.random(spec, seed=seed)
    program = machine.compile(target)
    generator = torch.Generator().manual_seed(seed)
    bent = program.embedding + 1e-7 * torch.randn(program.embedding.shape, generator=generator, dtype=torch.float64)
    audit = Audit.of(machine, replaced(program, bent), target)
    limit = propagate(machine.tree, audit.wanted, audit.error)
    attention = output = 0.0
    for tokens in (1, 2, 4, 16):
        X = torch.randint(4, (64, tokens), generator=generator)
        other = replaced(program, bent)
        attention = max(attention, float((machine.attention(other, X) - target.attention(X)).abs().max()))
        output = max(output, float((machine.run(other, X) - target(X)).norm(dim=-1).max()))
    assert limit.attention / 3000 < attention <= limit.attention
    assert limit.output / 3000 < output <= limit.output


def test_softmax_moves_by_at_most_twice_tanh():
    """The one step that is analysis: scores within e move a softmax row by 2 tanh(e / 2) in 1-norm, and can."""
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for e in (1e-3, 0.1, 1.0, 3.0):
        limit = 2 * torch.tanh(torch.tensor(e / 2, dtype=torch.float64))
        scores = torch.randn(4000, 5, generator=generator, dtype=torch.float64) * 2
        signs = e * torch.randint(0, 2, (4000, 5), generator=generator).double().mul(2).sub(1)
        moved = (scores.softmax(-1) - (scores + signs).softmax(-1)).abs().sum(-1)
        assert float(moved.max()) <= limit
        # reached where half of the weight moves up and half down, seen from the middle
        two = torch.tensor([-e / 2, e / 2], dtype=torch.float64)
        reached = (two.softmax(-1) - (-two).softmax(-1)).abs().sum()
        worst = max(worst, float(reached / limit))
    assert worst == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("machine", [ff.RandomMachine, ff.SparseMachine])
def test_a_float32_target_and_a_float64_program(machine):
    """PyTorch's usual weights: judged by what they say, not by the roundings of their own float32 forward pass."""
    spec = ff.TargetSpec(heads=2, layers=2, d_in=8, d_head=4, residual=True, positions="rotary")
    target = ff.Target.random(spec, seed=0).to(torch.float32)
    fixed = machine(spec, seed=0, dtype=torch.float64) if machine is ff.RandomMachine else machine(spec)
    certificate = fixed.certify(fixed.compile(target), target)
    assert certificate.holds, str(certificate)
