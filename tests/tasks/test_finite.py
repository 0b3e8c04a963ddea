"""A training set of a fixed size, and what is held out of it."""

import numpy as np
import pytest

import fixedformer as ff
from fixedformer.tasks.finite import FiniteSet, HeldOut
from fixedformer.tasks.strings import LongestCommonSubsequence
from fixedformer.tasks.trees import DecisionTrees


def test_nothing_is_in_both():
    task = LongestCommonSubsequence(4, letters=2)  # 256 different sequences
    train = FiniteSet(task, 150, seed=3)
    keys = {row.astype(np.int64).tobytes() for row in train.examples.inputs}
    assert len(keys) == 150
    drawn = train.sample(500, np.random.default_rng(0))
    assert {row.tobytes() for row in drawn.inputs} <= keys
    held_out = HeldOut(train)
    fresh = held_out.sample(300, np.random.default_rng(0))
    assert not {row.tobytes() for row in fresh.inputs} & keys
    assert (train.name, train.tokens, train.vocabulary) == (task.name, task.tokens, task.vocabulary)
    assert held_out.trivial_rules(fresh).keys() == task.trivial_rules(fresh).keys()
    assert held_out.measures(fresh, fresh.labels) == {}
    again = FiniteSet(task, 150, seed=3)
    assert np.array_equal(again.examples.inputs, train.examples.inputs)


def test_values_too():
    train = FiniteSet(DecisionTrees(points=5, dimensions=3, every=0), 10, seed=0)
    fresh = HeldOut(train).sample(4, np.random.default_rng(0))
    assert not any(train.knows(fresh.inputs))
    assert all(train.knows(train.examples.inputs))
    assert "squared error" in train.measures(fresh, fresh.labels)


def test_refused_sizes():
    task = LongestCommonSubsequence(4, letters=2)
    with pytest.raises(ff.SpecError, match="gave 256 different sequences, 1000 were asked for"):
        FiniteSet(task, 1000, seed=0)
    with pytest.raises(ff.SpecError, match="needs at least one"):
        FiniteSet(task, 0, seed=0)
    with pytest.raises(ff.SpecError, match="make it smaller"):
        HeldOut(FiniteSet(task, 256, seed=0)).sample(5, np.random.default_rng(0))
