"""The rules of the architecture, read off the source: imports point inward, and start-up stays light."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import docstring_parser
import pytest

import fixedformer
from fixedformer.cli import app

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


def leaves(app):
    """Every command with a function, by name."""
    for name in app:
        if name.startswith("-"):
            continue
        inner = app[name]
        if inner.default_command is not None:
            yield name, inner.default_command
        else:
            yield from leaves(inner)


def test_every_flag_has_a_line_of_help():
    """Parsed as the command line parses it: a docstring in another style would silently show nothing."""
    seen = dict(leaves(app))
    assert {"demo", "compile", "run", "train", "reproduce", "simulate", "decompile", "approximate"} <= set(seen)
    for name, function in seen.items():
        described = {p.arg_name for p in docstring_parser.parse(function.__doc__).params if p.description}
        assert described == set(inspect.signature(function).parameters), name


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
