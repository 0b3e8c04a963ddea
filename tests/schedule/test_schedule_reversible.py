"""Steps that are not one-to-one: found, moved, and run backwards."""

import numpy as np
import pytest
import torch

import fixedformer as ff
from fixedformer.schedule import field, judge, reversible, solve, words
from fixedformer.schedule.problem import Problem, settings_for


def problem_of(size, seed):
    generator = torch.Generator().manual_seed(seed)
    X, Y = (torch.randn(size, generator=generator, dtype=torch.float64).numpy() for _ in range(2))
    arrays = ff.FrozenBlocks(2).arrays
    settings = settings_for(2, X.size, "finite", 0.1, None, target=1e5, loud=1e7)
    return Problem(arrays.scores, arrays.values, False, X, Y, "finite", 1e-7, seed, 4, settings)


@pytest.mark.parametrize(("size", "seed"), [((1, 2, 2), 0), ((2, 2, 2), 17)])
def test_folded_steps_are_moved(size, seed):
    """Searches whose solution has a step with a second preimage: afterwards it has none, and X comes back."""
    problem, before, trials = problem_of(size, seed), None, 0
    for at, record in solve.search(problem):
        if record.phase == "unfold" and not trials:
            before = at.durations
        trials += record.phase == "unfold"
    assert trials
    assert at.status == "solved"
    assert reversible.folds(problem, before)
    assert judge.returned(problem, before) > 1e-2
    assert not reversible.folds(problem, at.durations)
    assert judge.returned(problem, at.durations) <= 1e-6
    assert judge.judge(problem, at.durations) <= problem.tolerance
    assert np.abs(at.durations).max() <= problem.settings.largest


def test_a_fold_is_a_step_with_a_second_preimage():
    """Independently: the definition's step maps what undoing found, and where X passed, to the same state."""
    problem = problem_of((1, 2, 2), 0)
    at = next(at for at, record in solve.search(problem) if record.phase == "unfold")
    [(word, segment)] = reversible.folds(problem, at.durations)
    state, steps = problem.X, problem.settings.substeps
    order = words.order_of(problem.settings.half)
    pairs = []
    for w, durations in enumerate(at.durations[: word + 1]):
        for k, t in enumerate(durations):
            block = order[k]
            for _ in range(steps):
                score, value = problem.scores[block], problem.values[block]
                after = field.residual_step(state, t / steps, score, value, False)
                if (w, k) == (word, segment):
                    other = field.undo_residual_step(after, t / steps, score, value, False)
                    again = field.residual_step(other, t / steps, score, value, False)
                    if np.isfinite(other).all() and np.abs(again - after).max() < 1e-12:
                        pairs.append(np.abs(other - state).max())
                state = after
    assert max(pairs) > 1e-2
