"""What a search is given: the problem, and settings that fit its size."""

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fixedformer.errors import SpecError
from fixedformer.schedule import feasible, words
from fixedformer.schedule.field import Array
from fixedformer.schedule.maps import WordMaps
from fixedformer.schedule.program import Mode
from fixedformer.schedule.relax import Settings

DEPTH_PER_COORDINATE = 256
"""Default bound on the depth, times D = sequences * tokens * d."""
FLOW_STEPS = {"relax": 4, "join": 16, "judge": 512}
"""Runge-Kutta steps a segment: rough for directions, fine for what is solved. DOP853 judges."""


@dataclass(frozen=True)
class Problem:
    """What is to be solved, and how hard to try. X, Y (sequences, tokens, d)."""

    scores: Array
    values: Array
    causal: bool
    X: Array
    Y: Array
    mode: Mode
    tolerance: float
    seed: int
    attempts: int
    settings: Settings

    @property
    def maps(self) -> WordMaps:
        return self.maps_with(self.settings.substeps if self.mode == "finite" else FLOW_STEPS["relax"])

    def maps_with(self, steps: int) -> WordMaps:
        order = words.order_of(self.settings.half)
        finite = self.mode == "finite"
        d = self.X.shape[2]
        ties = tuple((r, s, d * count) for r, s, count in feasible.prefix_ties(self.X)) if self.causal else ()
        return WordMaps(self.scores, self.values, self.X.shape[1], order, steps, finite, self.causal, ties)

    def digest(self) -> str:
        """SHA-256 of all that a search's state depends on; tolerance and limits may change when it is resumed."""
        own = self.settings
        said = (self.causal, self.mode, self.seed, own.half, own.words, own.substeps, own.amplitude, own.largest)
        digest = hashlib.sha256(repr((said, self.X.shape)).encode())
        for array in (self.scores, self.values, self.X, self.Y):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    @property
    def flat(self) -> tuple[Array, Array]:
        """X and Y as (sequences, size)."""
        return self.X.reshape(len(self.X), -1), self.Y.reshape(len(self.Y), -1)


def settings_for(d: int, D: int, mode: Mode, eta_max: float, max_depth: int | None, **changes: Any) -> Settings:
    """Settings for D = sequences * tokens * d unknown coordinates within `max_depth` (256 D) and |eta| <= `eta_max`.

    Raises SpecError where not even one word fits.
    """
    if not (np.isfinite(eta_max) and eta_max > 0):
        raise SpecError(f"eta_max must be a positive number, got {eta_max}")
    base = replace(Settings(), amplitude=0.25, largest=0.6) if d <= 2 else Settings()
    base = replace(base, **changes)
    if mode == "continuous":
        return base if "words" in changes else replace(base, words=2 * D)
    substeps = base.substeps
    while base.largest / substeps > eta_max:
        substeps *= 2
    depth = DEPTH_PER_COORDINATE * D if max_depth is None else max_depth
    most = depth // (2 * base.half * substeps)
    if most < 2:
        raise SpecError(
            f"max_depth {depth} holds {most} words of {2 * base.half} segments, {substeps} steps of |eta| <= {eta_max} "
            f"each; allow a depth of {4 * base.half * substeps} or more"
        )
    return replace(base, substeps=substeps, words=min(most, changes.get("words", most)))
