"""The whole network: exact equality with the reference table, both engines, both variants, float64, soft attention."""

from fractions import Fraction as F
from itertools import permutations

import numpy as np
import pytest
import torch
from torch import Tensor

import fixedformer as ff
from fixedformer.errors import CapacityError, SpecError
from fixedformer.loop import LoopedApproximator, composite, required_sharpness
from fixedformer.loop.composite import paper_rows, paper_width
from fixedformer.loop.dense import run_float64, run_rational
from fixedformer.loop.examples import product, spread, wave
from fixedformer.loop.extract import Steps, value_network
from fixedformer.loop.memorise import memory_network
from fixedformer.loop.scaled import run_scaled

from . import oracles

EXACT = [
    *((1, 1, n) for n in range(2, 9)),
    *((1, 2, n) for n in range(2, 9)),
    *((2, 1, n) for n in range(2, 5)),
    *((2, 2, n) for n in range(2, 4)),
]


def corners(machine: LoopedApproximator) -> tuple[list[tuple[int, ...]], list[list[list[F]]]]:
    """Every sequence of cells with an entry of its own, in every order; ids and exact corners."""
    grid = machine.grid
    ids = [
        order
        for sequence in oracles.reached(grid.d, grid.tokens, grid.resolution)
        for order in sorted(set(permutations(sequence)))
    ]
    points = [
        [[F(c, grid.resolution) for c in oracles.coordinates(z, grid.d, grid.resolution)] for z in order]
        for order in ids
    ]
    return ids, points


def floats(points: list[list[list[F]]]) -> Tensor:
    return torch.tensor([[[float(v) for v in token] for token in sequence] for sequence in points], dtype=torch.float64)


def expected(machine: LoopedApproximator, function: object) -> list[list[list[F]]]:
    """The reference table's answers at every corner."""
    grid = machine.grid
    table = oracles.ReferenceTable(lambda X: function(np.array(X)), grid.d, grid.tokens, grid.resolution)
    answers = {k: table.answer(k) for order in corners(machine)[0] for k in
               oracles.contextual_ids(order, grid.d, grid.resolution)}  # fmt: skip
    return [
        [answers[k] for k in oracles.contextual_ids(order, grid.d, grid.resolution)] for order in corners(machine)[0]
    ]


@pytest.mark.parametrize(("d", "tokens", "n"), EXACT)
def test_the_composite_equals_the_reference_table(d: int, tokens: int, n: int) -> None:
    """Every sequence of cells in every order, exactly, through all rows and loops of the paper's block; its sizes."""
    machine = LoopedApproximator(d, tokens, n, arithmetic="exact", form="paper")
    program = machine.compile(wave)
    network, (_, points) = machine.network(program), corners(machine)
    assert run_scaled(network, points) == expected(machine, wave)
    block = network.block
    assert len(block.rows) == paper_rows(d) == 17 * d + 9
    assert block.width <= paper_width(d) == 49 * d + 25
    assert block.width == {1: 53, 2: 90}[d]
    assert len(block.heads) == 2
    assert network.loops == n + tokens + 2 * n ** (d * (tokens + 1))


@pytest.mark.parametrize("form", ["paper", "slim"])
@pytest.mark.parametrize(("d", "tokens", "n"), [(1, 1, 3), (1, 2, 3), (2, 1, 2), (2, 2, 2), (1, 3, 3), (3, 1, 2)])
@pytest.mark.parametrize("function", [wave, spread])
def test_both_engines_and_forms_give_the_reference_table(
    d: int, tokens: int, n: int, form: str, function: object
) -> None:
    machine = LoopedApproximator(d, tokens, n, arithmetic="exact", form=form)
    program = machine.compile(function)
    truth, (_, points) = expected(machine, function), corners(machine)
    assert machine.run_exact(program, points) == truth
    assert run_scaled(machine.network(program), points) == truth
    assert machine.run_exact(program, points[:2], engine="dense") == truth[:2]


@pytest.mark.parametrize("form", ["paper", "slim"])
@pytest.mark.parametrize("load", ["impulse", "preshift"])
@pytest.mark.parametrize("bits", [[1] * 17, [0] + [1] * 16, [1, 0] + [1] * 15, [0] * 16 + [1], [0, 1] * 8 + [0]])
def test_the_composite_reads_the_hardest_bits(bits: list[int], load: str, form: str) -> None:
    """Fractions one unit below 1/2 or 1, and single last bits, exactly; in float64 too where it has the form for it."""
    machine = LoopedApproximator(1, 1, 3, arithmetic="exact", form=form)
    steps = Steps((F(0),), (F(1),), (tuple(bits),), ((0,) * 17,))
    network = composite.bits_network(machine.layout, steps, load)
    ids, points = corners(machine)
    truth = []
    for order in ids:
        (k,) = oracles.contextual_ids(order, 1, 3)
        truth.append([[F(1, 2) + sum(bits[:k])]])
    assert run_rational(network, points) == truth
    assert run_scaled(network, points) == truth
    if load == "preshift":
        assert run_float64(network, floats(points)).tolist() == truth


@pytest.mark.parametrize(("d", "tokens", "n"), [(1, 1, 2), (1, 1, 3), (1, 1, 4), (1, 1, 5), (1, 2, 2), (2, 1, 2)])
def test_bits_in_float64_are_all_right_up_to_fifty(d: int, tokens: int, n: int) -> None:
    """Every K <= 50 there is: 8, 16, 18, 32, 50. Both engines; auto chooses float64."""
    machine = LoopedApproximator(d, tokens, n)
    assert machine.arithmetic == "float64"
    for function in (wave, product, spread):
        program = machine.compile(function)
        truth, X = floats(expected(machine, function)), floats(corners(machine)[1])
        for engine in ("fast", "dense"):
            torch.testing.assert_close(machine.run(program, X, engine=engine), truth, rtol=0, atol=1e-15)


@pytest.mark.parametrize(("d", "tokens", "n"), [(1, 2, 3), (1, 1, 6), (1, 2, 8)])
def test_bits_in_float64_are_refused_above_fifty_three(d: int, tokens: int, n: int) -> None:
    with pytest.raises(CapacityError, match=r"float64 holds a binary fraction of K bits up to K = 52.* needs K = \d+; "
                                            r"use arithmetic='exact' or variant='timestep'"):  # fmt: skip
        LoopedApproximator(d, tokens, n, arithmetic="float64")
    assert LoopedApproximator(d, tokens, n).arithmetic == "exact"


@pytest.mark.parametrize(("form", "right", "wrong"), [("slim", 52, 54), ("paper", 26, 30)])
def test_where_float64_loses_bits(form: str, right: int, wrong: int) -> None:
    """Alternating, all-one and random bits: right up to the stated number, wrong soon after, so the limits are no loose
    ones. The paper's form loses bits at half the length: it adds the fraction to terms that cancel."""

    def all_right(bits: list[int]) -> bool:
        steps = Steps((F(0),), (F(1),), (tuple(bits),), ((0,) * len(bits),))
        K = len(bits) + 1
        got = run_float64(value_network(steps, form), torch.arange(float(K), dtype=torch.float64)[None, :, None])
        return got.ravel().tolist() == [0.5 + sum(bits[:k]) for k in range(K)]

    random = np.random.default_rng(0)
    patterns = lambda r: [[1] * r, [i % 2 for i in range(r)], *random.integers(0, 2, (20, r)).tolist()]  # noqa: E731
    assert all(all_right(bits) for bits in patterns(right))
    assert not all(all_right(bits) for bits in patterns(wrong))


@pytest.mark.parametrize("form", ["slim", "paper"])
@pytest.mark.parametrize(("d", "tokens", "n"), [(1, 1, 4), (1, 2, 5), (2, 1, 3), (2, 2, 2), (1, 3, 4)])
def test_timestep_gives_the_function_itself_at_every_corner(d: int, tokens: int, n: int, form: str) -> None:
    machine = LoopedApproximator(d, tokens, n, "timestep", form=form, value_bound=2.0)
    program = machine.compile(wave)
    _, points = corners(machine)
    X = floats(points)
    truth = torch.from_numpy(np.stack([wave(sequence) for sequence in X.numpy()]))
    tolerance = 1e-12 if form == "slim" else 1e-9
    for engine in ("fast", "dense"):
        torch.testing.assert_close(machine.run(program, X, engine=engine), truth, rtol=0, atol=tolerance)


@pytest.mark.parametrize("form", ["slim", "paper"])
def test_timestep_in_exact_arithmetic_is_exact(form: str) -> None:
    machine = LoopedApproximator(1, 2, 3, "timestep", "exact", form=form)
    program = machine.compile(product)
    ids, points = corners(machine)
    truth = [[[F(float(v)) for v in row] for row in product(machine.grid.points(order))] for order in ids]
    assert machine.run_exact(program, points) == truth
    assert machine.run_exact(program, points, engine="dense") == truth


def test_timestep_network_at_8192_is_right_to_the_bit() -> None:
    machine = LoopedApproximator(1, 2, 16, "timestep")
    assert machine.grid.size == 8192
    program = machine.compile(wave)
    X = floats(corners(machine)[1])
    truth = torch.from_numpy(np.stack([wave(sequence) for sequence in X.numpy()]))
    assert (machine.run(program, X) - truth).abs().max() <= 1e-12


@pytest.mark.parametrize("stride", [97, pytest.param(1, marks=pytest.mark.slow)])
def test_ratio_form_at_ten_thousand(stride: int) -> None:
    """Shift 2, |y| <= 1, K = 10,000: within 1e-6 is promised, 1e-8 is what a rounding a loop allows."""
    K = 10_000
    table = torch.rand(K, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    k = torch.arange(0, K, stride)
    got = run_float64(memory_network(table, "ratio"), k[None, :, None])[0]
    assert float((got - table[k]).abs().max()) <= 1e-8


@pytest.mark.parametrize(("d", "tokens", "n"), [(1, 2, 8), (1, 3, 4), (2, 2, 2), (1, 4, 4)])
def test_soft_attention_is_right_at_the_stated_sharpness_and_wrong_three_below(d: int, tokens: int, n: int) -> None:
    grid = LoopedApproximator(d, tokens, n, "timestep").grid
    sharp = required_sharpness(grid)
    results = []
    for sharpness in (None, sharp - 3):
        machine = LoopedApproximator(d, tokens, n, "timestep", attention="soft", sharpness=sharpness)
        program = machine.compile(wave)
        X = floats(corners(machine)[1])
        truth = torch.from_numpy(np.stack([wave(sequence) for sequence in X.numpy()]))
        results.append(float((machine.run(program, X) - truth).abs().max()))
    assert results[0] <= 1e-12
    assert results[1] > 1e-3


def test_soft_attention_with_bits_matches_hard_attention() -> None:
    soft, hard = (LoopedApproximator(1, 2, 2, attention=kind) for kind in ("soft", "hard"))
    X = torch.rand(50, 2, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(soft.run(soft.compile(wave), X), hard.run(hard.compile(wave), X), rtol=0, atol=1e-15)


@pytest.mark.parametrize("engine", ["fast", "dense"])
@pytest.mark.parametrize("options", [{}, {"arithmetic": "exact"}, {"variant": "timestep"}])
def test_runs_cut_short_agree(options: dict, engine: str) -> None:
    """Both engines stop in the same place; all loops is the default; none gives the start value."""
    machine = LoopedApproximator(1, 2, 2, **options)
    program = machine.compile(product)
    X = torch.tensor([[[0.6], [0.1]]], dtype=torch.float64)
    network = machine.network(program)
    for loops in (0, 3, 4, 9, machine.loops):
        if machine.arithmetic == "exact":
            whole = run_rational(network, [[[F(v) for v in t] for t in s] for s in X.tolist()], loops)
            truth = floats(whole)
        else:
            truth = run_float64(network, X, loops)
        torch.testing.assert_close(machine.run(program, X, loops, engine=engine), truth, rtol=0, atol=1e-15)
    with pytest.raises(SpecError, match=r"runs 0 to 20 loops, got 21"):
        machine.run(program, X, 21, engine=engine)


def test_engines_agree_on_random_inputs() -> None:
    """Inside ramps too, where ids are no integers: every thousandth coordinate is put next to a threshold."""
    X = torch.rand(60, 2, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    X[::3, 0, 0] = 1 / 3 - 2**-23
    for options in ({"arithmetic": "exact"}, {"variant": "timestep"}, {"arithmetic": "exact", "form": "slim"}):
        machine = LoopedApproximator(1, 2, 3, **options)
        program = machine.compile(wave)
        dense, fast = (machine.run(program, X, engine=engine) for engine in ("dense", "fast"))
        torch.testing.assert_close(fast, dense, rtol=0, atol=1e-7)


def test_a_run_leaves_torchs_threads_as_they_were() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        machine = LoopedApproximator(1, 1, 2, "timestep")
        machine.run(machine.compile(product), [[0.5]])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_outputs_permute_with_the_tokens_and_batches_do_not_mix() -> None:
    machine = LoopedApproximator(2, 2, 2)
    program = machine.compile(wave)
    X = torch.rand(3, 4, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    Y = machine.run(program, X)
    assert Y.shape == X.shape
    assert torch.equal(machine.run(program, X.flip(-2)), Y.flip(-2))
    assert torch.equal(machine.run(program, X[1, 2]), Y[1, 2])


def test_inputs_at_one_are_in_the_last_cell() -> None:
    for options in ({"form": "paper"}, {"form": "slim"}):
        machine = LoopedApproximator(1, 2, 2, arithmetic="exact", **options)
        program = machine.compile(product)
        ends = machine.run(program, [[[1.0], [0.0]], [[0.75], [0.25]]])
        assert torch.equal(ends[0], ends[1])


def test_a_timestep_machine_is_one_machine_for_all_functions() -> None:
    """Fingerprint, block, L1 and L2 are the same; only the clock differs."""
    for form in ("slim", "paper"):
        machine = LoopedApproximator(1, 2, 3, "timestep", form=form, value_bound=2.0)
        programs = [machine.compile(function) for function in (wave, product)]
        assert {program.machine_fingerprint for program in programs} == {machine.fingerprint()}
        first, second = (machine.network(program) for program in programs)
        assert (first.block, first.first, first.last) == (second.block, second.first, second.last)
        assert not torch.equal(first.clock.tensor, second.clock.tensor)
    assert machine.fingerprint() != LoopedApproximator(1, 2, 4, "timestep").fingerprint()


def test_where_the_bits_variant_keeps_its_program() -> None:
    """Exactly as documented: in the block's weights when loaded by impulse, in L1 when preshifted; L2 in both."""
    exact, float64 = LoopedApproximator(1, 1, 4, arithmetic="exact"), LoopedApproximator(1, 1, 4)
    for machine, same_block in ((exact, False), (float64, True)):
        networks = [machine.network(machine.compile(function)) for function in (wave, product)]
        assert (networks[0].block == networks[1].block) == same_block
        assert (networks[0].first == networks[1].first) != same_block
        assert networks[0].last != networks[1].last


@pytest.mark.parametrize("n", [3, 5])
def test_weights_have_about_as_many_bits_as_the_table_has_entries(n: int) -> None:
    """The paper's bit complexity: K bits, and those of the impulse that a fraction is added to, 16 K (n + N)."""
    machine = LoopedApproximator(1, 2, n, arithmetic="exact")
    K, bits = machine.grid.size, machine.compile(wave).report["weight bits"]
    assert K <= bits <= K + (16 * K * (n + 2)).bit_length()


@pytest.mark.parametrize("d", [1, 2, 3])
def test_sizes_are_those_of_the_documentation(d: int) -> None:
    """docs/theory/loop.md, section 8."""
    for options, state, width in (
        ({"form": "paper", "arithmetic": "exact"}, 17 * d + 9, 37 * d + 16),
        ({"form": "slim", "arithmetic": "exact"}, 7 * d + 11, 16 * d + 21),
        ({"variant": "timestep"}, 3 * d + 10, 2 * d + 22),
        ({"variant": "timestep", "form": "paper"}, 9 * d + 9, 15 * d + 16),
    ):
        sizes = LoopedApproximator(d, 1, 2, **options).sizes()
        assert sizes == {"state": state, "width": width, "heads": 2}
        assert width <= paper_width(d)
    if d < 3:
        preshifted = LoopedApproximator(d, 1, 2)
        assert preshifted.sizes() == {"state": 7 * d + 11, "width": 12 * d + 21, "heads": 2}


def test_tables_of_many_thousand_bits() -> None:
    """K = 16,000: weights of 4,800 decimal digits, which Python would refuse to print, are hashed and run."""
    machine = LoopedApproximator(1, 2, 20)
    program = machine.compile(product)
    X = torch.tensor([[[0.51], [0.26]]], dtype=torch.float64)
    corner = np.array([[0.5], [0.25]])
    assert (machine.run(program, X) - torch.from_numpy(product(corner))).abs().max() <= float(program.steps.step[0]) / 2


def test_trace_ends_at_the_answer() -> None:
    machine = LoopedApproximator(1, 2, 3)
    program = machine.compile(wave)
    X = torch.tensor([[0.4], [0.9]], dtype=torch.float64)
    trace = machine.trace(program, X)
    assert trace.states.shape == (machine.loops + 1, 2, len(trace.rows))
    assert trace.loops == tuple(range(machine.loops + 1))
    k = trace.after(machine.layout.idle, "k0.up").tolist()
    assert k == [float(v) for v in oracles.contextual_ids((1, 2), 1, 3)]
    sums = {name: trace.after(machine.loops, name) for name in ("sum0.up", "sum0.down")}
    start, step = float(program.steps.start[0]), float(program.steps.step[0])
    rebuilt = start + step * (0.5 + sums["sum0.up"] - sums["sum0.down"])
    torch.testing.assert_close(rebuilt[:, None], machine.run(program, X))
    few = machine.trace(program, X, when=[0, 5, machine.loops])
    assert few.loops == (0, 5, machine.loops)
    assert torch.equal(few.states, trace.states[[0, 5, -1]])
    with pytest.raises(SpecError, match="runs 0 to 59 loops, got 60"):
        machine.trace(program, X, when=[60])
    with pytest.raises(SpecError, match="at least one number of loops"):
        machine.trace(program, X, when=[])


def test_a_long_exact_run_keeps_its_rows_small() -> None:
    """Step 2's s would grow by B a loop for K loops; the ceiling keeps it below B^{N+1} + B."""
    machine = LoopedApproximator(1, 2, 4)
    trace = machine.trace(machine.compile(wave), torch.tensor([[0.9], [0.8]], dtype=torch.float64))
    assert float(trace.states[..., trace.rows.index("s")].max()) <= 4**3 + 4


@pytest.mark.parametrize(
    ("X", "match"),
    [
        ([[0.5]], r"must have shape \(..., 2, 1\) for tokens=2, d=1, got \(1, 1\)"),
        ([[[0.5], [1.5]]], r"must lie in \[0, 1\], got 0.5..1.5; rescale"),
        ([[[0.5], [float("nan")]]], "holds 1 NaN or infinite entries"),
        (torch.zeros(0, 2, 1), "holds no sequence"),
        (torch.zeros(1, 2, 1, dtype=torch.bool), "inputs are real numbers, got torch.bool"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(X: object, match: str) -> None:
    machine = LoopedApproximator(1, 2, 2)
    with pytest.raises(SpecError, match=match):
        machine.run(machine.compile(product), X)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"variant": "words"}, SpecError, "variant must be one of 'bits', 'timestep', got 'words'"),
        ({"arithmetic": "float32"}, SpecError, "arithmetic must be one of 'auto', 'exact', 'float64'"),
        ({"form": "fat"}, SpecError, "form must be one of"),
        ({"attention": "linear"}, SpecError, "attention must be one of 'hard', 'soft'"),
        ({"attention": "soft", "arithmetic": "exact"}, SpecError, "softmax weights are irrational"),
        ({"attention": "soft"}, CapacityError, "use attention='hard' with arithmetic='exact' or variant='timestep'"),
        ({"edge": 1.0}, SpecError, "share of a cell, between 0 and 1, got 1.0"),
        ({"sharpness": -1.0, "attention": "soft"}, SpecError, "sharpness must be positive"),
        ({"value_bound": float("inf")}, SpecError, "value_bound must be positive and finite"),
        ({"form": "paper", "arithmetic": "float64"}, CapacityError, "up to K = 27 in this form"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        LoopedApproximator(1, 2, 4, **options)


def test_programs_of_other_machines_are_refused() -> None:
    program = LoopedApproximator(1, 2, 3).compile(product)
    with pytest.raises(SpecError, match=r"compiled for another machine \(d=1, tokens=2, resolution=3"):
        LoopedApproximator(1, 2, 2).run(program, torch.zeros(2, 1))


def test_values_beyond_the_ratio_forms_bound_are_refused_at_compile() -> None:
    machine = LoopedApproximator(1, 1, 3, "timestep", form="paper")
    with pytest.raises(SpecError, match=r"built for values within ±1"):
        machine.compile(lambda X: 5 * X)


def test_exact_runs_want_exact_machines_and_fitting_rows() -> None:
    machine = LoopedApproximator(1, 2, 2)
    program = machine.compile(product)
    with pytest.raises(SpecError, match="build it with arithmetic='exact'"):
        machine.run_exact(program, [[[F(0)], [F(1)]]])
    exact = LoopedApproximator(1, 2, 2, arithmetic="exact")
    program = exact.compile(product)
    with pytest.raises(SpecError, match="each sequence needs 2 tokens of 1 entries"):
        exact.run_exact(program, [[[F(0)]]])
    with pytest.raises(SpecError, match="must lie in"):
        exact.run_exact(program, [[[F(0)], [F(3, 2)]]])


def test_traces_follow_one_sequence() -> None:
    machine = LoopedApproximator(1, 2, 2)
    with pytest.raises(SpecError, match=r"follows one sequence \(tokens, d\), got shape \(3, 2, 1\)"):
        machine.trace(machine.compile(product), torch.zeros(3, 2, 1))


def test_public_names() -> None:
    assert ff.LoopedApproximator is LoopedApproximator
    assert callable(ff.lipschitz)
