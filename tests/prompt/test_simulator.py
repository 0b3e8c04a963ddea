"""U against direct evaluation: every small size, options, backends, precision, and what it refuses."""

from itertools import product

import pytest
import torch

import fixedformer as ff
from fixedformer.errors import CapacityError, SpecError
from fixedformer.prompt import engine, patterns
from fixedformer.prompt.construction import sharpen
from fixedformer.prompt.simulator import AttentionSimulator, memory_needed
from fixedformer.prompt.sizes import GUARD

from .conftest import direct, gaussian, relative


def case(n: int, d: int, d_v: int, heads: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (gaussian(heads, d, d, seed=seed), gaussian(heads, d, d_v, seed=seed + 1), gaussian(n, d, seed=seed + 2))


def error(n: int, d: int, d_v: int, heads: int, backend: str = "hard", dtype: torch.dtype = torch.float64) -> float:
    A, V, X = case(n, d, d_v, heads)
    simulator = AttentionSimulator(n, d, d_v, heads, backend, dtype=dtype)
    assert simulator.network.head_counts == simulator.size.head_counts
    assert simulator.network.depth == simulator.size.depth == (3 if backend == "soft" else 6)
    prompt = simulator.compile(A, V, X)
    assert prompt.tokens == simulator.size.tokens
    result = simulator.run(prompt)
    assert result.shape == (heads, n, d_v)
    return relative(result, direct(A, V, X))


SMALL = [(1, 1, 1, 1), (1, 4, 2, 2), (2, 1, 8, 3), (8, 1, 1, 1), (3, 7, 2, 4), (5, 8, 3, 2), (8, 8, 8, 4), (4, 3, 5, 1)]


@pytest.mark.parametrize("sizes", SMALL)
@pytest.mark.parametrize("backend", ["hard", "stock", "soft"])
def test_small_sizes(sizes: tuple[int, int, int, int], backend: str) -> None:
    assert error(*sizes, backend) <= 1e-13


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("backend", "dtype", "tolerance"),
    [("hard", torch.float64, 1e-13), ("stock", torch.float64, 1e-12), ("hard", torch.float32, 1e-5)],
)
def test_every_size_up_to_eight(backend: str, dtype: torch.dtype, tolerance: float) -> None:
    """All n, d, d_v <= 8 and heads <= 4: 2,048 simulators."""
    grid = product(range(1, 9), range(1, 9), range(1, 9), range(1, 5))
    worst = max(error(*sizes, backend, dtype) for sizes in grid)
    assert worst <= tolerance, worst


@pytest.mark.parametrize("sizes", SMALL)
@pytest.mark.parametrize("backend", ["hard", "stock", "soft"])
def test_float32(sizes: tuple[int, int, int, int], backend: str) -> None:
    assert error(*sizes, backend, torch.float32) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "dtype", "tolerance"),
    [
        ("hard", torch.float64, 1e-13),
        ("stock", torch.float64, 1e-12),
        ("soft", torch.float64, 1e-13),
        ("hard", torch.float32, 1e-5),
    ],
)
def test_larger(backend: str, dtype: torch.dtype, tolerance: float) -> None:
    assert error(32, 16, 16, 4, backend, dtype) <= tolerance


@pytest.mark.parametrize(("kind", "sharpness"), [("hard", 1000), ("stock", 20), ("stock", 800), ("soft", 1000)])
def test_fast_engine_equals_the_definition(kind: str, sharpness: float) -> None:
    """At sharpness 20 wrong tokens weigh 2e-9 each: the fast engine must not take its patterns for exact ones."""
    A, V, X = case(4, 3, 2, 2)
    simulator = AttentionSimulator(4, 3, 2, 2, kind, sharpness=sharpness)
    prompt = simulator.compile(A, V, X)
    assert relative(simulator.run(prompt), simulator.run(prompt, engine="dense")) <= 1e-14


def test_cost_formulas() -> None:
    """Heads 2d + 3dH + 2H + 2nH in 6 blocks, prompt n c + H (d^2 + d d_v), for sizes far apart."""
    for n, d, d_v, heads in [(1, 1, 1, 1), (3, 5, 2, 2), (9, 4, 6, 3)]:
        cost = AttentionSimulator(n, d, d_v, heads).cost()
        assert cost["blocks"] == 6
        assert sum(cost["heads"]) == 2 * d + 3 * d * heads + 2 * heads + 2 * n * heads
        assert cost["tokens"] == n * max(n, d, d_v) + heads * (d * d + d * d_v)
    assert AttentionSimulator(3, 5, 2, 2, guard=False).cost()["blocks"] == 5
    assert AttentionSimulator(3, 5, 2, 2, d_out=4).cost()["blocks"] == 7


def test_one_machine_for_every_target() -> None:
    simulator = AttentionSimulator(3, 2, 2, 2)
    before = {name: tensor.clone() for name, tensor in simulator.network.tensors().items()}
    prints = {simulator.fingerprint()}
    for seed in range(3):
        A, V, X = case(3, 2, 2, 2, seed)
        prompt = simulator.compile(A, V, X)
        simulator.run(prompt)
        prints |= {simulator.network.fingerprint(), prompt.machine_fingerprint}
    assert len(prints) == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in simulator.network.tensors().items())
    assert AttentionSimulator(3, 2, 2, 2).fingerprint() in prints
    assert AttentionSimulator(3, 2, 2, 3).fingerprint() not in prints


def test_batches_of_targets_and_inputs() -> None:
    simulator = AttentionSimulator(3, 2, 2, 2)
    A, V, X = gaussian(5, 1, 2, 2, 2), gaussian(2, 2, 2, seed=1), gaussian(4, 3, 2, seed=2)
    result = simulator.run(simulator.compile(A, V, X))
    assert result.shape == (5, 4, 2, 3, 2)
    for i, j in product(range(5), range(4)):
        assert relative(result[i, j], direct(A[i, 0], V, X[j])) <= 1e-13


@pytest.mark.parametrize("backend", ["hard", "stock", "soft"])
def test_causal_mask(backend: str) -> None:
    A, V, X = case(5, 3, 2, 2)
    simulator = AttentionSimulator(5, 3, 2, 2, backend, mask="causal")
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    assert relative(simulator.run(simulator.compile(A, V, X)), direct(A, V, X, mask)) <= 1e-13


@pytest.mark.parametrize("backend", ["hard", "stock"])
def test_masks_from_the_prompt(backend: str) -> None:
    """Padding, causal, arbitrary and none, all by one machine; and inputs shorter than n."""
    A, V, X = case(5, 3, 2, 2)
    simulator = AttentionSimulator(5, 3, 2, 2, backend, mask="given")
    causal = torch.ones(5, 5, dtype=torch.bool).tril()
    keep = torch.tensor([True, False, True, True, False])
    odd = torch.rand(5, 5, generator=torch.Generator().manual_seed(0)) < 0.4
    odd[:, 2] = True
    for given, means in [(None, causal | True), ("causal", causal), (keep, keep.expand(5, 5)), (odd, odd)]:
        assert relative(simulator.run(simulator.compile(A, V, X, mask=given)), direct(A, V, X, means)) <= 1e-13
    for rows in (1, 2, 4):
        short = simulator.run(simulator.compile(A, V, X[:rows], mask="causal"))
        assert short.shape == (2, rows, 2)
        assert relative(short, direct(A, V, X[:rows], causal[:rows, :rows])) <= 1e-13
    assert simulator.attention(simulator.compile(A, V, X, mask=keep))[..., [1, 4]].abs().max() == 0


@pytest.mark.parametrize("backend", ["hard", "soft"])
@pytest.mark.parametrize("in_network", [True, False])
def test_query_and_key_matrices_scale_and_output(backend: str, in_network: bool) -> None:
    W_Q, W_K, W_O = gaussian(2, 4, 3), gaussian(2, 4, 3, seed=1), gaussian(2, 2, 5, seed=2)
    _, V, X = case(6, 4, 2, 2)
    simulator = AttentionSimulator(6, 4, 2, 2, backend, d_k=3 if in_network else None, d_out=5)
    scale = "sqrt" if in_network else 3**-0.5
    result = simulator.run(simulator.compile((W_Q, W_K), V, X, output=W_O, scale=scale))
    truth = (direct(W_Q @ W_K.mT * 3**-0.5, V, X) @ W_O).sum(-3)
    assert result.shape == (6, 5)
    assert relative(result, truth) <= 1e-13


@pytest.mark.parametrize("backend", ["hard", "stock", "soft"])
def test_large_scores(backend: str) -> None:
    """|S| = 4e4 does not overflow; the result is as accurate as such scores allow (each is only known to 4e4 u)."""
    simulator = AttentionSimulator(8, 8, 8, backend=backend)
    A, V, X = case(8, 8, 8, 1)
    steep = A * 4e4 / float((X @ A[0] @ X.mT).abs().max())  # weights 0 and 1
    assert relative(simulator.run(simulator.compile(steep, V, X)), direct(steep, V, X)) <= 1e-10
    A, X[:, 0] = A / 8, 1.0
    A[0, 0, 0] += 4e4  # lifts every score alike: the weights stay as they are
    assert float((X @ A[0] @ X.mT).abs().max()) > 3.9e4
    assert relative(simulator.run(simulator.compile(A, V, X)), direct(A, V, X)) <= 1e-10


def test_guard_is_needed_and_is_enough() -> None:
    """exp(800) overflows: refused without the guard, right with it; beyond half the guard it is refused too."""
    X, V = torch.eye(2, dtype=torch.float64), torch.eye(2, dtype=torch.float64)
    A = torch.tensor([[800.0, 799.0], [0.0, 0.0]], dtype=torch.float64)
    bare, guarded = AttentionSimulator(2, 2, 2, guard=False), AttentionSimulator(2, 2, 2)
    with pytest.raises(SpecError, match=r"must stay below 709\.09.* got 800; .*use guard=True"):
        bare.run(bare.compile(A, V, X))
    assert relative(guarded.run(guarded.compile(A, V, X)), direct(A[None], V[None], X)) <= 1e-13
    limit = GUARD[torch.float64] / 2
    for factor, refused in [(0.999, False), (1.0, True)]:
        prompt = guarded.compile(torch.diag(torch.tensor([limit * factor, -limit * factor])), V, X)
        if refused:
            with pytest.raises(SpecError, match=r"must stay below 524288 .*half the guard.*backend='soft'"):
                guarded.run(prompt)
        else:
            assert relative(guarded.run(prompt)[0], torch.tensor([[1.0, 0.0], [1.0, 0.0]]).double()) < 1.0


def test_without_the_guard_low_scores_keep_their_accuracy() -> None:
    """All scores near -300: the row sums are near e^-300, and nothing may be added to them on the way."""
    A, V, X = case(4, 3, 2, 1)
    X[:, 0] = 1.0
    A[0, 0, 0] -= 300.0
    simulator = AttentionSimulator(4, 3, 2, guard=False)
    assert relative(simulator.run(simulator.compile(A, V, X)), direct(A, V, X)) <= 1e-12


def test_sharpness_of_softmax_decides_the_error() -> None:
    """Scores times 20, 40, 1000: errors about 2e-8, then below 1e-12, then none at all (two-sided)."""
    A, V, X = case(6, 4, 4, 2)
    hard = AttentionSimulator(6, 4, 4, 2)
    truth = hard.run(hard.compile(A, V, X))
    errors = {}
    for sharpness in (20.0, 40.0, 1000.0):
        stock = AttentionSimulator(6, 4, 4, 2, "stock", sharpness=sharpness)
        errors[sharpness] = relative(stock.run(stock.compile(A, V, X)), truth)
    assert 1e-9 < errors[20.0] < 1e-6
    assert errors[40.0] <= 1e-12
    assert errors[1000.0] <= 1e-14


def test_stock_network_runs_on_torch_attention() -> None:
    """An ordinary implementation (scaled_dot_product_attention and a gated map) runs the stock weights as they are."""
    A, V, X = case(4, 3, 2, 2)
    simulator = AttentionSimulator(4, 3, 2, 2, "stock")
    network, size = simulator.network, simulator.size
    state = torch.zeros(1, size.tokens, network.width, dtype=torch.float64)
    state[0, :, : len(network.constants)] = simulator._positions
    state[0, :, network.channel("s")] = simulator.compile(A, V, X).values
    for block in network.blocks:
        update = torch.zeros_like(state)
        for head in block.heads:
            q, k, v = state @ head.query, state @ head.key, state @ head.value
            update += torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=1.0) @ head.output
        state = state + update
        gate = state @ block.map.gate
        for unit, kind in enumerate(block.map.activations):
            act = {"exp": torch.exp, "reciprocal": torch.reciprocal, "identity": torch.clone}[kind]
            gate[..., unit] = act(gate[..., unit])
        state = state + (gate * (state @ block.map.up)) @ block.map.down
    output = state[0, :16, [network.channel("O@0"), network.channel("O@1")]].mT.reshape(2, 4, 4)[..., :2]
    assert relative(output, direct(A, V, X)) <= 1e-12


def test_sharpen_changes_queries_only() -> None:
    hard = AttentionSimulator(2, 2, 2).network
    sharp = sharpen(hard, 50.0)
    for name, tensor in hard.tensors().items():
        assert torch.equal(sharp.tensors()[name], tensor * 50 if name.endswith("query") else tensor)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"value": gaussian(2, 3, 9)}, r"value must be \(2, 3, 2\)"),
        ({"query_key": gaussian(2, 3, 4)}, r"query_key must be \(2, 3, 3\)"),
        ({"query_key": (gaussian(2, 3, 4), gaussian(2, 3, 5))}, r"W_K must be \(2, 3, 4\)"),
        ({"X": gaussian(5, 3)}, r"X must be \(4, 3\)"),
        ({"X": gaussian(0, 3)}, "the sequence is empty"),
        ({"X": gaussian(3, 3)}, r"X has 3 rows, this size class has n = 4; .*n=3.*mask='given'"),
        ({"X": gaussian(4, 3) / 0}, "X holds 12 NaN or infinite entries"),
        ({"query_key": gaussian(2, 3, 3) * float("nan")}, "query_key holds 18 NaN"),
        ({"output": gaussian(2, 2, 2)}, "no output matrix"),
        ({"mask": "causal"}, "a mask belongs to the size class"),
        ({"scale": "sqrt"}, "needs a size class with d_k"),
        ({"scale": float("inf")}, "scale must be None"),
        ({"X": gaussian(4, 3) > 0}, "X must hold real numbers"),
    ],
)
def test_compile_refuses(change: dict, message: str) -> None:
    A, V, X = case(4, 3, 2, 2)
    simulator = AttentionSimulator(4, 3, 2, 2)
    with pytest.raises(SpecError, match=message):
        simulator.compile(**{"query_key": A, "value": V, "X": X, **change})


def test_more_refusals() -> None:
    A, V, X = case(4, 3, 2, 2)
    given = AttentionSimulator(4, 3, 2, 2, mask="given")
    with pytest.raises(SpecError, match="attend to nothing"):
        given.compile(A, V, X, mask=torch.zeros(4, 4, dtype=torch.bool))
    with pytest.raises(SpecError, match="another size class"):
        AttentionSimulator(4, 3, 2, 2).run(given.compile(A, V, X))
    with pytest.raises(SpecError, match="reads W_Q and W_K"):
        AttentionSimulator(4, 3, 2, 2, d_k=2).compile(A, V, X)
    with pytest.raises(SpecError, match="engine must be"):
        given.run(given.compile(A, V, X), engine="slow")
    soft = AttentionSimulator(4, 3, 2, 2, "soft")
    with pytest.raises(SpecError, match="overflowed"):
        soft.run(soft.compile(A * 1e200, V, X * 1e200))
    for bad, message in [
        ({"n": 0}, "n must be a whole number"),
        ({"heads": True}, "heads must be"),
        ({"backend": "gpu"}, "backend must be"),
        ({"mask": "padding"}, "mask must be"),
        ({"backend": "soft", "mask": "given"}, "backend 'soft' masks by a fixed"),
        ({"dtype": torch.bfloat16}, "dtype must be"),
        ({"sharpness": 1.0}, "sharpness must be a whole number.* at least 20.* got 1.0"),
        ({"sharpness": 20.5}, "sharpness must be a whole number"),
        ({"d_out": 2.5}, "d_out must be"),
    ]:
        with pytest.raises(SpecError, match=message):
            AttentionSimulator(**{"n": 4, "d": 3, "d_v": 2, **bad})
    with pytest.raises(CapacityError, match="bytes"):
        AttentionSimulator(5000, 5000, 5000)
    with pytest.raises(CapacityError, match="sharpness times the longest squared position"):
        AttentionSimulator(100, 1, 1, backend="stock", dtype=torch.float32)
    with pytest.raises(CapacityError, match=r"n = 200 the row maximum may be off by .* use float64"):
        AttentionSimulator(200, 1, 1, dtype=torch.float32)


@pytest.mark.parametrize("backend", ["hard", "soft"])
@pytest.mark.parametrize("sizes", [(4, 3, 2, 1), (8, 8, 8, 4), (12, 3, 2, 2)])
def test_memory_is_foretold(sizes: tuple[int, int, int, int], backend: str) -> None:
    """The estimate that refuses a size class is at least its weights and one state, at most three times that."""
    simulator = AttentionSimulator(*sizes, backend)
    tensors = simulator.network.tensors().values()
    held = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    held += 8 * simulator.size.tokens * simulator.network.width
    assert held <= memory_needed(simulator.size) <= 3 * held


@pytest.mark.parametrize("backend", ["hard", "soft"])
def test_pieces_do_not_change_results(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Score matrices and batches cut into small pieces: the same numbers."""
    A, V, X = gaussian(3, 2, 2, 2), gaussian(2, 2, 2, seed=1), gaussian(3, 4, 2, seed=2)
    whole = AttentionSimulator(4, 2, 2, 2, backend)
    truth = whole.run(whole.compile(A, V, X))
    monkeypatch.setattr(engine, "PIECE", 300)
    monkeypatch.setattr(patterns, "PIECE", 300)
    pieces = AttentionSimulator(4, 2, 2, 2, backend)
    assert relative(pieces.run(pieces.compile(A, V, X)), truth) <= 1e-15


def test_public_name() -> None:
    assert ff.AttentionSimulator is AttentionSimulator
