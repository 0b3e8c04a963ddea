"""The narrowest transformer with given read-outs: minimal realisation, one cut at a time.

Rows of cut l are written as R_l F_l (R_l: how paths and inputs make them from the layer's state; F_l: what each state
coordinate shows from there on). Layer l + 1 splits the rows of F_l by branch; factoring the pile of all heads' parts
gives the value maps and F_{l+1}. Proofs: docs/theory/decompile.md, theorem 1 (no residual) and theorem 2 (residual).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fixedformer.embedding.hankel import EPS, ROUNDING, Futures, times
from fixedformer.embedding.maps import Chain
from fixedformer.target import Card, Target, TargetSpec


@dataclass(frozen=True, eq=False)
class Cut:
    """What was decided at one cut.

    spectrum: singular values, largest first. Without residual connections they are those of the Hankel matrix (columns
    scaled); with them, of the part that the stream does not show already. rank: of the Hankel matrix. width: of the
    state, equal to the rank but for residual streams, which carry on what they no longer need. tolerance: where the
    line was drawn. kept: singular values above it.
    """

    spectrum: tuple[float, ...]
    rank: int
    width: int
    tolerance: float
    kept: int

    @property
    def smallest_kept(self) -> float | None:
        return self.spectrum[self.kept - 1] if self.kept else None

    @property
    def largest_dropped(self) -> float | None:
        return self.spectrum[self.kept] if self.kept < len(self.spectrum) else None

    @property
    def gap(self) -> float:
        """smallest kept / largest dropped; infinite where nothing was dropped or kept."""
        kept, dropped = self.smallest_kept, self.largest_dropped
        return float("inf") if kept is None or not dropped else kept / dropped

    @property
    def lost(self) -> float:
        """2-norm of the dropped singular values."""
        return math.hypot(*self.spectrum[self.kept :])


@dataclass(frozen=True, eq=False)
class Layered:
    """A transformer whose state may have another width at every cut; a `Stack`, with `embed` as start rows.

    embed (d_in, r_0); readers[l] (r_l, 2Hd); values[l][h] (r_l, d_v), outputs[l][h] (d_v, r_{l+1}), d_v of its own
    for every head; unembed (r_L, d_out). All float64. With residual connections all r_l are equal.
    """

    embed: Tensor
    readers: tuple[Tensor, ...]
    values: tuple[tuple[Tensor, ...], ...]
    outputs: tuple[tuple[Tensor, ...], ...]
    unembed: Tensor

    @classmethod
    def of(cls, target: Target) -> "Layered":
        weights = target.weights.map(lambda tensor: tensor.to(torch.float64))
        both = torch.cat([weights.query, weights.key], dim=1)  # (layers, 2H, d_model, d)
        return cls(
            weights.embed,
            tuple(layer.transpose(0, 1).flatten(1) for layer in both),
            tuple(tuple(layer) for layer in weights.value),
            tuple(tuple(layer) for layer in weights.output),
            weights.unembed,
        )

    def reader(self, layer: int) -> Chain:
        return (self.readers[layer],)

    def mover(self, layer: int, head: int) -> Chain:
        return (self.values[layer][head], self.outputs[layer][head])

    def exit(self) -> Chain:
        return (self.unembed,)

    @property
    def widths(self) -> tuple[int, ...]:
        """State width at every cut 0..layers."""
        return tuple(matrix.shape[0] for matrix in (*self.readers, self.unembed))

    @property
    def value_widths(self) -> tuple[tuple[int, ...], ...]:
        """d_v of every layer and head."""
        return tuple(tuple(value.shape[1] for value in layer) for layer in self.values)

    def target(self, spec: TargetSpec, dtype: torch.dtype, card: Card | None = None) -> Target:
        """As a `Target`: zeros fill every state up to the widest, every value up to the widest."""
        width = max(1, *self.widths)
        d_value = max(1, *(width for layer in self.value_widths for width in layer))

        def fill(matrix: Tensor, rows: int, columns: int) -> Tensor:
            out = matrix.new_zeros(rows, columns)
            out[: matrix.shape[0], : matrix.shape[1]] = matrix
            return out

        both = torch.stack([fill(reader, width, reader.shape[1]) for reader in self.readers])
        both = both.unflatten(-1, (2, spec.heads, spec.d_head)).movedim(1, -2)  # (layers, 2, heads, width, d)
        value = [torch.stack([fill(v, width, d_value) for v in layer]) for layer in self.values]
        output = [torch.stack([fill(o, d_value, width) for o in layer]) for layer in self.outputs]
        tensors = {
            "query": both[:, 0],
            "key": both[:, 1],
            "value": torch.stack(value),
            "output": torch.stack(output),
            "embed": fill(self.embed, self.embed.shape[0], width),
            "unembed": fill(self.unembed, width, self.unembed.shape[1]),
        }
        return Target(spec, **{name: t.to(dtype).contiguous() for name, t in tensors.items()}, card=card)


def realise(futures: Futures, tolerance: float | None = None) -> tuple[Layered, tuple[Cut, ...]]:
    """The narrowest transformer with the read-outs that `futures` shows, and what was decided at every cut.

    tolerance: relative to the largest singular value of each cut; None for what rounding explains.
    """
    tree = futures.tree
    embed, rows, cut = _factor(futures, 0, futures.start, tolerance)
    readers, values, outputs, cuts = [], [], [], [cut]
    for layer in range(tree.layers):
        readers.append(futures.read(layer, rows))
        parts = [futures.step(layer, head, rows) for head in range(tree.heads)]
        if tree.residual:
            movers, rows, cut = _extend(futures, layer, rows, parts, tolerance)
        else:
            width = len(rows)
            pile, rows, cut = _factor(futures, layer + 1, torch.cat(parts), tolerance)
            movers = pile.reshape(tree.heads, width, pile.shape[1])
        limit = _limit(futures, layer + 1, cut.spectrum, tolerance)
        split = [_split(futures.seen(layer + 1, part), mover, limit) for part, mover in zip(parts, movers)]
        values.append(tuple(value for value, _ in split))
        outputs.append(tuple(output for _, output in split))
        cuts.append(cut)
    found = Layered(embed, tuple(readers), tuple(values), tuple(outputs), futures.exit(rows))
    return (one_width(found) if tree.residual else found), tuple(cuts)


def fit_tokens(layered: Layered, residual: bool) -> Layered:
    """The same function of token ids, fit to be realised on less state; other read-outs for other inputs.

    For one-hot tokens the rows of every P_p sum to 1, so states of cut l lie in the affine space a_l + D_l with a_0 the
    mean of the embedding's rows, D_0 their differences, a_{l+1} = [a_l +] sum_h a_l M^h and D_{l+1} = [D_l +] sum_h
    D_l M^h: at most 1 + B^l (d_in - 1) dimensions in place of B^l d_in. docs/theory/decompile.md, section 4.
    """
    mean = layered.embed.mean(0, keepdim=True)
    anchors, differences = [mean], [_basis(layered.embed - mean)]
    for layer in range(len(layered.readers)):
        heads = range(len(layered.values[layer]))
        anchor, spread = ([times(rows[-1], layered.mover(layer, h)) for h in heads] for rows in (anchors, differences))
        kept = ([anchors[-1]], [differences[-1]]) if residual else ([], [])
        anchors.append(torch.stack(kept[0] + anchor).sum(0))
        differences.append(_basis(torch.cat(kept[1] + spread)))
    if residual:
        return _one_head_carries_the_anchor(layered, anchors, differences)
    bases = [_basis(_level([a, d])) for a, d in zip(anchors, differences)]
    return project(layered, [basis.mT for basis in bases], bases)  # states lie there already: none changes


def _one_head_carries_the_anchor(layered: Layered, anchors: list[Tensor], differences: list[Tensor]) -> Layered:
    """A stream cannot be projected cut by cut, but it need not bring a_l M^h for every head: their sum is enough.

    With u such that D_l u = 0 and a_l u = 1, every row of A^h x has the value 1 at u; so M^h - u (a_l M^h), and
    u sum_h a_l M^h added to one head, change no state. That head's value may need one more dimension.
    """
    values, outputs = [], []
    for layer, (value, output) in enumerate(zip(layered.values, layered.outputs)):
        anchor, spread = anchors[layer], differences[layer]
        beyond = anchor - (anchor @ spread.mT) @ spread
        # Roundings are amplified by |a| / |beyond|; where that is more than 1000 the dimension is not worth the digits.
        if not float(beyond.norm()) > 1e-3 * float(anchor.norm()):
            values.append(value)
            outputs.append(output)
            continue
        probe = beyond.mT / beyond.square().sum()  # u, (r, 1)
        brought = [anchor @ v @ o for v, o in zip(value, output)]
        carrier = min(range(len(value)), key=lambda head: value[head].shape[1])
        total = torch.stack(brought).sum(0)
        rest = [total - part if head == carrier else -part for head, part in enumerate(brought)]
        values.append(tuple(torch.cat([v, probe], dim=1) for v in value))
        outputs.append(tuple(torch.cat([o, row]) for o, row in zip(output, rest)))
    return Layered(layered.embed, layered.readers, tuple(values), tuple(outputs), layered.unembed)


def project(layered: Layered, down: list[Tensor], up: list[Tensor]) -> Layered:
    """Replace the state x of cut l by x down[l], read as x down[l] up[l]: down[l] (r_l, k_l), up[l] (k_l, r_l)."""
    layers = range(len(layered.readers))
    return Layered(
        layered.embed @ down[0],
        tuple(up[layer] @ layered.readers[layer] for layer in layers),
        tuple(tuple(up[layer] @ value for value in layered.values[layer]) for layer in layers),
        tuple(tuple(output @ down[layer + 1] for output in layered.outputs[layer]) for layer in layers),
        up[-1] @ layered.unembed,
    )


def _level(parts: list[Tensor]) -> Tensor:
    """Rows of comparable length, so that a long anchor does not hide short differences."""
    return torch.cat([part / part.norm() if part.norm() > 0 else part for part in parts])


def _basis(rows: Tensor) -> Tensor:
    """Orthonormal rows that span the same space, as far as rounding lets one tell."""
    _, values, right = torch.linalg.svd(rows, full_matrices=False)
    limit = ROUNDING * EPS * max(rows.shape) * values[0] if len(values) else 0.0
    kept: Tensor = right[: int((values > limit).sum())]
    return kept


def _limit(futures: Futures, cut: int, spectrum: tuple[float, ...], tolerance: float | None) -> float:
    if tolerance is None:
        return futures.tolerance(cut)
    return tolerance * (spectrum[0] if spectrum else 0.0)


def _factor(futures: Futures, cut: int, rows: Tensor, tolerance: float | None) -> tuple[Tensor, Tensor, Cut]:
    """rows = factor @ fewer rows, factor with orthonormal columns; what is dropped is below the tolerance."""
    left, values, _ = torch.linalg.svd(futures.seen(cut, rows), full_matrices=False)
    spectrum = tuple(values.tolist())
    limit = _limit(futures, cut, spectrum, tolerance)
    rank = int((values > limit).sum())
    factor = left[:, :rank]
    return factor, factor.mT @ rows, Cut(spectrum, rank, rank, limit, rank)


def _extend(
    futures: Futures, layer: int, rows: Tensor, parts: list[Tensor], tolerance: float | None
) -> tuple[Tensor, Tensor, Cut]:
    """One residual layer: value maps (heads, s, s + new), the rows of the wider stream, and the cut.

    The stream's own coordinates go on unchanged, so the next state has them first; new ones are added only for what
    the heads bring that the old ones do not show.
    """
    kept = futures.skip(layer, rows)
    shown = futures.seen(layer + 1, kept)
    brought = torch.cat([futures.seen(layer + 1, part) for part in parts])  # (H s, ..)
    left, values, right = torch.linalg.svd(shown, full_matrices=False)
    known = int((values > _limit(futures, layer + 1, tuple(values.tolist()), tolerance)).sum())
    left, values, right = left[:, :known], values[:known], right[:known]
    beyond = brought - (brought @ right.mT) @ right
    fresh, strengths, _ = torch.linalg.svd(beyond, full_matrices=False)
    spectrum = tuple(strengths.tolist())
    largest = (float(torch.linalg.matrix_norm(brought, 2)),) if brought.numel() else ()
    limit = _limit(futures, layer + 1, largest, tolerance)
    new = int((strengths > limit).sum())
    fresh = fresh[:, :new]
    # M [shown; fresh^T brought] = brought: the new coordinates first, what is left lies in what the old ones show.
    rest = brought - fresh @ (fresh.mT @ brought)
    old = ((rest @ right.mT) / values) @ left.mT
    movers = torch.cat([old, fresh], dim=1).reshape(len(parts), len(rows), shown.shape[0] + new)
    extended = torch.cat([kept, fresh.mT @ torch.cat(parts)])
    return movers, extended, Cut(spectrum, known + new, len(extended), limit, new)


def _split(shown: Tensor, mover: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """mover (r, r') = value (r, d_v) @ output (d_v, r'), d_v the rank of what the head's part shows."""
    left, values, _ = torch.linalg.svd(shown, full_matrices=False)
    value = left[:, : int((values > limit).sum())]
    return value, value.mT @ mover


def one_width(layered: Layered) -> Layered:
    """Fill a stream that grows from cut to cut with zeros, up to its last width."""
    width = layered.unembed.shape[0]

    def rows(matrix: Tensor) -> Tensor:
        return torch.cat([matrix, matrix.new_zeros(width - matrix.shape[0], matrix.shape[1])])

    def columns(matrix: Tensor) -> Tensor:
        return rows(matrix.mT).mT

    return Layered(
        columns(layered.embed),
        tuple(rows(reader) for reader in layered.readers),
        tuple(tuple(rows(value) for value in layer) for layer in layered.values),
        tuple(tuple(columns(output) for output in layer) for layer in layered.outputs),
        layered.unembed,
    )
