"""Every obstruction, on both sides: refused where it is there, not where it is not."""

import numpy as np
import pytest
import torch

import fixedformer as ff
from fixedformer.schedule import feasible, words


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def said(X, Y, causal=False):
    return str(feasible.check(np.asarray(X, float), np.asarray(Y, float), causal))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [(1, 2, 2), (2, 3, 4), (3, 4, 4)])
def test_generic_problems_pass(size, causal):
    verdict = feasible.check(normal(*size), normal(*size, seed=1), causal)
    assert verdict
    assert str(verdict) == "no obstruction"


def test_permutation_ties():
    X, Y = normal(2, 3, 3), normal(2, 3, 3, seed=1)
    X[1] = X[0, [1, 2, 0]]
    assert "permutation tie" in said(X, Y)
    Y[1] = Y[0, [1, 2, 0]]
    assert feasible.check(X, Y, False)
    assert "permutation tie" in said(normal(2, 3, 3, seed=2), Y), "ties cannot be made either"
    assert feasible.check(X, Y, True), "a causal mask tells orders apart"


def test_equal_tokens():
    X, Y = normal(1, 3, 2), normal(1, 3, 2, seed=1)
    X[0, 2] = X[0, 0]
    assert "tokens 0 and 2 are equal in X but not in Y" in said(X, Y)
    assert "tokens 0 and 2 are equal in Y but not in X" in said(Y, X)
    Y[0, 2] = Y[0, 0]
    assert feasible.check(X, Y, False)
    assert feasible.check(X, normal(1, 3, 2, seed=3), True), "under a causal mask they see different things"


def test_order_on_a_line():
    assert "keep their order" in said([[[0.0], [1.0]]], [[[1.0], [0.5]]])
    assert feasible.check(np.array([[[0.0], [1.0]]]), np.array([[[-3.0], [0.5]]]), False)


def test_shared_prefixes():
    X, Y = normal(2, 3, 4), normal(2, 3, 4, seed=1)
    X[1, :2] = X[0, :2]
    assert "share a prefix of 2 token(s) in X and of 0 in Y" in said(X, Y, causal=True)
    Y[1, :2] = Y[0, :2]
    assert feasible.check(X, Y, True)


@pytest.mark.parametrize("causal", [False, True])
def test_linear_tokens(causal):
    """One token without a mask, or the first one with it: x -> x G for all sequences, det G > 0."""
    n, d = (3, 3) if causal else (1, 3)

    def problem(count, G=None, seed=0):
        X, Y = normal(count, n, d, seed=seed), normal(count, n, d, seed=seed + 1)
        if G is not None:
            Y[:, 0] = X[:, 0] @ G
        return X, Y

    turned = np.diag([1.0, 1.0, -1.0])
    assert feasible.check(*problem(2), causal)
    assert feasible.check(*problem(2, turned), causal), "fewer than d: the rest can be turned over"
    assert "flows have det G > 0" in said(*problem(3, turned), causal)
    assert feasible.check(*problem(3, np.diag([1.0, -1.0, -2.0])), causal)
    assert "the best G misses Y_1" in said(*problem(4), causal)
    assert feasible.check(*problem(4, np.eye(3) + 0.1), causal)
    X, Y = problem(2)
    X[0, 0] = 0
    assert "stays zero" in said(X, Y, causal)
    X, Y = problem(2)
    Y[1, 0] = 2 * Y[0, 0]
    assert "keeps that number" in said(X, Y, causal)


def test_refused_before_any_search():
    blocks = ff.FrozenBlocks(2)
    X = torch.tensor([[[1.0, 0.0], [1.0, 0.0]]])
    with pytest.raises(ff.SpecError, match="no schedule carries X to Y: sequence 0: tokens 0 and 1 are equal in X"):
        blocks.compile(X, torch.randn(1, 2, 2), progress=lambda _: pytest.fail("it searched"))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_linear_paths_stay_invertible(count, seed):
    """The path of first tokens goes from X_1 to Y_1 and keeps their span."""
    first = normal(count, 3, seed=seed)
    last = normal(count, 3, seed=seed + 50)
    if count >= 3:
        G = normal(3, 3, seed=seed + 99)
        G[0] *= np.sign(np.linalg.det(G))
        last = first @ G
    assert np.linalg.det(words.linear_map(first, last)) > 0
    points = words.linear_path(first, last)(np.linspace(0, 1, 21))
    np.testing.assert_allclose(points[[0, -1]], [first, last], atol=1e-9)
    rank = np.linalg.matrix_rank(first)
    assert np.linalg.svd(points, compute_uv=False)[:, rank - 1].min() > 1e-3


def test_half_turns_have_real_logarithms():
    from scipy.linalg import expm

    for rotation in (np.diag([-1.0, -1.0]), np.diag([-1.0, 1.0, -1.0]), np.eye(3)):
        log = words.real_logarithm(rotation)
        np.testing.assert_allclose(expm(log), rotation, atol=1e-9)
        np.testing.assert_allclose(log, -log.T, atol=1e-9)
