"""What a network still shows after a cut: Hankel matrices of a program, explicit or in factors.

Cut l lies between layer l and layer l + 1. Its Hankel matrix has a row for every path p of length l and every input v,
and the columns of p's subtree: all queries, keys and outputs that the network shows from there on. Rank = the width
that layer l needs, whatever computes these read-outs (docs/theory/decompile.md, theorem 1).

Two ways to hold rows of such a matrix:
  ReadoutFutures  as they are: a row is a vector of read-outs, one slice a branch. Size d_in N for the whole program.
  StateFutures    as states of a network that shows them: row = x Z_l with Z_l Z_l^T the observability Gramian, built
                  from the last layer back. Size and cost polynomial in the state's width, whatever the depth.
"""

from typing import Protocol

import torch
from torch import Tensor

from fixedformer.embedding.maps import Chain, IndexMap, apply_plainly
from fixedformer.embedding.readouts import Stack
from fixedformer.embedding.tree import PathTree

EPS = torch.finfo(torch.float64).eps
# A singular value is known to within the rounding of what was multiplied out to get it: a sum of n products carries
# at most n u, typically sqrt(n) u, relative to the factors' norms; Frobenius norms and this factor leave room for it.
ROUNDING = 8.0


class Futures(Protocol):
    """Rows of Hankel matrices, in whatever form. `layer` and `head` count from 0; cuts 0..layers."""

    tree: PathTree
    start: Tensor  # the rows of cut 0, one an input

    def read(self, layer: int, rows: Tensor) -> Tensor:
        """Queries, then keys, of the next layer that each row shows: (rows, 2Hd)."""
        ...

    def step(self, layer: int, head: int, rows: Tensor) -> Tensor:
        """The rows of the next cut that lie behind `head`."""
        ...

    def skip(self, layer: int, rows: Tensor) -> Tensor:
        """The rows of the next cut that lie behind the residual connection."""
        ...

    def exit(self, rows: Tensor) -> Tensor:
        """The outputs shown by rows of the last cut: (rows, d_out)."""
        ...

    def seen(self, cut: int, rows: Tensor) -> Tensor:
        """The rows in coordinates whose inner products are those of the (scaled) Hankel rows."""
        ...

    def tolerance(self, cut: int) -> float:
        """Singular values of Hankel rows up to here cannot be told from 0."""
        ...


class ReadoutFutures:
    """Rows as read-outs. readouts: E R_all (d_in, N), float64; noise (k, N): read-outs of `probe`.

    Every kind of column (a query or key channel of a layer and head, an output) is scaled to unit length over all
    paths when rows are compared: ranks do not change, and a layer of small weights is not lost beside a large one.
    """

    def __init__(self, readouts: Tensor, noise: Tensor, tree: PathTree) -> None:
        self.tree, self.start = tree, readouts
        self._scale = torch.ones(tree.count, dtype=torch.float64, device=readouts.device)
        self._noise: list[float] = [0.0] * (tree.layers + 1)
        total = 0.0
        for depth in reversed(range(tree.layers + 1)):
            columns = tree.columns(depth).to(readouts.device)  # (nodes, own)
            lengths, unsure = (rows[:, columns].square().sum((0, 1)).sqrt() for rows in (readouts, noise))
            scale = column_scales(lengths, ROUNDING * (tree.layers + 1) * unsure, tree, depth)
            self._scale[columns] = scale.expand_as(columns)
            total += float((noise[:, columns] * scale).square().sum())
            self._noise[depth] = total**0.5

    def read(self, layer: int, rows: Tensor) -> Tensor:
        del layer  # every inner node holds its own columns first
        return rows[:, : self.tree.node_width]

    def step(self, layer: int, head: int, rows: Tensor) -> Tensor:
        return self._branch(layer, head + self.tree.residual, rows)

    def skip(self, layer: int, rows: Tensor) -> Tensor:
        return self._branch(layer, 0, rows)

    def exit(self, rows: Tensor) -> Tensor:
        return rows

    def seen(self, cut: int, rows: Tensor) -> Tensor:
        first = int(self.tree.starts(cut)[0])
        return rows * self._scale[first : first + rows.shape[1]]  # all subtrees of one depth are scaled alike

    def tolerance(self, cut: int) -> float:
        # The scaled matrix has Frobenius norm sqrt(kinds); every layer's products round like E itself.
        kinds = self.tree.node_width * (self.tree.layers - cut) + self.tree.d_out
        return float(ROUNDING * ((self.tree.layers + 1) * self._noise[cut] + EPS * kinds**0.5))

    def _branch(self, layer: int, branch: int, rows: Tensor) -> Tensor:
        below = self.tree.subtree_widths[layer + 1]
        first = self.tree.node_width + branch * below
        return rows[:, first : first + below]


class StateFutures:
    """Rows as states of a stack. start: (d_in, state); scaled: columns scaled as in ReadoutFutures, or as they are;
    noise (k, state): the `probe` of a start that was rounded, None for one that counts as exact.

    reach[l] (k, state of cut l): a factor of the reachability Gramian sum_p (E M^p)^T (E M^p), the paths of length l.
    observe[l] (state, k): a factor Z_l of the observability Gramian. The Hankel matrix of cut l has the singular values
    of reach[l] @ observe[l]. The stack's state may have another width at every cut.
    """

    def __init__(
        self, stack: Stack, start: Tensor, tree: PathTree, scaled: bool = True, noise: Tensor | None = None
    ) -> None:
        self.tree, self.stack, self.start = tree, stack, start.to(torch.float64)
        self.reach = reach_factors(stack, self.start, tree)
        self._noise = None if noise is None else reach_factors(stack, noise, tree)
        columns = self._own(stack.exit(), tree.layers, scaled)
        self.observe = [compress(columns.mT).mT]
        for layer in reversed(range(tree.layers)):
            later = self.observe[0]
            parts = [self._own(stack.reader(layer), layer, scaled)] + ([later] if tree.residual else [])
            parts += [precede(stack.mover(layer, head), later) for head in range(tree.heads)]
            self.observe.insert(0, compress(torch.cat(parts, dim=1).mT).mT)

    def read(self, layer: int, rows: Tensor) -> Tensor:
        return times(rows, self.stack.reader(layer))

    def step(self, layer: int, head: int, rows: Tensor) -> Tensor:
        return times(rows, self.stack.mover(layer, head))

    def skip(self, layer: int, rows: Tensor) -> Tensor:
        del layer  # the stream goes on as it is
        return rows

    def exit(self, rows: Tensor) -> Tensor:
        return times(rows, self.stack.exit())

    def seen(self, cut: int, rows: Tensor) -> Tensor:
        return rows @ self.observe[cut]

    def tolerance(self, cut: int) -> float:
        size = float(self.reach[cut].norm() * self.observe[cut].norm())
        noise = 0.0 if self._noise is None else float((self._noise[cut] @ self.observe[cut]).norm())
        return ROUNDING * (EPS * (self.tree.layers + 1) * size + noise)

    def spectrum(self, cut: int) -> Tensor:
        """Singular values of the Hankel matrix of a cut, largest first."""
        values: Tensor = torch.linalg.svdvals(self.reach[cut] @ self.observe[cut])
        return values

    def _own(self, chain: Chain, cut: int, scaled: bool) -> Tensor:
        matrix = precede(chain, None)
        if not scaled:
            return matrix
        reach = self.reach[cut]
        unsure = ROUNDING * EPS * (self.tree.layers + 1) * reach.norm() * matrix.norm(dim=0)
        return matrix * column_scales((reach @ matrix).norm(dim=0), unsure, self.tree, cut)


def show(stack: Stack, start: Tensor, tree: PathTree) -> Tensor:
    """All read-outs (rows, N) from `start` (rows, state), in plain float64.

    The last layer goes the other way round, value map times unembedding first: d_out columns a head instead of B^{L-1}
    rows, which is half of all the work on a machine of ordinary matrices.
    """
    whole = start.new_empty(start.shape[0], tree.count)
    state = start.unsqueeze(0)  # (B^t, rows, state)
    for layer in range(tree.layers):
        _place(whole, tree, layer, times(state, stack.reader(layer)))
        if layer < tree.layers - 1:
            branches = [state] if tree.residual else []
            branches += [times(state, stack.mover(layer, head)) for head in range(tree.heads)]
            state = torch.stack(branches, dim=1).flatten(0, 1)
    last, out = tree.layers - 1, precede(stack.exit(), None)
    ends = [out] if tree.residual else []
    ends += [precede(stack.mover(last, head), out) for head in range(tree.heads)]
    _place(whole, tree, tree.layers, torch.stack([state @ end for end in ends], dim=1).flatten(0, 1))
    return whole


def _place(whole: Tensor, tree: PathTree, depth: int, values: Tensor) -> None:
    """values (nodes, rows, own) into the columns of their depth."""
    whole[:, tree.columns(depth).flatten().to(whole.device)] = values.transpose(0, 1).flatten(1)


def probe(embedding: Tensor, rows: int = 8) -> Tensor:
    """Rows (rows, m) that stand for rounding every entry of E once: float64, the same for the same E.

    Entry j is u |column j of E| with a random sign, so that |probe R|_F^2 has the expected value of |dE R|_F^2 for
    independent roundings dE of relative size u.
    """
    unit = torch.finfo(embedding.dtype).eps / 2
    lengths = embedding.to(torch.float64).norm(dim=0)
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(2, (rows, len(lengths)), generator=generator).to(lengths) * 2 - 1
    scaled: Tensor = signs * lengths * unit / rows**0.5
    return scaled


def reach_factors(stack: Stack, start: Tensor, tree: PathTree) -> list[Tensor]:
    """For every cut T with T^T T = sum over paths of (E M^p)^T (E M^p), never more rows than the state is wide."""
    reach = [compress(start)]
    for layer in range(tree.layers):
        rows = [reach[-1]] if tree.residual else []
        rows += [times(reach[-1], stack.mover(layer, head)) for head in range(tree.heads)]
        reach.append(compress(torch.cat(rows)))
    return reach


def times(rows: Tensor, chain: Chain) -> Tensor:
    """rows @ chain in float64."""
    (out,) = apply_plainly(chain, (rows,))
    return out


def precede(chain: Chain, columns: Tensor | None) -> Tensor:
    """chain @ columns in float64 (the chain itself for None)."""
    for factor in reversed(chain):
        if isinstance(factor, IndexMap):
            if columns is None:
                columns = factor.dense(torch.float64)
                continue
            out = columns.new_zeros(factor.rows, columns.shape[1])
            out[factor.source] = columns[factor.target]
            columns = out
        else:
            factor = factor.to(torch.float64)
            columns = factor if columns is None else factor @ columns
    assert columns is not None  # a chain has at least one factor
    return columns


def compress(rows: Tensor) -> Tensor:
    """As few rows with the same Gram matrix: the triangular factor, where there are more rows than columns."""
    if rows.shape[0] <= rows.shape[1]:
        return rows
    triangle: Tensor = torch.linalg.qr(rows, mode="r").R
    return triangle


def column_scales(lengths: Tensor, unsure: Tensor, tree: PathTree, depth: int) -> Tensor:
    """What brings each kind of column of a depth to unit length; 0 for those that hold rounding noise alone.

    lengths, unsure (own,): 2-norm of each over all paths and inputs, and how much of it may be rounding. Noise scaled
    up to unit length would be taken for rank. Noise is what is not longer than `unsure`, and what is as short beside
    the others of its layer as rounding is, unless its partner makes up for it: a query of a head with large keys.
    """
    if depth < tree.layers:
        blocks = lengths.reshape(2, tree.heads, tree.d_head)
        sizes = blocks.norm(dim=-1)  # (2, heads)
        weight = (blocks * sizes.flip(0).unsqueeze(-1)).flatten() / (sizes[0] * sizes[1]).max()
        top = blocks.amax((1, 2), keepdim=True).expand_as(blocks).flatten()
    else:
        top, weight = lengths.max().expand_as(lengths), torch.zeros_like(lengths)
    least = ROUNDING * EPS
    noise = (lengths <= unsure) | ((lengths <= least * top) & ~(weight > least))
    return torch.where(noise | (lengths == 0), torch.zeros_like(lengths), 1 / lengths)
