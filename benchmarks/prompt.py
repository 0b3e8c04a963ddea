"""Measure the program-in-the-prompt family: every number in docs/prompt.md comes from here.

    python benchmarks/prompt.py [cost] [accuracy] [sharpness] [relu] [tasks] [language] [approximation]

Without arguments all tables are printed, as Markdown; it takes a few minutes on one core.
"""

import random
import sys
import time
from collections.abc import Callable, Iterable
from itertools import product

import torch
from torch import Tensor

from fixedformer.prompt import AttentionSimulator, bricks
from fixedformer.prompt.approximation import LipschitzNetwork
from fixedformer.prompt.language import LIBRARY, compile_program, library_program
from fixedformer.prompt.language.verify import all_words, compare_words
from fixedformer.prompt.tasks import KParity, Match2, Match2Simulated

Row = Iterable[object]


def table(title: str, head: Row, rows: Iterable[Row]) -> None:
    """Print one Markdown table, a row as soon as it is known."""
    columns = [str(cell) for cell in head]
    print(f"\n### {title}\n\n| {' | '.join(columns)} |\n|{' --- |' * len(columns)}")
    for row in rows:
        print(f"| {' | '.join(str(cell) for cell in row)} |", flush=True)


def gaussian(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def target(n: int, d: int, d_v: int, heads: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """A, V and X with scores of unit spread."""
    return gaussian(heads, d, d, seed=seed) / d, gaussian(heads, d, d_v, seed=seed + 1), gaussian(n, d, seed=seed + 2)


def direct(A: Tensor, V: Tensor, X: Tensor) -> Tensor:
    return torch.softmax(X @ A @ X.mT, dim=-1) @ (X @ V)


def simulate(sizes: tuple[int, int, int, int], backend: str, dtype: torch.dtype = torch.float64) -> tuple[float, ...]:
    """Relative error, seconds to make the machine ready, seconds to run."""
    A, V, X = target(*sizes)
    start = time.perf_counter()
    machine = AttentionSimulator(*sizes, backend, dtype=dtype)
    machine.margin  # noqa: B018 (finds the fixed attention patterns)
    ready = time.perf_counter()
    result = machine.run(machine.compile(A, V, X)).double()
    done = time.perf_counter()
    truth = direct(A, V, X)
    return float((result - truth).abs().max() / truth.abs().max()), ready - start, done - ready


def cost() -> None:
    """Depth, heads and prompt length over sizes."""

    def rows() -> Iterable[Row]:
        for backend in ("hard", "soft"):
            for sizes in [(4, 4, 4, 1), (8, 8, 8, 1), (8, 8, 8, 4), (32, 16, 4, 4), (32, 16, 16, 4), (64, 16, 16, 4)]:
                machine = AttentionSimulator(*sizes, backend)
                measured = machine.cost()
                assert measured["heads"] == machine.size.head_counts
                prints = set()
                for seed in (0, 1):
                    prints.add(machine.compile(*target(*sizes, seed=seed)).machine_fingerprint)
                heads, tokens = " + ".join(map(str, measured["heads"])), measured["tokens"]
                growth = f"{tokens / (sizes[0] * sizes[1]):.1f}"
                yield backend, *sizes, measured["blocks"], heads, tokens, growth, measured["channels"], len(prints)

    table(
        "Cost of the simulator (measured on the network; equal to the formulas)",
        ("backend", "n", "d", "d_v", "H", "blocks", "heads per block", "prompt tokens", "tokens / (n d)", "channels",
         "fingerprints of 2 targets"),
        rows(),
    )  # fmt: skip


def accuracy() -> None:
    """Worst relative error against direct evaluation in torch."""

    def rows() -> Iterable[Row]:
        some = [1, 2, 3, 5, 8]
        grid = list(product(some, some, some, (1, 2, 4)))
        for backend in ("hard", "stock", "soft"):
            for dtype in (torch.float64, torch.float32):
                worst = max(simulate(sizes, backend, dtype)[0] for sizes in grid)
                yield (
                    backend,
                    str(dtype)[6:],
                    f"{len(grid)} sizes, n, d, d_v in {some}, H in 1, 2, 4",
                    f"{worst:.1e}",
                    "",
                )
            error, ready, run = simulate((32, 16, 16, 4), backend)
            yield backend, "float64", "(n, d, d_v, H) = (32, 16, 16, 4)", f"{error:.1e}", f"{ready:.2f} + {run:.2f}"

    table(
        "Accuracy (largest error / largest output)",
        ("backend", "dtype", "sizes", "worst", "seconds, machine + run"),
        rows(),
    )

    def large() -> Iterable[Row]:
        for height in (0.0, 1e2, 1e3, 1e4, 4e4, 5e5):
            A, V, X = target(8, 8, 8, 1)
            X[:, 0] = 1.0
            A[0, 0, 0] += height  # lifts every score by `height`: the weights stay as they were
            machine = AttentionSimulator(8, 8, 8)
            prompt = machine.compile(A, V, X)
            result, truth = machine.run(prompt), direct(A, V, X)
            check = machine.certify(prompt, A, V, X).checks[-2]
            error = float((result - truth).abs().max() / truth.abs().max())
            yield (
                f"{float((X @ A[0] @ X.mT).abs().max()):.6g}",
                f"{error:.1e}",
                f"{check.measured:.1e}",
                f"{check.bound:.1e}",
            )

    table(
        "Large scores (hard, float64, n = d = d_v = 8): each score is known to about its size times 1e-16",
        ("largest score", "against torch", "against the oracle (certificate)", "certificate's bound"),
        large(),
    )


def sharpness() -> None:
    """Average-hard attention by ordinary softmax."""

    def rows() -> Iterable[Row]:
        A, V, X = target(8, 4, 4, 2)
        hard = AttentionSimulator(8, 4, 4, 2)
        truth = hard.run(hard.compile(A, V, X))
        for factor in (20, 25, 30, 40, 100, 1000):
            stock = AttentionSimulator(8, 4, 4, 2, "stock", sharpness=float(factor))
            error = (stock.run(stock.compile(A, V, X)) - truth).abs().max() / truth.abs().max()
            yield factor, f"{float(error):.1e}"

    table("Stock softmax in place of average-hard attention", ("sharpness", "relative difference"), rows())


def relu() -> None:
    """Products by ReLU units alone."""

    def rows() -> Iterable[Row]:
        line = torch.linspace(-4, 4, 201, dtype=torch.float64)
        pairs = torch.cartesian_prod(line, line)[:, None, :]
        for knots in (16, 64, 256, 1024):
            error = (bricks.relu_product(knots)(pairs)[:, 0, 0] - pairs[:, 0].prod(-1)).abs().max()
            yield knots, f"{float(error):.1e}", f"{(16 / (knots - 1)) ** 2 / 16:.1e}"

    table("Ablation: a product on [-4, 4]^2 by ReLU alone", ("knots", "largest error", "bound h^2/16"), rows())


def tasks() -> None:
    """Match2 and k-PARITY: errors on 10,000 random inputs."""
    generator = torch.Generator().manual_seed(0)

    def errors(task: Callable[[Tensor], Tensor], rows: Tensor, truth: Tensor) -> tuple[int, float]:
        start = time.perf_counter()
        wrong = int((task(rows) != truth).sum())
        return wrong, time.perf_counter() - start

    def lines() -> Iterable[Row]:
        for modulus, n in [(7, 10), (100, 32)]:
            numbers = torch.randint(modulus, (10_000, n), generator=generator)
            truth = ((numbers[:, :, None] + numbers[:, None, :]) % modulus == 0).any(-1)
            wrong, seconds = errors(Match2(modulus), numbers, truth)
            yield "Match2, direct", f"M = {modulus}, n = {n}", wrong, truth.numel(), f"{seconds:.2f}"
        numbers = torch.randint(23, (10_000, 12), generator=generator)
        truth = ((numbers[:, :, None] + numbers[:, None, :]) % 23 == 0).any(-1)
        for backend in ("hard", "stock", "soft"):
            wrong, seconds = errors(Match2Simulated(23, 12, backend), numbers, truth)  # type: ignore[arg-type]
            yield f"Match2, simulated ({backend})", "M = 23, n = 12", wrong, truth.numel(), f"{seconds:.2f}"
        for n, k in [(20, 3), (100, 31)]:
            bits = torch.randint(2, (10_000, n), generator=generator)
            places = torch.randperm(n, generator=generator)[:k]
            parity = KParity(k)
            wrong, seconds = errors(lambda rows, p=places, t=parity: t(rows, p), bits, bits[:, places].sum(-1) % 2 == 1)
            yield "k-PARITY", f"k = {k}, n = {n}", wrong, len(bits), f"{seconds:.2f}"

    table("Tasks by fixed constructions", ("task", "sizes", "errors", "answers", "seconds"), lines())


def language() -> None:
    """Compile and run times, and agreement with the interpreter."""

    def rows() -> Iterable[Row]:
        for name in LIBRARY:
            program = library_program(name)
            start = time.perf_counter()
            compiled = compile_program(program, 32)
            seconds = time.perf_counter() - start
            ids = torch.randint(len(program.alphabet), (1000, 32), generator=torch.Generator().manual_seed(0))
            compiled.run_ids(ids[:1])
            start = time.perf_counter()
            compiled.run_ids(ids)
            ran = time.perf_counter() - start
            at_64 = compile_program(program, 64, verify=False)
            source = random.Random(0)
            words = [tuple(source.choices(program.alphabet, k=64)) for _ in range(1000)]
            short = list(all_words(program, 8 if len(program.alphabet) < 4 else 6))
            difference = max(compare_words(at_64, words)[0], compare_words(at_64, short)[0])
            yield (name, compiled.network.depth, sum(compiled.network.head_counts), compiled.network.width,
                   f"{seconds:.2f}", f"{ran:.2f}", len(short), f"{difference:.1e}", f"{at_64.noise:.1e}")  # fmt: skip

    table(
        "Library programs (compile with verification and run 1,000 sequences at length 32; compare at length 64)",
        ("program", "blocks", "heads", "channels", "compile s", "run s", "all short inputs",
         "largest difference (also 1,000 at 64)", "derived bound"),
        rows(),
    )  # fmt: skip


def approximation() -> None:
    """Error of the MaxMin approximation against width."""

    def rows() -> Iterable[Row]:
        cases = [
            ("abs(x - 1/3)^(1/2)", 1, 1.0, 0.5, lambda x: abs(x[0] - 1 / 3) ** 0.5, (5, 9, 17, 33, 65)),
            ("sin 3x", 1, 3.0, 1.0, lambda x: torch.tensor(3.0 * x[0]).sin().item(), (5, 9, 17, 33, 65)),
            ("abs(x - y) / 2 + sin(x + y/2)", 2, 2.0, 1.0,
             lambda x: abs(x[0] - x[1]) / 2 + torch.tensor(x[0] + x[1] / 2).sin().item(), (3, 5, 9)),
        ]  # fmt: skip
        for name, d, constant, exponent, function, sizes in cases:
            fine = torch.linspace(0, 1, 801 if d == 1 else 81, dtype=torch.float64)
            X = torch.cartesian_prod(*[fine] * d).reshape(-1, d)
            truth = torch.tensor([function(x) for x in X.tolist()], dtype=torch.float64)
            for points in sizes:
                network = LipschitzNetwork(function, d, points, constant, exponent)
                error = float((network(X) - truth).abs().max())
                yield (
                    name,
                    f"{points}^{d}",
                    network.width,
                    network.network.depth,
                    f"{error:.1e}",
                    f"{network.error_bound:.1e}",
                )

    table(
        "Lipschitz and Hölder functions by MaxMin networks",
        ("function", "grid", "width", "blocks", "largest error", "bound"),
        rows(),
    )


TABLES = {part.__name__: part for part in (cost, accuracy, sharpness, relu, tasks, language, approximation)}


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in TABLES]
    if unknown:
        print(f"no table {unknown[0]!r}; choose from {', '.join(TABLES)}", file=sys.stderr)
        return 2
    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread(s)")
    for name in names or TABLES:
        TABLES[name]()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
