"""Fewer dimensions than a program needs: the best of a given width, plainly or weighted by data.

At a cut with reach T and futures Z (hankel.StateFutures) take T Z = U S V^T. Keeping the first D singular values is the
projector  x -> x (Z V_D S_D^-1)(U_D^T T)  of balanced truncation; T decides what counts:
  plain  T^T T = sum over all paths and inputs: the read-outs' own Frobenius norm. Cut after cut from the left the
         losses are orthogonal, so they add up like squares, and each is at most the tail of the Hankel matrix.
  data   T^T T = sum over the data's tokens of x^T x, the states that really occur: least squares on what is seen there.
Proofs: docs/theory/decompile.md, section 5.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from fixedformer.attention import Mask, attention_weights, resolve_mask, rotate
from fixedformer.embedding.hankel import StateFutures, compress, times
from fixedformer.embedding.realise import Layered, project
from fixedformer.embedding.tree import PathTree
from fixedformer.errors import SpecError
from fixedformer.inputs import as_input, embed_rows
from fixedformer.target import TargetSpec

TOKENS = 1 << 16  # tokens whose states are held at once


@dataclass(frozen=True, eq=False)
class Data:
    """Inputs that count. batches: checked inputs, each with the places (..., tokens) whose outputs matter, or None."""

    batches: tuple[tuple[Tensor, Tensor | None], ...]
    mask: Mask

    @classmethod
    def of(
        cls, spec: TargetSpec, data: object, where: object, mask: Mask, device: torch.device | str = "cpu"
    ) -> "Data":
        """data: token ids (..., tokens), vectors (..., tokens, d_in), or a list of such; where: bool alike, or None.

        Raises SpecError for data that do not fit, and for places that do not have the data's shape or hold no True.
        """
        listed = list(data) if isinstance(data, list | tuple) and len(data) and not _flat(data) else [data]
        places = list(where) if isinstance(where, list | tuple) else [where] * len(listed)
        if len(places) != len(listed):
            raise SpecError(f"where lists {len(places)} arrays, data {len(listed)}; give one for each")
        batches = []
        for X, place in zip(listed, places):
            X = as_input(X, spec.d_in, torch.float64, device)
            shape = X.shape[:-1] if X.is_floating_point() else X.shape
            if place is not None:
                place = torch.as_tensor(place, device=device)
                if place.dtype != torch.bool or place.shape != shape:
                    raise SpecError(f"where must be bool of shape {tuple(shape)}, like the data's tokens, got "
                                    f"{place.dtype} of shape {tuple(place.shape)}")  # fmt: skip
                place = place.reshape(-1, shape[-1])
            batches.append((X.reshape(-1, *X.shape[len(shape) - 1 :]), place))
        if all(place is not None and not place.any() for _, place in batches):
            raise SpecError("where holds no True: no output counts, so nothing can be measured")
        if isinstance(mask, Tensor) and mask.ndim != 2:
            raise SpecError(f"with data a mask is None, 'causal' or bool (tokens, tokens), got {tuple(mask.shape)}")
        return cls(tuple(batches), mask)

    @property
    def sequences(self) -> int:
        return sum(len(X) for X, _ in self.batches)

    def chunks(self, tokens: int = TOKENS) -> Iterable[tuple[Tensor, Tensor | None]]:
        """The batches cut to at most so many tokens (at least one sequence)."""
        for X, place in self.batches:
            count = max(1, tokens // X.shape[1])
            for first in range(0, len(X), count):
                part = slice(first, first + count)
                yield X[part], None if place is None else place[part]


@dataclass(frozen=True)
class Truncation:
    """What truncating did.

    width: D. weighting: "plain" or "data". lost: at every cut, the 2-norm of the singular values dropped there: of the
    read-outs (plain), or per token of the data and of the read-outs that one sees there (data: root mean square).
    bound: on the Frobenius norm of all read-outs' change, sqrt(sum of the Hankel matrices' squared tails), for plain
    weights without residual connections; None where no bound is proven. error: that norm, measured. size: the norm of
    the read-outs themselves.
    """

    width: int
    weighting: str
    lost: tuple[float, ...]
    bound: float | None
    error: float
    size: float


def truncate(layered: Layered, spec: TargetSpec, width: int, data: Data | None = None) -> tuple[Layered, Truncation]:
    """The same network on states of at most `width` dimensions; see the module's text."""
    tree = PathTree.of(spec)
    whole = StateFutures(layered, layered.embed, tree, scaled=False)
    tails = [float(whole.spectrum(cut)[width:].norm()) for cut in range(tree.layers + 1)]
    cutting = _truncate_stream if spec.residual else _truncate_cuts
    small, lost = cutting(layered, spec, width, data)
    proven = data is None and not spec.residual
    return small, Truncation(
        width,
        "plain" if data is None else "data",
        tuple(lost),
        sum(tail * tail for tail in tails) ** 0.5 if proven else None,
        difference(layered, small, tree),
        float((whole.reach[0] @ whole.observe[0]).norm()),
    )


def _truncate_cuts(layered: Layered, spec: TargetSpec, width: int, data: Data | None) -> tuple[Layered, list[float]]:
    """Cut after cut from the left, each time with the reach of the network as truncated so far."""
    tree, lost = PathTree.of(spec), []
    for cut in range(tree.layers + 1):
        if layered.widths[cut] <= width:
            lost.append(0.0)
            continue
        futures = StateFutures(layered, layered.embed, tree, scaled=False)
        reach = futures.reach[cut] if data is None else state_factor(layered, spec, data, cut)
        down, up, tail = balance(reach, futures.observe[cut], width)
        lost.append(tail)
        same = [torch.eye(r, dtype=torch.float64, device=layered.embed.device) for r in layered.widths]
        layered = project(layered, [*same[:cut], down, *same[cut + 1 :]], [*same[:cut], up, *same[cut + 1 :]])
    return layered, lost


def _truncate_stream(layered: Layered, spec: TargetSpec, width: int, data: Data | None) -> tuple[Layered, list[float]]:
    """One subspace for all cuts: a residual stream cannot change its basis between layers.

    Balanced truncation with the Gramians of all cuts added up. No bound is proven for it.
    """
    tree = PathTree.of(spec)
    futures = StateFutures(layered, layered.embed, tree, scaled=False)
    cuts = range(tree.layers + 1)
    reach = futures.reach if data is None else [state_factor(layered, spec, data, cut) for cut in cuts]
    down, up, tail = balance(compress(torch.cat(list(reach))), torch.cat(futures.observe, dim=1), width)
    return project(layered, [down] * len(cuts), [up] * len(cuts)), [tail]


def balance(reach: Tensor, observe: Tensor, width: int) -> tuple[Tensor, Tensor, float]:
    """down (r, D), up (D, r) with up @ down = I, best for reach @ x @ observe, and the 2-norm of what is lost."""
    left, values, right = torch.linalg.svd(reach @ observe, full_matrices=False)
    # Directions at rounding level would be divided by noise: they are lost whether kept or not.
    kept = min(width, int((values > values[0] * reach.shape[1] * torch.finfo(torch.float64).eps).sum()))
    down = observe @ right[:kept].mT / values[:kept]
    return down, left[:, :kept].mT @ reach, float(values[kept:].norm())


def state_factor(layered: Layered, spec: TargetSpec, data: Data, cut: int) -> Tensor:
    """T (k, r) with T^T T the mean of x^T x over the data's tokens, x the states of a cut.

    At the last cut only the places that count are looked at.
    """
    factor = layered.embed.new_zeros(0, layered.widths[cut])
    count = 0
    for X, place in data.chunks():
        state = states(layered, spec, X, data.mask, cut)
        rows = state[place] if place is not None and cut == spec.layers else state.flatten(0, -2)
        factor = compress(torch.cat([factor, rows]))
        count += len(rows)
    mean: Tensor = factor / count**0.5
    return mean


def states(layered: Layered, spec: TargetSpec, X: Tensor, mask: Mask, cut: int) -> Tensor:
    """The state (..., tokens, r_cut) behind the first `cut` layers, X from `as_input` in float64."""
    state = embed_rows(X, layered.embed)
    allowed = resolve_mask(mask, state.shape[-2], state.device)
    for layer in range(cut):
        both = (state @ layered.readers[layer]).unflatten(-1, (2, spec.heads, spec.d_head))
        query, key = both.movedim((-3, -2), (0, -3))  # (..., heads, tokens, d_head)
        if spec.positions == "rotary":
            query, key = rotate(query, spec.rotary_base), rotate(key, spec.rotary_base)
        attention = attention_weights(query, key, allowed)
        moved = [attention[..., h, :, :] @ times(state, layered.mover(layer, h)) for h in range(spec.heads)]
        update = torch.stack(moved).sum(0)
        state = state + update if spec.residual else update
    return state


class Difference:
    """Two networks side by side as one stack: what it shows is the read-outs of the first minus those of the second."""

    def __init__(self, first: Layered, second: Layered) -> None:
        self.first, self.second = first, second
        self.start = torch.cat([first.embed, second.embed], dim=1)

    def reader(self, layer: int) -> tuple[Tensor, ...]:
        return (torch.cat([self.first.readers[layer], -self.second.readers[layer]]),)

    def mover(self, layer: int, head: int) -> tuple[Tensor, ...]:
        one, two = self.first, self.second
        return (
            torch.block_diag(one.values[layer][head], two.values[layer][head]),
            torch.block_diag(one.outputs[layer][head], two.outputs[layer][head]),
        )

    def exit(self) -> tuple[Tensor, ...]:
        return (torch.cat([self.first.unembed, -self.second.unembed]),)


def difference(first: Layered, second: Layered, tree: PathTree) -> float:
    """Frobenius norm of the difference of all read-outs, without forming them: polynomial in the widths."""
    both = Difference(first, second)
    futures = StateFutures(both, both.start, tree, scaled=False)
    return float((futures.reach[0] @ futures.observe[0]).norm())


def _flat(data: object) -> bool:
    """A plain list of numbers is one sequence, not a list of arrays."""
    return all(isinstance(item, int | float) for item in data)  # type: ignore[attr-defined]
