"""From the error of every read-out to the error of attention and output, for all inputs at once.

Let a machine show read-outs W_p + D_p where the target has W_p. Rows of P_p = A^{l,h_l} .. A^{1,h_1} X are averages of
rows of X, so for inputs whose rows have 1-norm at most r (one-hot tokens: r = 1)
    |row of P_p W|_2 <= r w_p,   w_p = the largest 2-norm of a row of W_p (d_p alike for D_p).
Let a_{l,h} bound the 1-norm of the change of any row of A^{l,h}; along p the products of attention matrices differ by
at most b_p = sum_l a_{l,p_l} (skips add nothing). Then queries differ by at most  dq = r sum_p (d_p + b_p w_p), keys
alike; scores by at most  e = |q| dk + dq |k| + dq dk  (rotary turns change no norm); and a row of softmax, moved by
scores within e, by at most  2 tanh(e / 2)  in 1-norm. Layer by layer this gives all a_{l,h}, and for the output
    r sum_leaves (d_p + b_p w_p).
No length, no mask and no particular input enters. docs/theory/embedding.md, section 6.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fixedformer.embedding.tree import PathTree


@dataclass(frozen=True)
class Consequence:
    """attention: bound on |change| of any attention entry, any layer and head. output: on the 2-norm of a token's."""

    attention: float
    output: float


def propagate(
    tree: PathTree, wanted: Tensor, error: Tensor, radius: float = 1.0, score_error: float = 0.0
) -> Consequence:
    """What read-out errors do in exact arithmetic, for every input whose rows have 1-norm at most `radius`.

    wanted, error: (d_in, N), float64: W_all and entrywise bounds on |E R_all - W_all|. score_error: an error of each
    score relative to |q| |k|, from evaluating it.
    """
    heads = tree.heads
    drift = torch.zeros(1, dtype=torch.float64, device=wanted.device)  # b_p, (B^t,)
    worst = 0.0
    for layer in range(tree.layers):
        size, change = (_norms(x, tree.columns(layer), 2 * heads) * radius for x in (wanted, error))  # (B^t, 2H)
        moved = (change + drift[:, None] * size).sum(0).reshape(2, heads)
        query, key = size.sum(0).reshape(2, heads)
        scores = query * moved[1] + moved[0] * key + moved[0] * moved[1] + score_error * query * key
        rows = 2 * torch.tanh(scores / 2)  # a_{l,h}
        # One entry changes by at most half of the row's 1-norm: what one gains, others lose.
        worst = max(worst, float(rows.max()) / 2)
        branches = torch.cat([rows.new_zeros(1), rows]) if tree.residual else rows
        drift = (drift[:, None] + branches).flatten()
    size, change = (_norms(x, tree.columns(tree.layers), 1)[:, 0] * radius for x in (wanted, error))
    return Consequence(worst, float((change + drift * size).sum()))


def _norms(x: Tensor, columns: Tensor, parts: int) -> Tensor:
    """Largest row 2-norm of every node's blocks: x (d_in, N), columns (nodes, own) -> (nodes, parts)."""
    blocks: Tensor = x[:, columns.flatten().to(x.device)].reshape(x.shape[0], columns.shape[0], parts, -1)
    largest: Tensor = blocks.norm(dim=-1).amax(0)
    return largest
