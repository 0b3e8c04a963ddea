"""Fewer dimensions than a program needs: the best of a given width, plainly or weighted by data.

At a cut with reach T and futures Z (hankel.StateFutures) take T Z = U S V^T. Keeping the first D singular values is the
projector  x -> x (Z V_D S_D^-1)(U_D^T T)  of balanced truncation; T decides what counts:
  plain  T^T T = sum over all paths and inputs: the read-outs' own Frobenius norm. Cut after cut from the left the
         losses are orthogonal, so they add up like squares, and each is at most the tail of the Hankel matrix.
  data   T^T T = sum over the data's tokens of x^T x, the states that really occur: least squares on what is seen there.
Proofs: docs/theory/decompile.md, section 5.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fixedformer.embedding.hankel import StateFutures
from fixedformer.embedding.realise import Layered, project
from fixedformer.embedding.states import Data, state_factor
from fixedformer.embedding.stream import truncate_stream
from fixedformer.embedding.tree import PathTree
from fixedformer.target import TargetSpec


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
    cutting = truncate_stream if spec.residual else _truncate_cuts
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


def balance(reach: Tensor, observe: Tensor, width: int) -> tuple[Tensor, Tensor, float]:
    """down (r, D), up (D, r) with up @ down = I, best for reach @ x @ observe, and the 2-norm of what is lost."""
    left, values, right = torch.linalg.svd(reach @ observe, full_matrices=False)
    # Directions at rounding level would be divided by noise: they are lost whether kept or not.
    kept = min(width, int((values > values[0] * reach.shape[1] * torch.finfo(torch.float64).eps).sum()))
    down = observe @ right[:kept].mT / values[:kept]
    return down, left[:, :kept].mT @ reach, float(values[kept:].norm())


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
