"""Schedules and searches on disk: whole, for their own blocks, or refused."""

import json
from dataclasses import fields, is_dataclass

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import fixedformer as ff
from fixedformer.schedule.relax import State
from fixedformer.schedule.reversible import Unfolding
from fixedformer.schedule.solve import Search
from fixedformer.schedule.start import Lead


def made(segments=6, seed=0):
    blocks = ff.FrozenBlocks(3, seed, causal=True)
    generator = np.random.default_rng(seed)
    schedule = ff.Schedule(
        generator.integers(0, 2, segments).astype(np.uint8),
        generator.uniform(-0.4, 0.4, segments),
        generator.uniform(-1e-18, 1e-18, segments),
        8,
        "finite",
        blocks.fingerprint(),
        {"status": "solved", "error": 1e-9, "amplification": None},
    )
    return blocks, schedule


def test_round_trip(tmp_path):
    blocks, schedule = made()
    path = tmp_path / "s.safetensors"
    ff.save_schedule(blocks, schedule, path)
    again, loaded = ff.load_schedule(path)
    assert again.fingerprint() == blocks.fingerprint()
    for name in ("order", "durations", "remainders"):
        np.testing.assert_array_equal(getattr(loaded, name), getattr(schedule, name))
    assert (loaded.substeps, loaded.mode, dict(loaded.report)) == (8, "finite", dict(schedule.report))
    X = torch.randn(2, 3, 3, dtype=torch.float64)
    torch.testing.assert_close(again.run(loaded, X), blocks.run(schedule, X), rtol=0, atol=0)


def test_other_blocks_schedule_is_not_saved(tmp_path):
    _, schedule = made()
    with pytest.raises(ff.SpecError, match="this schedule is for blocks"):
        ff.save_schedule(ff.FrozenBlocks(3, 1), schedule, tmp_path / "s.safetensors")


def rewritten(path, tensors=None, body=None):
    """The file with other content, without a new digest where only tensors change."""
    with safe_open(path, "pt") as handle:
        metadata, old = handle.metadata(), {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    if body is not None:
        metadata["body"] = json.dumps(json.loads(metadata["body"]) | body)
    save_file(old | (tensors or {}), path, metadata)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"tensors": {"durations": torch.zeros(6, dtype=torch.float64)}}, "does not match its digest"),
        ({"tensors": {"durations": torch.zeros(5, dtype=torch.float64)}}, "should be"),
        ({"tensors": {"durations": torch.zeros(6)}}, "float64 durations"),
        ({"body": {"blocks": {"d": 3, "seed": 1, "scale": 5.0, "causal": True}}}, "another fingerprint"),
        ({"body": {"blocks": {"d": -3, "seed": 1, "scale": 5.0, "causal": True}}}, "header is malformed"),
        ({"body": {"blocks": {}}}, "header is malformed"),
    ],
)
def test_damaged_files_are_refused(tmp_path, change, match):
    blocks, schedule = made()
    path = tmp_path / "s.safetensors"
    ff.save_schedule(blocks, schedule, path)
    rewritten(path, **change)
    with pytest.raises(ff.StorageError, match=match):
        ff.load_schedule(path)


def test_searches_come_back_as_they_were(tmp_path):
    """Every field, arrays to the bit; also what a search holds while words lead, and while folded steps are moved."""
    nodes, durations = np.random.default_rng(0).standard_normal((4, 2, 6)), np.ones((4, 8))
    state = State(
        nodes, durations, iteration=7, strength=0.1, damping=0.2, since=3, lowest=5.0, lowest_back=6.0, best=2.0,
        best_nodes=nodes + 1, best_durations=durations + 1, finished="iteration limit",
    )  # fmt: skip
    log = (
        {"attempt": 0, "steps": 3, "ended": "iteration limit", "error": float("inf"), "amplification": 2.0,
         "amplification backwards": 3.0, "backwards error": float("inf")},
    )  # fmt: skip
    whole = Search(
        attempt=1, state=state, durations=durations, error=1e-3, amplification=7.0, amplification_back=8.0,
        returns=1e-9, log=log, seconds={"relax": 1.0}, problem="abc", unfolding=Unfolding(durations + 2, 5, 0.3),
    )  # fmt: skip
    led = Search(attempt=2, leads=3, led=Lead(nodes, durations, nodes[0], 4.5))
    path = tmp_path / "search.safetensors"
    for search in (whole, led, Search()):
        ff.save_search(search, path)
        same(ff.load_search(path), search)
    with pytest.raises(ff.StorageError, match="holds a schedule-search"):
        ff.load_schedule(path)


def same(one, two):
    assert type(one) is type(two)
    if is_dataclass(one):
        for field in fields(one):
            same(getattr(one, field.name), getattr(two, field.name))
    elif isinstance(one, np.ndarray):
        np.testing.assert_array_equal(one, two)
    else:
        assert one == two


def test_schedules_that_are_none_are_refused():
    blocks, schedule = made()
    good = {name: getattr(schedule, name) for name in schedule.__dataclass_fields__}
    for wrong, match in (
        ({"durations": np.zeros(5)}, "a block, duration and remainder|one block, duration and remainder"),
        ({"durations": np.full(6, np.nan)}, "finite numbers"),
        ({"order": np.full(6, 2, dtype=np.uint8)}, "blocks are 0 and 1"),
        ({"substeps": 0}, "substeps >= 1"),
        ({"mode": "other"}, "mode finite or continuous"),
    ):
        with pytest.raises(ff.SpecError, match=match):
            ff.Schedule(**(good | wrong))
    assert schedule.depth == 48
    assert schedule.largest_eta == np.abs(schedule.durations).max() / 8
    assert blocks.scale == pytest.approx(16 / 3)
