"""Specs and machines that the tests of this folder share."""

import random

import torch

import fixedformer as ff

KINDS = ["sparse", "sparse looped", "random", "random looped"]


def build(kind, spec, **options):
    looped = "looped" in kind
    if kind.startswith("sparse"):
        return ff.SparseMachine(spec, looped=looped, **options)
    return ff.RandomMachine(spec, looped=looped, **options)


def relative(a, b):
    return float((a - b).abs().max() / b.abs().max())


def sampled_spec(draw: random.Random, residual=None, widest=2300):
    """A spec whose machine is at most `widest`: heads and layers 1-4, everything else free."""
    while True:
        residual_now = draw.random() < 0.3 if residual is None else residual
        rotary = draw.random() < 0.3
        spec = ff.TargetSpec(
            heads=draw.randint(1, 4),
            layers=draw.randint(1, 4),
            d_in=draw.randint(1, 12),
            d_out=draw.randint(1, 8),
            d_head=2 * draw.randint(1, 6) if rotary else draw.randint(1, 12),
            residual=residual_now,
            positions="rotary" if rotary else None,
        )
        if ff.widths(spec).minimal <= widest:
            return spec


def sampled_mask(draw: random.Random, tokens, generator):
    choice = draw.choice(["none", "causal", "any"])
    if choice == "any":
        return (torch.rand(tokens, tokens, generator=generator) < 0.6) | torch.eye(tokens, dtype=torch.bool)
    return None if choice == "none" else choice
