"""Files of either kind, attention alone or real blocks, for the commands that serve both."""

from pathlib import Path
from typing import Any

import fixedformer as ff
from fixedformer import storage
from fixedformer.capacity import readable


def any_target(path: Path) -> Any:
    """The `Target` or `BlockTarget` that a file holds."""
    return ff.load_block_target(path) if _blocks(path) else ff.load_target(path)


def any_program(path: Path) -> tuple[Any, Any]:
    """A file's program, and the machine that it names."""
    if _blocks(path):
        program = ff.load_block_program(path)
        return program, ff.build_block_machine(program.spec, program.machine)
    plain = ff.load_program(path)
    return plain, ff.build_machine(plain.spec, plain.machine)


def block_machine(
    spec: ff.BlockSpec, kind: str, looped: bool, width: int | None, seed: int, distribution: str, neurons: float
) -> ff.SparseBlockMachine | ff.RandomBlockMachine:
    """The machine that the options of `compile` ask for."""
    if kind == "sparse":
        if width is not None:
            raise ff.SpecError("a sparse machine with MLPs has one width: leave --width out")
        return ff.SparseBlockMachine(spec, looped=looped)
    if distribution == "orthogonal":
        raise ff.SpecError("a random machine with MLPs is drawn 'uniform' or 'gaussian', not 'orthogonal'")
    drawn: Any = distribution
    return ff.RandomBlockMachine(spec, seed, width, neurons, looped, drawn)


def keep(program: ff.BlockProgram, machine: Any, out: Path) -> None:
    """Write the program and say what it took."""
    ff.save_block_program(program, out)
    report = program.report
    print(f"program      {out}")
    print(f"machine      {machine!r}, fingerprint {program.machine_fingerprint[:16]}")
    print(f"embedding    {machine.spec.d_in} x {report.width} and {report.constants} constants, "
          f"{readable(report.bytes)}, {report.ratio:.3g} times the target")  # fmt: skip
    print(f"condition    {report.condition:.3g}, neurons {report.neuron_condition:.3g}")
    print(f"residual     {report.residual:.1e} of |E| |P_0|, entry by entry")
    print(f"seconds      {report.seconds:.2f}")


def _blocks(path: Path) -> bool:
    return storage.read_header(path).kind.startswith("block ")
