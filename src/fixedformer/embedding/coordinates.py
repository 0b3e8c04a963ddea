"""Training where path space ends: frozen random MLPs over the machine's m coordinates.

The state is m wide again, but a sparse machine's coordinates each belong to one head a layer: a layer is one attention
product of width at most m, never one a head, and no m x m product. (A machine of ordinary matrices needs its m x m
products; the cheaper order is values first.) Without positions, places with equal contexts are done once (contexts.py).
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear, scaled_dot_product_attention

from fixedformer.attention import Mask, resolve_mask, rotate
from fixedformer.embedding.contexts import Contexts, Sight, contexts_apply, two_sights
from fixedformer.embedding.machine import Machine
from fixedformer.embedding.maps import IndexMap, apply_plainly
from fixedformer.embedding.normed import normalise
from fixedformer.embedding.parameters import ProgramParameters
from fixedformer.embedding.rule import EPSILON, Rule
from fixedformer.errors import SpecError
from fixedformer.inputs import as_input, embed_rows

MLP = ("into", "bias", "out", "shift")  # W_1, b_1, W_2, b_2


class CoordinateProgram(ProgramParameters):
    """E (and U) of a fixed machine whose layers follow `rule`, evaluated over the m coordinates.

    Same parameters and meaning as TrainableProgram, which is far faster where it applies; this one also evaluates
    rules with an MLP: x + W_2 gelu(W_1 x + b_1) + b_2 after each attention (without residual the sum's first term is
    left out), frozen, drawn as PyTorch draws nn.Linear from rule.mlp_seed.

    mlp_ramp (first, last): while training, the MLPs add nothing before step `first`, all of themselves from step `last`
    on, and a share that grows linearly in between (`pace`). Outputs in eval mode are the machine's own at any time. So
    an embedding that works without MLPs is led to one that works with them; started with them it stops short.
    """

    def __init__(
        self,
        machine: Machine,
        rule: Rule,
        train_unembedding: bool = False,
        deviation: float = 0.02,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        mlp_ramp: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(machine, train_unembedding, deviation, seed, dtype)
        if mlp_ramp is not None and not (rule.residual and rule.mlp_width and 0 <= mlp_ramp[0] <= mlp_ramp[1]):
            raise SpecError(f"mlp_ramp needs residual=True, an MLP, and 0 <= first <= last, got {mlp_ramp}")
        self.mlp_ramp, self._share = mlp_ramp, 1.0
        self.rule, layers = rule, range(machine.spec.layers)
        for layer in layers if rule.mlp_width else ():
            for name, tensor in zip(MLP, self._frozen_mlp(layer, dtype)):
                self.register_buffer(f"{name}_{layer}", tensor, persistent=False)  # follows the model to its device
        self.routes = [_route(machine, layer) for layer in layers]

    @property
    def mlps(self) -> list[tuple[Tensor, ...]]:
        """W_1, b_1, W_2, b_2 of every layer; empty without MLPs."""
        layers = range(self.machine.spec.layers) if self.rule.mlp_width else ()
        return [tuple(self.get_buffer(f"{name}_{layer}") for name in MLP) for layer in layers]

    def pace(self, step: int) -> None:
        """Told before training step 0, 1, ..: how much of the MLPs it sees."""
        if self.mlp_ramp is not None:
            first, last = self.mlp_ramp
            self._share = 1.0 if step >= last else max(0.0, step - first) / (last - first or 1)

    @property
    def share(self) -> float:
        """How much of its MLPs the model adds: all, unless it is in train mode on its ramp."""
        return self._share if self.training else 1.0

    def forward(self, X: Tensor, mask: Mask = "causal") -> Tensor:
        """Outputs (..., tokens, d_out) for token ids or vectors."""
        spec = self.machine.spec
        data, first = as_input(X, spec.d_in, self.embedding.dtype, self.embedding.device), 0
        if contexts_apply(spec, data, mask):
            contexts = Contexts.of(data, spec.d_in, mask)
            once = self._first_layer(contexts.sight)
            state, first = once.index_select(0, contexts.where.flatten()).unflatten(0, contexts.where.shape), 1
        else:
            state = embed_rows(data, self.embedding)
        for layer in range(first, spec.layers):
            state = self._finished(layer, self._added(state, self._attention(self._seen(state), layer, mask)))
        return self._read(state)

    def at(self, X: Tensor, mask: Mask, places: Tensor) -> Tensor:
        """Outputs (places, d_out) at the flagged places (batch, tokens) alone, in their order.

        With two layers and no positions both layers run over distinct contexts (contexts.py).
        """
        spec = self.machine.spec
        data = as_input(X, spec.d_in, self.embedding.dtype, self.embedding.device)
        sights = two_sights(spec, data, mask, places)
        if sights is None:
            return super().at(data, mask, places)
        return self._read(self._last_layer(self._first_layer(sights[0]), sights[1]))

    def _first_layer(self, sight: Sight) -> Tensor:
        """The state after layer 1, (contexts, m).

        Up to its MLP that state is P G, P with few columns (normed.py): W_1 multiplies the rows of G, not the contexts.
        """
        spec, rule = self.machine.spec, self.rule
        seen = self._seen(self.embedding)
        weights = self._weights(0, seen, sight)
        paths = weights.movedim(0, 1).flatten(1)  # (contexts, heads * d_in)
        basis = torch.cat([apply_plainly(self.machine.mover(0, head), (seen,))[0] for head in range(spec.heads)])
        if rule.residual:
            own = torch.nn.functional.one_hot(sight.own, spec.d_in).to(paths.dtype)
            paths, basis = torch.cat([own, paths], dim=1), torch.cat([self.embedding, basis])
        if not self.mlps or not self.share:
            return self._finished(0, paths @ basis)
        into, bias, out, shift = self.mlps[0]
        read, rows = normalise(paths, basis) if rule.norm == "pre" else (paths, basis)
        update = self._shared(linear(gelu(read @ linear(rows, into) + bias), out, shift))
        state = self._added(paths @ basis, update) if rule.residual else update
        return _normed(state) if rule.norm == "post" else state

    def _last_layer(self, state: Tensor, sight: Sight) -> Tensor:
        """The state after layer 2 at the places that look, (places, m)."""
        seen, route = self._seen(state), self.routes[1]
        weights = self._weights(1, seen, sight)
        if route is None:
            moved = [apply_plainly(self.machine.mover(1, head), (w @ seen,))[0] for head, w in enumerate(weights)]
            update = torch.stack(moved).sum(0)
        else:
            update = self._spread(torch.einsum("hwu,uhs->whs", weights, seen[:, route[0]]), route)
        return self._finished(1, self._added(state.index_select(0, sight.own), update))

    def _weights(self, layer: int, seen: Tensor, sight: Sight) -> Tensor:
        heads, d_head = self.machine.spec.heads, self.machine.spec.d_head
        both = apply_plainly(self.machine.reader(layer), (seen,))[0].unflatten(-1, (2, heads, d_head))
        return sight.weights(both[:, 0], both[:, 1])

    def _seen(self, state: Tensor) -> Tensor:
        return _normed(state) if self.rule.norm == "pre" else state

    def _added(self, state: Tensor, update: Tensor) -> Tensor:
        return state + update if self.rule.residual else update

    def _shared(self, update: Tensor) -> Tensor:
        return update if self.share == 1 else self.share * update

    def _finished(self, layer: int, state: Tensor) -> Tensor:
        """What follows attention and its sum: the MLP, and the norm behind a layer."""
        if self.mlps and self.share:
            into, bias, out, shift = self.mlps[layer]
            state = self._added(state, self._shared(linear(gelu(linear(self._seen(state), into, bias)), out, shift)))
        return _normed(state) if self.rule.norm == "post" else state

    def _read(self, state: Tensor) -> Tensor:
        return (_normed(state) if self.rule.final_norm else state) @ self.exit()

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
        return self._spread(mixed.movedim(-3, -2), route)

    def _spread(self, mixed: Tensor, route: tuple[Tensor, Tensor]) -> Tensor:
        """Every head's share (..., heads, share) put where it belongs among the m coordinates."""
        flat = mixed.flatten(-2)
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
