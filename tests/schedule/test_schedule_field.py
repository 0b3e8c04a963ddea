"""The definition: field, derivative, steps and their inverses, flows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fixedformer.schedule import field

from .schedule_oracle import field_by_hand, pair, quotient

SIZES = st.tuples(st.integers(1, 4), st.integers(1, 4), st.booleans(), st.integers(0, 10**6))


@settings(max_examples=25, deadline=None)
@given(SIZES)
def test_field_and_derivative(size):
    n, d, causal, seed = size
    A, V = pair(d, seed)
    X = np.random.default_rng(seed).standard_normal((2, n, d))
    F = field.vector_field(X, A[0], V[0], causal)
    for x, f in zip(X, F):
        np.testing.assert_allclose(f, field_by_hand(x.tolist(), A[0], V[0], causal), atol=1e-12)
    jacobian = field.field_jacobian(X, A[0], V[0], causal)
    for x, j in zip(X, jacobian):
        measured = quotient(lambda z: field.vector_field(z, A[0], V[0], causal), x).reshape(n, d, n, d)
        np.testing.assert_allclose(j, measured, atol=2e-7 * max(1, np.abs(j).max()))


def test_large_scores_do_not_overflow():
    X = np.array([[[1e3, -1e3], [2e3, 5.0]]])
    assert np.isfinite(field.vector_field(X, np.eye(2), np.eye(2))).all()


def test_orders_of_accuracy():
    """Residual steps converge with order 1 to the flow, Runge-Kutta with order 4: slopes on a log-log scale."""
    A, V = pair(3, 1)
    X = np.random.default_rng(1).standard_normal((1, 3, 3))
    truth = field.adaptive_flow(X, 0.4, A[0], V[0])
    for step, order in ((field.residual_step, 1), (field.runge_kutta_step, 4)):
        errors = []
        for count in (16, 32, 64):
            Z = X
            for _ in range(count):
                Z = step(Z, 0.4 / count, A[0], V[0])
            errors.append(np.abs(Z - truth).max())
        slopes = np.log2(np.array(errors[:-1]) / errors[1:])
        assert np.abs(slopes - order).max() < 0.3, (step, slopes)


@pytest.mark.parametrize("causal", [False, True])
def test_steps_are_undone(causal):
    A, V = pair(3, 2, 6.0)
    X = np.random.default_rng(2).standard_normal((5, 3, 3))
    for eta in (0.05, -0.05, 0.1):
        back = field.undo_residual_step(field.residual_step(X, eta, A[1], V[1], causal), eta, A[1], V[1], causal)
        np.testing.assert_allclose(back, X, atol=1e-12)


def test_what_has_no_preimage_is_nan():
    """eta = -1 with V = 1 and one token: Z - Z = 0 for every Z, so X = 1 has none."""
    back = field.undo_residual_step(np.ones((1, 1, 1)), -1.0, np.eye(1), np.eye(1))
    assert np.isnan(back).all()


def test_flow_runs_backwards():
    A, V = pair(2, 3)
    X = np.random.default_rng(3).standard_normal((2, 3, 2))
    there = field.adaptive_flow(X, 0.7, A[0], V[0])
    np.testing.assert_allclose(field.adaptive_flow(there, -0.7, A[0], V[0]), X, atol=1e-11)
    assert field.adaptive_flow(X, 0.0, A[0], V[0]) is X


def test_one_token_moves_linearly():
    """n = 1: attention is the identity, so the flow is x exp(t V)."""
    from scipy.linalg import expm

    A, V = pair(3, 4)
    x = np.random.default_rng(4).standard_normal((1, 1, 3))
    np.testing.assert_allclose(field.adaptive_flow(x, 0.9, A[0], V[0])[0, 0], x[0, 0] @ expm(0.9 * V[0]), rtol=1e-11)
