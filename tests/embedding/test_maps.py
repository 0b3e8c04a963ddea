"""The sparse machine's 0/1 matrices: what the paper says of them, entry by entry."""

from itertools import product

import pytest
import torch

import fixedformer as ff
from fixedformer.embedding.maps import apply_accurately, apply_plainly, dense
from fixedformer.embedding.readouts import TargetStack, readouts
from fixedformer.embedding.solve import all_columns, condition_number

SPECS = {
    "plain": (ff.TargetSpec(heads=3, layers=2, d_in=2, d_head=2, d_out=5), False),
    "looped": (ff.TargetSpec(heads=2, layers=3, d_in=2, d_head=1, d_out=3), True),
    "one head, looped": (ff.TargetSpec(heads=1, layers=4, d_in=9, d_head=2), True),
    "residual": (ff.TargetSpec(heads=2, layers=2, d_in=2, d_head=2, d_out=3, residual=True), False),
}


@pytest.fixture(params=SPECS, ids=str)
def machine(request):
    spec, looped = SPECS[request.param]
    return ff.SparseMachine(spec, looped=looped)


def test_entries_are_zero_or_one_and_rows_of_value_hold_at_most_one(machine):
    spec = machine.spec
    for layer, head in product(range(spec.layers), range(spec.heads)):
        value = machine.dense_value(layer, head, torch.float64)
        assert set(value.unique().tolist()) <= {0.0, 1.0}
        assert value.sum(1).max() <= 1
        query = machine.dense_query(layer, head, torch.float64)
        assert set(query.unique().tolist()) <= {0.0, 1.0}
        assert query.sum(0).min() >= 1, "every query channel reads something"
    assert machine.dense_unembed(torch.float64).sum(0).min() >= 1


def test_plain_value_masks_split_what_survives():
    """Each surviving coordinate belongs to exactly one head: a layer costs one attention product, not `heads`."""
    machine = ff.SparseMachine(SPECS["plain"][0])
    assert machine.width == 12 + 3 * 12 + 9 * 5
    masks = torch.stack([machine.dense_value(0, h, torch.float64) for h in range(3)])
    assert all(torch.equal(mask, torch.diag(torch.diagonal(mask))) for mask in masks)
    assert torch.diagonal(masks.sum(0)).tolist() == [0] * 12 + [1] * (machine.width - 12)


def test_all_columns_of_a_sparse_machine_are_the_identity(machine):
    """So the compiled embedding *is* W_all, and E R_all = E holds for every E, compiled or not."""
    identity = torch.eye(machine.width, dtype=torch.float64)
    assert torch.equal(all_columns(machine, machine.tree), identity)
    E = torch.randn(3, machine.width, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert torch.equal(readouts(machine, E, machine.tree, apply_plainly)[0], E)


def test_apply_is_the_dense_product(machine, generator):
    x = torch.randn(4, machine.width, dtype=torch.float64, generator=generator)
    for chain in (machine.reader(0), machine.mover(0, 0), machine.exit()):
        assert torch.allclose(apply_plainly(chain, (x,))[0], x @ dense(chain), rtol=0, atol=1e-13)
        hi, lo = apply_accurately(chain, (x, torch.zeros_like(x)))
        assert torch.allclose(hi + lo, x @ dense(chain), rtol=0, atol=1e-13)


@pytest.mark.parametrize(("residual", "looped"), [(False, False), (True, False), (False, True)])
def test_backward_columns_give_the_forward_readouts(residual, looped, generator):
    """E R_all by the backward recursion (one matrix) equals the forward walk, for ordinary matrices."""
    spec = ff.TargetSpec(heads=2, layers=3, d_in=3, d_head=2, d_out=4, residual=residual)
    machine = ff.RandomMachine(spec, looped=looped)
    E = torch.randn(3, machine.width, dtype=torch.float64, generator=generator)
    want = E @ all_columns(machine, machine.tree)
    assert torch.allclose(readouts(machine, E, machine.tree, apply_plainly)[0], want, rtol=0, atol=1e-12)
    hi, lo = readouts(machine, E, machine.tree)
    assert torch.allclose(hi + lo, want, rtol=0, atol=1e-12)


def test_target_readouts_are_path_products():
    """W_all against the products written out, for one path."""
    spec = ff.TargetSpec(heads=2, layers=2, d_in=3, d_head=2, d_out=4)
    target = ff.Target.random(spec, seed=4, d_model=6, d_value=5)
    w = target.weights
    machine = ff.SparseMachine(spec)
    shown = readouts(TargetStack(target), w.embed, machine.tree)[0]
    path = w.embed @ w.value[0, 1] @ w.output[0, 1]
    node = machine.tree.columns(1)[1]  # the node that chose head 2 (index 1) in layer 1
    assert torch.allclose(shown[:, node[2:4]], path @ w.query[1, 1], rtol=0, atol=1e-14)
    assert torch.allclose(shown[:, node[4:6]], path @ w.key[1, 0], rtol=0, atol=1e-14)
    leaf = machine.tree.columns(2)[2]  # head 2, then head 1
    assert torch.allclose(shown[:, leaf], path @ w.value[1, 0] @ w.output[1, 0] @ w.unembed, rtol=0, atol=1e-14)


def test_condition_number_estimate(generator):
    for size in (1, 5, 60, 300):
        triangle = torch.randn(size, size, dtype=torch.float64, generator=generator).triu()
        triangle += 3 * torch.eye(size)
        true = float(torch.linalg.cond(triangle))
        assert 0.9 * true <= condition_number(triangle) <= 1.0001 * true
    assert condition_number(torch.ones(3, 3, dtype=torch.float64).triu() - torch.eye(3)) == float("inf")
