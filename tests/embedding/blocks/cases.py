"""Specs that the tests of this folder share."""

import torch

import fixedformer as ff


def relative(a, b):
    return float((a - b).abs().max() / b.abs().max())


def gated(activation="silu", **fields):
    return ff.BlockSpec(**{"heads": 2, "layers": 2, "d_in": 2, "d_head": 1, "mlp_width": 2,
                           "activation": activation} | fields)  # fmt: skip


# One of every kind of block: (name, spec)
KINDS = {
    "SwiGLU": gated(),
    "SwiGLU, no skip": gated(residual=False),
    "GeGLU, biases, no skip": gated("gelu", residual=False, bias=True),
    "ReLU MLP, biases": gated("relu", mlp="plain", bias=True),
    "ReLU MLP, biases, no skip": gated("relu", mlp="plain", bias=True, residual=False),
    "ReLU MLP, no biases": gated("relu", mlp="plain"),
    "GPT-2-like": gated("gelu_tanh", mlp="plain", bias=True, norm="layer", d_model=3),
    "Llama-like": gated(norm="rms", d_model=2, d_head=2, positions="rotary", key_heads=1, d_out=1),
    "gated, LayerNorm, biases": gated(norm="layer", bias=True, d_model=3, layers=1),
    "attention, LayerNorm, biases": gated(mlp=None, mlp_width=0, norm="layer", d_model=4, bias=True),
    "no final norm": gated("relu", mlp="plain", bias=True, norm="layer", d_model=3, layers=1, final_norm=False),
    "attention, biases, no skip": gated(mlp=None, mlp_width=0, bias=True, residual=False),
}


def inputs(spec, seed=0, batch=2, tokens=5):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, tokens, spec.d_in, dtype=torch.float64, generator=generator)
