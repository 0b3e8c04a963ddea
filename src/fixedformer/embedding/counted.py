"""Path space over distinct contexts: both layers of a two-layer machine, at the wanted places alone (contexts.py).

The same functions as `run_paths` and `run_normed_paths`, with attention by counting in every layer.
"""

import torch
from torch import Tensor

from fixedformer.embedding.contexts import Sight
from fixedformer.embedding.engines import PathWeights
from fixedformer.embedding.machine import Machine
from fixedformer.embedding.maps import apply_plainly
from fixedformer.embedding.normed import grown, normalise, read_out
from fixedformer.embedding.rule import Rule
from fixedformer.target import TargetSpec


def run_counted_paths(spec: TargetSpec, weights: PathWeights, sights: tuple[Sight, Sight]) -> Tensor:
    """Outputs (places, d_out) from the read-outs alone, with residual or without."""
    first, last = sights
    residual = weights.leaves.shape[1] > spec.heads
    query, key = weights.inner[0].unflatten(-1, (2, spec.heads, spec.d_head)).unbind(1)  # (d_in, heads, d)
    paths = first.weights(query, key).movedim(0, 1).flatten(1)  # (contexts, heads d_in): A^h of one-hot rows
    if residual:
        paths = torch.cat([torch.nn.functional.one_hot(first.own, spec.d_in).to(paths.dtype), paths], dim=-1)
    query, key = (paths @ weights.inner[1]).unflatten(-1, (2, spec.heads, spec.d_head)).unbind(1)
    values = torch.einsum("up,pbo->buo", paths, weights.leaves)  # (branches, contexts, d_out)
    moved = (last.weights(query, key) @ values[-spec.heads :]).sum(0)
    return moved + values[0].index_select(0, last.own) if residual else moved


def run_counted_normed_paths(
    machine: Machine, rule: Rule, embedding: Tensor, unembedding: Tensor, sights: tuple[Sight, Sight]
) -> Tensor:
    """Outputs (places, d_out) of a machine whose layers follow `rule` (residual, LayerNorm)."""
    spec = machine.spec
    paths, basis = torch.eye(spec.d_in, dtype=embedding.dtype, device=embedding.device), embedding
    for layer, sight in enumerate(sights):
        seen, shown = normalise(paths, basis) if rule.norm == "pre" else (paths, basis)
        reader = apply_plainly(machine.reader(layer), (shown,))[0]  # (K, 2Hd)
        query, key = (seen @ reader).unflatten(-1, (2, spec.heads, spec.d_head)).unbind(1)
        heads = (sight.weights(query, key) @ seen).movedim(0, 1).flatten(1)
        paths = torch.cat([paths.index_select(0, sight.own), heads], dim=-1)
        paths, basis = grown(machine, rule, layer, paths, basis, shown)
    return read_out(rule, paths, basis, unembedding)
