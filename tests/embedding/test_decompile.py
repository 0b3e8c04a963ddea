"""Every program read back is the program: outputs, attention, ranks, widths, round trips, against listed paths."""

import time

import hankel_oracle as oracle
import numpy as np
import pytest
import torch
from machines import relative
from programs import a_machine, a_program, a_spec, same_function

import fixedformer as ff

# heads, layers, d_in, d_head, d_out
SHAPES = [
    (4, 2, 4, 24, 4), (2, 2, 30, 28, 30), (2, 3, 30, 28, 30), (2, 4, 30, 30, 30), (1, 4, 5, 2, 3), (3, 3, 2, 2, 5),
    (2, 3, 5, 4, 2), (3, 2, 4, 6, 4), (1, 1, 6, 2, 6), (4, 3, 2, 2, 1),
]  # fmt: skip
KINDS = ["sparse", "looped", "1.5N", "N/2", "residual", "rotary", "residual rotary N/2"]


def generic_ranks(machine):
    """Section 11: min(V B^l, columns behind the cut, m) where nothing is special."""
    tree, V, m = machine.tree, machine.spec.d_in, machine.width
    return tuple(min(V * tree.branching**cut, tree.subtree_widths[cut], m) for cut in range(tree.layers + 1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_program_is_a_small_transformer(shape, kind):
    """10 shapes x (sparse, looped, random at 1.5 N and N/2, residual, rotary): 1e-12, ranks as the formula says."""
    spec = a_spec(shape, kind)
    if ff.widths(spec).minimal > 1100 and "sparse" not in kind:
        pytest.skip("wide: in test_any_wide_program")
    check_exact(spec, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[2] == 30], ids=str)
def test_any_wide_program(shape, kind):
    spec = a_spec(shape, kind)
    if ff.widths(spec).minimal > 6000 and "N" in kind:
        pytest.skip("a random residual machine for (2, 4, 30, 30) takes 0.8 GB and half a minute to draw")
    check_exact(spec, kind)


def check_exact(spec, kind):
    machine = a_machine(spec, kind)
    program = a_program(machine)
    target = ff.decompile(machine, program)
    report = target.report
    assert report.ranks == generic_ranks(machine)
    assert report.error <= 1e-12
    assert target.weights.d_model == report.exact_width == report.width
    if not spec.residual:
        assert report.width == max(report.ranks)
        wide = (spec.d_in * spec.heads**cut for cut in range(spec.layers))
        assert report.width <= max(*wide, spec.d_in, spec.d_out)
    same_function(machine, program, target, 1e-12)


@pytest.mark.parametrize("kind", ["sparse", "looped", "1.5N", "N/2", "residual", "residual N/2"])
@pytest.mark.parametrize("shape", [(2, 3, 3, 2, 2), (1, 3, 4, 2, 3), (3, 2, 2, 4, 5)], ids=str)
def test_ranks_and_widths_are_those_of_listed_paths(shape, kind):
    """Every cut, every head, by numpy on matrices that list all paths; for residual stacks theorem 2's width."""
    machine = a_machine(a_spec(shape, kind), kind, seed=1)
    # A program of low rank, so that nothing is generic: two of its rows are mixtures of others, one column block is 0
    program = a_program(machine, seed=1)
    program.embedding[-1] = program.embedding[0] * 2
    program.embedding[:, : machine.width // 5] = 0
    target, listed = ff.decompile(machine, program), oracle.of_program(machine, program)
    cuts = range(machine.spec.layers + 1)
    assert target.report.ranks == tuple(listed.rank(cut) for cut in cuts)
    first = int(machine.spec.residual)
    for cut in cuts[1:]:
        heads = tuple(listed.rank(cut, head + first) for head in range(machine.spec.heads))
        assert target.report.value_widths[cut - 1] == heads
    width = max(listed.rank(cut) for cut in cuts)
    if machine.spec.residual:
        width = listed.rank(0) + sum(listed.rank(cut) - listed.rank(cut, 0) for cut in cuts[1:])
    assert target.weights.d_model == max(width, 1)
    again = oracle.of_target(target)
    assert listed.distance(again) <= 1e-13 * np.linalg.norm(listed.hankel(0))


@pytest.mark.parametrize("residual", [False, True])
def test_a_planted_width_is_found_never_more(residual):
    """Compiled from d_model = 5 on machines hundreds wide: 5 comes back, and value width 2 with it."""
    spec = ff.TargetSpec(2, 3, 9, 4, 6, residual, "rotary")
    planted = ff.Target.random(spec, seed=4, d_model=5, d_value=2)
    # The narrowest random machine is ill-conditioned: noise of 1e-12, and still no dimension too many
    for kind, limit in (("sparse", 1e-12), ("1.5N", 1e-12), ("N", 1e-9)):
        machine = a_machine(spec, kind)
        program = machine.compile(planted)
        assert kind != "N" or program.report.condition > 1000
        target = ff.decompile(machine, program)
        assert target.weights.d_model == 5
        assert target.weights.d_value == target.report.d_value == 2
        same_function(machine, program, target, limit)
        assert ff.same_program(target, planted)
        assert ff.certify_equal((machine, program), target).holds


@pytest.mark.parametrize("kind", ["sparse", "looped", "1.5N", "residual", "rotary"])
def test_round_trip_of_any_program(kind):
    """compile(decompile(E)) shows what E shows."""
    machine = a_machine(a_spec((2, 3, 4, 2, 3), kind), kind)
    program = a_program(machine, seed=2)
    again = machine.compile(ff.decompile(machine, program))
    assert relative(machine.readouts(again), machine.readouts(program)) <= 1e-12


def test_narrow_deep_machines_are_read_without_their_paths(monkeypatch):
    """m = 20 of N = 3064: states stand for rows of read-outs, and both ways give one answer."""
    spec = ff.TargetSpec(2, 8, 4, 2)
    machine = ff.RandomMachine(spec, width=20)
    program = a_program(machine)
    explicit = ff.decompile(ff.RandomMachine(spec, width=200), a_program(ff.RandomMachine(spec, width=200)))
    assert explicit.report.ranks == (4, 8, 16, 32, 64, 88, 40, 16, 4)

    def refuse(*_):
        raise AssertionError("read-outs of all paths were formed")

    monkeypatch.setattr("fixedformer.embedding.decompile.show", refuse)
    target = ff.decompile(machine, program)
    assert target.report.ranks == (4, 8, 16, 20, 20, 20, 20, 16, 4)
    same_function(machine, program, target, 1e-12)


@pytest.mark.parametrize("kind", ["sparse", "N/2", "residual"])
def test_a_trained_unembedding_is_read_too(kind):
    machine = a_machine(a_spec((2, 2, 4, 2, 3), kind), kind)
    program = a_program(machine)
    generator = torch.Generator().manual_seed(9)
    program.unembedding = torch.randn(machine.width, 3, dtype=torch.float64, generator=generator)
    target = ff.decompile(machine, program)
    same_function(machine, program, target, 1e-12)
    program.unembedding = None
    assert not ff.certify_equal((machine, program), target).holds


def test_frozen_weights_of_ones_own():
    spec = ff.TargetSpec(2, 2, 3, 2)
    generator = torch.Generator().manual_seed(0)
    draw = lambda *s: torch.randn(*s, dtype=torch.float64, generator=generator) * 10**-0.5  # noqa: E731
    machine = ff.FrozenMachine(
        spec, query=draw(2, 2, 10, 2), key=draw(2, 2, 10, 2), value=draw(2, 2, 10, 10), unembed=draw(10, 3)
    )
    program = a_program(machine)
    target = ff.decompile(machine, program)
    assert target.report.ranks == (3, 6, 3)
    same_function(machine, program, target, 1e-12)


def test_precision_follows_the_program():
    """A float32 program gives a float32 target; its roundings do not count as dimensions, small ones that are do."""
    spec = ff.TargetSpec(4, 2, 4, 6, 3)
    planted = ff.Target.random(spec, seed=3, d_model=7, d_value=2, dtype=torch.float32)
    for machine in (ff.SparseMachine(spec), ff.RandomMachine(spec, width=440, dtype=torch.float32)):
        program = machine.compile(planted)
        target = ff.decompile(machine, program)
        assert target.dtype == torch.float32
        assert target.report.ranks == (4, 7, 3)
        assert min(cut.gap for cut in target.report.cuts) > 1e3
        assert ff.decompile(machine, program, tolerance=1e-13).report.ranks[1] == 16, "taken literally, all is rank"
        assert ff.certify_equal((machine, program), target).holds


def test_small_weights_are_not_noise():
    """Scales differ by 1e16 between queries and keys, 1e10 between layers and outputs: nothing is lost."""
    spec = ff.TargetSpec(2, 2, 4, 2, 3)
    w = ff.Target.random(spec, seed=5, d_model=6).weights.named()
    w["query"], w["key"], w["unembed"] = w["query"] * 1e8, w["key"] * 1e-8, w["unembed"] * 1e-10
    target = ff.Target(spec, **w)
    machine = ff.SparseMachine(spec)
    program = machine.compile(target)
    for small in (ff.decompile(machine, program), ff.shrink(target)):
        assert small.report.error <= 1e-12
        same_function(machine, program, small, 1e-12)


def test_the_report_says_what_was_decided():
    machine = a_machine(ff.TargetSpec(2, 3, 6, 2), "sparse")
    report = ff.decompile(machine, a_program(machine)).report
    assert (report.source_width, report.ranks, report.exact_width) == (104, (6, 12, 20, 6), 20)
    assert report.d_value == 12
    for text in ("104 -> 20, exactly", "rank 12", "value width  12, wider than queries and keys (2)", "tolerance"):
        assert text in str(report)
    for cut in report.cuts:
        assert cut.spectrum[cut.rank - 1] == cut.smallest_kept > cut.tolerance
        assert cut.tolerance < 1e-12 * cut.spectrum[0] * 10
        assert cut.lost <= cut.tolerance


def test_two_layers_need_no_wider_values():
    """L = 2 and d_in <= d_head: every program is in the class with d_value <= d_head (section 11)."""
    machine = a_machine(ff.TargetSpec(3, 2, 4, 6, 4), "sparse")
    assert ff.decompile(machine, a_program(machine)).report.d_value == 4


@pytest.mark.parametrize("kind", ["sparse", "N", "N/2"])
def test_seconds_at_the_largest_of_the_papers_shapes(kind):
    """(2, 4, 30, 30), m up to 2280: under a second (0.1 to 0.5 on one quiet core), machine and program given."""
    spec = ff.TargetSpec(2, 4, 30, 30)
    machine = a_machine(spec, kind)
    program = a_program(machine)
    began = time.process_time()
    target = ff.decompile(machine, program)
    assert time.process_time() - began < 1
    assert target.report.ranks == (30, 60, 120, 180, 30)


# -- tokens -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sparse", "looped", "N/2", "residual", "rotary", "residual rotary N/2"])
def test_for_tokens_less_is_needed(kind):
    """H^l (V - 1) + 1 in place of H^l V; exact on token sequences, and only there."""
    spec = a_spec((3, 2, 3, 4, 3), kind)
    machine = a_machine(spec, kind)
    program = a_program(machine)
    whole, small = ff.decompile(machine, program), ff.decompile(machine, program, tokens=True)
    assert small.report.gauge == "tokens"
    if not spec.residual:
        assert whole.report.ranks[1] == 9
        assert small.report.ranks[1] == 7
        assert small.report.ranks[0] == 3
    assert small.weights.d_model < whole.weights.d_model
    X = torch.randint(3, (4, 9), generator=torch.Generator().manual_seed(0))
    for mask in (None, "causal"):
        assert relative(small(X, mask), machine.run(program, X, mask)) <= 1e-12
        assert float((small.attention(X, mask) - machine.attention(program, X, mask)).abs().max()) <= 1e-12
    assert ff.same_program((machine, program), small, tokens=True)
    assert ff.certify_equal((machine, program), small, tokens=True).holds
    vectors = torch.randn(2, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert relative(small(vectors), machine.run(program, vectors)) > 1e-3, "vectors are promised nothing"
    assert not ff.certify_equal((machine, program), small).holds


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_refusals():
    machine = a_machine(ff.TargetSpec(2, 2, 3, 2), "sparse")
    program = a_program(machine)
    for options, words in (
        ({"width": 0}, "width must be a whole number of at least 1"),
        ({"tolerance": 1.0}, "tolerance is relative"),
        ({"steps": 3}, "pass data="),
        ({"where": torch.ones(1, 2, dtype=torch.bool)}, "pass data="),
        ({"steps": -1}, "steps must not be negative"),
        ({"data": torch.tensor([[0, 1]]), "where": torch.zeros(1, 2, dtype=torch.bool)}, "where holds no True"),
        ({"data": torch.tensor([[0, 1]]), "where": torch.ones(2, 2, dtype=torch.bool)}, "where must be bool of shape"),
        ({"data": torch.tensor([[0, 7]])}, "token ids must lie in 0..2"),
    ):
        with pytest.raises(ff.SpecError, match=words):
            ff.decompile(machine, program, **options)
    with pytest.raises(ff.SpecError, match="the program was compiled for machine"):
        ff.decompile(ff.SparseMachine(machine.spec, width=99), program)
    program.embedding[0, 0] = torch.nan
    with pytest.raises(ff.SpecError, match="the program's embedding holds 1 NaN"):
        ff.decompile(machine, program)


def test_memory_is_counted_first(monkeypatch):
    machine = a_machine(ff.TargetSpec(2, 2, 3, 2), "sparse")
    monkeypatch.setattr("fixedformer.capacity.available_bytes", lambda: 1000)
    with pytest.raises(ff.CapacityError, match=r"the read-outs of SparseMachine.* needs \d+ bytes"):
        ff.decompile(machine, a_program(machine))


def test_a_program_of_zeros():
    """Nothing is shown: width 1 (a Target has at least one), uniform attention, outputs 0."""
    machine = a_machine(ff.TargetSpec(2, 2, 3, 2), "sparse")
    program = a_program(machine)
    program.embedding.zero_()
    target = ff.decompile(machine, program)
    assert target.report.ranks == (0, 0, 0)
    same = target.attention(torch.tensor([0, 1])) == machine.attention(program, torch.tensor([0, 1]))
    assert bool(same.all())
    assert not target(torch.tensor([0, 1])).any()


@pytest.mark.parametrize("residual", [False, True])
def test_what_cancels_is_not_a_dimension(residual):
    """A head whose queries, and an output whose weights, meet no reachable state: through a random machine or another
    basis they are rounding noise, and scaled up it would be taken for rank (or everything else for noise)."""
    spec = ff.TargetSpec(2, 3, 4, 3, 3, residual)
    w = ff.Target.random(spec, seed=6, d_model=6, d_value=2).weights.named()
    basis = torch.linalg.qr(torch.randn(10, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).Q
    reached, beyond = basis[:, :6], basis[:, 6:]  # no state ever leaves the first six directions
    wide = {name: reached @ w[name] for name in ("query", "key", "value", "unembed")}
    wide |= {name: w[name] @ reached.mT for name in ("output", "embed")}
    wide["query"][1, 0] = beyond[:, :3]
    wide["unembed"][:, 1] = beyond[:, 3]
    target = ff.Target(spec, **wide)
    w["query"][1, 0], w["unembed"][:, 1] = 0, 0
    clean = ff.shrink(ff.Target(spec, **w))
    machine = ff.RandomMachine(spec)
    program = machine.compile(target)
    assert program.report.condition > 300, "rounding far above that of a single product"
    sparse = ff.SparseMachine(spec)
    for small in (
        ff.shrink(target),
        ff.decompile(machine, program),
        ff.decompile(sparse, sparse.compile(target)),
    ):
        assert small.report.ranks == clean.report.ranks
        assert small.weights.d_model == clean.weights.d_model
        assert small.report.error <= 1e-9
        same_function(machine, program, small, 1e-9)
        assert ff.same_program(small, target)


def test_a_loose_tolerance_is_not_called_exact():
    spec = ff.TargetSpec(heads=2, layers=1, d_in=6, d_head=3)
    loose = str(ff.shrink(ff.Target.random(spec, seed=0), tolerance=0.5).report)
    assert "which the tolerance allowed" in loose
    assert "so not equal" in loose
    assert "exactly" not in loose
