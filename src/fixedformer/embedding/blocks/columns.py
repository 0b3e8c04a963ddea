"""What a program must show: C_0 and the constants, from the last layer back.

C_L = [I | W_U] (I with a norm), and C_{l-1} is P_{l-1} with every R replaced by its W: see `layout`. A target neuron j
becomes t_l universal neurons; all have its gate, and their up weights are its up weight times alpha_j, where
alpha_j B_j = W_d[j, :] C_l and B_j is what the machine's t_l neurons write into P_l. Then they write, together,
phi(g_j) u_j alpha_j B_j = phi(g_j) u_j W_d[j, :] C_l: what the target's neuron writes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fixedformer.embedding.blocks.folded import Folded, FoldedLayer
from fixedformer.embedding.blocks.layout import Layout, Level

# (layer from 0, W_d C_l (r, s_l)) -> alpha (r, t_l)
Spread = Callable[[int, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Wanted:
    """rows: W_E C_0 (d_in, s_0), what E_a P_0 must be. constants: what the constant stream must show (m_b,)."""

    rows: Tensor
    constants: Tensor


def wanted(folded: Folded, layout: Layout, spread: Spread) -> Wanted:
    """What a machine must show whose neurons are shared out by `spread`; float64."""
    d_model = folded.unembed.shape[0]
    columns = folded.unembed
    if layout.spec.norm:
        columns = torch.cat([torch.eye(d_model, dtype=columns.dtype), columns], dim=1)
    constants = columns.new_zeros(layout.constant_width)
    if layout.spec.bias:
        constants[layout.constants[None, "exit"]] = folded.unembed_bias
    for number in reversed(range(layout.spec.layers)):
        layer, level = folded.layers[number], layout.levels[number]
        gate, alpha = None, None
        if layer.gate is not None and layer.down is not None:
            gate = layer.gate.repeat_interleave(level.gates, dim=1)
            alpha = spread(number, layer.down @ columns)  # (r, t)
        up = None if layer.up is None or alpha is None else (layer.up[:, :, None] * alpha).flatten(1)
        for name, value in _constants(layer, level, columns, gate, up, alpha):
            constants[layout.constants[number, name]] = value
        columns = _previous(layer, level, columns, gate, up)
    return Wanted(folded.embed @ columns, constants)


def _previous(layer: FoldedLayer, level: Level, columns: Tensor, gate: Tensor | None, up: Tensor | None) -> Tensor:
    """C_{l-1} from C_l."""
    out = columns.new_empty(columns.shape[0], level.width)
    fill = {"query": layer.query.movedim(0, 1).flatten(1), "key": layer.key.movedim(0, 1).flatten(1)}
    for kind, moved, value in (("keep", "move", columns), ("gate", "gate_move", gate), ("up", "up_move", up)):
        if kind in level.parts and value is not None:
            fill[kind] = value
        if moved in level.parts and value is not None:
            fill[moved] = torch.cat([move @ value for move in layer.move], dim=1)
    for name, place in level.parts.items():
        out[:, place] = fill[name]
    return out


def _constants(
    layer: FoldedLayer, level: Level, columns: Tensor, gate: Tensor | None, up: Tensor | None, alpha: Tensor | None
) -> Sequence[tuple[str, Tensor]]:
    """Everything the constant stream contributes to one layer, by part."""
    found: dict[str, Tensor] = {"query": layer.query_bias.flatten(), "key": layer.key_bias.flatten()}
    found["attend_keep"] = layer.attend_bias @ columns
    if gate is not None and alpha is not None and layer.gate_bias is not None and layer.up_bias is not None:
        found["gate"] = layer.gate_bias.repeat_interleave(level.gates)
        found["attend_gate"] = layer.attend_bias @ gate
        found["up"] = (layer.up_bias[:, None] * alpha).flatten()
    if up is not None:
        found["attend_up"] = layer.attend_bias @ up
    if layer.down_bias is not None:
        found["down"] = layer.down_bias @ columns
    return [(name, found[name]) for name in level.constants]
