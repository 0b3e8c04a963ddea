"""The looped transformer's definition, written out: one sequence, one token, one loop at a time. Shares no code."""

import math

import torch


def sine(t, width):
    out = torch.zeros(width, dtype=torch.float64)
    for i in range(width // 2):
        out[2 * i] = math.sin(t / 10000 ** (2 * i / width))
        out[2 * i + 1] = math.cos(t / 10000 ** (2 * i / width))
    return out


def rms(x):
    return x / torch.sqrt((x * x).mean() + 1e-6)


def turned(x, place):
    half = len(x) // 2
    out = [None] * len(x)
    for i in range(half):
        angle = place * 10000.0 ** (-2 * i / len(x))
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return torch.stack(out)


def clock(model, t):
    """α1 - 1, α2 - 1, γ1, γ2 of every layer, (layers, 4, width), for loop t from 1."""
    spec, named = model.spec, dict(model.named_parameters())
    ones = torch.ones(spec.layers, 2, spec.width, dtype=torch.float64)
    zeros = torch.zeros(spec.layers, 2, spec.width, dtype=torch.float64)
    if spec.timestep == "none":
        return torch.cat([named.get("gain", zeros), ones], 1)
    if spec.timestep == "constant":
        return named["modulation"][0]
    if spec.timestep == "free":
        return named["modulation"][t - 1]
    hidden = torch.nn.functional.silu(sine(t, spec.width) @ named["clock_in"] + named["clock_in_bias"])
    encoded = hidden @ named["clock_out"] + named["clock_out_bias"]
    return (torch.nn.functional.silu(encoded) @ named["modulate"] + named["modulate_bias"]).view(
        spec.layers, 4, spec.width
    )


def attend(spec, rows, layer, allowed, shown):
    """rows: list of (width,) -> list of (width,), and the attention (heads, tokens, tokens) appended to `shown`."""
    size = spec.width // spec.heads
    bias = 0 if layer.inward_bias is None else layer.inward_bias
    made = [row @ layer.inward + bias for row in rows]
    out, maps = [[] for _ in rows], []
    for h in range(spec.heads):
        query, key, value = (
            [m[part * spec.width + h * size : part * spec.width + (h + 1) * size] for m in made] for part in range(3)
        )
        if spec.positions == "rotary":
            query = [turned(q, i) for i, q in enumerate(query)]
            key = [turned(k, i) for i, k in enumerate(key)]
        table = []
        for i, q in enumerate(query):
            scores = torch.stack([
                (q * k).sum() / math.sqrt(size) if allowed(i, j) else torch.tensor(-math.inf, dtype=torch.float64)
                for j, k in enumerate(key)
            ])  # fmt: skip
            weights = torch.exp(scores - scores.max()) / torch.exp(scores - scores.max()).sum()
            table.append(weights)
            out[i].append(sum(w * v for w, v in zip(weights, value)))
        maps.append(torch.stack(table))
    shown.append(torch.stack(maps))
    bias = 0 if layer.outward_bias is None else layer.outward_bias
    return [torch.cat(row) @ layer.outward + bias for row in out]


def run(model, inputs, loops, allowed=lambda *_: True, cut=0):
    """Read-outs after each loop (loops, tokens, d_out), states (loops + 1, ...), attention (loops, layers, ...).

    inputs: ids (tokens,) or vectors (tokens, d_in); cut: loops from the first through which no gradient runs.
    """
    spec = model.spec
    embedded = []
    for i, x in enumerate(inputs):
        row = x @ model.embed if inputs.is_floating_point() else model.embed[x]
        if spec.positions == "learned":
            row = row + model.places[i]
        if spec.positions == "sinusoidal":
            row = row + sine(i, spec.width) * (spec.width**-0.5 if spec.deviation is None else spec.deviation)
        embedded.append(row)
    rows = [torch.zeros_like(e) for e in embedded] if spec.injection == "add" else embedded
    norm = rms if spec.norm == "pre" else lambda x: x
    sees = (lambda i, j: allowed(i, j) and j <= i) if spec.causal else allowed
    outs, states, attention = [], [torch.stack(rows)], []
    for t in range(1, loops + 1):
        if spec.injection == "add":
            rows = [row + e for row, e in zip(rows, embedded)]
        shown = []
        for number, layer in enumerate(model.layers):
            first, second, gate, last = clock(model, t)[number]
            moved = attend(spec, [(1 + first) * norm(row) for row in rows], layer, sees, shown)
            rows = [row + gate * m for row, m in zip(rows, moved)]
            wide = [((1 + second) * norm(row)) @ layer.widen for row in rows]
            if layer.widen_bias is not None:
                wide = [w + layer.widen_bias for w in wide]
            moved = [(0.5 * w * (1 + torch.erf(w / math.sqrt(2)))) @ layer.narrow for w in wide]
            if layer.narrow_bias is not None:
                moved = [m + layer.narrow_bias for m in moved]
            rows = [row + last * m for row, m in zip(rows, moved)]
        if t <= cut:
            rows = [row.detach() for row in rows]
        states.append(torch.stack(rows))
        attention.append(torch.stack(shown))
        read = [rms(row) * (1 + model.final_gain) for row in rows] if spec.final_norm else rows
        matrix = model.embed.T if spec.tied else model.readout
        outs.append(torch.stack([row @ matrix for row in read]))
    return torch.stack(outs), torch.stack(states), torch.stack(attention)
