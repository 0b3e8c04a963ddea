"""One training step a sequence: path space, the plain dense definition, and the fully trained target.

    python benchmarks/train_step.py [--rows dyck/sparse ...] [--repeats 5] [--json FILE]

float32, forward + backward + AdamW on E and U (all weights for the full target), causal, the paper's batch sizes (1000
for Dyck, 128 for k-hop), same threads, one process; the three in turn, medians. The dense definition is given every
fair advantage: weights stacked over heads so that a layer is few large products, both orders of multiplication (values
before or after attention), PyTorch's fused attention, and three batch sizes; the fastest of these six is what counts.
The full target has the same heads, layers and head width, hidden width heads * d_head, and fused attention.
Dyck is scored at "?" alone, and our step evaluates what that needs (embedding/contexts.py); "all places" is our step
without that, which the dense definition and the full target do in either row.
Also: the matmul peak of this machine, and the share of it that the path engine's counted multiplications reach (not
counted over contexts: how many there are depends on the data).
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import fixedformer as ff
from fixedformer.embedding.rule import EPSILON, Rule
from fixedformer.embedding.trainable import TrainableProgram
from fixedformer.tasks.dyck import Dyck
from fixedformer.tasks.khop import KHop

SHAPES = {"dyck": (4, 2, 4, 24), "1-hop": (2, 2, 30, 28), "2-hop": (2, 3, 30, 28), "4-hop": (2, 4, 30, 30)}
BATCH = {"dyck": 1000, "1-hop": 128, "2-hop": 128, "4-hop": 128}
DENSE_BATCHES = {"dyck": (32, 100, 250), "1-hop": (16, 32, 64), "2-hop": (8, 16, 32), "4-hop": (4, 8, 16)}
NORMED = Rule(residual=True, norm="pre", final_norm=True)


def norm(x: Tensor) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], eps=EPSILON)


class DenseDefinition(nn.Module):
    """The machine as its definition reads, in plain PyTorch: m-wide state, dense m x m value matrices."""

    def __init__(self, machine: ff.SparseMachine | ff.RandomMachine, rule: Rule) -> None:
        super().__init__()
        spec, single = machine.spec, torch.float32
        self.spec, self.rule = spec, rule
        self.embedding = nn.Parameter(torch.randn(spec.d_in, machine.width) * 0.02)
        self.unembedding = nn.Parameter(torch.randn(machine.width, spec.d_out) * 0.02)
        heads = range(spec.heads)
        self.reads, self.values = [], []
        for layer in range(spec.layers):
            query = [machine.dense_query(layer, h, single) for h in heads]
            self.reads.append(torch.cat(query + [machine.dense_key(layer, h, single) for h in heads], 1))
            self.values.append(torch.stack([machine.dense_value(layer, h, single) for h in heads]))

    def forward(self, X: Tensor) -> Tensor:
        spec, rule = self.spec, self.rule
        state = self.embedding[X]
        batch, tokens, width = state.shape
        mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        for reads, values in zip(self.reads, self.values):
            seen = norm(state) if rule.norm == "pre" else state
            query, key = (seen @ reads).view(batch, tokens, 2, spec.heads, -1).permute(2, 0, 3, 1, 4)
            scores = (query @ key.mT).masked_fill(~mask, -torch.inf)
            mixed = (scores.softmax(-1).flatten(1, 2) @ seen).view(batch, spec.heads, tokens, width)
            # sum_h (A^h X) R_V^h as one product with the value matrices below each other
            update = mixed.transpose(1, 2).flatten(2) @ values.flatten(0, 1)
            state = state + update if rule.residual else update
        return (norm(state) if rule.final_norm else state) @ self.unembedding


class DenseValuesFirst(DenseDefinition):
    """The other order: X R_V^h first, then attention (fused kernel where it takes these widths)."""

    def forward(self, X: Tensor) -> Tensor:
        spec, rule = self.spec, self.rule
        state = self.embedding[X]
        batch, tokens, width = state.shape
        for reads, values in zip(self.reads, self.values):
            seen = norm(state) if rule.norm == "pre" else state
            query, key = (seen @ reads).view(batch, tokens, 2, spec.heads, -1).permute(2, 0, 3, 1, 4)
            value = (seen @ values.transpose(0, 1).flatten(1)).view(batch, tokens, spec.heads, width).transpose(1, 2)
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=1.0)
            update = mixed.sum(1)
            state = state + update if rule.residual else update
        return (norm(state) if rule.final_norm else state) @ self.unembedding


class FullTarget(nn.Module):
    """The fully trained transformer with the same H, L, d: everything is a parameter; fused attention."""

    def __init__(self, spec: ff.TargetSpec, rule: Rule) -> None:
        super().__init__()
        width = spec.heads * spec.d_head
        self.spec, self.rule = spec, rule
        self.embedding = nn.Parameter(torch.randn(spec.d_in, width) * 0.02)
        self.unembedding = nn.Parameter(torch.randn(width, spec.d_out) * 0.02)
        self.inward = nn.ParameterList(torch.randn(width, 3 * width) * width**-0.5 for _ in range(spec.layers))
        self.outward = nn.ParameterList(torch.randn(width, width) * width**-0.5 for _ in range(spec.layers))

    def forward(self, X: Tensor) -> Tensor:
        state = self.embedding[X]
        batch, tokens = X.shape
        for inward, outward in zip(self.inward, self.outward):
            seen = norm(state) if self.rule.norm == "pre" else state
            query, key, value = (seen @ inward).view(batch, tokens, 3, self.spec.heads, -1).permute(2, 0, 3, 1, 4)
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=1.0)
            update = mixed.transpose(1, 2).flatten(2) @ outward
            state = state + update if self.rule.residual else update
        return (norm(state) if self.rule.final_norm else state) @ self.unembedding


def step_of(
    model: nn.Module, X: Tensor, labels: Tensor, scored: Tensor, everywhere: bool = True
) -> Callable[[], float]:
    """A closure that does one whole training step and returns milliseconds a sequence."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step() -> float:
        began = time.perf_counter()
        optimizer.zero_grad()
        logits = model(X)[scored] if everywhere else model.at(X, "causal", scored)  # type: ignore[operator]
        functional.cross_entropy(logits, labels[scored]).backward()
        optimizer.step()
        return 1e3 * (time.perf_counter() - began) / len(X)

    return step


def measure(task_name: str, kind: str, variant: str, repeats: int) -> dict[str, float | str | int]:
    heads, layers, d_in, d_head = SHAPES[task_name]
    spec = ff.TargetSpec(heads=heads, layers=layers, d_in=d_in, d_head=d_head)
    rule = NORMED if variant.startswith("pre-norm") else Rule()
    by_contexts = task_name == "dyck" and not variant.endswith("all places")
    task = Dyck() if task_name == "dyck" else KHop(int(task_name[0]))
    batch = BATCH[task_name]
    examples = task.sample(batch, np.random.default_rng(0))
    X, labels, scored = (torch.from_numpy(a) for a in (examples.inputs, examples.labels, examples.scored))
    build = {"sparse": ff.SparseMachine, "random": lambda s: ff.RandomMachine(s, dtype=torch.float32)}[kind]
    machine = build(spec)
    ours = step_of(TrainableProgram(machine, rule, train_unembedding=True), X, labels, scored, not by_contexts)
    full = step_of(FullTarget(spec, rule), X, labels, scored)
    dense = [
        step_of(definition(machine, rule), X[:size], labels[:size], scored[:size])
        for definition in (DenseDefinition, DenseValuesFirst)
        for size in DENSE_BATCHES[task_name]
    ]
    slow = [min(step() for _ in range(2)) for step in dense]
    best = dense[slow.index(min(slow))]
    ours(), full()
    times: list[tuple[float, float, float]] = [(ours(), best(), full()) for _ in range(repeats)]
    ours_ms, dense_ms, full_ms = (statistics.median(column) for column in zip(*times))
    return {
        "task": task_name,
        "machine": kind,
        "variant": variant,
        "width": machine.width,
        "batch": batch,
        "ours_ms": ours_ms,
        "dense_ms": dense_ms,
        "full_ms": full_ms,
        "dense_over_ours": statistics.median(d / o for o, d, _ in times),
        "ours_over_full": statistics.median(o / f for o, _, f in times),
        "gflops": 0.0 if by_contexts else 2e-6 * 3 * path_multiplications(spec, rule, X.shape[1]) / ours_ms,
    }


def path_multiplications(spec: ff.TargetSpec, rule: Rule, tokens: int) -> int:
    """Forward multiplications a sequence of the path engine as it runs (layer 1 by counts); backward is twice that."""
    branching, total = spec.heads + rule.residual, 0
    for layer in range(spec.layers):
        carried = spec.d_in * branching**layer
        if layer == 0:
            total += tokens * spec.d_in * spec.heads * spec.d_in
            continue
        total += tokens * carried * 2 * spec.heads * spec.d_head + spec.heads * tokens**2 * spec.d_head
        last = layer == spec.layers - 1 and rule.plain
        total += spec.heads * tokens**2 * (spec.d_out if last else carried)
        total += tokens * carried**2 if rule.norm else 0
    final = spec.d_in * branching**spec.layers
    return total + tokens * final * spec.d_out + (tokens * final**2 if rule.final_norm else 0)


def peak_gflops() -> float:
    """float32 matrix product, 2048 x 2048, best of five."""
    a = torch.randn(2048, 2048)
    best = float("inf")
    for _ in range(6):
        began = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - began)
    return 2 * 2048**3 / best / 1e9


def rows() -> Iterator[tuple[str, str, str]]:
    for kind in ("sparse", "random"):
        for task in SHAPES:
            yield task, kind, "attention only"
        yield "dyck", kind, "attention only, all places"
    yield "dyck", "random", "pre-norm, all places"
    for task in ("dyck", "1-hop", "2-hop"):
        yield task, "random", "pre-norm"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", help="task/machine or task/machine/variant; all by default")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", help="also write the rows here")
    options = parser.parse_args()
    peak = peak_gflops()
    print(f"{torch.get_num_threads()} threads, float32, matmul peak {peak:.0f} GFLOP/s; ms a sequence")
    print(f"{'task':7}{'machine':8}{'variant':28}{'m':>5}{'batch':>6}{'ours':>9}{'dense':>9}{'full':>9}{'dense/ours':>12}"
          f"{'ours/full':>11}{'of peak':>9}")  # fmt: skip
    found = []
    for task, kind, variant in rows():
        if options.rows and not any(f"{task}/{kind}/{variant}".startswith(name) for name in options.rows):
            continue
        print(f".. {task}, {kind}, {variant}", file=sys.stderr)
        row = measure(task, kind, variant, options.repeats)
        found.append(row)
        print(f"{task:7}{kind:8}{variant:28}{row['width']:5d}{row['batch']:6d}{row['ours_ms']:9.3f}{row['dense_ms']:9.3f}"
              f"{row['full_ms']:9.3f}{row['dense_over_ours']:11.1f}x{row['ours_over_full']:10.2f}x"
              + (f"{row['gflops'] / peak:9.0%}" if row["gflops"] else "        -"), flush=True)  # fmt: skip
    if options.json:
        with open(options.json, "w", encoding="utf-8") as out:
            json.dump({"peak_gflops": peak, "threads": torch.get_num_threads(), "rows": found}, out, indent=2)


if __name__ == "__main__":
    main()
