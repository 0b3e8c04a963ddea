"""Attention as products: PyTorch's attention, forwards and backwards, in every format, causal in blocks or whole."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from fixedformer.loop import low_attention
from fixedformer.loop.low_attention import BLOCK, LONGEST, attend, kept_attention, products
from fixedformer.loop.transformer import LoopedTransformer


def heads(tokens, dtype, seed=0):
    """Query, key and value, strided as they come out of one product, and a gradient."""
    generator = torch.Generator().manual_seed(seed)
    fused = torch.randn(2, tokens, 3, 3, 8, generator=generator, dtype=torch.float64).to(dtype)
    gradient = torch.randn(2, 3, tokens, 8, generator=generator, dtype=torch.float64).to(dtype)
    return [x.detach().requires_grad_() for x in fused.permute(2, 0, 3, 1, 4)], gradient


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tokens", [1, 5, BLOCK, BLOCK + 1, 3 * BLOCK - 7])
@pytest.mark.parametrize(("dtype", "within"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.02)])
def test_products_are_attention(tokens, causal, dtype, within):
    given, gradient = heads(tokens, dtype)
    exact = [x.detach().double().requires_grad_() for x in given]
    want = scaled_dot_product_attention(*exact, is_causal=causal)
    got = products(*given, causal)
    assert got.dtype == dtype
    wanted = torch.autograd.grad(want, exact, gradient.double())
    found = torch.autograd.grad(got, given, gradient)
    for ours, theirs in zip((got, *found), (want, *wanted)):
        assert (ours.double() - theirs).norm() <= within * theirs.norm() + 1e-15


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("sharp", [1, 4])
def test_products_are_about_as_exact_as_the_kernel_in_bfloat16(sharp, autocast):
    """Under autocast too, which would make every product bfloat16, scores as well."""
    given, gradient = heads(100, torch.bfloat16)
    given = [(x.detach() * scale).requires_grad_() for x, scale in zip(given, (sharp, sharp, 1))]
    exact = [x.detach().double().requires_grad_() for x in given]
    want = scaled_dot_product_attention(*exact)
    right = (want, *torch.autograd.grad(want, exact, gradient.double()))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        outs = scaled_dot_product_attention(*given), products(*given, False)
    kernel, ours = ((out, *torch.autograd.grad(out, given, gradient)) for out in outs)
    for a, b, want in zip(ours, kernel, right):
        assert (a.double() - want).norm() <= 1.7 * (b.double() - want).norm()


@pytest.mark.parametrize(("tokens", "dtype", "masked", "taken"), [
    (9, torch.bfloat16, False, True), (9, torch.float32, False, False), (9, torch.bfloat16, True, False),
    (LONGEST + 1, torch.bfloat16, False, False),
])  # fmt: skip
def test_products_are_taken_for_short_bfloat16_without_a_mask(tokens, dtype, masked, taken, monkeypatch):
    calls = []
    monkeypatch.setattr(low_attention, "products", lambda *given: calls.append(given) or products(*given))
    given, _ = heads(tokens, dtype)
    allowed = torch.ones(tokens, tokens, dtype=torch.bool).tril() if masked else True
    got = attend(*given, allowed)
    assert len(calls) == taken
    want = scaled_dot_product_attention(*(x.double() for x in given), is_causal=True)
    assert (got.double() - want).norm() <= 0.02 * want.norm()


@pytest.mark.parametrize("positions", ["none", "learned", "sinusoidal", "rotary"])
def test_a_model_under_autocast_takes_them(positions, monkeypatch):
    calls = []
    monkeypatch.setattr(low_attention, "products", lambda *given: calls.append(given) or products(*given))
    model = LoopedTransformer(d_in=7, width=8, heads=2, loops=3, tokens=9, positions=positions)
    X = torch.randint(7, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():  # a training step has them within whole_run
        with torch.autocast("cpu", torch.bfloat16):
            model(X)
        assert len(calls) == 3
        model(X)
    assert len(calls) == 3


@pytest.mark.parametrize("tokens", [1, BLOCK, 2 * BLOCK + 5])
@pytest.mark.parametrize("causal", [False, True])
def test_what_is_kept_is_counted(tokens, causal):
    given, _ = heads(tokens, torch.float32)
    kept = products(*given, causal).grad_fn.saved_tensors[3:]
    assert sum(x[0].numel() for x in kept) == kept_attention(tokens, causal)


def test_a_second_derivative_is_refused():
    given, _ = heads(3, torch.float64)
    first = torch.autograd.grad(products(*given, True).square().sum(), given, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        first[0].sum().backward()
