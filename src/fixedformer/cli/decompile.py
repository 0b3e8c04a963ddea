"""decompile and shrink: programs and targets read back as the narrowest transformer."""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fixedformer as ff
from fixedformer.cli.data import read_input
from fixedformer.cli.embedding import MaskName, Out
from fixedformer.cli.options import Seed
from fixedformer.embedding.distil import DistilStep
from fixedformer.embedding.files import build_machine, load_program
from fixedformer.files import load_target, save_target
from fixedformer.storage import write_atomic

SHOWN = 50  # distillation steps between two lines of progress


def decompile(
    program: Path,
    *,
    out: Out,
    width: int | None = None,
    data: Path | None = None,
    where: Path | None = None,
    last: bool = False,
    mask: MaskName | None = None,
    tokens: bool = False,
    tolerance: float | None = None,
    steps: int = 0,
    seed: Seed = 0,
    plot: Path | None = None,
) -> int:
    """Read PROGRAM back as the narrowest transformer that computes the same, and say what was found.

    Args:
        program: a program file, compiled or trained, of a sparse or random machine.
        out: where the target goes.
        width: states of at most so many dimensions; the exact width when left out.
        data: inputs that count when truncating (.npy, .safetensors or .txt, as for run).
        where: .npy of bool, shaped like the data's tokens: the places whose outputs count.
        last: only the last output of every sequence counts.
        mask: none or causal, for the data; the mask of the program's card when left out.
        tokens: exact for one-hot tokens only, which may be narrower.
        tolerance: singular values below it, relative to the largest of their cut, count as zero.
        steps: steps of distillation on the data after truncating.
        seed: seed of the distillation's batches.
        plot: write a picture of the Hankel spectra here (.png).
    """
    loaded = load_program(program)
    machine = build_machine(loaded.spec, loaded.machine)
    options = _options(width, data, where, last, mask, loaded.card, tokens, tolerance, steps, seed)
    found = ff.decompile(machine, loaded, **options)
    return _tell(found, out, plot, (machine, loaded), f"certify {program} {out} --read-back")


def shrink(
    target: Path,
    *,
    out: Out,
    width: int | None = None,
    data: Path | None = None,
    where: Path | None = None,
    last: bool = False,
    mask: MaskName | None = None,
    tokens: bool = False,
    tolerance: float | None = None,
    steps: int = 0,
    seed: Seed = 0,
    plot: Path | None = None,
) -> int:
    """Write the narrowest target that computes what TARGET does, and say what was found.

    Args:
        target: a target file.
        out: where the small target goes.
        width: states of at most so many dimensions; the exact width when left out.
        data: inputs that count when truncating (.npy, .safetensors or .txt, as for run).
        where: .npy of bool, shaped like the data's tokens: the places whose outputs count.
        last: only the last output of every sequence counts.
        mask: none or causal, for the data; the mask of the target's card when left out.
        tokens: exact for one-hot tokens only, which may be narrower.
        tolerance: singular values below it, relative to the largest of their cut, count as zero.
        steps: steps of distillation on the data after truncating.
        seed: seed of the distillation's batches.
        plot: write a picture of the Hankel spectra here (.png).
    """
    loaded = load_target(target)
    found = ff.shrink(loaded, **_options(width, data, where, last, mask, loaded.card, tokens, tolerance, steps, seed))
    return _tell(found, out, plot, (loaded,), f"certify {target} {out}")


def _options(
    width: int | None,
    data: Path | None,
    where: Path | None,
    last: bool,
    mask: MaskName | None,
    card: ff.Card,
    tokens: bool,
    tolerance: float | None,
    steps: int,
    seed: int,
) -> dict[str, Any]:
    """Keyword arguments of ff.decompile and ff.shrink."""
    if data is None and (last or where is not None or mask is not None):
        raise ff.SpecError("--last, --where and --mask speak of data; give --data FILE")
    if last and where is not None:
        raise ff.SpecError("--last and --where both name the places that count; give one")
    inputs = places = None
    if data is not None:
        inputs = list(read_input(data, card.vocabulary).values())
        if last:
            places = [_last(X.shape if not X.is_floating_point() else X.shape[:-1]) for X in inputs]
        if where is not None:
            places = list(read_input(where, None).values())
    return {
        "width": width,
        "data": inputs,
        "where": places,
        "mask": "card" if mask is None else None if mask == "none" else mask,
        "tokens": tokens,
        "tolerance": tolerance,
        "steps": steps,
        "seed": seed,
        "progress": _progress,
    }


def _last(shape: tuple[int, ...]) -> Tensor:
    places = torch.zeros(shape, dtype=torch.bool)
    places[..., -1] = True
    return places


def _progress(record: DistilStep) -> None:
    if record.step % SHOWN == 0 or record.step == record.steps:
        print(
            f".. step {record.step} of {record.steps}, loss {record.loss:.2e}, {record.seconds:.1f} s", file=sys.stderr
        )


def _tell(found: ff.Decompiled, out: Path, plot: Path | None, source: tuple[Any, ...], check: str) -> int:
    save_target(found, out)
    print(f"target       {out}")
    print(found.report)
    print(f"seconds      {found.report.seconds:.2f}")
    if plot is not None:
        from fixedformer.plots import spectrum_picture

        write_atomic(plot, spectrum_picture(ff.hankel_spectrum(*source), f"read from {source[0]!r}"[:90]))
        print(f"picture      {plot}")
    if found.report.truncation is None and not found.report.distilled:
        gauge = " --tokens" if found.report.gauge == "tokens" else ""
        print(f".. check it: fixedformer {check}{gauge}", file=sys.stderr)
    return 0
