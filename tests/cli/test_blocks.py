"""compile, run and certify on files with real blocks."""

import numpy as np
import pytest
import torch

import fixedformer as ff
from fixedformer.cli import main

SPEC = ff.BlockSpec(heads=2, layers=1, d_in=3, d_head=2, mlp="plain", mlp_width=3, activation="gelu", bias=True)


@pytest.fixture
def folder(tmp_path):
    target = ff.BlockTarget.random(SPEC, seed=1)
    card = ff.Card(("a", "b", "c"), "causal", "three letters")
    ff.save_block_target(ff.BlockTarget(SPEC, card=card, **target.weights), tmp_path / "target.st")
    ff.save_block_target(ff.BlockTarget.random(SPEC, seed=2), tmp_path / "other.st")
    np.save(tmp_path / "x.npy", np.array([0, 2, 1, 1]))
    return tmp_path


@pytest.mark.parametrize("options", [[], ["--machine", "random", "--neurons-per-target", "1.5"]])
def test_three_verbs(folder, options, capsys):
    program, out = str(folder / "p.st"), str(folder / "y.npy")
    assert main(["compile", str(folder / "target.st"), "-o", program, *options]) == 0
    assert "times the target" in capsys.readouterr().out
    assert main(["run", program, str(folder / "x.npy"), "-o", out]) == 0
    truth = ff.load_block_target(folder / "target.st")(torch.tensor([0, 2, 1, 1]), "causal")
    assert np.allclose(np.load(out), truth.numpy(), atol=1e-9)
    assert main(["certify", program, str(folder / "target.st")]) == 0
    assert main(["certify", program, str(folder / "other.st")]) == 1


def test_refused(folder, capsys):
    for options, why in (
        (["--looped"], "not looped"),
        (["--width", "9999"], "one width"),
        (["--machine", "random", "--distribution", "orthogonal"], "not 'orthogonal'"),
    ):
        assert main(["compile", str(folder / "target.st"), "-o", str(folder / "p.st"), *options]) == 2
        assert why in capsys.readouterr().err
