"""Every machine against every target: exact, with one fingerprint, at any length and mask; and what is refused."""

import random

import pytest
import torch
from machines import KINDS, build, relative, sampled_mask, sampled_spec

import fixedformer as ff
from fixedformer.embedding.dense import RandomMachine
from fixedformer.embedding.solve import factorise

SMALL = ff.TargetSpec(heads=2, layers=2, d_in=3, d_head=2)


@pytest.mark.parametrize("seed", range(200))
def test_sparse_machines_are_exact(seed):
    """200 random targets, H 1-4, L 1-4, wide hidden states, rotary, residual, masks: 1e-12 by both engines."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    # Each tenth target is as wide as the dense oracle can be asked for here; the others stay quick.
    spec = sampled_spec(draw, widest=2300 if seed % 10 == 0 else 400)
    target = ff.Target.random(spec, seed=seed, d_model=draw.randint(1, 24), d_value=draw.randint(1, 6))
    looped = not spec.residual and draw.random() < 0.5
    machine = ff.SparseMachine(spec, looped=looped)
    program = machine.compile(target)
    tokens = draw.randint(1, 9)
    mask = sampled_mask(draw, tokens, generator)
    X = torch.randint(spec.d_in, (2, tokens), generator=generator)
    if draw.random() < 0.5:
        X = torch.randn(2, tokens, spec.d_in, generator=generator, dtype=torch.float64)
    for engine in ("dense", "path"):
        assert relative(machine.run(program, X, mask, engine), target(X, mask)) <= 1e-12
        gap = machine.attention(program, X, mask, engine) - target.attention(X, mask)
        assert float(gap.abs().max()) <= 1e-12


@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_random_machines_minimal_and_wider(seed, looped):
    draw, generator = random.Random(seed + 1000), torch.Generator().manual_seed(seed)
    spec = sampled_spec(draw, residual=False if looped else None, widest=500)
    target = ff.Target.random(spec, seed=seed, d_model=draw.randint(2, 24))
    X = torch.randint(spec.d_in, (3, 7), generator=generator)
    # Wide enough to tell 1.5 N from N, also where N is tiny
    for width, limit in ((None, 1e-8), (3 * ff.widths(spec).minimal // 2 + 4, 1e-11)):
        machine = ff.RandomMachine(spec, seed=seed, width=width, looped=looped)
        program = machine.compile(target)
        assert program.report.condition >= 1
        for engine in ("dense", "path"):
            assert relative(machine.run(program, X, "causal", engine), target(X, "causal")) <= limit
            gap = machine.attention(program, X, "causal", engine) - target.attention(X, "causal")
            assert float(gap.abs().max()) <= limit


@pytest.mark.parametrize("distribution", ["uniform", "gaussian", "orthogonal"])
def test_distributions(distribution):
    machine = ff.RandomMachine(SMALL, distribution=distribution)
    target = ff.Target.random(SMALL, seed=1)
    assert machine.certify(machine.compile(target), target).holds
    if distribution == "uniform":
        assert float(machine.tensors()["value"].abs().max()) <= machine.width**-0.5
    if distribution == "orthogonal":
        square = machine.dense_value(1, 1, torch.float64)
        assert torch.allclose(square @ square.T, torch.eye(machine.width, dtype=torch.float64), atol=1e-12)


def test_a_wider_draw_is_better_conditioned():
    spec = ff.TargetSpec(heads=2, layers=3, d_in=4, d_head=4)
    target = ff.Target.random(spec)
    tight, wide = (
        ff.RandomMachine(spec, width=width).compile(target).report.condition
        for width in (None, 3 * ff.widths(spec).minimal // 2)
    )
    assert wide < 30 < 100 < tight


@pytest.mark.parametrize("kind", KINDS)
def test_two_programs_one_fingerprint_every_length(kind):
    machine = build(kind, SMALL)
    before = machine.fingerprint()
    targets = [ff.Target.random(SMALL, seed=seed) for seed in (1, 2)]
    programs = [machine.compile(target) for target in targets]
    assert programs[0].machine_fingerprint == programs[1].machine_fingerprint == before
    assert not torch.equal(programs[0].embedding, programs[1].embedding)
    for tokens in (1, 2, 63, 500):
        X = torch.randint(3, (tokens,), generator=torch.Generator().manual_seed(tokens))
        for target, program in zip(targets, programs):
            assert relative(machine.run(program, X, "causal"), target(X, "causal")) <= 1e-9
    assert machine.fingerprint() == before
    again = build(kind, SMALL)
    assert again.fingerprint() == before, "the same machine, built again"


def test_fingerprint_sees_a_changed_tensor_and_another_rule():
    machine = ff.RandomMachine(SMALL)
    before = machine.fingerprint()
    machine.tensors()["key"][0, 0, 0, 0] += 1
    assert machine.fingerprint() != before
    turned = ff.TargetSpec(heads=2, layers=2, d_in=3, d_head=2, positions="rotary")
    assert ff.SparseMachine(turned).fingerprint() != ff.SparseMachine(SMALL).fingerprint()
    assert ff.SparseMachine(SMALL, width=100).fingerprint() != ff.SparseMachine(SMALL).fingerprint()


@pytest.mark.parametrize("kind", KINDS)
def test_engines_agree_for_programs_that_nothing_compiled(kind, generator):
    """Path space holds for every E, not only for solutions: it never sees a target."""
    machine = build(kind, SMALL)
    program = machine.compile(ff.Target.random(SMALL))
    program.embedding = torch.randn(3, machine.width, dtype=torch.float64, generator=generator) * 0.3
    X = torch.randint(3, (2, 6), generator=generator)
    dense = machine.run(program, X, "causal", "dense")
    assert relative(machine.run(program, X, "causal", "path"), dense) <= 1e-12
    program.embedding[1, 2] += 1  # written in place: read-outs kept from before must not be used
    changed = machine.run(program, X, "causal", "dense")
    assert relative(machine.run(program, X, "causal", "path"), changed) <= 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_a_trained_unembedding_replaces_the_machines(kind, generator, tmp_path):
    machine, target = build(kind, SMALL), ff.Target.random(SMALL)
    program = machine.compile(target)
    program.unembedding = torch.randn(machine.width, 3, dtype=torch.float64, generator=generator)
    X = torch.randint(3, (2, 6), generator=generator)
    dense = machine.run(program, X, "causal", "dense")
    assert relative(machine.run(program, X, "causal", "path"), dense) <= 1e-12
    assert relative(dense, target(X, "causal")) > 1e-3
    assert torch.allclose(machine.attention(program, X), target.attention(X), rtol=0, atol=1e-10)
    certificate = machine.certify(program, target)
    assert [check.holds for check in certificate.checks] == [False, True, False, True, False]
    ff.save_program(program, tmp_path / "p")
    assert torch.equal(ff.load_program(tmp_path / "p").unembedding, program.unembedding)
    program.unembedding = program.unembedding.T
    with pytest.raises(ff.SpecError, match="the unembedding must be"):
        machine.run(program, X)


@pytest.mark.parametrize("there", KINDS)
@pytest.mark.parametrize("here", KINDS)
def test_a_program_moves_from_machine_to_machine(here, there, generator):
    """Any program, here one that nothing compiled, with a trained unembedding, does the same on another machine."""
    source, goal = build(here, SMALL), build(there, SMALL)
    program = source.compile(ff.Target.random(SMALL))
    program.embedding = torch.randn(3, source.width, dtype=torch.float64, generator=generator) * 0.4
    program.unembedding = torch.randn(source.width, 3, dtype=torch.float64, generator=generator)
    ported = goal.port(program, source)
    X = torch.randint(3, (2, 6), generator=generator)
    want = source.run(program, X, "causal", "dense")
    assert relative(goal.run(ported, X, "causal", "dense"), want) <= 1e-9
    gap = goal.attention(ported, X) - source.attention(program, X)
    assert float(gap.abs().max()) <= 1e-9
    other = ff.SparseMachine(ff.TargetSpec(heads=1, layers=2, d_in=3, d_head=2))
    with pytest.raises(ff.SpecError, match="the program's machine serves"):
        other.port(program, source)


@pytest.mark.parametrize("kind", KINDS)
def test_moving_changes_nothing(kind):
    machine, target = build(kind, SMALL), ff.Target.random(SMALL)
    program = machine.compile(target)
    moved = machine.to("cpu")
    assert moved.fingerprint() == machine.fingerprint()
    X = torch.tensor([0, 1, 2])
    assert torch.equal(moved.run(program.to("cpu"), X), machine.run(program, X))


@pytest.mark.parametrize("residual", [False, True])
def test_perturbing_any_block_moves_both_engines_alike(residual):
    spec = ff.TargetSpec(heads=2, layers=2, d_in=3, d_head=2, residual=residual)
    target = ff.Target.random(spec, seed=3)
    for machine in (ff.SparseMachine(spec), ff.RandomMachine(spec)):
        program = machine.compile(target)
        X = torch.randint(3, (5,), generator=torch.Generator().manual_seed(0))
        for column in range(0, machine.width, 5):
            bent = program.embedding.clone()
            # One token's row only: a key that moves for all tokens alike changes no softmax
            bent[0, column] += 0.1 * bent.abs().max()
            other = ff.Program(bent, spec, program.machine, program.machine_fingerprint, program.report)
            dense, path = (machine.run(other, X, None, engine) for engine in ("dense", "path"))
            assert relative(path, dense) <= 1e-11
            assert relative(dense, target(X)) > 1e-6


def test_float32_programs():
    target = ff.Target.random(SMALL, dtype=torch.float32)
    X = torch.randint(3, (4, 9), generator=torch.Generator().manual_seed(0))
    for machine in (ff.SparseMachine(SMALL), ff.RandomMachine(SMALL, dtype=torch.float32, width=80)):
        program = machine.compile(target)
        assert program.dtype == torch.float32
        assert relative(machine.run(program, X), target(X)) <= 1e-5
        assert machine.certify(program, target).holds


def test_extra_width_stays_unused():
    target = ff.Target.random(SMALL)
    machine = ff.SparseMachine(SMALL, width=100)
    program = machine.compile(target)
    assert program.embedding.shape == (3, 100)
    assert not program.embedding[:, ff.widths(SMALL).minimal :].any()
    assert machine.certify(program, target).holds


def test_auto_counts_the_cost():
    """A machine much narrower than the paths is cheaper by its definition; a minimal one never is."""
    spec = ff.TargetSpec(heads=4, layers=3, d_in=30, d_head=2)
    narrow = ff.RandomMachine(spec, width=8)
    path, dense = narrow.cost(tokens=20)
    assert dense < path
    path, dense = ff.SparseMachine(spec).cost(tokens=20)
    assert path < dense / 10


def test_frozen_weights_of_ones_own(generator):
    """The weights of a network that exists serve as a machine: reprogrammed, untouched."""
    width = ff.widths(SMALL).minimal + 10
    draw = lambda *s: torch.randn(*s, dtype=torch.float64, generator=generator) * width**-0.5  # noqa: E731
    weights = {"query": draw(2, 2, width, 2), "key": draw(2, 2, width, 2), "value": draw(2, 2, width, width)}
    machine = ff.FrozenMachine(SMALL, **weights, unembed=draw(width, 3))
    target = ff.Target.random(SMALL)
    assert machine.certify(machine.compile(target), target).holds
    with pytest.raises(ff.SpecError, match=r"key must have shape"):
        ff.FrozenMachine(SMALL, **(weights | {"key": draw(2, 2, width, 3)}), unembed=draw(width, 3))
    bad = weights["value"].clone()
    bad[0, 0, 0, 0] = torch.nan
    with pytest.raises(ff.SpecError, match="the machine's value holds 1 NaN"):
        ff.FrozenMachine(SMALL, **(weights | {"value": bad}), unembed=draw(width, 3))


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_too_narrow_says_both_numbers():
    assert ff.widths(SMALL).minimal == 36
    with pytest.raises(ff.CapacityError, match="needs width 36, got 35; pass width=None for the smallest"):
        ff.SparseMachine(SMALL, width=35)
    narrow = ff.RandomMachine(SMALL, width=35)  # runs any program, compiles none
    with pytest.raises(ff.CapacityError, match="needs width 36, got 35"):
        narrow.compile(ff.Target.random(SMALL))


def test_rank_deficient_draws_are_refused():
    machine = ff.RandomMachine(SMALL)
    machine.tensors()["key"][1, 1].copy_(machine.tensors()["key"][1, 0])
    with pytest.raises(ff.CapacityError, match="rank-deficient: R_all has 36 columns and numerical rank 32"):
        machine.compile(ff.Target.random(SMALL))
    machine.tensors()["query"].zero_()
    with pytest.raises(ff.CapacityError, match="12 of the 36 columns of R_all are zero"):
        factorise(machine, machine.tree)


def test_looped_residual_is_refused_with_the_reason():
    spec = ff.TargetSpec(heads=2, layers=2, d_in=3, d_head=2, residual=True)
    for kind in ("sparse looped", "random looped"):
        with pytest.raises(ff.SpecError, match="layer 2 must see W_Q of layer 2 where layer 1 must see W_Q of layer 1"):
            build(kind, spec)


def test_what_does_not_fit_in_memory_is_refused_before_it_is_built():
    huge = ff.TargetSpec(heads=16, layers=8, d_in=64, d_head=64)
    with pytest.raises(ff.CapacityError, match=r"needs \d{13,} bytes \(.* TB\)"):
        ff.SparseMachine(huge)
    with pytest.raises(ff.CapacityError, match=r"the weights of RandomMachine.* needs \d{15,} bytes"):
        ff.RandomMachine(huge)


def test_memory_is_counted_before_factorising(monkeypatch):
    machine = ff.RandomMachine(SMALL)
    monkeypatch.setattr("fixedformer.capacity.available_bytes", lambda: 1000)
    with pytest.raises(ff.CapacityError, match=r"factorising RandomMachine.* needs 51840 bytes"):
        machine.compile(ff.Target.random(SMALL))


def test_programs_and_targets_of_others_are_refused():
    machine, other = ff.RandomMachine(SMALL, seed=0), ff.RandomMachine(SMALL, seed=1)
    target = ff.Target.random(SMALL)
    program = machine.compile(target)
    X = torch.tensor([0, 1])
    for call in (lambda: other.run(program, X), lambda: other.certify(program, target)):
        with pytest.raises(ff.SpecError, match="the program was compiled for machine"):
            call()
    with pytest.raises(ff.SpecError, match="build the machine from the target's own spec"):
        machine.compile(ff.Target.random(ff.TargetSpec(heads=1, layers=2, d_in=3, d_head=2)))
    with pytest.raises(ff.SpecError, match="engine must be 'auto', 'dense' or 'path', got 'fast'"):
        machine.run(program, X, engine="fast")
    program.embedding = program.embedding[:, :-1]
    with pytest.raises(ff.SpecError, match=r"the embedding must be \(3, 36\), got \(3, 35\)"):
        machine.run(program, X)


@pytest.mark.parametrize("options", [{"distribution": "cauchy"}, {"dtype": torch.float16}, {"width": 0}])
def test_random_machine_refuses(options):
    with pytest.raises(ff.SpecError, match=next(iter(options))):
        RandomMachine(SMALL, **options)
