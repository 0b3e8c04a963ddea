"""The certificate holds for the right prompt, fails for a wrong one, and its bounds are neither broken nor idle."""

import pytest
import torch

from fixedformer.errors import SpecError
from fixedformer.prompt import oracle
from fixedformer.prompt.certify import relative_bounds
from fixedformer.prompt.simulator import AttentionSimulator, Prompt

from .conftest import direct, gaussian, relative

SIZES = (4, 3, 2, 2)


def target() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return gaussian(2, 3, 3), gaussian(2, 3, 2, seed=1), gaussian(4, 3, seed=2)


def test_oracle_equals_torch() -> None:
    A, V, X = target()
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    head = oracle.attention_head((A[0].tolist(),), V[0].tolist(), X.tolist(), mask.tolist(), 0.5)
    assert (
        relative(torch.tensor(head.output, dtype=torch.float64), direct(A[0][None] / 2, V[0][None], X, mask)[0])
        <= 1e-15
    )
    scores = (X @ A[0] @ X.mT / 2).abs()
    assert head.score_largest == pytest.approx(float(scores.max()), rel=1e-14)
    assert head.score_size == pytest.approx(float((X.abs() @ A[0].abs() @ X.abs().mT / 2).max()), rel=1e-14)


@pytest.mark.parametrize("backend", ["hard", "stock", "soft"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("options", [{}, {"mask": "causal"}, {"d_out": 3}, {"d_k": 3}, {"d_k": 3, "d_out": 2}])
def test_holds(backend: str, dtype: torch.dtype, options: dict) -> None:
    A, V, X = target()
    simulator = AttentionSimulator(*SIZES, backend, dtype=dtype, **options)
    query_key = (A, A.mT) if "d_k" in options else A
    given = {"output": gaussian(2, 2, options["d_out"]) if "d_out" in options else None, "scale": 0.7}
    certificate = simulator.certify(simulator.compile(query_key, V, X, **given), query_key, V, X, **given)
    assert certificate.holds, str(certificate)
    output = next(check for check in certificate.checks if check.claim.startswith("output"))
    assert output.cases == 4 * (options.get("d_out") or 4)
    assert output.bound < (2e-12 if dtype == torch.float64 else 2e-4)
    assert len(certificate.checks) == (4 if backend == "soft" else 6)
    assert certificate.context["fingerprint"] == simulator.fingerprint()


def test_masks_and_short_inputs() -> None:
    A, V, X = target()
    simulator = AttentionSimulator(*SIZES, mask="given")
    keep = torch.tensor([True, True, False])
    prompt = simulator.compile(A, V, X[:3], mask=keep)
    assert simulator.certify(prompt, A, V, X[:3], mask=keep).holds
    other = simulator.certify(prompt, A, V, X[:3], mask="causal")
    assert [check.holds for check in other.checks] == [False, True, False, True, False, True]


def test_any_changed_token_fails() -> None:
    """Each token, moved by 1e-6 relative (or from 0): the prompt check sees it, and so does the output where read."""
    A, V, X = target()
    simulator = AttentionSimulator(*SIZES)
    prompt = simulator.compile(A, V, X)
    outputs_failed = 0
    for token in range(prompt.tokens):
        values = prompt.values.clone()
        values[token] += 1e-6 * max(1.0, abs(float(values[token])))
        certificate = simulator.certify(Prompt(values, 4, prompt.machine_fingerprint), A, V, X)
        assert not certificate.holds
        assert not certificate.checks[0].holds
        outputs_failed += not next(check for check in certificate.checks if check.claim.startswith("output")).holds
    assert outputs_failed == 2 * (9 + 6) + 4 * 3  # every weight and every entry of X; not the grid's empty column


def test_bounds_are_not_idle() -> None:
    """The worst error of 200 targets lies within a factor of 1,000 of the bound on the weights."""
    simulator = AttentionSimulator(3, 2, 2)
    largest = 0.0
    for seed in range(200):
        A, V, X = gaussian(1, 2, 2, seed=seed) * 3, gaussian(1, 2, 2, seed=seed + 1), gaussian(3, 2, seed=seed + 2)
        check = simulator.certify(simulator.compile(A, V, X), A, V, X).checks[2]
        assert check.holds
        largest = max(largest, check.measured / check.bound)
    assert largest > 1e-3


def test_bounds_grow_with_what_they_bound() -> None:
    size = AttentionSimulator(3, 2, 2).size
    low, high = relative_bounds(size, 1.0), relative_bounds(size, 100.0)
    assert low[0] < high[0]
    assert low[1] < high[1]
    stock = AttentionSimulator(3, 2, 2, backend="stock", sharpness=20.0).size
    assert relative_bounds(stock, 1.0)[1] > 1e-9  # e^-20 times the tokens


def test_batches_are_refused() -> None:
    A, V, X = target()
    simulator = AttentionSimulator(*SIZES)
    with pytest.raises(SpecError, match="one target and one input"):
        simulator.certify(simulator.compile(A, V, X.expand(2, 4, 3)), A, V, X.expand(2, 4, 3))
