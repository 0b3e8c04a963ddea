"""The inner loop: end points of words and their first derivatives, compiled by numba.

One system is one sequence, flattened to `size` = tokens * d numbers, moved by a word: segment k runs block blocks[k]
for the signed duration t[k]. scheme 0: `substeps` residual steps X <- X + (t/substeps) F(X), the finite-depth machine
itself. scheme 1: `substeps` steps of classical Runge-Kutta, which stands for the flow while we search.

The definition that this is tested against is `field.py`, which shares no code with it.
"""

from typing import Any

import numpy as np
from numba import njit, prange

OPTIONS: dict[str, Any] = {"cache": True, "fastmath": {"contract"}, "error_model": "numpy"}
"""Machine code is kept on disk; a * b + c may be one rounding (nothing else is reordered); division is IEEE's."""


@njit(**OPTIONS)
def _field(x, scores, values, tokens, causal, moved, weights, means, out):  # type: ignore[no-untyped-def]
    """F(x) into `out`; also x A into `moved`, the softmax into `weights`, its means of tokens into `means`."""
    d = scores.shape[0]
    for i in range(tokens):
        for b in range(d):
            total = 0.0
            for a in range(d):
                total += x[i * d + a] * scores[a, b]
            moved[i * d + b] = total
        last = i + 1 if causal else tokens
        top = -np.inf
        for j in range(last):
            total = 0.0
            for b in range(d):
                total += moved[i * d + b] * x[j * d + b]
            weights[i, j] = total
            top = max(top, total)
        total = 0.0
        for j in range(last):
            weights[i, j] = np.exp(weights[i, j] - top)
            total += weights[i, j]
        for a in range(d):
            means[i * d + a] = 0.0
        for j in range(last):
            weights[i, j] /= total
            for a in range(d):
                means[i * d + a] += weights[i, j] * x[j * d + a]
        for b in range(d):
            total = 0.0
            for a in range(d):
                total += means[i * d + a] * values[a, b]
            out[i * d + b] = total


@njit(**OPTIONS)
def _jacobian(  # type: ignore[no-untyped-def]
    x, scores, values, tokens, causal, moved, weights, out, keyed, valued, jac
):
    """dF/dx into `jac` (size, size), from what `_field` left behind. `keyed` and `valued` are scratch.

    dF_i/dx_j = P_ij [(x_i A)' ((x_j - o_i) V) + V] + δ_ij A Cov_i V with o_i = sum_j P_ij x_j
    (docs/theory/schedule.md); (x_j - o_i) V = x_j V - F_i.
    """
    d = scores.shape[0]
    for j in range(tokens):
        for b in range(d):
            first, second = 0.0, 0.0
            for a in range(d):
                first += scores[b, a] * x[j * d + a]
                second += x[j * d + a] * values[a, b]
            keyed[j * d + b], valued[j * d + b] = first, second
    for i in range(tokens):
        last = i + 1 if causal else tokens
        for b in range(d):
            row = i * d + b
            for j in range(tokens):
                p = weights[i, j] if j < last else 0.0
                away = p * (valued[j * d + b] - out[row])
                for a in range(d):
                    jac[row, j * d + a] = away * moved[i * d + a] + p * values[a, b]
            for j in range(last):
                away = weights[i, j] * (valued[j * d + b] - out[row])
                for a in range(d):
                    jac[row, i * d + a] += away * keyed[j * d + a]


@njit(**OPTIONS)
def _push(jac, eta, tangents, columns, image):  # type: ignore[no-untyped-def]
    """image = eta * jac @ tangents for the first `columns` columns."""
    size = jac.shape[0]
    whole = size - size % 4
    for row in range(size):
        for c in range(columns):
            image[row, c] = 0.0
        for k in range(0, whole, 4):  # four at a time: fewer stores
            j0, j1, j2, j3 = eta * jac[row, k], eta * jac[row, k + 1], eta * jac[row, k + 2], eta * jac[row, k + 3]
            for c in range(columns):
                image[row, c] += (
                    j0 * tangents[k, c] + j1 * tangents[k + 1, c] + j2 * tangents[k + 2, c] + j3 * tangents[k + 3, c]
                )
        for k in range(whole, size):
            j0 = eta * jac[row, k]
            for c in range(columns):
                image[row, c] += j0 * tangents[k, c]


@njit(**OPTIONS)
def _word(  # type: ignore[no-untyped-def]
    x, t, blocks, scores, values, tokens, causal, substeps, scheme, want, tangents
):
    """Move x (size,) in place by one word; `tangents` (size, columns) with it where `want` > 0."""
    size, total = x.shape[0], tangents.shape[1]
    moved, means, out = np.empty(size), np.empty(size), np.empty(size)
    keyed, valued = np.empty(size), np.empty(size)
    weights, jac = np.empty((tokens, tokens)), np.empty((size, size))
    image, stage_t, sum_t = np.empty((size, total)), np.empty((size, total)), np.empty((size, total))
    stage_x, sum_x = np.empty(size), np.empty(size)
    tangents[:] = 0.0
    for row in range(size if want > 0 else 0):
        tangents[row, row] = 1.0
    for k in range(blocks.shape[0]):
        a, v, step = scores[blocks[k]], values[blocks[k]], t[k] / substeps
        columns = 0 if want == 0 else size if want == 1 else size + k + (1 if scheme == 0 else 0)
        for _ in range(substeps):
            if scheme == 0:
                _field(x, a, v, tokens, causal, moved, weights, means, out)
                if columns > 0:
                    _jacobian(x, a, v, tokens, causal, moved, weights, out, keyed, valued, jac)
                    _push(jac, step, tangents, columns, image)
                    for row in range(size):
                        for c in range(columns):
                            tangents[row, c] += image[row, c]
                        if want == 2:
                            tangents[row, size + k] += out[row] / substeps
                for row in range(size):
                    x[row] += step * out[row]
                continue
            stage_x[:], sum_x[:] = x, x
            for row in range(size):
                for c in range(columns):
                    stage_t[row, c] = tangents[row, c]
                    sum_t[row, c] = tangents[row, c]
            for stage in range(4):
                share = 1.0 / 6.0 if stage == 0 or stage == 3 else 1.0 / 3.0
                ahead = 1.0 if stage == 2 else 0.5
                _field(stage_x, a, v, tokens, causal, moved, weights, means, out)
                if columns > 0:
                    _jacobian(stage_x, a, v, tokens, causal, moved, weights, out, keyed, valued, jac)
                    _push(jac, step, stage_t, columns, image)
                    for row in range(size):
                        for c in range(columns):
                            sum_t[row, c] += share * image[row, c]
                            stage_t[row, c] = tangents[row, c] + ahead * image[row, c]
                for row in range(size):
                    sum_x[row] += share * step * out[row]
                    stage_x[row] = x[row] + ahead * step * out[row]
            x[:] = sum_x
            for row in range(size):
                for c in range(columns):
                    tangents[row, c] = sum_t[row, c]
        if scheme == 1 and want == 2:  # the flow's derivative in its duration is the field where it ends
            _field(x, a, v, tokens, causal, moved, weights, means, out)
            for row in range(size):
                tangents[row, size + k] = out[row]


@njit(parallel=True, **OPTIONS)
def move_words(  # type: ignore[no-untyped-def]
    x, t, of, blocks, scores, values, tokens, causal, substeps, scheme, want, tangents
):
    for s in prange(x.shape[0]):
        _word(x[s], t[of[s]], blocks, scores, values, tokens, causal, substeps, scheme, want, tangents[s])


@njit(**OPTIONS)
def _eliminate(matrix, right):  # type: ignore[no-untyped-def]
    """Solve matrix x = right in place, rows exchanged by the largest pivot."""
    size = right.shape[0]
    for k in range(size):
        pivot = k
        for row in range(k + 1, size):
            if abs(matrix[row, k]) > abs(matrix[pivot, k]):
                pivot = row
        if pivot != k:
            for c in range(size):
                matrix[k, c], matrix[pivot, c] = matrix[pivot, c], matrix[k, c]
            right[k], right[pivot] = right[pivot], right[k]
        for row in range(k + 1, size):
            factor = matrix[row, k] / matrix[k, k]
            for c in range(k + 1, size):
                matrix[row, c] -= factor * matrix[k, c]
            right[row] -= factor * right[k]
    for k in range(size - 1, -1, -1):
        for c in range(k + 1, size):
            right[k] -= matrix[k, c] * right[c]
        right[k] /= matrix[k, k]


@njit(**OPTIONS)
def _undo_one(  # type: ignore[no-untyped-def]
    end, z, eta, a, v, tokens, causal, rounds, moved, weights, means, out, keyed, valued, jac, gap, ahead, kept
):
    """Damped Newton's method for z + eta F(z) = end, from z, in place; the largest defect that is left."""
    size = z.shape[0]
    least, share = np.inf, 1.0
    kept[:] = z
    for _ in range(rounds):
        _field(z, a, v, tokens, causal, moved, weights, means, out)
        defect = 0.0
        for i in range(size):
            gap[i] = end[i] - z[i] - eta * out[i]
            defect = max(defect, abs(gap[i]))
        if defect < least:
            least, share = defect, 1.0
            kept[:] = z
            _jacobian(z, a, v, tokens, causal, moved, weights, out, keyed, valued, jac)
            for i in range(size):
                for j in range(size):
                    jac[i, j] *= eta
                jac[i, i] += 1.0
            _eliminate(jac, gap)
            ahead[:] = gap
        elif share < 1e-3 or least == 0.0:
            break
        else:
            share *= 0.5
        for i in range(size):
            z[i] = kept[i] + share * ahead[i]
    z[:] = kept
    return least


@njit(**OPTIONS)
def undo_steps(  # type: ignore[no-untyped-def]
    x, t, order, scores, values, tokens, causal, substeps, rounds, worst
):
    """Run residual steps backwards, last segment first, x (systems, size) in place; the worst relative defect of each.

    Each step solves Z + eta F(Z) = X by damped Newton's method, from Z = X, with eta growing in 1, 4, .. 256 stages: as
    few as find it.
    """
    size = x.shape[1]
    moved, means, out = np.empty(size), np.empty(size), np.empty(size)
    keyed, valued, z, gap = np.empty(size), np.empty(size), np.empty(size), np.empty(size)
    weights, jac = np.empty((tokens, tokens)), np.empty((size, size))
    kept, ahead = np.empty(size), np.empty(size)
    for s in range(x.shape[0]):
        worst[s] = 0.0
        for step in range(order.shape[0] * substeps - 1, -1, -1):
            k = step // substeps
            a, v, eta = scores[order[k]], values[order[k]], t[k] / substeps
            top = 1.0
            for i in range(size):
                top = max(top, abs(x[s, i]))
            stages, left = 1, np.inf
            while stages <= 256:
                z[:] = x[s]
                for stage in range(stages):
                    left = _undo_one(
                        x[s], z, eta * (stage + 1) / stages, a, v, tokens, causal, rounds,
                        moved, weights, means, out, keyed, valued, jac, gap, ahead, kept,
                    )  # fmt: skip
                if left <= 1e-13 * top:
                    break
                stages *= 4
            x[s] = z
            worst[s] = max(worst[s], left / top)
