"""Programs read back: exactness and speed over shapes and machines, the shipped program by width, deep targets.

    python benchmarks/decompile.py exact     # random programs: widths, errors, seconds; about two minutes
    python benchmarks/decompile.py dyck [--strings 10000] [--train 500] [--seed 0] [--machine sparse random]
    python benchmarks/decompile.py dyck --programs runs/dyck/program.safetensors ...      # trained programs
    python benchmarks/decompile.py hop --target runs/1-hop/target.safetensors --hops 1     # a trained k-hop target
    python benchmarks/decompile.py shrink    # targets whose programs could not be built

Everything in float64, one process. exact: error is the largest change of any kind of read-out column over all paths;
"outputs" the largest difference of outputs on 4 x 12 random tokens, relative, causal. dyck: agreement with the program
on fresh strings, at "?", and on strings twice as long as any it was trained on.
"""

import argparse
import sys
import time

import numpy as np
import torch

import fixedformer as ff
from fixedformer.embedding.program import CompileReport
from fixedformer.embedding.study import width_study
from fixedformer.experiments.demo import shipped_target
from fixedformer.tasks.dyck import Dyck
from fixedformer.tasks.khop import KHop

SHAPES = [
    (4, 2, 4, 24, 4), (2, 2, 30, 28, 30), (2, 3, 30, 28, 30), (2, 4, 30, 30, 30), (1, 4, 5, 2, 3), (3, 3, 2, 2, 5),
    (2, 3, 5, 4, 2), (3, 2, 4, 6, 4), (1, 1, 6, 2, 6), (4, 3, 2, 2, 1),
]  # fmt: skip
KINDS = ("sparse", "looped", "random 1.5N", "random N/2", "residual", "rotary")


def random_program(kind: str, shape: tuple[int, ...]):
    """A machine and a program of Gaussian entries, as if trained."""
    heads, layers, d_in, d_head, d_out = shape
    spec = ff.TargetSpec(heads, layers, d_in, d_head, d_out, kind == "residual", "rotary" if kind == "rotary" else None)
    smallest = ff.widths(spec).minimal
    if "random" in kind:
        machine = ff.RandomMachine(spec, width=3 * smallest // 2 if "1.5" in kind else smallest // 2)
    else:
        machine = ff.SparseMachine(spec, looped=kind == "looped")
    size = 2 * d_in**-0.5 if "random" in kind else 0.5
    draw = torch.randn(d_in, machine.width, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * size
    report = CompileReport(machine.width, smallest, draw.nbytes, 1.0, 0.0, float(draw.abs().max()), 0.0)
    return machine, ff.Program(draw, spec, machine.describe(), machine.fingerprint(), report)


def exact() -> None:
    print(
        f"{'H L d_in d d_out':18}{'machine':13}{'m':>6}{'width':>7}{'d_value':>8}{'error':>9}{'outputs':>9}{'ms':>8}"
        "  ranks"
    )
    for shape in SHAPES:
        for kind in KINDS:
            machine, program = random_program(kind, shape)
            began = time.perf_counter()
            target = ff.decompile(machine, program)
            seconds = time.perf_counter() - began
            X = torch.randint(shape[2], (4, 12), generator=torch.Generator().manual_seed(1))
            wanted = machine.run(program, X, "causal")
            gap = float((target(X, "causal") - wanted).abs().max() / wanted.abs().max())
            report = target.report
            print(f"{' '.join(map(str, shape)):18}{kind:13}{machine.width:6d}{report.width:7d}{report.d_value:8d}"
                  f"{report.error:9.0e}{gap:9.0e}{1e3 * seconds:8.1f}  {' '.join(map(str, report.ranks))}")  # fmt: skip


def dyck(strings: int, train: int, seed: int, machines: list[str], programs: list[str]) -> None:
    task = Dyck()
    sets = {
        name: task.sample(count, np.random.default_rng([seed, stream]))
        for name, (task, count, stream) in {
            "train": (task, train, 4_000_000),
            "fresh": (task, strings, 4_000_001),
            "longer": (Dyck(pairs=60), strings // 10, 4_000_002),
        }.items()
    }
    pairs = {name: (examples.inputs, examples.scored) for name, examples in sets.items()}
    first = pairs.pop("train")
    for name, machine, program in dyck_programs(seed, machines, programs):
        print(f"\n{name} on {machine!r}; weights from {train} strings (seed {seed})")
        print(f"{'width':>5} {'weights':8}{'read-outs':>10}  agreement on fresh strings; on longer ones")
        for row in width_study(machine, program, first, pairs, (3, 4, 5, 6, 8, 12), "causal"):
            told = "; ".join(f"{a.same} of {a.places} ({a.share:.2%})" for a in row.agreements.values())
            print(f"{row.width:5d} {row.weighting:8}{row.distance:10.1e}  {told}")
            sys.stdout.flush()
        whole = ff.hankel_spectrum(machine, program)
        seen = ff.hankel_spectrum(machine, program, first[0], mask="causal")
        for kind, spectra in (("all paths alike", whole), ("on the data", seen)):
            values = spectra[1] / spectra[1][0]
            print(f"after layer 1, {kind}: " + " ".join(f"{value:.0e}" for value in values.tolist()))


def dyck_programs(seed: int, machines: list[str], programs: list[str]):
    """The shipped target's program on each kind of machine, or trained programs from their files."""
    for path in programs:
        program = ff.load_program(path)
        yield f"trained program {path}", ff.build_machine(program.spec, program.machine), program
    if programs:
        return
    target = shipped_target()
    for kind in machines:
        if kind == "sparse":
            machine = ff.SparseMachine(target.spec)
        else:
            machine = ff.RandomMachine(target.spec, seed, width=1536)
        yield "the shipped target", machine, machine.compile(target)


def hop(path: str, hops: int, strings: int, seed: int) -> None:
    """A trained k-hop target on the tokens and labels that occur: its exact width, and what both answer."""
    target, task = ff.load_target(path).to(torch.float64), KHop(hops)
    tokens = [*range(task.characters), task.characters + hops - 1]
    labels = [*range(task.characters), task.blank, task.none]
    small = ff.shrink(target.on_tokens(tokens, labels))
    print(small.report)
    place = torch.full((task.blank,), -1)
    place[tokens] = torch.arange(len(tokens))
    examples = task.sample(strings, np.random.default_rng([seed, 4_000_003]))
    same = right = total = 0
    for X, label in zip(torch.from_numpy(examples.inputs).split(200), torch.from_numpy(examples.labels).split(200)):
        told = torch.tensor(labels)[small(place[X], "causal").argmax(-1)]
        same += int((told == target(X, "causal").argmax(-1)).sum())
        right += int((told == label).sum())
        total += told.numel()
    counts = [sum(tensor.numel() for tensor in t.weights.named().values()) for t in (target, small)]
    print(f"{task.name}: {same} of {total} predictions as the target's, accuracy {right / total:.2%}, "
          f"parameters {counts[0]} -> {counts[1]}")  # fmt: skip


def shrink() -> None:
    print(f"{'H L d_in d':12}{'kind':10}{'program columns':>16}{'d_model':>9}{'width':>7}{'error':>9}{'ms':>8}")
    for heads, layers, d_in, d_head, hidden, residual in (
        (4, 12, 6, 3, 40, False), (4, 12, 6, 3, 40, True), (8, 24, 10, 8, 128, False), (8, 24, 10, 8, 128, True),
    ):  # fmt: skip
        spec = ff.TargetSpec(heads, layers, d_in, d_head, d_in, residual)
        small = ff.Target.random(spec, seed=1, d_model=d_in)
        generator = torch.Generator().manual_seed(2)
        basis = torch.linalg.qr(torch.randn(hidden, hidden, generator=generator, dtype=torch.float64)).Q
        w, inverse = small.weights.named(), basis.mT[:, :d_in]
        wide = {name: inverse @ w[name] for name in ("query", "key", "value", "unembed")}
        wide |= {name: w[name] @ basis[:d_in] for name in ("output", "embed")}
        found = ff.shrink(ff.Target(spec, **wide))
        print(f"{f'{heads} {layers} {d_in} {d_head}':12}{'residual' if residual else 'plain':10}"
              f"{ff.widths(spec).minimal:16.1e}{hidden:9d}{found.report.width:7d}{found.report.error:9.0e}"
              f"{1e3 * found.report.seconds:8.1f}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["exact", "dyck", "hop", "shrink"])
    parser.add_argument(
        "--programs", nargs="*", default=[], help="dyck: trained program files, instead of the shipped one"
    )
    parser.add_argument("--target", help="hop: a trained target file")
    parser.add_argument("--hops", type=int, default=1)
    parser.add_argument("--strings", type=int, default=10_000)
    parser.add_argument("--train", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--machine", nargs="*", choices=["sparse", "random"], default=["sparse", "random"])
    options = parser.parse_args()
    if options.what == "exact":
        exact()
    elif options.what == "dyck":
        dyck(options.strings, options.train, options.seed, options.machine, options.programs)
    elif options.what == "hop":
        hop(options.target, options.hops, options.strings, options.seed)
    else:
        shrink()


if __name__ == "__main__":
    main()
