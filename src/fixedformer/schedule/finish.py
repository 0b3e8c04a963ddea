"""From nearly joined words to durations that carry X to Y: Newton on the joints, then on the roll-out itself.

`fine` is the map that is judged: residual steps themselves, or for the flow a much finer integrator than the one that
gives derivatives. Newton's method needs the derivatives only roughly.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from fixedformer.schedule import strain
from fixedformer.schedule.field import Array
from fixedformer.schedule.lifted import SingularStep, newton_step
from fixedformer.schedule.maps import WordMaps, rollout
from fixedformer.schedule.relax import SMALLEST, Record, Settings, duration_scale, joints, move_durations, norm

JOIN_STEPS, SHOOT_STEPS = 40, 12
JOINED = 1e-12
ROUGH = 1e-3
"""Above this defect every step gets its own quadratic model; below, the last one serves."""


@dataclass(frozen=True)
class Joined:
    """Nodes and durations with the norm of what is left of the defects."""

    nodes: Array
    durations: Array
    residual: float


def join(
    maps: WordMaps, fine: WordMaps, Y: Array, nodes: Array, durations: Array, settings: Settings, attempt: int
) -> Iterator[tuple[Joined, Record]]:
    """Damped Newton steps on the joints until their norm is below 1e-12 or no step reduces it.

    Of all steps to joined words it takes the one that the relaxation's quadratic model finds shortest, so that words do
    not begin to stretch again; the model's gradient is left out.
    """
    damping, size, largest, model = 1.0, nodes.shape[-1], settings.largest, None
    generator = np.random.default_rng(attempt)
    for iteration in range(JOIN_STEPS):
        ends = fine(nodes, durations)[0]
        defects = joints(ends, nodes, Y)
        residual = norm(defects)
        scale = duration_scale(durations, largest)
        _, tangents = maps(nodes, durations, "all")
        state, by_duration = tangents[..., :size], tangents[..., size:]
        if model is None or residual > ROUGH:
            E = strain.directions(state, generator, settings.top, settings.bottom, settings.random)
            at = strain.linearise(maps, nodes, durations, E)
            model = strain.weights(
                at, 0 * durations, scale, settings.strength_cap, settings.duration_weight, settings.node_weight
            )
            model = replace(model, gradient=0 * model.gradient)
        try:
            dt, dZ, S = newton_step(defects, state, by_duration, scale, model, maps.redundant(size))
        except SingularStep:
            return
        level = S.level(defects.reshape(len(defects), -1))
        yield Joined(nodes, durations, residual), Record("join", attempt, iteration, residual, level, np.nan, damping)
        if residual < JOINED:
            return
        damping = min(1.0, 3 * damping, 0.2 / np.abs(dt).max(), 0.3 / np.abs(dZ).max())
        while damping >= SMALLEST:
            trial_t = move_durations(durations, damping * dt, largest)
            trial_z = maps.tied(nodes + damping * dZ)
            again = joints(fine(trial_z, trial_t)[0], trial_z, Y)
            if S.level(again.reshape(len(again), -1)) <= (1 - damping / 4) * level:
                break
            damping /= 2
        else:
            return
        nodes, durations = trial_z, trial_t


def end_jacobian(state: Array, by_duration: Array) -> Array:
    """d end / d durations of the whole roll-out, (sequences * size, words, K)."""
    words, sequences, size, K = by_duration.shape
    tail = np.broadcast_to(np.eye(size), (sequences, size, size))
    jacobian = np.empty((sequences * size, words, K))
    for w in range(words - 1, -1, -1):
        jacobian[:, w] = (tail @ by_duration[w]).reshape(-1, K)
        tail = tail @ state[w]
    return jacobian


def shortest_change(jacobian: Array, gap: Array, scale: Array) -> Array:
    """The least change of durations (words, K), in units of `scale`, that moves the end by `gap`."""
    flat = (jacobian * scale).reshape(len(jacobian), -1)
    change: Array = np.linalg.lstsq(flat, gap.reshape(-1), rcond=None)[0].reshape(scale.shape) * scale
    return change


def shoot(
    maps: WordMaps, fine: WordMaps, X: Array, Y: Array, durations: Array, largest: float, attempt: int
) -> Iterator[tuple[Array, float, Record]]:
    """Newton steps of least norm on the roll-out from X: yields (durations, error, record); keep the best."""
    size, least = X.shape[-1], float("inf")
    for iteration in range(SHOOT_STEPS):
        nodes, end = rollout(fine, X, durations)
        error = float(np.abs(end - Y).max()) if np.isfinite(end).all() else float("inf")
        yield durations, error, Record("shoot", attempt, iteration, error, np.nan, np.nan, 1.0)
        if not np.isfinite(error) or error < 1e-15 or (iteration > 1 and error > least / 2):
            return  # rounding, amplified, is all that is left
        least = min(least, error)
        _, tangents = maps(nodes, durations, "all")
        jacobian = end_jacobian(tangents[..., :size], tangents[..., size:])
        if not np.isfinite(jacobian).all():
            return
        change = shortest_change(jacobian, Y - end, duration_scale(durations, largest))
        change *= min(1.0, 0.1 / max(float(np.abs(change).max()), 1e-300))
        durations = move_durations(durations, change, largest)
