"""Match2 and k-PARITY by fixed constructions: no training, proven answers (docs/theory/prompt.md, section 6).

Answers are read by a threshold: they are an average of equal numbers, which rounding may move by a few units.
"""

import math
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fixedformer.errors import CapacityError, SpecError
from fixedformer.prompt.builder import NetworkBuilder
from fixedformer.prompt.engine import Engine
from fixedformer.prompt.layout import require_exact
from fixedformer.prompt.network import Network
from fixedformer.prompt.simulator import AttentionSimulator, Prompt
from fixedformer.prompt.sizes import Backend


def residues(data: Any, modulus: int) -> Tensor:
    """Check sequences (..., n) of whole numbers in 0..modulus-1. Raises SpecError for anything else, and for n = 0."""
    numbers: Tensor = torch.as_tensor(data)
    if numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool or numbers.ndim < 1:
        raise SpecError(
            f"needed whole numbers (..., n) in 0..{modulus - 1}, got {numbers.dtype} {tuple(numbers.shape)}"
        )
    if numbers.numel() == 0:
        raise SpecError("the sequence is empty: attention needs at least one token")
    low, high = int(numbers.min()), int(numbers.max())
    if low < 0 or high >= modulus:
        raise SpecError(f"unknown token: needed whole numbers in 0..{modulus - 1}, got {low}..{high}")
    return numbers.long()


def _whole(value: Any, name: str, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise SpecError(f"{name} must be a whole number of at least {least}, got {value!r}")
    return value


class Match2:
    """For every i: is there a j (i itself counts) with x_i + x_j = 0 mod `modulus`? Three blocks, one attention head.

    The token wanted is t = -x_i mod M; the head scores -(x_j - t)^2, a begin token -1/2: it wins only where no key is
    at distance 0. The value is 1 on tokens and 0 on the begin token, so the mixed value is 1 or 0. Any length.
    """

    def __init__(self, modulus: int) -> None:
        self.modulus = _whole(modulus, "modulus", 2)
        require_exact(4 * modulus**2, torch.float64, "4 modulus^2")

    @cached_property
    def network(self) -> Network:
        """The weights: a function of the modulus alone."""
        m = float(self.modulus)
        builder = NetworkBuilder(("one", "begin"), ("x",))
        builder.block()
        builder.unit("t", {"one": m, "x": -1.0})
        builder.unit({"t": -m}, {"one": 1.0, "x": -1.0}, activation="relu")  # x = 0: t = 0, not m
        builder.unit("x^2", "x", "x")
        builder.block()
        builder.unit("t^2", "t", "t")
        builder.block()
        token = {"one": 1.0, "begin": -1.0}
        builder.head(
            [{"t": 2.0}, {"one": -1.0}, {"t^2": -1.0}, {"one": -0.5}], ["x", "x^2", token, "begin"], token, "found"
        )
        return builder.build()

    def __call__(self, x: Any) -> Tensor:
        """bool (..., n) for whole numbers x (..., n) in 0..modulus-1."""
        numbers = residues(x, self.modulus)
        n = numbers.shape[-1]
        constants = torch.ones(n + 1, 2, dtype=torch.float64)
        constants[1:, 1] = 0.0
        inputs = torch.nn.functional.pad(numbers.reshape(-1, n).double(), (1, 0))[..., None]
        found = Engine(self.network, constants).read(inputs, ["found"])[:, 1:, 0]
        return (found > 0.5).reshape(numbers.shape)


class Match2Simulated:
    """Match2 as one attention layer that runs on the universal simulator: the task's weights are a prompt.

    x becomes (cos a, sin a, 0, 1) with a = 2 pi x / M, and a null token (0, 0, 1, 0) is added. Scores are
    c cos(a_i + a_j), at most c (1 - g) without a match, g = 1 - cos(2 pi / M); the null token scores c (1 - g / 2).
    With c = 2 log(8 n) / g a match outweighs it 8 n times, and n misses together weigh at most 1/8 of it. Values are
    1 on tokens and -1 on null: the output is at least (8n - 1)/(8n + 1) with a match, at most -7/9 without.
    """

    def __init__(self, modulus: int, n: int, backend: Backend = "hard") -> None:
        self.modulus, self.n = _whole(modulus, "modulus", 2), _whole(n, "n", 1)
        gap = 1 - math.cos(2 * math.pi / modulus)
        self.sharpness = 2 * math.log(8 * n) / gap
        self.simulator = AttentionSimulator(n + 1, 4, 1, backend=backend)
        if not self.sharpness < self.simulator.size.score_limit:
            raise CapacityError(
                f"modulus {modulus} at n = {n} needs scores up to {self.sharpness:.3g}, the guard allows "
                f"{self.simulator.size.score_limit:g}; use backend='soft' or a smaller modulus"
            )
        self.query_key = torch.diag(torch.tensor([self.sharpness, -self.sharpness, 0.0, 0.0], dtype=torch.float64))
        self.query_key[3, 2] = self.sharpness * (1 - gap / 2)
        self.value = torch.tensor([[0.0], [0.0], [-1.0], [1.0]], dtype=torch.float64)

    def compile(self, x: Any) -> Prompt:
        """The prompt for whole numbers x (..., n) in 0..modulus-1."""
        numbers = residues(x, self.modulus)
        if numbers.shape[-1] != self.n:
            raise SpecError(f"this simulator takes {self.n} numbers, got {numbers.shape[-1]}")
        angle = 2 * math.pi * numbers.double() / self.modulus
        features = torch.stack([angle.cos(), angle.sin(), torch.zeros_like(angle), torch.ones_like(angle)], dim=-1)
        null = torch.tensor([0.0, 0.0, 1.0, 0.0], dtype=torch.float64).expand(*features.shape[:-2], 1, 4)
        return self.simulator.compile(self.query_key, self.value, torch.cat([features, null], dim=-2))

    def scores(self, x: Any) -> Tensor:
        """The layer's outputs (..., n): at least (8n - 1)/(8n + 1) with a match, at most -7/9 without."""
        return self.simulator.run(self.compile(x))[..., 0, : self.n, 0]

    def __call__(self, x: Any) -> Tensor:
        """bool (..., n)."""
        return self.scores(x) > 0


class KParity:
    """Is the number of ones among k chosen places odd? One block, one head, for any length and any choice of places.

    The head averages the bits of the chosen tokens; k times that is the count c; the saw-tooth
    s(c) + 2 sum_{j=1}^{k-1} (-1)^j s(c - j), s = relu, is c mod 2 at whole c and has slope 1 or -1 between.
    """

    def __init__(self, k: int) -> None:
        self.k = _whole(k, "k", 1)

    @cached_property
    def network(self) -> Network:
        """The weights: a function of k alone; the choice of places is part of the input."""
        builder = NetworkBuilder(("one",), ("bit", "chosen"))
        builder.block()
        builder.head(["one"], ["chosen"], "bit", "mean")
        builder.unit("odd", {"mean": float(self.k)}, activation="relu")
        for j in range(1, self.k):
            builder.unit({"odd": 2.0 * (-1) ** j}, {"mean": float(self.k), "one": -float(j)}, activation="relu")
        return builder.build()

    def __call__(self, bits: Any, places: Any) -> Tensor:
        """bool (...) for bits (..., n) in {0, 1} and k different places in 0..n-1, the same for the whole batch."""
        numbers = residues(bits, 2)
        n = numbers.shape[-1]
        chosen = residues(places, n)
        if chosen.shape != (self.k,) or len(set(chosen.tolist())) != self.k:
            raise SpecError(f"needed {self.k} different places in 0..{n - 1}, got {chosen.tolist()}")
        flags = torch.zeros(n, dtype=torch.float64)
        flags[chosen] = 1.0
        flat = numbers.reshape(-1, n).double()
        inputs = torch.stack([flat, flags.expand_as(flat)], dim=-1)
        odd = Engine(self.network, torch.ones(n, 1, dtype=torch.float64)).read(inputs, ["odd"])[:, 0, 0]
        return (odd > 0.5).reshape(numbers.shape[:-1])
