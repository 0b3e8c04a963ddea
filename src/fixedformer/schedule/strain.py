"""How much each word stretches, and the derivative of that: what keeps the end-to-end amplification low.

For directions E (size, e) of one system let Y = M E = U S V'. The strain is log(Y'Y)/2 = V log(S) V'; in the basis V it
is diag(log S) and its derivative is
    dr_ij = phi_ij (V' (Y' dY + dY' Y) V)_ij,   phi_ij = (log S_i - log S_j) / (S_i^2 - S_j^2), 1/(2 S_i^2) on the
    diagonal.
dY = dM E is the change of M along a move of node or durations; second derivatives commute, so it is the change of
(M, B) along E: one difference quotient for each direction. Source: ours; docs/theory/schedule.md, section 5.
"""

from dataclasses import dataclass

import numpy as np

from fixedformer.schedule.field import Array
from fixedformer.schedule.lifted import Weights
from fixedformer.schedule.maps import WordMaps

OFFSET = 1e-5
"""Difference quotient: its truncation, 1e-5 times a third derivative, is far below what a Gauss-Newton step feels."""


@dataclass(frozen=True)
class Linearised:
    """Words at their nodes: ends, M = state, B = by_duration, and the strain with its derivative (durations last)."""

    ends: Array
    state: Array
    by_duration: Array
    strain: Array  # (words, sequences, q)
    slope: Array  # (words, sequences, q, size + K)


def directions(state: Array, generator: np.random.Generator, top: int, bottom: int, random: int) -> Array:
    """Orthonormal directions (words, sequences, size, e): those that M stretches most and least, then random ones."""
    size = state.shape[-1]
    top = min(top, size)
    bottom = min(bottom, size - top)
    random = min(random, size - top - bottom)
    rows = np.linalg.svd(state)[2]
    chosen = np.concatenate([rows[..., :top, :], rows[..., size - bottom :, :]], -2)
    if not random:
        return np.swapaxes(chosen, -1, -2)
    between = size - top - bottom
    mixed = np.linalg.qr(generator.standard_normal((*state.shape[:2], between, random)))[0]
    rest = np.swapaxes(rows[..., top : size - bottom, :], -1, -2) @ mixed
    return np.concatenate([np.swapaxes(chosen, -1, -2), rest], -1)


def linearise(maps: WordMaps, nodes: Array, durations: Array, E: Array) -> Linearised:
    """Everything that a step of the relaxation needs, from one call of the compiled loop."""
    words, sequences, size = nodes.shape
    K, e = durations.shape[1], E.shape[-1]
    points = np.concatenate([nodes[:, :, None], nodes[:, :, None] + OFFSET * np.swapaxes(E, -1, -2)], 2)
    ends, tangents = maps(points.reshape(words, sequences * (1 + e), size), durations, "all")
    ends = ends.reshape(words, sequences, 1 + e, size)[:, :, 0]
    tangents = tangents.reshape(words, sequences, 1 + e, size, size + K)
    state, by_duration = tangents[:, :, 0, :, :size], tangents[:, :, 0, :, size:]
    change = (tangents[:, :, 1:] - tangents[:, :, :1]) / OFFSET  # (words, sequences, e, size, size + K)
    left, S, V = np.linalg.svd(state @ E, full_matrices=False)
    squares = S**2
    a, b = squares[..., :, None], squares[..., None, :]
    apart = np.abs(a - b) > 1e-7 * (a + b)
    phi = np.where(apart, 0.5 * (np.log(a) - np.log(b)) / np.where(apart, a - b, 1.0), 1 / (a + b))
    half = np.swapaxes(left * S[..., None, :], -1, -2)[:, :, None] @ change  # (.., E, i, p)
    both = V[:, :, None] @ np.moveaxis(half, 2, -2)  # (.., i, j, p)
    slope = phi[..., None] * (both + np.swapaxes(both, 2, 3))
    i, j = np.triu_indices(e)
    slope = slope[:, :, i, j] * np.where(i == j, 1.0, np.sqrt(2.0))[:, None]
    strain = np.where(i == j, np.log(S)[:, :, i], 0.0)
    return Linearised(ends, state, by_duration, strain, slope)


def weights(at: Linearised, pull: Array, scale: Array, strength: float, duration: float, node: float) -> Weights:
    """Gauss-Newton model of strength |strain|^2 / 2 + duration |t|^2 / 2 + node |dZ|^2 / 2; t in units of `scale`."""
    _, sequences, size, K = at.by_duration.shape
    model = Weights.plain(pull, sequences * size, duration, node)
    H, g = model.hessian, model.gradient
    for s in range(sequences):
        part = slice(K + s * size, K + (s + 1) * size)
        by_node, by_time = at.slope[:, s, :, :size], at.slope[:, s, :, size:] * scale[:, None]
        cross = strength * np.swapaxes(by_time, 1, 2) @ by_node
        H[:, :K, :K] += strength * np.swapaxes(by_time, 1, 2) @ by_time
        H[:, part, part] += strength * np.swapaxes(by_node, 1, 2) @ by_node
        H[:, :K, part] += cross
        H[:, part, :K] += np.swapaxes(cross, 1, 2)
        g[:, :K] += strength * np.einsum("wqi,wq->wi", by_time, at.strain[:, s])
        g[:, part] += strength * np.einsum("wqi,wq->wi", by_node, at.strain[:, s])
    return model


def total_strain(state: Array) -> float:
    """sum log^2 of all singular values, halved: the whole strain, without choosing directions."""
    if not np.isfinite(state).all():
        return float("inf")
    values = np.maximum(np.linalg.svd(state, compute_uv=False), 1e-300)
    return float(0.5 * (np.log(values) ** 2).sum())
