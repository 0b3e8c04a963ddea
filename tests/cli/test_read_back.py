"""decompile and shrink as a person meets them."""

import numpy as np
import pytest
import torch

import fixedformer as ff
from fixedformer.cli import main

SPEC = ff.TargetSpec(heads=2, layers=2, d_in=3, d_head=2)


@pytest.fixture
def folder(tmp_path):
    target = ff.Target.random(SPEC, seed=1, d_model=9)
    card = ff.Card(("a", "b", "c"), "causal", "three letters")
    ff.save_target(ff.Target(SPEC, **target.weights.named(), card=card), tmp_path / "target.safetensors")
    for name, options in (("sparse", []), ("random", ["--machine", "random", "--seed", "5"])):
        main(["compile", str(tmp_path / "target.safetensors"), "-o", str(tmp_path / f"{name}.safetensors"), *options])
    (tmp_path / "in.txt").write_text("abc\nbca\nab\n")
    return tmp_path


def call(capsys, *arguments):
    capsys.readouterr()
    status = main([str(argument) for argument in arguments])
    return status, *capsys.readouterr()


def refused(capsys, *arguments):
    status, out, err = call(capsys, *arguments)
    assert status == 2
    assert not out
    lines = [line for line in err.splitlines() if not line.startswith(".. ")]
    assert len(lines) == 1, f"an error is one line, got {err!r}"
    return lines[0]


@pytest.mark.parametrize("machine", ["sparse", "random"])
def test_decompile_then_certify(folder, capsys, machine):
    program, small = folder / f"{machine}.safetensors", folder / "small.safetensors"
    status, out, err = call(capsys, "decompile", program, "-o", small, "--plot", folder / "widths.png")
    assert status == 0
    assert "width        36 -> 4, exactly" in out
    assert "cut 1        rank 4" in out
    assert "certify" in err
    assert (folder / "widths.png").read_bytes().startswith(b"\x89PNG")
    loaded = ff.load_target(small)
    assert loaded.card.vocabulary == ("a", "b", "c")
    want = ff.load_target(folder / "target.safetensors")(torch.tensor([0, 2, 1]), "causal")
    assert torch.allclose(loaded(torch.tensor([0, 2, 1]), "causal"), want, rtol=0, atol=1e-10)
    status, out, _ = call(capsys, "certify", program, small, "--read-back", "--json", folder / "c.json")
    assert status == 0
    assert "holds  every read-out of the one is the other's" in out
    assert '"holds": true' in (folder / "c.json").read_text()
    assert call(capsys, "certify", program, folder / "target.safetensors", "--read-back")[0] == 0


def test_shrink_then_certify(folder, capsys):
    target, small = folder / "target.safetensors", folder / "small.safetensors"
    status, out, _ = call(capsys, "shrink", target, "-o", small)
    assert status == 0
    assert "width        9 -> 4, exactly" in out
    assert call(capsys, "certify", target, small)[0] == 0
    assert call(capsys, "shrink", target, "-o", small, "--width", 2)[0] == 0
    status, out, _ = call(capsys, "certify", target, small)
    assert status == 1
    assert "DOES NOT HOLD" in out


def test_tokens_need_their_own_certificate(folder, capsys):
    wide = ff.Target.random(ff.TargetSpec(3, 2, 3, 4), seed=2, d_model=20)
    ff.save_target(wide, folder / "wide.safetensors")
    small = folder / "small.safetensors"
    status, out, err = call(capsys, "shrink", folder / "wide.safetensors", "-o", small, "--tokens")
    assert status == 0
    assert "width        20 -> 7, exactly" in out
    assert "equal for one-hot tokens only" in out
    assert "--tokens" in err
    assert call(capsys, "certify", folder / "wide.safetensors", small, "--tokens")[0] == 0
    assert call(capsys, "certify", folder / "wide.safetensors", small)[0] == 1


def test_truncation_says_what_it_measured(folder, capsys):
    program, small = folder / "random.safetensors", folder / "small.safetensors"
    status, out, err = call(
        capsys, "decompile", program, "-o", small, "--width", 3, "--data", folder / "in.txt", "--last", "--steps", 4
    )
    assert status == 0
    assert "4 exactly -> 3 truncated" in out
    assert "of 3 outputs on these 3 sequences have the same largest entry" in out
    assert "not proven for other" in out
    assert "data weights" in out
    assert "step 4 of 4" in err
    np.save(folder / "in.npy", np.array([[0, 1, 2], [2, 1, 0]]))
    np.save(folder / "where.npy", np.array([[False, True, True], [False, False, True]]))
    status, out, _ = call(
        capsys, "decompile", program, "-o", small, "--width", 3, "--data", folder / "in.npy", "--where",
        folder / "where.npy", "--mask", "none",
    )  # fmt: skip
    assert status == 0
    assert "of 3 outputs on these 2 sequences" in out
    status, out, _ = call(capsys, "decompile", program, "-o", small, "--width", 3)
    assert "bound" in out
    assert "agreement" not in out


def test_bad_usage_is_one_line(folder, capsys):
    program, target, small = (folder / f"{name}.safetensors" for name in ("sparse", "target", "small"))
    assert "width must be a whole number" in refused(capsys, "decompile", program, "-o", small, "--width", 0)
    assert "give --data FILE" in refused(capsys, "decompile", program, "-o", small, "--last")
    both = ("--data", folder / "in.txt", "--last", "--where", folder / "in.npy")
    assert "give one" in refused(capsys, "decompile", program, "-o", small, *both)
    assert "holds a target, a program was needed" in refused(capsys, "decompile", target, "-o", small)
    assert "holds a program, a target was needed" in refused(capsys, "shrink", program, "-o", small)
    assert "add --read-back" in refused(capsys, "certify", program, target, "--tokens")
    assert "has its own" in refused(capsys, "certify", program, target, "--read-back", "--tolerance", 1e-3)
    assert not small.exists()
