"""Certificates: what they hold for, what makes them fail, and the proof against the float64 run."""

import dataclasses

import numpy as np
import pytest
import torch

import fixedformer as ff
from fixedformer.schedule import enclose


def task(*size, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(2)]


@pytest.fixture(scope="module")
def solved():
    blocks = ff.FrozenBlocks(2)
    X, Y = task(1, 2, 2)
    return blocks, blocks.compile(X, Y, tolerance=1e-9), X, Y


def verdicts(certificate):
    return {check.claim: check.holds for check in certificate.checks}


def test_holds_and_proves(solved):
    blocks, schedule, X, Y = solved
    certificate = blocks.certify(schedule, X, Y, rigorous=True)
    assert certificate.holds, str(certificate)
    assert len(certificate.checks) == 5
    assert "so proved" in certificate.consequences["proof"]
    assert certificate.context["depth"] == schedule.depth
    assert certificate.context["amplification"] == pytest.approx(schedule.report["amplification"], rel=1e-3)


def test_fails_for_other_targets_and_changed_durations(solved):
    blocks, schedule, X, Y = solved
    other = blocks.certify(schedule, X, Y + 1e-6)
    assert not other.holds
    assert verdicts(other)["the end, run backwards, is X"], "that claim does not depend on Y"
    durations = schedule.durations.copy()
    durations[3] += 1e-5
    moved = dataclasses.replace(schedule, durations=durations)
    assert not verdicts(blocks.certify(moved, X, Y))["X is carried to Y"]
    assert not verdicts(blocks.certify(moved, X, Y, rigorous=True, max_bits=2048))["X is carried to Y, enclosed"]
    strict = dataclasses.replace(schedule, report=schedule.report | {"eta_max": schedule.largest_eta / 2})
    assert not verdicts(blocks.certify(strict, X, Y))["|eta| of every step"]


def test_too_few_bits_prove_nothing(solved):
    """The ball grows; a proof needs bits to spare, and without them the claim fails although float64 is right."""
    blocks, schedule, X, Y = solved
    certificate = blocks.certify(schedule, X, Y, rigorous=True, max_bits=256)
    assert verdicts(certificate)["X is carried to Y"]
    assert not certificate.holds
    assert "nothing proved" in certificate.consequences["proof"]
    with pytest.raises(ff.SpecError, match="at least 256"):
        blocks.certify(schedule, X, Y, rigorous=True, max_bits=64)


def test_enclosures_contain_the_truth():
    """Few steps: the ball at 128 bits holds the midpoints at 1000 bits, and is not much wider than rounding."""
    blocks = ff.FrozenBlocks(2, causal=True)
    arrays = blocks.arrays
    generator = np.random.default_rng(0)
    X, order = generator.standard_normal((2, 3, 2)), generator.integers(0, 2, 6)
    durations, low = generator.uniform(-0.3, 0.3, 6), np.zeros(6)
    where = (X, order, durations, low, 2, arrays.scores, arrays.values, True)
    balls = enclose.roll_out(*where, 128, rigorous=True)
    sharp = enclose.roll_out(*where, 1000, rigorous=False)
    for ball, point in zip(balls, sharp):
        for row, truths in zip(ball.tolist(), point.tolist()):
            assert all(v.contains(truth) for v, truth in zip(row, truths))
    found = enclose.as_balls(balls, 128)
    schedule = ff.Schedule(order.astype(np.uint8), durations, low, 2, "finite", blocks.fingerprint())
    ran = blocks.run(schedule, torch.from_numpy(X)).numpy()
    np.testing.assert_allclose(found.middle, ran, atol=1e-12)
    assert 0 < found.radius.max() < 1e-13
    assert enclose.distance(balls, ran, 128) < 1e-12
    np.testing.assert_allclose(blocks.run(schedule, X, precision="extended").numpy(), ran, atol=1e-12)


def test_remainders_count_in_extended_precision_only(solved):
    blocks, schedule, X, _ = solved
    shifted = dataclasses.replace(schedule, remainders=np.full_like(schedule.durations, 1e-5))
    torch.testing.assert_close(blocks.run(shifted, X), blocks.run(schedule, X), rtol=0, atol=0)
    gap = blocks.run(shifted, X, precision="extended") - blocks.run(schedule, X, precision="extended")
    assert float(gap.abs().max()) > 1e-7


def test_continuous_schedules_are_judged_by_dop853():
    blocks = ff.FrozenBlocks(2)
    X, Y = task(1, 2, 2, seed=3)
    schedule = blocks.compile(X, Y, tolerance=1e-7, mode="continuous", attempts=8)
    assert schedule.report["status"] == "solved"
    assert schedule.report["judged by"] == "DOP853, rtol 1e-13"
    certificate = blocks.certify(schedule, X, Y)
    assert certificate.holds, str(certificate)
    assert certificate.context["depth"] is None
    back = blocks.run(schedule, blocks.run(schedule, X), backwards=True)
    torch.testing.assert_close(back, X, rtol=0, atol=1e-7)
    with pytest.raises(ff.SpecError, match="encloses residual steps"):
        blocks.certify(schedule, X, Y, rigorous=True)
