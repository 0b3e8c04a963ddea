"""Hankel matrices by listing every path, in plain numpy. Imports nothing that reads programs back."""

from itertools import product

import numpy as np


class Listed:
    """Read-outs of a network of matrices, path by path.

    embed (V, m); reads[l] (m, 2Hd); moves[l][h] (m, m); out (m, d_out). Branch 0 is the skip where residual.
    """

    def __init__(self, embed, reads, moves, out, residual):
        self.layers, self.heads, self.residual = len(reads), len(moves[0]), residual
        self.branches = self.heads + residual
        self.shown = {}
        states = {(): embed}
        for layer in range(self.layers):
            later = {}
            for path, state in states.items():
                self.shown[path] = state @ reads[layer]
                steps = ([state] if residual else []) + [state @ move for move in moves[layer]]
                later |= {(*path, b): step for b, step in enumerate(steps)}
            states = later
        self.shown |= {path: state @ out for path, state in states.items()}

    def row(self, path):
        """All that is shown behind `path`: (V, columns)."""
        rest = [q for t in range(self.layers - len(path) + 1) for q in product(range(self.branches), repeat=t)]
        return np.concatenate([self.shown[path + q] for q in rest], axis=1)

    def hankel(self, cut, last=None):
        """Rows (path, input) of a cut; only paths whose last branch is `last`, if given."""
        paths = product(range(self.branches), repeat=cut)
        return np.concatenate([self.row(p) for p in paths if last is None or p[-1] == last])

    def rank(self, cut, last=None, tolerance=1e-9):
        values = np.linalg.svd(self.hankel(cut, last), compute_uv=False)
        return int((values > tolerance * values[0]).sum()) if len(values) and values[0] else 0

    def distance(self, other):
        """Frobenius norm of the difference of all read-outs."""
        return np.sqrt(sum(((a - other.shown[p]) ** 2).sum() for p, a in self.shown.items()))


def of_target(target):
    w = {name: t.double().numpy() for name, t in target.weights.named().items()}
    layers, heads = range(target.spec.layers), range(target.spec.heads)
    reads = [np.concatenate([*w["query"][n], *w["key"][n]], axis=1) for n in layers]
    moves = [[w["value"][n, h] @ w["output"][n, h] for h in heads] for n in layers]
    return Listed(w["embed"], reads, moves, w["unembed"], target.spec.residual)


def of_program(machine, program):
    import torch

    spec, kind = machine.spec, torch.float64
    layers, heads = range(spec.layers), range(spec.heads)
    sides = (machine.dense_query, machine.dense_key)
    reads = [np.concatenate([side(n, h, kind) for side in sides for h in heads], axis=1) for n in layers]
    moves = [[machine.dense_value(n, h, kind).numpy() for h in heads] for n in layers]
    out = machine.dense_unembed(kind) if program.unembedding is None else program.unembedding
    return Listed(program.embedding.double().numpy(), reads, moves, out.double().numpy(), spec.residual)
