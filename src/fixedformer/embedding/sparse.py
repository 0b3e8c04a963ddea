"""The sparse universal transformer: every weight 0 or 1, stored as the list of its ones.

Its coordinates are the columns of the path tree, one for one, so the compiled embedding *is* W_all: node p of E holds
M^p W_Q and M^p W_K of the next layer, leaf p holds M^p W_U. The fixed weights only route. Three routings:

plain     R_V^{l,h} masks: it keeps the subtrees that chose head h in layer l; R_Q^{l,h} sums the h-th query block over
          all nodes of depth l-1 (all but one have been masked away), U sums the leaves. The paper's theorem 3.1.
looped    one set of weights for all layers, same width: R_V^h moves node (h, q) to node q and leaf (h, q) to leaf
          (q, 1); queries and keys are read at the root, outputs at leaf (1, .., 1). The paper's own looped construction
          pads differently; this one needs no more than the plain width.
residual  masks fail (the skip path is an unmasked identity). Instead R_V^{l,h} *copies* the subtree of head h onto the
          subtree of the skip, where layer l + 1 reads; every R_V then adds what its head contributes to the very
          coordinates that hold the skip path's read-outs. docs/theory/embedding.md, section 3.
"""

from copy import copy

import torch
from torch import Tensor

from fixedformer.capacity import require_memory
from fixedformer.embedding.accurate import Pair
from fixedformer.embedding.machine import Machine
from fixedformer.embedding.maps import Chain, IndexMap, apply_plainly
from fixedformer.embedding.program import Program
from fixedformer.embedding.readouts import OtherExit, readouts, relative_residual
from fixedformer.embedding.solve import Solution
from fixedformer.errors import CapacityError
from fixedformer.target import TargetSpec


class SparseMachine(Machine):
    """A fixed transformer with {0,1} weights that becomes any target of `spec` through its embedding.

    looped: one set of weights, used in every layer. width: None for the smallest (N coordinates); more are allowed and
    stay unused. Raises CapacityError for a width below N, or index lists that do not fit in memory; SpecError for
    looped with residual (prefix "skip" would ask E R_Q = W_Q of layer 2 where layer 1 asks for its own).
    """

    kind = "sparse"

    def __init__(self, spec: TargetSpec, looped: bool = False, width: int | None = None) -> None:
        super().__init__(spec, looped, width)
        if self.width < self.tree.count:
            raise CapacityError(
                f"a sparse machine for heads={spec.heads}, layers={spec.layers}, d_in={spec.d_in}, "
                f"d_head={spec.d_head} needs width {self.tree.count}, got {width}; pass width=None for the smallest"
            )
        sets = 1 if looped else spec.layers
        require_memory(
            32 * self.tree.count * sets, f"the index lists of {self!r}", "use fewer heads or layers, or looped=True"
        )
        build = self._looped if looped else self._residual if spec.residual else self._plain
        self._readers: list[IndexMap] = []
        self._movers: list[list[IndexMap]] = []
        self._exit: IndexMap
        build()

    def reader(self, layer: int) -> Chain:
        return (self._readers[0 if self.looped else layer],)

    def mover(self, layer: int, head: int) -> Chain:
        return (self._movers[0 if self.looped else layer][head],)

    def exit(self) -> Chain:
        return (self._exit,)

    def tensors(self) -> dict[str, Tensor]:
        """The index lists: sources and targets of the ones of every fixed matrix."""
        named = {f"reader.{layer}": reader for layer, reader in enumerate(self._readers)}
        named |= {f"mover.{i}.{h}": mover for i, movers in enumerate(self._movers) for h, mover in enumerate(movers)}
        named["exit"] = self._exit
        sides = {f"{name}.source": index.source for name, index in named.items()}
        return sides | {f"{name}.target": index.target for name, index in named.items()}

    def describe(self) -> dict[str, object]:
        return {"kind": self.kind, "looped": self.looped, "width": self.width}

    def program_dtype(self, wanted: torch.dtype) -> torch.dtype:
        """The target's own: zeros and ones are exact in any."""
        return wanted

    def readout_scale(self, program: Program) -> Tensor:
        """|E| R_all: a selection of |E|, because R_all is one."""
        if program.unembedding is not None:
            magnitude = OtherExit(self, program.unembedding.to(torch.float64).abs())
            return readouts(magnitude, program.embedding.to(torch.float64).abs(), self.tree, apply_plainly)[0]
        return program.embedding[:, : self.tree.count].to(torch.float64).abs()

    def readouts(self, program: Program) -> Tensor:
        """E R_all is the embedding's first N columns as they stand: no product is needed (tested against the maps)."""
        if program.unembedding is not None:
            return super().readouts(program)
        return program.embedding[:, : self.tree.count]

    def to(self, device: torch.device | str) -> "SparseMachine":
        moved = copy(self)
        moved._readers = [index.to(device) for index in self._readers]
        moved._movers = [[index.to(device) for index in movers] for movers in self._movers]
        moved._exit = self._exit.to(device)
        return moved

    def _solve(self, wanted: Pair, dtype: torch.dtype) -> Solution:
        embedding = wanted.hi.new_zeros(self.spec.d_in, self.width, dtype=dtype)
        embedding[:, : self.tree.count] = wanted.hi
        shown = Pair.of(embedding[:, : self.tree.count])
        # R_all is the first N columns of the identity: condition number 1, and rounding E once is the only error.
        return Solution(embedding, 1.0, relative_residual(wanted.minus(shown), shown.hi.abs()))

    def _map(self, source: Tensor, target: Tensor, columns: int | None = None) -> IndexMap:
        return IndexMap(source.flatten(), target.flatten(), self.width, self.width if columns is None else columns)

    def _read(self, nodes: Tensor) -> IndexMap:
        """Sum the columns (nodes, own) of several nodes of one depth into one block of width `own`."""
        own = nodes.shape[1]
        return self._map(nodes, torch.arange(own).expand_as(nodes), own)

    def _plain(self) -> None:
        tree = self.tree
        for layer in range(tree.layers):
            self._readers.append(self._read(tree.columns(layer)))
            below = tree.subtree_widths[layer + 1]
            roots = tree.starts(layer + 1).reshape(-1, tree.heads)  # (H^layer, H)
            kept = [(roots[:, head, None] + torch.arange(below)).flatten() for head in range(tree.heads)]
            self._movers.append([self._map(keep, keep) for keep in kept])
        self._exit = self._read(tree.columns(tree.layers))

    def _residual(self) -> None:
        tree = self.tree
        for layer in range(tree.layers):
            self._readers.append(self._read(tree.columns(layer)[:1]))  # the node that skipped every layer so far
            below = torch.arange(tree.subtree_widths[layer + 1])
            roots = tree.starts(layer + 1)[: tree.branching]  # its children: the skip, then one a head
            self._movers.append([self._map(roots[1 + head] + below, roots[0] + below) for head in range(tree.heads)])
        self._exit = self._read(tree.columns(tree.layers)[:1])

    def _looped(self) -> None:
        tree = self.tree
        self._readers.append(self._read(tree.columns(0)))
        leaves = tree.columns(tree.layers).reshape(tree.heads, -1, tree.d_out)  # (h, q)
        movers = []
        for head in range(tree.heads):
            # Leaf (head, q) goes to leaf (q, first head): q's index times H, since the last branch counts least.
            source, target = [leaves[head].flatten()], [leaves.flatten(0, 1)[:: tree.heads].flatten()]
            for depth in range(1, tree.layers):
                nodes = tree.columns(depth).reshape(tree.heads, -1, tree.node_width)
                source.append(nodes[head].flatten())
                target.append(tree.columns(depth - 1).flatten())
            movers.append(self._map(torch.cat(source), torch.cat(target)))
        self._movers.append(movers)
        self._exit = self._read(tree.columns(tree.layers)[:1])
