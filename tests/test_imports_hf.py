"""`from_hf` without the library: configurations and state dicts as transformers names them, against the formulas."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import gelu, silu

import fixedformer as ff

IDS = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])
VOCABULARY, D, HEADS = 10, 8, 2


def relative(a, b):
    return float((a - b).abs().max() / b.abs().max())


def through_program(target, X):
    machine = ff.SparseBlockMachine(target.spec)
    return machine.run(machine.compile(target), X, target.card.mask)


def fake(config, state):
    """What from_hf looks at of a model."""
    return SimpleNamespace(config=SimpleNamespace(**config), state_dict=lambda: state)


def draw(shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) * 0.5 for name, shape in shapes.items()}


# ---- Llama: RMSNorm, grouped rotary attention, a gated MLP with silu

LLAMA = {"model_type": "llama", "num_attention_heads": HEADS, "num_key_value_heads": 1, "num_hidden_layers": 2,
         "rms_norm_eps": 1e-3, "hidden_act": "silu", "hidden_size": D}  # fmt: skip
WIDTH = 6  # of a head: not D / HEADS, as config.head_dim allows
V4 = {"plain": {"rope_theta": 500.0, "rope_scaling": None},
      "no scaling named": {"rope_theta": 500.0},
      "default scaling": {"rope_theta": 500.0, "rope_scaling": {"rope_type": "default"}},
      "default scaling, older": {"rope_theta": 500.0, "rope_scaling": {"type": "default"}}}  # fmt: skip
V5 = {"plain": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
      "no type": {"rope_parameters": {"rope_theta": 500.0}},
      "whole heads": {"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 1.0}},
      "also the older names": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
                               "rope_scaling": {"rope_type": "default", "rope_theta": 500.0}}}  # fmt: skip


def llama_state(biases=False):
    shapes = {
        "model.embed_tokens.weight": (VOCABULARY, D),
        "model.norm.weight": (D,),
        "lm_head.weight": (VOCABULARY, D),
    }
    for n in range(2):
        base = f"model.layers.{n}"
        shapes |= {f"{base}.input_layernorm.weight": (D,), f"{base}.post_attention_layernorm.weight": (D,)}
        linears = {"self_attn.q_proj": (HEADS * WIDTH, D), "self_attn.k_proj": (WIDTH, D),
                   "self_attn.v_proj": (WIDTH, D), "self_attn.o_proj": (D, HEADS * WIDTH), "mlp.gate_proj": (5, D),
                   "mlp.up_proj": (5, D), "mlp.down_proj": (D, 5)}  # fmt: skip
        shapes |= {f"{base}.{name}.weight": shape for name, shape in linears.items()}
        shapes |= {f"{base}.{name}.bias": shape[:1] for name, shape in linears.items()} if biases else {}
    return draw(shapes)


def llama_logits(state, base, ids):
    """One sequence. Channels i and i + WIDTH/2 of a head are one complex number, turned by place * base^(-2i/WIDTH)."""

    def linear(x, name):
        out = x @ state[f"{name}.weight"].T
        return out + state[f"{name}.bias"] if f"{name}.bias" in state else out

    def norm(x, name):
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-3) * state[f"{name}.weight"]

    def turn(x):
        half = WIDTH // 2
        angles = torch.outer(torch.arange(len(x)).double(), base ** (-torch.arange(half).double() * 2 / WIDTH))
        turned = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([turned.real, turned.imag], 1)

    x = state["model.embed_tokens.weight"][ids]
    hidden = torch.ones(len(ids), len(ids)).triu(1).bool()
    for n in range(2):
        layer = f"model.layers.{n}"
        a = norm(x, f"{layer}.input_layernorm")
        q, k, v = (linear(a, f"{layer}.self_attn.{name}_proj") for name in "qkv")
        heads = []
        for h in range(HEADS):
            scores = turn(q[:, h * WIDTH : (h + 1) * WIDTH]) @ turn(k).T / math.sqrt(WIDTH)
            heads.append(scores.masked_fill(hidden, -math.inf).softmax(-1) @ v)
        x = x + linear(torch.cat(heads, 1), f"{layer}.self_attn.o_proj")
        a = norm(x, f"{layer}.post_attention_layernorm")
        gated = silu(linear(a, f"{layer}.mlp.gate_proj")) * linear(a, f"{layer}.mlp.up_proj")
        x = x + linear(gated, f"{layer}.mlp.down_proj")
    return norm(x, "model.norm") @ state["lm_head.weight"].T


@pytest.mark.parametrize("rope", [*V4.values(), *V5.values()],
                         ids=[*(f"v4 {x}" for x in V4), *(f"v5 {x}" for x in V5)])  # fmt: skip
def test_llama_of_either_version(rope):
    state = llama_state()
    target = ff.from_hf(fake(LLAMA | rope, state))
    truth = torch.stack([llama_logits(state, 500.0, ids) for ids in IDS])
    other = torch.stack([llama_logits(state, 10000.0, ids) for ids in IDS])
    assert target.spec.rotary_base == 500.0
    assert relative(other, truth) > 1e-4, "the base must matter here"
    assert relative(target(IDS, "causal"), truth) <= 1e-12


@pytest.mark.parametrize("rope", [{}, {"rope_parameters": None, "rope_scaling": None}, {"rope_theta": None}])
def test_llama_from_before_the_base_was_named(rope):
    state = llama_state()
    truth = torch.stack([llama_logits(state, 10000.0, ids) for ids in IDS])
    assert relative(ff.from_hf(fake(LLAMA | rope, state))(IDS, "causal"), truth) <= 1e-12


def test_llama_with_biases_through_its_program():
    state = llama_state(biases=True)
    target = ff.from_hf(fake(LLAMA | V4["plain"], state), outputs=3)
    assert (target.spec.key_heads, target.spec.d_head, target.spec.d_out, target.card.mask) == (1, WIDTH, 3, "causal")
    truth = torch.stack([llama_logits(state, 500.0, ids) for ids in IDS])[..., :3]
    assert relative(through_program(target, IDS), truth) <= 1e-9


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling={'rope_type': 'llama3', "),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling={'type': 'linear', "),
        ({"rope_scaling": {"factor": 2.0}}, "rope_scaling={'factor': 2.0}; give a model without scaled positions"),
        ({"rope_scaling": "linear"}, "rope_scaling='linear'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_parameters={'rope_type': 'yarn', "),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5; give a model"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor=0.25; give a model"),
    ],
)
def test_rotary_positions_that_are_refused(rope, message):
    with pytest.raises(ff.SpecError) as refusal:
        ff.from_hf(fake(LLAMA | {"rope_theta": 500.0} | rope, llama_state()))
    assert message in str(refusal.value)
    assert "another kind than the plain ones" in str(refusal.value)


# ---- GPT-2: LayerNorm, fused projections stored (inputs, outputs), learned positions, GELU by tanh

GPT2 = {"model_type": "gpt2", "n_head": HEADS, "n_layer": 2, "layer_norm_epsilon": 1e-3,
        "activation_function": "gelu_new"}  # fmt: skip
POSITIONS = 7


def gpt2_state():
    shapes = {"transformer.wte.weight": (VOCABULARY, D), "transformer.wpe.weight": (POSITIONS, D),
              "transformer.ln_f.weight": (D,), "transformer.ln_f.bias": (D,),
              "lm_head.weight": (VOCABULARY, D)}  # fmt: skip
    for n in range(2):
        maps = {"attn.c_attn": (D, 3 * D), "attn.c_proj": (D, D), "mlp.c_fc": (D, 5), "mlp.c_proj": (5, D)}
        for name, shape in maps.items():
            shapes |= {f"transformer.h.{n}.{name}.weight": shape, f"transformer.h.{n}.{name}.bias": shape[1:]}
        for name in ("ln_1", "ln_2"):
            shapes |= {f"transformer.h.{n}.{name}.{part}": (D,) for part in ("weight", "bias")}
    return draw(shapes)


def gpt2_logits(state, ids, approximate="tanh"):
    def linear(x, name):
        return x @ state[f"transformer.{name}.weight"] + state[f"transformer.{name}.bias"]

    def norm(x, name):
        x = x - x.mean(-1, keepdim=True)
        x = x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-3)
        return x * state[f"transformer.{name}.weight"] + state[f"transformer.{name}.bias"]

    x = state["transformer.wte.weight"][ids] + state["transformer.wpe.weight"][: len(ids)]
    hidden = torch.ones(len(ids), len(ids)).triu(1).bool()
    for n in range(2):
        qkv = linear(norm(x, f"h.{n}.ln_1"), f"h.{n}.attn.c_attn")
        q, k, v = qkv[:, :D], qkv[:, D : 2 * D], qkv[:, 2 * D :]
        heads, width = [], D // HEADS
        for h in range(HEADS):
            mine = slice(h * width, (h + 1) * width)
            scores = (q[:, mine] @ k[:, mine].T / math.sqrt(width)).masked_fill(hidden, -math.inf)
            heads.append(scores.softmax(-1) @ v[:, mine])
        x = x + linear(torch.cat(heads, 1), f"h.{n}.attn.c_proj")
        x = x + linear(gelu(linear(norm(x, f"h.{n}.ln_2"), f"h.{n}.mlp.c_fc"), approximate=approximate),
                       f"h.{n}.mlp.c_proj")  # fmt: skip
    return norm(x, "ln_f") @ state["lm_head.weight"].T


@pytest.mark.parametrize(("name", "approximate"), [("gelu_new", "tanh"), ("gelu", "none")])
def test_gpt2_without_the_library(name, approximate):
    state = gpt2_state()
    truth = torch.stack([gpt2_logits(state, ids, approximate) for ids in IDS])
    target = ff.from_hf(fake(GPT2 | {"activation_function": name}, state))
    X = ff.one_hot(IDS, VOCABULARY, positions=POSITIONS)
    assert relative(target(X, "causal"), truth) <= 1e-12
    few = ff.from_hf(fake(GPT2 | {"activation_function": name}, state), outputs=2, positions=6)
    assert (few.spec.d_in, few.spec.d_out, few.card.mask) == (VOCABULARY + 6, 2, "causal")
    X = ff.one_hot(IDS, VOCABULARY, positions=6)
    assert relative(through_program(few, X), truth[..., :2]) <= 1e-9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True is not read"),
        ({"add_cross_attention": True}, "add_cross_attention=True is not read"),
        ({"scale_attn_weights": False}, "scale_attn_weights=False is not read"),
        ({"activation_function": "mish"}, "activation 'mish' is not served"),
        ({"model_type": "gptj"}, r"model_type 'gptj'"),
    ],
)
def test_gpt2_that_is_refused(options, message):
    with pytest.raises(ff.SpecError, match=message):
        ff.from_hf(fake(GPT2 | options, gpt2_state()))


def test_a_trunk_is_refused():
    state = {name: x for name, x in gpt2_state().items() if name != "lm_head.weight"}
    with pytest.raises(ff.SpecError, match="no lm_head"):
        ff.from_hf(fake(GPT2, state))
