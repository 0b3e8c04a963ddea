"""Certificates hold for what we build, fail for what is spoiled, and the measured error is within the theorem."""

import dataclasses

import numpy as np
import pytest
import torch

from fixedformer.errors import CertificateError, StorageError
from fixedformer.loop.approximator import LoopedApproximator
from fixedformer.loop.certify import Rate, cell_errors, rates, slope, theorem_slope
from fixedformer.loop.examples import product, spread, wave
from fixedformer.loop.files import load_loop_program, save_loop_program
from fixedformer.loop.grid import Grid
from fixedformer.storage import read_header, write

OPTIONS = [
    {"resolution": 4},
    {"resolution": 3, "form": "slim"},
    {"resolution": 2},
    {"resolution": 4, "variant": "timestep"},
    {"resolution": 4, "variant": "timestep", "form": "paper", "value_bound": 2.0},
    {"resolution": 4, "variant": "timestep", "attention": "soft"},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("function", [wave, product, spread])
def test_certificates_hold(options: dict, function: object) -> None:
    machine = LoopedApproximator(1, 2, **options)
    certificate = machine.certify(machine.compile(function), function, samples=100)
    assert certificate.holds, str(certificate)
    assert len(certificate.checks) == (4 if machine.variant == "bits" else 3)
    assert certificate.checks[0].scope.startswith("exhaustive")
    assert certificate.context["moduli"] == "declared"
    if machine.arithmetic == "exact":
        assert certificate.checks[0].bound == certificate.checks[0].measured == 0


def test_sampled_moduli_say_so() -> None:
    machine = LoopedApproximator(1, 2, 2)
    anonymous = lambda X: wave(X)  # noqa: E731  (without declared constants)
    certificate = machine.certify(machine.compile(anonymous), anonymous, samples=20)
    assert certificate.holds
    assert "lower estimates" in certificate.checks[-1].scope
    assert "lower estimate" in certificate.consequences["moduli"]


@pytest.mark.parametrize("places", [(0, 3), (0, 60), (1, 17)])
def test_one_flipped_bit_fails(places: tuple[int, int]) -> None:
    """A bit of the ups, or of the downs, moves every later value by a whole step; half a step is allowed."""
    stream, place = places
    machine = LoopedApproximator(1, 2, 4)
    program = machine.compile(wave)
    bits = [list(program.steps.ups[0]), list(program.steps.downs[0])]
    bits[stream][place] ^= 1
    steps = dataclasses.replace(program.steps, ups=(tuple(bits[0]),), downs=(tuple(bits[1]),))
    spoiled = dataclasses.replace(program, steps=steps)
    certificate = machine.certify(spoiled, wave, samples=20)
    assert [check.holds for check in certificate.checks[:2]] == [True, False]
    with pytest.raises(CertificateError, match="error per cell"):
        certificate.require()


def test_one_changed_clock_entry_fails() -> None:
    """Any entry that is read, changed by 1e-6."""
    machine = LoopedApproximator(1, 2, 3, "timestep")
    program = machine.compile(wave)
    for entry in program.table.entries[::4].tolist():
        clock = program.clock.copy()
        clock[entry] += 1e-6
        spoiled = dataclasses.replace(program, clock=clock)
        assert not machine.certify(spoiled, wave, samples=20).holds


def test_a_machine_that_does_not_follow_its_table_fails() -> None:
    """Soft attention three below its sharpness reads wrong entries, and the first check says so."""
    right = LoopedApproximator(1, 2, 8, "timestep", attention="soft")
    blunt = LoopedApproximator(1, 2, 8, "timestep", attention="soft", sharpness=right.sharpness - 3)
    certificate = blunt.certify(blunt.compile(wave), wave, samples=20)
    assert not certificate.checks[0].holds


def test_another_function_fails() -> None:
    machine = LoopedApproximator(1, 2, 4)
    assert not machine.certify(machine.compile(wave), product, samples=20).holds


def test_large_tables_are_sampled_and_say_so() -> None:
    machine = LoopedApproximator(1, 2, 4)
    errors = cell_errors(machine, machine.compile(wave), wave, limit=7)
    assert len(errors.ids) == 7
    assert not errors.exhaustive


@pytest.mark.parametrize("function", [wave, product, spread])
@pytest.mark.parametrize(
    ("d", "tokens", "n"),
    [(1, 1, 4), (1, 2, 4), (1, 3, 3), (1, 3, 4), (2, 1, 3), (2, 2, 2), (2, 3, 2)],
)
@pytest.mark.parametrize("variant", ["bits", "timestep"])
def test_measured_error_is_within_the_theorem(d: int, tokens: int, n: int, function: object, variant: str) -> None:
    machine = LoopedApproximator(d, tokens, n, variant)
    (line,) = rates(function, [machine], samples=300)
    assert line.kind == "declared"
    assert 0 < line.error <= line.bound


def test_error_falls_with_loops_at_least_as_fast_as_the_theorem_says() -> None:
    machines = [LoopedApproximator(1, 2, n) for n in (2, 4, 8)]
    lines = list(rates(wave, machines, samples=1000))
    assert slope(lines) <= theorem_slope(machines[0].grid) == -0.25
    assert all(line.within for line in lines)


def test_slope_by_hand() -> None:
    slopes = [theorem_slope(Grid(*sizes)) for sizes in ((1, 1, 4), (1, 3, 4), (2, 3, 4))]
    assert slopes == pytest.approx([-1 / 3, -0.5 / 5, -1 / 9])
    lines = [Rate(n, 1, loops, 1, 1, "exact", error, 1.0, "declared") for n, loops, error in
             ((2, 10, 1.0), (4, 1000, 0.1), (8, 100_000, 0.01))]  # fmt: skip
    assert slope(lines) == pytest.approx(-0.5)
    with pytest.raises(ValueError, match="two resolutions or more, got 1"):
        slope(lines[:1])


@pytest.mark.parametrize("options", OPTIONS)
def test_programs_survive_files(tmp_path, options: dict) -> None:
    machine = LoopedApproximator(1, 2, **options)
    program = machine.compile(wave)
    save_loop_program(machine, program, tmp_path / "program")
    read_machine, read = load_loop_program(tmp_path / "program")
    X = torch.rand(5, 2, 1, dtype=torch.float64)
    assert torch.equal(read_machine.run(read, X), machine.run(program, X))
    assert read.steps == program.steps
    assert read_machine.fingerprint() == machine.fingerprint()
    assert np.array_equal(read.table.values, program.table.values)
    assert read_header(tmp_path / "program").kind == "loop-program"


def test_files_that_contradict_themselves_are_refused(tmp_path) -> None:
    machine = LoopedApproximator(1, 2, 2)
    program = machine.compile(wave)
    path = tmp_path / "program"
    save_loop_program(machine, program, path)
    header = read_header(path)
    bits = torch.tensor(program.steps.ups, dtype=torch.uint8)
    tensors = {
        "entries": torch.from_numpy(program.table.entries),
        "values": torch.from_numpy(program.table.values),
        "ups": bits,
        "downs": torch.tensor(program.steps.downs, dtype=torch.uint8),
    }
    body = header.body
    for change, match in (
        ({"machine": {**body["machine"], "resolution": 3}}, "malformed|tensor"),
        ({"fingerprint": "0" * 64}, "another fingerprint"),
        ({"machine": {**body["machine"], "variant": "words"}}, "variant must be one of"),
        ({"start": ["one"]}, "Invalid literal for Fraction"),
        ({"step": []}, "one entry for each of 1 dimension"),
    ):
        write(path, "loop-program", tensors, body | change)
        with pytest.raises(StorageError, match=match):
            load_loop_program(path)
    write(path, "loop-program", tensors | {"ups": bits + 2}, body)
    with pytest.raises(StorageError, match="ups and downs must be bits"):
        load_loop_program(path)
    write(path, "loop-program", tensors | {"ups": bits[:, :5]}, body)
    with pytest.raises(StorageError, match="tensor 'ups' should be"):
        load_loop_program(path)
    path.write_bytes(b"no safetensors")
    with pytest.raises(StorageError, match="not a whole safetensors file"):
        load_loop_program(path)
