"""How narrow can a universal machine be? A lower bound, its certificate, and a machine that meets it.

The shared-attention model: all attention matrices A^{l,h} are given, to machine and target alike, and a program is a
pair (E, U). What is left of a machine is (E R_V^p U)_p over the paths p, and of a target (W_E M^p W_U)_p. Take one
entry of each: E R_V^p U is linear in the m^2 products of an entry of E with one of U, while the targets
v^{1,h_1} .. v^{L,h_L} span R^{B^L}. So the B^L x m^2 matrix with rows vec(R_V^p) has rank B^L, whence m^2 >= B^L
(docs/theory/blocks.md, section 2). `SharedAttentionMachine` needs H^ceil(L/2) d_in.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import product
from typing import Any

import torch
from torch import Tensor

from fixedformer.capacity import require_memory
from fixedformer.certificate import Certificate, Check
from fixedformer.errors import CapacityError, SpecError
from fixedformer.inputs import as_input, embed_rows
from fixedformer.storage import digest
from fixedformer.target import Target, TargetSpec


@dataclass(frozen=True)
class LowerBound:
    """Widths below which no fixed attention-only machine can serve a spec, whatever its weights; both are proven.

    paths: B^L, B = heads (one more with residual connections): the value paths that a program must set one by one.
    shared_attention: attention given, E and U chosen per target: m >= sqrt(B^L). embedding_only: attention given, U
    fixed, E alone chosen: m >= B^L d_out (E R_V^p U is then linear in a row of E, m numbers for B^L d_out).
    """

    paths: int
    shared_attention: int
    embedding_only: int


def lower_bound(spec: TargetSpec) -> LowerBound:
    """Lower bounds on the width of a machine that serves `spec`; `widths(spec)` gives what the constructions need.

    With residual connections the targets' tensors have v^{l,0} = 1 in every layer; such tensors still span
    R^{(H+1)^L}, so B = H + 1 there. The bounds count value paths alone: queries and keys are taken as given.
    """
    paths = (spec.heads + spec.residual) ** spec.layers
    return LowerBound(paths, _ceil_sqrt(paths), paths * spec.d_out)


def rank_certificate(movers: Sequence[Sequence[Tensor]], subject: str = "value paths") -> Certificate:
    """Whether weights R_V^{l,h}, given as movers[l][h] (m, m), can be universal with attention shared.

    Necessary: the B^L x m^2 matrix with rows vec(R_V^{1,h_1} .. R_V^{L,h_L}) has full row rank. For a residual machine
    give the identity as one more head of every layer. Measured: B^L minus the numerical rank (0 holds).
    """
    width = movers[0][0].shape[0]
    count = math.prod(len(heads) for heads in movers)
    require_memory(16 * count * width**2, f"{count} paths of {width} x {width}", "take fewer layers or a smaller width")
    steps = [[mover.to(torch.float64) for mover in heads] for heads in movers]
    rows = torch.stack([reduce(torch.matmul, path).flatten() for path in product(*steps)])  # (B^L, m^2)
    rank = int(torch.linalg.matrix_rank(rows))
    check = Check(
        claim=f"the {count} x {width**2} matrix of value paths has full row rank",
        bound=0,
        measured=count - rank,
        cases=count,
        scope=f"exhaustive: all {count} paths; rank {rank}",
        source="necessary for universality with shared attention: m^2 >= rank = B^L",
    )
    return Certificate(subject, (check,), context={"width": width, "paths": count, "rank": rank})


@dataclass(frozen=True, eq=False)
class SharedProgram:
    """embedding E (d_in, width) and unembedding U (width, d_out) for one SharedAttentionMachine."""

    embedding: Tensor
    unembedding: Tensor
    machine_fingerprint: str


class SharedAttentionMachine:
    """The machine of the lower bound: attention is handed to it, a program is (E, U), every weight is 0 or 1.

    Width H^k state with k = ceil(L/2), which is the bound itself for even L and state = 1. Blocks are indexed by words
    of k heads. E holds W_E M^p for the words p of the first k layers, U holds M^q W_U for the words q of the rest.
    R_V^{l,h} keeps the words with letter l equal to h (l <= k); R_V^{k+1,h} adds up all blocks (one is left) and puts
    the sum in every block whose first letter is h; later layers keep words by the next letters. So after L layers
    along (p, q) block q holds W_E M^p, and U finishes the product. For odd L the words q are one letter short: U
    reads the blocks whose last letter is 0 (one layer has no sum: U reads every block).

    state: the widest d_model it serves, d_in when left out. width: None, or more than needed (the rest stays unused).
    Raises CapacityError for less, and says whether that is impossible for any machine or only below this
    construction; SpecError for residual specs (the skip is no mask; see `lower_bound` for what is known).
    """

    def __init__(self, spec: TargetSpec, state: int | None = None, width: int | None = None) -> None:
        if spec.residual:
            raise SpecError("a shared-attention machine serves targets without residual connections, got residual=True")
        self.spec, self.state = spec, spec.d_in if state is None else state
        if not isinstance(self.state, int) or self.state < 1:
            raise SpecError(f"state must be a whole number of at least 1, got {state!r}")
        self.letters = (spec.layers + 1) // 2  # k
        needed = spec.heads**self.letters * self.state
        self.width = needed if width is None else width
        if self.width < needed:
            bound = lower_bound(spec)
            if self.width < bound.shared_attention:
                raise CapacityError(
                    f"width {self.width} is impossible: no machine for heads={spec.heads}, layers={spec.layers} is "
                    f"universal with m^2 = {self.width**2} < H^L = {bound.paths}; the least not excluded is "
                    f"{bound.shared_attention}, this construction needs {needed}"
                )
            raise CapacityError(
                f"width {self.width} is below this construction, which needs H^{self.letters} * {self.state} = "
                f"{needed}; the lower bound excludes only widths under {bound.shared_attention}"
            )

    def fingerprint(self) -> str:
        """Hex digest of what is fixed; no program enters."""
        rule = f"shared attention heads={self.spec.heads} layers={self.spec.layers} state={self.state}"
        return digest({}, f"{rule} width={self.width}")

    def compile(self, target: Target) -> SharedProgram:
        """(E, U) that make this machine compute `target`. Raises SpecError where spec or d_model do not fit."""
        if target.spec != self.spec:
            raise SpecError(f"the target is {target.spec}, this machine serves {self.spec}")
        weights = target.weights
        if weights.d_model > self.state:
            raise SpecError(f"the target's d_model is {weights.d_model}, this machine serves up to {self.state}; build "
                            f"it with state={weights.d_model}")  # fmt: skip
        movers = weights.value @ weights.output  # (L, H, d_model, d_model)
        heads, layers, k = self.spec.heads, self.spec.layers, self.letters
        start = weights.embed.unsqueeze(0)  # (words, d_in, d_model), the first letter most significant
        for layer in range(k):
            start = torch.stack([start @ movers[layer, h] for h in range(heads)], dim=1).flatten(0, 1)
        finish = weights.unembed.unsqueeze(0)
        for layer in reversed(range(k, layers)):
            finish = torch.cat([movers[layer, h] @ finish for h in range(heads)])
        # 1, or H for odd L: the last letter of a block's word that q does not use. One layer never sums: U reads all.
        spare = heads ** (2 * k - layers) if layers > 1 else 1
        embedding = start.new_zeros(self.spec.d_in, self.width)
        unembedding = start.new_zeros(self.width, self.spec.d_out)
        blocks = heads**k, self.state
        self._blocks(embedding)[:, :, : weights.d_model] = start.transpose(0, 1)
        unembedding[: blocks[0] * blocks[1]].view(*blocks, -1)[::spare, : weights.d_model] = finish
        return SharedProgram(embedding, unembedding, self.fingerprint())

    def run(self, program: SharedProgram, X: Any, attention: Tensor) -> Tensor:
        """Outputs (..., tokens, d_out) for inputs X and attention (..., layers, heads, tokens, tokens) given."""
        if program.machine_fingerprint != self.fingerprint():
            raise SpecError("the program was compiled for another machine; compile it for this one")
        data = as_input(X, self.spec.d_in, program.embedding.dtype)
        if attention.shape[-4:-2] != (self.spec.layers, self.spec.heads):
            raise SpecError(f"attention must be (..., {self.spec.layers}, {self.spec.heads}, tokens, tokens), got "
                            f"{tuple(attention.shape)}")  # fmt: skip
        k, heads = self.letters, self.spec.heads
        state = self._blocks(embed_rows(data, program.embedding))  # (..., tokens, H^k, D)
        for layer in range(self.spec.layers):
            letter = layer % k if layer >= k else layer
            apart = state.unflatten(-2, (heads**letter, heads, -1))  # (..., tokens, before, letter, after, D)
            if layer == k:
                apart = apart.sum((-4, -3, -2), keepdim=True).expand(apart.shape)
            mixed = [
                torch.einsum("...ij,...jbad->...ibad", attention[..., layer, h, :, :], apart[..., h, :, :])
                for h in range(heads)
            ]
            state = torch.stack(mixed, dim=-3).flatten(-4, -2)
        used = heads**k * self.state
        outputs: Tensor = state.flatten(-2) @ program.unembedding[:used]
        return outputs

    def dense_value(self, layer: int, head: int) -> Tensor:
        """R_V^{l,h} (width, width) as the definition writes it; layers and heads count from 0."""
        k, heads = self.letters, self.spec.heads
        words = list(product(range(heads), repeat=k))
        keep = torch.tensor([float(word[layer % k if layer >= k else layer] == head) for word in words])
        small = torch.ones(len(words), len(words)) * keep if layer == k else torch.diag(keep)
        matrix = torch.zeros(self.width, self.width, dtype=torch.float64)
        used = len(words) * self.state
        matrix[:used, :used] = torch.kron(small.to(torch.float64), torch.eye(self.state, dtype=torch.float64))
        return matrix

    def certify(self) -> Certificate:
        """The rank certificate of this machine's own value paths."""
        spec = self.spec
        movers = [[self.dense_value(layer, head) for head in range(spec.heads)] for layer in range(spec.layers)]
        return rank_certificate(movers, f"shared-attention machine, width {self.width}")

    def _blocks(self, rows: Tensor) -> Tensor:
        """The used coordinates of (..., width) as (..., H^k, state), a view."""
        used = self.spec.heads**self.letters * self.state
        blocks: Tensor = rows[..., :used].unflatten(-1, (-1, self.state))
        return blocks


def _ceil_sqrt(number: int) -> int:
    root = math.isqrt(number)
    return root + (root * root < number)
