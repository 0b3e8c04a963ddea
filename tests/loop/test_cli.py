"""The command `loop approximate`, and the language of its expressions."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fixedformer.cli import main
from fixedformer.errors import SpecError
from fixedformer.loop.examples import wave
from fixedformer.loop.expression import Expression
from fixedformer.loop.files import load_loop_program

WAVE = "m = mean(tanh(2*x)); 0.5*sin(3*x) + 0.5*m*x + 0.25*cos(4*m)"


@pytest.mark.parametrize("d", [1, 2])
def test_expressions_mean_what_they_say(d: int) -> None:
    X = np.random.default_rng(0).random((3, d))
    for text, truth in {
        WAVE: wave(X),
        "x": X,
        "2": np.full_like(X, 2),
        "-x**2/4": -(X**2) / 4,
        "total(1) * x": 3 * X,
        "total(mean(x))": np.broadcast_to(3 * X.mean(0), X.shape),
        "largest(x) - smallest(x)": np.broadcast_to(X.max(0) - X.min(0), X.shape),
        "maximum(x, 0.5) + minimum(x, pi)": np.maximum(X, 0.5) + X,
        "x1": np.broadcast_to(X[:, :1], X.shape),
        "sigmoid(x) + relu(x - 0.5)": 1 / (1 + np.exp(-X)) + np.maximum(X - 0.5, 0),
    }.items():
        np.testing.assert_allclose(Expression(text, d)(X), truth, rtol=1e-15, atol=1e-15)


def test_expressions_permute() -> None:
    random = np.random.default_rng(1)
    X, order = random.random((4, 2)), [2, 0, 3, 1]
    np.testing.assert_allclose(Expression(WAVE, 2)(X[order]), Expression(WAVE, 2)(X)[order], rtol=1e-14)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("__import__('os').system('true')", "calls no known function"),
        ("x.T", r"'x.T' is not part of the expression language"),
        ("x[0]", r"'x\[0\]' is not part of the expression language"),
        ("(lambda: x)()", "calls no known function"),
        ("[x for x in (1,)]", "not part of the expression language"),
        ("y", "unknown name 'y'; known here are e, pi, x, x1 and the functions abs"),
        ("x2", "unknown name 'x2'"),
        ("'a'", "''a'' is no number"),
        ("True", "'True' is no number"),
        ("1j", "'1j' is no number"),
        ("9" * 400, "too large for float64"),
        ("sin(x, x)", "sin takes 1 value"),
        ("sin(a=x)", "sin takes 1 value"),
        ("maximum(x)", "maximum takes 2 value"),
        ("x +", "cannot be parsed"),
        ("", "must end with a value"),
        ("a = x", "must end with a value"),
        ("sin = x; x", "only 'name = value;' may come before"),
        ("x = 1; x", "only 'name = value;' may come before"),
        ("import os; x", "only 'name = value;' may come before"),
        ("m = n; n = x; m", "unknown name 'n'"),
        ("x < 1", "not part of the expression language"),
        ("x @ x", "not part of the expression language"),
        ("+" * 3000 + "x", "may have 2000 characters, got 3001"),
        ("(" * 900 + "x" + ")" * 900, "cannot be parsed"),
    ],
)
def test_what_is_no_expression_is_refused(text: str, match: str) -> None:
    with pytest.raises(SpecError, match=match):
        Expression(text, 1)


def messages(err: str) -> list[str]:
    """Lines on stderr that are no progress, which depends on the time of day."""
    return [line for line in err.strip().splitlines() if not line.startswith("..")]


def run(tmp_path: Path, *arguments: str) -> int:
    return main(["loop", "approximate", *arguments, "--out", str(tmp_path / "out")])


def test_the_command_writes_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, WAVE, "--d", "1", "--tokens", "2", "--resolution", "4", "--samples", "100") == 0
    shown = capsys.readouterr()
    assert "Error against loops" in shown.out
    assert "Slope of log error over log loops: -0." in shown.out
    assert "table entry k loaded" in shown.out
    assert "holds  L2 error" in shown.out
    assert shown.err.splitlines()[-1].startswith("wrote approximation.png")
    out = tmp_path / "out"
    assert sorted(path.name for path in out.iterdir()) == [
        "approximation.png", "certificate.json", "program.safetensors", "trace.png",
    ]  # fmt: skip
    for picture in ("approximation.png", "trace.png"):
        assert (out / picture).read_bytes().startswith(b"\x89PNG")
    assert json.loads((out / "certificate.json").read_text())["holds"]
    machine, _ = load_loop_program(out / "program.safetensors")
    assert machine.grid.resolution == 4


@pytest.mark.parametrize(
    "options",
    [
        ["--tokens", "1", "--resolution", "3"],
        ["--tokens", "3", "--resolution", "4", "--variant", "timestep", "--form", "paper"],
        pytest.param(
            ["--d", "2", "--tokens", "1", "--resolution", "3", "--variant", "timestep"], marks=pytest.mark.slow
        ),
        pytest.param(
            ["--tokens", "2", "--resolution", "3", "--variant", "timestep", "--attention", "soft"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_json_is_what_a_machine_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]) -> None:
    assert run(tmp_path, "x*mean(x)", "--samples", "20", "--json", *options) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["certificate"]["holds"]
    assert body["rates"][-1]["error"] <= body["rates"][-1]["bound"]


def test_functions_of_modules_and_declared_constants(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "fixedformer.loop.examples:wave", "--resolution", "2", "--samples", "20") == 0
    assert "sampled moduli" not in capsys.readouterr().out
    assert run(tmp_path, "x", "--resolution", "2", "--samples", "20", "--lipschitz", "1", "1", "0") == 0
    assert "declared Lipschitz constants" in capsys.readouterr().out


def test_a_bound_that_is_broken_gives_status_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Constants declared a hundred times too small: the certificate must not hold."""
    assert run(tmp_path, "x", "--resolution", "2", "--samples", "20", "--lipschitz", "0.01", "0.01", "0") == 1
    assert "FAILS" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["y"], "SpecError: unknown name 'y'"),
        (["nowhere.at.all:f"], "SpecError: cannot import 'nowhere.at.all'"),
        (["fixedformer.loop.examples:nothing"], "SpecError: module 'fixedformer.loop.examples' has no 'nothing'"),
        (["fixedformer.loop.grid:CellError"], "has no 'CellError'"),
        (["fixedformer.loop.expression:LONGEST"], "is a int, a function is needed"),
        (["x", "--tokens", "0"], "SpecError: tokens must be an integer >= 1, got 0"),
        (["x", "--tokens", "3", "--resolution", "2"], "CapacityError: 3 tokens need as many distinct cells"),
        (["x", "--arithmetic", "float64", "--resolution", "4"], "CapacityError: float64 holds a binary fraction"),
        (["log(x)"], "SpecError: the function is NaN or infinite at X ="),
        (["x", "--samples", "0"], 'Invalid value "0" for --samples. Must be >= 1'),
        (["x", "--variant", "words"], "words"),
        ([], "function"),
    ],
)
def test_bad_usage_is_one_line_and_status_two(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run(tmp_path, *arguments) == 2
    shown = capsys.readouterr()
    assert message.lower() in shown.err.lower()
    assert len(messages(shown.err)) == 1
    assert not shown.out


def test_a_folder_that_cannot_be_made_gives_status_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").write_text("a file")
    assert run(tmp_path, "x", "--resolution", "2", "--samples", "10") == 2
    assert len(messages(capsys.readouterr().err)) == 1


def test_help_does_not_load_torch() -> None:
    """`fixedformer --help` names the command without importing it."""
    code = (
        "import sys; from fixedformer.cli import main; main(['--help']); "
        "sys.exit('torch' in sys.modules or 'fixedformer.loop' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "loop" in done.stdout
