"""Certificates for what was read back: a target beside the program, or the larger target, that it should equal.

1. What both show. Every kind of read-out column (a query or key channel of a layer and head, an output), over all paths
   and inputs at once, from joint states of the two networks (reach.py), so without the exponential list of paths.
   Measured: the 2-norm of the difference relative to that of |E| |R_all| (for a target |W_E| |W_V| .. |W_Q|), i.e. to
   what one rounding of the program (of every factor) can do. Bound: ROUNDING (layers + 1) sqrt(n) roundings, n the
   longest sum that is formed or factored. Read-outs decide attention and output for all inputs, lengths and masks
   (theorem 1 of docs/theory/embedding.md), so this is exhaustive.
   For networks that are to be equal on tokens only, scores and outputs are compared instead, on what tokens can reach.
2. Attention and outputs on inputs, by forward passes that share no code with the reading. Bound: the read-out errors
   and an allowance for evaluation, propagated (bounds.py), at most half the digits; half the digits where the paths are
   too many to list.
"""

from typing import Any

import torch
from torch import Tensor

from fixedformer.attention import Mask
from fixedformer.certificate import Certificate, Check, peak
from fixedformer.embedding.bounds import Consequence, propagate
from fixedformer.embedding.certify import SAMPLED_BATCH, SAMPLED_LENGTHS
from fixedformer.embedding.hankel import ROUNDING, reach_factors, show, times
from fixedformer.embedding.reach import Joint, Magnitude, Scores, Subject
from fixedformer.embedding.tree import PathTree
from fixedformer.errors import SpecError
from fixedformer.inputs import as_input

LISTED = 20_000_000  # read-outs that are listed to propagate their errors
Pair = tuple[Subject, Subject]


def certify_equal(
    first: Any, second: Any, inputs: Any = None, mask: Mask = None, seed: int = 0, tokens: bool = False
) -> Certificate:
    """Measure whether two of Target, (machine, program) compute the same, heads in the same order.

    For `decompile` pass (machine, program) and the target, for `shrink` both targets. tokens: they need be equal on
    one-hot tokens only. inputs, mask, seed: what to run them on, as for `machine.certify`. A truncated target does not
    hold: it is not equal. Raises SpecError for different specs.
    """
    pair = (Subject.of(first), Subject.of(second))
    one, two = pair
    if one.spec != two.spec:
        raise SpecError(f"the first is {one.spec}, the second {two.spec}: only networks of one spec can be equal")
    roundoff = max(torch.finfo(subject.dtype).eps for subject in pair) / 2
    tree = PathTree.of(one.spec)
    longest = max(one.width, two.width, tree.layers * tree.node_width + tree.d_out)
    unit = ROUNDING * (tree.layers + 1) * longest**0.5 * roundoff
    checks = _tokens(pair, unit) if tokens else _columns(pair, unit)
    checks += _sampled(pair, inputs, mask, seed, tokens, unit, roundoff)
    names = [_name(subject) for subject in pair]
    return Certificate(
        subject=f"{names[1]} beside {names[0]}",
        checks=tuple(checks),
        context={
            "seed": seed,
            "tokens": tokens,
            "widths": [subject.width for subject in pair],
            "dtypes": [str(subject.dtype).removeprefix("torch.") for subject in pair],
        },
    )


def _name(subject: Subject) -> str:
    if isinstance(subject.source, tuple):
        return f"a program of {subject.source[0]!r}"
    return f"a target {subject.width} wide"


def _columns(pair: Pair, unit: float) -> list[Check]:
    """Check 1 for all inputs."""
    one, two = pair
    tree, alone = PathTree.of(one.spec), [[head] for head in range(one.spec.heads)]
    joint = Joint.of(one.start, two.start, tokens=False)
    scales = [torch.maximum(*pair_of) for pair_of in zip(*(_sizes(subject, tree) for subject in pair))]
    worst = 0.0
    for layer in range(tree.layers + 1):
        last = layer == tree.layers
        shown = [times(r, s.stack.exit() if last else s.stack.reader(layer)) for r, s in zip(joint.all(), pair)]
        change = (shown[0] - shown[1]).norm(dim=0)
        worst = peak(worst, float(torch.where(change == 0, change, change / scales[layer]).max()))
        if not last:
            joint = joint.step((one.stack, two.stack), layer, (alone, alone), tree.residual)
    kinds = tree.layers * tree.node_width + tree.d_out
    return [
        Check(
            claim="every read-out of the one is the other's",
            bound=unit,
            measured=worst,
            cases=kinds,
            scope=f"exhaustive: {kinds} kinds of columns, each over all paths of its depth and all inputs",
            source="roundings of stored and multiplied factors, relative to the product of their magnitudes",
        )
    ]


def _sizes(subject: Subject, tree: PathTree) -> list[Tensor]:
    """2-norms over all paths and inputs of what roundings can do to each kind of column, by depth.

    For a program |E| |R_all|, the roundings of the program; for a target, or where R_all is too large to form, the
    product of the magnitudes of all factors.
    """
    if isinstance(subject.source, tuple) and subject.width * tree.count <= LISTED:
        machine, program = subject.source
        scale = machine.readout_scale(program)
        return [
            scale[:, tree.columns(depth).to(scale.device)].square().sum((0, 1)).sqrt()
            for depth in range(tree.layers + 1)
        ]
    stack = Magnitude(subject.stack)
    reach = reach_factors(stack, subject.start.abs(), tree)
    chains = [stack.reader(layer) for layer in range(tree.layers)] + [stack.exit()]
    return [times(rows, chain).norm(dim=0) for rows, chain in zip(reach, chains)]


def _tokens(pair: Pair, unit: float) -> list[Check]:
    """Check 1 for one-hot tokens."""
    one, two = pair
    tree, alone = PathTree.of(one.spec), [[head] for head in range(one.spec.heads)]
    joint = Joint.of(one.start, two.start, tokens=True)
    size = Joint.of(one.start.abs(), one.start.abs(), tokens=False)
    sizes = Magnitude(one.stack)
    worst = 0.0
    for layer in range(tree.layers):
        scores = [Scores.of(rows, s.stack, layer, s.spec) for rows, s in zip(joint.all(), pair)]
        scale = Scores.of(size.rows[0], sizes, layer, one.spec).size
        for head in range(tree.heads):
            gap, _ = scores[0].gap(head, scores[1], head)
            worst = peak(worst, gap / float(scale[head]) if gap else 0.0)
        joint = joint.step((one.stack, two.stack), layer, (alone, alone), tree.residual)
        size = size.step((sizes, sizes), layer, (alone, alone), tree.residual)
    shown = [times(rows, s.stack.exit()) for rows, s in zip(joint.all(), pair)]
    gap = float((shown[0] - shown[1]).norm())
    worst = peak(worst, gap / float(times(size.rows[0], sizes.exit()).norm()) if gap else 0.0)
    return [
        Check(
            claim="scores of every head, and outputs, are equal for tokens",
            bound=2 * unit,  # a score is a product of two read-outs
            measured=worst,
            cases=tree.layers * tree.heads + 1,
            scope=f"exhaustive: {tree.layers} x {tree.heads} heads on all pairs of paths, outputs on all paths",
            source="roundings of stored and multiplied factors, relative to the product of their magnitudes",
        )
    ]


def _sampled(pair: Pair, inputs: Any, mask: Mask, seed: int, tokens: bool, unit: float, roundoff: float) -> list[Check]:
    """Check 2."""
    one = pair[0]
    cases = _cases(one, inputs, mask, seed, tokens)
    radius = max(float(X.abs().sum(-1).max()) if X.is_floating_point() else 1.0 for X in cases)
    attention, output, largest, count = 0.0, 0.0, 0.0, 0
    for X in cases:
        seen = [subject.attention(X, mask).to(torch.float64) for subject in pair]
        outs = [subject.run(X, mask).to(torch.float64) for subject in pair]
        attention = peak(attention, float((seen[0] - seen[1]).abs().max()))
        output = peak(output, float((outs[0] - outs[1]).abs().max()))
        largest = peak(largest, float(outs[0].abs().max()))
        count += outs[0].shape[:-2].numel()
    half = roundoff**0.5
    allowed = None if tokens else _propagated(pair, radius, unit)
    limits, source = (half, half), "half the digits"
    if allowed is not None:
        limits = min(allowed.attention, half), min(allowed.output / (largest or 1.0), half)
        source = "read-out errors and evaluation roundings propagated to all inputs, at most half the digits"
    scope = f"sampled, seed {seed}" if inputs is None else "on the inputs given"
    spec = one.spec
    where = f"layers 1-{spec.layers}, heads 1-{spec.heads}"
    return [
        Check(f"attention, {where}", limits[0], attention, count, scope, source),
        Check("output, relative", limits[1], output / (largest or 1.0), count, scope, source),
    ]


def _propagated(pair: Pair, radius: float, unit: float) -> Consequence | None:
    """What the read-outs' differences and roundings do to attention and output; None for too many paths."""
    one = pair[0]
    tree = PathTree.of(one.spec)
    if one.spec.d_in * tree.count > LISTED:
        return None
    wanted, shown = (show(s.stack, s.start, tree) for s in pair)
    scales = [show(Magnitude(s.stack), s.start.abs(), tree) for s in pair]
    error = (wanted - shown).abs() + unit * (scales[0] + scales[1])
    return propagate(tree, wanted, error, radius, score_error=unit)


def _cases(one: Subject, inputs: Any, mask: Mask, seed: int, tokens: bool) -> list[Tensor]:
    """The given inputs, or token sequences and (unless tokens) vectors of a few lengths, drawn with `seed`."""
    if inputs is not None:
        return [as_input(inputs, one.spec.d_in, one.dtype, one.start.device)]
    generator = torch.Generator().manual_seed(seed)
    cases = []
    for length in SAMPLED_LENGTHS if not isinstance(mask, Tensor) else (mask.shape[-1],):
        shape = (SAMPLED_BATCH, length) if not isinstance(mask, Tensor) else (*mask.shape[:-2], length)
        cases.append(torch.randint(one.spec.d_in, shape, generator=generator).to(one.start.device))
        if not tokens:
            vectors = torch.randn(*shape, one.spec.d_in, generator=generator, dtype=torch.float64)
            cases.append((vectors / vectors.abs().sum(-1, keepdim=True).clamp_min(1)).to(one.start.device, one.dtype))
    return cases
