"""One Newton step of all words together: a quadratic program whose Schur complement is block tridiagonal.

Unknown u_w = (durations of word w, scaled; node Z_w). The words must join: c_w = Z_{w+1} - Phi(Z_w, t_w) = 0,
linearised
    c_w + dZ_{w+1} - M_w dZ_w - B_w dt_w = 0,      Z_0 = X and Z_W = Y fixed.
Minimise sum_w u_w' H_w u_w / 2 + g_w' u_w under that; H_w couples only u_w, so S = G H^-1 G' is block tridiagonal and
    S l = c - G H^-1 g,   u = -H^-1 (g + G' l).     Derivation: docs/theory/schedule.md, section 4.
"""

from dataclasses import dataclass

import numpy as np

from fixedformer.errors import FixedformerError
from fixedformer.schedule.field import Array

REGULARISERS = (1e-12, 1e-10, 1e-8, 1e-6, 1e-4, 1e-2)
"""Multiples of the mean diagonal that are added in turn until the Cholesky factor exists."""


class SingularStep(FixedformerError):
    """The linearised problem has no usable solution; the search starts again elsewhere."""


class BlockTridiagonal:
    """Cholesky factor of a symmetric block-tridiagonal matrix: diagonal (W, D, D), upper (W-1, D, D).

    redundant: rows of the last block that follow from the others; they are left out (their solution is zero).
    """

    def __init__(self, diagonal: Array, upper: Array, redundant: tuple[int, ...] = ()) -> None:
        self._redundant = list(redundant)
        if redundant:
            diagonal, upper = diagonal.copy(), upper.copy()
            diagonal[-1][self._redundant], diagonal[-1][:, self._redundant] = 0, 0
            diagonal[-1][self._redundant, self._redundant] = 1
            upper[-1][:, self._redundant] = 0
        for regulariser in REGULARISERS:
            try:
                self._factor(diagonal, upper, regulariser)
                return
            except np.linalg.LinAlgError:
                continue
        raise SingularStep("the linearised joints are singular even when regularised")

    def _factor(self, diagonal: Array, upper: Array, regulariser: float) -> None:
        words, D = diagonal.shape[:2]
        inverse, across = np.empty_like(diagonal), np.empty_like(upper)
        block = diagonal[0]
        for w in range(words):
            block = block + regulariser * np.trace(block) / D * np.eye(D)
            inverse[w] = np.linalg.inv(np.linalg.cholesky((block + block.T) / 2))
            if w < words - 1:
                across[w] = inverse[w] @ upper[w]
                block = diagonal[w + 1] - across[w].T @ across[w]
        if not np.isfinite(inverse).all():
            raise np.linalg.LinAlgError
        self._inverse, self._across = inverse, across

    def half(self, c: Array) -> Array:
        """L^-1 c for c (W, D); its norm is the natural level of c."""
        out, c = np.empty_like(c), c.copy()
        c[-1, self._redundant] = 0
        for w in range(len(c)):
            out[w] = self._inverse[w] @ (c[w] if w == 0 else c[w] - self._across[w - 1].T @ out[w - 1])
        return out

    def solve(self, c: Array) -> Array:
        """S^-1 c."""
        half, out = self.half(c), np.empty_like(c)
        for w in range(len(c) - 1, -1, -1):
            right = half[w] if w == len(c) - 1 else half[w] - self._across[w] @ out[w + 1]
            out[w] = self._inverse[w].T @ right
        return out

    def level(self, c: Array) -> float:
        """sqrt(c' S^-1 c): the affine-covariant size of the defects, infinity where they are not finite."""
        return float(np.linalg.norm(self.half(c))) if np.isfinite(c).all() else float("inf")


@dataclass(frozen=True)
class Weights:
    """The quadratic model of one word: H (words, K + D, K + D) and g (words, K + D), durations in scaled units."""

    hessian: Array
    gradient: Array

    @classmethod
    def plain(cls, pull: Array, D: int, duration: float, node: float) -> "Weights":
        """`duration` |dt|^2 / 2 + `node` |dZ|^2 / 2, and the gradient `pull` (words, K) in the scaled durations."""
        words, K = pull.shape
        hessian, gradient = np.zeros((words, K + D, K + D)), np.zeros((words, K + D))
        place = np.arange(K + D)
        hessian[:, place[:K], place[:K]] = duration
        hessian[:, place[K:], place[K:]] = node
        gradient[:, :K] = pull
        return cls(hessian, gradient)


def newton_step(
    defects: Array,
    state: Array,
    by_duration: Array,
    scale: Array,
    weights: Weights,
    redundant: tuple[int, ...] = (),
) -> tuple[Array, Array, BlockTridiagonal]:
    """(dt, dZ, S) of the quadratic program above.

    defects (words, sequences, size); state = M (words, sequences, size, size); by_duration = B (words, sequences, size,
    K); scale (words, K): durations move in units of it. dt (words, K), dZ (words, sequences, size) with dZ_0 = 0.
    Raises SingularStep.
    """
    words, sequences, size, K = by_duration.shape
    D = sequences * size
    H, g = weights.hessian.copy(), weights.gradient.copy()
    G = np.zeros((words, K + D, D))  # transposed: rows are unknowns of word w, columns its defect
    G[:, :K] = -np.swapaxes(by_duration.reshape(words, D, K) * scale[:, None], 1, 2)
    for s in range(sequences):
        part = slice(s * size, (s + 1) * size)
        G[:, K + s * size : K + (s + 1) * size, part] = -np.swapaxes(state[:, s], 1, 2)
    H[0, :K, K:], H[0, K:, :K], H[0, K:, K:], g[0, K:], G[0, K:] = 0, 0, np.eye(D), 0, 0  # Z_0 does not move
    pick = np.zeros((K + D, D))
    pick[K:] = np.eye(D)
    right = np.concatenate([G, np.broadcast_to(pick, (words, K + D, D)), g[..., None]], -1)
    try:
        solved = np.linalg.solve(H, right)
    except np.linalg.LinAlgError:
        raise SingularStep("the quadratic model of a word is singular") from None
    by_G, by_pick, by_g = solved[..., :D], solved[..., D : 2 * D], solved[..., -1]
    diagonal = np.swapaxes(G, 1, 2) @ by_G
    diagonal[:-1] += by_pick[1:, K:]
    c = defects.reshape(words, D)
    target = c - np.einsum("wxd,wx->wd", G, by_g)
    target[:-1] -= by_g[1:, K:]
    S = BlockTridiagonal(diagonal, by_G[1:, K:], redundant)
    multipliers = S.solve(target)
    u = -(by_g + np.einsum("wxd,wd->wx", by_G, multipliers))
    u[1:] -= np.einsum("wxd,wd->wx", by_pick[1:], multipliers[:-1])
    if not np.isfinite(u).all():
        raise SingularStep("the step is not finite")
    return u[:, :K] * scale, u[:, K:].reshape(defects.shape), S
