"""The definition of a target in plain Python, float by float. Imports nothing of the package."""

import math


def matmul(a, b):
    return [[sum(x * y for x, y in zip(row, column)) for column in zip(*b)] for row in a]


def add(a, b):
    return [[x + y for x, y in zip(r, s)] for r, s in zip(a, b)]


def softmax(row):
    top = max(row)
    grown = [math.exp(x - top) for x in row]
    return [x / sum(grown) for x in grown]


def rotate(rows, base):
    """Planes (i, i + d/2) turned by place * base^(-2 i / d)."""
    half = len(rows[0]) // 2
    out = []
    for place, row in enumerate(rows):
        new = list(row)
        for i in range(half):
            angle = place * base ** (-2 * i / len(row))
            new[i] = row[i] * math.cos(angle) - row[i + half] * math.sin(angle)
            new[i + half] = row[i + half] * math.cos(angle) + row[i] * math.sin(angle)
        out.append(new)
    return out


def run(weights, X, *, heads, layers, residual, rotary_base=None, allowed=None):
    """weights: nested lists, as target.weights.named(). Returns outputs and attention[layer][head]."""
    state, seen = matmul(X, weights["embed"]), []
    n = len(X)
    for layer in range(layers):
        update = [[0.0] * len(state[0]) for _ in range(n)]
        seen.append([])
        for head in range(heads):
            query = matmul(state, weights["query"][layer][head])
            key = matmul(state, weights["key"][layer][head])
            if rotary_base:
                query, key = rotate(query, rotary_base), rotate(key, rotary_base)
            scores = matmul(query, [list(column) for column in zip(*key)])
            if allowed:
                scores = [[s if ok else -math.inf for s, ok in zip(r, a)] for r, a in zip(scores, allowed)]
            attention = [softmax(row) for row in scores]
            seen[-1].append(attention)
            value = matmul(matmul(state, weights["value"][layer][head]), weights["output"][layer][head])
            update = add(update, matmul(attention, value))
        state = add(state, update) if residual else update
    return matmul(state, weights["unembed"]), seen
