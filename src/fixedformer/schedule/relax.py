"""The relaxation: damped Newton steps that join the words while their strain, and so the amplification, goes down.

Each step solves the quadratic program of `lifted.py` with the strain of `strain.py` in its objective. It is accepted
when the defects, measured by the S of that step (so that no choice of units matters), do not grow. The iterate with the
least end-to-end amplification among the nearly joined ones is kept. Iteration limits decide, never a clock.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from fixedformer.schedule import strain
from fixedformer.schedule.field import Array
from fixedformer.schedule.lifted import SingularStep, newton_step
from fixedformer.schedule.maps import WordMaps, amplification, amplification_back

SMALLEST_SCALE = 1e-3
"""Durations this near their bound, as 1 - (t / largest)^2, still move at this rate."""
JOINED_LEVEL, JOINED_DEFECT = 0.36, 0.4
"""An iterate this close to joined can be finished by Newton's method alone, so it may be kept."""
SMALLEST = 1e-6
"""A damping below this means that the step leads nowhere: start again."""


@dataclass(frozen=True)
class Settings:
    """The search's knobs; durations in the machine's time. Defaults are chosen in `problem.settings_for`.

    target, target_back: amplifications, forwards and backwards, that are low enough to stop. loud: one that float64
    cannot bear at the tolerance asked for; above it the patience is three times as long. joined_by: steps after which
    words that have not nearly joined are given up.
    """

    half: int = 8
    words: int = 48
    substeps: int = 8
    amplitude: float = 0.2
    largest: float = 0.4
    candidates: int = 64
    top: int = 2
    bottom: int = 2
    random: int = 2
    strength: float = 0.06
    strength_cap: float = 0.3
    duration_weight: float = 1.0
    node_weight: float = 1.0
    target: float = 3e2
    target_back: float = 1e5
    loud: float = 1e6
    patience: int = 20
    joined_by: int = 120
    iterations: int = 250


@dataclass(frozen=True)
class Record:
    """One step, for whoever watches."""

    phase: str
    attempt: int
    iteration: int
    residual: float
    level: float
    amplification: float
    damping: float


@dataclass(frozen=True)
class State:
    """All that a relaxation needs to go on: it can be saved after any step and resumed exactly."""

    nodes: Array
    durations: Array
    iteration: int = 0
    strength: float = 0.06
    damping: float = 0.05
    since: int = 0
    lowest: float = float("inf")
    lowest_back: float = float("inf")
    best: float = float("inf")
    best_nodes: Array | None = field(default=None, repr=False)
    best_durations: Array | None = field(default=None, repr=False)
    finished: str = ""


def joints(ends: Array, nodes: Array, Y: Array) -> Array:
    """Defects c_w = Z_{w+1} - (end of word w), the last against Y; (words, sequences, size)."""
    return np.concatenate([nodes[1:], Y[None]]) - ends


def duration_scale(durations: Array, largest: float) -> Array:
    """dt/dτ for t = largest tanh(τ / largest): durations near their bound move less, 1 - (t / largest)^2."""
    return np.maximum(1 - (durations / largest) ** 2, SMALLEST_SCALE)


def move_durations(durations: Array, change: Array, largest: float) -> Array:
    """Durations after a step that is `change` to first order, within the bound: the step is taken in τ, smoothly.

    Clipping instead would cut steps off at the bound, and then no damping makes Newton's direction descend.
    """
    inside = np.clip(durations / largest, -1 + SMALLEST_SCALE / 2, 1 - SMALLEST_SCALE / 2)
    moved: Array = largest * np.tanh(np.arctanh(inside) + change / duration_scale(durations, largest) / largest)
    return moved


def relax(
    maps: WordMaps, Y: Array, state: State, settings: Settings, seed: tuple[int, ...]
) -> Iterator[tuple[State, Record]]:
    """Yield (state, record) after each step until the state's `finished` says why it ended. Y (sequences, size).

    Random directions of step i come from a generator seeded with (*seed, i), so that a resumed run takes the same
    steps.
    """
    _, M = maps(state.nodes, state.durations, "state")
    while not state.finished:
        generator = np.random.default_rng([*seed, state.iteration])
        try:
            state, M, record = _step(maps, Y, state, M, settings, generator)
        except (SingularStep, np.linalg.LinAlgError):
            state = replace(state, finished="the linearised problem became singular")
            record = Record("relax", seed[-1], state.iteration, float("nan"), float("nan"), state.best, 0.0)
        yield state, replace(record, attempt=seed[-1])


def _step(
    maps: WordMaps, Y: Array, state: State, M: Array, settings: Settings, generator: np.random.Generator
) -> tuple[State, Array, Record]:
    """One step: linearise, solve, keep the best, search along the step."""
    E = strain.directions(M, generator, settings.top, settings.bottom, settings.random)
    at = strain.linearise(maps, state.nodes, state.durations, E)
    defects = joints(at.ends, state.nodes, Y)
    scale = duration_scale(state.durations, settings.largest)
    pull = settings.duration_weight * state.durations * scale
    model = strain.weights(at, pull, scale, state.strength, settings.duration_weight, settings.node_weight)
    dt, dZ, S = newton_step(defects, at.state, at.by_duration, scale, model, maps.redundant(defects.shape[-1]))
    level, residual, grown = S.level(defects.reshape(len(defects), -1)), norm(defects), amplification(at.state)
    record = Record("relax", 0, state.iteration, residual, level, grown, state.damping)
    state = _keep(state, level, residual, grown, amplification_back(at.state), settings)
    if state.finished:
        return state, M, record
    cost = _cost(at.state, state.durations, state.strength, settings)
    damping = min(1.0, 2.5 * state.damping, 0.2 / np.abs(dt).max(), 0.3 / np.abs(dZ).max())
    while damping >= SMALLEST:
        durations = move_durations(state.durations, damping * dt, settings.largest)
        nodes = maps.tied(state.nodes + damping * dZ)
        ends, M = maps(nodes, durations, "state")
        if S.level(joints(ends, nodes, Y).reshape(len(nodes), -1)) <= max((1 - damping / 4) * level, 0.3):
            allowed = 3.0 if level > 1.5 else 1.25
            if _cost(M, durations, state.strength, settings) <= allowed * cost:
                break
        damping /= 2
    else:
        return replace(state, finished="no step reduced the defects"), M, record
    strength = min(1.5 * state.strength, settings.strength_cap) if level <= 0.3 else state.strength
    state = replace(
        state, nodes=nodes, durations=durations, iteration=state.iteration + 1, strength=strength, damping=damping
    )
    return state, M, record


def _keep(state: State, level: float, residual: float, grown: float, back: float, settings: Settings) -> State:
    """Remember a nearly joined iterate that amplifies less; finish at the targets, without gain, or at a limit.

    Less: forwards first, down to its target; from there on backwards.
    """
    quiet = grown < settings.target
    since, lowest, lowest_back = state.since + 1, state.lowest, state.lowest_back
    if level < 1 and (grown < 0.97 * lowest or (quiet and back < 0.97 * lowest_back)):
        since = 0
    if level < 1:
        lowest, lowest_back = min(lowest, grown), min(lowest_back, back) if quiet else lowest_back
    state = replace(state, since=since, lowest=lowest, lowest_back=lowest_back)
    score = settings.target * back / (settings.target_back + back) if quiet and np.isfinite(back) else grown
    if level < JOINED_LEVEL and residual < JOINED_DEFECT and score < state.best:
        state = replace(state, best=score, best_nodes=state.nodes, best_durations=state.durations)
    patience = settings.patience * (1 if state.best < settings.loud else 3)
    if state.best < settings.target / 2:
        return replace(state, finished="amplification is low enough")
    if state.best_nodes is not None and since > patience:
        return replace(state, finished="amplification no longer falls")
    if state.best_nodes is None and state.iteration >= settings.joined_by:
        return replace(state, finished="the words did not join")
    if state.iteration >= settings.iterations:
        return replace(state, finished="iteration limit")
    return state


def _cost(M: Array, durations: Array, strength: float, settings: Settings) -> float:
    return strength * strain.total_strain(M) + 0.5 * settings.duration_weight * float((durations**2).sum())


def norm(values: Array) -> float:
    """Euclidean norm of everything."""
    return float(np.linalg.norm(values.reshape(-1)))
