"""What docs/schedule.md shows is run."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "schedule.md"
BLOCKS = re.findall(r"```python\n(.*?)```(?:\n\n    (.*?)\n\n)?", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("place", range(len(BLOCKS)))
def test_schedule_examples_run_and_print_what_they_show(place: int, capsys: pytest.CaptureFixture[str]) -> None:
    code, shown = BLOCKS[place]
    exec(compile(code, f"{PAGE.name}, block {place}", "exec"), {})
    assert capsys.readouterr().out.strip() == shown.strip()


def test_schedule_examples_were_found() -> None:
    assert len(BLOCKS) == 2
