"""compile: solves, repeats itself, resumes, stops in time, and never claims more than a re-run shows."""

import numpy as np
import pytest
import torch

import fixedformer as ff
from fixedformer.schedule import compile as compile_module
from fixedformer.schedule import judge, refine, solve
from fixedformer.schedule.problem import Problem, settings_for


def task(*size, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(2)]


@pytest.fixture(scope="module")
def blocks():
    return ff.FrozenBlocks(2)


@pytest.fixture(scope="module")
def solved(blocks):
    return blocks.compile(*task(1, 2, 2), tolerance=1e-9)


def test_carries_x_to_y(blocks, solved):
    X, Y = task(1, 2, 2)
    report = solved.report
    assert report["status"] == "solved"
    for engine in ("fast", "definition"):
        out = blocks.run(solved, X, engine=engine)
        assert float((out - Y).abs().max()) <= 1e-9
        assert float((blocks.run(solved, out, backwards=True, engine=engine) - X).abs().max()) < 1e-6
    assert report["error"] <= 1e-9
    assert solved.depth == report["depth"] <= 256 * 4
    assert 0 < solved.largest_eta <= 0.1
    assert set(report["phases"]) == {"start", "relax", "finish", "judge"}
    assert solved.duration == pytest.approx(report["duration"])


def test_blocks_never_change(blocks, solved):
    before = blocks.fingerprint()
    other = blocks.compile(*task(1, 2, 2, seed=2), tolerance=1e-6)
    assert solved.machine_fingerprint == other.machine_fingerprint == before == ff.FrozenBlocks(2).fingerprint()
    assert not np.array_equal(solved.durations, other.durations)
    assert ff.FrozenBlocks(2, causal=True).fingerprint() != before
    with pytest.raises(ValueError, match="read-only"):
        blocks.arrays.scores[0, 0, 0] = 1.0


def test_a_seed_repeats_exactly(blocks, solved):
    again = blocks.compile(*task(1, 2, 2), tolerance=1e-9)
    np.testing.assert_array_equal(again.durations, solved.durations)


@pytest.mark.parametrize(
    ("causal", "size", "seed", "needs"),
    [(False, (1, 2, 2), 1, "state"), (False, (1, 2, 2), 0, "unfolding"), (True, (2, 2, 2), 1, "led")],
)
def test_stops_in_time_and_goes_on_where_it_was(causal, size, seed, needs, tmp_path, monkeypatch):
    """Interrupted after every step, saved, loaded and resumed: the same durations as in one go.

    One case meets folded steps, one leads with words for the first tokens.
    """
    monkeypatch.setattr(solve, "LEADS", 3)
    blocks = ff.FrozenBlocks(2, causal=causal)
    X, Y = task(*size, seed=seed)
    if causal:
        Y[0, 0] *= torch.sign(torch.linalg.det(X[:, 0]) * torch.linalg.det(Y[:, 0]))
    options = {"tolerance": 1e-7, "attempts": 2, "iterations": 30 if causal else 60}
    whole = blocks.compile(X, Y, **options)
    path, resume, states = tmp_path / "search.safetensors", None, []
    for _ in range(2000):
        kept = []
        part = blocks.compile(X, Y, max_seconds=0.0, resume=resume, checkpoint=kept.append, **options)
        if not kept or part.report["status"] == "exhausted":
            break
        ff.save_search(kept[-1], path)
        resume = ff.load_search(path)
        states.append(resume)
    assert len(states) > 5
    assert any(getattr(state, needs) is not None for state in states)
    assert part.report["status"] == whole.report["status"]
    np.testing.assert_array_equal(part.durations, whole.durations)


@pytest.mark.parametrize(
    "change", [{"Y": 1.0}, {"X": 1.0}, {"blocks": 5}, {"eta_max": 0.02}, {"seed": 9}, {"max_depth": 512}, {}]
)
def test_a_search_goes_on_with_its_own_problem_only(blocks, change):
    """Anything that its numbers depend on; a tolerance may change, and a larger one may be met already."""
    X, Y = task(1, 2, 2)
    kept = []
    blocks.compile(X, Y, tolerance=1e-16, attempts=1, checkpoint=kept.append)
    resumed = (ff.FrozenBlocks(2, seed=change["blocks"]) if "blocks" in change else blocks).compile
    options = {k: v for k, v in change.items() if k in ("eta_max", "seed", "max_depth")}
    inputs = X + change.get("X", 0.0), Y + change.get("Y", 0.0)
    if change:
        with pytest.raises(ff.SpecError, match="for another problem"):
            resumed(*inputs, resume=kept[-1], **options)
        return
    again = resumed(*inputs, tolerance=1e-8, resume=kept[-1])
    assert again.report["status"] == "solved"
    assert again.report["seconds"] < 0.5  # met already


def test_an_interrupted_search_is_kept(blocks):
    """Ctrl-C saves it before it ends; and so does the clock of checkpoints, every so often."""
    X, Y = task(2, 2, 2, seed=3)
    kept = []

    def interrupt(record):
        if record.iteration == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        blocks.compile(X, Y, progress=interrupt, checkpoint=kept.append)
    assert kept[-1].state.iteration >= 3


def test_a_running_search_is_saved_now_and_then(blocks, monkeypatch):
    monkeypatch.setattr(compile_module, "SAVE_SECONDS", 0.0)
    kept = []
    blocks.compile(*task(1, 2, 2), checkpoint=kept.append)
    assert len(kept) > 3


def test_failure_is_a_value_with_the_truth(blocks):
    """Out of steps: the best so far, and an error that is the re-run's."""
    X, Y = task(2, 2, 2, seed=5)
    schedule = blocks.compile(X, Y, iterations=1, attempts=1)
    assert schedule.report["status"] == "exhausted"
    measured = float((blocks.run(schedule, X, engine="definition") - Y).abs().max())
    assert schedule.report["error"] == pytest.approx(measured, rel=1e-6)
    assert measured > 1e-3


def test_depth_and_eta_are_kept(blocks):
    schedule = blocks.compile(*task(1, 2, 2, seed=3), tolerance=1e-6, eta_max=0.03, max_depth=4096)
    assert schedule.depth <= 4096
    assert schedule.largest_eta <= 0.03
    with pytest.raises(ff.SpecError, match="allow a depth of"):
        blocks.compile(*task(1, 2, 2), max_depth=100)


def test_settings_fit_the_depth():
    for d, D in ((2, 4), (2, 12), (4, 24), (4, 64)):
        settings = settings_for(d, D, "finite", 0.1, None)
        depth = settings.words * 2 * settings.half * settings.substeps
        assert 0.9 * 256 * D <= depth <= 256 * D
        assert settings.largest / settings.substeps <= 0.1


def test_what_does_not_fit_is_refused(blocks):
    X, Y = task(1, 2, 2)
    for wrong, match in (
        ({"mode": "discrete"}, "mode must be one of"),
        ({"tolerance": 0.0}, "tolerance must be"),
        ({"eta_max": -1.0}, "eta_max must be"),
        ({"attempts": 0}, "at least 1"),
    ):
        with pytest.raises(ff.SpecError, match=match):
            blocks.compile(X, Y, **wrong)
    with pytest.raises(ff.SpecError, match="X and Y must both be"):
        blocks.compile(X, Y[:, :1])
    with pytest.raises(ff.SpecError, match="NaN or infinite"):
        blocks.compile(X * float("nan"), Y)
    with pytest.raises(ff.SpecError, match="needed real tokens"):
        blocks.check_feasible(torch.ones(1, 2, 3), torch.ones(1, 2, 3))
    with pytest.raises(ff.SpecError, match="at least one entry"):
        ff.FrozenBlocks(0)
    with pytest.raises(ff.SpecError, match="scale must be"):
        ff.FrozenBlocks(2, scale=0.0)


def test_run_refuses_foreign_schedules_and_options(blocks, solved):
    X, _ = task(1, 2, 2)
    with pytest.raises(ff.SpecError, match="this schedule is for blocks"):
        ff.FrozenBlocks(2, seed=1).run(solved, X)
    with pytest.raises(ff.SpecError, match="engine must be one of"):
        blocks.run(solved, X, engine="slow")
    with pytest.raises(ff.SpecError, match="forwards"):
        blocks.run(solved, X, backwards=True, precision="extended")


def test_run_takes_any_batch(blocks, solved):
    X = torch.randn(3, 2, 5, 2, dtype=torch.float64)
    out = blocks.run(solved, X)
    torch.testing.assert_close(out[1, 0], blocks.run(solved, X[1, 0]), rtol=0, atol=0)
    assert blocks.trajectory(solved, X[0], points=10).shape == (11, 2, 5, 2)


def test_extended_precision_gains_what_float64_lost(blocks):
    """Refined durations, held as pairs, end within 1e-18 of Y; each step gains the digits of the derivative."""
    problem = problem_of(blocks)
    schedule = blocks.compile(problem.X, problem.Y, tolerance=1e-9)
    refined = refine.refine(problem, schedule.durations.reshape(problem.settings.words, -1))
    assert refined.error < 1e-18
    assert 1 <= refined.steps <= 3
    assert np.abs(refined.remainders).max() < 1e-16


def problem_of(blocks, mode="finite", attempts=5):
    X, Y = (part.numpy() for part in task(1, 2, 2))
    settings = settings_for(2, 4, "finite", 0.1, None)
    arrays = blocks.arrays
    return Problem(arrays.scores, arrays.values, False, X, Y, mode, 1e-6, 0, attempts, settings)


def test_a_solution_that_does_not_return_gets_more_attempts(blocks):
    """Solved beats unsolved, then returning X, then the smaller error; after the spare attempts it is solved."""
    problem, far = problem_of(blocks), float("inf")
    at = solve.Search(error=1e-8, returns=far)
    durations = np.zeros((1, 1))

    def beats(error, returns):
        return at.or_better(problem, durations, judge.Verdict(error, 1.0, 1.0, returns)).durations is durations

    assert beats(1e-7, 1e-9)
    assert not beats(1e-5, 1e-9)
    assert not beats(1e-7, far)
    assert beats(1e-9, far)
    for found, returns, status in (
        ([], far, "searching"),
        ([1e-8], 1e-9, "solved"),
        ([1e-8], far, "searching"),
        ([1e-8, 1e-3, 1e-8], far, "searching"),
        ([1e-3] * 20, far, "searching"),
        ([1e-8] * solve.SPARE_ATTEMPTS, far, "searching"),
        ([1e-8] + [1e-3] * solve.SPARE_ATTEMPTS, far, "solved"),
    ):
        log = tuple({"error": error} for error in found)
        at = solve.Search(error=1e-8, amplification=1.0, amplification_back=1.0, returns=returns, log=log)
        assert solve.status_of(problem, at) == status, (found, returns)
    loud = solve.Search(error=1e-8, amplification=1.0, amplification_back=2e6, returns=far, log=({"error": 1e-8},))
    assert solve.status_of(problem, loud) == "solved"  # nothing is promised there
    assert solve.status_of(problem, solve.Search(attempt=4)) == "exhausted"
    assert solve.status_of(problem_of(blocks, "continuous"), solve.Search(log=({"error": 1e-8},))) == "solved"


def test_returned_is_what_run_backwards_says(blocks, solved):
    problem = problem_of(blocks)
    words = solved.durations.reshape(problem.settings.words, -1)
    X, _ = task(1, 2, 2)
    back = blocks.run(solved, blocks.run(solved, X), backwards=True)
    assert judge.returned(problem, words) == pytest.approx(float((back - X).abs().max()), rel=1e-2, abs=1e-15)
    assert judge.returned(problem_of(blocks, "continuous"), words) == float("inf")


def test_pairs_keep_the_rounding_error():
    high, low = refine.add(np.array([1.0]), np.array([0.0]), np.array([1e-20]))
    assert (high[0], low[0]) == (1.0, 1e-20)
    high, low = refine.add(high, low, np.array([1e-16]))
    assert high[0] + low[0] == 1.0
    assert low[0] == pytest.approx(1e-16, rel=1e-3)
