"""Edit distance and longest common subsequence against rapidfuzz, against plain Python, and for speed."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rapidfuzz.distance import LCSseq, Levenshtein

import fixedformer as ff
from fixedformer.tasks.strings import PAD, SEP, EditDistance, LongestCommonSubsequence, distances

TASKS = [
    EditDistance(40), EditDistance(6, letters=3), EditDistance(12, costs=(1, 4, 2), shorter_first=False),
    LongestCommonSubsequence(60), LongestCommonSubsequence(8), LongestCommonSubsequence(20, letters=26),
]  # fmt: skip


def truth(task, one, two):
    if isinstance(task, EditDistance):
        return Levenshtein.distance(one, two, weights=task.costs)
    return LCSseq.similarity(one, two)


@pytest.mark.parametrize("task", TASKS, ids=repr)
def test_labels_are_right_by_rapidfuzz(task):
    examples = task.sample(10_000 if task.length in (40, 60) else 2000, np.random.default_rng(1))
    assert examples.scored.sum(1).tolist() == [1] * len(examples.inputs)
    told = examples.labels[examples.scored] - task.numbers
    for inputs, label in zip(examples.inputs.tolist(), told.tolist()):
        one, two, _ = task.split(inputs)
        assert truth(task, one, two) == label


@pytest.mark.parametrize("task", TASKS, ids=repr)
def test_labels_are_right_by_plain_python(task):
    examples = task.sample(60, np.random.default_rng(2))
    for inputs, labels, scored in zip(examples.inputs.tolist(), examples.labels.tolist(), examples.scored):
        solved = task.solve(inputs)
        assert [a for a, s in zip(solved, scored) if s] == [b for b, s in zip(labels, scored) if s]


@given(
    st.lists(st.text("abc", max_size=7), min_size=1, max_size=4), st.lists(st.text("abc", max_size=9), min_size=4),
    st.tuples(*[st.integers(0, 4)] * 3),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_distances_of_any_lengths_and_costs(ones, twos, costs):
    twos = twos[: len(ones)]

    def rows(texts):
        wide = max(1, *(len(text) for text in texts))
        return np.array([[ord(c) for c in text.ljust(wide, "#")] for text in texts], dtype=np.uint8)

    lengths = [np.array([len(text) for text in texts]) for texts in (ones, twos)]
    found = distances(rows(ones), lengths[0], rows(twos), lengths[1], *costs)
    assert found.tolist() == [Levenshtein.distance(a, b, weights=costs) for a, b in zip(ones, twos)]


def test_layout_and_lengths():
    """Algorithm 1: the first string has n letters, the second n-3 .. n+2; the shorter comes first."""
    task = EditDistance(12)
    examples = task.sample(3000, np.random.default_rng(0))
    lengths = [tuple(len(part) for part in task.split(row)[:2]) for row in examples.inputs.tolist()]
    assert all(one <= two for one, two in lengths)
    assert {max(one, two) if min(one, two) == 12 else min(one, two) for one, two in lengths} == set(range(9, 15))
    plain = EditDistance(12, shorter_first=False).sample(3000, np.random.default_rng(0))
    assert {len(task.split(row)[0]) for row in plain.inputs.tolist()} == {12}
    ends = (examples.inputs == SEP).argmax(1)
    behind = np.arange(task.tokens) > ends[:, None]
    assert (examples.inputs[behind] == PAD).all()
    assert (examples.inputs[~behind] != PAD).all()
    assert examples.labels.max() < len(task.vocabulary)
    assert task.vocabulary[task.numbers] == "0"


def test_edits_stay_near_and_random_ones_do_not():
    task = EditDistance(40)
    labels = task.sample(4000, np.random.default_rng(3))
    far = labels.labels[labels.scored] - task.numbers
    assert far.min() < 40
    assert far.mean() == pytest.approx(56, abs=4), "40% random pairs, 60% with 40 edits"


@pytest.mark.parametrize("task", [EditDistance(12), LongestCommonSubsequence(12)], ids=repr)
def test_trivial_rules(task):
    rules = task.trivial_rules(task.sample(3000, np.random.default_rng(5)))
    assert set(rules) == {"commonest label", "by equal places", "by letters in common"}
    assert 0 < rules["commonest label"] < max(rules.values()) < 0.6


def test_one_seed_one_sample():
    one, two, other = (EditDistance(10).sample(50, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert np.array_equal(one.inputs, two.inputs)
    assert not np.array_equal(one.inputs, other.inputs)


@pytest.mark.parametrize("options", [{"length": 3}, {"letters": 27}, {"letters": 1}])
def test_refused(options):
    with pytest.raises(ff.SpecError, match="needed length >= 4 and"):
        EditDistance(**options)


@pytest.mark.slow
@pytest.mark.parametrize("task", [EditDistance(40), LongestCommonSubsequence(60)], ids=repr)
def test_speed(task):
    """25,000 pairs a second of CPU time on one core: 50,000 on two."""
    generator = np.random.default_rng(0)
    task.sample(100, generator)
    speeds = []
    for _ in range(3):
        began = time.process_time()
        task.sample(20_000, generator)
        speeds.append(20_000 / (time.process_time() - began))
    assert max(speeds) > 25_000
