"""Looped recipes from start to end: runs, tables, evaluation by loops, the probes, and the commands around them."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import fixedformer as ff
from fixedformer.cli import main
from fixedformer.experiments import tmlt_table
from fixedformer.experiments.continuity import continuity
from fixedformer.experiments.evaluate import at_loops, probe_loops
from fixedformer.experiments.looped import LoopedRecipe, kept_bytes
from fixedformer.experiments.reproduce import run_estimate
from fixedformer.experiments.run import Run, read_recipe
from fixedformer.experiments.task_names import NAMES, build_task
from fixedformer.experiments.tmlt import ITEMS, TABLE_2, tmlt_rows
from fixedformer.loop.looped_files import load_looped
from fixedformer.training.fit import Schedule

QUICK = Schedule(steps=6, batch=4, rate=0.01, warmup=2, validate_every=3, validation=8)
SMALL = {"width": 16, "heads": 2, "loops": 3}
OPTIONS = {
    "edit-distance": {"length": 5}, "lcs": {"length": 5}, "countdown": {"numbers": 9, "high": 20, "largest": 30},
    "sudoku": {"pool": 2, "clues": 60}, "language": {"block": 12}, "dyck": {"pairs": 3}, "1-hop": {"tokens": 9},
    "trees": {"points": 5, "first_points": 3, "dimensions": 3, "first_dimensions": 2, "every": 2},
}  # fmt: skip
FLAGS = ["--steps", "6", "--batch", "4", "--validate-every", "3", "--validation", "8", "--width", "16", "--heads", "2"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run of LCS, three loops."""
    recipe = LoopedRecipe("lcs", {"length": 5, "letters": 2}, {**SMALL, "timestep": "adaln"}, 60, 0,
                          replace(QUICK, steps=60, batch=16), test_count=50)  # fmt: skip
    folder = tmp_path_factory.mktemp("lcs")
    list(Run(recipe, folder).go())
    return folder


@pytest.mark.parametrize("task", sorted(OPTIONS))
def test_every_task_trains_and_leaves_its_result(tmp_path, task):
    recipe = LoopedRecipe(task, OPTIONS[task], SMALL, None, 1, QUICK, test_count=20)
    run = Run(recipe, tmp_path)
    records = list(run.go())
    assert len(records) == 6
    assert all(np.isfinite(record.loss) for record in records)
    result = run.result()
    assert result["tested_on"] == 20
    assert result["parameters"] == sum(p.numel() for p in recipe.build_model().parameters())
    assert 0 <= result["accuracy"] <= 1
    assert result["train_accuracy"] is None
    assert tmlt_table.headline(task, result)[1] >= 0
    assert tmlt_table.trivial(task, result)
    assert read_recipe(tmp_path).as_dict() == LoopedRecipe.from_dict(json.loads(json.dumps(recipe.as_dict()))).as_dict()
    model = load_looped(tmp_path / "model.safetensors")
    assert model.spec == recipe.spec()
    assert model.spec.causal == (task in ("language", "dyck", "1-hop", "trees"))
    assert list(Run(recipe, tmp_path).go()) == []


def test_the_files_model_is_the_trained_one(trained):
    recipe = read_recipe(trained)
    result = Run(recipe, trained).result()
    (found,) = at_loops(load_looped(trained / "model.safetensors"), recipe, [3], 50)
    assert found.accuracy == result["accuracy"]
    assert found.loss == pytest.approx(result["loss"], rel=1e-5)
    assert 0 <= result["train_accuracy"] <= 1


def test_evaluate_by_loops(trained):
    recipe, model = read_recipe(trained), load_looped(trained / "model.safetensors")
    rows = at_loops(model, recipe, [1, 3, 6], 40)
    assert [row.loops for row in rows] == [1, 3, 6]
    assert len({row.loss for row in rows}) == 3
    assert model.loops == 3
    probe = probe_loops(model, recipe, 6, 60)
    assert probe.loops == tuple(range(7))
    assert all(0 <= share <= 1 for share in (*probe.own, *probe.linear))
    with pytest.raises(ff.SpecError, match="loops must be at least 1"):
        at_loops(model, recipe, [0], 10)
    with pytest.raises(ff.SpecError, match="has no other numbers of loops"):
        at_loops(model, replace(recipe, switches={**recipe.switches, "loops": 1}), [2], 10)


def test_a_linear_probe_finds_what_is_there():
    """States before any loop hold the token itself: a linear read-out of its parity must find it."""
    from fixedformer.experiments.evaluate import _linear

    generator = torch.Generator().manual_seed(0)
    states = torch.randn(400, 8, generator=generator)
    labels = (states[:, 3] > 0).long()
    assert _linear(states[:200], labels[:200], states[200:], labels[200:]) > 0.9
    values = states @ torch.arange(8.0) + 3
    assert _linear(states[:200], values[:200], states[200:], values[200:]) > 0.999


def test_evaluate_command(trained, tmp_path, capsys):
    assert main(["evaluate", str(trained), "--loops", "1,3", "--count", "30", "--plot", str(tmp_path / "p.png")]) == 0
    out = capsys.readouterr().out
    assert "(trained with)" in out
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert main(["evaluate", str(trained / "model.safetensors"), "--count", "20", "--json"]) == 0
    assert [row["loops"] for row in json.loads(capsys.readouterr().out)["loops"]] == [1, 3, 6]
    assert main(["evaluate", str(trained), "--loops", "a"]) == 2
    assert "--loops takes numbers" in capsys.readouterr().err
    assert main(["evaluate", str(tmp_path)]) == 2
    assert "holds no recipe.json" in capsys.readouterr().err


def test_continuity_of_a_linear_model():
    """Without loops that do anything the state is the injected sum: ‖ΔH‖ / ‖ΔE‖ is the number of loops."""
    model = ff.LoopedTransformer(d_in=5, width=8, heads=2, loops=4, tokens=6, timestep="adaln")
    X = torch.randint(5, (7, 6), generator=torch.Generator().manual_seed(0))
    found = continuity(model, X)
    assert found.mean == pytest.approx(4, rel=1e-4)
    assert found.largest == pytest.approx(4, rel=1e-4)
    assert found.sequences == 7
    assert found.of_state == pytest.approx(1, rel=1e-4)
    assert 0 < found.of_readouts < 3


def test_train_command(tmp_path, capsys):
    common = ["-o", str(tmp_path / "a"), *FLAGS, "-O", "length=5", "letters=2"]
    assert main(["train", "lcs", "--model", "looped", "--loops", "2", "--timestep", "free", *common]) == 0
    out, err = capsys.readouterr()
    assert "test accuracy" in out
    assert "of activations" in err
    recipe = read_recipe(tmp_path / "a")
    assert recipe.options == {"length": 5, "letters": 2}
    assert (recipe.spec().loops, recipe.spec().timestep, recipe.spec().width) == (2, "free", 16)
    assert main(["train", "lcs", "--model", "looped", "--loops", "4", *common]) == 2
    assert "holds a run of another recipe" in capsys.readouterr().err
    assert main(["train", "trees", "--model", "standard", "--layers", "2", "-o", str(tmp_path / "t"), *FLAGS,
                 "-O", "points=4", "-O", "first-points=3", "-O", "dimensions=2"]) == 0  # fmt: skip
    assert "squared error, 3 nearest" in capsys.readouterr().out
    spec = read_recipe(tmp_path / "t").spec()
    assert (spec.layers, spec.loops, spec.injection, spec.causal) == (2, 1, "none", True)


@pytest.mark.parametrize(("arguments", "message"), [
    (["lcs", "--model", "standard", "--loops", "3"], "has --layers and nothing looped: leave out --loops"),
    (["lcs", "--loops", "3"], "need --model looped"),
    (["lcs", "--model", "looped", "-O", "length"], "takes name=value"),
    (["lcs", "--model", "looped", "-O", "size=3"], "lcs has no option size"),
    (["sudoku", "--model", "looped", "-O", "size=3"], "sudoku has no option size"),
    (["chess", "--model", "looped"], "task must be one of"),
    (["lcs", "--model", "looped", "--loss-over", "some"], "loss_over must be"),
    (["lcs", "--model", "looped", "--rotary", "--norm", "post"], "--norm, --rotary (--positions rotary): for machines"),
])  # fmt: skip
def test_train_command_refuses(arguments, message, tmp_path, capsys):
    assert main(["train", *arguments, "-o", str(tmp_path / "x")]) == 2
    assert message in capsys.readouterr().err


def test_a_recipe_that_was_only_tried_does_not_claim_the_folder(tmp_path, capsys):
    """A refused task, then the right one; a schedule of a single step; free timesteps evaluated without --loops."""
    common = ["-o", str(tmp_path / "a"), *FLAGS[2:], "-O", "length=5", "letters=2", "--timestep", "free"]
    assert main(["train", "lsc", "--model", "looped", *common]) == 2
    assert main(["train", "lcs", "--model", "looped", *common, "--loops", "2", "--steps", "1"]) == 0
    assert "test accuracy" in capsys.readouterr().out
    assert main(["evaluate", str(tmp_path / "a"), "--count", "20"]) == 0
    assert "2 " in capsys.readouterr().out


def test_own_data_trains_looped(tmp_path):
    path = tmp_path / "d.jsonl"
    rows = [{"tokens": [a, b], "labels": [None, a]} for a in "xyz" for b in "pqrs"]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    run = Run(LoopedRecipe(str(path), {}, SMALL, None, 0, QUICK, test_count=10), tmp_path / "run")
    list(run.go())
    assert run.done


@pytest.mark.parametrize("scale", ["small", "paper"])
def test_rows_are_complete_and_buildable(scale):
    for item in ITEMS:
        rows = tmlt_rows(item, scale)
        names = [row.name for row in rows]
        assert len(set(names)) == len(names)
        for row in rows:
            assert len({recipe.seed for recipe in row.recipes}) == len(row.recipes)
            assert row.recipes[0].task in NAMES
    with pytest.raises(ff.SpecError, match="reproduce knows tmlt-table2"):
        tmlt_rows("tmlt-table9", scale)


def test_paper_scale_is_the_papers():
    rows = {row.name: row for row in tmlt_rows("tmlt-table2", "paper")}
    assert len(rows) == sum(1 + 2 * len(numbers) for _, _, numbers in TABLE_2.values())
    row = rows["edit-distance-60/looped/r-100-timestep"]
    recipe, spec = row.recipes[0], row.recipes[0].spec()
    assert row.paper == 88.3
    assert (spec.width, spec.heads, spec.layers, spec.loops, spec.timestep) == (256, 4, 1, 100, "adaln")
    assert (recipe.schedule.batch, recipe.schedule.rate, recipe.schedule.steps) == (64, 1e-4, 781_250)
    assert (recipe.train_size, recipe.options["length"]) == (1_000_000, 60)
    assert rows["sudoku/standard/L-6"].recipes[0].switches["layers"] == 6
    assert rows["sudoku/looped/r-32"].recipes[0].switches["loss_over"] == "all"
    language = {row.name: row.recipes[0] for row in tmlt_rows("tmlt-table4", "paper")}
    looped = language["language/looped/r-24-timestep"]
    assert looped.schedule.betas == (0.9, 0.95)
    assert (looped.schedule.final_rate, looped.schedule.batch, looped.options["block"]) == (6e-5, 48, 1024)
    trees = tmlt_rows("tmlt-table3", "paper")[0].recipes[0]
    task = build_task("trees", trees.options)[0]
    assert (task.dimensions, task.points, task.every, trees.schedule.steps) == (20, 101, 5000, 200_000)


def test_reproduce_command(tmp_path, capsys, monkeypatch):
    """One quick item through the command: rows, table, figure, and the probe's file."""
    from fixedformer.cli import reproduce as command

    recipe = LoopedRecipe("lcs", {"length": 5, "letters": 2}, SMALL, 60, 0, QUICK, test_count=20)
    text = LoopedRecipe("language", {"block": 8, "replaced": 0.1}, SMALL, None, 0, QUICK, test_count=20)

    def rows(item, scale, data=None):
        chosen = {"tmlt-figure5": recipe, "tmlt-probe": text}[item]
        return [ff_row(chosen)]

    def ff_row(chosen):
        from fixedformer.experiments.tables import Row

        return Row(chosen.task, "r = 3, timestep", "looped", (chosen, replace(chosen, seed=1)), 4.18)

    monkeypatch.setattr(command, "tmlt_rows", rows)
    assert main(["reproduce", "tmlt-figure5", "-o", str(tmp_path / "five")]) == 0
    out, err = capsys.readouterr()
    assert "| lcs | looped, r = 3, timestep |" in out
    assert "of activations" in err
    assert (tmp_path / "five" / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert main(["reproduce", "tmlt-probe", "-o", str(tmp_path / "probe"), "--seed", "1"]) == 0
    assert "| r = 3, timestep, seed 1 |" in capsys.readouterr().out
    table = (tmp_path / "five" / "table.csv").read_text().splitlines()
    assert len(table) == 2
    huge = replace(recipe, switches={"width": 4096, "heads": 2, "loops": 100_000})
    monkeypatch.setattr(command, "tmlt_rows", lambda *_: [ff_row(huge), ff_row(recipe)])
    assert main(["reproduce", "tmlt-table2", "-o", str(tmp_path / "x"), "--estimate"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert "are available; take a smaller batch" in first
    assert "minutes" in second
    assert main(["reproduce", "table1", "-o", str(tmp_path / "x"), "--data", "a.txt"]) == 2
    assert "generates its data" in capsys.readouterr().err
    assert main(["reproduce", "tmlt-table4", "-o", str(tmp_path / "x"), "--data", str(tmp_path / "a.txt")]) == 2
    assert "no such file" in capsys.readouterr().err


def test_estimates_and_what_a_step_keeps(tmp_path):
    recipe = LoopedRecipe("lcs", {"length": 5}, SMALL, None, 0, QUICK)
    found = run_estimate(Run(recipe, tmp_path), "lcs")
    assert found.activations == recipe.activation_bytes() > 0
    assert found.bytes == 20 * sum(p.numel() for p in recipe.build_model().parameters())
    big = LoopedRecipe("lcs", {"length": 5}, {"width": 4096, "heads": 2, "loops": 100_000}, None, 0, QUICK)
    with pytest.raises(ff.CapacityError, match="checkpointing nested"):
        run_estimate(Run(big, tmp_path / "big"), "big")
    spec = ff.LoopedSpec(d_in=9, loops=64)
    plain, loop, nested = (kept_bytes(replace(spec, checkpointing=kind), 8, 32) for kind in ("none", "loop", "nested"))
    assert nested < loop < plain / 4


def test_looped_files(trained, tmp_path, capsys):
    path = trained / "model.safetensors"
    assert main(["info", str(path)]) == 0
    assert "looped" in capsys.readouterr().out
    model = load_looped(path)
    model.loops = 9
    ff.save_looped(model.double(), tmp_path / "m.safetensors")
    again = ff.load_looped(tmp_path / "m.safetensors")
    assert again.loops == 9
    X = torch.randint(5, (2, 5), generator=torch.Generator().manual_seed(0))
    assert torch.equal(again(X), model(X))
    data = path.read_bytes()
    (tmp_path / "bad.safetensors").write_bytes(data[:-8])
    with pytest.raises(ff.StorageError, match="whole safetensors file"):
        ff.load_looped(tmp_path / "bad.safetensors")


@pytest.mark.parametrize(("changes", "message"), [
    ({"switches": {"d_in": 4}}, "unknown switches d_in"), ({"test_count": 0}, "test_count must be at least 1"),
])  # fmt: skip
def test_recipe_refuses(changes, message):
    with pytest.raises(ff.SpecError, match=message):
        LoopedRecipe(**changes)


@pytest.mark.parametrize(("task", "option", "message"), [
    ("lcs", "letters=x", "option letters must be of type int, got 'x'"),
    ("edit-distance", "length=5.5", "option length must be of type int, got 5.5"),
    ("edit-distance", "costs=1,2", "costs are three whole numbers"),
    ("edit-distance", "letters=2", "3 letters or more"),
    ("countdown", "numbers=9.5", "must be of type int"), ("countdown", "label=last", "label must be drawn or first"),
    ("dyck", "pairs=0", "pairs must be at least 1"), ("dyck", "everywhere=3", "must be of type bool"),
    ("1-hop", "characters=1", "needed 2..26 characters"), ("1-hop", "hops=3", "leave the option hops out"),
    ("language", "block=12.5", "must be of type int"), ("sudoku", "clues=50.5", "must be of type int"),
])  # fmt: skip
def test_an_option_that_does_not_fit_is_one_clear_line(task, option, message, tmp_path, capsys):
    assert main(["train", task, "--model", "looped", "-O", option, "-o", str(tmp_path / "run")]) == 2
    assert message in capsys.readouterr().err


def own_file(path, rows):
    path.write_text("".join(f'{{"tokens": ["{i}", "b"], "labels": [null, "{i % 3}"]}}\n' for i in range(rows)))
    return str(path)


def test_a_run_knows_its_data_file(tmp_path, capsys):
    """Another file under the same name: neither gone on with, nor evaluated."""
    data, run = own_file(tmp_path / "own.jsonl", 40), str(tmp_path / "run")
    command = ["train", data, "--model", "looped", "--loops", "2", *FLAGS, "-o", run]
    assert main(command) == 0
    assert main(["evaluate", run, "--loops", "2"]) == 0
    own_file(tmp_path / "own.jsonl", 41)
    for again in (command, ["evaluate", run, "--loops", "2"]):
        capsys.readouterr()
        assert main(again) == 2
        assert "no longer the one it was trained on" in capsys.readouterr().err


def test_an_output_never_replaces_an_input(tmp_path, capsys):
    data = own_file(tmp_path / "own.jsonl", 40)
    assert main(["train", data, "-o", data]) == 2
    assert "would be lost" in capsys.readouterr().err
    assert (tmp_path / "own.jsonl").read_text().count("tokens") == 40


def test_a_diverged_run_says_so(tmp_path, capsys):
    command = ["train", "lcs", "--model", "looped", "--loops", "2", *FLAGS, "--rate", "1e30", "-o", str(tmp_path / "r")]
    assert main(command) == 2
    assert "training has diverged" in capsys.readouterr().err


def test_evaluate_names_what_is_missing(tmp_path, capsys):
    assert main(["evaluate", str(tmp_path / "nothere"), "--loops", "2"]) == 2
    assert "nothere: no such folder or file" in capsys.readouterr().err
