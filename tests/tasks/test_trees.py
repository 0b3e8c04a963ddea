"""In-context decision trees against a tree walked by hand; the curriculum really changes the dimension."""

import numpy as np
import pytest

import fixedformer as ff
from fixedformer.tasks.trees import DecisionTrees, evaluate


def walk(x, looks, leaves, depth):
    node = 0
    for _ in range(depth):
        node = 2 * node + (2 if x[looks[node]] > 0 else 1)
    return leaves[node - (2**depth - 1)]


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_values_are_the_trees(depth):
    generator = np.random.default_rng(depth)
    x = generator.standard_normal((5, 7, 6), dtype=np.float32)
    looks = generator.integers(0, 6, (5, 2**depth - 1))
    leaves = generator.standard_normal((5, 2**depth), dtype=np.float32)
    found = evaluate(x, looks, leaves, depth)
    for row in range(5):
        assert found[row].tolist() == [walk(point, looks[row], leaves[row], depth) for point in x[row]]


def test_layout():
    task = DecisionTrees(points=9, dimensions=5, every=0)
    examples = task.sample(50, np.random.default_rng(0))
    assert task.tokens == 17
    assert examples.inputs.shape == (50, 17, 5)
    assert examples.values
    assert examples.scored.sum() == 50 * 9
    assert (examples.inputs[:, 1::2, 0] == examples.labels[:, :-1:2]).all(), "f(x) follows x"
    assert (examples.inputs[:, 1::2, 1:] == 0).all()
    assert len(np.unique(examples.labels[0, ::2])) <= 16


def test_the_curriculum_changes_dimension_and_length():
    """Appendix C.2: 5 -> 20 dimensions, 26 -> 101 points, a step every 5,000."""
    task = DecisionTrees()
    for step, used, points in [(0, 5, 26), (4999, 5, 26), (5000, 6, 31), (40_000, 13, 66), (75_000, 20, 101),
                               (199_999, 20, 101)]:  # fmt: skip
        now = task.at(step)
        examples = now.sample(30, np.random.default_rng(0))
        assert (now.used, now.points) == (used, points)
        assert examples.inputs.shape == (30, 2 * points - 1, 20)
        assert (examples.inputs[:, ::2, used:] == 0).all()
        assert (examples.inputs[:, ::2, used - 1] != 0).all()
    assert DecisionTrees(every=0).at(10**6) == DecisionTrees(every=0)


def test_trees_look_at_used_dimensions_only():
    """With one dimension in use f depends on one sign: two values a sequence."""
    task = DecisionTrees(points=40, first_dimensions=1).at(0)
    examples = task.sample(20, np.random.default_rng(0))
    assert max(len(np.unique(row)) for row in examples.labels[:, ::2]) == 2


def test_scores():
    task = DecisionTrees(depth=2, dimensions=2, points=40, every=0)
    examples = task.sample(500, np.random.default_rng(0))
    rules = task.trivial_rules(examples)
    assert rules["zero"] == 0
    assert 0.3 < rules["3 nearest"] < 1
    assert examples.accuracy(examples.labels) == 1
    assert examples.accuracy(10 + examples.labels) == 0, "worse than zero counts as nothing explained"
    measures = task.measures(examples, examples.labels + 0.5)
    assert measures["squared error"] == pytest.approx(0.25)
    assert measures["squared error, zero"] == pytest.approx(np.square(examples.labels[:, -1]).mean(), rel=1e-5)
    with pytest.raises(ff.SpecError, match="not determined by its examples"):
        task.solve([0])


@pytest.mark.parametrize(("options", "message"), [({"points": 1}, "at least 2 points"), ({"depth": 0}, "at least 1")])
def test_trees_refuse(options, message):
    with pytest.raises(ff.SpecError, match=message):
        DecisionTrees(**options)
