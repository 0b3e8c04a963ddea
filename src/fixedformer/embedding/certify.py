"""What a program's certificate measures, and where each bound comes from.

1. Read-outs. Every column of E R_all = W_all, each path multiplied out one by one with products of twenty digits, by
   code that shares nothing with the compiler's (depth first here, breadth first and backwards there). Measured: the
   largest |E R_all - W_all| / (|E| |R_all|), entry by entry. Bound: two roundings of E. Rounding the exact E once costs
   one; an entry of E changed by a relative x moves it to x / width or more. All columns are checked, and they decide
   the output for all inputs, lengths and masks (theorem 1), so this is exhaustive.
2. Attention and outputs on inputs, by both engines. Bound: the read-outs' measured errors propagated by `bounds.py`,
   plus an allowance for evaluating in floating point: each read-out may be off by ROUNDING sqrt(width) roundings of
   |E| |R_all|, each score by as many of |q| |k|. Never more than half the digits (sqrt of the unit roundoff), so that a
   sensitive target does not get an empty bound.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fixedformer.attention import Mask
from fixedformer.certificate import Certificate, Check, peak
from fixedformer.embedding.accurate import Pair
from fixedformer.embedding.bounds import Consequence, propagate
from fixedformer.embedding.maps import Chain, apply_accurately
from fixedformer.embedding.readouts import Stack, TargetStack, relative_residual
from fixedformer.embedding.tree import PathTree
from fixedformer.errors import SpecError
from fixedformer.inputs import as_input
from fixedformer.target import Target, forward

if TYPE_CHECKING:
    from fixedformer.embedding.machine import Engine, Machine
    from fixedformer.embedding.program import Program

ROUNDING = 8.0
# The definition costs m x m products: beyond this many multiplications it runs on the first inputs only.
DENSE_BUDGET = 40_000_000_000
SAMPLED_LENGTHS = (1, 2, 5, 17)
SAMPLED_BATCH = 8
MEMORY = 1 << 29  # bytes of path states held at once
Path = tuple[int, ...]


def path_by_path(stack: Stack, start: Tensor, layers: int, heads: int, residual: bool) -> list[tuple[Path, Pair]]:
    """Read-outs (d_in, own) of every path, in preorder: the definition, with the path's name beside each block.

    Paths of one length are multiplied together, as many as MEMORY holds.
    """
    found: dict[Path, Pair] = {}

    def visit(paths: list[Path], rows: Pair) -> None:  # rows: (paths, d_in, state)
        size = 16 * rows.hi[0].numel() * (heads + residual)
        if len(paths) > 1 and len(paths) * size > MEMORY:
            half = len(paths) // 2
            visit(paths[:half], Pair(rows.hi[:half], rows.lo[:half]))
            visit(paths[half:], Pair(rows.hi[half:], rows.lo[half:]))
            return
        depth = len(paths[0])
        own = _times(rows, stack.exit() if depth == layers else stack.reader(depth))
        found.update((path, Pair(own.hi[i], own.lo[i])) for i, path in enumerate(paths))
        if depth < layers:
            # Branch 0 is the skip where there is one, else the first head; names sort in the order of the branches.
            steps = [rows] if residual else []
            steps += [_times(rows, stack.mover(depth, head)) for head in range(heads)]
            children = [(*path, branch) for branch in range(len(steps)) for path in paths]
            visit(children, Pair(*(torch.cat(parts) for parts in zip(*steps))))

    visit([()], Pair.of(start.unsqueeze(0)))
    return sorted(found.items())  # a path sorts before its extensions: preorder


def _times(rows: Pair, chain: Chain) -> Pair:
    return Pair(*apply_accurately(chain, rows))


@dataclass(frozen=True)
class Audit:
    """All read-outs of a program beside the target's: what both show, how far apart they are, in float64."""

    wanted: Tensor  # (d_in, N)
    error: Tensor  # (d_in, N), |E R_all - W_all|
    scale: Tensor  # (d_in, N), |E| |R_all|

    @classmethod
    def of(cls, machine: "Machine", program: "Program", target: Target) -> "Audit":
        spec = machine.spec
        shape = (spec.layers, spec.heads, spec.residual)
        shown = path_by_path(machine.stack(program), program.embedding, *shape)
        wanted = path_by_path(TargetStack(target), target.weights.embed.to(torch.float64), *shape)
        blocks = [(want.hi, want.minus(show).abs()) for (_, show), (_, want) in zip(shown, wanted, strict=True)]
        return cls(
            torch.cat([want for want, _ in blocks], dim=1),
            torch.cat([error for _, error in blocks], dim=1),
            machine.readout_scale(program),
        )


def certify(
    machine: "Machine",
    program: "Program",
    target: Target,
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
    audit = Audit.of(machine, program, target)
    checks = [
        Check(
            claim="every column of E R_all = W_all",
            bound=2 * roundoff,
            measured=relative_residual(audit.error, audit.scale),
            cases=machine.tree.count,
            scope=f"exhaustive: all {machine.tree.count} columns, so all inputs, lengths and masks",
            source="two roundings of the stored embedding, relative to |E| |R_all|, entry by entry",
        )
    ]
    cases = _cases(machine, program, inputs, mask, seed)
    radius = max(_radius(X) for X in cases)
    exact = propagate(machine.tree, audit.wanted, audit.error, radius)
    allowed = _allowance(machine.tree, audit, roundoff, machine.width, radius)
    sampled = f"sampled, seed {seed}" if inputs is None else "on the inputs given"
    for engine in ("path", "dense"):
        checks += _measure(machine, program, target, cases, mask, engine, (allowed, roundoff, tolerance), sampled)
    return Certificate(
        subject=f"program for {machine!r}",
        checks=tuple(checks),
        consequences={
            "follows": f"in exact arithmetic, for every input whose tokens have 1-norm at most {radius:.3g}, at every "
            f"length and mask: attention within {exact.attention:.1e}, output within {exact.output:.1e}"
        },
        context={
            "seed": seed,
            "machine": machine.describe(),
            "machine_fingerprint": program.machine_fingerprint,
            "program_dtype": str(program.dtype).removeprefix("torch."),
            "target_dtype": str(target.dtype).removeprefix("torch."),
            "condition": program.report.condition,
            "tolerance": tolerance,
        },
    )


def _allowance(tree: PathTree, audit: Audit, roundoff: float, width: int, radius: float) -> Consequence:
    """The propagated bound when every read-out may also carry the rounding of its evaluation."""
    unit = ROUNDING * math.sqrt(width) * roundoff
    return propagate(tree, audit.wanted, audit.error + unit * audit.scale, radius, score_error=unit)


def _measure(
    machine: "Machine",
    program: "Program",
    target: Target,
    cases: list[Tensor],
    mask: Mask,
    engine: "Engine",
    limits: tuple[Consequence, float, float | None],
    scope: str,
) -> list[Check]:
    """Attention and outputs of one engine against the target's own forward pass, in the wider format of the two: what a
    float32 target computes in float32 is not what its weights say to float64's last digit."""
    target = target.to(torch.promote_types(target.dtype, program.dtype))
    allowed, roundoff, tolerance = limits
    attention, output, largest, count = 0.0, 0.0, 0.0, 0
    if engine == "dense":
        cases, scope = _affordable(machine, cases, scope)
    for X in cases:
        seen: list[Tensor] = []
        wanted: list[Tensor] = []
        machine.evaluate(program, X, mask, engine, seen.append)
        out = machine.run(program, X, mask, engine)  # as users run it: fused where nobody watches the attention
        truth = forward(target.spec, target.weights, as_input(X, target.spec.d_in, target.dtype), mask, wanted.append)
        attention = peak(attention, *(float((a - b).abs().max()) for a, b in zip(seen, wanted, strict=True)))
        output = peak(output, float((out - truth).abs().max()))
        largest = peak(largest, float(truth.abs().max()))
        count += math.prod(X.shape[:-1] if not X.is_floating_point() else X.shape[:-2])
    output = output / largest if largest else output
    half = math.sqrt(roundoff)
    limit = {"attention": min(allowed.attention, half), "output": min(allowed.output / (largest or 1), half)}
    source = "read-out errors and evaluation roundings propagated to all inputs, at most half the digits"
    if tolerance is not None:
        limit, source = dict.fromkeys(limit, tolerance), "the tolerance given"
    spec = machine.spec
    where = f"layers 1-{spec.layers}, heads 1-{spec.heads}"
    return [
        Check(f"attention, {where} ({engine})", limit["attention"], attention, count, scope, source),
        Check(f"output, relative ({engine})", limit["output"], output, count, scope, source),
    ]


def _affordable(machine: "Machine", cases: list[Tensor], scope: str) -> tuple[list[Tensor], str]:
    """The first inputs that the definition can run within DENSE_BUDGET, at least one sequence."""
    kept: list[Tensor] = []
    left = DENSE_BUDGET
    for X in cases:
        ids = not X.is_floating_point()
        tokens = X.shape[-1] if ids else X.shape[-2]
        flat = X.reshape(-1, *X.shape[-1 if ids else -2 :])
        fits = left // machine.cost(tokens)[1]
        if fits < len(flat):
            if fits or not kept:
                kept.append(flat[: max(fits, 1)])
            return kept, f"{scope}, the first that the definition can afford"
        left -= len(flat) * machine.cost(tokens)[1]
        kept.append(X)
    return kept, scope


def _cases(machine: "Machine", program: "Program", inputs: Any, mask: Mask, seed: int) -> list[Tensor]:
    """The given inputs, or token sequences and Gaussian vectors of a few lengths, drawn with `seed`."""
    spec, dtype, device = machine.spec, program.dtype, program.embedding.device
    if inputs is not None:
        return [as_input(inputs, spec.d_in, dtype, device)]
    generator = torch.Generator().manual_seed(seed)
    lengths = SAMPLED_LENGTHS if not isinstance(mask, Tensor) else (mask.shape[-1],)
    cases = []
    for length in lengths:
        shape = (SAMPLED_BATCH, length) if not isinstance(mask, Tensor) else (*mask.shape[:-2], length)
        cases.append(torch.randint(spec.d_in, shape, generator=generator).to(device))
        vectors = torch.randn(*shape, spec.d_in, generator=generator, dtype=torch.float64)
        cases.append((vectors / vectors.abs().sum(-1, keepdim=True).clamp_min(1)).to(device, dtype))
    return cases


def _radius(X: Tensor) -> float:
    """The largest 1-norm of a token."""
    return float(X.abs().sum(-1).max()) if X.is_floating_point() else 1.0
