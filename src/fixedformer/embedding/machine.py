"""What every machine of this family shares: the three verbs, and the door checks before them."""

import time
from abc import ABC, abstractmethod
from typing import Any, Literal

import torch
from torch import Tensor

from fixedformer.attention import Mask
from fixedformer.certificate import Certificate
from fixedformer.embedding import certify as certifying
from fixedformer.embedding.accurate import Pair
from fixedformer.embedding.engines import PathWeights, Watch, run_dense, run_paths
from fixedformer.embedding.maps import Chain, apply_plainly, dense
from fixedformer.embedding.program import CompileReport, Program
from fixedformer.embedding.readouts import OtherExit, Stack, TargetStack, readouts
from fixedformer.embedding.solve import Solution
from fixedformer.embedding.tree import PathTree
from fixedformer.errors import SpecError
from fixedformer.inputs import as_input
from fixedformer.storage import digest
from fixedformer.target import Card, Target, TargetSpec

Engine = Literal["auto", "dense", "path"]


class Machine(ABC):
    """A fixed transformer of width m whose only free part is the input embedding E (d_in, m): the program.

    `compile(target)` finds E, `run(program, X)` evaluates, `certify(program, target)` measures. Nothing here changes a
    machine; `fingerprint()` is the same before and after, for every program.
    """

    kind: str

    def __init__(self, spec: TargetSpec, looped: bool, width: int | None) -> None:
        if not isinstance(spec, TargetSpec):
            raise SpecError(f"this machine serves a TargetSpec (attention alone), got {type(spec).__name__}; for MLPs, "
                            "biases and norms build a SparseBlockMachine or a RandomBlockMachine")  # fmt: skip
        if looped and spec.residual:
            raise SpecError(
                "a looped machine cannot serve a residual target with layers of its own: along the path that skips "
                "layer 1, layer 2 must see W_Q of layer 2 where layer 1 must see W_Q of layer 1, through the same R_Q; "
                "use looped=False"
            )
        if width is not None and (not isinstance(width, int) or width < 1):
            raise SpecError(f"width must be a whole number of at least 1, or None for the smallest, got {width!r}")
        self.spec = spec
        self.looped = looped
        self.tree = PathTree.of(spec)
        self.width = self.tree.count if width is None else width
        self._fingerprint: tuple[tuple[tuple[int, int], ...], str] | None = None

    # -- what a kind of machine supplies ------------------------------------------------------------------------------

    @abstractmethod
    def reader(self, layer: int) -> Chain:
        """[R_Q^{l,1..H} | R_K^{l,1..H}], (width, 2Hd); layers count from 0."""

    @abstractmethod
    def mover(self, layer: int, head: int) -> Chain:
        """R_V^{l,h}, (width, width)."""

    @abstractmethod
    def exit(self) -> Chain:
        """U, (width, d_out)."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Everything that is fixed, for the fingerprint."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What a file needs to rebuild this machine (JSON-able)."""

    @abstractmethod
    def program_dtype(self, wanted: torch.dtype) -> torch.dtype:
        """Precision of the programs that `compile` makes for a target of precision `wanted`."""

    @abstractmethod
    def readout_scale(self, program: Program) -> Tensor:
        """|E| |R_all| (d_in, N) in float64: what one rounding of every entry of E can do to each read-out."""

    @abstractmethod
    def to(self, device: torch.device | str) -> "Machine":
        """The same machine in another place."""

    @abstractmethod
    def _solve(self, wanted: Pair, dtype: torch.dtype) -> Solution:
        """E in `dtype` with E R_all = wanted."""

    def readouts(self, program: Program) -> Tensor:
        """E R_all (d_in, N), in the program's precision, computed in float64."""
        (whole,) = readouts(self.stack(program), program.embedding.to(torch.float64), self.tree, apply_plainly)
        return whole.to(program.dtype)

    def stack(self, program: Program) -> Stack:
        """The linear maps that this program meets: the machine's, with the program's own unembedding if it has one."""
        out = program.unembedding
        return self if out is None else OtherExit(self, out.to(torch.float64))

    # -- the three verbs ----------------------------------------------------------------------------------------------

    def compile(self, target: Target) -> Program:
        """The program that makes this machine compute `target`: E with E R_all = W_all (theorems 3.1 and 3.3).

        Works in float64 with products of twenty digits, and rounds once, to the program's precision. Raises SpecError
        where the target's spec is not this machine's, CapacityError where the machine is too narrow (both numbers), its
        draw is rank-deficient, or memory would not do.
        """
        if target.spec != self.spec:
            raise SpecError(f"the target is {target.spec}, this machine serves {self.spec}; build the machine from the "
                            "target's own spec")  # fmt: skip
        wanted = Pair(*readouts(TargetStack(target), target.weights.embed, self.tree))
        return self._make(wanted, target.dtype, target.card)

    def port(self, program: Program, source: "Machine") -> Program:
        """The program of this machine that does what `program` does on `source`: E with E R_all = E' R'_all.

        Attention and outputs become equal as in `compile`; the program may be compiled or trained. So what was trained
        where training is easy runs where it is hard. Raises as `compile` does.
        """
        source._own(program)
        if source.spec != self.spec:
            raise SpecError(f"the program's machine serves {source.spec}, this one {self.spec}")
        wanted = Pair(*readouts(source.stack(program), program.embedding, self.tree))
        return self._make(wanted, program.dtype, program.card)

    def _make(self, wanted: Pair, dtype: torch.dtype, card: Card) -> Program:
        began = time.perf_counter()
        found = self._solve(wanted, self.program_dtype(dtype))
        report = CompileReport(
            width=self.width,
            columns=self.tree.count,
            bytes=found.embedding.nbytes,
            condition=found.condition,
            residual=found.residual,
            norm=float(found.embedding.abs().max()),
            seconds=time.perf_counter() - began,
        )
        return Program(found.embedding, self.spec, self.describe(), self.fingerprint(), report, card)

    def run(self, program: Program, X: Any, mask: Mask = None, engine: Engine = "auto") -> Tensor:
        """Outputs (..., tokens, d_out) of this machine under `program`; X is token ids or vectors, as for a target.

        engine: "dense" is the definition with its m-wide state; "path" evaluates the same function from the program's
        read-outs and never forms that state; "auto" counts the cost of both and takes the cheaper. Raises SpecError for
        a program of another machine and for bad inputs.
        """
        return self.evaluate(program, X, mask, engine, None)

    def attention(self, program: Program, X: Any, mask: Mask = None, engine: Engine = "auto") -> Tensor:
        """The machine's attention matrices (..., layers, heads, tokens, tokens)."""
        seen: list[Tensor] = []
        self.evaluate(program, X, mask, engine, seen.append)
        return torch.stack(seen, dim=-4)

    def certify(
        self,
        program: Program,
        target: Target,
        inputs: Any = None,
        mask: Mask = None,
        seed: int = 0,
        tolerance: float | None = None,
    ) -> Certificate:
        """Measure this machine under `program` against `target`.

        First every column of E R_all = W_all, with twenty digits: this covers all inputs, lengths and masks. Then the
        attention matrices of every layer and head and the outputs, by both engines, on `inputs` (or on inputs sampled
        with `seed`). tolerance: replaces the derived bound of the sampled checks (absolute for attention, relative to
        the largest output for outputs). See certify.py for where each bound comes from.
        """
        self._own(program)
        return certifying.certify(self, program, target, inputs, mask, seed, tolerance)

    # -- identity -----------------------------------------------------------------------------------------------------

    def fingerprint(self) -> str:
        """Hex SHA-256 of all fixed tensors and of what is computed with them; no program enters."""
        tensors = self.tensors()
        stamp = tuple((tensor.data_ptr(), tensor._version) for tensor in tensors.values())
        if self._fingerprint is None or self._fingerprint[0] != stamp:
            rule = f"{self.kind} looped={self.looped} width={self.width} residual={self.spec.residual} "
            rule += f"positions={self.spec.positions} base={self.spec.rotary_base} heads={self.spec.heads} "
            rule += f"layers={self.spec.layers}"
            self._fingerprint = (stamp, digest(tensors, rule))
        return self._fingerprint[1]

    def __repr__(self) -> str:
        looped = ", looped" if self.looped else ""
        spec = self.spec
        return (f"{type(self).__name__}(heads={spec.heads}, layers={spec.layers}, d_in={spec.d_in}, "
                f"d_head={spec.d_head}, width={self.width}{looped})")  # fmt: skip

    # -- the definition's matrices ------------------------------------------------------------------------------------

    def dense_query(self, layer: int, head: int, dtype: torch.dtype) -> Tensor:
        """R_Q^{l,h} (width, d_head)."""
        return self._dense_read(layer, dtype)[:, head * self.spec.d_head :][:, : self.spec.d_head]

    def dense_key(self, layer: int, head: int, dtype: torch.dtype) -> Tensor:
        """R_K^{l,h} (width, d_head)."""
        return self._dense_read(layer, dtype)[:, (self.spec.heads + head) * self.spec.d_head :][:, : self.spec.d_head]

    def dense_value(self, layer: int, head: int, dtype: torch.dtype) -> Tensor:
        """R_V^{l,h} (width, width)."""
        return dense(self.mover(layer, head), dtype)

    def dense_unembed(self, dtype: torch.dtype) -> Tensor:
        """U (width, d_out)."""
        return dense(self.exit(), dtype)

    def _dense_read(self, layer: int, dtype: torch.dtype) -> Tensor:
        return dense(self.reader(layer), dtype)

    # -- evaluation ---------------------------------------------------------------------------------------------------

    def paths(self, program: Program) -> PathWeights:
        """The program's read-outs E R_all as path weights; kept in the program until its embedding changes."""
        kept = program.cached_paths()
        return kept if kept is not None else program.keep_paths(
            PathWeights.of(self.readouts(program), self.tree)
        )  # fmt: skip

    def evaluate(self, program: Program, X: Any, mask: Mask, engine: Engine, watch: Watch) -> Tensor:
        """`run`, with `watch` called on each layer's attention (..., heads, tokens, tokens)."""
        self._own(program)
        embedding = program.embedding
        data = as_input(X, self.spec.d_in, embedding.dtype, embedding.device)
        if engine == "auto":
            tokens = data.shape[-1] if not data.is_floating_point() else data.shape[-2]
            path, definition = self.cost(tokens)
            engine = "path" if path <= definition else "dense"
        if engine == "path":
            return run_paths(self.spec, self.paths(program), data, mask, watch)
        if engine == "dense":
            return run_dense(self, embedding, data, mask, watch, program.unembedding)
        raise SpecError(f"engine must be 'auto', 'dense' or 'path', got {engine!r}")

    def cost(self, tokens: int) -> tuple[int, int]:
        """Multiplications of one sequence by the two engines: (path, dense)."""
        spec, width, branching = self.spec, self.width, self.tree.branching
        scores = spec.heads * tokens * tokens * spec.d_head
        path = definition = 0
        for layer in range(spec.layers):
            carried = spec.d_in * branching**layer
            mixed = spec.d_out if layer == spec.layers - 1 else carried
            path += tokens * carried * self.tree.node_width + scores + spec.heads * tokens * tokens * mixed
            definition += tokens * width * self.tree.node_width + scores
            definition += spec.heads * (tokens * width * width + tokens * tokens * width)
        leaves = tokens * branching**spec.layers * spec.d_in * spec.d_out
        return path + leaves, definition + tokens * width * spec.d_out

    def _own(self, program: Program) -> None:
        if program.machine_fingerprint != self.fingerprint():
            raise SpecError(
                f"the program was compiled for machine {program.machine_fingerprint[:12]}.. ({program.machine}), this "
                f"one is {self.fingerprint()[:12]}.. ({self.describe()}); build that machine, or compile again"
            )
        if tuple(program.embedding.shape) != (self.spec.d_in, self.width):
            raise SpecError(f"the embedding must be ({self.spec.d_in}, {self.width}), got "
                            f"{tuple(program.embedding.shape)}")  # fmt: skip
        out = program.unembedding
        if out is not None and tuple(out.shape) != (self.width, self.spec.d_out):
            raise SpecError(f"the unembedding must be ({self.width}, {self.spec.d_out}), got {tuple(out.shape)}")
