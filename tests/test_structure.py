"""The rules of the architecture, read off the source: imports point inward, and start-up stays light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fixedformer

ROOT = Path(fixedformer.__file__).parent
FAMILIES = {"embedding", "prompt", "loop", "schedule"}
OUTER = {"cli", "plots", "report"}
INNER = {"errors", "attention", "certificate", "inputs", "capacity", "storage", "target"}


def imported(path):
    """Top-level rooms of ours that a file imports, lazily or not."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("fixedformer."):
            rooms.add(node.module.split(".")[1])
        elif isinstance(node, ast.ImportFrom) and node.module == "fixedformer":
            rooms |= {alias.name for alias in node.names if (ROOT / alias.name).exists() or
                      (ROOT / f"{alias.name}.py").exists()}  # fmt: skip
    return rooms


def room(path):
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


FILES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_inward(path):
    here, rooms = room(path), imported(path)
    if here in FAMILIES:
        assert not rooms & (FAMILIES - {here}), "families never import each other"
    if here not in OUTER:
        assert not rooms & OUTER, "nothing imports cli, plots or report"
    if here in INNER:
        assert rooms <= INNER, "the inner rooms import only each other"
    if here == "tasks":
        assert rooms <= {"tasks", "errors"}


def test_modules_are_found():
    assert {"embedding", "tasks", "cli", "experiments"} <= {room(path) for path in FILES}
    assert "embedding" in imported(ROOT / "experiments" / "demo.py"), "the reader of imports sees them"


def test_every_public_name_exists():
    assert set(fixedformer.__all__) == set(fixedformer._HOME)
    for name in fixedformer.__all__:
        assert getattr(fixedformer, name).__doc__
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = fixedformer.nonsense


def test_help_does_not_import_torch():
    code = (
        "import sys; from fixedformer.cli import main; status = main(['--help'])\n"
        "heavy = {'torch', 'matplotlib', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in ("demo", "compile", "run", "certify", "info"):
        assert f" {name} " in done.stdout
