"""The sparse machine with MLPs: every weight 0 or 1, made from index lists when the definition is asked for.

Its coordinates are the columns of P_0, one for one, so the compiled embedding *is* W_E C_0. P_l selects coordinates:
in a residual stack those of `keep`, part of P_{l-1}'s; without a skip attention overwrites the state, and P_l and the
neurons' coordinates are simply the first ones, used again in every layer. R_V^h moves a head's parts onto them (at most
one 1 in a row), R_g and R_u read the neurons' coordinates, and neuron (j, i) writes coordinate i of P_l: B_j = I.
"""

from typing import Any

import torch
from torch import Tensor

from fixedformer.capacity import require_memory
from fixedformer.embedding.blocks.columns import Wanted, wanted
from fixedformer.embedding.blocks.engines import ReadOuts
from fixedformer.embedding.blocks.folded import Folded
from fixedformer.embedding.blocks.layout import Layout
from fixedformer.embedding.blocks.machine import BlockMachine, matrix_shapes
from fixedformer.embedding.blocks.program import BlockProgram
from fixedformer.embedding.blocks.spec import BlockSpec
from fixedformer.embedding.blocks.target import BlockTarget
from fixedformer.embedding.maps import IndexMap

Ones = tuple[Tensor, Tensor]  # rows and columns of the ones


class SparseBlockMachine(BlockMachine):
    """A fixed transformer with {0,1} weights that becomes any target of a `BlockSpec` through its embedding.

    Raises CapacityError, with the bytes, before anything is allocated; SpecError for looped=True.
    """

    kind = "sparse"

    def __init__(self, spec: BlockSpec, looped: bool = False) -> None:
        super().__init__(spec, looped)
        self.width, self.constant_width = self.layout.width, self.layout.constant_width
        self._maps: dict[str, IndexMap] | None = None

    def describe(self) -> dict[str, Any]:
        return {"family": "blocks", "kind": self.kind, "width": self.width, "constants": self.constant_width}

    def matrix(self, name: str, layer: int | None = None, head: int | None = None) -> Tensor:
        shape = matrix_shapes(self.spec, self.layout, self.width, self.constant_width)[name][layer or 0][-2:]
        require_memory(8 * shape[0] * shape[1], f"{name} {shape} of {self!r}", "engine='path' needs no such matrix")
        return self.maps()[_label(name, layer, head)].dense(torch.float64)

    def tensors(self) -> dict[str, Tensor]:
        """Index lists follow from the layout and nothing else, so the layout's parts stand for them."""
        edges = [[part.start, part.stop] for level in self.layout.levels for part in level.parts.values()]
        edges += [[place.start, place.stop] for place in self.layout.constants.values()]
        return {"edges": torch.tensor(edges)}

    def wanted(self, target: BlockTarget) -> Wanted:
        """Columns that occur twice are computed once and copied, so that they are equal to the last bit (`share`)."""
        shared = Layout(self.spec, shared=True)
        found = wanted(Folded.of(target), shared, self.spread)
        stream, constant = shared.owners()
        return Wanted(found.rows[:, stream], found.constants[constant])

    def spread(self, layer: int, written: Tensor) -> Tensor:
        del layer  # B_j is the identity
        return written

    def solve(self, rows: Tensor, constants: Tensor) -> tuple[Tensor, Tensor, float]:
        return rows, constants, 1.0

    def neuron_condition(self) -> float:
        return 1.0

    def read_outs(self, program: BlockProgram) -> ReadOuts:
        return ReadOuts(self.layout, program.embedding, program.constants, None)

    def scale(self, program: BlockProgram) -> tuple[Tensor, Tensor]:
        return program.embedding.abs().to(torch.float64), program.constants.abs().to(torch.float64)

    def maps(self) -> dict[str, IndexMap]:
        """All fixed matrices as lists of their ones; made once, when the definition is first asked for."""
        if self._maps is None:
            shapes = matrix_shapes(self.spec, self.layout, self.width, self.constant_width)
            self._maps = {}
            for name, (rows, columns) in self._ones().items():
                kind, _, rest = name.partition(".")
                shape = shapes[kind][int(rest.split(".")[0]) if rest else 0][-2:]
                self._maps[name] = IndexMap(rows, columns, *shape)
        return self._maps

    def _ones(self) -> dict[str, Ones]:
        spec, found = self.spec, dict[str, Ones]()
        where = torch.arange(self.width)  # coordinates of the columns of P_{l-1}
        for number, level in enumerate(self.layout.levels):
            parts = {name: where[place] for name, place in level.parts.items()}
            q = spec.mlp_width * level.copies
            places = {  # coordinates of P_l and of the neurons
                "keep": parts.get("keep", torch.arange(level.below)),
                "gate": parts.get("gate", torch.arange(q)),
                "up": parts.get("up", torch.arange(q, 2 * q)),
            }
            for name in ("query", "key"):
                found[_label(name, number)] = parts[name], torch.arange(parts[name].numel())
            moved = [
                (parts[part].view(spec.heads, -1), places[kind])
                for kind, part in (("keep", "move"), ("gate", "gate_move"), ("up", "up_move"))
                if part in parts
            ]
            for head in range(spec.heads):
                sources, targets = [source[head] for source, _ in moved], [target for _, target in moved]
                found[_label("value", number, head)] = torch.cat(sources), torch.cat(targets)
            if spec.mlp:
                found[_label("gate", number)] = places["gate"], torch.arange(q)
                if spec.mlp == "gated":
                    found[_label("up", number)] = places["up"], torch.arange(q)
                found[_label("down", number)] = torch.arange(q), places["keep"].repeat(spec.mlp_width)
            self._constant_ones(found, number, places)
            where = places["keep"]
        d_model = spec.d_model or 0
        if spec.norm:
            found["statistics"] = where[:d_model], torch.arange(d_model)
        found["exit"] = where[d_model:], torch.arange(spec.d_out)
        if spec.bias:
            found["exit_constant"] = _range(self.layout.constants[None, "exit"]), torch.arange(spec.d_out)
        return found

    def _constant_ones(self, found: dict[str, Ones], number: int, places: dict[str, Tensor]) -> None:
        """The constant stream's maps: its parts onto queries, keys, neurons, and coordinates of the stream."""
        attend: list[Ones] = []
        for name in self.layout.levels[number].constants:
            source = _range(self.layout.constants[number, name])
            if name.startswith("attend_"):
                attend.append((source, places[name.removeprefix("attend_")]))
            elif name == "down":
                found[_label("down_constant", number)] = source, places["keep"]
            else:
                found[_label(f"{name}_constant", number)] = source, torch.arange(source.numel())
        if self.spec.bias:
            found[_label("attend_constant", number)] = (
                torch.cat([source for source, _ in attend]),
                torch.cat([target for _, target in attend]),
            )


def _label(name: str, layer: int | None = None, head: int | None = None) -> str:
    return ".".join(str(part) for part in (name, layer, head) if part is not None)


def _range(place: slice) -> Tensor:
    return torch.arange(place.start, place.stop)
