"""One training step of a looped transformer: ours, a plain re-implementation of the published model's, x-transformers.

    python benchmarks/looped_step.py [--rows small/adaln ...] [--precision bfloat16] [--compile] [--json [FILE]]
    python benchmarks/looped_step.py --memory

Forward + loss + backward + clipping at norm 1 + AdamW, same sizes, same threads, one process, taking turns; medians, of
ratios too. `plain` is what the paper's public code does, written anew: one Linear for queries, keys and values, fused
attention, RMSNorm without gains, GELU, tied read-out at every place, cross-entropy that ignores places without a label;
with timesteps an embedding and a modulation made anew in every loop, for every sequence, applied to the state.
--precision bfloat16: all under autocast, and plain_float32, `plain` without it, beside. --compile: both under
torch.compile too. x-transformers: one layer, tied over the depth, fused attention, RMSNorm; it has no timestep
modulation, and stands beside the model without. It is skipped where it is not installed (the extra `benchmark`).
products_ms: the matrix products of ours alone in float32: there no implementation can leave them out.

saved_bytes: what is alive at the peak of forward and backward beyond parameters and gradients, seen by every tensor
that an operation returns (temporaries are in it too). --memory: that, from 8 to 64 loops, by kind of checkpointing.
"""

import argparse
import json
import math
import statistics
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from fixedformer.loop.looped_spec import LoopedSpec, setting
from fixedformer.loop.transformer import LoopedTransformer

clock = time.perf_counter


@dataclass(frozen=True)
class Size:
    """scored: places with a label in each sequence, from the right; 0 for all."""

    vocabulary: int
    width: int
    heads: int
    loops: int
    batch: int
    tokens: int
    causal: bool
    scored: int


SIZES = {
    "small": Size(40, 64, 4, 8, 32, 20, False, 1),  # the small scale of `reproduce tmlt-table2`
    "reasoning": Size(150, 256, 4, 10, 16, 84, False, 1),  # the paper's edit distance (40), a quarter of its batch
    "language": Size(256, 256, 4, 6, 4, 256, True, 0),
}


class PlainLooped(nn.Module):
    """The published model as its code reads, with or without timesteps."""

    def __init__(self, size: Size, timestep: bool) -> None:
        super().__init__()
        width = size.width
        self.size, self.timestep = size, timestep
        self.tokens, self.places = nn.Embedding(size.vocabulary, width), nn.Embedding(size.tokens, width)
        self.heads_in, self.heads_out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.wide, self.narrow = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.first, self.second = (nn.RMSNorm(width, elementwise_affine=False) for _ in range(2))
        self.last = nn.RMSNorm(width)
        if timestep:
            self.clock = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
            self.modulate = nn.Sequential(nn.SiLU(), nn.Linear(width, 4 * width))

    def attend(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        query, key, value = (
            part.view(batch, tokens, self.size.heads, -1).transpose(1, 2) for part in self.heads_in(x).split(width, 2)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=self.size.causal)
        out: Tensor = self.heads_out(mixed.transpose(1, 2).contiguous().view(batch, tokens, width))
        return out

    def mlp(self, x: Tensor) -> Tensor:
        out: Tensor = self.narrow(functional.gelu(self.wide(x)))
        return out

    def frequencies(self, t: Tensor) -> Tensor:
        angle = t[:, None].float() * torch.exp(-math.log(10000) * torch.arange(128) / 128)[None]
        return torch.cat([angle.cos(), angle.sin()], -1)

    def forward(self, X: Tensor, labels: Tensor) -> Tensor:
        state = self.tokens(X) + self.places(torch.arange(X.shape[1]))
        for t in range(self.size.loops):
            if not self.timestep:
                state = state + self.attend(self.first(state))
                state = state + self.mlp(self.second(state))
                continue
            clock = self.clock(self.frequencies(torch.full((len(X),), t)))
            gate, gate2, scale, scale2 = self.modulate(clock).chunk(4, -1)
            state = state + gate.unsqueeze(1) * self.attend(self.first(state) * (1 + scale.unsqueeze(1)))
            state = state + gate2.unsqueeze(1) * self.mlp(self.second(state) * (1 + scale2.unsqueeze(1)))
        logits = self.last(state) @ self.tokens.weight.mT
        return functional.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1), ignore_index=-1)


def ours_of(size: Size, timestep: bool, **changes: Any) -> LoopedTransformer:
    switches = setting("code") | {"causal": size.causal, "timestep": "adaln" if timestep else "none"} | changes
    loops = switches.pop("loops", size.loops)
    return LoopedTransformer(
        LoopedSpec(
            d_in=size.vocabulary, width=size.width, heads=size.heads, loops=loops, tokens=size.tokens, **switches
        )
    )


def ours_loss(model: LoopedTransformer, X: Tensor, labels: Tensor) -> Tensor:
    scored = labels >= 0
    return functional.cross_entropy(model.readouts(X, which="loss", scored=scored)[0], labels[scored])


def other_of(size: Size) -> nn.Module | None:
    """x-transformers' tied model, or None where it is not installed."""
    try:
        from x_transformers import Decoder, Encoder, TransformerWrapper
    except ImportError:
        return None
    kind = Decoder if size.causal else Encoder
    layers = kind(dim=size.width, depth=size.loops, heads=size.heads, attn_dim_head=size.width // size.heads,
                  weight_tie_layers=True, attn_flash=True, use_rmsnorm=True)  # fmt: skip
    model: nn.Module = TransformerWrapper(
        num_tokens=size.vocabulary, max_seq_len=size.tokens, attn_layers=layers, tie_embedding=True
    )
    return model


def other_loss(model: nn.Module, X: Tensor, labels: Tensor) -> Tensor:
    logits = model(X)
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1)


def data(size: Size) -> tuple[Tensor, Tensor]:
    """Random tokens, and labels at the last `scored` places, -1 elsewhere."""
    generator = torch.Generator().manual_seed(0)
    X, labels = (torch.randint(size.vocabulary, (size.batch, size.tokens), generator=generator) for _ in range(2))
    if size.scored:
        labels[:, : -size.scored] = -1
    return X, labels


def step_of(
    model: nn.Module, loss_of: Callable[..., Tensor], X: Tensor, labels: Tensor, fused: bool, low: bool = False
) -> Callable[[], float]:
    """A closure that does one whole training step and returns its milliseconds."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    groups = [{"params": matrices, "weight_decay": 0.01},
              {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0}]  # fmt: skip
    optimizer = torch.optim.AdamW(groups, lr=1e-4, fused=fused)

    def step() -> float:
        began = clock()
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            loss = loss_of(model, X, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return 1e3 * (clock() - began)

    return step


class Alive(TorchDispatchMode):
    """Counts the bytes of every storage that an operation returns while it is alive, and keeps the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.see(tensor.untyped_storage())
        return out

    def see(self, storage: Any) -> None:
        key, size = storage.data_ptr(), storage.nbytes()
        if not size or key in self.known:
            return
        self.known.add(key)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)
        weakref.finalize(storage, self.gone, key, size)

    def gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.bytes -= size


def saved_bytes(model: LoopedTransformer, X: Tensor, labels: Tensor, low: bool = False) -> int:
    """Peak of live bytes of one forward and backward, less the gradients that remain."""
    model.zero_grad(set_to_none=True)
    with Alive() as alive:
        alive.known |= {p.untyped_storage().data_ptr() for p in (*model.parameters(), X, labels)}
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            loss = ours_loss(model, X, labels)
        loss.backward()
    return alive.peak - sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)


def products(size: Size) -> float:
    """Milliseconds of a step's twelve matrix products a loop, the best of five: a floor for every implementation.

    The last loop counts at scored places only behind its attention, as ours does it.
    """
    rows, width = size.batch * size.tokens, size.width
    x, wide = torch.randn(rows, width), torch.randn(rows, 4 * width)
    three, square, four = (torch.randn(width, k * width) for k in (3, 1, 4))
    heads, best = torch.randn(rows, 3 * width), math.inf
    for _ in range(5):
        began = clock()
        for loop in range(1, size.loops + 1):
            n = size.batch * (size.scored or size.tokens) if loop == size.loops else rows
            x @ three, heads @ three.mT, x.mT @ heads
            x[:n] @ square, x[:n] @ square.mT, x[:n].mT @ x[:n]
            x[:n] @ four, wide[:n] @ four.mT, x[:n].mT @ wide[:n]
            wide[:n] @ four.mT, x[:n] @ four, wide[:n].mT @ x[:n]
        best = min(best, 1e3 * (clock() - began))
    return best


def plain_loss(model: nn.Module, X: Tensor, labels: Tensor) -> Tensor:
    loss: Tensor = model(X, labels)
    return loss


def measure(name: str, timestep: bool, repeats: int, compiled: bool, precision: str) -> dict[str, Any]:
    size, low = SIZES[name], precision == "bfloat16"
    X, labels = data(size)
    ours = ours_of(size, timestep)
    steps = {
        "ours": step_of(ours, ours_loss, X, labels, True, low),
        "plain": step_of(PlainLooped(size, timestep), plain_loss, X, labels, False, low),
    }
    if low:
        steps["plain_float32"] = step_of(PlainLooped(size, timestep), plain_loss, X, labels, False)
    other = None if timestep else other_of(size)
    if other is not None:
        steps["xtransformers"] = step_of(other, other_loss, X, labels, True, low)
    if compiled:
        twin, faster = ours_of(size, timestep), torch.compile(PlainLooped(size, timestep))
        twin.compile_readouts()
        steps["ours_compiled"] = step_of(twin, ours_loss, X, labels, True, low)
        steps["plain_compiled"] = step_of(faster, plain_loss, X, labels, False, low)
    for step in steps.values():
        step(), step()
    times = [{kind: step() for kind, step in steps.items()} for _ in range(repeats)]
    medians = {f"{kind}_ms": statistics.median(row[kind] for row in times) for kind in steps}
    ratios = {f"plain_over_{kind}": statistics.median(row["plain"] / row[kind] for row in times) for kind in steps}
    return {
        "size": name,
        "timestep": "adaln" if timestep else "none",
        "precision": precision,
        **{key: value for key, value in vars(size).items() if key != "scored"},
        "xtransformers_ms": None,
        "products_ms": products(size),
        **medians,
        **ratios,
        "saved_bytes": saved_bytes(ours, X, labels, low),
    }


def memory() -> Iterator[dict[str, Any]]:
    """Bytes by kind of checkpointing, at 8 and 64 loops, and how far the gradient is from the plain one's."""
    size = SIZES["small"]
    X, labels = data(size)
    for timestep in (False, True):
        exact = {}
        for kind in ("none", "loop", "nested"):
            peaks, gap = {}, 0.0
            for loops in (8, 64):
                model = ours_of(size, timestep, loops=loops, checkpointing=kind)
                peaks[loops] = saved_bytes(model, X, labels)
                found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
                exact.setdefault(loops, found)
                gap = max(gap, float((found - exact[loops]).abs().max()))
            yield {"checkpointing": kind, "timestep": "adaln" if timestep else "none", "bytes_8": peaks[8],
                   "bytes_64": peaks[64], "growth": peaks[64] / peaks[8], "gradient_gap": gap}  # fmt: skip


def line(label: str, row: dict[str, Any]) -> str:
    """A row for people: every kind with its milliseconds and how many times faster than plain it is."""
    kinds = [key.removeprefix("plain_over_") for key in row if key.startswith("plain_over_")]
    parts = [f"{kind} {row[f'{kind}_ms']:.1f} ms ({row[f'plain_over_{kind}']:.2f}x)" for kind in kinds]
    return f"{label:16} {', '.join(parts)}; products {row['products_ms']:.1f} ms; {row['saved_bytes'] / 2**20:.1f} MB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", help="size/timestep, e.g. small/adaln; all by default")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--cpu-time", action="store_true", help="CPU time instead of wall time, for a busy machine")
    parser.add_argument("--compile", action="store_true", help="both under torch.compile too")
    parser.add_argument("--memory", action="store_true", help="only what checkpointing keeps")
    parser.add_argument("--json", nargs="?", const="-", help="write the rows as JSON here; to stdout without a name")
    options = parser.parse_args()
    global clock
    clock = time.process_time if options.cpu_time else time.perf_counter
    found: list[dict[str, Any]] = []
    if not options.memory:
        for name in SIZES:
            for timestep in (False, True):
                label = f"{name}/{'adaln' if timestep else 'none'}"
                if options.rows and not label.startswith(tuple(options.rows)):
                    continue
                print(f".. {label}", file=sys.stderr)
                row = measure(name, timestep, options.repeats, options.compile, options.precision)
                found.append(row)
                if options.json != "-":
                    print(line(label, row), flush=True)
    kept = list(memory()) if options.memory or not options.rows else []
    for row in kept:
        if options.json != "-":
            print(f"{row['checkpointing']:7} {row['timestep']:6} {row['bytes_8'] / 2**20:7.2f} MB at 8 loops, "
                  f"{row['bytes_64'] / 2**20:7.2f} MB at 64: {row['growth']:.2f}x, gradient within "
                  f"{row['gradient_gap']:.1e}")  # fmt: skip
    if options.json:
        body = {"threads": torch.get_num_threads(), "clock": clock.__name__, "rows": found, "memory": kept}
        if options.json == "-":
            print(json.dumps(body, indent=2))
        else:
            with open(options.json, "w", encoding="utf-8") as out:
                json.dump(body, out, indent=2)


if __name__ == "__main__":
    main()
