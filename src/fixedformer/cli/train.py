"""train: one recipe, with a progress bar, into a folder that can be gone on with."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fixedformer.cli.looped_flags import LoopedFlags, looped_recipe
from fixedformer.cli.options import Count, Seed
from fixedformer.errors import SpecError
from fixedformer.experiments.looped import LoopedRecipe
from fixedformer.experiments.recipes import paper_recipe
from fixedformer.experiments.reproduce import run_estimate
from fixedformer.experiments.run import Run
from fixedformer.training.fit import Record

Choice = Literal["sparse", "random", "full"]
NO_FLAGS = LoopedFlags()


def train(
    task: str,
    *,
    model: Literal["machine", "looped", "standard"] = "machine",
    machine: Choice = "sparse",
    out: Annotated[Path, Parameter(name=["--out", "-o"])],
    residual: bool = False,
    residual_weights: bool = False,
    norm: Literal["pre", "post"] | None = None,
    final_norm: bool = False,
    mlp_width: int = 0,
    mlp_ramp: tuple[int, int] | None = None,
    rotary: bool = False,
    mask: Literal["none", "causal"] | None = None,
    looped: bool = False,
    width: int | None = None,
    heads: int | None = None,
    layers: int | None = None,
    d_head: int | None = None,
    d_model: int | None = None,
    train_unembedding: bool | None = None,
    everywhere: bool = False,
    seed: Seed = 0,
    steps: int | None = None,
    batch: int | None = None,
    rate: float | None = None,
    warmup: int | None = None,
    decay: Literal["constant", "linear", "cosine"] | None = None,
    final_rate: float | None = None,
    clip: float | None = None,
    weight_decay: float | None = None,
    betas: tuple[float, float] | None = None,
    validate_every: int | None = None,
    validation: int | None = None,
    stop_at: float | None = None,
    precision: Literal["float32", "bfloat16"] | None = None,
    device: str = "auto",
    threads: Count | None = None,
    flags: LoopedFlags = NO_FLAGS,
) -> int:
    """Train a fixed machine's program (its embedding E, and U), a full target, or a looped transformer, on TASK.

    Defaults are the paper's (appendix H) for machines, and laptop-sized for looped ones. A run that was stopped goes on
    where its folder says; one folder holds one recipe. Writes recipe.json, metrics.jsonl, checkpoint, result.json and
    the trained program, target or model.

    Args:
        task: dyck, 1-hop to 4-hop, or a .jsonl or .csv file with tokens and labels; looped and standard models also
            edit-distance, lcs, trees, sudoku, countdown and language.
        model: machine (see --machine), looped, or standard: as many different layers, each applied once.
        machine: sparse, random, or full (a trained target).
        out: the run's folder.
        residual: residual connections.
        residual_weights: with residual: a machine built for residual targets (wider) instead of the paper's variant.
        norm: LayerNorm without scale or shift before (pre) or after (post) each layer.
        final_norm: one more before the unembedding.
        mlp_width: a GELU MLP of this hidden width after each attention (frozen and random on a machine).
        mlp_ramp: first and last step between which a machine's frozen MLP is let in; there from the start otherwise.
        rotary: rotary positions; none otherwise.
        mask: causal, or none; causal for machines, and for looped models where the task is read left to right.
        looped: one set of machine weights for all layers.
        width: width of the machine (the smallest universal one when left out) or of the looped model (64).
        heads: attention heads; the paper's for its tasks.
        layers: layers; the paper's for its tasks.
        d_head: head width; the paper's for its tasks.
        d_model: hidden width of a full target.
        train_unembedding: train U too (the paper does); with --no-train-unembedding the machine's own U stays.
        everywhere: dyck: score every place, not only "?".
        seed: of parameters, data and random machine.
        steps: training steps.
        batch: sequences a step.
        rate: AdamW's learning rate.
        warmup: steps over which it grows.
        decay: constant, linear, or cosine after the warm-up.
        final_rate: what decay ends at; 0 when left out.
        clip: gradient norm at most; 0 for none.
        weight_decay: AdamW's.
        betas: AdamW's two, e.g. 0.9 0.95: the second forgets a spike sooner.
        validate_every: steps between validations.
        validation: sequences in the validation set.
        stop_at: stop at this validation accuracy.
        precision: float32, or bfloat16 for autocast.
        device: auto, cpu or cuda.
        threads: CPU threads; PyTorch's choice when left out.
        flags: switches of looped models, each with its own help.
    """
    # Long because every flag is a parameter with a line of help; the work is in recipes.py and run.py.
    if threads is not None:
        torch.set_num_threads(threads)
    timing: dict[str, Any] = {
        "steps": steps, "batch": batch, "rate": rate, "warmup": warmup, "decay": decay, "clip": clip,
        "weight_decay": weight_decay, "validate_every": validate_every, "validation": validation, "stop_at": stop_at,
        "precision": precision, "final_rate": final_rate, "betas": betas,
    }  # fmt: skip
    given = {name: value for name, value in timing.items() if value is not None}
    if model != "machine":
        _refuse({
            "--machine": machine != "sparse", "--residual": residual, "--residual-weights": residual_weights,
            "--norm": norm, "--final-norm": final_norm, "--looped": looped, "--d-head": d_head, "--d-model": d_model,
            "--rotary (--positions rotary)": rotary, "--train-unembedding": train_unembedding is not None,
            "--everywhere": everywhere, "--mlp-ramp": mlp_ramp is not None,
        })  # fmt: skip
        sizes: dict[str, Any] = {"width": width, "heads": heads, "layers": layers, "mlp_width": mlp_width or None,
                                 "causal": None if mask is None else mask == "causal"}  # fmt: skip
        return _show(Run(looped_recipe(task, model, flags, sizes, given, seed), out, device_named(device)), model)
    if flags != NO_FLAGS:
        raise SpecError("these flags need --model looped or --model standard; see fixedformer train --help")
    changes: dict[str, Any] = {
        "residual": residual, "residual_weights": residual_weights, "norm": norm, "final_norm": final_norm,
        "mlp_width": mlp_width, "positions": "rotary" if rotary else None, "looped": looped,
        "mask": None if mask == "none" else "causal", "everywhere": everywhere, "seed": seed, "width": width,
        "heads": heads, "layers": layers, "d_head": d_head,
    }  # fmt: skip
    changes |= {k: v for k, v in {"d_model": d_model, "train_unembedding": train_unembedding}.items() if v is not None}
    recipe = paper_recipe(task, machine, **changes)
    recipe = replace(recipe, schedule=replace(recipe.schedule, **given), mlp_ramp=mlp_ramp)
    return _show(Run(recipe, out, device_named(device)), machine)


def _refuse(given: dict[str, Any]) -> None:
    """SpecError that names the flags given that a looped or standard model does not have."""
    named = [flag for flag, value in given.items() if value]
    if named:
        raise SpecError(f"{', '.join(named)}: for machines only; looped and standard models have their own "
                        "switches, see fixedformer train --help")  # fmt: skip


def _show(run: Run, what: str) -> int:
    """Train what is left of a run, then its result on stdout."""
    title = f"{run.recipe.as_dict()['task']}, {what}"
    if isinstance(run.recipe, LoopedRecipe) and not run.done:
        print(f".. {run_estimate(run, title)}", file=sys.stderr)
    follow(run, title)
    result = run.result()
    rules = ", ".join(f"{name} {share:.1%}" for name, share in result["trivial_rules"].items())
    print(f"test accuracy {result['accuracy']:.2%}, loss {result['loss']:.4g} on {result['tested_on']} sequences, "
          f"{result['steps']} steps, {result['seconds']:.0f} s (trivial rules: {rules})")  # fmt: skip
    for name, value in result["measures"].items():
        print(f"  {name}: {value:.4g}")
    print(run.folder)
    return 0


def follow(run: Run, title: str) -> None:
    """Train with a bar on stderr: step, loss, validation accuracy, sequences a second, time left."""
    columns = (
        TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"), TimeRemainingColumn(),
    )  # fmt: skip
    console = Console(stderr=True)
    with Progress(*columns, console=console, refresh_per_second=2) as bar:
        place = bar.add_task(title, total=run.recipe.schedule.steps, note="")
        speed = None
        for record in run.go():
            speed = record.sequences_per_second if speed is None else 0.95 * speed + 0.05 * record.sequences_per_second
            bar.update(place, completed=record.step, note=_note(record, speed))
            if record.measured and not console.is_terminal:
                print(f".. {title}, step {record.step}: {_note(record, speed)}", file=console.file, flush=True)


def _note(record: Record, speed: float) -> str:
    best = "" if record.best < 0 else f"validation {record.best:.1%} at best, "
    return f"loss {record.loss:.3f}, {best}{speed:.0f} seq/s"


def device_named(name: str) -> str:
    """auto, cpu or cuda -> cpu or cuda; SpecError for anything else, or for cuda where there is none."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise SpecError(f"device must be auto, cpu or cuda, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise SpecError("device cuda was asked for and this PyTorch sees no GPU; use --device cpu")
    return name
