"""Targets from models that exist: their weights in our names and shapes. No model is run, changed or downloaded.

Each function gives a `BlockTarget`, or a `Target` where the model is attention and nothing else. Scores are scaled by
1/sqrt(d) in all these models: the factor goes into the queries. Learned positions become more one-hot inputs: `embed`
stacks the token table on the position table, and `fixedformer.one_hot(ids, vocabulary, positions)` makes the inputs.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from fixedformer.embedding.blocks.spec import BlockSpec
from fixedformer.embedding.blocks.target import BlockTarget
from fixedformer.errors import FixedformerError, SpecError
from fixedformer.target import Card, Target, TargetSpec

ACTIVATION_NAMES = {
    "silu": "silu", "swish": "silu", "relu": "relu", "gelu": "gelu",
    "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh",
}  # fmt: skip


def from_hf(model: Any, outputs: int | None = None, positions: int | None = None) -> BlockTarget:
    """A Llama- or GPT-2-style causal model of the package `transformers` as a target.

    model: the model, or a folder that holds one (then transformers is imported; nothing is ever downloaded). outputs:
    keep the logits of the first tokens only. positions: keep the first learned positions only (GPT-2). The target's
    mask is "causal". Raises SpecError for architectures that no machine here serves, naming what stands in the way,
    and FixedformerError where transformers is needed and missing.
    """
    if isinstance(model, (str, os.PathLike)):
        model = _load_hf(model)
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    if kind not in ("llama", "gpt2"):
        raise SpecError(f"from_hf reads Llama- and GPT-2-style models of transformers, got {type(model).__name__} "
                        f"(model_type {kind!r})")  # fmt: skip
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    if "lm_head.weight" not in state:
        raise SpecError(f"{type(model).__name__} has no lm_head: give the causal language model, not its trunk")
    return _from_llama(config, state, outputs) if kind == "llama" else _from_gpt2(config, state, outputs, positions)


def from_torch(
    layers: nn.Module | Sequence[nn.Module],
    embed: Tensor | None = None,
    unembed: Tensor | None = None,
    residual: bool = False,
) -> BlockTarget | Target:
    """PyTorch's own layers as a target: nn.TransformerEncoder(Layer) with norm_first=True, or nn.MultiheadAttention.

    layers: a module or a sequence of one kind; a TransformerEncoder brings its final norm. embed (d_in, d_model) and
    unembed (d_model, d_out) default to the identity. residual: for MultiheadAttention, whether each layer adds to its
    input. Dropout must be off (eval()). Raises SpecError for anything else, post-norm layers included.

    nn.GELU(approximate="tanh") is read as it is written; PyTorch's own fast path (eval() under no_grad) puts the exact
    GELU in its place, so compare with gradients on, or after torch.backends.mha.set_fastpath_enabled(False).
    """
    final: nn.Module | None = None
    if isinstance(layers, nn.TransformerEncoder):
        final, layers = layers.norm, list(layers.layers)
    stack = [layers] if isinstance(layers, nn.Module) and not isinstance(layers, nn.ModuleList) else list(layers)
    if not stack or any(type(layer) is not type(stack[0]) for layer in stack):
        raise SpecError("from_torch needs at least one layer, all of one kind")
    if any(module.training and any(p > 0 for p in _dropouts(module)) for module in stack):
        raise SpecError("the layers are in training mode with dropout: call eval() first")
    if isinstance(stack[0], nn.MultiheadAttention):
        attentions: list[Any] = stack
        settings: dict[str, Any] = {"mlp": None, "residual": residual}
        extra: dict[str, Tensor] = {}
    elif isinstance(stack[0], nn.TransformerEncoderLayer):
        attentions = [layer.self_attn for layer in stack]
        settings, extra = _encoder(stack, final)
    else:
        raise SpecError("from_torch reads nn.TransformerEncoder, nn.TransformerEncoderLayer and "
                        f"nn.MultiheadAttention, got {type(stack[0]).__name__}")  # fmt: skip
    parts = [_multihead(attention) for attention in attentions]
    weights = {name: torch.stack([part[name] for part in parts]) for name in parts[0]} | extra
    d_model = weights["query"].shape[2]
    embed = torch.eye(d_model, dtype=weights["query"].dtype) if embed is None else embed
    unembed = torch.eye(d_model, dtype=weights["query"].dtype) if unembed is None else unembed
    return _finish(weights | {"embed": embed, "unembed": unembed}, settings)


def from_transformer_lens(
    weights: Mapping[str, Any],
    *,
    activation: str = "gelu",
    norm: str | None = "layer",
    norm_eps: float = 1e-5,
    rotary_base: float | None = None,
    scaled: bool = True,
) -> BlockTarget | Target:
    """Arrays named as TransformerLens names them: "embed.W_E", "blocks.0.attn.W_Q" (heads, d_model, d_head), ..

    Known: embed.W_E, pos_embed.W_pos, blocks.N.attn.{W_Q, W_K, W_V, W_O, b_Q, b_K, b_V, b_O}, blocks.N.mlp.{W_in,
    W_gate, W_out, b_in, b_gate, b_out}, blocks.N.{ln1, ln2}.{w, b}, ln_final.{w, b}, unembed.{W_U, b_U}; what is left
    out is 0, and gains 1 (folded norms). norm: None, "layer" or "rms"; scaled: scores are divided by sqrt(d_head);
    rotary_base: for rotary positions of the half-split kind. A gated MLP there is (act(x W_gate) * (x W_in) + b_in)
    W_out + b_out: b_in stands after the product, so it goes into the last bias. Raises SpecError for names that are not
    read.
    """
    arrays = {name: torch.as_tensor(value).detach() for name, value in weights.items()}
    buffers = (".mask", ".IGNORE", ".rotary_sin", ".rotary_cos")
    arrays = {name: value for name, value in arrays.items() if not name.endswith(buffers)}
    numbers = {int(name.split(".")[1]) for name in arrays if name.startswith("blocks.")}
    if not numbers or numbers != set(range(len(numbers))):
        raise SpecError(f"blocks must be numbered 0, 1, .. without a gap, got {sorted(numbers)}")
    names = {
        "attn.W_Q": "query", "attn.W_K": "key", "attn.W_V": "value", "attn.W_O": "output", "attn.b_Q": "query_bias",
        "attn.b_K": "key_bias", "attn.b_V": "value_bias", "attn.b_O": "output_bias", "mlp.W_out": "down",
        "mlp.b_out": "down_bias", "ln1.w": "attention_gain", "ln1.b": "attention_shift", "ln2.w": "mlp_gain",
        "ln2.b": "mlp_shift",
    }  # fmt: skip
    gated = "blocks.0.mlp.W_gate" in arrays
    names |= {"mlp.W_gate": "gate", "mlp.b_gate": "gate_bias"} if gated else {}
    names |= {"mlp.W_in": "up", "mlp.b_in": "b_in"} if gated else {"mlp.W_in": "gate", "mlp.b_in": "gate_bias"}
    found: dict[str, Tensor] = {}
    for theirs, ours in names.items():
        present = [arrays.pop(f"blocks.{n}.{theirs}", None) for n in sorted(numbers)]
        if any(x is not None for x in present):
            found[ours] = torch.stack([_need(x, f"blocks.{n}.{theirs}") for n, x in enumerate(present)])
    if (after := found.pop("b_in", None)) is not None:
        shift = torch.einsum("lr,lrd->ld", after, _need(found.get("down"), "mlp.W_out, which mlp.b_in needs,"))
        found["down_bias"] = shift + found["down_bias"] if "down_bias" in found else shift
    whole = {"unembed.W_U": "unembed", "unembed.b_U": "unembed_bias", "ln_final.w": "final_gain",
             "ln_final.b": "final_shift"}  # fmt: skip
    found |= {ours: arrays.pop(theirs) for theirs, ours in whole.items() if theirs in arrays}
    tables = [arrays.pop(name) for name in ("embed.W_E", "pos_embed.W_pos") if name in arrays]
    if arrays:
        raise SpecError(f"names that are not read: {', '.join(sorted(arrays))}")
    found |= {"embed": torch.cat(tables)} if tables else {}
    for name in ("embed", "unembed", "query", "key", "value", "output"):
        _need(found.get(name), name)
    settings = {"activation": activation, "norm": norm, "norm_eps": norm_eps}
    settings["mlp"] = ("gated" if gated else "plain") if "down" in found else None
    return _finish(found, settings, scaled=scaled, rotary_base=rotary_base)


def from_tracr(params: Mapping[str, Mapping[str, Any]], heads: int, unembed: Any = None) -> BlockTarget:
    """A compiled program in the form that Tracr writes: residual, ReLU MLP with bias, no norm, scores over sqrt(d).

    params: "token_embed" and "pos_embed" {"embeddings"}, and for each layer N "transformer/layer_N/attn/{query, key,
    value, linear}" and "transformer/layer_N/mlp/{linear_1, linear_2}", each {"w" (inputs, outputs), "b"}. heads: side
    by side in the columns of query, key and value. unembed (d_model, d_out): the identity when left out, so that the
    outputs are the final stream. Raises SpecError for missing arrays.
    """
    arrays = {place: {name: torch.as_tensor(x) for name, x in entry.items()} for place, entry in params.items()}

    def get(place: str, name: str) -> Tensor:
        return _need(arrays.get(place, {}).get(name), f"{place}/{name}").to(torch.float64)

    layers: list[dict[str, Tensor]] = []
    while f"transformer/layer_{len(layers)}/attn/query" in arrays:
        base = f"transformer/layer_{len(layers)}"
        part = {"output": get(f"{base}/attn/linear", "w").unflatten(0, (heads, -1))}
        part["output_bias"] = get(f"{base}/attn/linear", "b")
        for name in ("query", "key", "value"):
            part[name] = _heads(get(f"{base}/attn/{name}", "w"), heads)
            part[f"{name}_bias"] = get(f"{base}/attn/{name}", "b").unflatten(0, (heads, -1))
        for name, theirs in (("gate", "linear_1"), ("down", "linear_2")):
            part[name], part[f"{name}_bias"] = (get(f"{base}/mlp/{theirs}", x) for x in ("w", "b"))
        layers.append(part)
    if not layers:
        raise SpecError("no layer: 'transformer/layer_0/attn/query' is missing")
    tables = [get(place, "embeddings") for place in ("token_embed", "pos_embed") if place in arrays]
    weights = {name: torch.stack([layer[name] for layer in layers]) for name in layers[0]}
    d_model = weights["query"].shape[2]
    out = torch.eye(d_model) if unembed is None else torch.as_tensor(unembed)
    weights |= {"embed": torch.cat(tables) if tables else torch.eye(d_model), "unembed": out}
    target = _finish({name: x.to(torch.float64) for name, x in weights.items()}, {"mlp": "plain", "activation": "relu"})
    assert isinstance(target, BlockTarget)  # it has an MLP
    return target


def _load_hf(folder: str | os.PathLike[str]) -> Any:
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise FixedformerError(
            "reading a model folder needs the package 'transformers', which is not installed: "
            "pip install 'fixedformer[hf]'"
        ) from None
    try:
        return AutoModelForCausalLM.from_pretrained(os.fspath(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        raise SpecError(f"{folder}: no model that transformers can load from this folder ({error})") from None


def _from_llama(config: Any, state: Mapping[str, Tensor], outputs: int | None) -> BlockTarget:
    base_angle = _rotary_base(config)
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    layers = []
    for number in range(config.num_hidden_layers):
        base = f"model.layers.{number}"
        part = {"attention_gain": state[f"{base}.input_layernorm.weight"]}
        part["mlp_gain"] = state[f"{base}.post_attention_layernorm.weight"]
        for name, theirs, count in (("query", "q", heads), ("key", "k", groups), ("value", "v", groups)):
            part[name] = _heads(state[f"{base}.self_attn.{theirs}_proj.weight"].mT, count)
            if (bias := state.get(f"{base}.self_attn.{theirs}_proj.bias")) is not None:
                part[f"{name}_bias"] = bias.unflatten(0, (count, -1))
        part["output"] = state[f"{base}.self_attn.o_proj.weight"].mT.unflatten(0, (heads, -1))
        part |= _optional(state, {"output_bias": f"{base}.self_attn.o_proj.bias"})
        for name in ("gate", "up", "down"):
            part[name] = state[f"{base}.mlp.{name}_proj.weight"].mT
            part |= _optional(state, {f"{name}_bias": f"{base}.mlp.{name}_proj.bias"})
        layers.append(part)
    weights = {name: torch.stack([layer[name] for layer in layers]) for name in layers[0]}
    weights |= {"embed": state["model.embed_tokens.weight"], "final_gain": state["model.norm.weight"]}
    weights["unembed"] = state["lm_head.weight"][:outputs].mT
    settings = {"mlp": "gated", "norm": "rms", "norm_eps": config.rms_norm_eps,
                "activation": _activation(config.hidden_act)}  # fmt: skip
    return _causal(_finish(weights, settings, rotary_base=base_angle), "from a Llama-style model")


def _rotary_base(config: Any) -> float:
    """theta of plain rotary positions, as transformers 5 (`rope_parameters`) or 4 (`rope_theta`, `rope_scaling`) has
    it. SpecError for scaled or partial ones."""
    rope: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        entry = getattr(config, name, None) or {}
        if not isinstance(entry, Mapping) or _rope_kind(entry) != "default":
            raise SpecError("needed plain rotary positions (rope_type 'default'), got another kind than the plain "
                            f"ones: {name}={entry!r}; give a model without scaled positions")  # fmt: skip
        rope |= entry
    part = rope.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
    if part not in (None, 1.0):
        raise SpecError("needed rotary positions on whole heads, got another kind than the plain ones: "
                        f"partial_rotary_factor={part!r}; give a model that turns every channel")  # fmt: skip
    return float(rope.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0)


def _rope_kind(entry: Mapping[str, Any]) -> Any:
    """Its name: "type" in files from before "rope_type"; without either, plain where nothing else is set."""
    plain = "default" if set(entry) <= {"rope_theta", "partial_rotary_factor"} else None
    return entry.get("rope_type", entry.get("type", plain))


def _from_gpt2(config: Any, state: Mapping[str, Tensor], outputs: int | None, positions: int | None) -> BlockTarget:
    for name, wanted in (("scale_attn_by_inverse_layer_idx", False), ("add_cross_attention", False),
                         ("scale_attn_weights", True)):  # fmt: skip
        if getattr(config, name, wanted) != wanted:
            raise SpecError(f"GPT-2 with {name}={getattr(config, name)} is not read")
    heads = config.n_head
    layers = []
    for number in range(config.n_layer):
        base = f"transformer.h.{number}"
        part = {}
        for place, theirs in (("attention", "ln_1"), ("mlp", "ln_2")):
            part[f"{place}_gain"], part[f"{place}_shift"] = (state[f"{base}.{theirs}.{x}"] for x in ("weight", "bias"))
        matrices = state[f"{base}.attn.c_attn.weight"].chunk(3, dim=1)  # stored (inputs, outputs)
        biases = state[f"{base}.attn.c_attn.bias"].chunk(3)
        for name, matrix, bias in zip(("query", "key", "value"), matrices, biases):
            part[name], part[f"{name}_bias"] = _heads(matrix, heads), bias.unflatten(0, (heads, -1))
        part["output"] = state[f"{base}.attn.c_proj.weight"].unflatten(0, (heads, -1))
        part["output_bias"] = state[f"{base}.attn.c_proj.bias"]
        for name, theirs in (("gate", "c_fc"), ("down", "c_proj")):
            part[name], part[f"{name}_bias"] = (state[f"{base}.mlp.{theirs}.{x}"] for x in ("weight", "bias"))
        layers.append(part)
    weights = {name: torch.stack([layer[name] for layer in layers]) for name in layers[0]}
    weights["embed"] = torch.cat([state["transformer.wte.weight"], state["transformer.wpe.weight"][:positions]])
    weights |= {"final_gain": state["transformer.ln_f.weight"], "final_shift": state["transformer.ln_f.bias"]}
    weights["unembed"] = state["lm_head.weight"][:outputs].mT
    settings = {"mlp": "plain", "norm": "layer", "norm_eps": config.layer_norm_epsilon,
                "activation": _activation(config.activation_function)}  # fmt: skip
    return _causal(_finish(weights, settings), "from a GPT-2-style model")


def _encoder(stack: Sequence[Any], final: nn.Module | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Settings and the weights beside attention of nn.TransformerEncoderLayers and their encoder's final norm."""
    if not all(layer.norm_first for layer in stack):
        raise SpecError("norms after the layer (norm_first=False) are not served: only norms before it are")
    epsilons = {layer.norm1.eps for layer in stack} | {layer.norm2.eps for layer in stack}
    if final is not None:
        if not isinstance(final, nn.LayerNorm):
            raise SpecError(f"the final norm must be nn.LayerNorm, got {type(final).__name__}")
        epsilons.add(final.eps)
    if len(epsilons) != 1:
        raise SpecError(f"all norms must have one eps, got {sorted(epsilons)}")
    names = {_torch_activation(layer.activation) for layer in stack}
    if len(names) != 1:
        raise SpecError(f"all layers must have one activation, got {sorted(names)}")
    parts: list[dict[str, Tensor]] = []
    for layer in stack:
        part = {"gate": layer.linear1.weight.mT, "down": layer.linear2.weight.mT}
        modules = {"gate_bias": layer.linear1, "down_bias": layer.linear2, "attention_shift": layer.norm1,
                   "mlp_shift": layer.norm2}  # fmt: skip
        part |= {"attention_gain": layer.norm1.weight, "mlp_gain": layer.norm2.weight}
        parts.append(part | {name: module.bias for name, module in modules.items() if module.bias is not None})
    weights = {name: torch.stack([part[name] for part in parts]) for name in parts[0]}
    if final is not None and final.elementwise_affine:
        weights |= {"final_gain": final.weight} | ({} if final.bias is None else {"final_shift": final.bias})
    settings = {"mlp": "plain", "activation": _activation(names.pop()), "norm": "layer", "norm_eps": epsilons.pop(),
                "final_norm": final is not None}  # fmt: skip
    return settings, weights


def _multihead(attention: nn.MultiheadAttention) -> dict[str, Tensor]:
    if attention.in_proj_weight is None or attention.bias_k is not None or attention.add_zero_attn:
        raise SpecError("nn.MultiheadAttention with its own key or value width, bias_k or add_zero_attn is not read")
    heads, part = attention.num_heads, dict[str, Tensor]()
    matrices = attention.in_proj_weight.chunk(3)  # each (outputs, inputs)
    for name, matrix in zip(("query", "key", "value"), matrices):
        part[name] = _heads(matrix.mT, heads)
    if attention.in_proj_bias is not None:
        for name, bias in zip(("query_bias", "key_bias", "value_bias"), attention.in_proj_bias.chunk(3)):
            part[name] = bias.unflatten(0, (heads, -1))
        part["output_bias"] = attention.out_proj.bias
    part["output"] = attention.out_proj.weight.mT.unflatten(0, (heads, -1))
    return part


def _finish(
    weights: Mapping[str, Tensor], settings: Mapping[str, Any], scaled: bool = True, rotary_base: float | None = None
) -> BlockTarget | Target:
    """The target with these weights: sizes are read off the shapes, and attention alone becomes a `Target`."""
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in weights.items()}
    query, key = tensors["query"], tensors["key"]
    if scaled:
        factor = query.shape[3] ** -0.5
        tensors["query"] = query * factor
        if "query_bias" in tensors:
            tensors["query_bias"] = tensors["query_bias"] * factor
    positions = None if rotary_base is None else "rotary"
    bias = any(name.endswith(("bias", "shift")) for name in tensors)
    sizes: dict[str, Any] = {
        "heads": query.shape[1], "layers": query.shape[0], "d_in": tensors["embed"].shape[0], "d_head": query.shape[3],
        "d_out": tensors["unembed"].shape[1], "positions": positions, "rotary_base": rotary_base or 10000.0,
    }  # fmt: skip
    norm, mlp, residual = settings.get("norm"), settings.get("mlp"), settings.get("residual", True)
    if norm is None and mlp is None and not bias and key.shape[1] == query.shape[1]:
        return Target(TargetSpec(**sizes, residual=residual), card=None, **tensors)
    known = {field.name for field in fields(BlockSpec)}
    chosen = {name: value for name, value in settings.items() if name in known}
    if mlp is None:
        chosen.pop("activation", None)
    spec = BlockSpec(
        **sizes | chosen, bias=bias, key_heads=key.shape[1], mlp_width=tensors["gate"].shape[2] if mlp else 0,
        d_model=query.shape[2] if norm else None,
    )  # fmt: skip
    return BlockTarget(spec, card=None, **tensors)


def _causal(target: BlockTarget | Target, description: str) -> BlockTarget:
    assert isinstance(target, BlockTarget)  # these models have MLPs
    return BlockTarget(target.spec, card=Card(mask="causal", description=description), **target.weights)


def _heads(matrix: Tensor, heads: int) -> Tensor:
    """(d_model, heads * d) -> (heads, d_model, d)."""
    split: Tensor = matrix.unflatten(1, (heads, -1))
    return split.transpose(0, 1)


def _activation(name: str) -> str:
    if name not in ACTIVATION_NAMES:
        raise SpecError(f"activation {name!r} is not served; these are: {', '.join(sorted(ACTIVATION_NAMES))}")
    return ACTIVATION_NAMES[name]


def _torch_activation(activation: Callable[[Tensor], Tensor]) -> str:
    """The name, in `transformers`' words, of a function or module."""
    if isinstance(activation, nn.GELU) and activation.approximate == "tanh":
        return "gelu_pytorch_tanh"
    return getattr(activation, "__name__", type(activation).__name__.lower())


def _optional(state: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    return {ours: state[theirs] for ours, theirs in names.items() if theirs in state}


def _need(value: Tensor | None, name: str) -> Tensor:
    if value is None:
        raise SpecError(f"{name} is missing")
    return value


def _dropouts(module: nn.Module) -> list[float]:
    rates = [part.p for part in module.modules() if isinstance(part, nn.Dropout)]
    return rates + [part.dropout for part in module.modules() if isinstance(part, nn.MultiheadAttention)]
