"""Where every read-out of a program lies: the tree of head prefixes.

A node is a path p = (b_1, .., b_t) of branches: the head that each layer chose, or, in a residual stack, branch 0 for
"skipped this layer". Inner nodes (t < layers) hold the next layer's queries and keys seen along p; leaves (t = layers)
hold the whole value path. See docs/theory/embedding.md, sections 2 and 3.

Columns lie depth first: a node's own, then its children's subtrees in order. So every subtree is one slice, and the
columns come in the order of the backward recursion
    C_L = unembed,   C_{l-1} = [ queries of layer l | keys of layer l | (C_l if residual) | M^{l,h} C_l, every head h ].
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fixedformer.target import TargetSpec


@dataclass(frozen=True)
class PathTree:
    """The tree for one spec. `columns(t)` says where depth t lies; `count` is N, the number of columns of R_all."""

    heads: int
    layers: int
    d_head: int
    d_out: int
    residual: bool

    @classmethod
    def of(cls, spec: TargetSpec) -> "PathTree":
        return cls(spec.heads, spec.layers, spec.d_head, spec.d_out, spec.residual)

    @property
    def branching(self) -> int:
        """Children of an inner node: one a head, and in a residual stack one more, first, for the skip."""
        return self.heads + self.residual

    @property
    def node_width(self) -> int:
        """Columns that an inner node holds itself: d_head for the query and for the key of every head."""
        return 2 * self.heads * self.d_head

    @cached_property
    def subtree_widths(self) -> tuple[int, ...]:
        """s_t, the columns of a subtree whose root lies at depth t = 0..layers: s_L = d_out, s_t = 2Hd + B s_{t+1}."""
        widths = [self.d_out]
        for _ in range(self.layers):
            widths.append(self.node_width + self.branching * widths[-1])
        return tuple(reversed(widths))

    @property
    def count(self) -> int:
        """N = 2Hd (1 + B + .. + B^{L-1}) + B^L d_out with B = `branching`: columns of R_all, minimal width."""
        return self.subtree_widths[0]

    def starts(self, depth: int) -> Tensor:
        """First column of each subtree at `depth`, int64 (B^depth,), the first branch most significant."""
        starts = torch.zeros(1, dtype=torch.int64)
        for t in range(depth):
            child = self.node_width + self.subtree_widths[t + 1] * torch.arange(self.branching)
            starts = (starts[:, None] + child).flatten()
        return starts

    def columns(self, depth: int) -> Tensor:
        """Columns that the nodes at `depth` hold themselves: int64 (B^depth, 2Hd), or (B^layers, d_out) for leaves.

        Within an inner node: all queries (heads, d_head), then all keys (heads, d_head).
        """
        own = self.d_out if depth == self.layers else self.node_width
        return self.starts(depth)[:, None] + torch.arange(own)
