"""evaluate: a trained looped model at other numbers of loops, with a plot of what each loop knows."""

import json as jsonlib
import sys
from pathlib import Path

import torch

from fixedformer.cli.options import Count
from fixedformer.cli.train import device_named
from fixedformer.errors import SpecError, StorageError
from fixedformer.experiments.evaluate import as_json, at_loops, probe_loops
from fixedformer.experiments.looped import LoopedRecipe
from fixedformer.experiments.run import read_recipe, same_data
from fixedformer.loop.looped_files import load_looped
from fixedformer.plots import loops_picture
from fixedformer.storage import write_atomic


def evaluate(
    checkpoint: Path,
    *,
    loops: str | None = None,
    count: Count = 2000,
    plot: Path | None = None,
    json: bool = False,
    device: str = "auto",
    threads: Count | None = None,
) -> int:
    """Accuracy of a trained looped model by number of loops, on test sequences; with --plot, probed after each loop.

    Args:
        checkpoint: a run's folder, or the model.safetensors or checkpoint in it.
        loops: numbers of loops, e.g. 4,8,16,32; half, once and twice (not for free timesteps) the model's own when left
            out.
        count: test sequences.
        plot: a PNG: the model's own read-out, and a fitted linear one, after every loop.
        json: print JSON.
        device: auto, cpu or cuda.
        threads: CPU threads.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    if not checkpoint.exists():
        raise StorageError(f"{checkpoint}: no such folder or file; give the folder that fixedformer train -o wrote")
    folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
    recipe = read_recipe(folder)
    if not isinstance(recipe, LoopedRecipe):
        raise SpecError(f"{folder} holds a run of a fixed machine; evaluate reads looped models")
    if not (folder / "model.safetensors").exists():
        raise SpecError(f"{folder} holds no finished run; go on with it first: fixedformer train with the same flags")
    same_data(folder, recipe)
    model, place = load_looped(folder / "model.safetensors"), device_named(device)
    further = 1 if model.spec.timestep == "free" else 2  # free parameters end at the last trained loop
    usual = sorted({max(1, model.loops // 2), model.loops, further * model.loops})
    numbers = _numbers(loops) if loops else usual
    rows = at_loops(model, recipe, numbers, count, place)
    probe = probe_loops(model, recipe, max(numbers), min(count, 2000), place) if plot else None
    if probe is not None and plot is not None:
        curves = {
            "the model's own read-out": (probe.loops, probe.own),
            "a linear read-out fitted there": (probe.loops, probe.linear),
        }
        write_atomic(plot, loops_picture(curves, model.spec.loops, f"{recipe.task}, after each loop"))
        print(f".. {plot}", file=sys.stderr)
    if json:
        print(jsonlib.dumps(as_json(rows, probe), indent=2))
        return 0
    print(f"{'loops':>6} {'accuracy':>9} {'loss':>9}")
    for row in rows:
        more = ", ".join(f"{name} {value:.4g}" for name, value in row.measures.items())
        trained = " (trained with)" if row.loops == model.spec.loops else ""
        print(f"{row.loops:6d} {row.accuracy:9.2%} {row.loss:9.4g}  {more}{trained}")
    return 0


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise SpecError(f"--loops takes numbers with commas between, got {text!r}") from None
