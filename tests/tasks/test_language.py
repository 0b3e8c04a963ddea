"""Text as a task: windows, held-out text, replaced tokens, byte pairs where the library is there."""

import numpy as np
import pytest

import fixedformer as ff
from fixedformer.tasks.language import Language, default_text


def test_windows_of_the_default_text():
    train, held_out = Language.read(block=32)
    text = default_text()
    assert len(text) > 400_000
    joined = bytes(train.ids.tolist() + held_out.ids.tolist()).decode()
    assert joined == text
    for task in (train, held_out):
        examples = task.sample(50, np.random.default_rng(0))
        assert examples.inputs.shape == (50, 32)
        assert (examples.inputs[:, 1:] == examples.labels[:, :-1]).all()
        assert examples.scored.all()
        whole = bytes(task.ids.tolist())
        for inputs, labels in zip(examples.inputs.tolist(), examples.labels.tolist()):
            assert bytes(inputs) + bytes(labels[-1:]) in whole
        solved = task.solve(examples.inputs[0].tolist())
        assert len(solved) == 32
    rules = held_out.trivial_rules(held_out.sample(100, np.random.default_rng(0)))
    assert 0.1 < rules["commonest token"] < rules["commonest pair"] < 0.5


def test_a_file_and_replaced_tokens(tmp_path):
    path = tmp_path / "t.txt"
    path.write_text("héllo wörld. " * 200, encoding="utf-8")
    plain, _ = Language.read(path, block=16)
    noisy, _ = Language.read(path, block=16, replaced=0.1)
    share = (noisy.text != plain.text).mean()
    assert share == pytest.approx(0.1, abs=0.03)
    again, _ = Language.read(path, block=16, replaced=0.1)
    assert np.array_equal(noisy.text, again.text)
    assert plain.bytes_each == 1


def test_byte_pairs(tmp_path):
    pytest.importorskip("tokenizers")
    path = tmp_path / "t.txt"
    path.write_text("the loop computes what the loop computes, again and again. " * 100, encoding="utf-8")
    train, held_out = Language.read(path, block=8, tokeniser="bpe", vocabulary=300)
    assert len(train.vocabulary) <= 300
    assert train.bytes_each > 2
    assert held_out.sample(4, np.random.default_rng(0)).inputs.max() < len(train.vocabulary)


@pytest.mark.parametrize(("options", "message"), [
    ({"path": "none.txt"}, "no such file"), ({"block": 10**7}, "has no window of"),
    ({"replaced": 2.0}, "replaced in 0"),
])  # fmt: skip
def test_language_refuses(options, message, tmp_path):
    if "path" in options:
        options = {"path": tmp_path / options["path"]}
    with pytest.raises(ff.SpecError, match=message):
        Language.read(**options)


def test_other_encodings_are_refused(tmp_path):
    path = tmp_path / "t.txt"
    path.write_bytes(b"\xff\xfe\x00" * 100)
    with pytest.raises(ff.SpecError, match="not UTF-8"):
        Language.read(path)
