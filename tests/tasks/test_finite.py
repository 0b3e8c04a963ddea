"""A training set of a fixed size, and what is held out of it."""

import numpy as np
import pytest

import fixedformer as ff
from fixedformer.experiments.looped import LoopedRecipe
from fixedformer.experiments.task_names import build_task
from fixedformer.tasks.finite import FiniteSet, HeldOut, Reserved
from fixedformer.tasks.strings import LongestCommonSubsequence
from fixedformer.tasks.trees import DecisionTrees


def test_nothing_is_in_both():
    task = LongestCommonSubsequence(4, letters=2)  # 256 different sequences
    train = FiniteSet(task, 150, seed=3)
    keys = {row.astype(np.int64).tobytes() for row in train.examples.inputs}
    assert len(keys) == 150
    drawn = train.sample(500, np.random.default_rng(0))
    assert {row.tobytes() for row in drawn.inputs} <= keys
    held_out = HeldOut(train, task)
    fresh = held_out.sample(300, np.random.default_rng(0))
    assert not {row.tobytes() for row in fresh.inputs} & keys
    assert (train.name, train.tokens, train.vocabulary) == (task.name, task.tokens, task.vocabulary)
    assert held_out.trivial_rules(fresh).keys() == task.trivial_rules(fresh).keys()
    assert held_out.measures(fresh, fresh.labels) == {}
    again = FiniteSet(task, 150, seed=3)
    assert np.array_equal(again.examples.inputs, train.examples.inputs)


def test_values_too():
    train = FiniteSet(DecisionTrees(points=5, dimensions=3, every=0), 10, seed=0)
    fresh = HeldOut(train, train.task).sample(4, np.random.default_rng(0))
    assert not any(train.knows(fresh.inputs))
    assert all(train.knows(train.examples.inputs))
    assert "squared error" in train.measures(fresh, fresh.labels)


def test_refused_sizes():
    task = LongestCommonSubsequence(4, letters=2)
    with pytest.raises(ff.SpecError, match="gave 256 different sequences, 1000 were asked for"):
        FiniteSet(task, 1000, seed=0)
    with pytest.raises(ff.SpecError, match="needs at least one"):
        FiniteSet(task, 0, seed=0)
    with pytest.raises(ff.SpecError, match="make the training set smaller"):
        HeldOut(FiniteSet(task, 256, seed=0), task).sample(5, np.random.default_rng(0))


@pytest.mark.parametrize(("task", "options"), [("countdown", {}), ("language", {"block": 12}), ("sudoku", {"pool": 4})])
def test_a_finite_set_keeps_what_the_task_holds_out(task, options):
    """Countdown's targets, the text's last tenth, other puzzles: not sequences of the training part that were left."""
    own, kept = build_task(task, options)
    train, held_out = LoopedRecipe(task, options, train_size=50).build_tasks()
    drawn = held_out.sample(40, np.random.default_rng(3))
    assert held_out.task is not own
    if task == "countdown":
        assert set(drawn.inputs[:, 4]) <= set(kept.targets)
    if task == "language":
        text = kept.text.tobytes()
        assert all(row.astype(np.int64).tobytes() in text for row in drawn.inputs)
    assert not any(train.knows(drawn.inputs))


@pytest.mark.parametrize("task", ["edit-distance", "lcs", "dyck", "1-hop"])
def test_what_is_tested_was_never_trained_on(task):
    """On tasks small enough that fresh draws would meet again."""
    options = {"edit-distance": {"length": 4, "letters": 3}, "lcs": {"length": 4, "letters": 2}, "dyck": {"pairs": 6},
               "1-hop": {"tokens": 9, "characters": 3}}[task]  # fmt: skip
    plain = build_task(task, options)[0].sample(3000, np.random.default_rng(1)).inputs
    train, held_out = LoopedRecipe(task, options).build_tasks()
    trained, tested = (part.sample(3000, np.random.default_rng(0)).inputs for part in (train, held_out))
    assert {row.tobytes() for row in plain} & {row.tobytes() for row in tested}
    assert not {row.tobytes() for row in trained} & {row.tobytes() for row in tested}
    again = train.sample(3000, np.random.default_rng(0)).inputs
    assert np.array_equal(trained, again)


def test_a_sixteenth_is_reserved():
    task = LongestCommonSubsequence(8)
    inputs = task.sample(20_000, np.random.default_rng(0)).inputs
    kept = {row.tobytes() for row in Reserved(task, held_out=True).sample(20_000, np.random.default_rng(0)).inputs}
    share = np.mean([row.tobytes() in kept for row in inputs])
    assert 0.055 < share < 0.07


def test_a_curriculum_has_no_finite_set():
    with pytest.raises(ff.SpecError, match="changes as training goes on"):
        LoopedRecipe("trees", {}, train_size=10).build_tasks()
