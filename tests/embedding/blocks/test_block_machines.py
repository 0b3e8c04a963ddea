"""Machines with MLPs, biases and norms against the target: exact, one fingerprint, nothing but the program is read."""

import dataclasses
import random
import statistics

import block_oracle as oracle
import pytest
import torch
from cases import KINDS, gated, inputs, relative

import fixedformer as ff
from fixedformer.embedding.blocks.layout import Layout

ROUNDOFF = 2.0**-53


@pytest.mark.parametrize("name", KINDS)
def test_targets_are_the_definition(name):
    spec = KINDS[name]
    target, X = ff.BlockTarget.random(spec, seed=3), inputs(spec, batch=1)
    for mask in (None, "causal"):
        truth = oracle.run(spec, target.weights, X[0].numpy(), causal=mask is not None)
        assert relative(target(X[0], mask), torch.from_numpy(truth)) <= 1e-13


@pytest.mark.parametrize("seed", range(50))
def test_sparse_glu_machines_are_exact(seed):
    """50 random targets, SwiGLU, GeGLU, ReGLU, with and without residual connections: 1e-12, and dense = path."""
    draw = random.Random(seed)
    layers = draw.randint(1, 2)
    spec = gated(
        draw.choice(["silu", "gelu", "relu"]), heads=draw.randint(1, 2), layers=layers, d_in=draw.randint(1, 3),
        d_out=draw.randint(1, 2 if layers == 2 else 4), d_head=draw.randint(1, 3), residual=seed % 2 == 0,
        mlp_width=draw.randint(1, 2 if layers == 2 else 5),
    )  # fmt: skip
    target = ff.BlockTarget.random(spec, seed=seed, d_model=draw.randint(1, 5))
    machine = ff.SparseBlockMachine(spec)
    program, X = machine.compile(target), inputs(spec, seed)
    truth = target(X, "causal")
    path, dense = (machine.run(program, X, "causal", engine) for engine in ("path", "dense"))
    assert relative(path, truth) <= 1e-12
    assert relative(dense, truth) <= 1e-12
    assert relative(path, dense) <= 1e-11
    assert program.cached().layout.shared, "copies of a neuron share their gate"


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", KINDS)
def test_sparse_machines_of_every_kind(name, seed):
    spec = KINDS[name]
    machine = ff.SparseBlockMachine(spec)
    before = machine.fingerprint()
    target = ff.BlockTarget.random(spec, seed=seed)
    program, X = machine.compile(target), inputs(spec, seed)
    for mask in (None, "causal"):
        for engine in ("path", "dense"):
            assert relative(machine.run(program, X, mask, engine), target(X, mask)) <= 1e-12
    ids = torch.tensor([0, 1, 1, 0])
    assert relative(machine.run(program, ids), target(ids)) <= 1e-12
    assert machine.fingerprint() == before == program.machine_fingerprint
    other = machine.compile(ff.BlockTarget.random(spec, seed=seed + 10))
    assert not torch.equal(other.embedding, program.embedding)
    for ones in (machine.matrix("query", 0), machine.matrix("value", 0, 0)):
        assert set(ones.unique().tolist()) <= {0.0, 1.0}
        assert float(ones.sum(1).max()) <= 1, "at most one 1 in a row"


@pytest.mark.parametrize("residual", [False, True])
def test_random_machines_at_minimal_width(residual):
    """Fifty draws: the median, and every error within 1000 roundings x cond(P_0) x (max cond(B_j), over all layers)."""
    spec, errors = gated(residual=residual), []
    for seed in range(50):
        machine, target = ff.RandomBlockMachine(spec, seed=seed), ff.BlockTarget.random(spec, seed=seed)
        program, X = machine.compile(target), inputs(spec, seed)
        error = relative(machine.run(program, X, "causal"), target(X, "causal"))
        assert error <= 1000 * ROUNDOFF * program.report.condition * program.report.neuron_condition
        errors.append(error)
    assert statistics.median(errors) <= 1e-10


@pytest.mark.parametrize(
    ("residual", "seed"), [(False, seed) for seed in range(15)] + [(True, seed) for seed in range(5)]
)
def test_more_neurons_and_width_cure_the_tail(residual, seed):
    spec = gated(residual=residual)
    width = int(1.3 * Layout(spec, 1.5).width)
    machine = ff.RandomBlockMachine(spec, seed=seed, width=width, neurons_per_target=1.5)
    target = ff.BlockTarget.random(spec, seed=seed)
    program, X = machine.compile(target), inputs(spec, seed)
    assert program.report.neuron_condition <= 2000
    for engine in ("path", "dense"):
        assert relative(machine.run(program, X, "causal", engine), target(X, "causal")) <= 1e-9


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", KINDS)
def test_random_machines_of_every_kind(name, seed):
    spec = KINDS[name]
    width = Layout(spec, 1.5).width
    if width > 1300:
        spec = gated(**{field: getattr(spec, field) for field in ("norm", "d_model", "positions", "d_head")}, layers=1)
    machine = ff.RandomBlockMachine(spec, seed=seed, neurons_per_target=1.5, width=int(1.2 * Layout(spec, 1.5).width))
    before, target = machine.fingerprint(), ff.BlockTarget.random(spec, seed=seed)
    program, X = machine.compile(target), inputs(spec, seed)
    for engine in ("path", "dense"):
        assert relative(machine.run(program, X, "causal", engine), target(X, "causal")) <= 1e-8
    assert machine.fingerprint() == before


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_gelu_blocks_behind_norms_with_gains_and_biases(norm):
    """The claim for pre-RMSNorm and pre-LayerNorm: 1e-9 on the sparse machine, 1e-8 on the random one."""
    one = gated("gelu", mlp="plain", bias=True, norm=norm, d_model=3, layers=1, mlp_width=4, d_in=3)
    two = gated("gelu", mlp="plain", bias=True, norm=norm, d_model=2, d_out=1)
    for spec, seed in ((one, 0), (one, 1), (two, 2)):
        target, X = ff.BlockTarget.random(spec, seed=seed), inputs(spec, seed)
        sparse = ff.SparseBlockMachine(spec)
        drawn = ff.RandomBlockMachine(spec, neurons_per_target=1.5, width=int(1.2 * Layout(spec, 1.5).width))
        for machine, limit in ((sparse, 1e-9), (drawn, 1e-8)):
            program = machine.compile(target)
            for engine in ("path", "dense"):
                assert relative(machine.run(program, X, "causal", engine), target(X, "causal")) <= limit


@pytest.mark.parametrize("kind", ["sparse", "random"])
@pytest.mark.parametrize("name", KINDS)
def test_run_sees_the_program_and_nothing_else(name, kind):
    """Change an entry in every block of E and of e_b, and sampled ones: fast and dense outputs change, and alike."""
    spec = KINDS[name]
    if kind == "random" and Layout(spec).width > 700:  # the dense oracle's matrices
        spec = dataclasses.replace(spec, layers=1)
    machine = ff.SparseBlockMachine(spec)
    if kind == "random":
        machine = ff.RandomBlockMachine(spec, neurons_per_target=1.5, width=int(1.2 * Layout(spec, 1.5).width))
    program, X = machine.compile(ff.BlockTarget.random(spec, seed=5)), inputs(spec)
    generator, seen = torch.Generator().manual_seed(1), 0
    before = machine.run(program, X, "causal")
    blocks = (machine.layout.levels[0].parts.values(), machine.layout.constants.values())
    for tensor, parts in zip((program.embedding, program.constants), blocks):
        flat = tensor.view(-1)
        places = torch.randperm(flat.numel(), generator=generator)[: 30 if kind == "sparse" else 6].tolist()
        places += [int(torch.randint(part.start, part.stop, (), generator=generator)) for part in parts]
        for place in places:
            kept = float(flat[place])
            flat[place] += 0.3 + abs(kept)
            path, dense = (machine.run(program, X, "causal", engine) for engine in ("path", "dense"))
            assert relative(path, dense) <= (1e-12 if kind == "sparse" else 1e-9)
            seen += bool((path - before).abs().max() > 1e-12 * before.abs().max())
            flat[place] = kept
    assert seen >= 4, "entries matter"


def test_every_part_of_the_embedding_matters_once_copies_differ():
    """Random E, which nothing compiled: no gates are shared, and path space still is the definition."""
    for name in ("SwiGLU", "GPT-2-like", "ReLU MLP, biases, no skip"):
        spec = KINDS[name]
        machine = ff.SparseBlockMachine(spec)
        program, X = machine.compile(ff.BlockTarget.random(spec)), inputs(spec)
        generator = torch.Generator().manual_seed(2)
        program.embedding = torch.randn(program.embedding.shape, generator=generator, dtype=torch.float64) * 0.3
        path, dense = (machine.run(program, X, "causal", engine) for engine in ("path", "dense"))
        assert not program.cached().layout.shared
        assert relative(path, dense) <= 1e-12


def test_learned_positions_are_extra_one_hot_inputs():
    spec = gated("gelu_tanh", mlp="plain", bias=True, norm="layer", d_model=3, layers=1, d_in=4 + 6, d_out=2)
    target, machine = ff.BlockTarget.random(spec), ff.SparseBlockMachine(spec)
    X = ff.one_hot(torch.tensor([[3, 1, 0, 2, 2]]), 4, positions=6)
    assert relative(machine.run(machine.compile(target), X, "causal"), target(X, "causal")) <= 1e-12


def test_float32_targets():
    spec = KINDS["GPT-2-like"]
    target, machine = ff.BlockTarget.random(spec, dtype=torch.float32), ff.SparseBlockMachine(spec)
    program = machine.compile(target)
    assert program.dtype == torch.float32
    assert relative(machine.run(program, inputs(spec)), target(inputs(spec))) <= 1e-5
    assert machine.certify(program, target).holds


@pytest.mark.parametrize("spec", [
    ff.BlockSpec(heads=8, layers=1, d_in=64, d_head=8, mlp_width=172),
    ff.BlockSpec(heads=8, layers=1, d_in=64, d_head=8, d_model=64, mlp_width=172, norm="rms", positions="rotary",
                 key_heads=4),
    ff.BlockSpec(heads=2, layers=2, d_in=4, d_head=2, d_model=4, mlp_width=8, norm="rms"),
    ff.BlockSpec(heads=1, layers=2, d_in=5, d_head=4, mlp_width=16, residual=False),
], ids=["64 wide", "64 wide, RMSNorm", "two layers", "two layers, no skip"])  # fmt: skip
def test_blocks_of_real_sizes_run_without_any_matrix_of_the_machine(spec, monkeypatch):
    monkeypatch.setattr(ff.SparseBlockMachine, "matrix", None)
    monkeypatch.setattr(ff.SparseBlockMachine, "maps", None)
    target, machine = ff.BlockTarget.random(spec), ff.SparseBlockMachine(spec)
    program, X = machine.compile(target), torch.randint(spec.d_in, (1, 12))
    assert relative(machine.run(program, X, "causal"), target(X, "causal")) <= 1e-12
    assert program.cached().layout.shared
