"""The simulator's certificate: what was computed, held against `oracle` with bounds from a rounding analysis.

Bounds (docs/theory/prompt.md, Theorem 3; u = eps / 2; k u stands for k u / (1 - k u), hence a factor 1 + 1e-3): a
score is wrong by at most s u M, where M is the largest entry of |X| |A| |X|^T and s counts the roundings that meet one
of its terms; the subtraction and exp add 2 u M + 3 u to the relative error of an exponential. A weight P is then wrong
by at most twice that and the roundings of its row sum, relative to itself; an output by as much and the roundings of
two more products, relative to P |X| |V|. The oracle's own error is counted in the same way.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fixedformer.attention import Mask
from fixedformer.certificate import Certificate, Check
from fixedformer.errors import SpecError
from fixedformer.prompt import oracle
from fixedformer.prompt.sizes import SizeClass
from fixedformer.prompt.target import QueryKey, Scale, prompt_mask, read_target, score_scale

if TYPE_CHECKING:
    from fixedformer.prompt.simulator import AttentionSimulator, Prompt

ROUNDING = "rounding analysis, docs/theory/prompt.md, Theorem 3"
_SECOND_ORDER = 1 + 1e-3


def relative_bounds(size: SizeClass, score_size: float, folded: int = 0) -> tuple[float, float]:
    """Bounds on the relative errors of the attention weights and of the outputs, oracle included.

    score_size: M. folded: width of W_Q where `compile` multiplied W_Q W_K^T itself. A stock backend adds what its wrong
    tokens weigh; numbers given in float64 to a float32 machine are rounded once each.
    """
    u, exact = torch.finfo(size.dtype).eps / 2, torch.finfo(torch.float64).eps / 2
    # A score meets: its inputs rounded to the dtype (X twice, A, or W_Q and W_K), the scale (itself and its product),
    # then the sums of d products (X A, or X W_Q and X W_K) and of d or d_k products.
    if size.d_k is None:
        roundings = 3 + 2 + 2 * size.d + folded
    else:
        roundings = 4 + 2 + 2 * size.d + size.d_k
    exponent = (roundings + 2) * u * score_size + 3 * u  # S - max is at most 2 M; exp
    # the row sum: weight, product, sum and factor c; then the reciprocal and the last product
    total = (size.columns if size.backend != "soft" else size.n) + 4
    weights = math.expm1(2 * exponent + total * u)
    oracle_weights = math.expm1(2 * ((9 + 2) * exact * score_size + 3 * exact) + 3 * exact)
    # X V with both rounded, then P (X V), then W_O, itself rounded
    products = size.d + 2 + size.n + (size.d_v * size.heads + 1 if size.d_out else 0)
    leak = size.tokens * math.exp(-size.sharpness) if size.backend == "stock" else 0.0
    return (
        _SECOND_ORDER * (weights + oracle_weights) + leak,
        _SECOND_ORDER * (weights + products * u + oracle_weights + 8 * exact) + leak,
    )


def certify(
    simulator: "AttentionSimulator",
    prompt: "Prompt",
    query_key: QueryKey,
    value: Any,
    X: Any,
    output: Any,
    mask: Mask,
    scale: Scale,
) -> Certificate:
    """See AttentionSimulator.certify."""
    size = simulator.size
    fingerprint = simulator.fingerprint()
    expected = read_target(size, query_key, value, X, output, mask, scale)
    if prompt.values.ndim != 1 or any(part.ndim != 2 for part in expected.sections.values()):
        raise SpecError("certify takes one target and one input; give them without batch axes")
    heads, bare = _oracle(size, query_key, value, X, mask, scale, expected.rows)
    computed = simulator.run(prompt)
    score_size = max(head.score_size for head in heads)
    folded = len(bare[0][0][0]) if len(bare) == 2 and size.d_k is None else 0
    weight_bound, output_bound = relative_bounds(size, score_size, folded)
    checks = [_prompt_check(size, prompt, expected.sections)]
    if size.backend != "soft":
        checks.append(_score_check(size, heads))
        checks.append(_weights_check(simulator, prompt, heads, weight_bound))
    checks.append(_margin_check(simulator))
    checks.append(_output_check(size, computed, heads, output, output_bound))
    rebuilt = type(simulator)(**{name: getattr(size, name) for name in size.__dataclass_fields__}).fingerprint()
    checks.append(
        Check(
            "weights unchanged: a network built from the sizes alone is the same",
            0.0,
            float(rebuilt != fingerprint) + float(prompt.machine_fingerprint != fingerprint),
            simulator.network.parameters,
            "exhaustive, every fixed number by SHA-256",
            "the weights are a function of the size class",
        )
    )
    context = {"fingerprint": fingerprint, "dtype": str(size.dtype), "backend": size.backend} | simulator.cost()
    return Certificate(f"simulated attention, {_describe(size)}", tuple(checks), {}, context)


def merge(certificates: Sequence[Certificate]) -> Certificate:
    """One certificate for several inputs: of each claim the check that is closest to its bound, with all cases."""
    checks = []
    for same in zip(*[certificate.checks for certificate in certificates]):
        worst = max(same, key=lambda check: (not check.holds, check.measured / check.bound if check.bound else 0.0))
        checks.append(replace(worst, cases=sum(check.cases for check in same)))
    first = certificates[0]
    return replace(first, checks=tuple(checks), context={**first.context, "inputs": len(certificates)})


def _describe(size: SizeClass) -> str:
    return f"n = {size.n}, d = {size.d}, d_v = {size.d_v}, {size.heads} heads, backend {size.backend}"


def _lists(data: Any) -> list[Any]:
    return list(torch.as_tensor(data).detach().to(torch.float64).tolist())


def _oracle(
    size: SizeClass, query_key: QueryKey, value: Any, X: Any, mask: Mask, scale: Scale, rows: int
) -> tuple[list[oracle.HeadResult], tuple[list[Any], ...]]:
    """Direct evaluation of every head from the person's own numbers, not from the prompt."""
    pair = isinstance(query_key, tuple | list) and len(query_key) == 2
    parts = tuple(query_key) if pair else (query_key,)
    bare = tuple(_by_head(size, part) for part in parts)
    values = _by_head(size, value)
    if size.mask == "causal":
        mask = "causal"
    allowed: Any = prompt_mask(mask, rows, rows).tolist()
    factor = score_scale(size, scale)
    results = [
        oracle.attention_head(tuple(part[head] for part in bare), values[head], _lists(X), allowed, factor)
        for head in range(size.heads)
    ]
    return results, bare


def _by_head(size: SizeClass, data: Any) -> list[Any]:
    tensor = torch.as_tensor(data)
    return _lists(tensor.unsqueeze(0) if tensor.ndim == 2 and size.heads == 1 else tensor)


def _prompt_check(size: SizeClass, prompt: "Prompt", sections: dict[str, Tensor]) -> Check:
    layout = size.layout()
    wrong = 0
    for number, (name, _, _) in enumerate(size.section_names()):
        wrong += int((layout.decode(prompt.values, number) != sections[name]).sum())
    return Check("the prompt holds the target's numbers and X, nothing else", 0.0, float(wrong), size.tokens,
                 "exhaustive, every token compared bit by bit", "definition of the encoding")  # fmt: skip


def _score_check(size: SizeClass, heads: list[oracle.HeadResult]) -> Check:
    largest = max(head.score_largest for head in heads)
    return Check("largest |score| within the overflow guard", size.score_limit, largest,
                 size.heads * len(heads[0].weights) ** 2, "exhaustive, every score of this input",
                 "GUARD / 2, docs/theory/prompt.md, Lemma 3" if size.guard else "exp must not overflow")  # fmt: skip


def _margin_check(simulator: "AttentionSimulator") -> Check:
    fixed = simulator._engine.fixed_heads
    sharp = simulator.size.sharpness if simulator.size.backend == "stock" else 1.0
    return Check("position heads: shortfall of the selection margin", 0.0, max(0.0, sharp - simulator.margin),
                 fixed * simulator.size.tokens, "exhaustive, every position head and every token",
                 "distinct integer places differ by at least 1, Lemma 1")  # fmt: skip


def _weights_check(
    simulator: "AttentionSimulator", prompt: "Prompt", heads: list[oracle.HeadResult], bound: float
) -> Check:
    computed = simulator.attention(prompt).to(torch.float64)
    direct = torch.tensor([head.weights for head in heads], dtype=torch.float64)
    tiny = torch.finfo(simulator.size.dtype).tiny / bound  # below it a weight may underflow: no relative error is left
    error = float(((computed - direct).abs() / direct.clamp_min(tiny)).max())
    return Check("attention weights, relative error entry by entry", bound, error, direct.numel(),
                 "exhaustive, every weight of this input", ROUNDING)  # fmt: skip


def _output_check(
    size: SizeClass, computed: Tensor, heads: list[oracle.HeadResult], output: Any, bound: float
) -> Check:
    """max |computed - direct| / max of P |X| |V| (|W_O|): relative to the numbers that were added up."""
    if size.d_out is None:
        direct: Any = [head.output for head in heads]
        sizes: Any = [head.output_size for head in heads]
    else:
        outputs = _by_head(size, output)
        direct = oracle.sum_matrices([oracle.multiply(head.output, out) for head, out in zip(heads, outputs)])
        sizes = oracle.sum_matrices(
            [oracle.multiply(head.output_size, oracle.absolute(out)) for head, out in zip(heads, outputs)]
        )
    truth, scale = (torch.tensor(part, dtype=torch.float64) for part in (direct, sizes))
    largest = float(scale.max())
    difference = float((computed.to(torch.float64) - truth).abs().max())
    return Check("output, relative error", bound, difference / largest if largest else difference, truth.numel(),
                 "exhaustive, every output of this input", ROUNDING)  # fmt: skip
