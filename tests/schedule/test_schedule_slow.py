"""Larger problems, end to end: the sizes of the table, on seeds of their own."""

import pytest
import torch

import fixedformer as ff

pytestmark = pytest.mark.slow


def task(*size, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(2)]


@pytest.mark.parametrize(("size", "seed"), [((2, 3, 2), 2), ((2, 3, 4), 0)])
def test_finite_depth(size, seed):
    X, Y = task(*size, seed=seed)
    blocks = ff.FrozenBlocks(size[2])
    schedule = blocks.compile(X, Y, tolerance=1e-7)
    report = schedule.report
    assert report["status"] == "solved", report["attempts"]
    assert schedule.depth <= 256 * X.numel()
    certificate = blocks.certify(schedule, X, Y)
    assert certificate.holds, str(certificate)
    assert "the end, run backwards, is X" in {check.claim for check in certificate.checks}


def test_one_pair_of_blocks_serves_any_number_of_tokens():
    """The same two blocks, 2 and 3 tokens, 1 and 2 sequences."""
    blocks = ff.FrozenBlocks(2)
    for size in ((1, 2, 2), (1, 3, 2), (2, 2, 2)):
        X, Y = task(*size, seed=2)
        schedule = blocks.compile(X, Y, tolerance=1e-7)
        assert schedule.report["status"] == "solved"
        assert blocks.certify(schedule, X, Y).holds


def test_causal_masks():
    """Free first tokens, and a begin token that both sequences share."""
    blocks = ff.FrozenBlocks(3, causal=True)
    X, Y = task(2, 3, 3, seed=0)
    schedule = blocks.compile(X, Y, tolerance=1e-7)
    assert schedule.report["status"] == "solved", schedule.report["attempts"]
    begin = X.clone(), Y.clone()
    for part in begin:
        part[1, 0] = part[0, 0]
    schedule = blocks.compile(*begin, tolerance=1e-7)
    assert schedule.report["status"] == "solved", schedule.report["attempts"]
    torch.testing.assert_close(blocks.run(schedule, begin[0]), begin[1], rtol=0, atol=1e-7)


def test_continuous_time():
    X, Y = task(2, 2, 2, seed=0)
    blocks = ff.FrozenBlocks(2)
    schedule = blocks.compile(X, Y, tolerance=1e-6, mode="continuous")
    assert schedule.report["status"] == "solved", schedule.report["attempts"]
    assert blocks.certify(schedule, X, Y).checks[0].holds
