"""Certificates: hold for what was compiled, and do not for what was changed by a little."""

import copy
from dataclasses import replace

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


def test_the_bound_is_at_most_half_the_digits():
    """However ill conditioned the neurons are; a tolerance of one's own may be larger."""
    machine = build("SwiGLU", "random")
    target = ff.BlockTarget.random(machine.spec)
    program = machine.compile(target)
    loud = replace(program.report, condition=1e9, neuron_condition=1e9)
    certificate = machine.certify(replace_report(program, loud), target)
    assert certificate.checks[-1].bound == (2.0**-53) ** 0.5
    assert machine.certify(program, target, tolerance=0.5).checks[-1].bound == 0.5


def replace_report(program, report):
    changed = copy.copy(program)
    object.__setattr__(changed, "report", report)
    return changed


@pytest.mark.parametrize("shape", [(4, 4), (3, 4, 4)])
def test_a_mask_array_says_how_long_sequences_are(shape, generator):
    machine = build("SwiGLU", "sparse")
    target = ff.BlockTarget.random(machine.spec)
    mask = (torch.rand(shape, generator=generator) < 0.5) | torch.eye(4, dtype=torch.bool)
    assert machine.certify(machine.compile(target), target, mask=mask).holds


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
