"""Runs on disk: killed at any moment they end as if nothing had happened."""

import dataclasses
import json
import random
import subprocess
import sys
import time

import pytest
import torch

import fixedformer as ff
from fixedformer import storage
from fixedformer.cli import main
from fixedformer.experiments.recipes import SHAPES, Recipe, paper_recipe
from fixedformer.experiments.run import Run
from fixedformer.training.fit import Schedule

QUICK = Schedule(steps=40, batch=8, rate=0.01, validate_every=10, validation=20)


def finish(run):
    return list(run.go())


def final(folder):
    header, tensors = storage.read(folder / "checkpoint", "checkpoint", lambda header: header.shapes)
    return {k: v for k, v in header.body.items() if k != "seconds"}, tensors


def same(one, two):
    assert one[0] == two[0]
    assert one[1].keys() == two[1].keys()
    return all(torch.equal(one[1][name], two[1][name]) for name in one[1])


@pytest.mark.parametrize("machine", ["sparse", "random", "full"])
def test_a_run_leaves_what_it_promises(tmp_path, machine):
    recipe = Recipe(machine=machine, heads=2, d_head=4, d_model=8, schedule=QUICK)
    run = Run(recipe, tmp_path / "run", test_count=100)
    assert len(finish(run)) == 40
    result = run.result()
    assert result["steps"] == 40
    assert result["tested_on"] == 100
    assert 0 <= result["accuracy"] <= 1
    assert "even length" in result["trivial_rules"]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [10, 20, 25, 30, 40]
    assert Recipe.from_dict(json.loads((tmp_path / "run" / "recipe.json").read_text())) == recipe
    if machine == "full":
        target = ff.load_target(tmp_path / "run" / "target.safetensors")
        assert target.weights.d_model == 8
    else:
        assert result["fingerprint_before"] == result["fingerprint_after"] == recipe.build_machine().fingerprint()
        program = ff.load_program(tmp_path / "run" / "program.safetensors")
        assert program.machine_fingerprint == result["fingerprint_before"]
        assert program.card.vocabulary == (".", "(", ")", "?")
    assert finish(Run(recipe, tmp_path / "run")) == [], "a finished run is not trained again"
    with pytest.raises(ff.StorageError, match="holds a run of another recipe"):
        Run(Recipe(machine=machine, seed=5, schedule=QUICK), tmp_path / "run")


def test_stopped_by_hand_and_gone_on_with(tmp_path):
    recipe = Recipe(heads=2, d_head=4, train_unembedding=True, schedule=QUICK)
    finish(Run(recipe, tmp_path / "whole", checkpoint_seconds=0, test_count=50))
    parts = tmp_path / "parts"
    for stop in (3, 17, 30):
        for record in Run(recipe, parts, checkpoint_seconds=0, test_count=50).go():
            if record.step == stop:
                break
        with open(parts / "metrics.jsonl", "a", encoding="utf-8") as log:
            log.write('{"step": 39, "loss')  # a line cut off by a kill
    finish(Run(recipe, parts, checkpoint_seconds=0, test_count=50))
    assert same(final(tmp_path / "whole"), final(parts))
    steps = [json.loads(line)["step"] for line in (parts / "metrics.jsonl").read_text().splitlines()]
    assert steps == [10, 20, 25, 30, 40]
    accuracies = [Run(recipe, folder).result()["accuracy"] for folder in (tmp_path / "whole", parts)]
    assert accuracies[0] == accuracies[1]


RECIPES = {
    "machine": "Recipe(heads=2, d_head=4, train_unembedding=True, schedule=schedule)",
    "looped": "LoopedRecipe('edit-distance', {'length': 4}, {'width': 16, 'heads': 2, 'loops': 4, 'timestep': 'adaln', "
    "'loss_over': 'all', 'checkpointing': 'nested'}, None, 0, replace(schedule, steps=100))",
}
CHILD = """
import sys, torch
from dataclasses import replace
torch.set_num_threads(1)
from pathlib import Path
from fixedformer.experiments.looped import LoopedRecipe
from fixedformer.experiments.recipes import Recipe
from fixedformer.experiments.run import Run
from fixedformer.training.fit import Schedule
schedule = Schedule(steps=400, batch=8, rate=0.01, validate_every=20, validation=20)
recipe = RECIPE
print("ready", flush=True)
for _ in Run(recipe, Path(sys.argv[1]), checkpoint_seconds=0.01, test_count=50).go():
    pass
"""


def kill_and_resume(tmp_path, kills, seed, kind="machine"):
    code = CHILD.replace("RECIPE", RECIPES[kind])
    whole = tmp_path / "whole"
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", code, str(whole)], check=True, capture_output=True)
    length = time.perf_counter() - began
    draw, parts = random.Random(seed), tmp_path / "parts"
    for _ in range(kills):
        with subprocess.Popen([sys.executable, "-c", code, str(parts)], stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            child.stdout.readline()  # imported; from here on it trains and writes
            time.sleep(draw.uniform(0, length / kills))
            child.kill()
    subprocess.run([sys.executable, "-c", code, str(parts)], check=True, capture_output=True)
    return final(whole), final(parts)


@pytest.mark.parametrize("kind", list(RECIPES))
def test_killed_twice(tmp_path, kind):
    assert same(*kill_and_resume(tmp_path, kills=2, seed=0, kind=kind))


@pytest.mark.slow
def test_killed_twenty_times(tmp_path):
    """kill -9 at 20 random moments, resume: the final checkpoint is bit for bit the undisturbed run's."""
    assert same(*kill_and_resume(tmp_path, kills=20, seed=1))


@pytest.mark.slow
def test_a_looped_run_killed_ten_times(tmp_path):
    assert same(*kill_and_resume(tmp_path, kills=10, seed=2, kind="looped"))


def test_paper_recipes_are_appendix_h():
    for task, steps in {"dyck": 10_000, "1-hop": 10_000, "2-hop": 15_000, "3-hop": 60_000, "4-hop": 60_000}.items():
        recipe = paper_recipe(task, "random")
        assert recipe.schedule.steps == steps
        assert recipe.train_unembedding
        assert recipe.deviation == 0.02
        assert recipe.schedule.batch == (1000 if task == "dyck" else 128)
    widths = {"dyck": 1024, "1-hop": 456, "2-hop": 1024, "3-hop": 2280, "4-hop": 2280}
    assert set(widths) == set(SHAPES)
    for task, width in widths.items():
        assert paper_recipe(task, "sparse").build_machine().width == width


@pytest.mark.parametrize(("changes", "message"), [
    ({"task": "5-hop"}, "task must be one of"), ({"machine": "dense"}, "machine must be"),
    ({"residual_weights": True}, "residual_weights needs residual"),
])  # fmt: skip
def test_recipe_refuses(changes, message):
    with pytest.raises(ff.SpecError, match=message):
        Recipe(**changes)


def test_train_command(tmp_path, capsys):
    common = ["--steps", "6", "--batch", "4", "--validate-every", "3", "--validation", "8", "--threads", "1"]
    assert main(["train", "dyck", "-o", str(tmp_path / "a"), *common]) == 0
    out, err = capsys.readouterr()
    assert "test accuracy" in out
    assert "even length" in out
    assert "step 3" in err
    assert main(["train", "dyck", "-o", str(tmp_path / "a"), *common, "--seed", "1"]) == 2
    assert "holds a run of another recipe" in capsys.readouterr().err
    assert main(["train", "dyck", "-o", str(tmp_path / "b"), *common, "--norm", "pre"]) == 2
    assert "norm needs residual=True" in capsys.readouterr().err
    assert main(["train", "dyck", "-o", str(tmp_path / "c"), *common, "--device", "tpu"]) == 2
    assert main(["train", "7-hop", "-o", str(tmp_path / "d"), *common]) == 2
    assert "or a .jsonl or .csv file, got '7-hop'" in capsys.readouterr().err


def test_train_on_ones_own_data(tmp_path, capsys):
    """A lookup that two layers learn: the label of a sequence is its first token."""
    rows = [([a, b, c], [None, None, a]) for a in "xy" for b in "pqrs" for c in "uvw"]
    lines = [json.dumps({"tokens": tokens, "labels": labels}) for tokens, labels in rows]
    (tmp_path / "d.jsonl").write_text("\n".join(lines))
    options = ["--steps", "150", "--batch", "16", "--rate", "0.03", "--validate-every", "50", "--validation", "50"]
    status = main(["train", str(tmp_path / "d.jsonl"), "-o", str(tmp_path / "run"), "--machine", "full", "--rotary",
                   "--threads", "1", *options])  # fmt: skip
    assert status == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["accuracy"] > 0.9 > result["trivial_rules"]["commonest label"]
    assert ff.load_target(tmp_path / "run" / "target.safetensors").card.vocabulary[0] == "<pad>"


def test_a_folder_from_before_a_field_existed_goes_on(tmp_path):
    """recipe.json of an older version lacks later fields; their defaults are what it ran with."""
    recipe = Recipe(task="dyck", heads=2, d_head=4, schedule=Schedule(steps=2, batch=4, validation=8))
    list(Run(recipe, tmp_path).go())
    body = json.loads((tmp_path / "recipe.json").read_text())
    del body["schedule"]["betas"], body["mlp_width"]
    (tmp_path / "recipe.json").write_text(json.dumps(body))
    Run(recipe, tmp_path)
    with pytest.raises(ff.StorageError, match="holds a run of another recipe"):
        Run(dataclasses.replace(recipe, mlp_width=8), tmp_path)


@pytest.mark.parametrize(("changes", "message"), [
    ({"mlp_ramp": (1,)}, "mlp_ramp is two steps"), ({"mlp_ramp": (3, 2)}, "mlp_ramp is two steps"),
    ({"mlp_ramp": (1.5, 2)}, "mlp_ramp is two steps"), ({"mlp_ramp": (5, 20)}, "at step 20, but training ends at 20"),
    ({"mlp_ramp": (1, 2), "mlp_width": 0}, "needs residual connections and an MLP"),
    ({"mlp_ramp": (1, 2), "machine": "full"}, "a full target trains its own"),
])  # fmt: skip
def test_a_ramp_that_cannot_be_is_refused(changes, message):
    with pytest.raises(ff.SpecError, match=message):
        Recipe(**{"residual": True, "mlp_width": 8, "schedule": Schedule(steps=20), **changes})
