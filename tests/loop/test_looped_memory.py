"""What checkpointing keeps, what the estimate says, and that the benchmark compares like with like."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

import fixedformer as ff
from fixedformer.experiments.looped import kept_bytes

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "looped_step.py"


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("looped_step", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["looped_step"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["looped_step"]


@pytest.mark.parametrize("timestep", [False, True])
def test_nested_checkpointing_hardly_grows_and_changes_no_gradient(bench, timestep):
    """From 8 to 64 loops at most 1.4-fold, where keeping everything grows 8-fold; gradients within 1e-6."""
    size = bench.SIZES["small"]
    X, labels = bench.data(size)
    peaks, gradients = {}, {}
    for kind in ("none", "nested"):
        for loops in (8, 64):
            model = bench.ours_of(size, timestep, loops=loops, checkpointing=kind)
            if timestep:
                torch.nn.init.normal_(model.modulate_bias, std=0.3, generator=torch.Generator().manual_seed(0))
            peaks[kind, loops] = bench.saved_bytes(model, X, labels)
            gradients[kind, loops] = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    assert peaks["nested", 64] <= 1.4 * peaks["nested", 8]
    assert peaks["none", 64] > 7 * peaks["none", 8]
    for loops in (8, 64):
        for one, two in zip(gradients["none", loops], gradients["nested", loops]):
            torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("checkpointing", ["none", "loop", "nested"])
@pytest.mark.parametrize("timestep", [False, True])
@pytest.mark.parametrize(("low", "tokens", "causal", "positions"), [
    (False, 24, False, "learned"), (False, 150, True, "rotary"), (True, 24, False, "learned"),
    (True, 150, False, "learned"), (True, 150, True, "learned"), (True, 150, False, "rotary"),
    (True, 150, True, "rotary"),
])  # fmt: skip
def test_the_estimate_is_near(bench, checkpointing, timestep, low, tokens, causal, positions):
    """Within a factor of two of what is alive at the peak: it decides whether a run is refused."""
    size = bench.Size(40, 32, 4, 12, 16, tokens, causal, 0)
    X, labels = bench.data(size)
    model = bench.ours_of(size, timestep, checkpointing=checkpointing, positions=positions)
    measured = bench.saved_bytes(model, X, labels, low)
    assert 0.5 < kept_bytes(model.spec, 16, tokens, 2 if low else 4, cpu=True) / measured < 2


@pytest.mark.parametrize(("vocabulary", "scored", "changes"), [
    (8000, 0, {}), (8000, 0, {"checkpointing": "nested"}), (40, 1, {"loss_over": "all"}),
    (40, 1, {"loss_over": "all", "checkpointing": "nested"}), (40, 0, {"injection": "add", "backprop_loops": 2}),
])  # fmt: skip
def test_the_estimate_sees_read_outs_and_truncation(bench, vocabulary, scored, changes):
    size = bench.Size(vocabulary, 64, 4, 12, 16, 32, False, scored)
    X, labels = bench.data(size)
    model = bench.ours_of(size, False, **changes)
    measured = bench.saved_bytes(model, X, labels)
    told = kept_bytes(model.spec, 16, 32, 4, cpu=True, scored=(scored or 32) / 32)
    assert 1 / 1.6 < told / measured < 1.6


def test_the_plain_model_is_ours_without_timesteps(bench):
    """Same weights, same loss: the benchmark's two sides compute one thing."""
    size = bench.Size(11, 16, 2, 3, 4, 6, True, 2)
    X, labels = bench.data(size)
    plain, ours = bench.PlainLooped(size, False), bench.ours_of(size, False)
    with torch.no_grad():
        pairs = [(ours.embed, plain.tokens.weight), (ours.places, plain.places.weight)]
        layer = ours.layers[0]
        pairs += [(layer.inward, plain.heads_in.weight.mT), (layer.outward, plain.heads_out.weight.mT),
                  (layer.widen, plain.wide.weight.mT), (layer.narrow, plain.narrow.weight.mT)]  # fmt: skip
        for one, two in pairs:
            two.normal_(std=0.3)
            one.copy_(two)
    plain.first.eps = plain.second.eps = plain.last.eps = 1e-6  # as ours; the default is float32's smallest step
    with torch.no_grad():
        assert float(bench.ours_loss(ours, X, labels)) == pytest.approx(float(plain(X, labels)), rel=1e-5)


def test_x_transformers_takes_the_same_sizes(bench):
    pytest.importorskip("x_transformers")
    size = bench.Size(11, 16, 2, 3, 4, 6, True, 0)
    model = bench.other_of(size)
    loss = bench.other_loss(model, *bench.data(size))
    loss.backward()
    assert torch.isfinite(loss)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when it loads its compiler
def test_compiled_is_eager():
    model = ff.LoopedTransformer(d_in=9, width=16, heads=2, loops=3, tokens=8, timestep="adaln", seed=1)
    torch.nn.init.normal_(model.modulate_bias, std=0.3, generator=torch.Generator().manual_seed(0))
    X = torch.randint(9, (3, 8), generator=torch.Generator().manual_seed(0))
    scored = torch.zeros(3, 8, dtype=torch.bool)
    scored[:, -2:] = True
    want = model.readouts(X, which="loss", scored=scored)
    model.compile_readouts()
    torch.testing.assert_close(model.readouts(X, which="loss", scored=scored), want, rtol=1e-4, atol=1e-5)
