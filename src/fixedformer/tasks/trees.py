"""In-context learning of decision trees (Garg et al. 2022; appendix C.2 of the looped-transformers paper).

x_1, f(x_1), .., x_k: at every x the model says f(x), from the pairs before it. f is a full binary tree: each inner node
looks at one coordinate and goes right where it is positive; leaves and inputs are standard normal.
"""

from dataclasses import dataclass, replace

import numpy as np

from fixedformer.errors import SpecError
from fixedformer.tasks.task import Array, Examples, Floats, Ids

NEIGHBOURS = 3


@dataclass(frozen=True)
class DecisionTrees:
    """points: inputs x in a sequence, the last is the one to be judged by; tokens = 2 * points - 1, vectors of
    `dimensions` entries, f(x) in the first entry of its token (as Garg et al.).

    Curriculum: training step s works in first_dimensions + s // every dimensions (up to `dimensions`): inputs are zero
    beyond, and no tree looks there; and with first_points + point_step * (s // every) points, up to `points`. every=0:
    none. Validation and test are always at full size.
    """

    depth: int = 4
    dimensions: int = 20
    points: int = 101
    first_dimensions: int = 5
    first_points: int = 26
    point_step: int = 5
    every: int = 5000
    used: int | None = None  # dimensions in use, where fewer than the vectors have

    name = "trees"
    vocabulary = ()

    def __post_init__(self) -> None:
        if min(self.depth, self.dimensions, self.first_dimensions, self.point_step + 1) < 1 or self.every < 0:
            raise SpecError("trees need a depth, dimensions and steps of at least 1")
        if min(self.points, self.first_points) < 2:
            raise SpecError(f"trees need at least 2 points, got {self.points}, at first {self.first_points}")

    @property
    def tokens(self) -> int:
        return 2 * self.points - 1

    @property
    def d_in(self) -> int:
        return self.dimensions

    def at(self, step: int) -> "DecisionTrees":
        """The task of training step `step`."""
        if not self.every:
            return self
        grown = step // self.every
        used = min(self.dimensions, self.first_dimensions + grown)
        return replace(self, used=used, points=min(self.points, self.first_points + self.point_step * grown))

    def sample(self, count: int, generator: np.random.Generator) -> Examples:
        used = self.used or self.dimensions
        x = np.zeros((count, self.points, self.dimensions), dtype=np.float32)
        x[:, :, :used] = generator.standard_normal((count, self.points, used), dtype=np.float32)
        nodes = 2**self.depth
        looks = generator.integers(0, used, (count, nodes - 1))
        leaves = generator.standard_normal((count, nodes), dtype=np.float32)
        values = evaluate(x, looks, leaves, self.depth)
        inputs = np.zeros((count, self.tokens, self.dimensions), dtype=np.float32)
        inputs[:, ::2] = x
        inputs[:, 1::2, 0] = values[:, :-1]
        labels = np.zeros((count, self.tokens), dtype=np.float32)
        labels[:, ::2] = values
        scored = np.zeros((count, self.tokens), dtype=np.bool_)
        scored[:, ::2] = True
        return Examples(inputs, labels, scored)

    def solve(self, inputs: list[int]) -> list[int]:  # noqa: ARG002
        """The tree is not in the sequence: there is no exact answer. Raises SpecError."""
        raise SpecError("a decision tree is not determined by its examples; compare with `trivial_rules`")

    def measures(self, examples: Examples, predictions: Array) -> dict[str, float]:
        """Squared errors: of the predictions at the last point (the paper's) and at all; of two rules at the last."""
        error = np.square(predictions.astype(np.float64) - examples.labels)
        last = examples.labels[:, -1].astype(np.float64)
        rules = self._rules(examples)
        return {
            "squared error": float(error[:, -1].mean()),
            "squared error, all points": float(error[examples.scored].mean()),
            **{f"squared error, {name}": float(np.square(guess - last).mean()) for name, guess in rules.items()},
        }

    def trivial_rules(self, examples: Examples) -> dict[str, float]:
        """At the last point, the share of the mean square that rules explain: zero, the mean so far, 3 neighbours."""
        last = examples.labels[:, -1].astype(np.float64)
        return {
            name: float(max(0.0, 1 - np.square(guess - last).mean() / np.square(last).mean()))
            for name, guess in self._rules(examples).items()
        }

    def _rules(self, examples: Examples) -> dict[str, Floats]:
        inputs, known = examples.inputs, examples.labels[:, :-1:2]
        away = np.square(inputs[:, :-1:2] - inputs[:, -1:]).sum(-1)  # (count, points - 1)
        near = away.argsort(1)[:, :NEIGHBOURS]
        return {
            "zero": np.zeros(len(inputs), dtype=np.float32),
            "mean of those seen": known.mean(1),
            f"{NEIGHBOURS} nearest": np.take_along_axis(known, near, 1).mean(1),
        }


def evaluate(x: Floats, looks: Ids, leaves: Floats, depth: int) -> Floats:
    """Tree values at x (count, points, dimensions): looks (count, 2^depth - 1) coordinates in breadth-first order,
    leaves (count, 2^depth) from left to right. Returns (count, points)."""
    rows, points = np.arange(len(x))[:, None], np.arange(x.shape[1])
    node = np.zeros(x.shape[:2], dtype=np.int64)
    for _ in range(depth):
        right = x[rows, points, looks[rows, node]] > 0
        node = 2 * node + 1 + right
    values: Floats = leaves[rows, node - (2**depth - 1)]
    return values
