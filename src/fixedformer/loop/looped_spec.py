"""Every switch of a looped transformer, independent of the others, and the named settings made of them."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from fixedformer.errors import SpecError

Timestep = Literal["none", "constant", "adaln", "free"]
CHOICES: dict[str, tuple[str, ...]] = {
    "injection": ("none", "add"),
    "norm": ("none", "pre"),
    "timestep": ("none", "constant", "adaln", "free"),
    "positions": ("none", "learned", "sinusoidal", "rotary"),
    "checkpointing": ("none", "loop", "nested"),
}


@dataclass(frozen=True)
class LoopedSpec:
    """Sizes and switches of a `LoopedTransformer`; `layers=L, loops=1, injection="none"` is a standard transformer.

    d_in: vocabulary, or entries of an input vector. d_out: d_in when None. tokens: the longest sequence (learned
    positions only). mlp_width: hidden width of the GELU MLP, 4 * width when None.

    injection: "add": the input embedding is added to the state before every loop, which starts from zero; "none": the
        state starts as the embedding.
    norm: "pre": RMSNorm before attention and before the MLP. norm_gain: it has a learned gain (with a timestep other
        than "none" the modulation's α is the gain). final_norm: RMSNorm, always with a gain, before the read-out.
    timestep: what a loop knows of its number t = 1, 2, ..: "none"; "adaln": α1, α2, γ1, γ2 = W5 SiLU(TE(t)) + b5, the
        paper's section 4.2, α from one and γ from zero; "free": a parameter of each loop, same start; "constant": the
        same for all loops, so α and γ without a clock (the control: γ from zero alone changes training).
    loss_over: which loops' read-outs enter the loss (their mean): "last", "all", or the last so many.
    backprop_loops: gradients run through so many last loops only; None: through all.
    checkpointing: what is kept for the backward pass: "none": everything; "loop": the state before each loop; "nested":
        about 2 sqrt(loops) states up to 16 loops, 3 cbrt(loops) beyond.
    tied: the read-out is the embedding transposed. biases: of the four matrices of a layer.
    deviation: of the starting weights; None: 1/sqrt(rows). Residual outputs are divided by sqrt(2 * layers).
    """

    d_in: int
    d_out: int | None = None
    width: int = 64
    heads: int = 4
    layers: int = 1
    loops: int = 8
    tokens: int = 128
    mlp_width: int | None = None
    injection: Literal["none", "add"] = "add"
    norm: Literal["none", "pre"] = "pre"
    norm_gain: bool = True
    final_norm: bool = True
    timestep: Timestep = "none"
    positions: Literal["none", "learned", "sinusoidal", "rotary"] = "learned"
    causal: bool = False
    tied: bool = False
    biases: bool = False
    loss_over: Literal["last", "all"] | int = "last"
    backprop_loops: int | None = None
    checkpointing: Literal["none", "loop", "nested"] = "none"
    deviation: float | None = None

    def __post_init__(self) -> None:
        for name in ("d_in", "width", "heads", "layers", "loops", "tokens"):
            if getattr(self, name) < 1:
                raise SpecError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("d_out", "mlp_width"):
            if (size := getattr(self, name)) is not None and size < 1:
                raise SpecError(f"{name} must be at least 1, got {size}; leave it out for its default")
        if self.deviation is not None and not self.deviation > 0:
            raise SpecError(f"deviation must be positive, got {self.deviation}")
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise SpecError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        if self.width % self.heads or (self.positions == "rotary" and self.width // self.heads % 2):
            even = " an even number of channels each" if self.positions == "rotary" else ""
            raise SpecError(f"width must divide into {self.heads} heads{even}, got {self.width}")
        if self.positions == "sinusoidal" and self.width % 2:
            raise SpecError(f"sinusoidal positions need an even width, got {self.width}")
        if self.timestep == "adaln" and self.width % 2:
            raise SpecError(f"timestep 'adaln' needs an even width, got {self.width}")
        if self.tied and self.outputs != self.d_in:
            raise SpecError(f"a tied read-out needs d_out = d_in = {self.d_in}, got d_out = {self.outputs}")
        self._check_loss()

    def _check_loss(self) -> None:
        over, back = self.loss_over, self.backprop_loops
        if over not in ("last", "all") and (not isinstance(over, int) or over < 1):
            raise SpecError(f"loss_over must be 'last', 'all' or a number of last loops, got {over!r}")
        if back is None:
            return
        if back < 1:
            raise SpecError(f"backprop_loops must be at least 1, got {back}; leave it out for all loops")
        if back < self.loops and self.injection == "none":
            raise SpecError("backprop_loops below loops needs injection 'add': else no gradient reaches the embedding")
        if len(self.loss_loops(self.loops)) > back:
            raise SpecError(f"the loss looks at {len(self.loss_loops(self.loops))} loops, gradients reach {back}")

    @property
    def outputs(self) -> int:
        return self.d_in if self.d_out is None else self.d_out

    @property
    def hidden(self) -> int:
        return 4 * self.width if self.mlp_width is None else self.mlp_width

    def loss_loops(self, loops: int) -> range:
        """Numbers (from 1) of the loops whose read-outs enter the loss of a run of `loops`."""
        first = {"last": loops, "all": 1}.get(str(self.loss_over), loops - int(self.loss_over) + 1
                                              if not isinstance(self.loss_over, str) else loops)  # fmt: skip
        return range(max(1, first), loops + 1)

    def standard(self, layers: int) -> "LoopedSpec":
        """The baseline: as many different layers, applied once, nothing injected, no timestep."""
        return replace(
            self, layers=layers, loops=1, injection="none", timestep="none", loss_over="last", backprop_loops=None
        )


# The paper's reasoning models (section 4.2, appendix C.1.3) and its public code, which holds language modelling only:
# norms without gains, nothing injected, tied read-out, GPT-2's start. `clean` is the paper's with both kinds alike but
# for the timestep: the control of an "adaln" model is then timestep="constant", not "none".
SETTINGS: dict[str, dict[str, Any]] = {
    "paper": {"injection": "add", "norm": "pre", "norm_gain": True, "final_norm": True, "positions": "learned"},
    "code": {
        "injection": "none", "norm": "pre", "norm_gain": False, "final_norm": True, "positions": "learned",
        "tied": True, "causal": True, "deviation": 0.02,
    },
    "clean": {"injection": "add", "norm": "pre", "norm_gain": True, "final_norm": True, "positions": "rotary"},
}  # fmt: skip


def setting(name: str) -> dict[str, Any]:
    """The switches of a named setting: "paper", "code" or "clean"; SpecError for another name."""
    if name not in SETTINGS:
        raise SpecError(f"a setting is one of {', '.join(SETTINGS)}, got {name!r}")
    return dict(SETTINGS[name])
