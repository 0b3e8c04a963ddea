"""`FrozenBlocks`: two attention blocks, drawn once, that carry any sequences to any others under the right schedule.

The program is the schedule: which block runs, forwards or backwards, and for how long. Source: "Universal interpolation
for deep residual self-attention networks" (abstract); the search is ours, docs/theory/schedule.md.
"""

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from fixedformer.certificate import Certificate
from fixedformer.errors import SpecError
from fixedformer.inputs import finite
from fixedformer.schedule import feasible, runner
from fixedformer.schedule.feasible import Feasibility
from fixedformer.schedule.field import Array
from fixedformer.schedule.program import Mode, Schedule
from fixedformer.storage import digest

if TYPE_CHECKING:
    from fixedformer.schedule.relax import Record
    from fixedformer.schedule.solve import Search

Engine = Literal["fast", "definition"]
Precision = Literal["double", "extended"]
Progress = Callable[["Record"], None]
Checkpoint = Callable[["Search"], None]


class FrozenBlocks:
    """Two single-head attention blocks F_b(X) = softmax(X A_b X^T) X V_b on tokens of d numbers; they never change.

    A_b = scale Q K^T / d and V_b = G / sqrt(d) with Q, K, G standard normal, drawn from `seed`. scale: default 16/d, at
    which scores of Gaussian tokens are of order ten. causal: each token attends to itself and earlier ones.
    Raises SpecError for sizes that make no block.
    """

    def __init__(self, d: int, seed: int = 0, scale: float | None = None, causal: bool = False) -> None:
        if d < 1:
            raise SpecError(f"tokens need at least one entry, got d = {d}")
        self.d, self.seed, self.causal = d, seed, causal
        self.scale = 16 / d if scale is None else float(scale)
        if not (np.isfinite(self.scale) and self.scale > 0):
            raise SpecError(f"scale must be positive and finite, got {scale}")
        generator = torch.Generator().manual_seed(seed)
        Q, K, G = (torch.randn(2, d, d, generator=generator, dtype=torch.float64) for _ in range(3))
        self._scores = (self.scale * Q @ K.transpose(1, 2) / d).numpy()
        self._values = (G / d**0.5).numpy().copy()
        self._scores.flags.writeable = self._values.flags.writeable = False

    @property
    def scores(self) -> Tensor:
        """A of both blocks, (2, d, d); a copy."""
        return torch.tensor(self._scores)

    @property
    def values(self) -> Tensor:
        """V of both blocks, (2, d, d); a copy."""
        return torch.tensor(self._values)

    def fingerprint(self) -> str:
        """Hex digest of both blocks and the mask: the same for every schedule."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        return digest({"scores": self.scores, "values": self.values}, f"causal={self.causal}")

    def __repr__(self) -> str:
        return f"FrozenBlocks(d={self.d}, seed={self.seed}, scale={self.scale:g}, causal={self.causal})"

    def check_feasible(self, X: Any, Y: Any) -> Feasibility:
        """Whether a schedule from X to Y (sequences, tokens, d) can exist, and if not why. Nothing is searched."""
        return feasible.check(*self._pair(X, Y), self.causal)

    def compile(
        self,
        X: Any,
        Y: Any,
        tolerance: float = 1e-8,
        mode: Mode = "finite",
        eta_max: float = 0.1,
        max_seconds: float | None = None,
        *,
        max_depth: int | None = None,
        seed: int = 0,
        attempts: int | None = None,
        iterations: int | None = None,
        resume: "Search | None" = None,
        progress: Progress | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> Schedule:
        """Search for a schedule that carries X to Y (sequences, tokens, d), all sequences by the same one.

        tolerance: on max |end - Y|, measured by running the schedule again with code that the search does not use.
        mode: "finite", residual steps X + eta F(X) with |eta| <= eta_max, at most max_depth (256 D) of them, where
        D = sequences * tokens * d; or "continuous", X' = F(X). attempts, iterations: limits of the search (defaults
        grow with D); with the seed they decide the result. max_seconds only ends it early, with the best so far.
        resume, checkpoint: a search's state, from `ff.load_search`, or as it is every 20 seconds, when interrupted, and
        when the search ends unsolved.

        Returns the best schedule found. Its report says how good it is: `status` is "solved" only if the re-run is
        within the tolerance; else "exhausted" or "time is up", a value and not an exception. Raises SpecError for
        inputs that do not fit and, before any search, for infeasible problems, with the reason.
        """
        from fixedformer.schedule.compile import compile_schedule  # scipy and numba are imported with the first search

        sources, targets = self._pair(X, Y)
        verdict = feasible.check(sources, targets, self.causal)
        if not verdict:
            raise SpecError(f"no schedule carries X to Y: {verdict}")
        return compile_schedule(
            self,
            sources,
            targets,
            tolerance=tolerance,
            mode=mode,
            eta_max=eta_max,
            max_seconds=max_seconds,
            max_depth=max_depth,
            seed=seed,
            attempts=attempts,
            iterations=iterations,
            resume=resume,
            progress=progress,
            checkpoint=checkpoint,
        )

    def run(
        self,
        schedule: Schedule,
        X: Any,
        *,
        backwards: bool = False,
        engine: Engine = "fast",
        precision: Precision = "double",
    ) -> Tensor:
        """Outputs (..., tokens, d) of the schedule for X (..., tokens, d), float64; any number of sequences.

        backwards: undo it, last segment first. Continuous schedules run reversed with their signs turned; each residual
        step X = Z + eta F(Z) is solved for Z by Newton's method, to rounding. engine: "fast" (compiled; Runge-Kutta
        with 512 steps a segment for the flow) or "definition" (NumPy; DOP853 for the flow). precision "extended"
        (finite, forwards): 57 digits in flint, durations with their remainders; only the result is rounded to float64.
        """
        self.require_own(schedule)
        sequences, shape = self._flat(X)
        for name, value, choices in (
            ("engine", engine, ("fast", "definition")),
            ("precision", precision, ("double", "extended")),
        ):
            if value not in choices:
                raise SpecError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
        if precision == "extended":
            if backwards or schedule.mode != "finite":
                raise SpecError("extended precision runs finite-depth schedules forwards; use precision='double'")
            out = runner.run_extended(self.arrays, schedule, sequences)
        else:
            out = runner.run(self.arrays, schedule, sequences, backwards, engine == "fast")
        return torch.from_numpy(out.reshape(shape))

    def trajectory(self, schedule: Schedule, X: Any, points: int = 400) -> Tensor:
        """States (points + 1, ..., tokens, d) from X to the schedule's end, at equal shares of its segments."""
        self.require_own(schedule)
        sequences, shape = self._flat(X)
        states = runner.trajectory(self.arrays, schedule, sequences, points)
        return torch.from_numpy(states.reshape(-1, *shape))

    def certify(
        self,
        schedule: Schedule,
        X: Any,
        Y: Any,
        tolerance: float | None = None,
        rigorous: bool = False,
        max_bits: int = 16384,
    ) -> Certificate:
        """Run the schedule again with an integrator that the search does not use, and backwards; see `certify.certify`.

        tolerance: default, the one it was compiled for. rigorous: enclose the finite-depth output in flint's ball
        arithmetic, at up to `max_bits`; where that check holds it is a proof for these inputs.
        """
        from fixedformer.schedule.certify import certify

        self.require_own(schedule)
        return certify(self, schedule, *self._pair(X, Y), tolerance, rigorous, max_bits)

    @property
    def arrays(self) -> "runner.Blocks":
        """Both blocks as NumPy arrays, and the mask."""
        return runner.Blocks(self._scores, self._values, self.causal)

    def require_own(self, schedule: Schedule) -> None:
        """Raise SpecError unless the schedule was made for these blocks."""
        if schedule.machine_fingerprint != self.fingerprint():
            raise SpecError(
                f"this schedule is for blocks {schedule.machine_fingerprint[:12]}, not {self.fingerprint()[:12]}; "
                "build FrozenBlocks with the d, seed, scale and causal that it was compiled for"
            )

    def _flat(self, X: Any) -> tuple[Array, tuple[int, ...]]:
        """X as (sequences, tokens, d) float64, and its shape. Raises SpecError."""
        data = torch.as_tensor(X)
        if (
            data.is_complex()
            or data.dtype == torch.bool
            or data.ndim < 2
            or data.shape[-1] != self.d
            or not data.numel()
        ):
            raise SpecError(
                f"needed real tokens (..., tokens, {self.d}), got {data.dtype} of shape {tuple(data.shape)}"
            )
        array = finite(data.double(), "the input").detach().cpu().numpy()
        return array.reshape(-1, *array.shape[-2:]), tuple(data.shape)

    def _pair(self, X: Any, Y: Any) -> tuple[Array, Array]:
        (sources, shape), (targets, other) = self._flat(X), self._flat(Y)
        if shape != other or len(shape) != 3:
            raise SpecError(f"X and Y must both be (sequences, tokens, {self.d}), got {shape} and {other}")
        return sources, targets
