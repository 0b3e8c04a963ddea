"""Targets made as narrow as they can be, without their exponential programs; truncation and what it promises."""

import hankel_oracle as oracle
import numpy as np
import pytest
import torch
from machines import relative
from programs import a_machine, a_program, same_function

import fixedformer as ff
from fixedformer.embedding.study import width_study
from fixedformer.experiments.demo import shipped_target
from fixedformer.plots import spectrum_picture
from fixedformer.tasks.dyck import Dyck


def hidden_in(small, d_model, seed=0):
    """The same function with a state `d_model` wide: zeros appended, then a random change of basis."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.randn(d_model, d_model, generator=generator, dtype=torch.float64)
    inverse, d = torch.linalg.inv(basis), small.weights.d_model
    w = small.weights.named()
    named = {name: inverse[:, :d] @ w[name] for name in ("query", "key", "value", "unembed")}
    named |= {name: w[name] @ basis[:d] for name in ("output", "embed")}
    return ff.Target(small.spec, **named)


@pytest.mark.parametrize("residual", [False, True])
def test_shrink_finds_what_was_hidden_at_any_depth(residual):
    """12 layers of 4 heads: the program would have over 1e8 columns; the width of 6 is found in milliseconds."""
    spec = ff.TargetSpec(4, 12, 6, 3, 6, residual)
    small = ff.Target.random(spec, d_model=6)
    assert ff.widths(spec).minimal > 10**8
    wide = hidden_in(small, 40)
    found = ff.shrink(wide)
    assert found.weights.d_model == 6
    assert found.report.error <= 1e-11
    assert found.report.seconds < 5
    X = torch.randint(6, (2, 9), generator=torch.Generator().manual_seed(0))
    assert relative(found(X, "causal"), wide(X, "causal")) <= 1e-10
    assert ff.same_program(found, small)
    assert ff.certify_equal(wide, found).holds


@pytest.mark.parametrize("kind", ["plain", "residual", "rotary", "residual rotary"])
@pytest.mark.parametrize("seed", range(5))
def test_shrink_is_decompile_after_compile(kind, seed):
    """Same ranks, same width, by two ways that share only the sweep; never wider than the target."""
    spec = ff.TargetSpec(2, 3, 4, 2, 3, "residual" in kind, "rotary" if "rotary" in kind else None)
    target = ff.Target.random(spec, seed, d_model=2 + 5 * seed, d_value=1 + seed)
    machine = ff.SparseMachine(spec)
    back, small = ff.decompile(machine, machine.compile(target)), ff.shrink(target)
    assert back.report.ranks == small.report.ranks
    assert back.weights.d_model == small.weights.d_model <= target.weights.d_model
    assert back.report.value_widths == small.report.value_widths
    assert small.weights.d_value <= target.weights.d_value
    listed = oracle.of_target(target)
    assert listed.distance(oracle.of_target(small)) <= 1e-13 * np.linalg.norm(listed.hankel(0))
    assert ff.certify_equal(target, small).holds
    again = ff.shrink(small)
    assert again.weights.d_model == small.weights.d_model, "nothing is left to remove"


def test_shrink_for_tokens():
    spec = ff.TargetSpec(2, 2, 5, 2, 3)
    target = ff.Target.random(spec, d_model=20, d_value=20)
    small = ff.shrink(target, tokens=True)
    assert small.report.ranks == (5, 9, 3)
    X = torch.randint(5, (3, 8), generator=torch.Generator().manual_seed(0))
    assert relative(small(X, "causal"), target(X, "causal")) <= 1e-12


def test_the_card_travels():
    target = shipped_target()
    assert ff.shrink(target).card == target.card


# -- spectra ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("residual", [False, True])
def test_spectra_are_those_of_listed_matrices(residual):
    spec = ff.TargetSpec(2, 2, 3, 2, 4, residual)
    machine = ff.RandomMachine(spec, width=60)
    program = a_program(machine)
    listed = oracle.of_program(machine, program)
    target = ff.decompile(machine, program)
    for spectra in (ff.hankel_spectrum(machine, program), ff.hankel_spectrum(target)):
        for cut, values in enumerate(spectra):
            want = np.linalg.svd(listed.hankel(cut), compute_uv=False)[: listed.rank(cut)]
            assert len(values) == len(want)
            assert np.allclose(values.numpy(), want, rtol=1e-10, atol=0)
    assert spectrum_picture(spectra, "widths").startswith(b"\x89PNG")


def test_spectra_on_data_count_states_that_occur():
    """Only tokens 0 and 1 of five occur: two dimensions before layer 1, and their size is the share of the tokens."""
    spec = ff.TargetSpec(2, 2, 5, 2, 3)
    target = ff.Target.random(spec, d_model=30)
    data = torch.tensor([[0, 1, 1, 0, 1, 1, 0, 0]])
    first, second, _ = ff.hankel_spectrum(target, data=data, mask="causal")
    assert (len(first), len(second)) == (2, 3), "1 + 2 (2 - 1) dimensions after a layer of two heads"
    rows = oracle.of_target(target).hankel(0)[:2]
    want = np.linalg.svd(rows * np.sqrt([[0.5], [0.5]]), compute_uv=False)
    assert np.allclose(first.numpy(), want, rtol=1e-12)


# -- truncation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sparse", "looped", "1.5N", "rotary"])
@pytest.mark.parametrize("width", [4, 5, 7, 9])
def test_two_layers_are_truncated_optimally(kind, width):
    """Eckart-Young: no transformer of that width comes closer than the tail of the Hankel matrix; this one comes as
    close, to 1e-10."""
    spec = ff.TargetSpec(3, 2, 4, 2, 4, False, "rotary" if kind == "rotary" else None)
    machine = a_machine(spec, kind)
    program = a_program(machine)
    small = ff.decompile(machine, program, width)
    assert small.weights.d_model == width
    listed = oracle.of_program(machine, program)
    best = np.linalg.norm(np.linalg.svd(listed.hankel(1), compute_uv=False)[width:])
    assert abs(listed.distance(oracle.of_target(small)) - best) <= 1e-10 * best
    cut_off = small.report.truncation
    assert abs(cut_off.error - best) <= 1e-10 * best
    assert abs(cut_off.bound - best) <= 1e-10 * best
    assert cut_off.size == pytest.approx(np.linalg.norm(listed.hankel(0)), rel=1e-12)


@pytest.mark.parametrize("shape", [(2, 3, 3, 2, 3), (2, 4, 2, 1, 2), (3, 3, 2, 2, 6), (1, 4, 5, 3, 5)], ids=str)
def test_deeper_truncations_stay_within_their_bound(shape):
    """Measured on listed paths: error^2 is the sum of what each cut lost, at most the sum of the tails, at least the
    largest single tail of any width-D transformer."""
    machine = ff.SparseMachine(ff.TargetSpec(*shape))
    program = a_program(machine)
    listed = oracle.of_program(machine, program)
    cuts = range(shape[1] + 1)
    spectra = [np.linalg.svd(listed.hankel(cut), compute_uv=False) for cut in cuts]
    previous = np.inf
    for width in range(1, ff.decompile(machine, program).weights.d_model):
        small = ff.decompile(machine, program, width)
        cut_off = small.report.truncation
        assert small.weights.d_model == width
        tails = [np.linalg.norm(values[width:]) for values in spectra]
        error = listed.distance(oracle.of_target(small))
        assert error == pytest.approx(cut_off.error, rel=1e-10)
        assert error == pytest.approx(np.linalg.norm(cut_off.lost), rel=1e-10)
        assert max(tails) * (1 - 1e-12) <= error <= cut_off.bound * (1 + 1e-12)
        assert cut_off.bound == pytest.approx(np.linalg.norm(tails), rel=1e-10)
        assert all(lost <= tail * (1 + 1e-9) for lost, tail in zip(cut_off.lost, tails))
        assert error < previous * (1 + 1e-9)
        previous = error


@pytest.mark.parametrize("kind", ["residual", "residual rotary"])
def test_residual_truncation_claims_no_bound(kind):
    spec = ff.TargetSpec(2, 2, 4, 2, 4, True, "rotary" if "rotary" in kind else None)
    machine = ff.SparseMachine(spec)
    program = a_program(machine)
    listed, whole = oracle.of_program(machine, program), ff.decompile(machine, program).weights.d_model
    errors = []
    for width in range(1, whole):
        small = ff.decompile(machine, program, width)
        assert small.weights.d_model <= width
        assert small.report.truncation.bound is None
        errors.append(listed.distance(oracle.of_target(small)))
        assert errors[-1] == pytest.approx(small.report.truncation.error, rel=1e-9)
    assert errors[-1] < errors[0] / 2
    assert "no bound proven" in str(small.report)


@pytest.mark.parametrize("residual", [False, True])
def test_what_the_data_never_show_costs_nothing(residual):
    """Data of two tokens out of six: narrow, and exact there, where the plain truncation of that width is not."""
    spec = ff.TargetSpec(2, 2, 6, 3, 4, residual)
    target = ff.Target.random(spec, d_model=30)
    data = torch.randint(2, (20, 9), generator=torch.Generator().manual_seed(0))
    width = 5 if residual else 4
    small = ff.shrink(target, width, data, mask="causal")
    plain = ff.shrink(target, width)
    assert small.weights.d_model <= width < ff.shrink(target).weights.d_model
    told = small.report.agreement
    assert told.error <= 1e-9
    assert (told.same, told.places, told.sequences) == (180, 180, 20)
    assert "measured on this data, not proven for other" in str(small.report)
    assert ff.agreement(plain, target, data, mask="causal").error > 1e-2
    elsewhere = torch.randint(6, (20, 9), generator=torch.Generator().manual_seed(1))
    assert ff.agreement(small, target, elsewhere, mask="causal").error > 1e-2
    assert not ff.certify_equal(target, small).holds, "a truncated target is not equal, and is not certified"


def test_data_weights_beat_plain_ones_where_tokens_are_rare():
    """Token 5 is a hundred times rarer than token 0: the error on such data is smaller with its weights."""
    spec = ff.TargetSpec(2, 3, 6, 3, 4)
    generator = torch.Generator().manual_seed(3)
    data = torch.multinomial(torch.tensor([1.0, 0.5, 0.2, 0.05, 0.02, 0.01]), 4000, True, generator=generator)
    train, fresh = data.view(2, 200, 10)
    for seed in range(3):
        target = ff.Target.random(spec, seed, d_model=30, d_value=9)
        weighted, plain = ff.shrink(target, 6, train), ff.shrink(target, 6)
        assert ff.agreement(weighted, target, fresh).error < 0.7 * ff.agreement(plain, target, fresh).error


def test_distillation_helps_and_reports_every_step():
    spec = ff.TargetSpec(2, 2, 4, 3, 4)
    target = ff.Target.random(spec, seed=2, d_model=20)
    data = [torch.randint(4, (60, n), generator=torch.Generator().manual_seed(n)) for n in (5, 8)]
    records = []
    before = ff.shrink(target, 3, data)
    after = ff.shrink(target, 3, data, steps=40, rate=1e-2, progress=records.append)
    assert [record.step for record in records] == list(range(1, 41))
    assert after.report.distilled == 40
    assert after.report.agreement.error < 0.8 * before.report.agreement.error
    again = ff.shrink(target, 3, data, steps=40, rate=1e-2)
    assert torch.equal(again.weights.value, after.weights.value), "one seed, one result"


def test_where_names_the_outputs_that_count():
    spec = ff.TargetSpec(2, 2, 4, 3, 4)
    target = ff.Target.random(spec, seed=2, d_model=20)
    data = torch.randint(4, (30, 6), generator=torch.Generator().manual_seed(0))
    last = torch.zeros(30, 6, dtype=torch.bool)
    last[:, -1] = True
    small = ff.shrink(target, 4, data, where=last, mask="causal")
    assert small.report.agreement.places == 30
    told = small(data, "causal")[:, -1].argmax(-1) == target(data, "causal")[:, -1].argmax(-1)
    assert small.report.agreement.same == int(told.sum())


@pytest.mark.parametrize(("layers", "width"), [(2, 15), (3, 45)])
def test_what_a_small_vocabulary_leaves_of_64_dimensions(layers, width):
    """Five tokens, two heads, residual, rotary, d_model 64, float32: V (H + 1)^(L - 1) dimensions, the same answers;
    for tokens fewer."""
    spec = ff.TargetSpec(2, layers, 5, 28, 5, True, "rotary")
    target = ff.Target.random(spec, seed=layers, dtype=torch.float32, d_model=64)
    small = ff.shrink(target)
    assert small.weights.d_model == width
    assert ff.shrink(target, tokens=True).weights.d_model < width
    X = torch.randint(5, (50, 40), generator=torch.Generator().manual_seed(0))
    assert ff.agreement(small.to(torch.float64), target.to(torch.float64), X, mask="causal").same == 2000
    assert ff.agreement(small, target, X, mask="causal").error <= 1e-4


def test_a_study_lists_widths():
    spec = ff.TargetSpec(2, 2, 4, 3, 4)
    machine = ff.SparseMachine(spec)
    program = a_program(machine)
    train, fresh = torch.randint(4, (2, 30, 6), generator=torch.Generator().manual_seed(0))
    rows = list(width_study(machine, program, (train, None), {"fresh": (fresh, None)}, (4, 6, 99), "causal"))
    assert [(row.weighting, row.width) for row in rows] == [
        ("exact", 8), ("plain", 4), ("data", 4), ("plain", 6), ("data", 6)
    ]  # fmt: skip
    assert rows[0].agreements["fresh"].same == 180
    assert rows[0].agreements["fresh"].error <= 1e-12 < rows[3].agreements["fresh"].error
    assert 0 < rows[3].distance < rows[1].distance < 1
    assert rows[1].distance <= rows[2].distance, "plain weights are the nearest by read-outs"


# -- the shipped target -----------------------------------------------------------------------------------------------


def answers(network, inputs, scored):
    """The likeliest token at "?" of every string, in the network's own precision."""
    run = network if isinstance(network, ff.Target) else lambda X, mask: network[0].run(network[1], X, mask)
    parts = zip(torch.from_numpy(inputs).split(100), torch.from_numpy(scored).split(100))
    return torch.cat([run(X, "causal")[place].argmax(-1) for X, place in parts])


def check_dyck(kind, strings, seed):
    target, task = shipped_target(), Dyck()
    machine = a_machine(target.spec, kind)
    program = machine.compile(target)
    small = ff.decompile(machine, program)
    assert small.weights.d_model == 16
    assert small.report.ranks == (4, 16, 4)
    assert ff.certify_equal((machine, program), small).holds
    held_out = task.sample(strings, np.random.default_rng([seed, 77]))
    told = answers((machine, program), held_out.inputs, held_out.scored)
    assert torch.equal(answers(small, held_out.inputs, held_out.scored), told)
    seen = task.sample(500, np.random.default_rng([seed, 78]))
    five = ff.decompile(machine, program, 5, seen.inputs, where=seen.scored)
    assert five.weights.d_model == 5
    share = (answers(five, held_out.inputs, held_out.scored) == told).double().mean()
    assert float(share) >= 0.995


def test_the_shipped_program_is_16_wide():
    check_dyck("sparse", 300, 0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sparse", "1.5N"])
def test_the_shipped_program_is_16_wide_on_ten_thousand_strings(kind):
    """1,024 (and 1,536) to 16 with identical predictions; 5 by the data's weights, at least 99.5% of fresh strings."""
    check_dyck(kind, 10_000, 1)


@pytest.mark.slow
def test_programs_of_one_target_on_two_machines_are_one():
    target = shipped_target()
    pair = []
    for kind in ("sparse", "1.5N"):
        machine = a_machine(target.spec, kind)
        pair.append((machine, machine.compile(target)))
    assert ff.same_program(*pair)
    same_function(*pair[1], ff.decompile(*pair[0]), 1e-10)
