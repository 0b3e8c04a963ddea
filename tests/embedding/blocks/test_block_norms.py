"""What makes a normalised machine universal: the fixed read-out of the stream; and why a plain LayerNorm is not."""

import pytest
import torch
from cases import KINDS, gated, inputs, relative

import fixedformer as ff
from fixedformer.embedding.normed import run_normed_paths
from fixedformer.embedding.rule import Rule


@pytest.mark.parametrize("kind", ["sparse", "random"])
@pytest.mark.parametrize("name", [name for name, spec in KINDS.items() if spec.norm])
def test_the_fixed_read_out_shows_the_stream_at_every_layer(name, kind):
    spec = KINDS[name]
    if kind == "random":
        spec = gated(
            **{field: getattr(spec, field) for field in ("norm", "d_model", "positions", "d_head", "bias")}, layers=1
        )
    machine = ff.SparseBlockMachine(spec) if kind == "sparse" else ff.RandomBlockMachine(spec, neurons_per_target=1.5)
    target, X = ff.BlockTarget.random(spec, seed=4), inputs(spec)
    program, streams = machine.compile(target), target.forward(X, "causal")[1]
    for engine in ("path", "dense"):
        shown = machine.streams(program, X, "causal", engine)
        assert len(shown) == len(streams) == spec.layers + 1
        for seen, truth in zip(shown, streams):
            assert relative(seen, truth) <= (1e-12 if kind == "sparse" else 1e-8)


def test_streams_need_a_norm():
    machine = ff.SparseBlockMachine(KINDS["SwiGLU"])
    program = machine.compile(ff.BlockTarget.random(machine.spec))
    with pytest.raises(ff.SpecError, match="only machines with a norm"):
        machine.streams(program, inputs(machine.spec))


RULE = Rule(residual=True, norm="pre", final_norm=True)  # LayerNorm over all m coordinates, no learned scale or shift


@pytest.fixture
def plain():
    """A fixed machine whose LayerNorms act on its m coordinates, and a way to run it under any E."""
    spec = ff.TargetSpec(heads=2, layers=2, d_in=3, d_head=2, d_out=1, residual=True)
    machine = ff.RandomMachine(spec)
    U = machine.dense_unembed(torch.float64)
    return machine, U, lambda E, X: run_normed_paths(machine, RULE, E, U, X, None)


def test_plain_layer_norm_cannot_shift(plain, generator):
    """X = 0 gives X E = 0 whatever E: one fixed output, against targets with any bias."""
    machine, _, run = plain
    X = torch.zeros(4, 3, dtype=torch.float64)
    outputs = [run(torch.randn(3, machine.width, dtype=torch.float64, generator=generator), X) for _ in range(5)]
    assert all(torch.equal(out, outputs[0]) for out in outputs)
    spec = gated(mlp=None, mlp_width=0, norm="layer", d_model=3, bias=True, d_in=3, d_out=1)
    wanted = []
    for value in (1.0, 2.0):
        weights = ff.BlockTarget.random(spec).weights | {"unembed_bias": torch.tensor([value], dtype=torch.float64)}
        target, ours = ff.BlockTarget(spec, **weights), ff.SparseBlockMachine(spec)
        wanted.append(target(X))
        assert relative(ours.run(ours.compile(target), X), target(X)) <= 1e-12, "the machine of theorem 4.1 can"
    assert torch.allclose(wanted[1] - wanted[0], torch.ones_like(wanted[0]))


def test_plain_layer_norm_cannot_scale(plain, generator):
    """A normalised row has 2-norm at most sqrt(m), so |output| <= sqrt(m) |U| for every E: no gain beyond that."""
    machine, U, run = plain
    bound = machine.width**0.5 * float(U.norm())
    X = torch.randn(4, 3, dtype=torch.float64, generator=generator)
    for size in (1e-3, 1.0, 1e6):
        E = torch.randn(3, machine.width, dtype=torch.float64, generator=generator) * size
        assert float(run(E, X).abs().max()) <= bound
    spec = gated(mlp=None, mlp_width=0, norm="layer", d_model=3, d_in=3, d_out=1)
    gain = torch.full((3,), 100 * bound, dtype=torch.float64)
    target = ff.BlockTarget(spec, **ff.BlockTarget.random(spec).weights | {"final_gain": gain})
    ours = ff.SparseBlockMachine(spec)
    assert float(target(X).abs().max()) > bound
    assert relative(ours.run(ours.compile(target), X), target(X)) <= 1e-12
