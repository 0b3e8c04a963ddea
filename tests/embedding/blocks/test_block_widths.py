"""Widths before anything is built, what does not fit, and what is refused."""

import pytest
import torch
from cases import KINDS, gated, inputs

import fixedformer as ff
from fixedformer.embedding.blocks.layout import Layout


def counted(spec):
    """s_0 by the recursion as docs/theory/blocks.md states it, and m_b."""
    s, constants, D = (spec.d_model or 0) + spec.d_out, spec.d_out if spec.bias else 0, 2 if spec.mlp == "gated" else 1
    heads, own = spec.heads, 2 * spec.heads * spec.d_head
    for _ in range(spec.layers):
        q = spec.mlp_width * s
        if spec.bias:
            value_part = s if spec.residual or not spec.mlp else 0
            constants += own + value_part + (s + q * (2 + D) if spec.mlp else 0)
        elif spec.mlp == "plain":
            constants += q
        if spec.residual:
            s = own + (heads + 1) * (s + (D * q if spec.mlp else 0))
        else:
            s = own + heads * (D * q if spec.mlp else s)
    return s, constants


@pytest.mark.parametrize("name", KINDS)
def test_widths(name):
    spec = KINDS[name]
    found, machine = ff.widths(spec), ff.SparseBlockMachine(spec)
    assert (found.minimal, found.constants) == (machine.width, machine.constant_width) == counted(spec)
    program = machine.compile(ff.BlockTarget.random(spec))
    assert program.embedding.numel() + program.constants.numel() == found.program
    assert program.report.bytes == found.embedding_bytes
    if spec.norm:
        assert found.ratio == pytest.approx(program.report.ratio)
    else:
        assert found.ratio is None


def test_the_widths_of_the_design():
    assert ff.widths(gated()).minimal == 514
    assert ff.widths(gated(residual=False)).minimal == 164
    tiny = ff.BlockSpec(heads=8, layers=1, d_in=64, d_head=8, d_model=64, mlp_width=172, norm="rms")
    assert ff.widths(tiny).minimal == 2 * 64 + 9 * (128 + 2 * 172 * 128)


def test_sharing_halves_a_layer():
    """Copies of a gate are kept once: for wide outputs half the columns at one layer, a quarter at two."""
    for layers, factor in ((1, 0.6), (2, 0.35)):
        spec = gated(mlp_width=20, layers=layers, d_out=20)
        assert Layout(spec, shared=True).width <= factor * Layout(spec).width


def test_what_does_not_fit_names_the_bytes():
    spec = ff.BlockSpec(heads=8, layers=4, d_in=64, d_head=8, d_model=64, mlp_width=172, norm="rms")
    found = ff.widths(spec)
    assert found.ratio > 1e10
    for build in (ff.SparseBlockMachine, ff.RandomBlockMachine):
        with pytest.raises(ff.CapacityError, match=f"needs {found.embedding_bytes} bytes"):
            build(spec)
    with pytest.raises(ff.CapacityError, match=r"the weights of .* needs \d+ bytes"):
        ff.RandomBlockMachine(gated(layers=1, mlp_width=3000, d_out=20))


@pytest.mark.parametrize(("fields", "match"), [
    ({"mlp": "moe"}, "mlp must be one of"),
    ({"activation": "tanh"}, "activation must be one of"),
    ({"mlp_width": 0}, "mlp_width must be a whole number"),
    ({"mlp": None}, "needs an mlp"),
    ({"norm": "rms"}, "d_model must be a whole number.*depend on the hidden width"),
    ({"norm": "rms", "d_model": 2, "residual": False}, "needs residual=True"),
    ({"d_model": 2}, "leave d_model out"),
    ({"key_heads": 3}, "must divide heads"),
    ({"positions": "rotary"}, "must be even"),
    ({"positions": "learned"}, "positions must be one of"),
    ({"heads": 0}, "heads must be a whole number"),
    ({"norm_eps": -1.0}, "norm_eps at least 0"),
])  # fmt: skip
def test_specs_that_are_refused(fields, match):
    with pytest.raises(ff.SpecError, match=match):
        gated(**fields)


def test_targets_that_are_refused():
    spec = gated(norm="rms", d_model=3, bias=True)
    weights = ff.BlockTarget.random(spec).weights
    with pytest.raises(ff.SpecError, match=r"no weights of that name.*query_gain"):
        ff.BlockTarget(spec, **weights | {"query_gain": weights["query"]})
    with pytest.raises(ff.SpecError, match="gate must have shape"):
        ff.BlockTarget(spec, **{name: x for name, x in weights.items() if name != "gate"})
    with pytest.raises(ff.SpecError, match="d_model = 3"):
        ff.BlockTarget(spec, **weights | {"query": torch.zeros(2, 2, 4, 1)})
    with pytest.raises(ff.SpecError, match="float32"):
        ff.BlockTarget(spec, **weights | {"down": weights["down"].float()})
    with pytest.raises(ff.SpecError, match="NaN"):
        ff.BlockTarget(spec, **weights | {"down": weights["down"] * torch.nan})
    bare = {name: x for name, x in weights.items() if not name.endswith(("bias", "shift", "gain"))}
    filled = ff.BlockTarget(spec, **bare).weights
    assert float(filled["final_gain"].min()) == 1
    assert float(filled["down_bias"].abs().max()) == 0


def test_machines_that_are_refused():
    spec = gated()
    with pytest.raises(ff.SpecError, match="not looped"):
        ff.SparseBlockMachine(spec, looped=True)
    with pytest.raises(ff.SpecError, match="not looped"):
        ff.RandomBlockMachine(spec, looped=True)
    with pytest.raises(ff.CapacityError, match="needs width 514, got 513"):
        ff.RandomBlockMachine(spec, width=513)
    with pytest.raises(ff.SpecError, match="neurons_per_target must be at least 1"):
        ff.RandomBlockMachine(spec, neurons_per_target=0.5)
    with pytest.raises(ff.SpecError, match="distribution"):
        ff.RandomBlockMachine(spec, distribution="cauchy")
    plain = ff.TargetSpec(heads=2, layers=2, d_in=2, d_head=1)
    with pytest.raises(ff.SpecError, match="serves a BlockSpec"):
        ff.SparseBlockMachine(plain)
    for build in (ff.SparseMachine, ff.RandomMachine):
        with pytest.raises(ff.SpecError, match="serves a TargetSpec"):
            build(spec)
    machine, other = ff.SparseBlockMachine(spec), ff.RandomBlockMachine(gated(layers=1))
    with pytest.raises(ff.SpecError, match="this machine serves"):
        other.compile(ff.BlockTarget.random(spec))
    program = machine.compile(ff.BlockTarget.random(spec))
    with pytest.raises(ff.SpecError, match="compiled for machine"):
        other.run(program, inputs(spec))
    with pytest.raises(ff.SpecError, match="engine must be"):
        machine.run(program, inputs(spec), engine="fast")
    program.embedding = program.embedding[:, 1:]
    with pytest.raises(ff.SpecError, match="embedding and constants must be"):
        machine.run(program, inputs(spec))
