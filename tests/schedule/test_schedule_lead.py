"""Words that move d independent first tokens before the rest of a causal problem."""

from dataclasses import astuple

import numpy as np
import pytest
import torch

import fixedformer as ff
from fixedformer.schedule.maps import rollout
from fixedformer.schedule.problem import Problem, settings_for
from fixedformer.schedule.solve import lead
from fixedformer.schedule.start import begin


def problem(*size, causal=True, seed=1):
    generator = torch.Generator().manual_seed(seed)
    X, Y = (torch.randn(size, generator=generator, dtype=torch.float64).numpy() for _ in range(2))
    if size[0] >= size[2]:
        Y[0, 0] *= np.sign(np.linalg.det(X[: size[2], 0]) * np.linalg.det(Y[: size[2], 0]))
    arrays = ff.FrozenBlocks(size[2], causal=causal).arrays
    settings = settings_for(size[2], X.size, "finite", 0.1, None, target=1e5)
    return Problem(arrays.scores, arrays.values, causal, X, Y, "finite", 1e-7, 0, 2, settings)


def last(task, attempt):
    led = None
    for _, led, record in lead(task, attempt):  # noqa: B007
        assert record.phase in ("lead", "led")
    return led


@pytest.mark.parametrize("attempt", [0, 1])
def test_first_tokens_arrive_and_the_words_that_follow_keep_them(attempt):
    """N = d = 2: the first tokens end at their targets, and the path of what is left starts where the lead ends."""
    task = problem(2, 2, 2)
    led = last(task, attempt)
    assert led is not None
    nodes, durations, end = led.nodes, led.durations, led.end
    assert np.abs(end.reshape(task.X.shape)[:, 0] - task.Y[:, 0]).max() <= 1e-7
    again, finish = rollout(task.maps, task.flat[0], durations)
    np.testing.assert_array_equal(again, nodes)
    np.testing.assert_array_equal(finish, end)
    start = begin(task, attempt, led)
    count = len(durations)
    np.testing.assert_array_equal(start.durations[:count], durations)
    np.testing.assert_allclose(start.nodes[count], end, rtol=0, atol=1e-6)
    assert len(start.durations) == task.settings.words
    rest = start.nodes[count:].reshape(-1, *task.X.shape)[:, :, 0]
    np.testing.assert_allclose(rest, np.broadcast_to(task.Y[:, 0], rest.shape), rtol=0, atol=1e-6)


def test_nothing_leads_where_first_tokens_are_free():
    assert not list(lead(problem(1, 4, 2), 0))  # one sequence, d = 2
    assert not list(lead(problem(2, 2, 2, causal=False), 0))
    assert not list(lead(problem(2, 1, 2), 0))  # one token: the problem itself


def test_a_seed_leads_the_same_way():
    one, two = last(problem(2, 2, 2), 0), last(problem(2, 2, 2), 0)
    assert one is not None
    assert two is not None
    for a, b in zip(astuple(one), astuple(two)):
        np.testing.assert_array_equal(a, b)
