"""info: what a file of ours holds, from its header alone."""

import json as jsonlib
from pathlib import Path
from typing import Any

from fixedformer.capacity import readable
from fixedformer.storage import read_header

LONGEST = 300
"""Characters of a line; what is longer is shown an entry a line, and lists in it by their length (--json has all)."""


def info(file: Path, *, json: bool = False) -> int:
    """Say what FILE holds: kind, spec, widths, bytes, fingerprints. Reads the header only.

    Args:
        file: any file that fixedformer wrote.
        json: print the header as JSON.
    """
    header = read_header(file)
    size = file.stat().st_size
    if json:
        tensors = {name: {"shape": shape, "dtype": header.dtypes[name]} for name, shape in header.shapes.items()}
        print(jsonlib.dumps({"kind": header.kind, "bytes": size, "tensors": tensors} | header.body, indent=2))
        return 0
    print(f"{file}: {header.kind}, {readable(size)}, digest {header.digest[:16]}")
    for name, value in header.body.items():
        print(f"  {name:<20} {_text(value)}")
    for name, shape in header.shapes.items():
        print(f"  {name:<20} {header.dtypes[name]} {' x '.join(map(str, shape))}")
    return 0


def _text(value: Any) -> Any:
    """A header's entry: mappings as k=v in one line, or a line each where that line would be long."""
    if not isinstance(value, dict):
        return value
    text = ", ".join(f"{k}={v}" for k, v in value.items())
    if len(text) <= LONGEST:
        return text
    lines = (
        f"\n    {k:<24} {f'{len(v)} of them' if isinstance(v, list) and v else _text(v)}" for k, v in value.items()
    )
    return "".join(lines)
