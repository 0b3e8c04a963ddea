"""Programs as fixed networks: schedule the operations into blocks, run them, and never hand out an unverified one."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from fixedformer.capacity import require_memory
from fixedformer.certificate import Certificate
from fixedformer.errors import SpecError
from fixedformer.prompt.builder import NetworkBuilder
from fixedformer.prompt.engine import Engine
from fixedformer.prompt.language.expressions import NO_MATCH
from fixedformer.prompt.language.lowering import Attend, Lowering, Unit
from fixedformer.prompt.language.program import Program
from fixedformer.prompt.language.values import Form, Optional, Selection, Value
from fixedformer.prompt.layout import require_exact
from fixedformer.prompt.network import Network

# "one" is 1 everywhere, "token" on tokens, "begin" on the begin token; "place" is 0, 1, 2, ... on tokens.
CONSTANTS = ("one", "token", "begin", "place")


@dataclass(frozen=True, eq=False)
class CompiledProgram:
    """A program as one fixed network for all sequences of up to `length` tokens.

    noise: bound on the rounding of a number output (0 for flags and tokens). verification: the certificate of the
    comparison with the interpreter (None only with verify=False). A begin token stands before the sequence.
    """

    program: Program
    length: int
    network: Network
    noise: float
    verification: Certificate | None = None
    _engines: dict[int, Engine] = field(default_factory=dict, repr=False)

    def fingerprint(self) -> str:
        """SHA-256 over the weights."""
        return self.network.fingerprint()

    def run_ids(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers (batch, n) float64 and "is there a value" (batch, n) bool, for token ids (batch, n).

        Flags are 1 and 0, tokens are ids. Raises SpecError for an empty or too long sequence and for unknown ids.
        """
        if ids.ndim != 2 or not 0 < ids.shape[1] <= self.length or ids.shape[0] == 0:
            raise SpecError(f"{self.program.name} was compiled for sequences of 1 to {self.length} tokens: needed ids "
                            f"(batch, n), got {tuple(ids.shape)}; compile it for a longer length")  # fmt: skip
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= len(self.program.alphabet):
            raise SpecError(f"{self.program.name}: token ids must lie in 0..{len(self.program.alphabet) - 1}, got "
                            f"{low}..{high}")  # fmt: skip
        n = ids.shape[1]
        if n not in self._engines:
            self._engines[n] = Engine(self.network, _constants(n))
        inputs = torch.nn.functional.pad(ids.double(), (1, 0))[..., None]
        out = self._engines[n].read(inputs, ["out", "matched"])[:, 1:]
        return out[..., 0], out[..., 1] > 0.5

    def run(self, sequences: Sequence[Sequence[str]]) -> list[list[Any]]:
        """Outputs of sequences of token names (strings, or lists of names), of any lengths up to `length`.

        Each output is a list: floats, bools or token names, and NO_MATCH where the program has no value.
        """
        ids = [self.program.read(sequence) for sequence in sequences]
        results: list[list[Any]] = [[] for _ in ids]
        for n in sorted({len(row) for row in ids}):
            places = [place for place, row in enumerate(ids) if len(row) == n]
            values, matched = self.run_ids(torch.tensor([ids[place] for place in places]))
            for place, row, known in zip(places, values.tolist(), matched.tolist()):
                results[place] = [self._decode(value) if there else NO_MATCH for value, there in zip(row, known)]
        return results

    def _decode(self, value: float) -> Any:
        kind = self.program.output.type.kind
        if kind == "flag":
            return value > 0.5
        return self.program.alphabet[round(value)] if kind == "token" else value


def compile_program(program: Program, length: int, verify: bool = True, samples: int = 64) -> CompiledProgram:
    """Compile for all sequences of up to `length` tokens, and compare with the interpreter.

    verify: run every input as far as a few hundred go and `samples` random ones up to the full length; a difference is
    a SpecError that shows it. Raises SpecError for what cannot be compiled faithfully, CapacityError where `length` is
    too large for exact positions, for the precision that a comparison needs, or for memory.
    """
    from fixedformer.prompt.language.verify import verify_program

    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise SpecError(f"length must be a whole number of at least 1, got {length!r}")
    require_exact(4 * length**2, torch.float64, "the largest squared position, four times,")
    lowering = Lowering(program, length)
    _require_room(lowering, program)
    output = lowering.registers[id(program.output)]
    assert not isinstance(output, Selection)  # Program refuses a selector as its output
    value, matched = (output.value, output.matched) if isinstance(output, Optional) else (output, None)
    network = _schedule(lowering, value, matched)
    noise = lowering.noise(value)
    compiled = CompiledProgram(program, length, network, noise)
    if not verify:
        return compiled
    certificate = verify_program(compiled, samples=samples)
    return CompiledProgram(program, length, network, noise, certificate, compiled._engines)


def _constants(n: int) -> Tensor:
    """The position channels (n + 1, 4) of a sequence behind its begin token."""
    constants = torch.ones(n + 1, 4, dtype=torch.float64)
    constants[0, 1:] = torch.tensor([0.0, 1.0, 0.0])
    constants[1:, 2] = 0.0
    constants[1:, 3] = torch.arange(n)
    return constants


def _schedule(lowering: Lowering, value: Value, matched: Value | None) -> Network:
    """Each operation as early as its inputs allow: heads of block b at time 2b, units at time 2b + 1."""
    unit: dict[str, Fraction] = {"token": Fraction(1)}
    operations = [
        *lowering.operations,
        Unit("out", value.form, unit, "identity"),
        Unit("matched", unit if matched is None else matched.form, unit, "identity"),
    ]
    ready = dict.fromkeys(("token", "begin", "place", "id"), -1)
    times: dict[int, list[Unit | Attend]] = {}
    for operation in operations:
        last = max((ready[name] for form in _reads(operation) for name in form), default=-1)
        parity = 0 if isinstance(operation, Attend) else 1
        time = last + 1 + (last + 1 + parity) % 2
        ready[operation.into] = time
        times.setdefault(time, []).append(operation)
    builder = NetworkBuilder(CONSTANTS, ("id",))
    for block in range(max(times) // 2 + 1):
        builder.block()
        for operation in times.get(2 * block, []):
            assert isinstance(operation, Attend)  # parity 0
            query, key = zip(*operation.pairs)
            builder.head(
                [_floats(f) for f in query], [_floats(f) for f in key], _floats(operation.value), operation.into
            )
        for operation in times.get(2 * block + 1, []):
            assert isinstance(operation, Unit)  # parity 1
            builder.unit(operation.into, _floats(operation.gate), _floats(operation.up), operation.activation)
    return builder.build()


def _reads(operation: Unit | Attend) -> list[Form]:
    if isinstance(operation, Unit):
        return [operation.gate, operation.up]
    return [operation.value, *[form for pair in operation.pairs for form in pair]]


def _floats(form: Form) -> dict[str, float]:
    return {name: float(factor) for name, factor in form.items()}


def _require_room(lowering: Lowering, program: Program) -> None:
    width = len(lowering.channels) + 4
    units = sum(isinstance(operation, Unit) for operation in lowering.operations)
    heads = sum(len(operation.pairs) for operation in lowering.operations if isinstance(operation, Attend))
    needed = 8 * width * (3 * units + 2 * heads + lowering.length) + 8 * lowering.length**2
    require_memory(needed, f"{program.name} at length {lowering.length}", "use a shorter length")
