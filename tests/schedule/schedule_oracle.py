"""Plain Python: the vector field of one block, written out number by number, and difference quotients."""

import math

import numpy as np


def field_by_hand(X, A, V, causal):
    """softmax(X A X^T) X V for X a list of tokens, each a list of numbers."""
    n, d = len(X), len(X[0])
    out = []
    for i in range(n):
        last = i + 1 if causal else n
        raw = [sum(X[i][a] * A[a][b] * X[j][b] for a in range(d) for b in range(d)) for j in range(last)]
        top = max(raw)
        powers = [math.exp(r - top) for r in raw]
        mean = [sum(p * X[j][a] for j, p in enumerate(powers)) / sum(powers) for a in range(d)]
        out.append([sum(mean[a] * V[a][b] for a in range(d)) for b in range(d)])
    return np.array(out)


def quotient(function, x, step=1e-6):
    """Central differences of an array-valued function: (*output, x.size)."""
    x = np.asarray(x, dtype=float)
    columns = []
    for place in range(x.size):
        move = np.zeros(x.size)
        move[place] = step
        move = move.reshape(x.shape)
        columns.append((function(x + move) - function(x - move)) / (2 * step))
    return np.stack(columns, -1)


def pair(d, seed=0, scale=2.0):
    """Two blocks of mild size."""
    generator = np.random.default_rng(seed)
    return scale * generator.standard_normal((2, d, d)) / d, generator.standard_normal((2, d, d)) / d**0.5
