"""reproduce: the paper's tables and figure, row by row."""

import sys
from datetime import date
from pathlib import Path
from typing import Annotated, cast

import torch
from cyclopts import Parameter

from fixedformer.cli.options import Count
from fixedformer.cli.train import device_named, follow
from fixedformer.errors import CapacityError, SpecError, StorageError
from fixedformer.experiments import reproduce as work
from fixedformer.experiments import tmlt_table
from fixedformer.experiments.continuity import probe_lines, probe_run
from fixedformer.experiments.run import Run
from fixedformer.experiments.tables import Item, Row, Scale
from fixedformer.experiments.tables import rows as rows_of
from fixedformer.experiments.tmlt import TmltItem, tmlt_rows
from fixedformer.plots import bars, train_against_test
from fixedformer.storage import write_atomic


def reproduce(
    item: Item | TmltItem,
    *,
    out: Annotated[Path, Parameter(name=["--out", "-o"])],
    scale: Scale = "small",
    rows: Annotated[list[str] | None, Parameter(consume_multiple=True)] = None,
    estimate: bool = False,
    list_: Annotated[bool, Parameter(name="--list")] = False,
    seed: int | None = None,
    data: Path | None = None,
    device: str = "auto",
    threads: Count | None = None,
) -> int:
    """Reproduce a table or figure of a paper into a folder that can be gone on with.

    table1, table2, figure2: "Fixed Universal Transformers". tmlt-table2 (reasoning), tmlt-table3 (decision trees),
    tmlt-table4 (language), tmlt-figure5 (train against test), tmlt-probe (appendix D): "On Expressive Power of Looped
    Transformers".

    Args:
        item: which one.
        out: the folder; runs/, table.csv, table.md and, for figures, figure.png.
        scale: small (CPU cores) or paper (the paper's appendix as it stands; for a GPU).
        rows: only rows of these names, or whose names begin with one of these, e.g. dyck/sparse.
        estimate: only say how long each row would take here, and how much memory.
        list_: only list the rows' names.
        seed: only runs of this seed.
        data: tmlt-table2: a Sudoku CSV instead of generated puzzles; tmlt-table4, tmlt-probe: a text file.
        device: auto, cpu or cuda.
        threads: CPU threads.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    every = _rows_of(item, scale, data)
    chosen = _named(every, rows)
    if not chosen:
        raise SpecError(f"no row of {item} begins with {', '.join(rows or [])}; --list shows their names")
    if list_:
        print("\n".join(row.name for row in chosen))
        return 0
    place = device_named(device)
    if estimate:
        return _estimate(chosen, place)
    plan = [(row, recipe) for row in chosen for recipe in row.recipes if seed in (None, recipe.seed)]
    if not plan:
        known = sorted({recipe.seed for row in chosen for recipe in row.recipes})
        raise SpecError(f"no run of seed {seed}; these rows have seeds {', '.join(map(str, known))}")
    missed = 0
    for row, recipe in plan:
        title = f"{row.name}, seed {recipe.seed}"
        try:
            run = Run(recipe, work.place_of(row, recipe, out), place)
            if not run.done:
                print(f".. {work.run_estimate(run, title)}", file=sys.stderr)
            follow(run, title)
        except (CapacityError, StorageError) as error:  # the other rows may do
            missed += 1
            print(f"{title}: {error}", file=sys.stderr)
            continue
        work.compile_run(run)
        if item == "tmlt-probe":
            probe_run(run)
        _write(item, scale, out, every)
    if missed < len(plan):
        print((out / "table.md").read_text())
    return 2 if missed else 0


def _estimate(chosen: list[Row], place: str) -> int:
    """What each row would take, a line each."""
    for row in chosen:
        try:
            print(work.estimate(row, place), flush=True)
        except CapacityError as error:  # the other rows may fit
            print(f"{row.name}: {error}", flush=True)
    return 0


def _named(every: list[Row], names: list[str] | None) -> list[Row]:
    """Rows that a name means: the one of exactly that name, where there is one, else all that begin with it."""
    if not names:
        return every
    known = {row.name for row in every}
    return [
        row for row in every
        if row.name in names or any(name not in known and row.name.startswith(name) for name in names)
    ]  # fmt: skip


def _rows_of(item: Item | TmltItem, scale: Scale, data: Path | None) -> list[Row]:
    if data is not None and item not in ("tmlt-table2", "tmlt-table4", "tmlt-probe"):
        raise SpecError(f"{item} generates its data; --data is for tmlt-table2, tmlt-table4 and tmlt-probe")
    if data is not None and not data.is_file():
        raise SpecError(f"--data {data}: no such file")
    if item.startswith("tmlt-"):
        return tmlt_rows(cast(TmltItem, item), scale, data)
    return rows_of(cast(Item, item), scale)


def _write(item: Item | TmltItem, scale: Scale, out: Path, every: list[Row]) -> None:
    """Tables and figure of everything that is finished so far, chosen now or not."""
    if not item.startswith("tmlt-"):
        table = work.collect(every, out)
        made = f"`fixedformer reproduce {item} --scale {scale} -o results/{out.name}`, {date.today().isoformat()}."
        work.write_tables(table, out, f"{item}, scale {scale}", made)
        if item == "figure2":
            write_atomic(out / "figure.png", bars(table))
        return
    table = tmlt_table.collect(every, out)
    notes = [
        f"`fixedformer reproduce {item} --scale {scale} -o results/{out.name}`, {date.today().isoformat()}.",
        "On sequences kept out of training and validation; spread is the standard deviation over seeds.",
    ]
    if scale == "small":
        notes.append(
            "`paper` is the cell it stands beside (`experiments/tmlt.py`), with the paper's sizes and lengths."
        )
    if item == "tmlt-probe":
        notes += ["", *probe_lines(every, out)]
    tmlt_table.write_table(table, out, f"{item}, scale {scale}", notes)
    if item == "tmlt-figure5" and table:
        write_atomic(out / "figure.png", train_against_test(table))
