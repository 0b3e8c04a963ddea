"""Parenthesis strings against plain Python."""

from collections import Counter

import numpy as np
import pytest

from fixedformer.tasks.dyck import CLOSE, OPEN, PAD, QUERY, Dyck

TASK = Dyck()


@pytest.fixture(scope="module")
def examples():
    return TASK.sample(20_000, np.random.default_rng(0))


def test_labels_are_right(examples):
    """At "?" by the plain solver; before it the next token; behind the answer padding."""
    for inputs, labels in zip(examples.inputs[:4000].tolist(), examples.labels[:4000].tolist()):
        place = inputs.index(QUERY)
        assert TASK.solve(inputs)[: place + 1] == labels[: place + 1]
        assert set(inputs[:place]) <= {OPEN, CLOSE}
        assert set(labels[place + 1 :]) <= {PAD}


def test_scored_places(examples):
    assert (examples.scored.sum(1) == 1).all()
    assert (examples.inputs[examples.scored] == QUERY).all()
    every = Dyck(everywhere=True).sample(100, np.random.default_rng(1))
    assert (every.scored.sum(1) == (every.inputs == QUERY).argmax(1) + 1).all()


def test_distribution(examples):
    """Lengths, shares and the rules that understand nothing, as docs state them."""
    lengths = (examples.inputs == QUERY).argmax(1)
    assert examples.inputs.shape == (20_000, 62)
    assert (lengths.min(), lengths.max()) == (1, 60)
    rules = TASK.trivial_rules(examples)
    assert rules["always balanced"] == pytest.approx(0.50, abs=0.02)
    assert rules["even length"] == pytest.approx(0.665, abs=0.02)
    assert rules["even, starts ( and ends )"] == pytest.approx(0.84, abs=0.02)


def test_balanced_growth_is_the_recursion():
    """All at once against the recursion itself, in distribution: every balanced string of 3 pairs, 60,000 draws."""
    plain = np.random.default_rng(5)

    def grow(pairs):
        if pairs == 0:
            return ""
        if pairs == 1 or plain.random() < 0.5:
            return "(" + grow(pairs - 1) + ")"
        first = int(plain.integers(1, pairs))
        return grow(first) + grow(pairs - first)

    strings, counts = Dyck(pairs=3)._balanced_strings(60_000, np.random.default_rng(6))
    ours = Counter("".join("(" if t == OPEN else ")" for t in row) for row, n in zip(strings, counts) if n == 3)
    want = Counter(grow(3) for _ in range(20_000))
    assert set(ours) == set(want) == {"((()))", "(()())", "(())()", "()(())", "()()()"}
    for text in want:
        # 5 standard deviations of the difference of two shares from about 20,000 draws each
        assert ours[text] / sum(ours.values()) == pytest.approx(want[text] / 20_000, abs=0.025)


def test_one_seed_one_sample():
    one, two = (TASK.sample(50, np.random.default_rng(3)) for _ in range(2))
    assert np.array_equal(one.inputs, two.inputs)
    assert not np.array_equal(one.inputs, TASK.sample(50, np.random.default_rng(4)).inputs)


def test_accuracy_counts_scored_places_only(examples):
    assert examples.accuracy(examples.labels) == 1.0
    wrong = np.where(examples.scored, PAD, examples.labels)
    assert examples.accuracy(wrong) == 0.0
