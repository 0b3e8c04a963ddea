"""Parts of the looped transformer: a layer's parameters, the norm, clocks, and products that add to the state."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fixedformer.loop.looped_spec import LoopedSpec

EPSILON = 1e-6  # added to the mean square


class Matrices(NamedTuple):
    """A layer's matrices as a loop uses them, α and γ folded in; biases may be None."""

    inward: Tensor
    inward_bias: Tensor | None
    outward: Tensor
    outward_bias: Tensor | None
    widen: Tensor
    widen_bias: Tensor | None
    narrow: Tensor
    narrow_bias: Tensor | None


class Layer(nn.Module):
    """The parameters of one layer: queries, keys and values (width, 3 width), output, and the MLP's two matrices."""

    inward_bias: nn.Parameter | None
    outward_bias: nn.Parameter | None
    widen_bias: nn.Parameter | None
    narrow_bias: nn.Parameter | None

    def __init__(self, spec: LoopedSpec, draw: Callable[..., nn.Parameter]) -> None:
        super().__init__()
        width, hidden, residual = spec.width, spec.hidden, (2 * spec.layers) ** -0.5
        self.inward, self.outward = draw(width, 3 * width), draw(width, width, scale=residual)
        self.widen, self.narrow = draw(width, hidden), draw(hidden, width, scale=residual)
        sizes = {"inward": 3 * width, "outward": width, "widen": hidden, "narrow": width}
        for name, size in sizes.items():
            self.register_parameter(f"{name}_bias", nn.Parameter(torch.zeros(size)) if spec.biases else None)

    def matrices(self, alpha: Tensor | None, gamma: Tensor | None) -> Matrices:
        """alpha, gamma (2, width): gains on the way in and gates on the way out, of attention and of the MLP."""
        inward: Tensor = self.inward
        widen: Tensor = self.widen
        outward: Tensor = self.outward
        narrow: Tensor = self.narrow
        out_bias: Tensor | None = self.outward_bias
        narrow_bias: Tensor | None = self.narrow_bias
        if alpha is not None:
            inward, widen = alpha[0][:, None] * inward, alpha[1][:, None] * widen
        if gamma is not None:
            outward, narrow = outward * gamma[0], narrow * gamma[1]
            if out_bias is not None and narrow_bias is not None:
                out_bias, narrow_bias = out_bias * gamma[0], narrow_bias * gamma[1]
        return Matrices(inward, self.inward_bias, outward, out_bias, widen, self.widen_bias, narrow, narrow_bias)


class _Normalise(torch.autograd.Function):
    """x / rms(x); keeps its output, which the next product keeps anyway, and one number a token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)  # squares of float16 overflow
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)  # one pass over x
        scale = (length.square() / x.shape[-1] + EPSILON).rsqrt()
        y: Tensor = (x * scale).to(dtype)
        ctx.save_for_backward(y, scale)
        ctx.dtype = x.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        y, scale = ctx.saved_tensors
        y, gradient = y.to(scale.dtype), gradients[0].to(scale.dtype)
        along = (gradient * y).sum(-1, keepdim=True) / -y.shape[-1]
        return torch.addcmul(gradient, y, along).mul_(scale).to(ctx.dtype), None


def normalise(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """RMSNorm without a gain over the last axis; computed in x's format, returned in `dtype`."""
    y: Tensor = _Normalise.apply(x, dtype or x.dtype)  # type: ignore[no-untyped-call]
    return y


def product_format(x: Tensor) -> torch.dtype:
    """The format that matrix products take x in: autocast's, where it is on (it leaves float64 alone)."""
    kind = x.device.type
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return x.dtype
    lower: torch.dtype = torch.get_autocast_dtype(kind)
    return lower


def sinusoid(steps: Tensor, width: int) -> Tensor:
    """PE(t) of section 4.2: channels 2i and 2i + 1 are sin and cos of t / 10000^(2i / width); (len, width) float64."""
    rate = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64, device=steps.device) / width)
    angle = steps.to(torch.float64)[:, None] * rate
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(-2)


def add_product(state: Tensor, x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    """state + x matrix + bias; in one product, unless autocast would round the state with it."""
    if product_format(state) != state.dtype:
        state = state + x @ matrix
    else:
        state = torch.addmm(state.flatten(0, -2), x.flatten(0, -2), matrix).view_as(state)
    return state if bias is None else state + bias


def select(x: Tensor, rows: Tensor) -> Tensor:
    """Rows of (batch * tokens) of x (batch, tokens, width): (rows, width)."""
    chosen: Tensor = x.flatten(0, 1).index_select(0, rows)
    return chosen


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rotate`, with cosines and sines (tokens, d/2) made before."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def drawer(generator: torch.Generator, deviation: float | None) -> Callable[..., nn.Parameter]:
    """draw(rows, columns): normal with the deviation given, or 1/sqrt(rows)."""

    def draw(height: int, columns: int, scale: float = 1.0, rows: int | None = None) -> nn.Parameter:
        spread = (rows or height) ** -0.5 if deviation is None else deviation
        return nn.Parameter(torch.randn(height, columns, generator=generator) * (scale * spread))

    return draw
