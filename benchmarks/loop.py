"""Measurements of the looped approximators: every number in docs/loop.md and docs/theory/loop.md comes from here.

    OMP_NUM_THREADS=1 python benchmarks/loop.py [exact|float64|soft|bound|slope|speed|arithmetic] ..

Without a name, all of them (about a minute on one core). Each prints what was promised beside what was measured; the
exit status is 1 when a promise is not kept.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import permutations

import numpy as np
import torch
from flint import fmpq

from fixedformer.loop import LoopedApproximator, required_sharpness
from fixedformer.loop.certify import cell_errors, rates, slope, table_values, theorem_slope
from fixedformer.loop.dense import run_float64, run_rational
from fixedformer.loop.examples import product, spread, wave
from fixedformer.loop.extract import Steps, value_network
from fixedformer.loop.memorise import memory_network
from fixedformer.loop.scaled import run_scaled

Line = tuple[str, str, str, bool]  # what, promised, measured, kept
FUNCTIONS = {"wave": wave, "product": product, "spread": spread}


def timed(call: Callable[[], object], repeats: int = 1) -> float:
    """The least of `repeats` wall-clock times, in seconds."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times)


def orders(machine: LoopedApproximator) -> list[tuple[int, ...]]:
    """Every sequence of cells that has entries of its own, in every order of its tokens."""
    return [order for ids in machine.grid.sorted_sequences() for order in sorted(set(permutations(ids)))]


def exact() -> Iterator[Line]:
    """The paper's block through all its loops, at every cell's corner in every order, against the table."""
    sizes = [(1, 1, n) for n in range(2, 9)] + [(1, 2, n) for n in range(2, 9)]
    for d, tokens, n in [*sizes, (2, 1, 2), (2, 1, 3), (2, 1, 4), (2, 2, 2), (2, 2, 3)]:
        machine = LoopedApproximator(d, tokens, n, arithmetic="exact", form="paper")
        program = machine.compile(wave)
        ids = orders(machine)
        answers = run_scaled(machine.network(program), [[machine.grid.corner(z) for z in order] for order in ids])
        wrong = sum(answer != table_values(program, order) for answer, order in zip(answers, ids))
        sizes_of = machine.sizes()
        name = f"exact composite (d,N,n) = ({d},{tokens},{n}), K = {machine.grid.size}, {len(ids)} sequences, "
        name += f"state {sizes_of['state']} of {17 * d + 9}, width {sizes_of['width']} of {49 * d + 25}"
        yield name, "0 deviate", f"{wrong} deviate", wrong == 0


def float64() -> Iterator[Line]:
    """Bits up to K = 50 and where they end; timesteps at K = 8192; ratios at K = 10,000."""
    for d, tokens, n in [(1, 1, 2), (1, 2, 2), (1, 1, 3), (1, 1, 4), (2, 1, 2), (1, 1, 5)]:
        machine = LoopedApproximator(d, tokens, n)
        worst = max(float(cell_errors(machine, machine.compile(f), f).from_table.max()) for f in FUNCTIONS.values())
        name = f"float64 bits, K = {machine.grid.size}, largest deviation from the table, three functions"
        yield name, "<= 1e-15", f"{worst:.1e}", worst <= 1e-15
    for form, spare, promised in (("slim", 0, 51), ("slim", 1, 51), ("paper", 0, 26), ("paper", 1, 26)):
        length = last_right_length(form, spare)
        name = f"float64, longest fraction always read right, {form} form, ε = 2^-{'(r+1)' if spare else 'r'}"
        yield name, f">= {promised}", str(length), length >= promised
    machine = LoopedApproximator(1, 2, 16, "timestep")
    worst = max(float(cell_errors(machine, machine.compile(f), f).from_function.max()) for f in FUNCTIONS.values())
    yield "float64 timestep, K = 8192, every cell, three functions", "<= 1e-12", f"{worst:.1e}", worst <= 1e-12
    K = 10_000
    values = np.random.default_rng(0).uniform(-1, 1, K).tolist()
    network = memory_network([[Fraction(v)] for v in values], "ratio")
    got = run_float64(network, torch.arange(K, dtype=torch.float64)[None, :, None]).ravel()
    worst = float((got - torch.tensor(values, dtype=torch.float64)).abs().max())
    yield f"float64 ratio form, K = {K}, shift 2, |y| <= 1, every k", "<= 1e-6", f"{worst:.1e}", worst <= 1e-6


def last_right_length(form: str, spare: int, most: int = 60, trials: int = 40) -> int:
    """The longest r such that fractions of 1, 2, .., r bits, random and extreme ones, are all read right in float64."""
    random = np.random.default_rng(0)
    for r in range(1, most):
        patterns = [[1] * r, [i % 2 for i in range(r)], *random.integers(0, 2, (trials, r)).tolist()]
        for bits in patterns:
            steps = Steps((Fraction(0),), (Fraction(1),), (tuple(bits),), ((0,) * r,))
            network = value_network(steps, form, Fraction(1, 2 ** (r + spare)))
            got = run_float64(network, torch.arange(r + 1, dtype=torch.float64)[None, :, None])
            if got.ravel().tolist() != [0.5 + sum(bits[:k]) for k in range(r + 1)]:
                return r - 1
    return most


def soft() -> Iterator[Line]:
    """Softmax at the stated sharpness, and 3 below it."""
    for d, tokens, n in [(1, 2, 8), (1, 2, 16), (1, 3, 4), (1, 4, 4), (2, 2, 3)]:
        sharpest = required_sharpness(LoopedApproximator(d, tokens, n, "timestep").grid)
        for below, promised in ((0.0, "<= 1e-12"), (3.0, "> 1e-3")):
            machine = LoopedApproximator(d, tokens, n, "timestep", attention="soft", sharpness=sharpest - below)
            worst = float(cell_errors(machine, machine.compile(wave), wave).from_function.max())
            name = f"softmax (d,N,n) = ({d},{tokens},{n}) at λ = {sharpest - below:.2f}, largest error at a cell"
            yield name, promised, f"{worst:.1e}", worst > 1e-3 if below else worst <= 1e-12


def bound() -> Iterator[Line]:
    """L2 error beside Theorem 3.6's bound, constants declared: 3 functions, d in {1, 2}, N in {1, 2, 3}."""
    for name, function in FUNCTIONS.items():
        for d, tokens, resolutions in [(1, 1, (4, 16, 64)), (1, 2, (4, 8, 16)), (1, 3, (4, 6)), (2, 1, (4, 6)),
                                       (2, 2, (2, 3)), (2, 3, (2,))]:  # fmt: skip
            for line in rates(function, [LoopedApproximator(d, tokens, n) for n in resolutions], samples=500):
                what = f"{name}, (d,N,n) = ({d},{tokens},{line.resolution}), {line.loops} loops, L2 error"
                yield what, f"<= {line.bound:.3f}", f"{line.error:.4f}", line.within
    sampled = [LoopedApproximator(1, 2, n) for n in (4, 8, 16)]
    for line in rates(lambda X: wave(X), sampled, samples=1000):
        what = f"wave with sampled moduli, (1,2,{line.resolution}), L2 error (bound: a lower estimate)"
        yield what, f"<= {line.bound:.2f}", f"{line.error:.3f}", line.within


def slopes() -> Iterator[Line]:
    """Slope of log L2 error over log loops, d = 1."""
    for name, function in FUNCTIONS.items():
        for tokens, resolutions in ((1, (4, 8, 16, 32, 64)), (2, (2, 4, 8, 16)), (3, (4, 6, 8))):
            machines = [LoopedApproximator(1, tokens, n) for n in resolutions]
            lines = list(rates(function, machines, samples=1000))
            seen, promised = slope(lines), theorem_slope(machines[0].grid)
            what = f"{name}, d = 1, N = {tokens}, n = {', '.join(map(str, resolutions))}: slope"
            yield what, f"<= {promised:.3f}", f"{seen:.3f}", seen <= promised


def speed() -> Iterator[Line]:
    """Exact composite at K = 1024 and float64 timesteps at K = 8192, one core."""
    X = torch.rand(3, 2, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    machine = LoopedApproximator(1, 2, 8)
    program = machine.compile(wave)
    network = machine.network(program)
    rows = [[[Fraction(v) for v in token] for token in sequence] for sequence in X.tolist()]
    seconds = timed(lambda: run_scaled(network, rows), 3)
    yield (
        "exact composite, K = 1024, 6 tokens, whole block, scaled integers",
        "< 1.5 s",
        f"{seconds:.2f} s",
        seconds < 1.5,
    )
    seconds = timed(lambda: run_rational(network, rows))
    yield "the same, the definition in flint rationals", "-", f"{seconds:.2f} s", True
    seconds = timed(lambda: machine.run(program, X), 3)
    yield "the same, run(engine='fast')", "-", f"{seconds:.3f} s", True
    X = torch.rand(100, 2, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    machine = LoopedApproximator(1, 2, 16, "timestep")
    program = machine.compile(wave)
    seconds = timed(lambda: machine.run(program, X), 3)
    yield "float64 timestep, K = 8192, 100 sequences, run()", "< 1 s", f"{seconds:.2f} s", seconds < 1
    memory = machine.value_network(program)
    k = torch.randint(0, 8192, (100, 1, 1), generator=torch.Generator().manual_seed(0))
    seconds = timed(lambda: run_float64(memory, k), 3)
    yield "Theorem 4.2's network alone, K = 8192, 100 sequences", "< 1 s", f"{seconds:.2f} s", seconds < 1
    seconds = timed(lambda: machine.run(program, X, engine="dense"))
    yield "the whole block, every row in every loop (the definition)", "-", f"{seconds:.2f} s", True


def arithmetic() -> Iterator[Line]:
    """Which exact arithmetic step 3 should use: K = 2000, one token, paper's form."""
    K = 2000
    bits = np.random.default_rng(0).integers(0, 2, (2, K - 1))
    both = tuple(tuple(row.tolist()) for row in bits)
    network = value_network(Steps((Fraction(0),), (Fraction(1),), both[:1], both[1:]))
    seconds = {
        "scaled integers (used)": timed(lambda: run_scaled(network, [[[K - 1]]]), 3),
        "flint rational matrices (the definition)": timed(lambda: run_rational(network, [[[K - 1]]])),
        "flint rationals, neuron by neuron": timed(lambda: neuron_by_neuron(network, K - 1, fmpq, fmpq(0))),
        "Python fractions, neuron by neuron": timed(lambda: neuron_by_neuron(network, K - 1, Fraction, Fraction(0))),
    }
    for name, taken in seconds.items():
        kept = taken >= seconds["scaled integers (used)"]
        yield f"step 3, K = {K}, {name}", "scaled is fastest", f"{taken:.3f} s", kept


def neuron_by_neuron(network: object, k: int, number: Callable[[int, int], object], zero: object) -> object:
    """One token through a network without attention, in any exact number type."""
    block = network.block
    state = [number(b.numerator, b.denominator) for b in network.first.bias]
    for row, terms in enumerate(network.first.weights):
        state[row] = sum((number(w.numerator, w.denominator) * k for _, w in terms), state[row])
    neurons = [
        ([(i, number(w.numerator, w.denominator)) for i, w in n.reads], number(n.bias.numerator, n.bias.denominator),
         [(i, number(w.numerator, w.denominator)) for i, w in n.writes])
        for n in block.neurons
    ]  # fmt: skip
    drift = [number(b.numerator, b.denominator) for b in block.bias]
    for _ in range(network.loops):
        hidden = [max(sum((w * state[i] for i, w in reads), bias), zero) for reads, bias, _ in neurons]
        state = [value + step for value, step in zip(state, drift)]
        for value, (_, _, writes) in zip(hidden, neurons):
            for i, w in writes:
                state[i] += w * value
    return state


SECTIONS = {"exact": exact, "float64": float64, "soft": soft, "bound": bound, "slope": slopes, "speed": speed,
            "arithmetic": arithmetic}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", choices=[[], *SECTIONS], help="which measurements; all when left out")
    chosen = parser.parse_args().sections or list(SECTIONS)
    all_kept = True
    for name in chosen:
        print(f"\n{name}: {(SECTIONS[name].__doc__ or '').strip()}")
        for what, promised, measured, kept in SECTIONS[name]():
            print(f"  {'kept ' if kept else 'BROKEN'}  {what:<100}  {promised:>12}  {measured}", flush=True)
            all_kept &= kept
    return 0 if all_kept else 1


if __name__ == "__main__":
    raise SystemExit(main())
