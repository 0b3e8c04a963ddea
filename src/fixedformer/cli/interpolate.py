"""interpolate: two frozen attention blocks and a schedule that carries given sequences to given targets."""

import sys
import time
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from torch import Tensor

import fixedformer as ff
from fixedformer.cli.data import need_folder, read_input
from fixedformer.cli.interpolate_pictures import animation, trajectory_picture
from fixedformer.cli.options import Seed
from fixedformer.errors import SpecError
from fixedformer.schedule.relax import Record
from fixedformer.schedule.solve import Search
from fixedformer.storage import write_atomic

QUIET_SECONDS = 2.0
"""Nothing is said on stderr before this, nor more often."""


def interpolate(
    x: Annotated[Path, Parameter(name="X")],
    y: Annotated[Path, Parameter(name="Y")],
    *,
    out: Annotated[Path, Parameter(name=["--out", "-o"])],
    mode: Literal["finite", "continuous"] = "finite",
    tolerance: float = 1e-8,
    eta_max: float = 0.1,
    max_depth: int | None = None,
    max_seconds: float | None = None,
    causal: bool = False,
    blocks: Seed = 0,
    scale: float | None = None,
    seed: Seed = 0,
    attempts: int | None = None,
    iterations: int | None = None,
    resume: Path | None = None,
    rigorous: bool = False,
    picture: Path | None = None,
    animate: Annotated[Path | None, Parameter(name="--animation")] = None,
    json: Path | None = None,
) -> int:
    """Find the order, signs and durations of two frozen attention blocks that carry X to Y, and certify them.

    Exit status: 0 the certificate holds, 1 it does not (the best schedule found is written, and a search that can be
    resumed beside it), 2 bad input or a problem without solution, with the reason.

    Args:
        x: .npy or .safetensors with the inputs (sequences, tokens, d).
        y: the targets, in the same shape.
        out: where to write the schedule.
        mode: finite (residual steps) or continuous (the flow).
        tolerance: the largest allowed |end - Y|, by running the schedule again.
        eta_max: the largest |eta| of a residual step.
        max_depth: the most residual steps; default 256 for each of the sequences * tokens * d numbers.
        max_seconds: stop after this time with the best so far.
        causal: each token attends to itself and earlier ones.
        blocks: seed that the two blocks are drawn from; the same blocks serve every X and Y.
        scale: size of the blocks' score matrices; default 16/d.
        seed: of the search.
        attempts: how often the search may start again.
        iterations: steps of each attempt.
        resume: an unfinished search to go on with (OUT.search).
        rigorous: also prove the end point with ball arithmetic (finite depth, small problems).
        picture: write a PNG of the tokens' paths from X to Y.
        animate: write a GIF of the tokens on their way.
        json: where to write the certificate.
    """
    if rigorous and mode != "finite":
        raise SpecError("--rigorous encloses residual steps; it needs --mode finite")
    for path in (out, picture, animate, json):
        if path is not None:
            need_folder(path)
    sources, targets = _array(x), _array(y)
    machine = ff.FrozenBlocks(sources.shape[-1] if sources.ndim else 1, blocks, scale, causal)
    unfinished = out.with_name(f"{out.name}.search")
    progress, saved = Progress(), False

    def checkpoint(search: Search) -> None:
        nonlocal saved
        saved = True
        ff.save_search(search, unfinished)

    schedule = machine.compile(
        sources,
        targets,
        tolerance,
        mode,
        eta_max,
        max_seconds,
        max_depth=max_depth,
        seed=seed,
        attempts=attempts,
        iterations=iterations,
        resume=None if resume is None else ff.load_search(resume),
        progress=progress,
        checkpoint=checkpoint,
    )
    ff.save_schedule(machine, schedule, out)
    certificate = machine.certify(schedule, sources, targets, rigorous=rigorous)
    if json is not None:
        write_atomic(json, certificate.to_json().encode())
    if picture is not None:
        write_atomic(picture, trajectory_picture(machine, schedule, sources, targets))
    if animate is not None:
        write_atomic(animate, animation(machine, schedule, sources, targets))
    show(machine, schedule, out)
    print(f"\n{certificate}")
    status, returns = schedule.report["status"], schedule.report["backwards error"]
    if status != "solved":
        used = schedule.report["restarts"] + 1
        more = f" --attempts {2 * used} (the {used} of this search are used up)" if status == "exhausted" else ""
        print(f"not solved ({status}); go on with --resume {unfinished}{more}", file=sys.stderr)
    elif saved and not certificate.holds and returns is not None:
        print(f"solved, but backwards it is off by {returns:.1e}; go on with --resume {unfinished}", file=sys.stderr)
    elif saved:
        unfinished.unlink(missing_ok=True)  # a checkpoint on the way to this solution
    return 0 if certificate.holds else 1


class Progress:
    """Says on stderr, now and then, the phase, how far the joints gape and how much errors are amplified."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def __call__(self, record: Record) -> None:
        now = time.monotonic()
        if now - self._last < QUIET_SECONDS:
            return
        self._last = now
        print(f".. attempt {record.attempt + 1}, {_step(record)}", file=sys.stderr, flush=True)


def _step(record: Record) -> str:
    """What a step did, in words."""
    if record.phase == "unfold":
        return f"solved; steps that cannot be undone are moved, try {record.iteration + 1}: {record.residual:.0f} left"
    if record.phase in ("lead", "led"):
        return f"words for the first tokens alone, try {record.iteration + 1}"
    amplified = "" if record.amplification != record.amplification else f", amplification {record.amplification:.2g}"
    return f"{record.phase} {record.iteration}: residual {record.residual:.2g}{amplified}"


def show(machine: ff.FrozenBlocks, schedule: ff.Schedule, out: Path) -> None:
    """Print what was found."""
    report = schedule.report
    amplification = report["amplification"]
    steps = f"depth {schedule.depth}, |eta| <= {schedule.largest_eta:.3f}" if schedule.mode == "finite" else "the flow"
    print(f"blocks       {machine!r}, fingerprint {machine.fingerprint()[:16]} (no task changes them)")
    print(f"schedule     {out}: {len(schedule.durations)} segments, {steps}, total time {schedule.duration:.1f}")
    print(f"status       {report['status']}, after {report['restarts']} restart(s), {report['seconds']:.1f} s")
    print(f"error        {_text(report['error'])} ({report['judged by']})")
    print(f"amplified    {_text(amplification)}, an error at the start has grown by this at the end")
    if report["backwards error"] is not None:
        print(f"backwards    returns X to {_text(report['backwards error'])}")


def _text(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.1e}"


def _array(path: Path) -> Tensor:
    if path.suffix not in (".npy", ".safetensors"):
        raise SpecError(f"{path}: sequences are a .npy or .safetensors file, got '{path.suffix}'")
    found = read_input(path, None)
    if len(found) != 1:
        raise SpecError(f"{path}: needed one tensor (sequences, tokens, d), the file holds {', '.join(sorted(found))}")
    return next(iter(found.values()))
