"""reproduce: the paper's tables and figure, row by row."""

import sys
from pathlib import Path
from typing import Annotated

import torch
from cyclopts import Parameter

from fixedformer.cli.train import device_named, follow
from fixedformer.errors import SpecError
from fixedformer.experiments import reproduce as work
from fixedformer.experiments.tables import Item, Row, Scale
from fixedformer.experiments.tables import rows as rows_of
from fixedformer.plots import bars
from fixedformer.storage import write_atomic


def reproduce(
    item: Item,
    *,
    out: Annotated[Path, Parameter(name=["--out", "-o"])],
    scale: Scale = "small",
    rows: Annotated[list[str] | None, Parameter(consume_multiple=True)] = None,
    estimate: bool = False,
    list_: Annotated[bool, Parameter(name="--list")] = False,
    device: str = "auto",
    threads: int | None = None,
) -> int:
    """Reproduce table1, table2 or figure2 of "Fixed Universal Transformers" into a folder that can be gone on with.

    Args:
        item: table1, table2 or figure2.
        out: the folder; runs/, table.csv, table.md and, for figure2, figure.png.
        scale: small (two CPU cores) or paper (appendix H as it stands; for a GPU).
        rows: only rows whose name begins with one of these, e.g. dyck/sparse.
        estimate: only say how long each row would take here, and how much memory.
        list_: only list the rows' names.
        device: auto, cpu or cuda.
        threads: CPU threads.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    chosen: list[Row] = [row for row in rows_of(item, scale) if not rows or row.name.startswith(tuple(rows))]
    if not chosen:
        raise SpecError(f"no row of {item} begins with {', '.join(rows or [])}; --list shows their names")
    if list_:
        print("\n".join(row.name for row in chosen))
        return 0
    place = device_named(device)
    if estimate:
        for row in chosen:
            print(work.estimate(row, place), flush=True)
        return 0
    for row, run in work.runs(chosen, out, place):
        if not run.done:
            print(f".. {work.estimate(row, place)}", file=sys.stderr)
        follow(run, f"{row.name}, seed {run.recipe.seed}")
        work.compile_run(run)
        _write(item, scale, out)
    print((out / "table.md").read_text())
    return 0


def _write(item: Item, scale: Scale, out: Path) -> None:
    """Tables and figure of everything that is finished so far, chosen now or not."""
    table = work.collect(rows_of(item, scale), out)
    work.write_tables(table, out, f"{item}, scale {scale}")
    if item == "figure2":
        write_atomic(out / "figure.png", bars(table))
