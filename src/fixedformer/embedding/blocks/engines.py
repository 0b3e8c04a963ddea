"""Two evaluations of a machine with MLPs. `run_dense` is the definition; `run_paths` never forms an m-wide state.

The state is (a, b): a the stream, b = e_b a constant that nothing changes. Layer l, with z = a / sigma,
sigma = sqrt(mean((a U_stat Pi)^2) + eps) (1 without a norm; taken anew before the MLP and before the exit):
    a <- [a +] sum_h A^h z R_V^h + b R_o,       scores from z R_Q + b R_Qb and z R_K + b R_Kb
    a <- [a +] (phi(z R_g + b R_gb) * (z R_u + b R_ub)) R_d + b R_db        (ungated: b R_ub alone)
    out = z U_out + b U_b.
Path space carries Z_l = a P_l (tokens x s_l) in place of a: every product above is a column of Z_l or of what it
becomes, so the program enters through E_a P_0 and e_b alone, and the MLP's result through R_d P_l.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fixedformer.attention import Mask, attention_weights, resolve_mask, rotate, softmax_weights
from fixedformer.embedding.blocks.layout import Layout, Level
from fixedformer.embedding.blocks.spec import ACTIVATIONS, BlockSpec
from fixedformer.inputs import embed_rows

# Called with the target's stream a U_stat (..., tokens, d_model) before the first layer and after every layer.
Watch = Callable[[Tensor], None] | None


class DenseWeights(Protocol):
    """The machine's matrices as the definition writes them; layers and heads count from 0."""

    spec: BlockSpec

    def matrix(self, name: str, layer: int | None = None, head: int | None = None) -> Tensor: ...

    def has(self, name: str) -> bool: ...


def run_dense(
    machine: DenseWeights, embedding: Tensor, constants: Tensor, X: Tensor, mask: Mask, watch: Watch
) -> Tensor:
    """The definition, literally: state (..., tokens, m), one m x m product a head and layer. X from `as_input`."""
    spec, dtype = machine.spec, embedding.dtype
    allowed = resolve_mask(mask, X.shape[-2] if X.is_floating_point() else X.shape[-1], embedding.device)
    allowed = None if allowed is None else allowed.squeeze(-3)

    def get(name: str, layer: int | None = None, head: int | None = None) -> Tensor:
        return machine.matrix(name, layer, head).to(dtype)

    def constant(name: str, layer: int | None) -> Tensor | float:
        return constants @ get(name, layer) if machine.has(name) else 0.0

    def normed(a: Tensor) -> Tensor:
        return a if spec.norm is None else a * _inverse_sigma(spec, a @ get("statistics"))

    a = embed_rows(X, embedding)
    for layer in range(spec.layers):
        if watch is not None and spec.norm:
            watch(a @ get("statistics"))
        z = normed(a)
        queries = z @ get("query", layer) + constant("query_constant", layer)
        keys = z @ get("key", layer) + constant("key_constant", layer)
        update = torch.zeros_like(a)
        for head in range(spec.heads):
            query, key = (x[..., head * spec.d_head : (head + 1) * spec.d_head] for x in (queries, keys))
            if spec.positions == "rotary":
                query, key = rotate(query, spec.rotary_base), rotate(key, spec.rotary_base)
            update = update + softmax_weights(query @ key.mT, allowed) @ (z @ get("value", layer, head))
        update = update + constant("attend_constant", layer)
        a = a + update if spec.residual else update
        if spec.mlp:
            z = normed(a)
            hidden = ACTIVATIONS[spec.activation](z @ get("gate", layer) + constant("gate_constant", layer))
            up = z @ get("up", layer) if spec.mlp == "gated" else 0.0
            update = (hidden * (up + constant("up_constant", layer))) @ get("down", layer)
            update = update + constant("down_constant", layer)
            a = a + update if spec.residual else update
    if watch is not None and spec.norm:
        watch(a @ get("statistics"))
    return (normed(a) if spec.final_norm else a) @ get("exit") + constant("exit_constant", None)


@dataclass(frozen=True, eq=False)
class ReadOuts:
    """All that a machine ever shows of a program: rows E_a P_0 (d_in, s_0) and constants (m_b,), laid out by `layout`.

    writes: R_d P_l (q_l, s_l) of every layer, or None where neuron (j, i) writes column i and nothing else.
    """

    layout: Layout
    rows: Tensor
    constants: Tensor
    writes: tuple[Tensor, ...] | None

    def share(self) -> "ReadOuts":
        """The same with columns that occur twice kept once, where they do; else self. Exact: columns are compared."""
        if self.writes is not None or not self.layout.spec.mlp:
            return self
        shared = Layout(self.layout.spec, shared=True)
        places = []
        for owner, width in zip(shared.owners(), (shared.width, shared.constant_width)):
            first = torch.full((width,), owner.numel()).scatter_reduce(0, owner, torch.arange(owner.numel()), "amin")
            places.append((owner, first))
        values = (*self.rows, self.constants)
        for value, (owner, first) in zip(values, [places[0]] * len(self.rows) + [places[1]]):
            if not torch.equal(value, value[first][owner]):
                return self  # a program that nothing compiled, or one that was changed since
        return ReadOuts(shared, self.rows[:, places[0][1]], self.constants[places[1][1]], None)


def run_paths(shown: ReadOuts, X: Tensor, mask: Mask, watch: Watch) -> Tensor:
    """The same function as `run_dense` for every E, from its read-outs. X comes from `as_input`."""
    spec = shown.layout.spec
    state = embed_rows(X, shown.rows)  # (..., tokens, s_0)
    allowed = resolve_mask(mask, state.shape[-2], state.device)
    d_model, places = spec.d_model or 0, shown.layout.constants
    for number, level in enumerate(shown.layout.levels):
        first = level.statistics
        if watch is not None and spec.norm:
            watch(state[..., first : first + d_model])
        constants = {name: shown.constants[places[number, name]] for name in level.constants}
        scale = _inverse_sigma(spec, state[..., first : first + d_model]) if spec.norm else None
        mixed = _attention(spec, level, state, scale, constants, allowed)
        keep, gate, up = (mixed(name) for name in ("keep", "gate", "up"))
        if spec.mlp and gate is not None:
            scale = _inverse_sigma(spec, _statistics(spec, level, keep)) if spec.norm else None
            writes = None if shown.writes is None else shown.writes[number].to(state.dtype)
            update = _mlp(spec, level, (gate, up), scale, constants, writes)
            keep = update if keep is None else keep + update
        assert keep is not None  # a layer has a skip, value paths or an MLP
        state = keep
    if watch is not None and spec.norm:
        watch(state[..., :d_model])
    z = state * _inverse_sigma(spec, state[..., :d_model]) if spec.norm and spec.final_norm else state
    exit_constant = shown.constants[places[None, "exit"]] if spec.bias else 0.0
    return z[..., d_model:] + exit_constant


def _attention(
    spec: BlockSpec,
    level: Level,
    state: Tensor,
    scale: Tensor | None,
    constants: Mapping[str, Tensor],
    allowed: Tensor | None,
) -> Callable[[str], Tensor | None]:
    """What attention makes of a part: skip + sum over heads + constant; None for a part that is not there."""

    def read(name: str) -> Tensor:  # (..., heads, tokens, d)
        part = state[..., level.parts[name]]
        part = part if scale is None else part * scale
        part = part + constants[name] if spec.bias else part
        part = part.unflatten(-1, (spec.heads, spec.d_head)).movedim(-2, -3)
        return rotate(part, spec.rotary_base) if spec.positions == "rotary" else part

    weights = attention_weights(read("query"), read("key"), allowed)
    if scale is not None:  # A (z R) = (A diag(1 / sigma)) (a R): scale the small matrix
        weights = weights * scale.unsqueeze(-3).mT

    def mixed(name: str) -> Tensor | None:
        moved = level.parts.get("move" if name == "keep" else f"{name}_move")
        if moved is None:
            return None
        width = (moved.stop - moved.start) // spec.heads
        out = state[..., level.parts[name]] if name in level.parts else None
        for head in range(spec.heads):
            start = moved.start + head * width
            part = weights[..., head, :, :] @ state[..., start : start + width]
            out = part if out is None else out + part
        assert out is not None  # there is at least one head
        return out + constants[f"attend_{name}"] if f"attend_{name}" in constants else out

    return mixed


def _mlp(
    spec: BlockSpec,
    level: Level,
    neurons: tuple[Tensor, Tensor | None],
    scale: Tensor | None,
    constants: Mapping[str, Tensor],
    writes: Tensor | None,
) -> Tensor:
    """(phi(gate) * up) R_d P_l: (..., tokens, s_l). Copies of a target neuron share a gate where `level` says so."""
    gate, up = neurons
    gate = gate if scale is None else gate * scale
    gate = ACTIVATIONS[spec.activation](gate + constants["gate"] if "gate" in constants else gate)
    shape = (spec.mlp_width, level.copies)
    if writes is not None:
        hidden = gate * _up(up, scale, constants)
        out = hidden @ writes
    else:
        grouped = gate.unflatten(-1, (spec.mlp_width, level.gates))
        if up is None:  # up neurons are constants: sum_j phi(g_j) alpha_{j,i}
            alpha = constants["up"].reshape(shape)
            out = gate @ alpha if level.gates == 1 else (grouped * alpha).sum(-2)
        else:
            out = (grouped * _up(up, scale, constants).unflatten(-1, shape)).sum(-2)
    return out + constants["down"] if "down" in constants else out


def _up(up: Tensor | None, scale: Tensor | None, constants: Mapping[str, Tensor]) -> Tensor:
    if up is None:
        return constants["up"]
    up = up if scale is None else up * scale
    return up + constants["up"] if "up" in constants else up


def _statistics(spec: BlockSpec, level: Level, keep: Tensor | None) -> Tensor:
    """The stream among the columns of P_l."""
    assert keep is not None  # a norm needs residual connections, which keep P_l
    first = level.statistics - level.parts["keep"].start
    return keep[..., first : first + (spec.d_model or 0)]


def _inverse_sigma(spec: BlockSpec, stream: Tensor) -> Tensor:
    """1 / sqrt(mean((x Pi)^2) + eps), (..., tokens, 1)."""
    centred = stream - stream.mean(-1, keepdim=True) if spec.norm == "layer" else stream
    return torch.rsqrt(centred.square().mean(-1, keepdim=True) + spec.norm_eps)
