"""The definition against path space: time and peak memory of one evaluation, in one process, same threads.

    python benchmarks/engines.py [--tokens 99] [--batch 8] [--repeats 5] [--json FILE]

Rows: the paper's four shapes, sparse and random machine, float64, causal, token ids. Time: median over the repeats, the
two engines in turn. Memory: the largest sum of tensor bytes alive at once during the evaluation, by PyTorch's profiler;
what exists before (the machine's weights, the program with its kept read-outs) is not counted for either engine. For
the sparse machine the definition builds one dense m x m matrix at a time, which is counted: that is what it costs.
"""

import argparse
import json
import statistics
import sys
import time

import torch

import fixedformer as ff
from fixedformer.embedding.machine import Machine

SHAPES = {"dyck": (4, 2, 4, 24), "1-hop": (2, 2, 30, 28), "2-hop": (2, 3, 30, 28), "4-hop": (2, 4, 30, 30)}


def peak_bytes(call) -> int:
    """Largest net sum of allocations while `call` runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


def measure(machine: Machine, target: ff.Target, tokens: int, batch: int, repeats: int) -> dict[str, float]:
    program = machine.compile(target)
    X = torch.randint(target.spec.d_in, (batch, tokens), generator=torch.Generator().manual_seed(0))
    seconds: dict[str, list[float]] = {"dense": [], "path": []}
    outputs = {engine: machine.run(program, X, "causal", engine) for engine in seconds}  # warm-up; keeps the read-outs
    for _ in range(repeats):
        for engine, times in seconds.items():
            began = time.perf_counter()
            machine.run(program, X, "causal", engine)
            times.append(time.perf_counter() - began)
    middle = {engine: statistics.median(times) for engine, times in seconds.items()}
    peak = {engine: peak_bytes(lambda e=engine: machine.run(program, X, "causal", e)) for engine in seconds}
    gap = (outputs["path"] - outputs["dense"]).abs().max() / outputs["dense"].abs().max()
    return {
        "width": machine.width,
        "dense_ms": 1e3 * middle["dense"] / batch,
        "path_ms": 1e3 * middle["path"] / batch,
        "time_ratio": middle["dense"] / middle["path"],
        "dense_mb": peak["dense"] / 2**20,
        "path_mb": peak["path"] / 2**20,
        "memory_ratio": peak["dense"] / peak["path"],
        "difference": float(gap),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=99)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--shapes", nargs="*", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--json", help="also write the rows here")
    options = parser.parse_args()
    rows = []
    print(f"{torch.get_num_threads()} threads, float64, {options.tokens} tokens, batch {options.batch}; ms a sequence")
    print(f"{'shape':8}{'machine':8}{'m':>6}{'dense ms':>10}{'path ms':>10}{'ratio':>8}{'dense MB':>10}{'path MB':>9}"
          f"{'ratio':>8}{'max rel. diff':>15}")  # fmt: skip
    for name in options.shapes:
        heads, layers, d_in, d_head = SHAPES[name]
        spec = ff.TargetSpec(heads=heads, layers=layers, d_in=d_in, d_head=d_head)
        target = ff.Target.random(spec, seed=1)
        for kind, build in (("sparse", ff.SparseMachine), ("random", ff.RandomMachine)):
            print(f".. {name}, {kind}", file=sys.stderr)
            row = measure(build(spec), target, options.tokens, options.batch, options.repeats)
            rows.append({"shape": name, "machine": kind, **row})
            print(f"{name:8}{kind:8}{row['width']:6d}{row['dense_ms']:10.2f}{row['path_ms']:10.2f}"
                  f"{row['time_ratio']:7.1f}x{row['dense_mb']:10.1f}{row['path_mb']:9.1f}{row['memory_ratio']:7.1f}x"
                  f"{row['difference']:15.1e}")  # fmt: skip
    if options.json:
        with open(options.json, "w", encoding="utf-8") as out:
            json.dump(rows, out, indent=2)


if __name__ == "__main__":
    main()
