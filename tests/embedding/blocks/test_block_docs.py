"""The Python in docs/blocks.md runs as it stands, and `expression  # [values]` lines give those values."""

import re
from pathlib import Path

BLOCKS = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[3] / "docs" / "blocks.md").read_text(), re.DOTALL)


def test_every_block_runs_and_gives_what_it_says() -> None:
    assert len(BLOCKS) == 5
    names: dict = {}
    checked = 0
    for block in BLOCKS:
        exec(block, names)
        for line in block.splitlines():
            expected = re.match(r"(\[.*\])  # (\[[^\]]*\])", line)
            if expected:
                assert str(eval(expected.group(1), names)) == expected.group(2), line
                checked += 1
    assert checked == 3
