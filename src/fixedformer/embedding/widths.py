"""How wide a machine must be, before anything is built."""

from dataclasses import dataclass
from typing import overload

from fixedformer.embedding.blocks.layout import BlockWidths, block_widths
from fixedformer.embedding.blocks.spec import BlockSpec
from fixedformer.embedding.tree import PathTree
from fixedformer.target import TargetSpec


@dataclass(frozen=True)
class Widths:
    """What `widths` answers.

    minimal: width of the narrowest machine here (N); sparse, random and looped alike. paper: the paper's m-bar, wider
    for one head; None for residual attention, where the paper gives an order only. embedding_bytes: E at the minimal
    width in float64. paths: leaves of the path tree.
    """

    minimal: int
    paper: int | None
    embedding_bytes: int
    paths: int


@overload
def widths(spec: TargetSpec) -> Widths: ...


@overload
def widths(spec: BlockSpec) -> BlockWidths: ...


def widths(spec: TargetSpec | BlockSpec) -> Widths | BlockWidths:
    """Widths for a spec (after theorem 3.1: m-bar = 2H (H^L - 1) / (H - 1) d + H^L d_in, or (L + 1) max(2d, d_in)).

    For a `BlockSpec` see `BlockWidths`: look before you build, they grow like (2 (H + 1) r)^L.
    """
    if isinstance(spec, BlockSpec):
        return block_widths(spec)
    tree = PathTree.of(spec)
    if spec.residual:
        paper = None
    elif spec.heads == 1:
        paper = (spec.layers + 1) * max(2 * spec.d_head, spec.d_in)
    else:
        inner = (spec.heads**spec.layers - 1) // (spec.heads - 1)
        paper = 2 * spec.heads * inner * spec.d_head + spec.heads**spec.layers * spec.d_in
    return Widths(tree.count, paper, 8 * spec.d_in * tree.count, tree.branching**spec.layers)
