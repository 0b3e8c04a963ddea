"""Models that exist, as targets and through their programs, against the library that made them."""

import sys

import numpy as np
import pytest
import torch
from torch import nn

import fixedformer as ff


def relative(a, b):
    return float((a - b).abs().max() / b.abs().max())


def through_program(target, X, mask):
    machine = (
        ff.SparseBlockMachine(target.spec) if isinstance(target, ff.BlockTarget) else ff.SparseMachine(target.spec)
    )
    return machine.run(machine.compile(target), X, mask)


@pytest.fixture
def hf():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield pytest.importorskip("transformers")


def llama(hf, **options):
    torch.manual_seed(0)
    config = hf.LlamaConfig(**{
        "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 172,
        "num_hidden_layers": 1, "vocab_size": 64, "max_position_embeddings": 64, "initializer_range": 0.2,
    } | options)  # fmt: skip
    model = hf.LlamaForCausalLM(config).double().eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
    return model


def gpt2(hf, **options):
    torch.manual_seed(0)
    config = hf.GPT2Config(**{"n_embd": 64, "n_head": 4, "n_layer": 1, "vocab_size": 64, "n_positions": 16,
                              "initializer_range": 0.2} | options)  # fmt: skip
    model = hf.GPT2LMHeadModel(config).double().eval()
    for name, parameter in model.named_parameters():
        if "ln_" in name or "bias" in name:
            nn.init.normal_(parameter, mean=float("ln_" in name and "weight" in name), std=0.3)
    return model


def test_tiny_llama_through_its_program(hf):
    model, ids = llama(hf), torch.randint(64, (2, 11), generator=torch.Generator().manual_seed(1))
    target = ff.from_hf(model)
    spec = target.spec
    assert (spec.heads, spec.key_heads, spec.mlp_width, spec.d_out, spec.positions) == (8, 4, 172, 64, "rotary")
    with torch.no_grad():
        truth = model(ids).logits
    assert relative(target(ids, "causal"), truth) <= 1e-6
    assert relative(through_program(target, ids, target.card.mask), truth) <= 1e-6


def test_llama_with_biases_and_another_base(hf):
    model = llama(hf, hidden_size=8, num_attention_heads=2, num_key_value_heads=1, intermediate_size=3, vocab_size=12,
                  attention_bias=True, mlp_bias=True, num_hidden_layers=2, rope_parameters={"rope_type": "default",
                  "rope_theta": 500.0})  # fmt: skip
    ids = torch.randint(12, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        truth = model(ids).logits
    target = ff.from_hf(model)
    assert target.spec.bias
    assert target.spec.rotary_base == 500.0
    assert relative(target(ids, "causal"), truth) <= 1e-6
    few = ff.from_hf(model, outputs=1)
    assert relative(few(ids, "causal"), truth[..., :1]) <= 1e-6


def test_tiny_gpt2_through_its_program(hf):
    model, ids = gpt2(hf), torch.randint(64, (2, 11), generator=torch.Generator().manual_seed(1))
    target = ff.from_hf(model)
    with torch.no_grad():
        truth = model(ids).logits
    X = ff.one_hot(ids, 64, positions=16)
    assert relative(target(X, "causal"), truth) <= 1e-12
    assert relative(through_program(target, X, target.card.mask), truth) <= 1e-6


def test_folder_options_and_what_is_not_read(hf, tmp_path):
    model = gpt2(hf, n_embd=8, n_head=2, n_inner=4, vocab_size=12)
    model.save_pretrained(tmp_path)
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    target = ff.from_hf(tmp_path, outputs=3, positions=5)
    assert (target.spec.d_in, target.spec.d_out) == (17, 3)
    with torch.no_grad():
        assert relative(target(ff.one_hot(ids, 12, 5), "causal"), model(ids).logits[..., :3]) <= 1e-5
    with pytest.raises(ff.SpecError, match="no model that transformers can load"):
        ff.from_hf(tmp_path / "nothing")
    with pytest.raises(ff.SpecError, match="no lm_head"):
        ff.from_hf(model.transformer)
    model.config.scale_attn_by_inverse_layer_idx = True
    with pytest.raises(ff.SpecError, match="scale_attn_by_inverse_layer_idx=True is not read"):
        ff.from_hf(model)
    scaled = llama(hf, hidden_size=8, num_attention_heads=2, num_key_value_heads=1, intermediate_size=3, vocab_size=12)
    scaled.config.rope_parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(ff.SpecError, match="another kind than the plain ones"):
        ff.from_hf(scaled)


def test_missing_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ff.FixedformerError, match=r"needs the package 'transformers'.*pip install 'fixedformer\[hf\]'"):
        ff.from_hf(tmp_path)
    with pytest.raises(ff.SpecError, match="Llama- and GPT-2-style models of transformers, got Linear"):
        ff.from_hf(nn.Linear(2, 2))


def perturbed(module):
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module.double().eval()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("final", [False, True])
def test_encoder_layers(final, bias):
    layer = nn.TransformerEncoderLayer(6, 2, dim_feedforward=3, batch_first=True, norm_first=True, activation="gelu",
                                       bias=bias)  # fmt: skip
    norm = nn.LayerNorm(6, bias=bias) if final else None
    model = perturbed(nn.TransformerEncoder(layer, 2, norm=norm, enable_nested_tensor=False))
    X = torch.randn(2, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    unembed = torch.randn(6, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    target = ff.from_torch(model, unembed=unembed)
    hidden = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    with torch.no_grad():
        truth = model(X, mask=hidden) @ unembed
    assert relative(target(X, "causal"), truth) <= 1e-12
    if not final:
        one = ff.from_torch(model.layers[0], unembed=unembed)
        with torch.no_grad():
            truth = model.layers[0](X, src_mask=hidden) @ unembed
        assert relative(through_program(one, X, "causal"), truth) <= 1e-10


@pytest.mark.parametrize(("approximate", "name"), [("tanh", "gelu_tanh"), ("none", "gelu")])
def test_both_kinds_of_gelu(approximate, name):
    layer = perturbed(nn.TransformerEncoderLayer(6, 2, 3, batch_first=True, norm_first=True,
                                                 activation=nn.GELU(approximate=approximate)))  # fmt: skip
    X = torch.randn(2, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    truth = layer(X).detach()  # with gradients: PyTorch's fast path computes the exact GELU for both
    target = ff.from_torch(layer)
    assert target.spec.activation == name
    assert relative(target(X), truth) <= 1e-12
    assert relative(through_program(target, X, None), truth) <= 1e-10


@pytest.mark.parametrize("bias", [False, True])
def test_attention_stacks(bias):
    layers = [perturbed(nn.MultiheadAttention(4, 2, bias=bias, batch_first=True)) for _ in range(2)]
    X = truth = torch.randn(2, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    target = ff.from_torch(layers, residual=True)
    assert isinstance(target, ff.BlockTarget if bias else ff.Target)
    with torch.no_grad():
        for layer in layers:
            truth = truth + layer(truth, truth, truth, need_weights=False)[0]
    assert relative(target(X), truth) <= 1e-12
    assert relative(through_program(target, X, None), truth) <= 1e-12


def test_torch_layers_that_are_not_read():
    with pytest.raises(ff.SpecError, match="norm_first=False"):
        ff.from_torch(nn.TransformerEncoderLayer(4, 2, 3, dropout=0.0))
    with pytest.raises(ff.SpecError, match="call eval"):
        ff.from_torch(nn.TransformerEncoderLayer(4, 2, 3, norm_first=True))
    with pytest.raises(ff.SpecError, match="got Linear"):
        ff.from_torch(nn.Linear(2, 2))
    with pytest.raises(ff.SpecError, match="at least one layer"):
        ff.from_torch([])
    with pytest.raises(ff.SpecError, match="bias_k"):
        ff.from_torch(nn.MultiheadAttention(4, 2, add_bias_kv=True).eval())
    layer = nn.TransformerEncoderLayer(4, 2, 3, norm_first=True, activation=torch.tanh).eval()
    with pytest.raises(ff.SpecError, match="activation 'tanh' is not served"):
        ff.from_torch(layer)


def lens(draw, D=5, heads=2, d=3, r=4, vocabulary=6, positions=7, gated=False):
    def block(n):
        shapes = {"attn.W_Q": (heads, D, d), "attn.W_K": (heads, D, d), "attn.W_V": (heads, D, d),
                  "attn.W_O": (heads, d, D), "attn.b_Q": (heads, d), "attn.b_K": (heads, d), "attn.b_V": (heads, d),
                  "attn.b_O": (D,), "mlp.W_in": (D, r), "mlp.b_in": (r,), "mlp.W_out": (r, D), "mlp.b_out": (D,),
                  "ln1.w": (D,), "ln1.b": (D,), "ln2.w": (D,), "ln2.b": (D,)}  # fmt: skip
        shapes |= {"mlp.W_gate": (D, r), "mlp.b_gate": (r,)} if gated else {}
        return {f"blocks.{n}.{name}": draw(*shape) for name, shape in shapes.items()}

    ends = {"embed.W_E": (vocabulary, D), "pos_embed.W_pos": (positions, D), "unembed.W_U": (D, vocabulary),
            "unembed.b_U": (vocabulary,), "ln_final.w": (D,), "ln_final.b": (D,)}  # fmt: skip
    return {name: draw(*shape) for name, shape in ends.items()} | block(0) | {"blocks.0.attn.mask": np.ones((9, 9))}


@pytest.mark.parametrize(
    ("gated", "without"), [(False, ()), (True, ()), (True, ("b_in",)), (True, ("b_out",)), (True, ("b_gate",))]
)
def test_transformer_lens_arrays(gated, without):
    """One block by hand, in the conventions of that library: x W + b per head, scores over sqrt(d_head), and in a gated
    MLP the bias b_in after the product: (act(x W_gate) * (x W_in) + b_in) W_out + b_out."""
    rng = np.random.default_rng(0)
    w = lens(lambda *shape: rng.normal(size=shape) * 0.6, gated=gated)
    left = [f"blocks.0.mlp.{name}" for name in without]
    target = ff.from_transformer_lens({name: x for name, x in w.items() if name not in left}, activation="relu")
    w |= {name: np.zeros_like(w[name]) for name in left}

    def norm(x, name):
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * w[f"{name}.w"] + w[f"{name}.b"]

    ids = [2, 0, 5, 5]
    x = w["embed.W_E"][ids] + w["pos_embed.W_pos"][:4]
    a, b = norm(x, "blocks.0.ln1"), "blocks.0.attn"
    for h in range(2):
        q, k, v = (a @ w[f"{b}.W_{n}"][h] + w[f"{b}.b_{n}"][h] for n in "QKV")
        scores = np.where(np.tril(np.ones((4, 4))) > 0, q @ k.T / np.sqrt(3), -np.inf)
        weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
        x = x + weights @ v @ w[f"{b}.W_O"][h]
    x = x + w[f"{b}.b_O"]
    a = norm(x, "blocks.0.ln2")
    m = {name: w.get(f"blocks.0.mlp.{name}") for name in ("W_gate", "b_gate", "W_in", "b_in", "W_out", "b_out")}
    if gated:
        post = np.maximum(a @ m["W_gate"] + m["b_gate"], 0) * (a @ m["W_in"]) + m["b_in"]
    else:
        post = np.maximum(a @ m["W_in"] + m["b_in"], 0)
    x = x + post @ m["W_out"] + m["b_out"]
    truth = torch.from_numpy(norm(x, "ln_final") @ w["unembed.W_U"] + w["unembed.b_U"])
    X = ff.one_hot(torch.tensor(ids), 6, positions=7)
    assert relative(target(X, "causal"), truth) <= 1e-12
    assert relative(through_program(target, X, "causal"), truth) <= 1e-12


def test_transformer_lens_attention_alone_is_an_ordinary_target():
    rng = np.random.default_rng(0)
    kept = ("embed.W_E", "unembed.W_U", *(f"blocks.0.attn.W_{n}" for n in "QKVO"))
    w = {name: x for name, x in lens(lambda *shape: rng.normal(size=shape)).items() if name in kept}
    target = ff.from_transformer_lens(w, norm=None)
    assert isinstance(target, ff.Target)
    assert target.spec.residual
    with pytest.raises(ff.SpecError, match=r"not read: blocks\.0\.attn\.W_X"):
        ff.from_transformer_lens(w | {"blocks.0.attn.W_X": np.ones(2)})
    with pytest.raises(ff.SpecError, match="output is missing"):
        ff.from_transformer_lens({name: x for name, x in w.items() if not name.endswith("W_O")})
    with pytest.raises(ff.SpecError, match="without a gap"):
        ff.from_transformer_lens({name.replace("blocks.0", "blocks.1"): x for name, x in w.items()})


def test_a_compiled_program_computes_its_function():
    """By hand, in Tracr's form: is the share of 'a' so far at least a half? Attention averages, a ReLU MLP compares."""
    D, bias = 4, lambda width: np.zeros(width)  # a, b, share, answer
    average = np.zeros((D, 2))
    average[0, 0] = 1
    back = np.zeros((2, D))
    back[0, 2] = 1
    into = np.zeros((D, 2))
    into[2] = 100
    out = np.zeros((2, D))
    out[:, 3] = 1, -1
    params = {
        "token_embed": {"embeddings": np.eye(2, D)},
        "transformer/layer_0/attn/query": {"w": np.zeros((D, 2)), "b": bias(2)},
        "transformer/layer_0/attn/key": {"w": np.zeros((D, 2)), "b": bias(2)},
        "transformer/layer_0/attn/value": {"w": average, "b": bias(2)},
        "transformer/layer_0/attn/linear": {"w": back, "b": bias(D)},
        "transformer/layer_0/mlp/linear_1": {"w": into, "b": np.array([-49.0, -50.0])},
        "transformer/layer_0/mlp/linear_2": {"w": out, "b": bias(D)},
    }
    target = ff.from_tracr(params, heads=1, unembed=np.eye(D)[:, 3:])
    word = "abbabaaabb"
    answers = [float(2 * word[: i + 1].count("a") >= i + 1) for i in range(len(word))]
    ids = torch.tensor(["ab".index(letter) for letter in word])
    for found in (target(ids, "causal"), through_program(target, ids, "causal")):
        assert found.squeeze(-1).tolist() == pytest.approx(answers, abs=1e-12)
    with pytest.raises(ff.SpecError, match="mlp/linear_2/b is missing"):
        ff.from_tracr(params | {"transformer/layer_0/mlp/linear_2": {"w": out}}, heads=1)
    with pytest.raises(ff.SpecError, match="no layer"):
        ff.from_tracr({}, heads=1)
