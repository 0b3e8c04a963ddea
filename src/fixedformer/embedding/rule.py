"""How a fixed machine's layers are put together while a program is trained: the variants of the paper's section 5.2.1.

The theorems of this family speak of attention, with or without residual connections. The paper also *trains* programs
on machines whose layers are wrapped in more: residual connections around weights made for none, LayerNorm without
learned scale or shift over the m coordinates, and frozen random MLPs. A rule says which; the weights are the machine's.
"""

from dataclasses import dataclass
from typing import Literal

from fixedformer.errors import SpecError
from fixedformer.target import TargetSpec

EPSILON = 1e-5  # LayerNorm's, as in the paper's tables 5 and 6


@dataclass(frozen=True)
class Rule:
    """The variants.

    residual: x + attention(x) in every layer. norm: None, "pre" (layers read LayerNorm(x)) or "post" (LayerNorm of each
    layer's result); no learned scale or shift. final_norm: one more before the unembedding. mlp_width: hidden width of
    a frozen random GELU MLP after each attention, 0 for none (drawn as PyTorch draws nn.Linear, from mlp_seed).
    """

    residual: bool = False
    norm: Literal["pre", "post"] | None = None
    final_norm: bool = False
    mlp_width: int = 0
    mlp_seed: int = 0

    def __post_init__(self) -> None:
        if self.norm not in (None, "pre", "post"):
            raise SpecError(f"norm must be None, 'pre' or 'post', got {self.norm!r}")
        if self.norm is not None and not self.residual:
            raise SpecError("norm needs residual=True here: the paper's normalised variants all have it")
        if not isinstance(self.mlp_width, int) or self.mlp_width < 0:
            raise SpecError(f"mlp_width must be a whole number of at least 0, got {self.mlp_width!r}")

    @classmethod
    def of(cls, spec: TargetSpec) -> "Rule":
        """The rule by which a machine for `spec` is evaluated everywhere else."""
        return cls(residual=spec.residual)

    @property
    def plain(self) -> bool:
        """No normalisation and no MLP: the layers are linear between their attention matrices."""
        return self.norm is None and not self.final_norm and not self.mlp_width
