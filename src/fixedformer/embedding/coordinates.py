"""Training where path space ends: frozen random MLPs over the machine's m coordinates.

The state is m wide again, but a sparse machine's coordinates each belong to one head a layer: a layer is one attention
product of width at most m, never one a head, and no m x m product. (A machine of ordinary matrices needs its m x m
products; the cheaper order is values first.)
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear, scaled_dot_product_attention

from fixedformer.attention import Mask, resolve_mask, rotate
from fixedformer.embedding.machine import Machine
from fixedformer.embedding.maps import IndexMap, apply_plainly
from fixedformer.embedding.parameters import ProgramParameters
from fixedformer.embedding.rule import EPSILON, Rule
from fixedformer.inputs import as_input, embed_rows


class CoordinateProgram(ProgramParameters):
    """E (and U) of a fixed machine whose layers follow `rule`, evaluated over the m coordinates.

    Same parameters and meaning as TrainableProgram, which is far faster where it applies; this one also evaluates
    rules with an MLP: x + W_2 gelu(W_1 x + b_1) + b_2 after each attention (without residual the sum's first term is
    left out), frozen, drawn as PyTorch draws nn.Linear from rule.mlp_seed.
    """

    def __init__(
        self,
        machine: Machine,
        rule: Rule,
        train_unembedding: bool = False,
        deviation: float = 0.02,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(machine, train_unembedding, deviation, seed, dtype)
        self.rule, layers = rule, range(machine.spec.layers)
        self.mlps = [self._frozen_mlp(layer, dtype) for layer in layers] if rule.mlp_width else []
        self.routes = [_route(machine, layer) for layer in layers]

    def forward(self, X: Tensor, mask: Mask = "causal") -> Tensor:
        """Outputs (..., tokens, d_out) for token ids or vectors."""
        rule, machine = self.rule, self.machine
        state = embed_rows(as_input(X, machine.spec.d_in, self.embedding.dtype, self.embedding.device), self.embedding)
        for layer in range(machine.spec.layers):
            seen = _normed(state) if rule.norm == "pre" else state
            update = self._attention(seen, layer, mask)
            state = state + update if rule.residual else update
            if self.mlps:
                into, bias, out, shift = (tensor.to(state.device) for tensor in self.mlps[layer])
                seen = _normed(state) if rule.norm == "pre" else state
                update = linear(gelu(linear(seen, into, bias)), out, shift)
                state = state + update if rule.residual else update
            state = _normed(state) if rule.norm == "post" else state
        return (_normed(state) if rule.final_norm else state) @ self.exit()

    def _attention(self, seen: Tensor, layer: int, mask: Mask) -> Tensor:
        """sum_h A^h (X R_V^h), X = seen (..., tokens, m)."""
        spec = self.machine.spec
        both = apply_plainly(self.machine.reader(layer), (seen,))[0].unflatten(-1, (2, spec.heads, spec.d_head))
        query, key = both.movedim((-3, -2), (0, -3))
        if spec.positions == "rotary":
            query, key = rotate(query, spec.rotary_base), rotate(key, spec.rotary_base)
        route = self.routes[layer]
        if route is None:
            moved = [apply_plainly(self.machine.mover(layer, head), (seen,))[0] for head in range(spec.heads)]
            value = torch.stack(moved, dim=-3)
        else:
            value = seen[..., route[0]].movedim(-2, -3)  # (..., heads, tokens, share)
        allowed = resolve_mask(mask, seen.shape[-2], seen.device)
        causal = isinstance(mask, str)
        mixed = scaled_dot_product_attention(
            query, key, value, attn_mask=None if causal else allowed, is_causal=causal, scale=1.0
        )
        if route is None:
            summed: Tensor = mixed.sum(-3)
            return summed
        flat: Tensor = mixed.movedim(-3, -2).flatten(-2)
        whole: Tensor = flat.new_zeros(*flat.shape[:-1], self.machine.width).index_add(-1, route[1], flat)
        return whole

    def _frozen_mlp(self, layer: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Weights and biases of nn.Linear(m, r) and nn.Linear(r, m): uniform on (-1, 1) / sqrt(inputs)."""
        width, hidden = self.machine.width, self.rule.mlp_width
        generator = torch.Generator().manual_seed(self.rule.mlp_seed * 1009 + layer)

        def draw(inputs: int, *shape: int) -> Tensor:
            unit = torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1
            return (unit / math.sqrt(inputs)).to(dtype)

        return draw(width, hidden, width), draw(width, hidden), draw(hidden, width, hidden), draw(hidden, width)


def _route(machine: Machine, layer: int) -> tuple[Tensor, Tensor] | None:
    """Sources (heads, share) and flat targets of a layer whose heads take equal, disjoint shares of the coordinates.

    None where the movers are ordinary matrices.
    """
    movers = [machine.mover(layer, head)[0] for head in range(machine.spec.heads)]
    indices = [mover for mover in movers if isinstance(mover, IndexMap)]
    if len(indices) != len(movers):
        return None
    return torch.stack([mover.source for mover in indices]), torch.cat([mover.target for mover in indices])


def _normed(x: Tensor) -> Tensor:
    return layer_norm(x, x.shape[-1:], eps=EPSILON)
