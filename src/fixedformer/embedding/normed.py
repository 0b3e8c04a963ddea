"""LayerNorm over the m coordinates, in path space: exact, without the m coordinates.

The state is P G, P (tokens x K) and G (K x m) with K = d_in (H + 1)^l. Centring acts on G alone, G_c = G - (row means),
and a token's variance is a quadratic form of its row of P: P_i Gram P_i^T with Gram = G_c G_c^T / m. So with
D = diag((P_i Gram P_i^T + eps)^(-1/2)), LayerNorm(P G) = (D P) G_c. G and Gram are computed once a batch.

pre:  layers read z = (D P) G_c;  P <- [P, A^h D P],  G <- [G; G_c R_V^h]
post: P <- [P, A^h P],  G <- [G; G R_V^h],  then P <- D P,  G <- G_c
"""

import torch
from torch import Tensor

from fixedformer.attention import Mask, mix, resolve_mask, rotate
from fixedformer.embedding.engines import counts_suffice, first_layer_by_counts
from fixedformer.embedding.machine import Machine
from fixedformer.embedding.maps import apply_plainly
from fixedformer.embedding.rule import EPSILON, Rule
from fixedformer.inputs import one_hot_rows
from fixedformer.target import TargetSpec


class RowForm(torch.autograd.Function):
    """(P, Gram) -> the quadratic form of every row of P. Keeps P Gram for the backward pass: two products, not four."""

    @staticmethod
    def forward(ctx, paths: Tensor, gram: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        image = paths @ gram
        ctx.save_for_backward(paths, image)
        return (image * paths).sum(-1, keepdim=True)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
        paths, image = ctx.saved_tensors
        weighted = (grad * paths).flatten(0, -2)
        return 2 * grad * image, weighted.mT @ paths.flatten(0, -2)


def normalise(paths: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """LayerNorm of the state P G as a pair (D P, G_c); statistics in full precision also under autocast."""
    with torch.autocast(paths.device.type, enabled=False):
        centred = basis.float() if basis.dtype != torch.float64 else basis
        centred = centred - centred.mean(-1, keepdim=True)
        gram = centred @ centred.mT / centred.shape[-1]
        wide = paths.to(centred.dtype)
        variance: Tensor = RowForm.apply(wide, gram)  # type: ignore[no-untyped-call]
        return wide * torch.rsqrt(variance + EPSILON), centred


def run_normed_paths(
    machine: Machine, rule: Rule, embedding: Tensor, unembedding: Tensor, X: Tensor, mask: Mask
) -> Tensor:
    """Outputs (..., tokens, d_out) of a machine whose layers follow `rule` (residual, LayerNorm); X from `as_input`."""
    spec = machine.spec
    paths, basis = one_hot_rows(X, spec.d_in, embedding.dtype), embedding
    allowed = resolve_mask(mask, paths.shape[-2], paths.device)
    for layer in range(spec.layers):
        seen, shown = normalise(paths, basis) if rule.norm == "pre" else (paths, basis)
        reader = apply_plainly(machine.reader(layer), (shown,))[0]  # (K, 2Hd)
        if layer == 0 and counts_suffice(spec, X, mask):
            heads = _first_layer(reader, shown, paths, mask, spec, rule)
        else:
            both = (seen @ reader).unflatten(-1, (2, spec.heads, spec.d_head))
            query, key = both.movedim((-3, -2), (0, -3))
            if spec.positions == "rotary":
                query, key = rotate(query, spec.rotary_base), rotate(key, spec.rotary_base)
            heads = mix(query, key, seen, mask, allowed).movedim(-3, -2).flatten(-2)
        paths, basis = grown(machine, rule, layer, torch.cat([paths, heads], dim=-1), basis, shown)
    return read_out(rule, paths, basis, unembedding)


def grown(
    machine: Machine, rule: Rule, layer: int, paths: Tensor, basis: Tensor, shown: Tensor
) -> tuple[Tensor, Tensor]:
    """(P, G) after a layer: `paths` has the heads' columns already, G takes the rows that belong to them."""
    movers = [apply_plainly(machine.mover(layer, head), (shown,))[0] for head in range(machine.spec.heads)]
    basis = torch.cat([basis, *movers])
    return normalise(paths, basis) if rule.norm == "post" else (paths, basis)


def read_out(rule: Rule, paths: Tensor, basis: Tensor, unembedding: Tensor) -> Tensor:
    """P G U, normalised before U where the rule says so."""
    if rule.final_norm:
        paths, basis = normalise(paths, basis)
    return paths @ (basis @ unembedding)


def _first_layer(reader: Tensor, shown: Tensor, paths: Tensor, mask: Mask, spec: TargetSpec, rule: Rule) -> Tensor:
    """A^h D X of every head by counting: each token of the vocabulary has one scale D."""
    if rule.norm != "pre":
        return first_layer_by_counts(reader, paths, mask, spec.heads)
    scale = torch.rsqrt(shown.square().mean(-1) + EPSILON)  # (d_in,): `shown` is the centred embedding
    heads = first_layer_by_counts(reader * scale[:, None], paths, mask, spec.heads)
    return heads * scale.repeat(spec.heads)
