"""The definition of a block transformer in NumPy, one head and one row at a time; imports nothing of the package."""

import math

import numpy as np


def _phi(name, x):
    erf = np.vectorize(math.erf)
    return {
        "silu": lambda: x / (1 + np.exp(-x)),
        "relu": lambda: np.maximum(x, 0),
        "gelu": lambda: x * 0.5 * (1 + erf(x / math.sqrt(2))),
        "gelu_tanh": lambda: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    }[name]()


def _rotate(rows, base):
    half = rows.shape[1] // 2
    out = rows.copy()
    for place in range(len(rows)):
        for i in range(half):
            c, s = math.cos(place * base ** (-i / half)), math.sin(place * base ** (-i / half))
            a, b = rows[place, i], rows[place, i + half]
            out[place, i], out[place, i + half] = a * c - b * s, b * c + a * s
    return out


def run(spec, weights, X, causal=False):
    """X (tokens, d_in) -> (tokens, d_out); spec: anything with the fields' names; weights: name -> array."""
    w = {name: np.asarray(value) for name, value in weights.items()}

    def norm(x, place, layer=()):
        if spec.norm is None or (place == "final" and not spec.final_norm):
            return x
        rows = []
        for row in x:
            row = row - row.mean() if spec.norm == "layer" else row
            rows.append(row / math.sqrt((row**2).mean() + spec.norm_eps))
        out = np.array(rows) * w[f"{place}_gain"][layer]
        return out + w[f"{place}_shift"][layer] if spec.bias else out

    def linear(x, name, *place):
        out = x @ w[name][place]
        return out + w[f"{name}_bias"][place] if spec.bias else out

    x = X @ w["embed"]
    for layer in range(spec.layers):
        seen, update = norm(x, "attention", layer), np.zeros_like(x)
        for head in range(spec.heads):
            group = head // (spec.heads // spec.key_heads)
            q, k = linear(seen, "query", layer, head), linear(seen, "key", layer, group)
            if spec.positions == "rotary":
                q, k = _rotate(q, spec.rotary_base), _rotate(k, spec.rotary_base)
            v = linear(seen, "value", layer, group)
            for i in range(len(x)):
                last = i + 1 if causal else len(x)
                scores = np.array([q[i] @ k[j] for j in range(last)])
                grown = np.exp(scores - scores.max())
                update[i] += (grown / grown.sum()) @ v[:last] @ w["output"][layer, head]
        update = update + w["output_bias"][layer] if spec.bias else update
        x = x + update if spec.residual else update
        if spec.mlp:
            seen = norm(x, "mlp", layer)
            hidden = _phi(spec.activation, linear(seen, "gate", layer))
            hidden = hidden * linear(seen, "up", layer) if spec.mlp == "gated" else hidden
            update = linear(hidden, "down", layer)
            x = x + update if spec.residual else update
    return norm(x, "final") @ w["unembed"] + (w["unembed_bias"] if spec.bias else 0)
