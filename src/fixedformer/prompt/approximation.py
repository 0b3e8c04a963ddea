"""Lipschitz and Hölder functions by a MaxMin network: the bricks suffice to approximate any of them.

For f with |f(x) - f(y)| <= L |x - y|^alpha (largest coordinate difference) on [0, 1]^d, take the N^d points of a grid
with spacing h = 1 / (N - 1) and K = L h^(alpha - 1). On the grid, f has Lipschitz constant K, so

    g(x) = min_i (f(x_i) + K |x - x_i|)

agrees with f on the grid, has Lipschitz constant K everywhere, and |g - f| <= L h^alpha (1/2 + 2^-alpha) (docs/theory/
prompt.md, Theorem 5; after McShane's extension). Absolute values, maxima and minima are ReLU units, exactly: b +
relu(a - b). The minimum over N^d points is a tree of MaxMin steps, so the depth is
log2(d) + log2(N^d) + 2, rounded up.
"""

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import product

import torch
from torch import Tensor

from fixedformer.capacity import require_memory
from fixedformer.errors import SpecError
from fixedformer.inputs import finite
from fixedformer.prompt.builder import Form, NetworkBuilder, combine
from fixedformer.prompt.engine import Engine
from fixedformer.prompt.network import Network

Function = Callable[[Sequence[float]], float]


class LipschitzNetwork:
    """A fixed network of maps (no attention heads) that approximates `function` on [0, 1]^d.

    function: takes d numbers, returns one; |f(x) - f(y)| <= constant * max_k |x_k - y_k|^exponent is the caller's
    promise; what can be seen of it on the grid is checked. points: grid points an axis, at least 2. Raises SpecError
    for values that break the promise, NaN or infinity; CapacityError where the network does not fit in memory.
    """

    def __init__(self, function: Function, d: int, points: int, constant: float, exponent: float = 1.0) -> None:
        for name, value, least in (("d", d, 1), ("points", points, 2)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise SpecError(f"{name} must be a whole number of at least {least}, got {value!r}")
        if not 0 < exponent <= 1 or not 0 < constant < math.inf:
            raise SpecError(f"needed a constant > 0 and an exponent in (0, 1], got {constant!r} and {exponent!r}")
        units = points**d * (2 * d + 4)
        require_memory(8 * 3 * units**2, f"a network for {points}^{d} grid points", "use fewer points")
        self.d, self.points, self.constant, self.exponent = d, points, float(constant), float(exponent)
        self.grid = list(product([k / (points - 1) for k in range(points)], repeat=d))
        values = torch.tensor([float(function(point)) for point in self.grid], dtype=torch.float64)
        self.values: list[float] = finite(values, "the function on the grid").tolist()
        self._require_promise()

    @property
    def spacing(self) -> float:
        """h."""
        return 1 / (self.points - 1)

    @property
    def steepness(self) -> float:
        """K, the Lipschitz constant of the approximation."""
        return float(self.constant * self.spacing ** (self.exponent - 1))

    @property
    def error_bound(self) -> float:
        """|g - f| <= L h^alpha (1/2 + 2^-alpha) everywhere on [0, 1]^d."""
        return float(self.constant * self.spacing**self.exponent * (0.5 + 2.0**-self.exponent))

    @property
    def width(self) -> int:
        """Units of the widest map."""
        return max(block.map.units for block in self.network.blocks if block.map is not None)

    @cached_property
    def network(self) -> Network:
        """The weights: maps alone, since everything happens at one token."""
        inputs = [f"x{k}" for k in range(self.d)]
        builder = NetworkBuilder(("one",), inputs)
        builder.block()
        for k in range(self.d):
            for step in range(self.points):
                knot = step / (self.points - 1)
                builder.unit(f"far{k}.{step}", {f"x{k}": 1.0, "one": -knot}, activation="relu")
                builder.unit(f"far{k}.{step}", {f"x{k}": -1.0, "one": knot}, activation="relu")
        steps = list(product(range(self.points), repeat=self.d))
        distances: list[list[Form]] = [[f"far{k}.{step}" for k, step in enumerate(place)] for place in steps]
        largest = _extremes(builder, distances, "d", 1.0)
        heights: list[Form] = [
            combine((self.steepness, far), (value, "one")) for far, value in zip(largest, self.values)
        ]
        (lowest,) = _extremes(builder, [heights], "g", -1.0)
        builder.block()
        builder.unit("out", lowest)
        return builder.build()

    def __call__(self, X: Tensor) -> Tensor:
        """g at points X (..., d) of [0, 1]^d, in float64. SpecError outside."""
        if X.ndim < 1 or X.shape[-1] != self.d or X.numel() == 0:
            raise SpecError(f"needed points (..., {self.d}), got {tuple(X.shape)}")
        low, high = float(finite(X, "X").min()), float(X.max())
        if low < 0 or high > 1:
            raise SpecError(f"points must lie in [0, 1]^{self.d}, got coordinates from {low:g} to {high:g}")
        flat = X.double().reshape(-1, 1, self.d)
        engine = Engine(self.network, torch.ones(1, 1, dtype=torch.float64))
        return engine.read(flat, ["out"])[:, 0, 0].reshape(X.shape[:-1])

    def _require_promise(self) -> None:
        """Neighbours on the grid may differ by L h^alpha at most (with room for rounding)."""
        allowed = self.constant * self.spacing**self.exponent
        table = torch.tensor(self.values, dtype=torch.float64).reshape([self.points] * self.d)
        for axis in range(self.d):
            step = float(table.diff(dim=axis).abs().max())
            if step > allowed * (1 + 1e-9) + 1e-12:
                raise SpecError(
                    f"the function is not what was promised: neighbours on the grid differ by {step:.6g}, "
                    f"constant * h^exponent = {allowed:.6g}; give a larger constant or a smaller exponent"
                )


def _extremes(builder: NetworkBuilder, groups: list[list[Form]], prefix: str, sign: float) -> list[Form]:
    """The maximum (sign 1) or minimum (sign -1) of each group of forms: knock-out rounds, one block each.

    max(a, b) = b + relu(a - b), min(a, b) = b - relu(b - a): one unit a pair, and the result is a form again.
    """
    depth = 0
    while any(len(group) > 1 for group in groups):
        builder.block()
        winners: list[list[Form]] = []
        for number, group in enumerate(groups):
            rest: list[Form] = [group[-1]] if len(group) % 2 else []
            for pair, (a, b) in enumerate(zip(group[0::2], group[1::2])):
                channel = f"{prefix}{depth}.{number}.{pair}"
                builder.unit(channel, combine((sign, a), (-sign, b)), activation="relu")
                rest.append(combine((1.0, b), (sign, channel)))
            winners.append(rest)
        groups, depth = winners, depth + 1
    return [group[0] for group in groups]
