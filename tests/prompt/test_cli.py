"""`fixedformer simulate` as a person calls it: files in, files and a certificate out, exit status 0, 1 or 2."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from fixedformer.cli import main
from fixedformer.prompt import certify

from .conftest import gaussian, relative


def files(folder: Path, d: int = 4, heads: int = 2, shape: tuple[int, ...] = (5,)) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(d, heads, batch_first=True, dtype=torch.float64)
    nn.init.normal_(module.in_proj_bias)
    nn.init.normal_(module.out_proj.bias)
    save_file(module.state_dict(), folder / "layer.safetensors")
    X = gaussian(*shape, d)
    np.save(folder / "x.npy", X.numpy())
    return module, X


def call(folder: Path, *more: str, out: str = "y.npy") -> int:
    return main(["simulate", str(folder / "layer.safetensors"), str(folder / "x.npy"), "-o", str(folder / out), *more])


@pytest.mark.parametrize("backend", ["hard", "soft"])
def test_simulates_and_certifies(tmp_path: Path, capsys: pytest.CaptureFixture[str], backend: str) -> None:
    module, X = files(tmp_path, shape=(2, 5))
    status = call(tmp_path, "--heads", "2", "--backend", backend, "--json", str(tmp_path / "c.json"))
    shown = capsys.readouterr().out
    assert status == 0, shown
    truth = module(X, X, X, need_weights=False)[0].detach()
    result = torch.from_numpy(np.load(tmp_path / "y.npy"))
    assert result.shape == truth.shape
    assert relative(result, truth) <= 1e-13
    assert "holds  output, relative error" in shown
    assert "fingerprint" in shown
    certificate = json.loads((tmp_path / "c.json").read_text())
    assert certificate["holds"]
    assert certificate["context"]["inputs"] == 2


def test_causal_single_sequence_safetensors(tmp_path: Path) -> None:
    module, X = files(tmp_path)
    assert call(tmp_path, "--heads", "2", "--mask", "causal", out="y.safetensors") == 0
    truth = module(X[None], X[None], X[None], attn_mask=torch.ones(5, 5).triu(1).bool(), need_weights=False)[0][0]
    assert relative(load_file(tmp_path / "y.safetensors")["output"], truth.detach()) <= 1e-13


def test_scale_and_notes_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module, X = files(tmp_path)
    assert call(tmp_path, "--heads", "2") == 0
    assert "scores       times 0.707107 (1/sqrt(head width))" in capsys.readouterr().out
    assert call(tmp_path, "--heads", "2", "--scale", "1") == 0
    assert "scores       times 1 (--scale)" in capsys.readouterr().out
    unscaled = torch.from_numpy(np.load(tmp_path / "y.npy"))
    with torch.no_grad():  # the definition, with queries sqrt(2) as large: that undoes the module's 1/sqrt(2)
        module.in_proj_weight[:4] *= 2**0.5
        module.in_proj_bias[:4] *= 2**0.5
        truth = module(X[None], X[None], X[None], need_weights=False)[0][0]
    assert relative(unscaled, truth) <= 1e-13
    state = {f"attention.attention.{name}.weight": gaussian(4, 4) for name in ("query", "key", "value")}
    save_file(state, tmp_path / "layer.safetensors")
    assert call(tmp_path, "--heads", "2") == 0
    shown = capsys.readouterr()
    assert "note: no output projection found: heads are concatenated" in shown.err
    assert "no output projection: heads are concatenated" in shown.out


def test_a_certificate_that_fails_gives_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files(tmp_path)
    monkeypatch.setattr(certify, "relative_bounds", lambda *_: (1e-30, 1e-30))
    assert call(tmp_path, "--heads", "2") == 1
    assert "DOES NOT HOLD" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--heads", "3"], "3 heads cannot share"),
        (["--heads", "2", "--scale", "0"], "scale must be a positive number"),
        (["--heads", "2", "--layer", "q"], "no attention layer under 'q'"),
        (["--heads", "2", "--backend", "gpu"], "gpu"),
        ([], "heads"),
    ],
)
def test_bad_usage_gives_status_2_and_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    files(tmp_path)
    assert call(tmp_path, *more) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.count("\n") == 1
    assert not (tmp_path / "y.npy").exists()


def test_bad_files_give_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files(tmp_path)
    good = (tmp_path / "layer.safetensors").read_bytes()

    def refused(message: str) -> None:
        assert call(tmp_path, "--heads", "2") == 2
        assert message in capsys.readouterr().err

    (tmp_path / "layer.safetensors").write_bytes(good[:-7])
    refused("not a whole safetensors file")
    (tmp_path / "layer.safetensors").write_bytes(good)
    np.save(tmp_path / "x.npy", np.zeros((5, 3)))
    refused("takes inputs (..., n, 4), got (1, 5, 3)")
    np.save(tmp_path / "x.npy", np.zeros((0, 4)))
    refused("needed X (n, 4)")
    np.save(tmp_path / "x.npy", np.full((5, 4), np.nan))
    refused("X holds 20 NaN")
    np.save(tmp_path / "x.npy", np.array([{}], dtype=object), allow_pickle=True)
    refused("cannot be read as .npy")
    assert call(tmp_path, "--heads", "2", out="y.txt") == 2
    assert "an output is a .npy or .safetensors file" in capsys.readouterr().err


@pytest.mark.slow
def test_a_layer_of_sixteen_channels_and_four_heads(tmp_path: Path) -> None:
    module, X = files(tmp_path, d=16, heads=4, shape=(32,))
    assert call(tmp_path, "--heads", "4") == 0
    truth = module(X[None], X[None], X[None], need_weights=False)[0][0].detach()
    assert relative(torch.from_numpy(np.load(tmp_path / "y.npy")), truth) <= 1e-13
