"""Where the search starts: a path from X to Y, and on it words that almost return to where they begin.

A word is a palindrome w w^-1: h segments of alternating blocks with random signs and durations, then the same
backwards. In continuous time it is the identity; as residual steps it drifts a little. Small changes of its durations
move its end in every direction, which is what the solver uses.
"""

from collections.abc import Callable

import numpy as np
from scipy.linalg import expm, logm, polar

from fixedformer.schedule.field import Array
from fixedformer.schedule.maps import WordMaps

Path = Callable[[Array], Array]
"""Positions (count,) in [0, 1] -> points (count, sequences, tokens, d)."""


def order_of(half: int) -> Array:
    """Blocks of one word: 0, 1, 0, .. for `half` segments, then the same backwards."""
    forwards = np.arange(half) % 2
    return np.concatenate([forwards, forwards[::-1]])


def plan_path(X: Array, Y: Array, attempt: int, generator: np.random.Generator, linear_first: bool) -> Path:
    """Straight from X to Y at attempt 0, later through a Gaussian waypoint; first tokens as their flow allows.

    linear_first: the first token of every sequence moves by one linear map (causal masks, or one token): it goes along
    X_1 G(s), G(0) = 1, det G(s) > 0, instead.
    """
    way = None
    if attempt:
        way = (X + Y) / 2 + generator.standard_normal(X.shape) * min(1.0, 0.35 * attempt)
        for i in range(len(X)):  # tokens that are equal in X and in Y stay equal on the way
            for j in range(i):
                same = np.cumprod((X[i] == X[j]).all(-1) & (Y[i] == Y[j]).all(-1)).astype(bool)
                way[i][same] = way[j][same]
    corner = linear_path(X[:, 0], Y[:, 0]) if linear_first else None

    def path(position: Array) -> Array:
        s = np.asarray(position)[:, None, None, None]
        points: Array = X + (Y - X) * s
        if way is not None:
            points = np.where(s < 0.5, X + (way - X) * 2 * s, way + (Y - way) * (2 * s - 1))
        if corner is not None:
            points[:, :, 0] = corner(np.asarray(position))
        return points

    return path


def linear_map(first: Array, last: Array) -> Array:
    """The G (d, d) with `first` G = `last` that is nearest to the identity; det G > 0 wherever G is not forced.

    first, last: (sequences, d). Fewer than d independent rows leave a free complement, which is turned over if needed.
    """
    d = first.shape[1]
    G: Array = np.eye(d) + np.linalg.pinv(first) @ (last - first)
    rank = np.linalg.matrix_rank(first)
    if rank < d and np.linalg.det(G) <= 0:
        free = np.linalg.svd(first)[2][rank:]  # rows orthogonal to all of `first`
        missing = np.linalg.svd(last)[2][rank:]  # directions that `last` does not use
        for sign in (1.0, -1.0):
            turn = missing.copy()
            turn[0] *= sign
            candidate: Array = np.linalg.pinv(first) @ last + free.T @ turn
            if np.linalg.det(candidate) > 0:
                G = candidate
    return G


def linear_path(first: Array, last: Array) -> Callable[[Array], Array]:
    """Points first R^s P^s with R P = G the polar factors (a rotation and a positive matrix): never singular."""
    rotation, stretch = polar(linear_map(first, last))
    turn, grow = real_logarithm(rotation), np.real(logm(stretch))

    def path(position: Array) -> Array:
        return np.stack([first @ expm(s * turn) @ expm(s * grow) for s in position])

    return path


def real_logarithm(rotation: Array) -> Array:
    """A real logarithm of a rotation: eigenvalues -1 come in pairs, each pair a half turn in its plane."""
    log = logm(rotation)
    if np.abs(np.imag(log)).max() < 1e-8 and np.allclose(expm(np.real(log)), rotation, atol=1e-8):
        return np.array(np.real(log))
    values, vectors = np.linalg.eigh((rotation + rotation.T) / 2)
    flipped = vectors[:, values < -1 + 1e-6]
    turn = np.zeros_like(rotation)
    for a, b in zip(flipped.T[::2], flipped.T[1::2]):
        turn += np.pi * (np.outer(a, b) - np.outer(b, a))
    rest = rotation @ expm(-turn)
    return np.array(turn + np.real(logm(rest)))


def initial_words(
    maps: WordMaps, path: Path, words: int, amplitude: float, generator: np.random.Generator, candidates: int
) -> tuple[Array, Array]:
    """Nodes (words, sequences, size) along the path and durations (words, K): for each word the calmest of
    `candidates`.

    Calm: little drift, little stretching; the two are added.
    """
    half = len(maps.order) // 2
    middles = path((np.arange(words) + 0.5) / words)
    size = middles.shape[-1] * middles.shape[-2]
    middles = middles.reshape(words, -1, size)
    least, chosen = np.full(words, np.inf), np.zeros((words, 2 * half))
    for _ in range(candidates):
        first = amplitude * generator.uniform(0.5, 1.5, (words, half)) * generator.choice([-1.0, 1.0], (words, half))
        durations = np.concatenate([first, -first[:, ::-1]], 1)
        ends, state = maps(middles, durations, "state")
        score = np.linalg.norm((ends - middles).reshape(words, -1), axis=1)
        usable = np.isfinite(score) & np.isfinite(state).all((1, 2, 3))
        values = np.linalg.svd(np.where(usable[:, None, None, None], state, 1.0), compute_uv=False)
        score = np.where(usable, score + np.abs(np.log(np.maximum(values, 1e-300))).max((1, 2)), np.inf)
        chosen = np.where((score < least)[:, None], durations, chosen)
        least = np.minimum(least, score)
    return path(np.arange(words) / words).reshape(words, -1, size), chosen
