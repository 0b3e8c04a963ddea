"""Moduli of continuity (Definitions 3.3-3.5) and the bound of Theorem 3.6.

    ω_f(t)       sup ‖f(X) - f(X')‖_p          over ‖X - X'‖_2 <= t
    ω_f^tok(t)   sup ‖f(X)_n - f(X')_n‖_p      over X, X' that differ in token n only, by at most t
    ω_f^cont(t)  the same output               over X, X' that agree in token n, ‖X - X'‖_2 <= t

A function may declare Lipschitz constants (`lipschitz`); then the moduli are upper bounds, L t, and so is the theorem's
right-hand side. Otherwise they are the largest differences that a search found: lower estimates, and so labelled.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np

from fixedformer.errors import SpecError
from fixedformer.loop.grid import Array, Function, Grid, call

Kind = Literal["declared", "sampled"]
Decorated = TypeVar("Decorated", bound=Callable[..., object])
ATTRIBUTE = "lipschitz"


@dataclass(frozen=True)
class Lipschitz:
    """Constants of ω_f(t) <= sequence · t, ω_f^tok(t) <= token · t, ω_f^cont(t) <= context · t, p = 2."""

    sequence: float
    token: float
    context: float

    def __post_init__(self) -> None:
        for name in ("sequence", "token", "context"):
            value = getattr(self, name)
            if not (np.isfinite(value) and value >= 0):
                raise SpecError(f"the {name} Lipschitz constant must be finite and not negative, got {value!r}")


def lipschitz(sequence: float, token: float, context: float) -> Callable[[Decorated], Decorated]:
    """Decorator: declare a function's Lipschitz constants (p = 2), which makes its moduli of continuity analytic."""
    constants = Lipschitz(sequence, token, context)

    def declare(function: Decorated) -> Decorated:
        setattr(function, ATTRIBUTE, constants)
        return function

    return declare


@dataclass(frozen=True)
class Moduli:
    """The moduli at the arguments of Theorem 3.6, and ω_f at the cube's diameter.

    sequence ω_f(δ√(Nd)), token ω_f^tok(δ√d), context ω_f^cont(δ√(Nd)), diameter ω_f(√(Nd)).
    kind: "declared" (upper bounds) or "sampled" (lower estimates from `pairs` pairs each).
    """

    sequence: float
    token: float
    context: float
    diameter: float
    kind: Kind
    pairs: int = 0

    @property
    def scope(self) -> str:
        if self.kind == "declared":
            return "moduli from declared Lipschitz constants"
        return f"moduli sampled, {self.pairs} pairs each: lower estimates"


def moduli(function: Function, grid: Grid, seed: int = 0, pairs: int = 400, p: float = 2.0) -> Moduli:
    """Moduli of `function` at the grid's resolution: declared where it declares them, else searched for.

    The search draws pairs at full distance in random, sign-vector and single-coordinate directions, then walks the best
    pair of each kind uphill. It can only find less than the supremum.
    """
    delta, N, d = 1 / grid.resolution, grid.tokens, grid.d
    whole = float(np.sqrt(N * d))
    declared = getattr(function, ATTRIBUTE, None)
    if isinstance(declared, Lipschitz):
        return Moduli(
            sequence=declared.sequence * delta * whole,
            token=declared.token * delta * float(np.sqrt(d)),
            context=declared.context * delta * whole if N > 1 else 0.0,
            diameter=declared.sequence * whole,
            kind="declared",
        )
    every = np.ones((N, d))
    own = np.zeros((N, d))
    own[0] = 1  # by equivariance the first token stands for all
    search = Search(function, np.random.default_rng(seed), pairs, p)
    return Moduli(
        sequence=search.largest(delta * whole, every, slice(None)),
        token=search.largest(delta * float(np.sqrt(d)), own, slice(0, 1)),
        context=search.largest(delta * whole, every - own, slice(0, 1)) if N > 1 else 0.0,
        diameter=search.largest(whole, every, slice(None)),
        kind="sampled",
        pairs=pairs,
    )


@dataclass(frozen=True)
class Search:
    """Looks for the pair of inputs, at most a distance apart, whose outputs differ most."""

    function: Function
    random: np.random.Generator
    pairs: int
    p: float

    def largest(self, distance: float, free: Array, outputs: slice) -> float:
        """The largest ‖f(X) - f(X')‖_p seen over `outputs`, X and X' differing where `free` is 1 only."""
        best, middle, direction = 0.0, np.full_like(free, 0.5), free
        for trial in range(self.pairs):
            if trial < 2 * self.pairs // 3:
                point, way = self.random.random(free.shape), self.directions(free, trial)
            else:  # uphill: small changes of the best pair so far
                point = middle + 0.1 * self.random.standard_normal(free.shape)
                way = direction + 0.2 * self.random.standard_normal(free.shape) * free
            seen = self.difference(point, way, distance, outputs)
            if seen > best:
                best, middle, direction = seen, point, way
        return best

    def directions(self, free: Array, trial: int) -> Array:
        if trial % 3 == 0:
            return self.random.standard_normal(free.shape) * free
        if trial % 3 == 1:
            return self.random.choice([-1.0, 1.0], free.shape) * free
        places = np.argwhere(free)
        single = np.zeros_like(free)
        single[tuple(places[self.random.integers(len(places))])] = 1.0
        return single

    def difference(self, middle: Array, way: Array, distance: float, outputs: slice) -> float:
        """‖f(X) - f(X')‖_p for X, X' = middle ± way/2 at `distance`, both moved into the cube."""
        length = float(np.linalg.norm(way))
        if not length:
            return 0.0
        half = way * (distance / (2 * length))
        inside = np.clip(middle, np.abs(half), np.maximum(1 - np.abs(half), np.abs(half)))
        ends = [np.clip(inside + sign * half, 0, 1) for sign in (1, -1)]  # clipping only shortens the distance
        gap = call(self.function, ends[0])[outputs] - call(self.function, ends[1])[outputs]
        return float(np.linalg.norm(gap.ravel(), self.p))


@dataclass(frozen=True)
class Bound:
    """A theorem's right-hand side as its terms, each with its name; `total` is their sum."""

    terms: Mapping[str, float]
    kind: Kind

    @property
    def total(self) -> float:
        return float(sum(self.terms.values()))


def theorem_bound(found: Moduli, grid: Grid, edge: float, p: float = 2.0) -> Bound:
    """Theorem 3.6 for our construction, its two O(..) terms with their constants.

    (Nd)^{1/p} (ω^tok(δ√d) + ω^cont(δ√(Nd))) + ω_f(δ√(Nd)), plus volume^{1/p} · (Nd)^{1/p} · range for inputs outside
    the construction: tokens that share a cell (N >= 3; for N <= 2 they have entries of their own) and coordinates
    inside a ramp. range = ω_f(√(Nd)) + ω^tok + ω^cont: there the output is still a table value, within one step.
    """
    N, d, n = grid.tokens, grid.d, grid.resolution
    size = float(N * d) ** (1 / p)
    step = found.token + found.context
    spread = size * (found.diameter + step)
    shared = N * (N - 1) / 2 / grid.base if N > 2 else 0.0
    return Bound(
        {
            "steps between table entries": size * step,
            "cells": found.sequence,
            "tokens that share a cell": min(shared, 1.0) ** (1 / p) * spread,
            "ramps": min(N * d * n * edge, 1.0) ** (1 / p) * spread,
        },
        found.kind,
    )


def timestep_bound(found: Moduli, grid: Grid, edge: float, largest: float, p: float = 2.0) -> Bound:
    """The same for Theorem 4.2 behind steps 1 and 2: table entries are exact, so the first term is gone.

    `largest` is max |y| over the table: inside a ramp the output may also be a part of a table value, or 0.
    """
    base = theorem_bound(found, grid, edge, p)
    N, d, n = grid.tokens, grid.d, grid.resolution
    spread = float(N * d) ** (1 / p) * (found.diameter + largest)
    shared = N * (N - 1) / 2 / grid.base if N > 2 else 0.0
    return Bound(
        {
            "cells": base.terms["cells"],
            "tokens that share a cell": min(shared, 1.0) ** (1 / p) * spread,
            "ramps": min(N * d * n * edge, 1.0) ** (1 / p) * spread,
        },
        found.kind,
    )
