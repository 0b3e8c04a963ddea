"""The universal simulator's network, block by block (docs/theory/prompt.md, Theorem 2).

On the grid of X, token (i, j) computes entry (i, j) of every intermediate matrix. Channels: "s" is the token's own
number; A.B stands for "matrix A, entry (own row or column, B)"; the suffix @h is the head of the target.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fixedformer.prompt.builder import NetworkBuilder, combine
from fixedformer.prompt.layout import POSITIONS, fetch, matching
from fixedformer.prompt.network import Block, Head, Network
from fixedformer.prompt.sizes import GUARD, SizeClass

VALID = "valid"  # 1 where the grid holds a score that the target's mask allows
GRID = "grid"  # 1 on the tokens of X


def position_channels(size: SizeClass) -> tuple[tuple[str, ...], Tensor]:
    """Names and values (tokens, 9) of the channels that depend on sizes only."""
    layout = size.layout()
    number, row, col = layout.coordinates().unbind(-1)
    valid = (number == 0) & (col < size.n)
    if size.mask == "causal":
        valid &= col <= row
    flags = torch.stack([valid, number == 0], dim=-1).to(size.dtype)
    return (*POSITIONS, VALID, GRID), torch.cat([layout.positions(size.dtype), flags], dim=1)


def build_network(size: SizeClass) -> Network:
    """The fixed network of a size class."""
    builder = NetworkBuilder((*POSITIONS, VALID, GRID), ("s",))
    _project(builder, size)
    if size.backend == "soft":
        _soft_attention(builder, size)
    else:
        _scores(builder, size)
        _softmax(builder, size)
        _mix(builder, size)
    network = builder.build(size.dtype)
    return sharpen(network, size.sharpness) if size.backend == "stock" else network


def sharpen(network: Network, sharpness: float) -> Network:
    """The same network for ordinary softmax: every query times `sharpness`.

    Average-hard attention is the limit; a key whose score is 1 less than the best then weighs exp(-sharpness).
    """
    blocks = tuple(
        Block(
            tuple(Head(head.query * sharpness, head.key, head.value, head.output) for head in block.heads),
            block.map,
            "softmax",
            block.mask,
        )
        for block in network.blocks
    )
    return Network(network.constants, network.inputs, network.scratch, blocks)


def _project(builder: NetworkBuilder, size: SizeClass) -> None:
    """Block 1: token (i, j) fetches X_ik and the weights' (k, j) for all k; the map multiplies and adds.

    Leaves XA@h (or XQ@h and XK@h) and XV@h at (i, j), and the allowed scores "lt" where the prompt holds a mask.
    """
    ids = size.section_ids()
    kinds = ("A", "V") if size.d_k is None else ("Q", "K", "V")
    builder.block()
    for k in range(size.d):
        fetch(builder, (0, "row", k), "s", f"X.{k}")
    for head in range(size.heads):
        for kind in kinds:
            for k in range(size.d):
                fetch(builder, (ids[f"{kind}{head}"], k, "col"), "s", f"{kind}{head}.{k}")
    if size.mask == "given":
        fetch(builder, (ids["mask"], "row", "col"), "s", "mask")
        builder.unit("allowed", "mask", VALID)
    for head in range(size.heads):
        for kind in kinds:
            for k in range(size.d):
                builder.unit(f"X{kind}@{head}", f"X.{k}", f"{kind}{head}.{k}")


def _allowed(size: SizeClass) -> str:
    return "allowed" if size.mask == "given" else VALID


def _scores(builder: NetworkBuilder, size: SizeClass) -> None:
    """Block 2: S_ij = sum_k (XA)_ik X_jk, or sum_k (XQ)_ik (XK)_jk. Asking for row "col" folds the transpose in."""
    builder.block()
    width = size.d if size.d_k is None else size.d_k
    left, right = ("XA", None) if size.d_k is None else ("XQ", "XK")
    if right is None:
        for k in range(width):
            fetch(builder, (0, "col", k), "s", f"X^T.{k}")
    for head in range(size.heads):
        for k in range(width):
            fetch(builder, (0, "row", k), f"{left}@{head}", f"{left}@{head}.{k}")
            if right is not None:
                fetch(builder, (0, "col", k), f"{right}@{head}", f"{right}@{head}.{k}")
    for head in range(size.heads):
        for k in range(width):
            builder.unit(f"S@{head}", f"{left}@{head}.{k}", f"X^T.{k}" if right is None else f"{right}@{head}.{k}")


def _softmax(builder: NetworkBuilder, size: SizeClass) -> None:
    """Blocks 3 to 5 for all heads of the target at once."""
    names = [f"@{head}" for head in range(size.heads)]
    softmax_rows(builder, names, _allowed(size), size.columns, GUARD[size.dtype] if size.guard else None)


def softmax_rows(
    builder: NetworkBuilder, heads: Sequence[str], allowed: str, columns: int, guard: float | None
) -> None:
    """Row softmax of the scores S+head into P+head, for every suffix in `heads`; exact 0 where `allowed` is 0.

    Three blocks: subtract the row's maximum, exponentiate, divide by the row's sum; without `guard` the first is left
    out. The rows are those of section 0, with `columns` tokens each. Channel GRID tells section 0.
    """
    row_query, row_key = matching({"id": 0, "row": "row"})
    if guard is not None:
        builder.block()
        for head in heads:
            # S + guard * (0 for an allowed key of the right row, <= -1 for another), up to a constant of the query
            query = [{"one": 1.0}, {"one": guard}, *[combine((guard, form)) for form in row_query]]
            builder.head(query, [f"S{head}", allowed, *row_key], f"S{head}", f"max{head}")
        for head in heads:
            # multiplied by `allowed` before exp: 0 * exp(overflow) would be NaN
            builder.unit(f"R{head}", {f"S{head}": 1.0, f"max{head}": -1.0}, allowed)
    builder.block()
    for head in heads:
        builder.unit(f"E{head}", f"S{head}" if guard is None else f"R{head}", allowed, "exp")
        builder.unit(f"E{head}", {"one": 1.0, GRID: -1.0})  # off the grid 1: a mean of 0 would spread as 0 * inf
    builder.block()
    for head in heads:
        builder.head(row_query, row_key, f"E{head}", f"mean{head}")  # all `columns` tokens of the row tie
    for head in heads:
        builder.unit(f"P{head}", {f"mean{head}": float(columns)}, f"E{head}", "reciprocal")


def _mix(builder: NetworkBuilder, size: SizeClass) -> None:
    """Block 6: O_ij = sum_k P_ik (XV)_kj; block 7, with an output matrix: Y_ij = sum_h sum_k O@h_ik W_O^h_kj."""
    builder.block()
    for head in range(size.heads):
        for k in range(size.n):
            fetch(builder, (0, "row", k), f"P@{head}", f"P@{head}.{k}")
            fetch(builder, (0, k, "col"), f"XV@{head}", f"XV@{head}.{k}")
    for head in range(size.heads):
        for k in range(size.n):
            builder.unit(f"O@{head}", f"P@{head}.{k}", f"XV@{head}.{k}")
    if size.d_out is None:
        return
    ids = size.section_ids()
    builder.block()
    for head in range(size.heads):
        for k in range(size.d_v):
            fetch(builder, (0, "row", k), f"O@{head}", f"O@{head}.{k}")
            fetch(builder, (ids[f"O{head}"], k, "col"), "s", f"W{head}.{k}")
    for head in range(size.heads):
        for k in range(size.d_v):
            builder.unit("Y", f"O@{head}.{k}", f"W{head}.{k}")


def _soft_attention(builder: NetworkBuilder, size: SizeClass) -> None:
    """Blocks 2 and 3 of backend "soft": gather whole rows, then let one softmax head per target head do the rest.

    Row i's output O@h lies on each of its tokens, one channel a column.
    """
    width = size.d if size.d_k is None else size.d_k
    left = "XA" if size.d_k is None else "XQ"
    builder.block()
    if size.d_k is None:
        for k in range(width):
            fetch(builder, (0, "row", k), "s", f"Xrow.{k}")
    for head in range(size.heads):
        for k in range(width):
            fetch(builder, (0, "row", k), f"{left}@{head}", f"{left}@{head}.{k}")
            if size.d_k is not None:
                fetch(builder, (0, "row", k), f"XK@{head}", f"XK@{head}.{k}")
        for j in range(size.d_v):
            fetch(builder, (0, "row", j), f"XV@{head}", f"XV@{head}.{j}")
    builder.block("softmax", mask=_first_column_mask(size))
    for head in range(size.heads):
        key = "Xrow" if size.d_k is None else f"XK@{head}"
        builder.head(
            [f"{left}@{head}.{k}" for k in range(width)],
            [f"{key}.{k}" for k in range(width)],
            [f"XV@{head}.{j}" for j in range(size.d_v)],
            [f"O@{head}.{j}" for j in range(size.d_v)],
        )
    if size.d_out is None:
        return
    ids = size.section_ids()
    builder.block()
    for head in range(size.heads):
        for k in range(size.d_v):
            fetch(builder, (ids[f"O{head}"], k, "col"), "s", f"W{head}.{k}")
    for head in range(size.heads):
        for k in range(size.d_v):
            builder.unit("Y", f"O@{head}.{k}", f"W{head}.{k}")


def _first_column_mask(size: SizeClass) -> Tensor:
    """Keys of backend "soft": one token a row of X, its first; with a causal mask, no later row."""
    number, row, col = size.layout().coordinates().unbind(-1)
    keys = (number == 0) & (col == 0)
    mask = keys.expand(size.tokens, size.tokens)
    if size.mask == "causal":
        mask = mask & (row[None, :] <= row[:, None])
    return mask.contiguous()
