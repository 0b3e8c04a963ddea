"""Real layers as they are stored, against the libraries' own forward passes written out."""

import pytest
import torch
from torch import Tensor, nn

from fixedformer.errors import SpecError, StorageError
from fixedformer.prompt.layers import AttentionLayer, read_layer
from fixedformer.prompt.simulator import AttentionSimulator

from .conftest import gaussian, relative

D, HEADS, N = 6, 3, 5


def simulated(layer: AttentionLayer, X: Tensor) -> Tensor:
    size = {"d_k": layer.query.shape[2], "d_out": None if layer.output is None else layer.output.shape[2]}
    simulator = AttentionSimulator(len(X), layer.query.shape[1], layer.value.shape[2], layer.heads, **size)
    prompt = simulator.compile(
        (layer.query, layer.key), layer.value, layer.extend(X), output=layer.output, scale=layer.scale
    )
    return simulator.run(prompt)


def linear_attention(
    parts: dict[str, nn.Linear], X: Tensor, groups: int = HEADS, scale: float = (D // HEADS) ** -0.5
) -> Tensor:
    """Attention from four Linear modules, as transformers writes it; keys and values in `groups` heads."""
    q = parts["q"](X).view(len(X), HEADS, -1).transpose(0, 1)
    k, v = (parts[name](X).view(len(X), groups, -1).transpose(0, 1) for name in "kv")
    k, v = (part.repeat_interleave(HEADS // groups, 0) for part in (k, v))
    out = torch.softmax(scale * (q @ k.mT), -1) @ v
    out = out.transpose(0, 1).reshape(len(X), -1)
    return parts["o"](out) if "o" in parts else out


def linears(names: str, bias: bool = True, groups: int = HEADS) -> dict[str, nn.Linear]:
    torch.manual_seed(3)
    width = D // HEADS * groups
    return {name: nn.Linear(D, width if name in "kv" else D, bias=bias, dtype=torch.float64) for name in names}


def named(names: dict[str, str], parts: dict[str, nn.Linear]) -> dict[str, Tensor]:
    return {f"{names[part]}.{kind}": tensor.detach()
            for part, linear in parts.items() for kind, tensor in linear.named_parameters()}  # fmt: skip


@pytest.mark.parametrize("bias", [True, False])
def test_multihead_attention(bias: bool) -> None:
    torch.manual_seed(1)
    module = nn.MultiheadAttention(D, HEADS, bias=bias, batch_first=True, dtype=torch.float64)
    if bias:
        nn.init.normal_(module.in_proj_bias)
        nn.init.normal_(module.out_proj.bias)
    X = gaussian(N, D)
    truth = module(X, X, X, need_weights=False)[0].detach()
    layer = read_layer(module.state_dict(), HEADS)
    assert layer.ones == bias
    assert relative(simulated(layer, X), truth) <= 1e-13


NAMINGS = {
    "bert": {"q": "attention.self.query", "k": "attention.self.key", "v": "attention.self.value",
             "o": "attention.output.dense"},
    "vit": {"q": "attention.attention.query", "k": "attention.attention.key", "v": "attention.attention.value",
            "o": "attention.output.dense"},
    "opt": {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.out_proj"},
    "distilbert": {"q": "attention.q_lin", "k": "attention.k_lin", "v": "attention.v_lin", "o": "attention.out_lin"},
    "bert without output": {"q": "self.query", "k": "self.key", "v": "self.value"},
}  # fmt: skip


@pytest.mark.parametrize("naming", NAMINGS)
def test_transformers_layers(naming: str) -> None:
    names = NAMINGS[naming]
    parts = linears("".join(names))
    state = {f"layer.0.{name}": tensor for name, tensor in named(names, parts).items()}
    # the rest of a block, which is not attention: the output of BERT's and ViT's MLP has the same last names
    state |= {"layer.0.intermediate.dense.weight": gaussian(7, D), "layer.0.output.dense.weight": gaussian(D, 7)}
    X = gaussian(N, D)
    layer = read_layer(state, HEADS, "layer.0")
    result = simulated(layer, X)
    assert (layer.output is None) == ("o" not in names)
    assert ("no output projection found: heads are concatenated" in layer.note) == ("o" not in names)
    if "o" not in names:
        result = result.movedim(0, 1).flatten(1)
    assert relative(result, linear_attention(parts, X).detach()) <= 1e-13


def test_attention_saved_by_itself() -> None:
    """The state dicts of ViTAttention and BertAttention alone: the module around the queries has no name there."""
    parts, X = linears("qkvo"), gaussian(N, D)
    truth = linear_attention(parts, X).detach()
    for inner in ("attention", "self"):
        names = {"q": f"{inner}.query", "k": f"{inner}.key", "v": f"{inner}.value", "o": "output.dense"}
        assert relative(simulated(read_layer(named(names, parts), HEADS), X), truth) <= 1e-13


@pytest.mark.parametrize(
    ("queries", "places"),
    [
        ("attention.attention.query", "attention.output.dense.weight"),
        ("attn.q_proj", "attn.out_proj.weight, attn.o_proj.weight"),
        ("attention.q_lin", "attention.out_lin.weight"),
    ],
)
def test_a_missing_output_projection_is_said_with_what_was_looked_for(queries: str, places: str) -> None:
    inside, _, own = queries.rpartition(".")
    kinds = {"q": own, "k": own.replace("q", "k", 1), "v": own.replace("q", "v", 1)}
    kinds |= {"k": "key", "v": "value"} if own == "query" else {}
    layer = read_layer(named({part: f"{inside}.{kind}" for part, kind in kinds.items()}, linears("qkv")), HEADS)
    assert layer.output is None
    assert "no output projection found: heads are concatenated" in layer.note
    assert f"looked for {places}" in layer.note


@pytest.mark.parametrize("given", [None, 1.0, 0.3])
def test_the_scale_of_the_scores(given: float | None) -> None:
    """GPT-Neo's layers: q_proj .. out_proj, and no scale at all. Biases of queries are scaled with the rest."""
    parts, X = linears("qkvo"), gaussian(N, D)
    names = {part: f"attn.attention.{'out' if part == 'o' else part}_proj" for part in "qkvo"}
    layer = read_layer(named(names, parts), HEADS, scale=given)
    usual = (D // HEADS) ** -0.5
    assert layer.scale == (usual if given is None else given)
    truth = {scale: linear_attention(parts, X, scale=scale).detach() for scale in (usual, 1.0, 0.3)}
    assert relative(simulated(layer, X), truth[layer.scale]) <= 1e-13
    assert all(relative(truth[layer.scale], other) > 1e-3 for scale, other in truth.items() if scale != layer.scale)
    assert "rotary, as in GPT-J" in layer.note
    assert "GPT-Neo's is 1" in layer.note


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_that_are_refused(scale: float) -> None:
    with pytest.raises(SpecError, match=r"scale must be a positive number, got .*; leave it out for 1/sqrt"):
        read_layer(nn.MultiheadAttention(D, HEADS).state_dict(), HEADS, scale=scale)


@pytest.mark.parametrize("foreign", ["q_norm.weight", "k_norm.weight", "q_layernorm.bias", "sinks"])
def test_weights_that_change_the_scores_are_refused(foreign: str) -> None:
    """Qwen3 normalises queries and keys: without that, what is certified would be another layer."""
    parts = linears("qkvo", bias=False)
    state = {f"layers.{n}.self_attn.{part}_proj.weight": linear.weight.detach()
             for n in (0, 1) for part, linear in parts.items()}  # fmt: skip
    state[f"layers.0.self_attn.{foreign}"] = torch.ones(D // HEADS)
    with pytest.raises(SpecError, match=rf"got one with layers\.0\.self_attn\.{foreign} too .*choose a layer without"):
        read_layer(state, HEADS, "layers.0")
    assert read_layer(state, HEADS, "layers.1").name == "layers.1.self_attn."


def test_grouped_queries_and_their_note() -> None:
    parts = linears("qkvo", bias=False, groups=1)
    state = {f"self_attn.{name}_proj.weight": part.weight.detach() for name, part in parts.items()}
    layer = read_layer(state, HEADS)
    assert "rotate" in layer.note
    X = gaussian(N, D)
    assert relative(simulated(layer, X), linear_attention(parts, X, groups=1).detach()) <= 1e-13


def test_gpt2_fused_and_transposed() -> None:
    parts = linears("qkvo")
    state = {
        "h.0.attn.c_attn.weight": torch.cat([parts[name].weight for name in "qkv"]).mT.detach(),
        "h.0.attn.c_attn.bias": torch.cat([parts[name].bias for name in "qkv"]).detach(),
        "h.0.attn.c_proj.weight": parts["o"].weight.mT.detach(),
        "h.0.attn.c_proj.bias": parts["o"].bias.detach(),
        "h.0.mlp.c_proj.weight": gaussian(D, D),
    }
    X = gaussian(N, D)
    assert relative(simulated(read_layer(state, HEADS), X), linear_attention(parts, X).detach()) <= 1e-13


def test_refusals() -> None:
    state = nn.MultiheadAttention(D, HEADS).state_dict()
    two = {f"{layer}.{name}": tensor for layer in ("a", "b") for name, tensor in state.items()}
    with pytest.raises(SpecError, match=r"holds 2 attention layers; choose one of 'a', 'b'"):
        read_layer(two, HEADS)
    assert read_layer(two, HEADS, "b").name == "b."
    with pytest.raises(StorageError, match="no attention layer under 'c'"):
        read_layer(two, HEADS, "c")
    with pytest.raises(StorageError, match=r"no attention layer: .* the file holds w"):
        read_layer({"w": gaussian(2, 2)}, 1)
    with pytest.raises(SpecError, match="6 query rows, which 4 heads cannot share"):
        read_layer(state, 4)
    with pytest.raises(StorageError, match=r"needs a tensor 'out_proj.weight'"):
        read_layer({"in_proj_weight": state["in_proj_weight"]}, HEADS)
    broken = {name: tensor.clone() for name, tensor in state.items()}
    broken["in_proj_weight"][0, 0] = float("nan")
    with pytest.raises(SpecError, match="query holds 1 NaN"):
        read_layer(broken, HEADS)
    with pytest.raises(SpecError, match="bias_k"):
        read_layer(nn.MultiheadAttention(D, HEADS, add_bias_kv=True).state_dict(), HEADS)
    with pytest.raises(SpecError, match="cross-attention"):
        read_layer(nn.MultiheadAttention(D, HEADS, kdim=4, vdim=4).state_dict(), HEADS)
    with pytest.raises(SpecError, match=r"takes inputs \(..., n, 6\)"):
        read_layer(state, HEADS).extend(gaussian(5, 7))
