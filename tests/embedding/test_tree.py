"""The tree's arithmetic against plain recursion, and the widths that the paper and the design state."""

from itertools import product

import pytest
import torch

import fixedformer as ff
from fixedformer.embedding.tree import PathTree


def plain_layout(heads, layers, d_head, d_out, residual):
    """Path -> first own column, by recursion."""
    where, at = {}, 0

    def visit(path):
        nonlocal at
        where[path] = at
        at += d_out if len(path) == layers else 2 * heads * d_head
        if len(path) < layers:
            for branch in range(heads + residual):
                visit((*path, branch))

    visit(())
    return where, at


@pytest.mark.parametrize(("heads", "layers", "d_head", "d_out", "residual"), [
    (1, 1, 1, 1, False), (1, 4, 2, 9, False), (2, 3, 2, 5, False), (3, 2, 1, 4, True), (1, 3, 2, 3, True),
])  # fmt: skip
def test_columns_are_preorder(heads, layers, d_head, d_out, residual):
    tree = PathTree(heads, layers, d_head, d_out, residual)
    where, count = plain_layout(heads, layers, d_head, d_out, residual)
    assert tree.count == count
    for depth in range(layers + 1):
        paths = list(product(range(heads + residual), repeat=depth))
        assert tree.starts(depth).tolist() == [where[path] for path in paths]
    everything = torch.cat([tree.columns(depth).flatten() for depth in range(layers + 1)])
    assert sorted(everything.tolist()) == list(range(count)), "every column belongs to exactly one node"


@pytest.mark.parametrize(
    ("shape", "residual", "width"),
    [
        ((4, 2, 4, 24), False, 1024),
        ((2, 2, 30, 28), False, 456),
        ((2, 3, 30, 28), False, 1024),
        ((2, 4, 30, 30), False, 2280),
        ((1, 4, 9, 2), False, 25),
        ((2, 3, 30, 28), True, 2266),
        ((2, 4, 30, 30), True, 7230),
    ],
)
def test_stated_widths(shape, residual, width):
    heads, layers, d_in, d_head = shape
    spec = ff.TargetSpec(heads=heads, layers=layers, d_in=d_in, d_head=d_head, residual=residual)
    assert ff.widths(spec).minimal == width
    assert ff.SparseMachine(spec).width == width
    if not residual:
        assert ff.SparseMachine(spec, looped=True).width == width
        paper = ff.widths(spec).paper
        assert paper == width if heads > 1 else paper > width
    if width < 2000:  # drawing m x m matrices
        assert ff.RandomMachine(spec).width == width
