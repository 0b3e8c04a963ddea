"""A target whose own weights are trained: what the paper calls fully trained."""

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm

from fixedformer.attention import Mask
from fixedformer.errors import SpecError
from fixedformer.inputs import as_input
from fixedformer.target import Card, Target, TargetSpec, Weights, forward, layer_update


class TrainableTarget(nn.Module):
    """Parameters of an attention-only transformer, optionally with LayerNorm (no scale or shift) and a GELU MLP.

    Starts as PyTorch draws nn.Embedding and nn.Linear: token table N(0, 1), every other matrix uniform on
    (-1, 1) / sqrt(inputs). k-hop tasks train in a half to a third of the steps that smaller token tables take. Scores
    carry 1/sqrt(d_head) while training, folded into `query` by `to_target`. norm: None, "pre" or "post" with
    final_norm, as in embedding.rule.
    """

    def __init__(
        self,
        spec: TargetSpec,
        d_model: int,
        seed: int = 0,
        norm: str | None = None,
        final_norm: bool = False,
        mlp_width: int = 0,
    ) -> None:
        super().__init__()
        if norm not in (None, "pre", "post"):
            raise SpecError(f"norm must be None, 'pre' or 'post', got {norm!r}")
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int, inputs: int) -> nn.Parameter:
            return nn.Parameter((torch.rand(shape, generator=generator) * 2 - 1) * inputs**-0.5)

        heads = (spec.layers, spec.heads)
        self.spec, self.norm, self.final_norm = spec, norm, final_norm
        self.weights = nn.ParameterDict(
            {
                "query": draw(*heads, d_model, spec.d_head, inputs=d_model),
                "key": draw(*heads, d_model, spec.d_head, inputs=d_model),
                "value": draw(*heads, d_model, spec.d_head, inputs=d_model),
                "output": draw(*heads, spec.d_head, d_model, inputs=spec.heads * spec.d_head),
                "embed": nn.Parameter(torch.randn(spec.d_in, d_model, generator=generator)),
                "unembed": draw(d_model, spec.d_out, inputs=d_model),
            }
        )
        pairs = [
            (draw(d_model, mlp_width, inputs=d_model), draw(mlp_width, d_model, inputs=mlp_width))
            for _ in range(spec.layers if mlp_width else 0)
        ]
        self.mlp_in = nn.ParameterList(pair[0] for pair in pairs)
        self.mlp_out = nn.ParameterList(pair[1] for pair in pairs)

    def used(self) -> Weights:
        """The weights as they are used: 1/sqrt(d_head) folded into the queries."""
        named = dict(self.weights.items())
        return Weights(**{**named, "query": named["query"] * self.spec.d_head**-0.5})

    def forward(self, X: Tensor, mask: Mask = "causal") -> Tensor:
        """Outputs (..., tokens, d_out)."""
        weights = self.used()
        data = as_input(X, self.spec.d_in, weights.query.dtype, weights.query.device)
        if self.plain:
            return forward(self.spec, weights, data, mask)
        state = weights.embed[data] if not data.is_floating_point() else data @ weights.embed
        for layer in range(self.spec.layers):
            seen = _normed(state) if self.norm == "pre" else state
            update = layer_update(self.spec, weights, layer, seen, mask)
            state = state + update if self.spec.residual else update
            if self.mlp_in:
                seen = _normed(state) if self.norm == "pre" else state
                update = gelu(seen @ self.mlp_in[layer]) @ self.mlp_out[layer]
                state = state + update if self.spec.residual else update
            state = _normed(state) if self.norm == "post" else state
        return (_normed(state) if self.final_norm else state) @ weights.unembed

    @property
    def plain(self) -> bool:
        return self.norm is None and not self.final_norm and not self.mlp_in

    def to_target(self, card: Card | None = None) -> Target:
        """The trained target; SpecError for one with LayerNorm or an MLP, which `Target` has no place for."""
        if not self.plain:
            raise SpecError(
                "a target with LayerNorm or an MLP is no attention-only Target; train it without to compile"
            )
        named = {name: tensor.detach().clone() for name, tensor in self.used().named().items()}
        return Target(self.spec, **named, card=card)


def _normed(x: Tensor) -> Tensor:
    return layer_norm(x, x.shape[-1:], eps=1e-5)
