"""Interpolation by two frozen blocks, over fresh seeds: how often, how exactly, how deep, how fast; direct shooting
beside.

    OMP_NUM_THREADS=1 python benchmarks/interpolation.py                          # every case, seeds 100-109
    OMP_NUM_THREADS=1 python benchmarks/interpolation.py --sizes 1,2,2 2,3,4 --seeds 100-104
    OMP_NUM_THREADS=1 python benchmarks/interpolation.py --cases continuous causal --no-peer

X and Y are standard normal, drawn from the seed; the blocks are FrozenBlocks(d, seed=0), one pair for each d. The error
is max |end - Y| when the schedule is run again by code that the search does not use (residual steps in NumPy; DOP853 at
rtol 1e-13 for the flow). Each result is one row of OUT/rows.csv; rows that are there are not measured again, so that an
interrupted run goes on. OUT/table.md is the summary. The peer is scipy's least_squares on the durations, end point
against target, with the exact Jacobian, from the same start and at the same depth.
"""

import argparse
import contextlib
import csv
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from scipy.optimize import least_squares

import fixedformer as ff
from fixedformer.schedule.compile import ITERATIONS
from fixedformer.schedule.finish import end_jacobian
from fixedformer.schedule.maps import rollout
from fixedformer.schedule.problem import Problem, settings_for
from fixedformer.schedule.start import begin

PEER_EVALUATIONS = 60
"""Evaluations of the peer. It stalls long before: see docs/schedule.md."""
BACK = 1e6
"""Amplification, both ways, up to which the schedule, run backwards, must return X to 1e-6."""


@dataclass(frozen=True)
class Case:
    """One row of the table: sequences, tokens, d; `need` of ten seeds within `tolerance`."""

    name: str
    size: tuple[int, int, int]
    tolerance: float
    need: int
    mode: str = "finite"
    kind: str = "free"
    max_seconds: float | None = None
    attempts: int | None = None


CASES = (
    Case("finite 1,2,2", (1, 2, 2), 1e-9, 9),
    Case("finite 2,3,2", (2, 3, 2), 1e-7, 8),
    Case("finite 2,3,4", (2, 3, 4), 1e-7, 8),
    Case("finite 2,4,4", (2, 4, 4), 1e-8, 8),
    Case("finite 4,3,4", (4, 3, 4), 1e-6, 5),
    Case("finite 4,4,4", (4, 4, 4), 1e-6, 5),
    Case("continuous 2,3,4", (2, 3, 4), 1e-5, 6, mode="continuous"),
    Case("causal 2,3,3, N < d", (2, 3, 3), 1e-7, 7, kind="causal"),
    Case("causal 3,3,3, N = d, det > 0", (3, 3, 3), 1e-7, 5, kind="causal"),
    Case("causal 2,3,3, shared begin token", (2, 3, 3), 1e-7, 6, kind="begin"),
    Case("causal 3,3,3, shared begin token", (3, 3, 3), 1e-7, 0, kind="begin"),
    Case("finite 8,4,4 (D = 128)", (8, 4, 4), 1e-6, 0, attempts=1),
)
FIELDS = (
    "case", "seed", "status", "error", "tolerance", "solved", "amplification", "backwards amplification", "depth",
    "depth per D", "max eta", "duration", "steps", "restarts", "wall seconds", "cpu seconds", "backwards error",
    "extended error", "peer error", "peer cpu seconds",
)  # fmt: skip


def draw(case: Case, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """X and Y, standard normal; first tokens made feasible where attention is causal and they are not free."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(case.size, generator=generator, dtype=torch.float64)
    Y = torch.randn(case.size, generator=generator, dtype=torch.float64)
    if case.kind == "begin":
        X[:, 0], Y[:, 0] = X[0, 0].clone(), Y[0, 0].clone()
    elif case.kind == "causal" and case.size[0] == case.size[2]:
        sign = torch.sign(torch.linalg.det(X[:, 0]) * torch.linalg.det(Y[:, 0]))
        Y[0, 0] *= sign  # the determinant of the first tokens' map must be positive
    return X, Y


def measure(case: Case, seed: int, peer: bool, max_seconds: float | None) -> dict[str, object]:
    """One row."""
    N, n, d = case.size
    X, Y = draw(case, seed)
    blocks = ff.FrozenBlocks(d, causal=case.kind != "free")
    warm(blocks, case.mode)
    wall, cpu = time.perf_counter(), time.process_time()
    schedule = blocks.compile(
        X, Y, case.tolerance, case.mode, max_seconds=max_seconds, attempts=case.attempts, seed=seed
    )
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    report = schedule.report
    error = np.inf if report["error"] is None else report["error"]
    amplification = np.inf if report["amplification"] is None else report["amplification"]
    loud_back = np.inf if report["amplification backwards"] is None else report["amplification backwards"]
    row: dict[str, object] = {
        "case": case.name,
        "seed": seed,
        "status": report["status"],
        "error": f"{error:.2e}",
        "tolerance": f"{case.tolerance:.0e}",
        "solved": int(error <= case.tolerance),
        "amplification": f"{amplification:.1e}",
        "backwards amplification": f"{loud_back:.1e}",
        "depth": schedule.depth if case.mode == "finite" else "",
        "depth per D": schedule.depth // (N * n * d) if case.mode == "finite" else "",
        "max eta": f"{schedule.largest_eta:.3f}" if case.mode == "finite" else "",
        "duration": f"{schedule.duration:.1f}",
        "steps": sum(entry["steps"] for entry in report["attempts"]),
        "restarts": report["restarts"],
        "wall seconds": f"{wall:.1f}",
        "cpu seconds": f"{cpu:.1f}",
        "extended error": f"{report['extended error']:.1e}" if "extended error" in report else "",
    }
    if max(amplification, loud_back) < BACK:
        try:
            back = blocks.run(schedule, blocks.run(schedule, X), backwards=True)
            row["backwards error"] = f"{float((back - X).abs().max()):.1e}"
        except ff.SpecError:  # a step that could not be undone counts as the worst error
            row["backwards error"] = "inf"
    if peer and case.mode == "finite":
        row["peer error"], row["peer cpu seconds"] = shoot_directly(blocks, X.numpy(), Y.numpy(), seed)
    return row


def warm(blocks: ff.FrozenBlocks, mode: str) -> None:
    """Compile or load the machine code, so that no row pays for it."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(1, 2, blocks.d, generator=generator, dtype=torch.float64)
    schedule = blocks.compile(X, X, 1.0, mode, max_depth=512, iterations=1, attempts=1)
    with contextlib.suppress(ff.SpecError):
        blocks.run(schedule, blocks.run(schedule, X), backwards=True)


def shoot_directly(blocks: ff.FrozenBlocks, X: np.ndarray, Y: np.ndarray, seed: int) -> tuple[str, str]:
    """Error and CPU seconds of scipy's least_squares (trf) on the durations alone."""
    settings = settings_for(blocks.d, X.size, "finite", 0.1, None, iterations=ITERATIONS)
    arrays = blocks.arrays
    problem = Problem(arrays.scores, arrays.values, arrays.causal, X, Y, "finite", 1e-9, seed, 1, settings)
    start, (flat, target) = begin(problem, 0).durations, problem.flat
    shape, size = start.shape, flat.shape[1]

    def residual(t: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            end = rollout(problem.maps, flat, t.reshape(shape))[1]
        return np.nan_to_num((end - target).reshape(-1), nan=1e6, posinf=1e6, neginf=-1e6)

    def jacobian(t: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            nodes, _ = rollout(problem.maps, flat, t.reshape(shape))
            _, tangents = problem.maps(nodes, t.reshape(shape), "all")
            found = end_jacobian(tangents[..., :size], tangents[..., size:]).reshape(flat.size, -1)
        return np.nan_to_num(found, nan=0.0, posinf=1e12, neginf=-1e12)

    began = time.process_time()
    bounds = (-settings.largest, settings.largest)
    # trf needs an SVD of the whole Jacobian at every step; with "lsmr" it needs only products with it.
    solver = "exact" if start.size * flat.size < 5e3 else "lsmr"
    found = least_squares(
        residual, start.reshape(-1), jacobian, bounds, "trf", max_nfev=PEER_EVALUATIONS, tr_solver=solver
    )
    return f"{np.abs(residual(found.x)).max():.2e}", f"{time.process_time() - began:.1f}"


def infeasible() -> Iterator[tuple[str, str]]:
    """Problems without solution, and what is said of them."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    X, Y = normal(2, 3, 3), normal(2, 3, 3)
    tied, twice, zero = X.clone(), X.clone(), X.clone()
    tied[1], twice[0, 1] = X[0, [2, 0, 1]], X[0, 0]
    zero[0, 0] = 0
    free, causal = ff.FrozenBlocks(3), ff.FrozenBlocks(3, causal=True)
    yield "two sequences with the same tokens, other targets", str(free.check_feasible(tied, Y))
    yield "equal tokens in X, not in Y", str(free.check_feasible(twice, Y))
    yield "d = 1, another order", str(ff.FrozenBlocks(1).check_feasible(
        torch.tensor([[[0.0], [1.0]]]), torch.tensor([[[1.0], [0.0]]])))  # fmt: skip
    yield "one token, more sequences than d", str(free.check_feasible(normal(4, 1, 3), normal(4, 1, 3)))
    yield "causal, a shared prefix in X only", str(causal.check_feasible(torch.stack([X[0], X[0]]), Y))
    yield "causal, a zero first token", str(causal.check_feasible(zero, Y))
    first, last = normal(3, 3, 3), normal(3, 3, 3)
    last[0, 0] *= -torch.sign(torch.linalg.det(first[:, 0]) * torch.linalg.det(last[:, 0]))
    yield "causal, N = d, det < 0", str(causal.check_feasible(first, last))
    yield "causal, N > d, first tokens not linear", str(causal.check_feasible(normal(4, 3, 3), normal(4, 3, 3)))


def main() -> int:
    arguments = parse()
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "rows.csv"
    done = {(row["case"], int(row["seed"])) for row in rows_of(path)}
    chosen = [case for case in CASES if wanted(case, arguments)]
    jobs = [(case, seed) for case in chosen for seed in arguments.seeds if (case.name, seed) not in done]
    for row in results(jobs, arguments):
        append(path, row)
        print(json.dumps(row) if arguments.json else line(row), flush=True)
    if not arguments.json:
        for what, reason in infeasible():
            print(f"refused: {what}: {reason}")
    text = table(rows_of(path))
    (arguments.out / "table.md").write_text(text)
    print(json.dumps({"table": text}) if arguments.json else text)
    return 0


def results(jobs: list[tuple[Case, int]], arguments: argparse.Namespace) -> Iterator[dict[str, object]]:
    options = (not arguments.no_peer, arguments.max_seconds)
    if arguments.processes == 1:
        for case, seed in jobs:
            yield measure(case, seed, *options)
        return
    with ProcessPoolExecutor(arguments.processes, get_context("spawn")) as pool:
        for future in [pool.submit(measure, case, seed, *options) for case, seed in jobs]:
            yield future.result()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="*", help="finite cases by size, such as 2,3,4; all cases when left out")
    parser.add_argument("--cases", nargs="*", help="cases whose name starts with one of these")
    parser.add_argument("--seeds", type=seeds, default=seeds("100-109"), help="such as 100-109 or 3,5")
    parser.add_argument(
        "--out", type=Path, default=Path("results/interpolation"), help="folder of rows.csv and table.md"
    )
    parser.add_argument("--no-peer", action="store_true", help="leave direct shooting out")
    parser.add_argument("--processes", type=int, default=1, help="seeds measured at the same time")
    parser.add_argument("--max-seconds", type=float, help="end each search after this time, with the best so far")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    return parser.parse_args()


def wanted(case: Case, arguments: argparse.Namespace) -> bool:
    if arguments.sizes is None and arguments.cases is None:
        return True
    by_size = case.name in {f"finite {size}" for size in arguments.sizes or ()}
    return by_size or any(case.name.startswith(start) for start in arguments.cases or ())


def seeds(text: str) -> list[int]:
    found = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def rows_of(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def append(path: Path, row: dict[str, object]) -> None:
    new = not path.exists()
    with path.open("a", newline="") as stream:
        writer = csv.DictWriter(stream, FIELDS)
        if new:
            writer.writeheader()
        writer.writerow(row)
        stream.flush()
        os.fsync(stream.fileno())


def line(row: dict[str, object]) -> str:
    return (
        f"{row['case']:<34} seed {row['seed']}  {row['status']:<10} error {row['error']}  amplification "
        f"{row['amplification']}  depth {row['depth']}  {row['cpu seconds']} s cpu, {row['wall seconds']} s  restarts "
        f"{row['restarts']}  peer {row.get('peer error', '')}"
    )


def table(rows: list[dict[str, str]]) -> str:
    """The summary as Markdown: one line a case."""
    head = ("case", "tolerance", "solved", "needed", "error: median, worst", "amplification", "depth",
            "CPU s: median, worst", "wall s: worst", "restarts", "backwards: worst",
            "direct shooting: solved, best")  # fmt: skip
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for case in CASES:
        own = [row for row in rows if row["case"] == case.name]
        if not own:
            continue
        errors, loud, cpu, wall = (
            sorted(float(row[name]) for row in own)
            for name in ("error", "amplification", "cpu seconds", "wall seconds")
        )
        back = [float(row["backwards error"]) for row in own if row["backwards error"] and int(row["solved"])]
        peers = [float(row["peer error"]) for row in own if row["peer error"]]
        peer = f"{sum(e <= case.tolerance for e in peers)}/{len(peers)}, {min(peers):.0e}" if peers else "-"
        depth = f"{own[0]['depth']} = {own[0]['depth per D']} D" if own[0]["depth"] else "-"
        need = f"{case.need}/10" if case.need else "-"
        cells = (case.name, f"{case.tolerance:.0e}", f"{sum(int(row['solved']) for row in own)}/{len(own)}", need,
                 f"{np.median(errors):.0e}, {errors[-1]:.0e}", f"{loud[0]:.0e} .. {loud[-1]:.0e}", depth,
                 f"{np.median(cpu):.0f}, {cpu[-1]:.0f}", f"{wall[-1]:.0f}", sum(int(row["restarts"]) for row in own),
                 f"{max(back):.0e}" if back else "-", peer)  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
