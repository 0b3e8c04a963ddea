"""The definition: vector field of one block, its derivative, residual steps, flows. NumPy, any batch; no compiled code.

F(X) = softmax(X A X^T) X V for X (..., tokens, d), with the sum over earlier tokens only under a causal mask.
Everything fast in this folder is tested against this file, and schedules are judged with it.
"""

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def attention_weights(X: Array, scores: Array, causal: bool = False) -> Array:
    """softmax(X A X^T), (..., tokens, tokens), rows sum to one."""
    raw = X @ scores @ np.swapaxes(X, -1, -2)
    if causal:
        tokens = X.shape[-2]
        raw = np.where(np.tril(np.ones((tokens, tokens), dtype=bool)), raw, -np.inf)
    raw = np.exp(raw - raw.max(-1, keepdims=True))
    weights: Array = raw / raw.sum(-1, keepdims=True)
    return weights


def vector_field(X: Array, scores: Array, values: Array, causal: bool = False) -> Array:
    """F(X), the same shape as X (..., tokens, d); `scores` and `values` are A and V of one block, (d, d)."""
    field: Array = attention_weights(X, scores, causal) @ X @ values
    return field


def field_jacobian(X: Array, scores: Array, values: Array, causal: bool = False) -> Array:
    """dF(X)/dX, (..., tokens, d, tokens, d): [i, b, j, a] is dF_ib/dX_ja.

    dF_i/dx_j = P_ij [(x_i A)' ((x_j - o_i) V) + V] + δ_ij A Cov_i V, with o_i = sum_j P_ij x_j and Cov_i the covariance
    of the tokens under row i of P. Derived in docs/theory/schedule.md, section 2.
    """
    P = attention_weights(X, scores, causal)
    means = P @ X  # (..., i, d)
    centred = X[..., None, :, :] - means[..., :, None, :]  # (..., i, j, d)
    away, moved = centred @ values, X @ scores
    jacobian: Array = np.einsum("...ij,...ijb,...ia->...ibja", P, away, moved)
    jacobian += np.einsum("...ij,ab->...ibja", P, values)
    spread = np.einsum("...ij,...ijc,...ijb->...icb", P, centred, away)
    place = np.arange(X.shape[-2])
    jacobian[..., place, :, place, :] += np.moveaxis(np.einsum("ac,...icb->...iba", scores, spread), -3, 0)
    return jacobian


def residual_step(X: Array, eta: float, scores: Array, values: Array, causal: bool = False) -> Array:
    """X + eta F(X): one layer of the finite-depth machine; eta carries the sign."""
    moved: Array = X + eta * vector_field(X, scores, values, causal)
    return moved


def undo_residual_step(X: Array, eta: float, scores: Array, values: Array, causal: bool = False) -> Array:
    """The Z with Z + eta F(Z) = X, to rounding, for X (..., tokens, d).

    Newton's method while eta grows from 0 in 1, 4, 16 or 64 stages, so that it finds the Z that is connected with X:
    there is exactly one near X as long as |eta| times the Lipschitz constant of F is below one. Sequences for which it
    does not converge come back as NaN: a failure is a value, and the caller says what it was for.
    """
    found = np.full(X.shape, np.nan)
    for stages in (1, 4, 16, 64):
        Z = X
        with np.errstate(all="ignore"):
            for stage in range(1, stages + 1):
                Z = _newton(X, Z, eta * stage / stages, scores, values, causal)
            gap = np.abs(X - residual_step(Z, eta, scores, values, causal)).max((-2, -1))
        good = gap <= 1e-13 * (1 + np.abs(X).max((-2, -1)))
        found = np.where(good[..., None, None] & np.isnan(found), Z, found)
        if not np.isnan(found).any():
            break
    return found


def _newton(X: Array, Z: Array, eta: float, scores: Array, values: Array, causal: bool, rounds: int = 8) -> Array:
    """Newton's method for Z + eta F(Z) = X from Z; sequences that blow up stay NaN."""
    size = X.shape[-2] * X.shape[-1]
    for _ in range(rounds):
        gap = X - residual_step(Z, eta, scores, values, causal)
        usable = np.isfinite(gap).all((-2, -1))[..., None, None]
        jacobian = field_jacobian(Z, scores, values, causal).reshape(*X.shape[:-2], size, size)
        matrix = np.where(usable, np.eye(size) + eta * jacobian, np.eye(size))
        try:
            step = np.linalg.solve(matrix, gap.reshape(*X.shape[:-2], size, 1)).reshape(X.shape)
        except np.linalg.LinAlgError:  # a fold: no inverse there
            return np.full(X.shape, np.nan)
        Z = np.where(usable, Z + step, np.nan)
        if np.abs(gap).max(initial=0.0) <= 1e-15 * (1 + np.abs(X).max()):
            break
    return Z


def runge_kutta_step(X: Array, time: float, scores: Array, values: Array, causal: bool = False) -> Array:
    """One classical fourth-order step of X' = F(X)."""
    k1 = vector_field(X, scores, values, causal)
    k2 = vector_field(X + time / 2 * k1, scores, values, causal)
    k3 = vector_field(X + time / 2 * k2, scores, values, causal)
    k4 = vector_field(X + time * k3, scores, values, causal)
    moved: Array = X + time / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    return moved


def adaptive_flow(X: Array, time: float, scores: Array, values: Array, causal: bool = False) -> Array:
    """The flow of X' = F(X) for a signed time, by scipy's DOP853 at rtol 1e-13: the judge of continuous schedules.

    It shares neither code nor order with the Runge-Kutta steps that the search uses.
    """
    from scipy.integrate import solve_ivp

    if time == 0:
        return X
    shape = X.shape
    solution = solve_ivp(
        lambda _, x: (np.sign(time) * vector_field(x.reshape(shape), scores, values, causal)).reshape(-1),
        (0.0, abs(time)),
        X.reshape(-1),
        method="DOP853",
        rtol=1e-13,
        atol=1e-14,
    )
    end: Array = solution.y[:, -1].reshape(shape)
    return end
