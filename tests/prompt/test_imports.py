"""Who may import whom: judges share no code with what they judge, and the family stands alone."""

import ast
from pathlib import Path

import pytest

import fixedformer.prompt

ROOT = Path(fixedformer.prompt.__file__).parent


def imports(path: Path) -> set[str]:
    """Modules of this package that a file imports anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.split(".")[0] == "fixedformer"}


def test_the_oracle_imports_nothing_of_ours() -> None:
    assert imports(ROOT / "oracle.py") == set()
    assert "torch" not in (ROOT / "oracle.py").read_text()


def test_the_interpreter_knows_the_language_only() -> None:
    language = "fixedformer.prompt.language"
    assert imports(ROOT / "language" / "interpreter.py") == {f"{language}.expressions", f"{language}.program"}
    assert imports(ROOT / "language" / "expressions.py") == {"fixedformer.errors"}
    assert "torch" not in (ROOT / "language" / "interpreter.py").read_text()


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: path.stem)
def test_no_other_family_no_command_line_no_plots(path: Path) -> None:
    inner = ("attention", "capacity", "certificate", "errors", "inputs", "prompt", "storage")
    assert {name.split(".")[1] for name in imports(path)} <= set(inner)
    assert "import matplotlib" not in path.read_text().split("def ")[0]  # drawings import it when they draw
