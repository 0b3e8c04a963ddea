"""The linear algebra of a step, against dense solves; the strain's derivative against difference quotients."""

import numpy as np
import pytest

from fixedformer.schedule import strain
from fixedformer.schedule.lifted import BlockTridiagonal, SingularStep, Weights, newton_step
from fixedformer.schedule.maps import WordMaps
from fixedformer.schedule.words import order_of

from .schedule_oracle import pair, quotient


def test_block_tridiagonal_is_dense():
    generator = np.random.default_rng(0)
    lower = np.tril(generator.standard_normal((12, 12))) + 4 * np.eye(12)
    for row in range(12):
        lower[row, : max(0, (row // 3 - 1) * 3)] = 0
    S = lower @ lower.T
    diagonal = np.stack([S[i : i + 3, i : i + 3] for i in range(0, 12, 3)])
    upper = np.stack([S[i : i + 3, i + 3 : i + 6] for i in range(0, 9, 3)])
    factor, c = BlockTridiagonal(diagonal, upper), generator.standard_normal((4, 3))
    np.testing.assert_allclose(factor.solve(c).reshape(-1), np.linalg.solve(S, c.reshape(-1)), rtol=1e-9)
    assert factor.level(c) == pytest.approx(np.sqrt(c.reshape(-1) @ np.linalg.solve(S, c.reshape(-1))), rel=1e-9)
    assert factor.level(np.full((4, 3), np.nan)) == np.inf


def test_hopeless_systems_are_said_so():
    with pytest.raises(SingularStep, match="singular even when regularised"):
        BlockTridiagonal(-np.eye(2)[None], np.zeros((0, 2, 2)))


def test_step_solves_the_quadratic_program():
    """Against the dense optimality conditions of min u'Hu/2 + g'u under the linearised joints."""
    generator = np.random.default_rng(1)
    W, N, size, K = 3, 2, 2, 5
    D = N * size
    M, B = generator.standard_normal((W, N, size, size)), generator.standard_normal((W, N, size, K))
    c, scale = generator.standard_normal((W, N, size)), generator.uniform(0.5, 1, (W, K))
    half = generator.standard_normal((W, K + D, K + D))
    model = Weights(half @ np.swapaxes(half, 1, 2) + np.eye(K + D), generator.standard_normal((W, K + D)))
    dt, dZ, _ = newton_step(c, M, B, scale, model)
    count = W * (K + D)
    H, G = np.zeros((count, count)), np.zeros((W * D, count))
    for w in range(W):
        own = slice(w * (K + D), (w + 1) * (K + D))
        H[own, own] = model.hessian[w]
        G[w * D : (w + 1) * D, own][:, :K] = -(B[w].reshape(D, K) * scale[w])
        for s in range(N):
            rows, columns = slice(w * D + s * size, w * D + (s + 1) * size), w * (K + D) + K + s * size
            G[rows, columns : columns + size] = -M[w, s]
        if w + 1 < W:
            after = (w + 1) * (K + D) + K
            G[w * D : (w + 1) * D, after : after + D] = np.eye(D)
    free = np.delete(np.arange(count), np.arange(K, K + D))  # Z_0 is fixed
    H, G, g = H[np.ix_(free, free)], G[:, free], model.gradient.reshape(-1)[free]
    KKT = np.block([[H, G.T], [G, np.zeros((W * D, W * D))]])
    full = np.zeros(count)
    full[free] = np.linalg.solve(KKT, np.concatenate([-g, -c.reshape(-1)]))[: len(free)]
    full = full.reshape(W, K + D)
    np.testing.assert_allclose(dt, full[:, :K] * scale, atol=1e-7)
    np.testing.assert_allclose(dZ.reshape(W, D), full[:, K:], atol=1e-7)
    assert not dZ[0].any()


@pytest.mark.parametrize("finite", [True, False])
def test_strain_slope(finite):
    A, V = pair(2, 3)
    maps = WordMaps(A, V, 2, order_of(2), 4, finite)
    generator = np.random.default_rng(3)
    nodes, durations = generator.standard_normal((1, 1, 4)), generator.uniform(-0.3, 0.3, (1, 4))
    E = strain.directions(maps(nodes, durations, "state")[1], generator, 2, 0, 1)
    at = strain.linearise(maps, nodes, durations, E)
    basis = np.linalg.svd(at.state[0, 0] @ E[0, 0])[2]

    def logarithm(z, t):
        """log(Y'Y)/2 in the basis that diagonalises it at the start."""
        Y = maps(z.reshape(1, 1, 4), t.reshape(1, 4), "state")[1][0, 0] @ E[0, 0]
        values, vectors = np.linalg.eigh(Y.T @ Y)
        found = basis @ (vectors * np.log(values) / 2) @ vectors.T @ basis.T
        return np.array([found[i, j] * (1 if i == j else 2**0.5) for i, j in zip(*np.triu_indices(3))])

    np.testing.assert_allclose(at.strain[0, 0], logarithm(nodes, durations), atol=1e-8)
    by_node = quotient(lambda z: logarithm(z, durations), nodes.reshape(-1))
    by_time = quotient(lambda t: logarithm(nodes, t), durations.reshape(-1))
    np.testing.assert_allclose(at.slope[0, 0, :, :4], by_node, atol=3e-4)
    np.testing.assert_allclose(at.slope[0, 0, :, 4:], by_time, atol=3e-4 if finite else 3e-2)


def test_directions_are_orthonormal_and_begin_with_the_most_stretched():
    generator = np.random.default_rng(4)
    M = generator.standard_normal((3, 2, 5, 5))
    E = strain.directions(M, generator, 2, 1, 1)
    np.testing.assert_allclose(np.swapaxes(E, -1, -2) @ E, np.broadcast_to(np.eye(4), (3, 2, 4, 4)), atol=1e-12)
    np.testing.assert_allclose(np.linalg.norm(M @ E[..., :1], axis=-2)[..., 0], np.linalg.norm(M, 2, axis=(-2, -1)))
    np.testing.assert_allclose(np.linalg.norm(M @ E[..., 2:3], axis=-2)[..., 0], np.linalg.norm(M, -2, axis=(-2, -1)))
    assert strain.directions(M, generator, 4, 2, 9).shape == (3, 2, 5, 5)
    assert strain.total_strain(np.full((1, 1, 2, 2), np.nan)) == np.inf
