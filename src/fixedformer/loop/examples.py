"""Three functions with declared Lipschitz constants (p = 2, any d and number of tokens), for examples and measurements.

Each works entry by entry, so its derivative splits into one (tokens, tokens) matrix an entry; the constants bound that
matrix: `token` its diagonal, `context` a row less the diagonal, `sequence` the whole in the spectral norm.
"""

import numpy as np

from fixedformer.loop.grid import Array
from fixedformer.loop.moduli import lipschitz


@lipschitz(sequence=5.0, token=5.0, context=1.5)
def wave(X: Array) -> Array:
    """0.5 sin 3x + 0.5 m x + 0.25 cos 4m with m = mean tanh 2x.

    |∂m/∂x| <= 2/N an entry; the token's own part is <= 1.5 + 0.5, the part through m <= (0.5 + 1) |∂m|: a diagonal of
    at most 2 + 3/N, a row of 1.5 · 2 √(N-1)/N <= 1.5, and in all 2 + 1.5 √N · 2/√N = 5.
    """
    m = np.tanh(2 * X).mean(0, keepdims=True)
    return np.asarray(0.5 * np.sin(3 * X) + 0.5 * m * X + 0.25 * np.cos(4 * m))


@lipschitz(sequence=2.0, token=2.0, context=0.5)
def product(X: Array) -> Array:
    """x · mean x. Diagonal at most 1 + 1/N, row √(N-1)/N <= 1/2, in all 1 + √N · 1/√N = 2."""
    return np.asarray(X * X.mean(0, keepdims=True))


@lipschitz(sequence=1.0, token=1.0, context=0.25)
def spread(X: Array) -> Array:
    """|x - (mean x + 1/2) / 2|, which has kinks.

    The matrix is signs times 1 - 11ᵀ/2N: diagonal at most 1, row √(N-1)/2N <= 1/4, norm 1.
    """
    return np.asarray(np.abs(X - (X.mean(0, keepdims=True) + 0.5) / 2))
