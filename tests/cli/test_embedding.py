"""The command line as a person meets it: results on stdout, one line of error, exit status."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import fixedformer as ff
from fixedformer.cli import main
from fixedformer.experiments.demo import shipped_target

SPEC = ff.TargetSpec(heads=2, layers=2, d_in=3, d_head=2)


@pytest.fixture
def folder(tmp_path):
    target = ff.Target.random(SPEC, seed=1)
    card = ff.Card(("a", "b", "c"), "causal", "three letters")
    ff.save_target(ff.Target(SPEC, **target.weights.named(), card=card), tmp_path / "target.safetensors")
    return tmp_path


def call(capsys, *arguments):
    status = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return status, out, err


def refused(capsys, *arguments):
    status, out, err = call(capsys, *arguments)
    assert status == 2
    assert not out
    lines = [line for line in err.splitlines() if not line.startswith(".. ")]  # progress is no error
    assert len(lines) == 1, f"an error is one line, got {err!r}"
    return lines[0]


@pytest.mark.parametrize("options", [[], ["--machine", "random"], ["--looped"], ["--machine=random", "--looped"]])
def test_compile_run_certify(folder, capsys, options):
    target, program = folder / "target.safetensors", folder / "program.safetensors"
    status, out, _ = call(capsys, "compile", target, "-o", program, *options)
    assert status == 0
    assert "width=36" in out
    X = torch.tensor([[0, 2, 1, 1], [2, 2, 0, 1]])
    np.save(folder / "in.npy", X.numpy())
    assert call(capsys, "run", program, folder / "in.npy", "-o", folder / "out.npy")[0] == 0
    want = ff.load_target(target)(X, "causal")
    assert np.allclose(np.load(folder / "out.npy"), want.numpy(), rtol=0, atol=1e-10)
    for engine in ("dense", "path"):
        call(capsys, "run", program, folder / "in.npy", "-o", folder / "out2.npy", "--engine", engine, "--mask", "none")
        want = ff.load_target(target)(X)
        assert np.allclose(np.load(folder / "out2.npy"), want.numpy(), rtol=0, atol=1e-10)
    status, out, _ = call(capsys, "certify", program, target, "--json", folder / "c.json")
    assert status == 0
    assert "holds  every column of E R_all = W_all" in out
    assert json.loads((folder / "c.json").read_text())["holds"] is True
    assert call(capsys, "certify", program, target, "--input", folder / "in.npy")[0] == 0
    status, out, _ = call(capsys, "info", program)
    assert status == 0
    assert "program" in out
    assert "F64 3 x 36" in out
    status, out, _ = call(capsys, "info", target, "--json")
    assert json.loads(out)["spec"]["heads"] == 2


def test_certify_says_no(folder, capsys):
    target, program = folder / "target.safetensors", folder / "program.safetensors"
    call(capsys, "compile", target, "-o", program)
    ff.save_target(ff.Target.random(SPEC, seed=2), folder / "other.safetensors")
    status, out, _ = call(capsys, "certify", program, folder / "other.safetensors")
    assert status == 1
    assert "DOES NOT HOLD" in out
    assert "FAILS" in out


def test_port(folder, capsys):
    """A program moves to a random machine, which then holds against the same target."""
    target, program, other = (folder / f"{name}.safetensors" for name in ("target", "program", "other"))
    call(capsys, "compile", target, "-o", program)
    status, out, err = call(capsys, "port", program, "-o", other, "--seed", 5)
    assert status == 0
    assert "RandomMachine" in out
    assert "porting from SparseMachine" in err
    assert ff.load_program(other).machine["seed"] == 5
    assert call(capsys, "certify", other, target)[0] == 0


def test_text_in_text_out(folder, capsys):
    """Lines of several lengths, blank lines skipped, answers in the order of the lines."""
    program = folder / "program.safetensors"
    call(capsys, "compile", folder / "target.safetensors", "-o", program)
    (folder / "in.txt").write_text("ab\ncab\n\nb a\n")
    assert call(capsys, "run", program, folder / "in.txt", "-o", folder / "out.txt")[0] == 0
    lines = (folder / "out.txt").read_text().splitlines()
    target = ff.load_target(folder / "target.safetensors")
    for text, got in zip(("ab", "cab", "ba"), lines, strict=True):
        ids = torch.tensor(["abc".index(c) for c in text])
        assert got == "".join("abc"[i] for i in target(ids, "causal").argmax(-1))
    assert call(capsys, "run", program, folder / "in.txt", "-o", folder / "out.safetensors")[0] == 0
    outputs = load_file(folder / "out.safetensors")
    assert {name: tuple(t.shape) for name, t in outputs.items()} == {"lines 1 4": (2, 2, 3), "lines 2": (1, 3, 3)}
    assert "do not make one array" in refused(capsys, "run", program, folder / "in.txt", "-o", folder / "out.npy")


def test_text_keeps_what_is_there(folder, capsys):
    """Spaces that are tokens; two tensors never share a text; a tensor's name is no line number."""
    target, program = folder / "target.safetensors", folder / "program.safetensors"
    named = ff.load_target(target).weights.named()
    ff.save_target(ff.Target(SPEC, **named, card=ff.Card(("a", " ", "b"), "causal", "")), folder / "spaced.safetensors")
    call(capsys, "compile", folder / "spaced.safetensors", "-o", program)
    (folder / "in.txt").write_text("a b\n")
    call(capsys, "run", program, folder / "in.txt", "-o", folder / "out.safetensors")
    assert load_file(folder / "out.safetensors")["lines 1"].shape == (1, 3, 3)
    save_file({"train 7": torch.tensor([[0, 1], [2, 2]])}, folder / "one.safetensors")
    assert call(capsys, "run", program, folder / "one.safetensors", "-o", folder / "out.txt")[0] == 0
    assert len((folder / "out.txt").read_text().splitlines()) == 2
    save_file({"train ids": torch.tensor([0, 1]), "b": torch.tensor([2])}, folder / "two.safetensors")
    err = refused(capsys, "run", program, folder / "two.safetensors", "-o", folder / "out.txt")
    assert "holds 2 tensors" in err
    assert "no folder" in refused(capsys, "run", program, folder / "in.txt", "-o", folder / "no" / "out.txt")


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64", ">i8", ">i4"])
def test_ids_of_any_integer_type(folder, capsys, dtype):
    target, program = folder / "target.safetensors", folder / "program.safetensors"
    call(capsys, "compile", target, "-o", program)
    np.save(folder / "in.npy", np.array([[0, 2, 1]], dtype))
    assert call(capsys, "run", program, folder / "in.npy", "-o", folder / "out.npy")[0] == 0
    want = ff.load_target(target)(torch.tensor([[0, 2, 1]]), "causal")
    assert np.allclose(np.load(folder / "out.npy"), want.numpy(), rtol=0, atol=1e-10)
    assert torch.equal(ff.load_target(target)(np.array([[0, 2, 1]], dtype), "causal"), want)


def test_numbers_and_flags_that_mean_nothing_are_refused(folder, capsys):
    target, program = folder / "target.safetensors", folder / "program.safetensors"
    for arguments, said in (
        (("compile", target, "-o", program, "--seed", "7"), "--seed: for random machines only"),
        (("compile", target, "-o", program, "--machine", "random", "--neurons-per-target", "2"), "targets with MLPs"),
        (("compile", target, "-o", program, "--machine", "random", "--seed", "-1"), "Must be >= 0"),
        (("demo", "--strings", "0"), "Must be >= 1"),
        (("bounds", "--layers", "0"), "Must be >= 1"),
    ):
        assert said in refused(capsys, *arguments)


def test_named_tensors(folder, capsys):
    program = folder / "program.safetensors"
    call(capsys, "compile", folder / "target.safetensors", "-o", program)
    rows = torch.randn(2, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    save_file({"one": rows, "two": torch.tensor([0, 1])}, folder / "in.safetensors")
    call(capsys, "run", program, folder / "in.safetensors", "-o", folder / "out.safetensors")
    outputs = load_file(folder / "out.safetensors")
    assert {name: tuple(t.shape) for name, t in outputs.items()} == {"one": (2, 5, 3), "two": (2, 3)}


def test_bad_usage_is_one_line(folder, capsys):
    target, program = folder / "target.safetensors", folder / "program.safetensors"
    call(capsys, "compile", target, "-o", program)
    assert "--help" in refused(capsys, "compile", target)
    assert "--help" in refused(capsys, "compile", target, "-o", program, "--machine", "quantum")
    assert "no such file" in refused(capsys, "compile", folder / "none", "-o", program)
    assert "holds a program, a target was needed" in refused(capsys, "compile", program, "-o", folder / "x")
    assert "is the folder there and writable" in refused(capsys, "compile", target, "-o", folder / "no" / "x")
    assert "needs width 36, got 10" in refused(capsys, "compile", target, "-o", program, "--width", 10)
    assert "needs width 36, got 10" in refused(
        capsys, "compile", target, "-o", program, "--width", 10, "--machine", "random"
    )
    (folder / "bad.txt").write_text("abz\n")
    assert "line 1: 'z' is not in the vocabulary (a b c)" in refused(
        capsys, "run", program, folder / "bad.txt", "-o", folder / "o.txt"
    )
    (folder / "bad.npy").write_bytes(b"nothing")
    assert "cannot be read as .npy" in refused(capsys, "run", program, folder / "bad.npy", "-o", folder / "o.npy")
    err = refused(capsys, "run", program, target.parent, "-o", folder / "o.npy")
    assert "is a .npy, .safetensors or .txt file" in err
    with pytest.raises(ff.StorageError, match="no such file"):
        main(["info", str(folder / "none"), "--debug"])


def test_a_random_program_needs_its_own_machine(folder, capsys):
    """The header names the machine by seed; a lie about the seed is seen by the fingerprint."""
    target, program = folder / "target.safetensors", folder / "program.safetensors"
    call(capsys, "compile", target, "-o", program, "--machine", "random", "--seed", 3)
    loaded = ff.load_program(program)
    loaded.machine["seed"] = 4
    ff.save_program(loaded, program)
    (folder / "in.txt").write_text("ab\n")
    assert "the program was compiled for machine" in refused(
        capsys, "run", program, folder / "in.txt", "-o", folder / "o.txt"
    )


def test_demo_is_the_main_job(tmp_path, capsys):
    """All strings answered alike by all three, and what it writes can be used."""
    status, out, err = call(capsys, "demo", "--strings", 200, "--out", tmp_path / "d", "--seed", 1)
    assert status == 0
    assert out.count("200 of 200") == 2
    assert out.count("holds  every column of E R_all = W_all") == 2
    assert "compiling the target onto the sparse machine" in err
    names = {"attention.png", "random.certificate.json", "random.safetensors", "sparse.certificate.json",
             "sparse.safetensors"}  # fmt: skip
    assert {path.name for path in (tmp_path / "d").iterdir()} == names
    assert (tmp_path / "d" / "attention.png").read_bytes().startswith(b"\x89PNG")
    ff.save_target(shipped_target(), tmp_path / "dyck.safetensors")
    assert call(capsys, "certify", tmp_path / "d" / "random.safetensors", tmp_path / "dyck.safetensors")[0] == 0
    (tmp_path / "in.txt").write_text("(())?\n(()?\n())(?\n")
    call(capsys, "run", tmp_path / "d" / "sparse.safetensors", tmp_path / "in.txt", "-o", tmp_path / "out.txt")
    assert [line[-1] for line in (tmp_path / "out.txt").read_text().splitlines()] == [")", "(", "("]
