"""The compiled loop against the definition: ends, derivatives, inverses."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fixedformer.schedule import field
from fixedformer.schedule.kernels import undo_steps
from fixedformer.schedule.maps import WordMaps, amplification, rollout
from fixedformer.schedule.words import order_of

from .schedule_oracle import pair, quotient


def walk(maps, nodes, durations):
    """Words' ends by the definition."""
    out = np.empty_like(nodes)
    step = field.residual_step if maps.finite else field.runge_kutta_step
    for w, (start, times) in enumerate(zip(nodes, durations)):
        X = start.reshape(len(start), maps.tokens, -1)
        for block, t in zip(maps.order, times):
            for _ in range(maps.substeps):
                X = step(X, t / maps.substeps, maps.scores[block], maps.values[block], maps.causal)
        out[w] = X.reshape(start.shape)
    return out


def drawn(n, d, finite, causal, seed, half=2, words=3, sequences=2, substeps=2):
    A, V = pair(d, seed)
    generator = np.random.default_rng(seed)
    maps = WordMaps(A, V, n, order_of(half), substeps, finite, causal)
    nodes = generator.standard_normal((words, sequences, n * d))
    return maps, nodes, generator.uniform(-0.2, 0.2, (words, 2 * half))


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 5), st.integers(1, 5), st.booleans(), st.booleans(), st.integers(0, 10**6))
def test_ends_are_the_definition(n, d, finite, causal, seed):
    maps, nodes, durations = drawn(n, d, finite, causal, seed)
    truth = walk(maps, nodes, durations)
    for want in ("ends", "state", "all"):
        np.testing.assert_allclose(maps(nodes, durations, want)[0], truth, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("finite", [False, True])
@pytest.mark.parametrize(("n", "d"), [(1, 2), (2, 2), (3, 2), (3, 4), (3, 3)])
def test_tangents_are_derivatives(n, d, finite, causal):
    # In continuous time the derivative by a duration is the field at its end: that of the flow, so take enough steps.
    maps, nodes, durations = drawn(n, d, finite, causal, 5, words=1, sequences=1, substeps=2 if finite else 24)
    _, tangents = maps(nodes, durations, "all")
    by_state = quotient(lambda z: maps(z.reshape(nodes.shape), durations)[0].reshape(-1), nodes.reshape(-1))
    by_time = quotient(lambda t: maps(nodes, t.reshape(durations.shape))[0].reshape(-1), durations.reshape(-1))
    size = n * d
    np.testing.assert_allclose(tangents[0, 0, :, :size], by_state, atol=1e-7)
    np.testing.assert_allclose(tangents[0, 0, :, size:], by_time, atol=1e-6)
    np.testing.assert_array_equal(maps(nodes, durations, "state")[1], tangents[..., :size])


def test_inputs_are_left_alone():
    maps, nodes, durations = drawn(2, 2, True, False, 6)
    before = nodes.copy()
    maps(nodes, durations, "all")
    np.testing.assert_array_equal(nodes, before)


@pytest.mark.parametrize("causal", [False, True])
def test_steps_are_undone_by_machine_code(causal):
    maps, nodes, durations = drawn(3, 3, True, causal, 7, half=4, words=1, sequences=4, substeps=4)
    states, worst = maps(nodes, durations)[0][0], np.empty(4)
    undo_steps(states, durations[0], maps.order, maps.scores, maps.values, 3, causal, 4, 50, worst)
    assert worst.max() < 1e-15
    np.testing.assert_allclose(states, nodes[0], atol=1e-12)


def test_palindromes_return_in_continuous_time_only():
    """w w^-1 is the identity of the flow; residual steps miss it by the order of a step."""
    maps, nodes, durations = drawn(3, 2, False, False, 8, half=3, substeps=24)
    durations[:, 3:] = -durations[:, 2::-1]
    np.testing.assert_allclose(maps(nodes, durations)[0], nodes, atol=1e-8)
    finite = WordMaps(maps.scores, maps.values, 3, maps.order, 8)
    drift = np.abs(finite(nodes, durations)[0] - nodes).max()
    assert 1e-4 < drift < 0.5


def test_rollout_and_amplification():
    maps, nodes, durations = drawn(2, 2, True, False, 9, words=4)
    visited, end = rollout(maps, nodes[0], durations)
    np.testing.assert_array_equal(visited[0], nodes[0])
    np.testing.assert_array_equal(end, maps(visited[-1:], durations[-1:])[0][0])
    grown = amplification(maps(visited, durations, "state")[1])
    whole = quotient(lambda x: rollout(maps, x.reshape(1, 4), durations)[1].reshape(-1), nodes[0, 0])
    other = quotient(lambda x: rollout(maps, x.reshape(1, 4), durations)[1].reshape(-1), nodes[0, 1])
    assert grown == pytest.approx(max(np.linalg.norm(whole, 2), np.linalg.norm(other, 2)), rel=1e-5)
    assert amplification(np.full((3, 1, 2, 2), 1e200)) == np.inf
