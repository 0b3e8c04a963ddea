"""Write a network in terms of channel names; the builder lays out the channels and fills the weight matrices.

A *form* is a linear combination of channels: {"row": 2.0, "one": -1.0} or just "row". The channel "one" is 1 on every
token and takes the place of biases.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fixedformer.errors import SpecError
from fixedformer.prompt.network import Activation, Block, GatedMap, Head, Network, Rule

Form = Mapping[str, float] | str


def linear(form: Form) -> dict[str, float]:
    """A form as a dictionary."""
    return {form: 1.0} if isinstance(form, str) else dict(form)


def combine(*terms: tuple[float, Form]) -> dict[str, float]:
    """sum of factor * form; channels whose coefficients cancel are dropped."""
    total: dict[str, float] = {}
    for factor, form in terms:
        for name, value in linear(form).items():
            total[name] = total.get(name, 0.0) + factor * value
    return {name: value for name, value in total.items() if value}


@dataclass
class _HeadPlan:
    query: list[dict[str, float]]
    key: list[dict[str, float]]
    value: list[dict[str, float]]
    output: list[dict[str, float]]


@dataclass
class _UnitPlan:
    activation: Activation
    gate: dict[str, float]
    up: dict[str, float]
    down: dict[str, float]


@dataclass
class _BlockPlan:
    rule: Rule
    mask: Tensor | None
    heads: list[_HeadPlan] = field(default_factory=list)
    units: list[_UnitPlan] = field(default_factory=list)


class NetworkBuilder:
    """Collects blocks; `build` makes the tensors. Scratch channels come into being when something writes them.

    Within one block all heads read what was there before it, and all units read what was there after the heads: a
    form may only name channels that have been written by then (SpecError otherwise).
    """

    def __init__(self, constants: Sequence[str], inputs: Sequence[str]) -> None:
        if "one" not in constants:
            raise SpecError("a network needs the constant channel 'one'")
        self._constants, self._inputs = tuple(constants), tuple(inputs)
        self._scratch: list[str] = []
        self._known = {*constants, *inputs}
        self._fresh: set[str] = set()  # written by the part of the block being built; readable from the next part on
        self._blocks: list[_BlockPlan] = []

    def block(self, rule: Rule = "hard", mask: Tensor | None = None) -> None:
        """Begin the next block."""
        self._settle()
        self._blocks.append(_BlockPlan(rule, mask))

    @property
    def depth(self) -> int:
        return len(self._blocks)

    def head(
        self, query: Sequence[Form], key: Sequence[Form], value: Form | Sequence[Form], into: str | Sequence[str]
    ) -> None:
        """A head with score sum_t query_t * key_t; it adds the mixed `value` (one form or several) to `into`."""
        plan = self._blocks[-1]
        if plan.units:
            raise SpecError("heads come before the units of their block")
        values = [value] if isinstance(value, str | Mapping) else list(value)
        names = [into] if isinstance(into, str) else list(into)
        if len(query) != len(key) or len(values) != len(names):
            raise SpecError(f"a head needs as many keys as queries and as many targets as values, got {len(query)} "
                            f"queries, {len(key)} keys, {len(values)} values, {len(names)} targets")  # fmt: skip
        plan.heads.append(
            _HeadPlan(
                [self._read(form) for form in query],
                [self._read(form) for form in key],
                [self._read(form) for form in values],
                [{self._write(name): 1.0} for name in names],
            )
        )

    def unit(self, into: Form, gate: Form, up: Form = "one", activation: Activation = "identity") -> None:
        """A unit of the map: adds act(gate) * up to `into` (a channel, or channels with coefficients)."""
        plan = self._blocks[-1]
        if not plan.units:
            self._settle()  # from here on the heads' results may be read
        reads = self._read(gate), self._read(up)
        down = {self._write(name): value for name, value in linear(into).items()}
        plan.units.append(_UnitPlan(activation, *reads, down))

    def build(self, dtype: torch.dtype = torch.float64) -> Network:
        """The network with dense weight matrices."""
        self._settle()
        names = (*self._constants, *self._inputs, *self._scratch)
        place = {name: index for index, name in enumerate(names)}

        def columns(forms: Sequence[Mapping[str, float]]) -> Tensor:
            matrix = torch.zeros(len(forms), len(names), dtype=dtype)
            entries = [(row, place[name], value) for row, form in enumerate(forms) for name, value in form.items()]
            if entries:
                rows, cols, values = zip(*entries)
                matrix[list(rows), list(cols)] = torch.tensor(values, dtype=dtype)
            return matrix.mT.contiguous()  # (width, forms)

        blocks = []
        for plan in self._blocks:
            heads = tuple(
                Head(columns(head.query), columns(head.key), columns(head.value), columns(head.output).mT.contiguous())
                for head in plan.heads
            )
            token_map = None
            if plan.units:
                token_map = GatedMap(
                    columns([unit.gate for unit in plan.units]),
                    columns([unit.up for unit in plan.units]),
                    columns([unit.down for unit in plan.units]).mT.contiguous(),
                    tuple(unit.activation for unit in plan.units),
                )
            blocks.append(Block(heads, token_map, plan.rule, plan.mask))
        return Network(self._constants, self._inputs, tuple(self._scratch), tuple(blocks))

    def _settle(self) -> None:
        self._known |= self._fresh
        self._fresh = set()

    def _read(self, form: Form) -> dict[str, float]:
        used = linear(form)
        if unknown := used.keys() - self._known:
            raise SpecError(f"channel {sorted(unknown)[0]!r} is read in block {self.depth} before anything writes it")
        return {name: value for name, value in used.items() if value}

    def _write(self, name: str) -> str:
        if name in self._constants:
            raise SpecError(f"position channel {name!r} cannot be written")
        if name not in self._known and name not in self._fresh:
            self._scratch.append(name)
        self._fresh.add(name)
        return name
