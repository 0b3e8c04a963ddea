"""`fixedformer interpolate` and `info` on files, end to end."""

import json

import numpy as np
import pytest
import torch

import fixedformer as ff
from fixedformer.cli import interpolate, interpolate_pictures, main
from fixedformer.schedule.relax import Record


@pytest.fixture(autouse=True)
def few_frames(monkeypatch):
    monkeypatch.setattr(interpolate_pictures, "FRAMES", 4)


@pytest.fixture
def files(tmp_path):
    generator = np.random.default_rng(3)
    for name in ("x", "y"):
        np.save(tmp_path / f"{name}.npy", generator.standard_normal((1, 2, 2)))
    return tmp_path


def call(files, *more):
    return main(["interpolate", str(files / "x.npy"), str(files / "y.npy"), "-o", str(files / "s.safetensors"), *more])


def test_interpolates_with_pictures(files, capsys):
    names = {"--picture": "p.png", "--animation": "a.gif", "--json": "c.json"}
    options = [part for flag, name in names.items() for part in (flag, str(files / name))]
    assert call(files, "--rigorous", *options) == 0
    out = capsys.readouterr().out
    assert "status       solved" in out
    assert "X is carried to Y, enclosed" in out
    assert (files / "p.png").read_bytes().startswith(b"\x89PNG")
    assert (files / "a.gif").read_bytes().startswith(b"GIF89a")
    assert json.loads((files / "c.json").read_text())["holds"]
    blocks, schedule = ff.load_schedule(files / "s.safetensors")
    gap = blocks.run(schedule, np.load(files / "x.npy")).numpy() - np.load(files / "y.npy")
    assert np.abs(gap).max() < 1e-8
    assert not (files / "s.safetensors.search").exists()
    assert main(["info", str(files / "s.safetensors")]) == 0
    assert "schedule" in capsys.readouterr().out


def test_unfinished_searches_are_kept_and_resumed(files, capsys):
    assert call(files, "--max-seconds", "0") == 1
    kept = str(files / "s.safetensors.search")
    assert f"--resume {kept}" in capsys.readouterr().err
    assert main(["info", kept]) == 0
    assert "schedule-search" in capsys.readouterr().out
    assert call(files, "--resume", kept) == 0


@pytest.mark.parametrize(
    ("phase", "said"),
    [("relax", "relax 2: residual 0.5, amplification 7"), ("unfold", "try 3: 4 left"), ("lead", "first tokens alone")],
)
def test_progress_is_in_words(phase, said, capsys, monkeypatch):
    monkeypatch.setattr(interpolate, "QUIET_SECONDS", 0.0)
    interpolate.Progress()(Record(phase, 0, 2, 4.0 if phase == "unfold" else 0.5, 1.0, 7.0, 1.0))
    assert said in capsys.readouterr().err


def test_what_cannot_end_well_is_refused_before_the_search(files, capsys):
    """A folder that is not there, a proof that is for residual steps only."""
    assert main(["interpolate", str(files / "x.npy"), str(files / "y.npy"), "-o", str(files / "no" / "s.ff")]) == 2
    assert "no folder" in capsys.readouterr().err
    assert call(files, "--mode", "continuous", "--rigorous") == 2
    assert "--mode finite" in capsys.readouterr().err
    assert not list(files.glob("s.*"))


def test_refusals_are_one_line(files, capsys):
    np.save(files / "y.npy", np.zeros((1, 2, 2)))
    assert call(files) == 2
    assert "equal tokens stay equal" in capsys.readouterr().err
    np.save(files / "y.npy", np.zeros((1, 3, 2)))
    assert call(files) == 2
    assert "X and Y must both be" in capsys.readouterr().err
    assert main(["interpolate", "x.txt", "y.txt", "-o", "s"]) == 2
    assert "sequences are a .npy or .safetensors file" in capsys.readouterr().err


@pytest.mark.parametrize("d", [1, 2, 4])
def test_pictures_in_any_dimension(d):
    animation, trajectory_picture = interpolate_pictures.animation, interpolate_pictures.trajectory_picture
    blocks = ff.FrozenBlocks(d)
    generator = torch.Generator().manual_seed(0)
    X, Y = (torch.randn(2, 3, d, generator=generator, dtype=torch.float64) for _ in range(2))
    durations = np.random.default_rng(0).uniform(-0.1, 0.1, 20)
    schedule = ff.Schedule(
        np.arange(20, dtype=np.uint8) % 2, durations, 0 * durations, 4, "finite", blocks.fingerprint()
    )
    states = blocks.trajectory(schedule, X).numpy()
    flat, ends, names = interpolate_pictures.plane(states, np.stack([X.numpy(), Y.numpy()]))
    assert flat.shape == (*states.shape[:-1], 2)
    assert ends.shape == (2, 2, 3, 2)
    assert len(names) == 2
    assert trajectory_picture(blocks, schedule, X, Y).startswith(b"\x89PNG")
    assert animation(blocks, schedule, X, Y).startswith(b"GIF89a")
