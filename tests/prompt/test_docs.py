"""The Python in docs/prompt.md runs as it stands, and says what it says."""

import re
from pathlib import Path

import torch

TEXT = (Path(__file__).parents[2] / "docs" / "prompt.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)


def test_every_block_runs() -> None:
    assert len(BLOCKS) == 3
    for block in BLOCKS:
        exec(block, {})


def test_values_beside_the_calls() -> None:
    """`expression  # value` lines: the value is what the expression gives."""
    checked = 0
    for block in BLOCKS:
        names: dict = {}
        exec(block, names)
        for line in block.splitlines():
            code, _, comment = line.partition("#")
            expected = re.match(r"\s*(\[.*\])(:|$)", comment)
            if expected:
                value = eval(code, names)
                value = value.tolist() if isinstance(value, torch.Tensor) else value
                assert str(value) == expected.group(1), line
                checked += 1
    assert checked == 3
