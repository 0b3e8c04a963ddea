"""Tables are data: complete, buildable, and written from what was found."""

import csv
import shutil

import pytest

import fixedformer as ff
from fixedformer.cli import main
from fixedformer.experiments.tables import SEEDS, TABLE_1, TABLE_2, rows
from fixedformer.plots import bars


@pytest.mark.parametrize("scale", ["small", "paper"])
def test_every_number_of_the_paper_has_its_row(scale):
    one, two = rows("table1", scale), rows("table2", scale)
    assert sum(row.paper is not None for row in one) == 3 * sum(len(tasks) for tasks in TABLE_1.values())
    assert len(two) == 3 * sum(len(variants) for variants in TABLE_2.values())
    for table in (one, two, rows("figure2", scale)):
        names = [row.name for row in table]
        assert len(set(names)) == len(names)
        for row in table:
            seeds = (SEEDS if scale == "paper" else 2) if row.machine == "random" else 1
            if (scale, row.name) == ("small", "dyck/sparse/attention-only"):
                seeds = 4
            assert len(row.recipes) == seeds
            assert len({recipe.seed for recipe in row.recipes}) == len(row.recipes)
    random = next(row for row in one if row.name == "dyck/random/attention-only")
    assert random.paper == 94.4


def test_paper_scale_is_the_papers():
    by_name = {row.name: row for row in rows("table2", "paper")}
    recipe = by_name["dyck/sparse/MLP-and-LN"].recipes[0]
    assert (recipe.mlp_width, recipe.norm, recipe.schedule.batch, recipe.schedule.steps) == (4096, "pre", 1000, 10_000)
    assert recipe.train_unembedding
    widths = {row.name: row.recipes[0].build_machine().width for row in rows("figure2", "paper")}
    assert sorted(set(widths.values())) == [56, 1024]


def test_figure():
    row = {"task": "2-hop", "variant": "m-bar", "ours": "51.5", "width": "1024", "trivial rules": "copy x[i]: 47.0"}
    assert bars([row, row]).startswith(b"\x89PNG")


def test_unknown_item():
    with pytest.raises(ff.SpecError, match="reproduce knows table1"):
        rows("table9", "small")


def test_reproduce_runs_resumes_and_writes(tmp_path, capsys, monkeypatch):
    """One row with tiny recipes through the command line; a second call trains nothing and writes the same table."""
    from dataclasses import replace

    from fixedformer.experiments import reproduce, tables
    from fixedformer.training.fit import Schedule

    tiny = Schedule(steps=4, batch=4, validate_every=2, validation=8)

    def small(recipe):
        return replace(recipe, heads=2, d_head=4, schedule=tiny)

    monkeypatch.setattr(tables, "_small", small)
    monkeypatch.setattr(reproduce, "COMPILED_ON", 50)
    command = [
        "reproduce",
        "table2",
        "-o",
        str(tmp_path / "t"),
        "--threads",
        "1",
        "--rows",
        "dyck/sparse/a",
        "dyck/full/a",
    ]
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert "about" in err, "what it will take is said before it starts"
    assert out.count("| dyck | attention only |") == 2
    with open(tmp_path / "t" / "table.csv", encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    assert [(row["machine"], row["paper"], row["steps"]) for row in found] == [
        ("sparse", "100.0", "4"),
        ("full", "100.0", "4"),
    ]
    assert found[0]["compiled"] == ""
    assert found[1]["compiled"].endswith("at m = 64, 50 of 50 as the target")
    assert main(command) == 0
    again, err = capsys.readouterr()
    assert again == out
    assert "about" not in err
    shutil.rmtree(tmp_path / "t" / "runs" / "dyck" / "full")  # as in a clone, which has the table alone
    assert main([*command[:-2], "dyck/sparse/a"]) == 0
    assert capsys.readouterr().out == out
    monkeypatch.setattr(tables, "_small", lambda recipe: replace(small(recipe), deviation=0.5))
    assert main([*command[:-2], "dyck/sparse/a", "dyck/full/a"]) == 2  # one run is of another recipe, the other may do
    out, err = capsys.readouterr()
    assert "dyck/sparse/attention-only, seed 0: " in err
    assert "holds a run of another recipe" in err
    assert out.count("| dyck | attention only |") == 2
    assert main([*command[:-2], "dyck/full/a", "--seed", "9"]) == 2
    assert "no run of seed 9; these rows have seeds 0" in capsys.readouterr().err
    assert main([*command[:-2], "dyck/nothing"]) == 2
    assert "no row of table2 begins with dyck/nothing" in capsys.readouterr().err
    assert main(["reproduce", "table1", "-o", str(tmp_path / "t"), "--list"]) == 0
    assert "4-hop/full/residual-rotary-to-compile" in capsys.readouterr().out
    assert (
        main(["reproduce", "table2", "-o", str(tmp_path / "u"), "--estimate", "--rows", "dyck/random/attention"]) == 0
    )
    assert "about" in capsys.readouterr().out
    assert not (tmp_path / "u").exists()
