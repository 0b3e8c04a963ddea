"""Parts of `whole_run`: memory that outlives a step, and what stands between a branch's two products."""

import math
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from fixedformer.loop.looped_parts import turned
from fixedformer.loop.low_attention import attend_blocks, backward_blocks, blocks


@cache
def _seen_freed() -> None:
    """glibc maps large tensors anew each time, zeros included, until it has seen a large one freed. What is held below
    never is, so that the temporaries beside it would be mapped anew at every step. Nothing is written, so none used."""
    torch.empty(30 * 2**20, dtype=torch.uint8)


class Workspace:
    """Named memory, made when it is first asked for, made anew when more of it is needed."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory of this shape; what it holds is what was last written under this name."""
        count = math.prod(shape)
        held = self._held.get((name, dtype))
        if held is None or len(held) < count:
            held = self._held[name, dtype] = torch.empty(count, dtype=dtype)
        return held[:count].view(shape)


class Workspaces:
    """Those that no run uses at the moment. A copy or a pickle of it is empty."""

    def __init__(self) -> None:
        _seen_freed()
        self._idle: list[Workspace] = []

    def take(self) -> Workspace:
        return self._idle.pop() if self._idle else Workspace()

    def give(self, space: Workspace) -> None:
        self._idle.append(space)

    def clear(self) -> None:
        self._idle.clear()

    def __reduce__(self) -> tuple[Any, ...]:
        return Workspaces, ()


class Middle(Protocol):
    """What a branch does between its products. rows: the stretch that a loop has of the tokens of all loops.

    inner: (rows of all loops, columns of the first product); after `backward`, the gradient of that product.
    """

    inner: Tensor

    def entry(self, rows: slice) -> Tensor:
        """Where the first product is to be written."""
        ...

    def forward(self, rows: slice, out: Tensor) -> None: ...

    def backward(self, rows: slice, gradient: Tensor) -> Tensor:
        """inner[rows], once the gradient is there, of `gradient` (that of `out`, which may be overwritten)."""
        ...


class Neurons:
    """GELU; its gradient takes the place of its input."""

    def __init__(self, space: Workspace, name: str, rows: int, columns: int, dtype: torch.dtype) -> None:
        self.inner = space.take(f"{name}neurons", (rows, columns), dtype)

    def entry(self, rows: slice) -> Tensor:
        return self.inner[rows]

    def forward(self, rows: slice, out: Tensor) -> None:
        torch.ops.aten.gelu.out(self.inner[rows], out=out)

    def backward(self, rows: slice, gradient: Tensor) -> Tensor:
        inner = self.inner[rows]
        torch.ops.aten.gelu_backward.grad_input(gradient, inner, grad_input=inner)
        return inner


class Heads:
    """Attention of queries (scaled already), keys and values. They are kept head by head, (loops, 3, batch * heads,
    tokens, d), and overwritten by their gradient token by token, as the product has it."""

    def __init__(self, space: Workspace, name: str, loops: int, shape: torch.Size, heads: int, causal: bool,
                 turn: tuple[Tensor, Tensor] | None, dtype: torch.dtype) -> None:  # fmt: skip
        batch, tokens, width = shape
        self.batch, self.heads, self.causal, self.turn = batch, heads, causal, turn
        rows, each = batch * tokens, batch * heads
        self.inner = space.take(f"{name}heads", (loops * rows, 3 * width), dtype)
        self.kept = self.inner.view(loops, 3, each, tokens, width // heads)
        self.product = space.take("heads", (rows, 3 * width), dtype)
        self.mixed = space.take("mixed heads", (each, tokens, width // heads), dtype)
        self.wide = space.take("wide heads", (2, *self.mixed.shape), torch.promote_types(dtype, torch.float32))
        self.attention = [
            space.take(f"{name}attention {start}", (loops, each, stop - start, seen), dtype)
            for start, stop, seen in blocks(tokens, causal)
        ]

    def _by_head(self, x: Tensor) -> Tensor:
        """(..., batch * heads, tokens, d) as (..., batch, tokens, heads, d)."""
        return x.view(*x.shape[:-3], self.batch, self.heads, *x.shape[-2:]).transpose(-3, -2)

    def entry(self, rows: slice) -> Tensor:
        return self.product[: rows.stop - rows.start]

    def forward(self, rows: slice, out: Tensor) -> None:
        t = rows.start // len(self.product)
        kept = self.kept[t]
        parts = self.product.view(self.batch, -1, 3, self.heads, kept.shape[-1]).permute(2, 0, 1, 3, 4)
        self._by_head(kept).copy_(parts)
        if self.turn is not None:
            kept[:2] = turned(kept[:2], *self.turn)
        query, key = self.wide.copy_(kept[:2])
        attend_blocks(query, key, kept[2], self.causal, 1, [x[t] for x in self.attention], self.mixed)
        out.view(self.batch, -1, self.heads, kept.shape[-1]).copy_(self._by_head(self.mixed))

    def backward(self, rows: slice, gradient: Tensor) -> Tensor:
        t = rows.start // len(self.product)
        kept, inner = self.kept[t], self.inner[rows]
        self._by_head(self.mixed).copy_(gradient.view(self.batch, -1, self.heads, kept.shape[-1]))
        query, key, value = kept
        found = backward_blocks(query, key, value, self.causal, [x[t] for x in self.attention], self.mixed)
        parts = inner.view(self.batch, -1, 3, self.heads, kept.shape[-1])
        for number, x in enumerate(found):
            if self.turn is not None and number < 2:
                cos, sin = self.turn
                x = turned(x, cos, -sin)
            parts[:, :, number] = self._by_head(x)
        return inner
