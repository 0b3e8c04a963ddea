"""Truncating a residual stream: one set of coordinates for all layers, chosen where each first appears.

The sweep of theorem 2 with weights. The stream's coordinates go on unchanged; what the heads of a layer bring is
projected onto what they show, plus the most important directions beyond. Importance is the singular value of
(reach or data) x (brought, beyond the known), so the D largest of all layers are kept: a first sweep that drops nothing
lists them, a second one keeps those. Each choice is the best for its layer; for all together no bound is proven.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fixedformer.attention import resolve_mask
from fixedformer.embedding.hankel import EPS, ROUNDING, StateFutures, compress, times
from fixedformer.embedding.realise import Layered, one_width
from fixedformer.embedding.states import Data, attention_of, state_factor
from fixedformer.embedding.tree import PathTree
from fixedformer.inputs import embed_rows
from fixedformer.target import TargetSpec

# Directions that are shown more weakly than this, relative, do not carry what a head brings: it would cost ten digits.
KNOWN = 1e-10


def truncate_stream(layered: Layered, spec: TargetSpec, width: int, data: Data | None) -> tuple[Layered, list[float]]:
    """The network on a stream of at most `width` dimensions, and the 2-norm of what is dropped at every cut."""
    every = _Sweep(layered, spec, data).run(None)[1]
    ranked = sorted(((value, cut) for cut, values in enumerate(every) for value in values.tolist()), reverse=True)
    counts = [sum(at == cut for _, at in ranked[:width]) for cut in range(spec.layers + 1)]
    small, spectra = _Sweep(layered, spec, data).run(counts)
    return small, [float(values[count:].norm()) for values, count in zip(spectra, counts)]


@dataclass(eq=False)
class _Sweep:
    """One pass over the layers. `reach` is T (k, s) of the stream so far (plain), `seen` its states on the data."""

    layered: Layered
    spec: TargetSpec
    data: Data | None
    reach: Tensor = field(init=False)
    seen: list[Tensor] = field(init=False)

    def run(self, counts: list[int] | None) -> tuple[Layered, list[Tensor]]:
        """With at most counts[cut] new coordinates at each cut (None: all that rounding lets one see)."""
        layered, spec, tree = self.layered, self.spec, PathTree.of(self.spec)
        futures = StateFutures(layered, layered.embed, tree, scaled=False)
        start = futures.reach[0] if self.data is None else state_factor(layered, spec, self.data, 0)
        rows, spectrum = _directions(start, layered.embed.new_zeros(0, start.shape[1]), futures.observe[0], counts, 0)
        spectra = [spectrum]
        embed = layered.embed @ futures.observe[0] @ torch.linalg.pinv(rows @ futures.observe[0])
        self._start(embed, start, rows, futures)
        readers, movers = [], []
        for layer in range(spec.layers):
            readers.append(times(rows, layered.reader(layer)))
            brought = torch.cat([times(rows, layered.mover(layer, head)) for head in range(spec.heads)])
            observe = futures.observe[layer + 1]
            weights = self._weights(readers[-1], layer)
            fresh, spectrum = _directions(weights @ brought, rows, observe, counts, layer + 1)
            rows = torch.cat([rows, fresh])
            mover = (brought @ observe) @ torch.linalg.pinv(rows @ observe, rtol=KNOWN)
            movers.append(mover.reshape(spec.heads, -1, len(rows)))
            self._advance(readers[-1], movers[-1])
            spectra.append(spectrum)
        outputs = tuple(tuple(torch.eye(move.shape[2]).to(move) for _ in move) for move in movers)
        values = tuple(tuple(move) for move in movers)
        found = Layered(embed, tuple(readers), values, outputs, times(rows, layered.exit()))
        return one_width(found), spectra

    def _start(self, embed: Tensor, start: Tensor, rows: Tensor, futures: StateFutures) -> None:
        """Coordinates of the first state: of all inputs (plain), or of every token of the data."""
        self.reach = start @ futures.observe[0] @ torch.linalg.pinv(rows @ futures.observe[0])
        self.seen = [] if self.data is None else [embed_rows(X, embed) for X, _ in self.data.chunks()]

    def _weights(self, reader: Tensor, layer: int) -> Tensor:
        """(k, H s): how much each combination of what the heads bring counts."""
        if self.data is None:
            every: Tensor = torch.block_diag(*[self.reach] * self.spec.heads)
            return every
        last, count = layer == self.spec.layers - 1, 0
        factor = reader.new_zeros(0, self.spec.heads * reader.shape[0])
        for (X, place), state in zip(self.data.chunks(), self.seen):
            allowed = resolve_mask(self.data.mask, X.shape[1], X.device)
            moved = attention_of(state, reader, self.spec, allowed) @ state.unsqueeze(-3)  # (.., heads, tokens, s)
            features = moved.movedim(-3, -2).flatten(-2)
            used = features[place] if place is not None and last else features.flatten(0, -2)
            factor, count = compress(torch.cat([factor, used])), count + len(used)
        mean: Tensor = factor / count**0.5
        return mean

    def _advance(self, reader: Tensor, movers: Tensor) -> None:
        new = movers.shape[2] - movers.shape[1]
        if self.data is None:
            kept = torch.nn.functional.pad(self.reach, (0, new))
            self.reach = compress(torch.cat([kept, *(self.reach @ move for move in movers)]))
            return
        for at, (X, _) in enumerate(self.data.chunks()):
            state = self.seen[at]
            allowed = resolve_mask(self.data.mask, X.shape[1], X.device)
            moved = attention_of(state, reader, self.spec, allowed) @ (state.unsqueeze(-3) @ movers)
            self.seen[at] = torch.nn.functional.pad(state, (0, new)) + moved.sum(-3)


def _directions(
    weighted: Tensor, known: Tensor, observe: Tensor, counts: list[int] | None, cut: int
) -> tuple[Tensor, Tensor]:
    """States whose futures add most to those of `known`, for rows `weighted` (k, state); and all singular values."""
    shown = weighted @ observe
    _, values, right = torch.linalg.svd(known @ observe, full_matrices=False)
    right = right[values > KNOWN * values[0]] if len(values) else right
    left, values, _ = torch.linalg.svd(shown - (shown @ right.mT) @ right, full_matrices=False)
    spectrum = values[values > ROUNDING * EPS * float(weighted.norm() * observe.norm())]
    count = len(spectrum) if counts is None else min(counts[cut], len(spectrum))
    return left[:, :count].mT @ weighted / spectrum[:count, None], spectrum
