"""What the machines with MLPs share: the three verbs, and the door checks before them."""

import time
from abc import ABC, abstractmethod
from typing import Any, Literal

import torch
from torch import Tensor

from fixedformer.attention import Mask
from fixedformer.capacity import require_memory
from fixedformer.certificate import Certificate
from fixedformer.embedding.blocks import certify as certifying
from fixedformer.embedding.blocks.columns import Wanted, wanted
from fixedformer.embedding.blocks.engines import ReadOuts, Watch, run_dense, run_paths
from fixedformer.embedding.blocks.folded import Folded
from fixedformer.embedding.blocks.layout import Layout
from fixedformer.embedding.blocks.program import BlockProgram, BlockReport
from fixedformer.embedding.blocks.spec import BlockSpec
from fixedformer.embedding.blocks.target import BlockTarget
from fixedformer.errors import SpecError
from fixedformer.inputs import as_input
from fixedformer.storage import digest

Engine = Literal["auto", "dense", "path"]


class BlockMachine(ABC):
    """A fixed transformer with MLPs (and a norm) whose only free part is its input embedding: the program.

    Where the target has a norm, the machine's norm takes its statistics through a fixed read-out of the stream
    (docs/theory/blocks.md, section 4); apart from that its architecture is the target's. `compile(target)` finds the
    program, `run(program, X)` evaluates, `certify(program, target)` measures.
    """

    kind: str

    def __init__(self, spec: BlockSpec, looped: bool, neurons_per_target: float = 1.0) -> None:
        if not isinstance(spec, BlockSpec):
            raise SpecError(f"this machine serves a BlockSpec, got {type(spec).__name__}; for attention alone use "
                            "SparseMachine or RandomMachine")  # fmt: skip
        if looped:
            raise SpecError("machines with MLPs are not looped: layers of the target differ, and a residual stream or "
                            "reused neurons would show layer 1 what layer 2 must see; use looped=False")  # fmt: skip
        self.spec, self.layout = spec, Layout(spec, neurons_per_target)
        need = 8 * (spec.d_in * self.layout.width + self.layout.constant_width)
        require_memory(
            need, f"one program of width {self.layout.width} (d_in = {spec.d_in})",
            "take fewer layers, heads or neurons, or a smaller d_model: widths(spec) says what each costs",
        )  # fmt: skip
        self._fingerprint: tuple[tuple[tuple[int, int], ...], str] | None = None

    # -- what a kind of machine supplies ------------------------------------------------------------------------------

    width: int
    constant_width: int

    @abstractmethod
    def matrix(self, name: str, layer: int | None = None, head: int | None = None) -> Tensor:
        """A fixed matrix as the definition writes it. Names: `matrix_shapes`."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Everything that is fixed, for the fingerprint."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What is needed to rebuild this machine (JSON-able)."""

    @abstractmethod
    def spread(self, layer: int, written: Tensor) -> Tensor:
        """alpha (r, t_l) with alpha_j B_j = written_j, written (r, s_l)."""

    @abstractmethod
    def solve(self, rows: Tensor, constants: Tensor) -> tuple[Tensor, Tensor, float]:
        """E_a, e_b with E_a P_0 = rows (d_in, s_0) and e_b showing `constants`, and the condition number met."""

    @abstractmethod
    def neuron_condition(self) -> float:
        """The largest condition number of a B_j in each layer, multiplied over the layers."""

    @abstractmethod
    def read_outs(self, program: BlockProgram) -> ReadOuts:
        """E_a P_0, what e_b shows, and what neurons write."""

    @abstractmethod
    def scale(self, program: BlockProgram) -> tuple[Tensor, Tensor]:
        """|E_a| |P_0| and the same for the constants, float64: what one rounding of every entry can do."""

    def has(self, name: str) -> bool:
        """Whether the architecture has this matrix."""
        return name in matrix_shapes(self.spec, self.layout, self.width, self.constant_width)

    # -- the three verbs ----------------------------------------------------------------------------------------------

    def compile(self, target: BlockTarget) -> BlockProgram:
        """The program that makes this machine compute `target` (docs/theory/blocks.md, theorems 3.1, 3.2 and 4.1).

        Raises SpecError where the target's spec is not this machine's, CapacityError where memory would not do.
        """
        if target.spec != self.spec:
            raise SpecError(f"the target is {target.spec}, this machine serves {self.spec}; build the machine from the "
                            "target's own spec")  # fmt: skip
        began = time.perf_counter()
        require_memory(
            24 * target.d_model * self.layout.width + 16 * self.spec.d_in * self.width,
            f"compiling a program of width {self.width}", "take a smaller spec",
        )  # fmt: skip
        goal = self.wanted(target)
        embedding, constants, condition = self.solve(goal.rows, goal.constants)
        dtype = self.program_dtype(target.dtype)
        program = BlockProgram(
            embedding.to(dtype), constants.to(dtype), self.spec, self.describe(), self.fingerprint(),
            BlockReport(
                width=self.width, columns=self.layout.width, constants=self.constant_width,
                bytes=embedding.to(dtype).nbytes + constants.to(dtype).nbytes,
                ratio=(embedding.numel() + constants.numel()) / target.parameters,
                condition=condition, neuron_condition=self.neuron_condition(), residual=0.0,
                norm=float(max(embedding.abs().max(), constants.abs().max() if constants.numel() else 0.0)),
                seconds=0.0,
            ),
            target.card,
        )  # fmt: skip
        shown, scales = self.read_outs(program), self.scale(program)
        residual = max(
            certifying.largest_ratio(got.to(torch.float64) - want, by)
            for got, want, by in ((shown.rows, goal.rows, scales[0]), (shown.constants, goal.constants, scales[1]))
        )
        spent = time.perf_counter() - began
        program.report = BlockReport(**program.report.as_dict() | {"residual": residual, "seconds": spent})
        return program

    def wanted(self, target: BlockTarget) -> Wanted:
        """What this machine must show to compute `target`, float64."""
        return wanted(Folded.of(target), self.layout, self.spread)

    def run(self, program: BlockProgram, X: Any, mask: Mask = None, engine: Engine = "auto") -> Tensor:
        """Outputs (..., tokens, d_out) of this machine under `program`; X is token ids or vectors, as for a target.

        engine: "dense" is the definition with its m-wide state and m x m matrices; "path" (and "auto") evaluates the
        same function of the program from its read-outs. Raises SpecError for a program of another machine.
        """
        return self.evaluate(program, X, mask, engine, None)

    def certify(
        self,
        program: BlockProgram,
        target: BlockTarget,
        inputs: Any = None,
        mask: Mask = None,
        seed: int = 0,
        tolerance: float | None = None,
    ) -> Certificate:
        """Measure the program against the target, beside what rounding allows; see `certify.py` for each bound."""
        return certifying.certify(self, program, target, inputs, mask, seed, tolerance)

    def streams(self, program: BlockProgram, X: Any, mask: Mask = None, engine: Engine = "path") -> list[Tensor]:
        """The target's residual stream as the machine's fixed read-out shows it, before and after every layer.

        (..., tokens, d_model) each; machines with a norm only (SpecError otherwise).
        """
        if self.spec.norm is None:
            raise SpecError("only machines with a norm have a fixed read-out of the stream")
        seen: list[Tensor] = []
        self.evaluate(program, X, mask, engine, seen.append)
        return seen

    def evaluate(self, program: BlockProgram, X: Any, mask: Mask, engine: Engine, watch: Watch) -> Tensor:
        """`run`, with `watch` called on the stream that the machine's norm reads."""
        self._own(program)
        data = as_input(X, self.spec.d_in, program.dtype, program.embedding.device)
        if engine == "dense":
            return run_dense(self, program.embedding, program.constants, data, mask, watch)
        if engine in ("auto", "path"):
            shown = program.cached() or program.keep(self.read_outs(program).share())
            return run_paths(shown, data, mask, watch)
        raise SpecError(f"engine must be 'auto', 'dense' or 'path', got {engine!r}")

    # -- identity -----------------------------------------------------------------------------------------------------

    def program_dtype(self, wanted: torch.dtype) -> torch.dtype:
        """Precision of programs compiled from a target of precision `wanted`."""
        return wanted

    def fingerprint(self) -> str:
        """Hex SHA-256 of all fixed tensors and of what is computed with them; no program enters."""
        tensors = self.tensors()
        stamp = tuple((tensor.data_ptr(), tensor._version) for tensor in tensors.values())
        if self._fingerprint is None or self._fingerprint[0] != stamp:
            rule = f"blocks {self.kind} width={self.width} constants={self.constant_width} {self.spec} "
            self._fingerprint = (stamp, digest(tensors, rule + f"neurons={self.layout.neurons}"))
        return self._fingerprint[1]

    def __repr__(self) -> str:
        spec = self.spec
        return (f"{type(self).__name__}(heads={spec.heads}, layers={spec.layers}, d_in={spec.d_in}, "
                f"d_head={spec.d_head}, mlp={spec.mlp!r}, mlp_width={spec.mlp_width}, norm={spec.norm!r}, "
                f"width={self.width})")  # fmt: skip

    def _own(self, program: BlockProgram) -> None:
        if program.machine_fingerprint != self.fingerprint():
            raise SpecError(
                f"the program was compiled for machine {program.machine_fingerprint[:12]}.. ({program.machine}), this "
                f"one is {self.fingerprint()[:12]}.. ({self.describe()}); build that machine, or compile again"
            )
        shapes = (self.spec.d_in, self.width), (self.constant_width,)
        if (tuple(program.embedding.shape), tuple(program.constants.shape)) != shapes:
            raise SpecError(f"embedding and constants must be {shapes[0]} and {shapes[1]}, got "
                            f"{tuple(program.embedding.shape)} and {tuple(program.constants.shape)}")  # fmt: skip


def matrix_shapes(spec: BlockSpec, layout: Layout, width: int, constant: int) -> dict[str, list[tuple[int, ...]]]:
    """Every fixed matrix of the architecture: its name and its shape in each layer (one shape: no layer)."""
    every, attention = range(spec.layers), spec.heads * spec.d_head
    neurons = [spec.mlp_width * level.copies for level in layout.levels]
    shapes: dict[str, list[tuple[int, ...]]] = {
        "exit": [(width, spec.d_out)],
        "query": [(width, attention) for _ in every],
        "key": [(width, attention) for _ in every],
        "value": [(spec.heads, width, width) for _ in every],
    }
    if spec.norm:
        shapes["statistics"] = [(width, spec.d_model or 0)]
    if spec.mlp:
        shapes |= {"gate": [(width, q) for q in neurons], "down": [(q, width) for q in neurons]}
        shapes |= {"up": [(width, q) for q in neurons]} if spec.mlp == "gated" else {}
        if spec.mlp == "plain" or spec.bias:
            shapes["up_constant"] = [(constant, q) for q in neurons]
    if spec.bias:
        shapes |= {f"{name}_constant": [(constant, attention) for _ in every] for name in ("query", "key")}
        shapes |= {"attend_constant": [(constant, width) for _ in every], "exit_constant": [(constant, spec.d_out)]}
        if spec.mlp:
            shapes["gate_constant"] = [(constant, q) for q in neurons]
            shapes["down_constant"] = [(constant, width) for _ in every]
    return shapes
