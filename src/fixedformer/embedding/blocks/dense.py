"""The random machine with MLPs: weights drawn once, programs found by solving E_a P_0 = W_E C_0 and the same for e_b.

P_L = [U_stat | U_out], P_{l-1} = the columns of `layout` with every R as drawn. Almost every draw is universal: P_0 and
the constants' system have full column rank, and every B_j full row rank, with probability 1 (theorem 3.2). How well
conditioned is another matter: the B_j of square draws have a 1 / kappa tail that no width of the stream cures, so
`neurons_per_target` gives every target neuron more universal ones and takes the shortest alpha.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fixedformer.capacity import require_memory
from fixedformer.embedding.accurate import Pair, matmul
from fixedformer.embedding.blocks.engines import ReadOuts
from fixedformer.embedding.blocks.machine import BlockMachine, matrix_shapes
from fixedformer.embedding.blocks.program import BlockProgram
from fixedformer.embedding.blocks.spec import BlockSpec
from fixedformer.embedding.solve import SINGULAR, condition_number
from fixedformer.errors import CapacityError, SpecError

ROUNDS = 3


class RandomBlockMachine(BlockMachine):
    """A fixed transformer with MLPs, drawn at random, once, from `seed`; float64.

    width: of the stream, None for the smallest (s_0); the constant stream is wider by the same factor.
    neurons_per_target: universal neurons per target neuron and column that the MLP must write; 1 is the least, 1.5
    keeps every B_j well conditioned. distribution: "gaussian" or "uniform", of variance 1/m (R_d: 1/s_l). The variances
    matter: with 1/m for R_d too, up weights dwarf all others in E and the median error is 20 to 200 times larger.
    Raises CapacityError, before anything is drawn, where the width or memory would not do; SpecError for looped=True.
    """

    kind = "random"

    def __init__(
        self,
        spec: BlockSpec,
        seed: int = 0,
        width: int | None = None,
        neurons_per_target: float = 1.0,
        looped: bool = False,
        distribution: Literal["gaussian", "uniform"] = "gaussian",
    ) -> None:
        super().__init__(spec, looped, neurons_per_target)
        if distribution not in ("uniform", "gaussian"):
            raise SpecError(f"distribution must be 'uniform' or 'gaussian', got {distribution!r}")
        needed = self.layout.width
        if width is not None and (not isinstance(width, int) or width < 1):
            raise SpecError(f"width must be a whole number of at least 1, or None for the smallest, got {width!r}")
        self.width = needed if width is None else width
        if self.width < needed:
            raise CapacityError(f"a random machine for {spec} needs width {needed}, got {width}; pass width=None for "
                                "the smallest")  # fmt: skip
        self.constant_width = math.ceil(self.layout.constant_width * self.width / needed)
        self.seed, self.distribution = seed, distribution
        shapes = matrix_shapes(spec, self.layout, self.width, self.constant_width)
        entries = sum(math.prod(shape) for layers in shapes.values() for shape in layers)
        systems = self.width * needed + self.constant_width * self.layout.constant_width
        require_memory(
            8 * (entries + 6 * systems), f"the weights of {self!r} and their factorisation",
            "take a smaller spec, or a SparseBlockMachine, which stores no matrices",
        )  # fmt: skip
        self._fixed = self._draw(shapes)
        self._systems: tuple[str, _Systems] | None = None

    def describe(self) -> dict[str, Any]:
        return {
            "family": "blocks", "kind": self.kind, "width": self.width, "constants": self.constant_width,
            "seed": self.seed, "neurons_per_target": self.layout.neurons, "distribution": self.distribution,
        }  # fmt: skip

    def matrix(self, name: str, layer: int | None = None, head: int | None = None) -> Tensor:
        tensor = self._fixed[f"{name}.{layer or 0}"]
        return tensor if head is None else tensor[head]

    def tensors(self) -> dict[str, Tensor]:
        return dict(self._fixed)

    def program_dtype(self, wanted: torch.dtype) -> torch.dtype:
        """float64: an ill-conditioned draw would lose a float32 program's digits."""
        del wanted
        return torch.float64

    def spread(self, layer: int, written: Tensor) -> Tensor:
        level, writes = self.layout.levels[layer], self.systems().writes[layer]
        blocks = writes.unflatten(0, (-1, level.copies))  # B_j (r, t, s)
        basis, triangle = torch.linalg.qr(blocks)
        alpha = torch.zeros(*blocks.shape[:2], dtype=torch.float64).unsqueeze(1)  # (r, 1, t)
        for _ in range(2):  # once more with what is missing
            missing = written.unsqueeze(1) - alpha @ blocks
            inner = torch.linalg.solve_triangular(triangle, missing, upper=True, left=False)
            alpha = alpha + inner @ basis.mT
        return alpha.squeeze(1)

    def solve(self, rows: Tensor, constants: Tensor) -> tuple[Tensor, Tensor, float]:
        systems = self.systems()
        embedding = systems.stream.solve(rows)
        if not systems.constant.columns.numel():
            return embedding, constants, systems.stream.condition
        condition = max(systems.stream.condition, systems.constant.condition)
        return embedding, systems.constant.solve(constants.unsqueeze(0)).squeeze(0), condition

    def neuron_condition(self) -> float:
        return self.systems().neuron_condition

    def read_outs(self, program: BlockProgram) -> ReadOuts:
        systems = self.systems()
        rows, constants = program.embedding, program.constants
        rows = rows @ systems.stream.columns.to(rows.dtype)
        return ReadOuts(self.layout, rows, constants @ systems.constant.columns.to(rows.dtype), systems.writes)

    def scale(self, program: BlockProgram) -> tuple[Tensor, Tensor]:
        systems = self.systems()
        rows = program.embedding.to(torch.float64).abs() @ systems.stream.columns.abs()
        return rows, program.constants.to(torch.float64).abs() @ systems.constant.columns.abs()

    def systems(self) -> "_Systems":
        """P_0, the constants' system and what neurons write: the machine's alone, made once and kept."""
        fingerprint = self.fingerprint()
        if self._systems is None or self._systems[0] != fingerprint:
            self._systems = (fingerprint, _Systems.of(self))
        return self._systems[1]

    def _draw(self, shapes: dict[str, list[tuple[int, ...]]]) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        drawn = {}
        for name, layers in shapes.items():
            for layer, shape in enumerate(layers):
                if self.distribution == "uniform":
                    unit = (torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1) * 3**0.5
                else:
                    unit = torch.randn(shape, generator=generator, dtype=torch.float64)
                # Variance 1/m keeps columns of P_l at length 1; B_j = R_d P_l is s_l wide and keeps length with 1/s_l.
                size = self.layout.levels[layer].below if name == "down" else self.width
                drawn[f"{name}.{layer}"] = unit * size**-0.5
        return drawn


@dataclass(frozen=True, eq=False)
class _System:
    """x columns = right, solved by QR of the columns scaled to unit length; condition: of those, 2-norm."""

    columns: Tensor  # (m, N)
    norms: Tensor  # (N,)
    basis: Tensor
    triangle: Tensor
    condition: float

    @classmethod
    def of(cls, columns: Tensor, what: str) -> "_System":
        if not columns.numel():
            return cls(columns, columns.new_zeros(0), columns, columns, 1.0)
        norms = columns.norm(dim=0)
        basis, triangle = torch.linalg.qr(columns / norms)
        condition = condition_number(triangle)
        if not condition < SINGULAR:
            raise CapacityError(f"{what} has {columns.shape[1]} columns that are linearly dependent in float64 "
                                f"(condition number {condition:.1e}); draw again with another seed")  # fmt: skip
        return cls(columns, norms, basis, triangle, condition)

    def solve(self, right: Tensor) -> Tensor:
        """The shortest x (rows, m), corrected with residuals of twenty digits."""
        x = right.new_zeros(right.shape[0], self.columns.shape[0])
        for _ in range(ROUNDS):
            missing = Pair.of(right).minus(matmul(Pair.of(x), self.columns)) / self.norms
            inner = torch.linalg.solve_triangular(self.triangle, missing, upper=True, left=False)
            x = x + inner @ self.basis.mT
        return x


@dataclass(frozen=True, eq=False)
class _Systems:
    """stream: P_0. constant: all that e_b must show. writes: R_d P_l (q_l, s_l) of every layer."""

    stream: _System
    constant: _System
    writes: tuple[Tensor, ...]
    neuron_condition: float

    @classmethod
    def of(cls, machine: RandomBlockMachine) -> "_Systems":
        spec, layout = machine.spec, machine.layout
        columns = machine.matrix("exit")
        if spec.norm:
            columns = torch.cat([machine.matrix("statistics"), columns], dim=1)
        constant = columns.new_zeros(machine.constant_width, layout.constant_width)
        if spec.bias:
            constant[:, layout.constants[None, "exit"]] = machine.matrix("exit_constant")
        writes, worst, product = [], 1.0, 1.0
        for number in reversed(range(spec.layers)):
            level = layout.levels[number]
            if spec.mlp:
                writes.append(machine.matrix("down", number) @ columns)
                values = torch.linalg.svdvals(writes[-1].unflatten(0, (-1, level.copies)))
                here = float((values[:, 0] / values[:, -1]).max())
                worst, product = max(worst, here), product * here
            for name in level.constants:
                constant[:, layout.constants[number, name]] = _shown(machine, number, name, columns)
            columns = _previous(machine, number, columns)
        if not worst < SINGULAR:
            raise CapacityError(f"neurons of {machine!r} write linearly dependent rows (condition number {worst:.1e}); "
                                "draw again with another seed, or take neurons_per_target=1.5")  # fmt: skip
        return cls(
            _System.of(columns, f"P_0 of {machine!r}"),
            _System.of(constant, f"the constants' system of {machine!r}"),
            tuple(reversed(writes)),
            product,
        )


def _previous(machine: RandomBlockMachine, number: int, columns: Tensor) -> Tensor:
    """P_{l-1} from P_l."""
    spec, level = machine.spec, machine.layout.levels[number]
    out = columns.new_empty(machine.width, level.width)
    for name, place in level.parts.items():
        if name in ("query", "key"):
            out[:, place] = machine.matrix(name, number)
            continue
        kind = "keep" if name == "move" else name.removesuffix("_move")
        value = columns if kind == "keep" else machine.matrix(kind, number)
        if name.endswith("move"):
            value = torch.cat([machine.matrix("value", number, head) @ value for head in range(spec.heads)], dim=1)
        out[:, place] = value
    return out


def _shown(machine: RandomBlockMachine, number: int, name: str, columns: Tensor) -> Tensor:
    """The matrix through which e_b shows one part of the constants to layer `number`."""
    if name.startswith("attend_"):
        kind = name.removeprefix("attend_")
        read = columns if kind == "keep" else machine.matrix(kind, number)
        return machine.matrix("attend_constant", number) @ read
    shown = machine.matrix(f"{name}_constant", number)
    return shown @ columns if name == "down" else shown
