"""Data of one's own: read, split without overlap, refused line by line."""

import json

import numpy as np
import pytest

import fixedformer as ff
from fixedformer.tasks.own import OwnData
from fixedformer.tasks.task import Examples


def jsonl(path, rows):
    path.write_text("".join(json.dumps({"tokens": t, "labels": labels}) + "\n" for t, labels in rows))
    return path


ROWS = [([f"w{i}", "b", "c"][: 2 + i % 2], ["b", None, "x"][: 2 + i % 2]) for i in range(20)]


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_read(tmp_path, kind):
    path = tmp_path / f"data.{kind}"
    if kind == "jsonl":
        jsonl(path, ROWS)
    else:
        lines = [" ".join(t) + "," + " ".join("-" if x is None else x for x in labels) for t, labels in ROWS]
        path.write_text("tokens,labels\n" + "\n".join(lines) + "\n")
    train, held = OwnData.read(path)
    assert train.vocabulary == held.vocabulary
    assert train.vocabulary[0] == "<pad>"
    assert set(train.vocabulary[1:]) == {"b", "c", "x", *(f"w{i}" for i in range(20))}
    assert train.tokens == held.tokens == 3
    rows = [{tuple(row) for row in part.examples.inputs.tolist()} for part in (train, held)]
    assert not rows[0] & rows[1], "no sequence is in both parts"
    assert (len(rows[0]), len(rows[1])) == (16, 4)
    for tokens, labels in ROWS:
        ids = [train.vocabulary.index(t) for t in tokens] + [0] * (3 - len(tokens))
        part = train if tuple(ids) in rows[0] else held
        place = part.examples.inputs.tolist().index(ids)
        scored = part.examples.scored[place].tolist()
        assert scored == [label is not None for label in labels] + [False] * (3 - len(labels))
        told = part.solve(ids)
        assert [train.vocabulary[told[i]] for i, ok in enumerate(scored) if ok] == [x for x in labels if x is not None]


def test_sampling_is_seeded(tmp_path):
    train, _ = OwnData.read(jsonl(tmp_path / "d.jsonl", ROWS))
    one, two = (train.sample(30, np.random.default_rng(1)) for _ in range(2))
    assert np.array_equal(one.inputs, two.inputs)
    rules = train.trivial_rules(one)
    assert 0 < rules["commonest label"] < 1
    with pytest.raises(ff.SpecError, match="is not in d"):
        train.solve([0, 0, 0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no sequence"),
        ("nonsense\n", 'line 1: needed {"tokens"'),
        ('{"tokens": ["a"]}\n', "line 1: needed"),
        ('{"tokens": ["a", "b"], "labels": ["a"]}\n', "2 tokens and 1 labels"),
        ('{"tokens": [], "labels": []}\n', "holds no token"),
        ('{"tokens": ["<pad>"], "labels": ["a"]}\n', "is taken"),
        ('{"tokens": ["a"], "labels": ["a"]}\n', "needs at least two different sequences"),
        ('{"tokens": ["a"], "labels": [null]}\n{"tokens": ["b"], "labels": [null]}\n', "has no scored label"),
    ],
)
def test_bad_lines(tmp_path, text, message):
    path = tmp_path / "d.jsonl"
    path.write_text(text)
    with pytest.raises(ff.SpecError, match=message):
        OwnData.read(path)


def test_bad_files(tmp_path):
    with pytest.raises(ff.SpecError, match="no such file"):
        OwnData.read(tmp_path / "none.csv")
    with pytest.raises(ff.SpecError, match=r"is a .jsonl or a .csv file, got '.txt'"):
        OwnData.read(tmp_path / "x.txt")
    (tmp_path / "d.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ff.SpecError, match="needed a header with the columns tokens and labels"):
        OwnData.read(tmp_path / "d.csv")


def test_validation_and_test_have_a_half_each(tmp_path):
    """Of what is held out; no row without a label is among them, and a sequence that comes twice is in one half."""
    lines = [{"tokens": [str(i), str(i % 7)], "labels": [None, str(i % 3)]} for i in range(100)]
    lines += [*lines[:50], {"tokens": ["7", "7"], "labels": [None, None]}]
    path = tmp_path / "own.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    train, held_out = OwnData.read(path)
    assert train.examples.scored.any(1).all()
    halves = [{row.tobytes() for row in held_out.half(which).examples.inputs} for which in range(2)]
    assert not halves[0] & halves[1]
    assert halves[0] | halves[1] == {row.tobytes() for row in held_out.examples.inputs}
    assert abs(len(halves[0]) - len(halves[1])) <= 1
    alone = OwnData("one", held_out.vocabulary, Examples(*(x[:1] for x in vars(held_out.examples).values())))
    assert all(len(alone.half(which).examples.inputs) == 1 for which in range(2))
