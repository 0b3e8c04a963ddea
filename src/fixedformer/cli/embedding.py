"""compile, run, certify: the three verbs of the embedding family on files."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import torch
from cyclopts import Parameter
from torch import Tensor

import fixedformer as ff
from fixedformer import storage
from fixedformer.capacity import readable
from fixedformer.cli.blocks import any_program, any_target, block_machine
from fixedformer.cli.blocks import keep as keep_blocks
from fixedformer.cli.data import check_output, read_input, write_output
from fixedformer.cli.options import Seed
from fixedformer.embedding.dense import Distribution
from fixedformer.embedding.files import build_machine, load_program, save_program
from fixedformer.embedding.machine import Machine
from fixedformer.files import load_target

MaskName = Literal["none", "causal"]
Kind = Literal["sparse", "random"]
Out = Annotated[Path, Parameter(name=["--out", "-o"])]


def compile_(
    target: Path,
    *,
    out: Out,
    machine: Kind = "sparse",
    looped: bool = False,
    width: int | None = None,
    seed: Seed = 0,
    distribution: Distribution = "uniform",
    neurons_per_target: float = 1.0,
) -> int:
    """Turn TARGET into the program (input embedding) of a fixed machine, and say what it took.

    Args:
        target: a target file (fixedformer.save_target).
        out: where the program goes.
        machine: sparse ({0,1} weights) or random (drawn once from the seed).
        looped: one set of machine weights for all layers.
        width: width of the machine; the smallest that serves when left out.
        seed: seed of the random machine.
        distribution: how the random machine is drawn.
        neurons_per_target: targets with MLPs on random machines: 1.5 keeps the neurons well conditioned.
    """
    source = any_target(target)
    _refuse_random_options(machine, seed, distribution, neurons_per_target)
    if isinstance(source, ff.BlockTarget):
        blocks = block_machine(source.spec, machine, looped, width, seed, distribution, neurons_per_target)
        _note(f"compiling onto {blocks!r}")
        keep_blocks(blocks.compile(source), blocks, out)
        return 0
    if neurons_per_target != 1.0:
        raise ff.SpecError("--neurons-per-target is for targets with MLPs; this one has none")
    built = _build(source.spec, machine, looped, width, seed, distribution, source.dtype)
    _note(f"compiling onto {built!r}")
    _keep(built.compile(source), built, out)
    return 0


def _refuse_random_options(machine: Kind, seed: int, distribution: Distribution, neurons: float = 1.0) -> None:
    """SpecError for options of random machines that a sparse one, which is never drawn, would ignore."""
    given = {"--seed": seed != 0, "--distribution": distribution != "uniform", "--neurons-per-target": neurons != 1.0}
    named = [flag for flag, differs in given.items() if differs]
    if machine == "sparse" and named:
        raise ff.SpecError(f"{', '.join(named)}: for random machines only; add --machine random, or leave it out")


def port(
    program: Path,
    *,
    out: Out,
    machine: Kind = "random",
    looped: bool = False,
    width: int | None = None,
    seed: Seed = 0,
    distribution: Distribution = "uniform",
) -> int:
    """Turn PROGRAM, compiled or trained on one machine, into the program of another that does the same.

    Args:
        program: a program file.
        out: where the new program goes.
        machine: sparse or random.
        looped: one set of machine weights for all layers.
        width: width of the machine; the smallest that serves when left out.
        seed: seed of the random machine.
        distribution: how the random machine is drawn.
    """
    _refuse_random_options(machine, seed, distribution)
    loaded = load_program(program)
    here = build_machine(loaded.spec, loaded.machine)
    there = _build(loaded.spec, machine, looped, width, seed, distribution, loaded.dtype)
    _note(f"porting from {here!r} to {there!r}")
    _keep(there.port(loaded, here), there, out)
    return 0


def run(
    program: Path,
    input_: Annotated[Path, Parameter(name="INPUT")],
    *,
    out: Out,
    mask: MaskName | None = None,
    engine: Literal["auto", "dense", "path"] = "auto",
) -> int:
    """Run PROGRAM on INPUT and write the outputs.

    Args:
        program: a program file.
        input_: .npy or .safetensors (token ids or vectors), or .txt with one token sequence a line where the program
            has a vocabulary (single-character tokens need no spaces).
        out: .npy or .safetensors for outputs (tokens, d_out); .txt for the likeliest token at every place.
        mask: none or causal; the mask the target was trained with when left out.
        engine: auto counts the cost and takes the cheaper; dense is the definition; path the fast evaluation.
    """
    loaded, built = any_program(program)
    chosen = _mask(mask, loaded.card)
    named = read_input(input_, loaded.card.vocabulary)
    check_output(out, named, input_, loaded.card.vocabulary, loaded.spec.d_out)
    outputs: dict[str, Tensor] = {name: built.run(loaded, X, chosen, engine) for name, X in named.items()}
    write_output(out, outputs, input_, loaded.card.vocabulary)
    _note(f"{len(outputs)} input{'s' if len(outputs) > 1 else ''}, mask {chosen or 'none'}")
    print(out)
    return 0


def certify(
    program: Path,
    target: Path,
    *,
    input_: Annotated[Path | None, Parameter(name="--input")] = None,
    mask: MaskName | None = None,
    seed: Seed = 0,
    tolerance: float | None = None,
    read_back: bool = False,
    tokens: bool = False,
    json: Path | None = None,
) -> int:
    """Check PROGRAM against TARGET. Exit status 0: the certificate holds; 1: it does not; 2: bad usage or file.

    Args:
        program: a program file (or, for what shrink made, the target file that it was made from).
        target: the target file that it should compute.
        input_: inputs to measure on (as for run); sampled from the seed when left out.
        mask: none or causal; the mask the target was trained with when left out.
        seed: seed of the sampled inputs.
        tolerance: replaces the derived bound of the sampled checks (a compiled program's only).
        read_back: TARGET was made from PROGRAM by decompile, not PROGRAM from TARGET by compile.
        tokens: with what decompile or shrink made: they need be equal for one-hot tokens only.
        json: also write the certificate here as JSON.
    """
    source = any_target(target)
    shrunk = storage.read_header(program).kind == "target"
    inputs = None
    if input_ is not None:
        named = list(read_input(input_, source.card.vocabulary).values())
        if len(named) != 1:
            raise ff.SpecError(
                f"{input_}: certify takes one array of inputs (sequences of one length), got {len(named)}"
            )
        inputs = named[0]
    chosen = _mask(mask, source.card)
    if tolerance is not None and (shrunk or read_back):
        raise ff.SpecError("--tolerance replaces bounds of a compiled program; what was read back has its own")
    if tokens and not (shrunk or read_back):
        raise ff.SpecError("--tokens is for what decompile or shrink made; add --read-back for a program")
    certificate: ff.Certificate
    if shrunk or read_back:
        if isinstance(source, ff.BlockTarget):
            raise ff.SpecError(f"{target}: a target with MLPs or norms; decompile and shrink make attention-only ones")
        first = load_target(program) if shrunk else _attention_program(program)
        certificate = ff.certify_equal(first, source, inputs, chosen, seed, tokens)
    else:
        loaded, built = any_program(program)
        certificate = built.certify(loaded, source, inputs, chosen, seed, tolerance)
    print(certificate)
    if json is not None:
        storage.write_atomic(json, certificate.to_json().encode())
    return 0 if certificate.holds else 1


def _build(
    spec: ff.TargetSpec,
    kind: Kind,
    looped: bool,
    width: int | None,
    seed: int,
    distribution: Distribution,
    dtype: torch.dtype,
) -> Machine:
    if kind == "sparse":
        return ff.SparseMachine(spec, looped=looped, width=width)
    return ff.RandomMachine(spec, seed, width, looped, distribution, dtype)


def _keep(program: ff.Program, machine: Machine, out: Path) -> None:
    """Write the program and say what it took."""
    save_program(program, out)
    report = program.report
    size = f"{machine.spec.d_in} x {report.width}, {readable(report.bytes)}"
    print(f"program      {out}")
    print(f"machine      {machine!r}, fingerprint {program.machine_fingerprint[:16]}")
    print(f"embedding    {size}, largest entry {report.norm:.3g}")
    print(f"condition    {report.condition:.3g}")
    print(f"residual     {report.residual:.1e} of |E| |R_all|, entry by entry")
    print(f"seconds      {report.seconds:.2f}")


def _attention_program(path: Path) -> tuple[Machine, ff.Program]:
    loaded = load_program(path)
    return build_machine(loaded.spec, loaded.machine), loaded


def _mask(mask: MaskName | None, card: ff.Card) -> Literal["causal"] | None:
    return card.mask if mask is None else "causal" if mask == "causal" else None


def _note(message: str) -> None:
    print(f".. {message}", file=sys.stderr)
