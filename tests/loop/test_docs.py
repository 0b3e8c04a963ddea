"""What docs/loop.md and docs/loops.md show is run."""

import re
from pathlib import Path

import pytest

PAGES = [Path(__file__).parents[2] / "docs" / name for name in ("loop.md", "loops.md")]
PATTERN = r"```python\n(.*?)```(?:\n\n    (.*?)\n\n)?"
BLOCKS = [
    (page.name, *found) for page in PAGES for found in re.findall(PATTERN, page.read_text("utf-8"), flags=re.DOTALL)
]


@pytest.mark.parametrize("place", range(len(BLOCKS)))
def test_examples_run_and_print_what_they_show(place: int, capsys: pytest.CaptureFixture[str]) -> None:
    page, code, shown = BLOCKS[place]
    exec(compile(code, f"{page}, block {place}", "exec"), {})
    assert capsys.readouterr().out.strip() == shown.strip()


def test_examples_were_found() -> None:
    assert [page for page, _, _ in BLOCKS] == ["loop.md", "loop.md", "loops.md"]
