"""Machines whose weights are ordinary matrices: drawn at random, or the frozen weights of a network one already has.

Almost every draw is universal (theorem 3.3): R_all (m x N) has full column rank with probability 1 as soon as m >= N,
so E R_all = W_all has a solution for every target. `compile` takes the shortest one (minimum norm).
"""

from collections.abc import Mapping
from copy import copy
from typing import Any, Literal

import torch
from torch import Tensor

from fixedformer.capacity import require_memory
from fixedformer.embedding.accurate import Pair
from fixedformer.embedding.machine import Machine
from fixedformer.embedding.maps import Chain
from fixedformer.embedding.program import Program
from fixedformer.embedding.solve import Factorisation, Solution, all_columns, factorise, solve
from fixedformer.errors import CapacityError, SpecError
from fixedformer.inputs import finite
from fixedformer.target import FLOATS, TargetSpec

Distribution = Literal["uniform", "gaussian", "orthogonal"]


class FrozenMachine(Machine):
    """A machine with the weights of a network that exists: reprogram it without touching it.

    query, key: (sets, heads, width, d_head); value: (sets, heads, width, width), the products W_V W_O; unembed:
    (width, d_out); sets = layers, or 1 with looped=True. All float64 or all float32. The tensors are held, not copied.
    Any width runs; `compile` needs width >= N.
    """

    kind = "frozen"

    def __init__(
        self, spec: TargetSpec, *, query: Tensor, key: Tensor, value: Tensor, unembed: Tensor, looped: bool = False
    ) -> None:
        width = query.shape[2] if query.ndim == 4 else 0
        super().__init__(spec, looped, width or None)
        self._fixed = {"query": query, "key": key, "value": value, "unembed": unembed}
        self._factorisation: tuple[str, Factorisation] | None = None
        sets = (1 if looped else spec.layers, spec.heads)
        shapes = {
            "query": (*sets, width, spec.d_head),
            "key": (*sets, width, spec.d_head),
            "value": (*sets, width, width),
            "unembed": (width, spec.d_out),
        }
        for name, tensor in self._fixed.items():
            if tuple(tensor.shape) != shapes[name]:
                raise SpecError(f"{name} must have shape {shapes[name]}, got {tuple(tensor.shape)}")
            if tensor.dtype not in FLOATS or tensor.dtype != query.dtype or tensor.device != query.device:
                raise SpecError(f"all weights must be float64, or all float32, on one device; {name} is {tensor.dtype} "
                                f"on {tensor.device}, query is {query.dtype} on {query.device}")  # fmt: skip
            finite(tensor, f"the machine's {name}")

    @property
    def dtype(self) -> torch.dtype:
        return self._fixed["query"].dtype

    def reader(self, layer: int) -> Chain:
        place = 0 if self.looped else layer
        both = torch.cat([self._fixed["query"][place], self._fixed["key"][place]])  # (2H, width, d)
        return (both.transpose(0, 1).flatten(1),)

    def mover(self, layer: int, head: int) -> Chain:
        return (self._fixed["value"][0 if self.looped else layer, head],)

    def exit(self) -> Chain:
        return (self._fixed["unembed"],)

    def dense_query(self, layer: int, head: int, dtype: torch.dtype) -> Tensor:
        return self._fixed["query"][0 if self.looped else layer, head].to(dtype)

    def dense_key(self, layer: int, head: int, dtype: torch.dtype) -> Tensor:
        return self._fixed["key"][0 if self.looped else layer, head].to(dtype)

    def tensors(self) -> dict[str, Tensor]:
        return dict(self._fixed)

    def describe(self) -> dict[str, Any]:
        return {"kind": self.kind, "looped": self.looped, "width": self.width}

    def program_dtype(self, wanted: torch.dtype) -> torch.dtype:
        """The machine's own."""
        del wanted
        return self.dtype

    def readout_scale(self, program: Program) -> Tensor:
        """|E| |R_all|; with a trained unembedding, R_all ends in that one."""
        if program.unembedding is None and self.width >= self.tree.count:
            columns = self.factorisation().all_columns
        else:
            columns = all_columns(self.stack(program), self.tree)
        return program.embedding.to(torch.float64).abs() @ columns.abs()

    def to(self, device: torch.device | str) -> "FrozenMachine":
        moved = copy(self)
        moved._fixed = {name: tensor.to(device) for name, tensor in self._fixed.items()}
        moved._factorisation = None
        return moved

    def _solve(self, wanted: Pair, dtype: torch.dtype) -> Solution:
        return solve(self, self.factorisation(), wanted, self.tree, dtype)

    def factorisation(self) -> Factorisation:
        """R_all and its QR factorisation: depends on the machine alone, made once and kept."""
        fingerprint = self.fingerprint()
        if self._factorisation is None or self._factorisation[0] != fingerprint:
            if self.width < self.tree.count:
                raise CapacityError(
                    f"{self!r} is too narrow: E R_all = W_all has {self.tree.count} columns, so compiling needs width "
                    f"{self.tree.count}, got {self.width}; pass width=None for the smallest"
                )
            need = 8 * self.width * self.tree.count * 5  # R_all, its scaled copy, Q, T and working space
            require_memory(need, f"factorising {self!r}", "take a smaller spec, or a sparse machine, which needs none")
            self._factorisation = (fingerprint, factorise(self, self.tree))
        return self._factorisation[1]


class RandomMachine(FrozenMachine):
    """A fixed transformer drawn at random, once, from `seed`.

    width: None for the smallest that compiles (N). Wider is better conditioned: 1.5 N takes the condition number from
    thousands to about ten. distribution: "uniform" on (-1/sqrt m, 1/sqrt m), as PyTorch initialises; "gaussian" with
    variance 1/m; "orthogonal": gaussian with every R_V made orthogonal, better for great depth. dtype: float64, or
    float32 (the same draw, rounded). Raises CapacityError, before anything is drawn, where memory would not do.
    """

    kind = "random"

    def __init__(
        self,
        spec: TargetSpec,
        seed: int = 0,
        width: int | None = None,
        looped: bool = False,
        distribution: Distribution = "uniform",
        dtype: torch.dtype = torch.float64,
    ) -> None:
        if distribution not in ("uniform", "gaussian", "orthogonal"):
            raise SpecError(f"distribution must be 'uniform', 'gaussian' or 'orthogonal', got {distribution!r}")
        if dtype not in FLOATS:
            raise SpecError(f"dtype must be torch.float64 or torch.float32, got {dtype}")
        Machine.__init__(self, spec, looped, width)  # width and tree, to count the bytes before drawing
        self.seed, self.distribution = seed, distribution
        sets = 1 if looped else spec.layers
        entries = sets * spec.heads * self.width * (self.width + 2 * spec.d_head) + self.width * spec.d_out
        item = torch.finfo(dtype).bits // 8
        require_memory(
            entries * item + 8 * spec.heads * self.width**2,
            f"the weights of {self!r}",
            "take fewer layers or heads, looped=True, or a sparse machine (index lists instead of m x m matrices)",
        )
        super().__init__(spec, looped=looped, **self._draw(sets, dtype))

    def describe(self) -> dict[str, Any]:
        name = str(self.dtype).removeprefix("torch.")
        return super().describe() | {"seed": self.seed, "distribution": self.distribution, "dtype": name}

    def _draw(self, sets: int, dtype: torch.dtype) -> Mapping[str, Tensor]:
        spec, width = self.spec, self.width
        generator = torch.Generator().manual_seed(self.seed)

        def draw(*shape: int) -> Tensor:
            if self.distribution == "uniform":
                unit = torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1
            else:
                unit = torch.randn(shape, generator=generator, dtype=torch.float64)
            return unit.mul_(width**-0.5)

        query = torch.empty(sets, spec.heads, width, spec.d_head, dtype=dtype)
        key, value = torch.empty_like(query), torch.empty(sets, spec.heads, width, width, dtype=dtype)
        for place in range(sets):
            for head in range(spec.heads):
                query[place, head] = draw(width, spec.d_head)
                key[place, head] = draw(width, spec.d_head)
                square = draw(width, width)
                value[place, head] = torch.linalg.qr(square).Q if self.distribution == "orthogonal" else square
        return {"query": query, "key": key, "value": value, "unembed": draw(width, spec.d_out).to(dtype)}
