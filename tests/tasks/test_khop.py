"""k-hop strings against plain Python."""

import numpy as np
import pytest

from fixedformer.tasks.khop import KHop


@pytest.mark.parametrize("hops", [1, 2, 3, 4, (1, 4)])
def test_labels_are_right(hops):
    task = KHop(hops)
    examples = task.sample(300, np.random.default_rng(1))
    assert examples.inputs.shape == (300, 99)
    for inputs, labels in zip(examples.inputs.tolist(), examples.labels.tolist()):
        assert task.solve(inputs) == labels


def test_the_papers_example():
    """X = aabccabca: the 2-hop output of the last token is c (section 5.1; its strings may repeat letters)."""
    task = KHop(2)
    text = ["abc".index(c) for c in "aabccabca"]
    assert task.solve([task.characters + 1, *text])[-1] == "abc".index("c")


def test_strings():
    task = KHop(2)
    examples = task.sample(2000, np.random.default_rng(0))
    text = examples.inputs[:, 1:]
    assert (text[:, 1:] != text[:, :-1]).all(), "no adjacent repeats"
    assert len(task.vocabulary) == 30
    assert task.vocabulary[int(examples.inputs[0, 0])] == "2"
    assert (examples.labels[:, 0] == task.blank).all()
    shares = np.bincount(text.ravel(), minlength=4) / text.size
    assert shares == pytest.approx(0.25, abs=0.01)


@pytest.mark.parametrize(("hops", "rule", "share"), [(1, "copy x[i-1]", 0.48), (2, "copy x[i]", 0.47)])
def test_trivial_rules_score_high(hops, rule, share):
    """Accuracies below these numbers have understood nothing."""
    rules = KHop(hops).trivial_rules(KHop(hops).sample(2000, np.random.default_rng(2)))
    assert rules[rule] == pytest.approx(share, abs=0.02)
    assert rules[rule] == max(rules.values())


def test_mixed_hops_are_uniform():
    examples = KHop((1, 4)).sample(4000, np.random.default_rng(3))
    shares = np.bincount(examples.inputs[:, 0] - 4, minlength=4) / 4000
    assert shares == pytest.approx(0.25, abs=0.03)
