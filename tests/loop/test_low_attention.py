"""Attention as products: PyTorch's attention, forwards and backwards, in every format, causal in blocks or whole."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from fixedformer.loop import low_attention
from fixedformer.loop.low_attention import BLOCK, LONGEST, attend, products


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


def test_products_are_no_worse_than_the_kernel_in_bfloat16():
    given, gradient = heads(100, torch.bfloat16)
    exact = [x.detach().double().requires_grad_() for x in given]
    right = torch.autograd.grad(scaled_dot_product_attention(*exact), exact, gradient.double())
    theirs = torch.autograd.grad(scaled_dot_product_attention(*given), given, gradient)
    ours = torch.autograd.grad(products(*given, False), given, gradient)
    for a, b, want in zip(ours, theirs, right):
        assert (a.double() - want).norm() <= 1.5 * (b.double() - want).norm()


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


def test_a_second_derivative_is_refused():
    given, _ = heads(3, torch.float64)
    first = torch.autograd.grad(products(*given, True).square().sum(), given, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        first[0].sum().backward()
