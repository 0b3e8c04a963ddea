"""Which columns a program shows at every layer, and how many: widths before anything is built.

P_l has s_l columns: what layers l + 1 .. L and the exit will ever read of the stream after layer l, all earlier
attention paths included. From the back, s_L = [d_model with a norm] + d_out, and columns of P_{l-1} in this order
    query, key                     the layer's own, Hd each
    keep, move[1..H]               P_l as the skip brings it, and through each head's values, s_l each
    gate, gate_move[1..H]          the MLP's gate neurons, likewise, q_l = r t_l each
    up, up_move[1..H]              its up neurons (gated MLPs only)
where t_l >= s_l universal neurons stand for one target neuron. Without residual connections there is no keep, gate or
up; with an MLP behind attention and no skip there is no move either. docs/theory/blocks.md, sections 3 and 4.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fixedformer.embedding.blocks.spec import BlockSpec
from fixedformer.embedding.blocks.target import weight_shapes
from fixedformer.errors import SpecError


@dataclass(frozen=True)
class Level:
    """Columns of P_{l-1}: `parts` says where each part starts, `width` = s_{l-1}, `below` = s_l.

    copies: up neurons per target neuron (t_l); gates: gate columns per target neuron (t_l, or 1 where copies share).
    statistics: first of the d_model columns that show the stream itself. constants: the parts of the constant stream
    that this layer reads, with their widths.
    """

    parts: dict[str, slice]
    width: int
    below: int
    copies: int
    gates: int
    statistics: int
    constants: dict[str, int]


@dataclass(frozen=True)
class Layout:
    """All levels of a spec, the first layer's first. neurons: universal neurons per target neuron and column of P_l.

    shared: count columns that a compiled sparse program has twice only once: all copies of a gate, and whatever
    follows from them. Its `owners` maps every column of the plain layout to its place here.
    """

    spec: BlockSpec
    neurons: float = 1.0
    shared: bool = False

    def __post_init__(self) -> None:
        if not self.neurons >= 1:
            raise SpecError(f"neurons_per_target must be at least 1 (per column that the MLP must write), got "
                            f"{self.neurons!r}")  # fmt: skip

    @property
    def exit_width(self) -> int:
        """s_L."""
        return (self.spec.d_model or 0) + self.spec.d_out

    @property
    def width(self) -> int:
        """s_0: the columns of a program, and the least width of a machine's stream."""
        return self.levels[0].width

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        levels: list[Level] = []
        below, statistics = self.exit_width, 0
        for _ in range(self.spec.layers):
            level = self._level(below, statistics)
            levels.append(level)
            below, statistics = level.width, level.statistics
        return tuple(reversed(levels))

    def _level(self, below: int, statistics: int) -> Level:
        spec = self.spec
        copies = math.ceil(self.neurons * below)
        gates = 1 if self.shared else copies
        gate, up = spec.mlp_width * gates, spec.mlp_width * copies
        sizes = {"query": spec.heads * spec.d_head, "key": spec.heads * spec.d_head}
        for name, width, wanted in (
            ("keep", below, spec.residual or not spec.mlp),
            ("gate", gate, spec.mlp is not None),
            ("up", up, spec.mlp == "gated"),
        ):
            moved = "move" if name == "keep" else f"{name}_move"
            if wanted and spec.residual:
                sizes[name] = width
            if wanted:
                sizes[moved] = spec.heads * width
        parts, start = {}, 0
        for name, size in sizes.items():
            parts[name] = slice(start, start + size)
            start += size
        constants: dict[str, int] = {}
        if spec.bias:
            constants |= {"query": sizes["query"], "key": sizes["key"]}
            constants |= {"attend_keep": below} if "move" in sizes else {}
            constants |= {"attend_gate": gate, "gate": gate, "down": below} if spec.mlp else {}
            constants |= {"attend_up": up} if spec.mlp == "gated" else {}
        if spec.mlp == "plain" or (spec.mlp and spec.bias):
            constants["up"] = up
        first = parts["keep"].start + statistics if spec.norm else 0
        return Level(parts, start, below, copies, gates, first, constants)

    @cached_property
    def constants(self) -> dict[tuple[int | None, str], slice]:
        """Where every part of the constant read-outs lies: (layer from 0, name), and (None, "exit") with biases."""
        places: dict[tuple[int | None, str], slice] = {}
        start = 0
        for layer, level in enumerate(self.levels):
            for name, width in level.constants.items():
                places[layer, name] = slice(start, start + width)
                start += width
        if self.spec.bias:
            places[None, "exit"] = slice(start, start + self.spec.d_out)
        return places

    @property
    def constant_width(self) -> int:
        """Conditions on the constant stream, and its least width; 0 where nothing in the target is constant."""
        return max((place.stop for place in self.constants.values()), default=0)

    def owners(self) -> tuple[Tensor, Tensor]:
        """For a shared layout: the column here of every column of the plain layout, for the stream and the constants.

        Built from the last layer back, as the levels are: a part is an arrangement of gates (target neuron alone), ups
        (target neuron, column of P_l) or columns of P_l, once a head.
        """
        plain = Layout(self.spec).levels
        owner = torch.arange(self.exit_width)
        streams: list[tuple[Tensor, Tensor, Tensor]] = []
        for here, full in zip(reversed(self.levels), reversed(plain)):
            r = self.spec.mlp_width
            gate = torch.arange(r).repeat_interleave(full.copies)
            up = (torch.arange(r)[:, None] * here.copies + owner).flatten()
            streams.append((owner, gate, up))
            columns = {"keep": owner, "gate": gate, "up": up}
            owner = torch.empty(full.width, dtype=torch.int64)
            for name, place in full.parts.items():
                kind = name.removesuffix("_move") if name != "move" else "keep"
                if kind in columns:
                    size = here.parts[name].stop - here.parts[name].start
                    heads = self.spec.heads if name.endswith("move") else 1
                    spread = torch.arange(heads)[:, None] * (size // heads) + columns[kind]
                    owner[place] = here.parts[name].start + spread.flatten()
                else:
                    owner[place] = torch.arange(here.parts[name].start, here.parts[name].stop)
        constant = torch.arange(Layout(self.spec).constant_width)
        for (layer, name), place in Layout(self.spec).constants.items():
            start = self.constants[layer, name].start
            if layer is None or name in ("query", "key"):
                constant[place] = start + torch.arange(place.stop - place.start)
                continue
            below, gate, up = streams[self.spec.layers - 1 - layer]
            kinds = {"attend_keep": below, "down": below, "attend_gate": gate, "gate": gate}
            constant[place] = start + kinds.get(name, up)
        return owner, constant


@dataclass(frozen=True)
class BlockWidths:
    """What `widths` answers for a spec with real blocks.

    minimal: least width of a machine's stream (s_0). constants: width of its constant stream beside it (m_b).
    embedding_bytes: the program at these widths in float64. program: numbers in the program. target: numbers in the
    target, None where the spec leaves d_model free. ratio: program / target.
    """

    minimal: int
    constants: int
    embedding_bytes: int
    program: int
    target: int | None

    @property
    def ratio(self) -> float | None:
        return None if self.target is None else self.program / self.target


def block_widths(spec: BlockSpec) -> BlockWidths:
    """Widths of the narrowest machine for `spec`: about (2 (H + 1) r)^L d_out with gated MLPs."""
    layout = Layout(spec)
    program = spec.d_in * layout.width + layout.constant_width
    target = None
    if spec.d_model is not None:
        target = sum(math.prod(shape) for shape in weight_shapes(spec, spec.d_model, spec.d_head).values())
    return BlockWidths(layout.width, layout.constant_width, 8 * program, program, target)
