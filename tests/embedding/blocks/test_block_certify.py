"""Certificates: hold for what was compiled, and do not for what was changed by a little."""

import pytest
import torch
from cases import KINDS, inputs

import fixedformer as ff
from fixedformer.embedding.blocks.layout import Layout


def build(name, kind):
    spec = KINDS[name]
    return ff.SparseBlockMachine(spec) if kind == "sparse" else ff.RandomBlockMachine(spec, neurons_per_target=1.5)


SMALL = [name for name, spec in KINDS.items() if Layout(spec, 1.5).width <= 1000]


@pytest.mark.parametrize("kind", ["sparse", "random"])
@pytest.mark.parametrize("name", SMALL)
def test_holds_and_notices(name, kind):
    machine = build(name, kind)
    target = ff.BlockTarget.random(machine.spec, seed=1)
    program = machine.compile(target)
    certificate = machine.certify(program, target)
    assert certificate.holds, str(certificate)
    claims = [check.claim for check in certificate.checks]
    assert any("E P_0 = W_E C_0" in claim for claim in claims)
    assert any("constant" in claim for claim in claims) == bool(machine.constant_width)
    assert sum(claim.startswith("output") for claim in claims) == 2
    for tensor in (program.embedding, program.constants):
        if not tensor.numel():
            continue
        flat = tensor.view(-1)
        place = int(flat.abs().argmax())
        kept = float(flat[place])
        flat[place] = kept * (1 + 1e-10)
        assert not machine.certify(program, target).holds, "every read-out is checked, to a few roundings"
        flat[place] = kept
    assert not machine.certify(program, ff.BlockTarget.random(machine.spec, seed=2)).holds


def test_options_and_refusals():
    machine = build("SwiGLU", "sparse")
    target = ff.BlockTarget.random(machine.spec)
    program = machine.compile(target)
    certificate = machine.certify(program, target, inputs=inputs(machine.spec), mask="causal", tolerance=1e-20)
    assert not certificate.holds
    assert certificate.checks[-1].scope == "on the inputs given"
    with pytest.raises(ff.SpecError, match="tolerance must be positive"):
        machine.certify(program, target, tolerance=0.0)
    with pytest.raises(ff.SpecError, match="the machine serves"):
        machine.certify(program, ff.BlockTarget.random(KINDS["Llama-like"]))
    assert torch.finfo(program.dtype).eps < 1e-15
