"""The class of transformers with real blocks: everything but the weights."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from torch import Tensor
from torch.nn.functional import gelu, relu, silu

from fixedformer.errors import SpecError

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
    "relu": relu,
}
SIZES = ("heads", "layers", "d_in", "d_head", "d_out", "key_heads")


@dataclass(frozen=True)
class BlockSpec:
    """Attention, then an MLP, L times over: TF(H, L, d_in, d) with what people put around it.

    heads, layers, d_in, d_out, d_head, residual, positions, rotary_base: as in `TargetSpec`, but residual by default.
    key_heads: heads of keys and values, a divisor of heads (all of them when left out); head h uses h // (heads /
    key_heads). mlp: None, "gated" (phi(x W_g) * (x W_u) W_d; with activation "silu" SwiGLU, "gelu" GeGLU, "relu" ReGLU)
    or "plain" (phi(x W_g) W_d). activation: "silu", "gelu", "gelu_tanh" or "relu". mlp_width: hidden width r.
    norm: None, "rms" or "layer", before attention, before the MLP and before the unembedding, each with its gain;
    needs residual. norm_eps: added to the mean square. final_norm: False leaves out the one before the unembedding.
    bias: every linear map has a bias and every norm a shift. d_model: hidden width; a fixed machine must know it where
    there is a norm, and is free of it (None) where not.

    A type of its own, and not `TargetSpec` with more fields: everything that is true of attention alone (path trees,
    looped machines, bounds, training in path space) takes a `TargetSpec` and cannot be handed one of these by mistake.
    Raises SpecError for anything else.
    """

    heads: int
    layers: int
    d_in: int
    d_head: int
    d_out: int = None  # type: ignore[assignment]  # an int after __post_init__
    d_model: int | None = None
    residual: bool = True
    mlp: Literal["gated", "plain"] | None = "gated"
    mlp_width: int = 0
    activation: str = "silu"
    norm: Literal["rms", "layer"] | None = None
    norm_eps: float = 1e-5
    final_norm: bool = True
    bias: bool = False
    positions: Literal["rotary"] | None = None
    rotary_base: float = 10000.0
    key_heads: int = None  # type: ignore[assignment]  # an int after __post_init__

    def __post_init__(self) -> None:
        for name, default in (("d_out", self.d_in), ("key_heads", self.heads)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        for name in SIZES + (("mlp_width",) if self.mlp else ()) + (("d_model",) if self.norm else ()):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                why = "; machines with a norm depend on the hidden width" if name == "d_model" else ""
                raise SpecError(f"{name} must be a whole number of at least 1, got {value!r}{why}")
        for name, allowed in (
            ("mlp", (None, "gated", "plain")),
            ("norm", (None, "rms", "layer")),
            ("positions", (None, "rotary")),
            ("activation", tuple(ACTIVATIONS)),
            ("residual", (True, False)),
            ("bias", (True, False)),
            ("final_norm", (True, False)),
        ):
            if getattr(self, name) not in allowed:
                raise SpecError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {getattr(self, name)!r}")
        if not self.mlp and self.mlp_width:
            raise SpecError(f"mlp_width={self.mlp_width} needs an mlp: 'gated' or 'plain'")
        if not self.norm and self.d_model is not None:
            raise SpecError("without a norm the machine serves every d_model: leave d_model out of the spec")
        if self.norm and not self.residual:
            raise SpecError(f"norm={self.norm!r} needs residual=True: the machine takes its statistics from the stream")
        if self.heads % self.key_heads:
            raise SpecError(f"key_heads must divide heads, got {self.key_heads} and {self.heads}")
        if self.positions == "rotary" and self.d_head % 2:
            raise SpecError(f"rotary positions turn channels in pairs: d_head must be even, got {self.d_head}")
        if not self.rotary_base > 0 or not self.norm_eps >= 0:
            raise SpecError(f"rotary_base must be positive and norm_eps at least 0, got {self.rotary_base!r} and "
                            f"{self.norm_eps!r}")  # fmt: skip
