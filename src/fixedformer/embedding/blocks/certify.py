"""What a program's certificate measures, and where each bound comes from.

1. Read-outs. Every column of W_E C_0 and every constant, multiplied out path by path from the left, by code that
   shares nothing with the compiler's (which goes from the right), beside what the program shows. Measured: the largest
   |shown - wanted| / scale, entry by entry, scale = |E_a| |P_0| + the same products of absolute values. Bound: as many
   roundings as the longest chain of inner products can make. These decide the output for all inputs, lengths, masks
   (theorems 3.1, 4.1), so this is exhaustive. (With a random machine the wanted values depend on its neurons: alpha is
   then checked too, by multiplying it back with what the neurons write.)
2. Outputs on inputs, by both engines. Bound: MULTIPLE roundings x cond(P_0) x cond(B), relative to the largest output;
   cond(B) is the largest cond(B_j) of each layer, multiplied over the layers. MULTIPLE comes from a calibration
   (benchmarks/blocks.py), not from a theorem: a target may amplify more, and then `tolerance` says what will do. It is
   at most half the digits: an output with fewer right is not the target's, whatever its conditioning.
"""

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fixedformer.attention import Mask
from fixedformer.certificate import Certificate, Check, peak
from fixedformer.embedding.blocks.folded import Folded
from fixedformer.embedding.blocks.layout import Layout
from fixedformer.embedding.blocks.target import BlockTarget
from fixedformer.errors import SpecError
from fixedformer.inputs import as_input

if TYPE_CHECKING:
    from fixedformer.embedding.blocks.machine import BlockMachine, Engine
    from fixedformer.embedding.blocks.program import BlockProgram

MULTIPLE = 1000.0
DENSE_WIDTH = 1500  # the definition holds m x m matrices: wider machines are measured by path space alone
SAMPLED_LENGTHS = (1, 2, 5, 17)
SAMPLED_BATCH = 4


class Multiplied:
    """What every path of a target shows, from the left: S C_l = [S W_Q, S W_K, S C_{l+1}, S M C_{l+1}, ..].

    alphas[l] (r, t_l) is what the compiler chose for layer l; None stands for W_d C_{l+1}, the sparse machines'.
    """

    def __init__(self, folded: Folded, layout: Layout, alphas: list[Tensor] | None = None) -> None:
        self.folded, self.layout, self.alphas = folded, layout, alphas

    def rows(self, start: Tensor, number: int = 0) -> Tensor:
        """start (rows, d_model) times C of layer `number` (from 0; the exit after the last)."""
        if number == self.layout.spec.layers:
            out = start @ self.folded.unembed
            return torch.cat([start, out], dim=-1) if self.layout.spec.norm else out
        layer, level = self.folded.layers[number], self.layout.levels[number]
        moved = [start @ move for move in layer.move]
        blocks = [torch.cat([start @ w for w in read], dim=-1) for read in (layer.query, layer.key)]
        if "keep" in level.parts or "move" in level.parts:
            blocks += [self.rows(state, number + 1) for state in self._skips("keep", start, number) + moved]
        for name in ("gate", "up"):
            if f"{name}_move" in level.parts:
                blocks += [self._neurons(name, state, number) for state in self._skips(name, start, number) + moved]
        return torch.cat(blocks, dim=-1)

    def constants(self) -> Tensor:
        """All that the constant stream must show, in the order of the layout."""
        out = torch.zeros(self.layout.constant_width, dtype=torch.float64)
        for (number, name), place in self.layout.constants.items():
            out[place] = self.folded.unembed_bias if number is None else self._constant(number, name)
        return out

    def alpha(self, number: int) -> Tensor:
        if self.alphas is not None:
            return self.alphas[number]
        down = self.folded.layers[number].down
        assert down is not None
        return self.rows(down, number + 1)

    def _skips(self, name: str, start: Tensor, number: int) -> list[Tensor]:
        return [start] if name in self.layout.levels[number].parts else []

    def _neurons(self, name: str, state: Tensor, number: int) -> Tensor:
        layer, copies = self.folded.layers[number], self.layout.levels[number].copies
        if name == "gate":
            assert layer.gate is not None
            return torch.einsum("nd,dj->nj", state, layer.gate).repeat_interleave(copies, dim=-1)
        assert layer.up is not None
        return torch.einsum("nj,jt->njt", state @ layer.up, self.alpha(number)).flatten(1)

    def _constant(self, number: int, name: str) -> Tensor:
        layer, copies = self.folded.layers[number], self.layout.levels[number].copies
        direct = {"query": layer.query_bias, "key": layer.key_bias}
        if name in direct:
            return direct[name].flatten()
        if name.startswith("attend_"):
            start, kind = layer.attend_bias.unsqueeze(0), name.removeprefix("attend_")
            return (self.rows(start, number + 1) if kind == "keep" else self._neurons(kind, start, number)).squeeze(0)
        if name == "down":
            assert layer.down_bias is not None
            return self.rows(layer.down_bias.unsqueeze(0), number + 1).squeeze(0)
        assert layer.gate_bias is not None
        assert layer.up_bias is not None
        if name == "gate":
            return layer.gate_bias.repeat_interleave(copies)
        return (layer.up_bias.unsqueeze(1) * self.alpha(number)).flatten()


def largest_ratio(error: Tensor, scale: Tensor) -> float:
    """The largest |error| / scale, where 0/0 is 0 and x/0 infinite; 0 for nothing."""
    if not error.numel():
        return 0.0
    return float(torch.where(error == 0, torch.zeros_like(error), error.abs() / scale).max())


def certify(
    machine: "BlockMachine",
    program: "BlockProgram",
    target: BlockTarget,
    inputs: Any,
    mask: Mask,
    seed: int,
    tolerance: float | None,
) -> Certificate:
    """Build the certificate; see the module's text. Raises SpecError where target and machine do not fit."""
    if target.spec != machine.spec:
        raise SpecError(f"the target is {target.spec}, the machine serves {machine.spec}")
    if tolerance is not None and not tolerance > 0:
        raise SpecError(f"tolerance must be positive, got {tolerance}")
    roundoff = torch.finfo(program.dtype).eps / 2
    checks = _read_outs(machine, program, target, roundoff)
    report = program.report
    bound, source = tolerance, "the tolerance given"
    if bound is None:
        bound = min(MULTIPLE * roundoff * report.condition * report.neuron_condition, math.sqrt(roundoff))
        source = (
            f"{MULTIPLE:.0f} roundings x cond(P_0) = {report.condition:.1e} x cond(B) = {report.neuron_condition:.1e}, "
            "at most half the digits"
        )
    cases = _cases(machine.spec.d_in, program.dtype, inputs, mask, seed)
    wide = torch.promote_types(target.dtype, program.dtype)  # a float32 target computes its own roundings in float32
    target = BlockTarget(target.spec, card=target.card, **{name: x.to(wide) for name, x in target.weights.items()})
    engines: list[Engine] = ["path", "dense"] if machine.width <= DENSE_WIDTH else ["path"]
    for engine in engines:
        gaps = []
        for X in cases:
            truth = target(X, mask)
            gap = (machine.run(program, X, mask, engine) - truth).abs().max() / truth.abs().max()
            gaps.append(float(gap))
        sampled = f"sampled, seed {seed}" if inputs is None else "on the inputs given"
        checks.append(Check(f"output, {engine} engine, relative", bound, peak(*gaps), len(gaps), sampled, source))
    return Certificate(
        subject=f"program for {machine!r}",
        checks=tuple(checks),
        context={
            "seed": seed,
            "machine": machine.describe(),
            "machine_fingerprint": program.machine_fingerprint,
            "program_dtype": str(program.dtype).removeprefix("torch."),
            "condition": report.condition,
            "neuron_condition": report.neuron_condition,
            "tolerance": tolerance,
        },
    )


def _read_outs(machine: "BlockMachine", program: "BlockProgram", target: BlockTarget, roundoff: float) -> list[Check]:
    folded, layout, spec = Folded.of(target), machine.layout, machine.spec
    shown, scales = machine.read_outs(program), machine.scale(program)
    alphas: list[Tensor] | None = None
    checks = []
    if shown.writes is not None and spec.mlp:
        alphas, worst, count = _alphas(machine, folded, shown.writes)
        widest = 4 * layout.exit_width * max(layout.levels[0].below, 8)
        checks.append(Check(
            "alpha_j B_j = W_d[j, :] C_l, every neuron", widest * 2.0**-53, worst, count,
            f"exhaustive: all {count} target neurons", "roundings of solving with B_j, relative to |alpha| |B|",
        ))  # fmt: skip
    exact = Multiplied(folded, layout, alphas)
    absolute = Multiplied(_absolute(folded), layout, None if alphas is None else [x.abs() for x in alphas])
    # A chain multiplies at most L maps of two factors and the exit, then a neuron's: each inner product rounds as
    # often as it is long. The program's own products add its width where P_0 is no selection.
    chain = (2 * spec.layers + 2) * max(target.d_model, spec.mlp_width) * (1 + spec.layers)
    length = chain + (machine.width if shown.writes is not None else 0)
    for claim, got, want, magnitude, scale, source in (
        ("every column of E P_0 = W_E C_0", shown.rows, exact.rows(folded.embed), absolute.rows(folded.embed.abs()),
         scales[0], "the stream"),
        ("every constant that e_b must show", shown.constants, exact.constants(), absolute.constants(),
         scales[1], "the constants"),
    ):  # fmt: skip
        if got.numel():
            ratio = largest_ratio(got.to(torch.float64) - want, scale + magnitude)
            scope = f"exhaustive: all entries of {source}"
            checks.append(Check(claim, length * roundoff, ratio, got.numel(), scope, f"{length} roundings, a chain's"))
    return checks


def _alphas(machine: "BlockMachine", folded: Folded, writes: tuple[Tensor, ...]) -> tuple[list[Tensor], float, int]:
    """The compiler's alphas, from the last layer back, and how well each multiplies back to W_d C_l."""
    layout, found, worst, count = machine.layout, dict[int, Tensor](), 0.0, 0
    for number in reversed(range(layout.spec.layers)):
        known = [found.get(i, torch.zeros(0)) for i in range(layout.spec.layers)]
        down = folded.layers[number].down
        assert down is not None
        want = Multiplied(folded, layout, known).rows(down, number + 1)
        found[number] = machine.spread(number, want)
        blocks = writes[number].unflatten(0, (-1, layout.levels[number].copies))
        back = torch.einsum("jt,jts->js", found[number], blocks)
        scale = torch.einsum("jt,jts->js", found[number].abs(), blocks.abs())
        worst, count = peak(worst, largest_ratio(back - want, scale)), count + want.shape[0]
    return [found[number] for number in range(layout.spec.layers)], worst, count


def _absolute(folded: Folded) -> Folded:
    """The same with every entry's absolute value: products of these bound what rounding can do."""
    layers = tuple(
        replace(layer, **{name: x.abs() for name, x in vars(layer).items() if x is not None}) for layer in folded.layers
    )
    return Folded(folded.embed.abs(), layers, folded.unembed.abs(), folded.unembed_bias.abs())


def _cases(d_in: int, dtype: torch.dtype, inputs: Any, mask: Mask, seed: int) -> list[Tensor]:
    """The given inputs, or token sequences drawn with `seed`: of a few lengths, or as long as a mask array says."""
    if inputs is not None:
        return [as_input(inputs, d_in, dtype)]
    generator = torch.Generator().manual_seed(seed)
    shapes = [(SAMPLED_BATCH, tokens) for tokens in SAMPLED_LENGTHS]
    if isinstance(mask, Tensor):
        shapes = [(*mask.shape[:-2], mask.shape[-1])] if mask.ndim > 2 else [(SAMPLED_BATCH, mask.shape[-1])]
    return [torch.randint(d_in, shape, generator=generator) for shape in shapes]
