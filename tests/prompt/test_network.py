"""Networks as data: what the builder writes, what the engine computes, and what both refuse."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fixedformer.errors import SpecError
from fixedformer.prompt.builder import NetworkBuilder, combine
from fixedformer.prompt.engine import Engine, run_dense
from fixedformer.prompt.layout import POSITIONS, Layout, fetch
from fixedformer.prompt.network import Block, GatedMap, Network

from .conftest import gaussian


def plain_run(network: Network, rows: list[list[float]]) -> list[list[float]]:
    """One sequence through a network, in plain Python from the definition in network.py."""
    acts = {"identity": lambda x: x, "relu": lambda x: max(x, 0.0), "exp": math.exp, "reciprocal": lambda x: 1 / x}

    def times(row: list[float], matrix: list[list[float]]) -> list[float]:
        return [sum(a * b for a, b in zip(row, column)) for column in zip(*matrix)]

    for block in network.blocks:
        update = [[0.0] * network.width for _ in rows]
        for head in block.heads:
            wq, wk, wv, wo = (part.tolist() for part in (head.query, head.key, head.value, head.output))
            for i, row in enumerate(rows):
                scores = [sum(a * b for a, b in zip(times(row, wq), times(other, wk))) for other in rows]
                top = max(scores)
                hard = [float(s == top) for s in scores]
                powers = hard if block.rule == "hard" else [math.exp(s - top) for s in scores]
                weights = [p / sum(powers) for p in powers]
                mixed = [sum(w * v for w, v in zip(weights, col)) for col in zip(*[times(o, wv) for o in rows])]
                update[i] = [a + b for a, b in zip(update[i], times(mixed, wo))]
        rows = [[a + b for a, b in zip(row, more)] for row, more in zip(rows, update)]
        if block.map is not None:
            wg, wu, wd = (part.tolist() for part in (block.map.gate, block.map.up, block.map.down))
            for i, row in enumerate(rows):
                gates = [acts[kind](g) for kind, g in zip(block.map.activations, times(row, wg))]
                hidden = [g * u for g, u in zip(gates, times(row, wu))]
                rows[i] = [a + b for a, b in zip(row, times(hidden, wd))]
    return rows


def sample_network(rule: str, seed: int) -> tuple[Network, torch.Tensor, torch.Tensor]:
    """Position heads, data heads, shared patterns and all activations, with random small integers as coefficients."""
    layout = Layout(((2, 3), (1, 2)))
    builder = NetworkBuilder(POSITIONS, ("s", "t"))
    builder.block(rule)
    fetch(builder, (0, "row", "col"), "s", "a")
    fetch(builder, (0, "row", "col"), {"t": 2.0, "one": 1.0}, "b")
    builder.head(["s"], ["t"], ["s", "t"], ["c", "a"])
    builder.unit("d", "a", {"b": 1.0, "one": 3.0})
    builder.unit("e", {"c": 0.25}, activation="exp")
    builder.block(rule)
    builder.head([{"one": 1.0}], [{"row": 1.0}], "d", "f")
    builder.unit({"g": 1.0, "f": -2.0}, {"f": 1.0, "one": -1.0}, "e", "relu")
    builder.unit("h", {"e": 1.0}, {"d": 1.0}, "reciprocal")
    inputs = torch.randint(-2, 3, (3, layout.tokens, 2), generator=torch.Generator().manual_seed(seed)).double()
    return builder.build(), layout.positions(torch.float64), inputs


@pytest.mark.parametrize("rule", ["hard", "softmax"])
@pytest.mark.parametrize("seed", [0, 1])
def test_dense_and_fast_equal_the_definition(rule: str, seed: int) -> None:
    network, constants, inputs = sample_network(rule, seed)
    dense, fast = run_dense(network, constants, inputs), Engine(network, constants).run(inputs)
    for number, sequence in enumerate(inputs):
        start = torch.cat([constants, sequence, torch.zeros(len(constants), len(network.scratch))], dim=1)
        truth = torch.tensor(plain_run(network, start.tolist()), dtype=torch.float64)
        assert torch.allclose(dense[number], truth, rtol=1e-13, atol=1e-13)
        assert torch.allclose(fast[number], truth, rtol=1e-13, atol=1e-13)


def test_engine_finds_position_heads_and_their_margin() -> None:
    network, constants, _ = sample_network("hard", 0)
    engine = Engine(network, constants)
    assert engine.fixed_heads == 3  # two fetches and the head on "row"; not the one on data
    assert engine.margin == 1.0


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=4),
    st.integers(0, 10**6),
)
def test_a_fetch_reads_exactly_one_token(sections: list[tuple[int, int]], seed: int) -> None:
    """From any layout, every token asks every other token in turn: bit-equal to indexing."""
    layout = Layout(tuple(sections))
    places, constants = layout.coordinates(), layout.positions(torch.float64)
    values = gaussian(1, layout.tokens, 1, seed=seed)
    wanted = int(torch.randint(layout.tokens, (1,), generator=torch.Generator().manual_seed(seed)))
    builder = NetworkBuilder(POSITIONS, ("s",))
    builder.block()
    fetch(builder, tuple(float(c) for c in places[wanted]), "s", "got")
    network = builder.build()
    engine = Engine(network, constants)
    got = engine.run(values)[0, :, network.channel("got")]
    assert got.tolist() == [float(values[0, wanted, 0])] * layout.tokens
    assert engine.margin >= 1.0


def test_layout_roundtrip() -> None:
    layout = Layout(((2, 3), (4, 1)))
    first, second = gaussian(5, 2, 3), gaussian(4, 1)
    sequence = layout.encode([first, second])
    assert sequence.shape == (5, 10)
    assert torch.equal(layout.decode(sequence, 0), first)
    assert torch.equal(layout.decode(sequence, 1), second.expand(5, 4, 1))


def test_positions_that_a_dtype_cannot_hold_are_refused() -> None:
    Layout(((1, 2896),)).positions(torch.float32)
    with pytest.raises(SpecError, match=r"float32 holds whole numbers only up to 16777216"):
        Layout(((1, 2899),)).positions(torch.float32)
    with pytest.raises(SpecError, match=r"bfloat16 holds whole numbers only up to 256"):
        Layout(((1, 17),)).positions(torch.bfloat16)


def test_combine_drops_what_cancels() -> None:
    assert combine((2.0, "a"), (1.0, {"a": -2.0, "b": 3.0})) == {"b": 3.0}


def test_builder_refuses() -> None:
    with pytest.raises(SpecError, match="constant channel 'one'"):
        NetworkBuilder(("row",), ("s",))
    builder = NetworkBuilder(("one",), ("s",))
    builder.block()
    with pytest.raises(SpecError, match="'ghost' is read in block 1 before"):
        builder.unit("a", "ghost")
    with pytest.raises(SpecError, match="'one' cannot be written"):
        builder.unit("one", "s")
    builder.unit("a", "s")
    with pytest.raises(SpecError, match="'a' is read in block 1 before"):
        builder.unit("b", "a")
    with pytest.raises(SpecError, match="heads come before the units"):
        builder.head(["s"], ["s"], "s", "c")
    builder.block()
    with pytest.raises(SpecError, match="as many keys as queries"):
        builder.head(["s"], [], "s", "c")


def test_network_refuses_what_does_not_chain_or_writes_positions() -> None:
    eye = torch.eye(2, dtype=torch.float64)
    with pytest.raises(SpecError, match="writes a position channel"):
        Network(("one",), ("s",), (), (Block((), GatedMap(eye, eye, eye, ("identity",) * 2)),))
    with pytest.raises(SpecError, match="must differ"):
        Network(("one",), ("one",), (), ())
    with pytest.raises(SpecError, match="the map must be"):
        Network(("one",), ("s",), (), (Block((), GatedMap(eye, eye[:1], eye, ("identity",) * 2)),))
    with pytest.raises(SpecError, match="has no channel 'z'"):
        Network(("one",), ("s",), (), ()).channel("z")


def test_fingerprint_sees_every_part() -> None:
    """Weights, names and activations: one changed entry, name or activation changes the digest."""

    def variant(coefficient: float = 1.0, name: str = "a", activation: str = "relu") -> str:
        builder = NetworkBuilder(("one",), ("s",))
        builder.block()
        builder.unit({name: coefficient}, "s", "one", activation)
        return builder.build().fingerprint()

    prints = {variant(), variant(1.0 + 1e-15), variant(name="b"), variant(activation="identity")}
    assert len(prints) == 4
    assert variant() == variant()
