"""Reading config.json in both spellings, what is refused and why, and loading models by name."""

import dataclasses
import json
import math

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from model_oracle import cpu_mesh

from penelope_jax.models import layers, random_weights, registry, rope
from penelope_jax.models.config import ModelConfig, RopeScaling, from_hf_config

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_30B_A3B = QWEN3_8B | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
LLAMA3_RULE = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_scaling": LLAMA3_RULE,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}


def newer(hf: dict) -> dict:
    """Spells a configuration as newer versions of transformers write it."""
    moved = ("rope_theta", "rope_scaling", "torch_dtype")
    rule = hf["rope_scaling"] or {"rope_type": "default"}
    rest = {name: value for name, value in hf.items() if name not in moved}
    layer_types = ["full_attention"] * hf["num_hidden_layers"]
    rope = {**rule, "rope_theta": hf["rope_theta"]}
    return rest | {"rope_parameters": rope, "dtype": hf["torch_dtype"], "layer_types": layer_types}


def test_qwen3_8b_equals_its_preset_in_both_spellings():
    preset = random_weights.PRESETS["qwen3-8b"]
    assert from_hf_config(QWEN3_8B, "config.json") == preset
    assert from_hf_config(newer(QWEN3_8B), "config.json") == preset
    assert preset.linear_cost == 23552


def test_qwen3_30b_a3b_equals_its_preset_in_both_spellings():
    preset = random_weights.PRESETS["qwen3-30b-a3b"]
    assert from_hf_config(QWEN3_30B_A3B, "config.json") == preset
    hf = newer(QWEN3_30B_A3B)
    hf["num_local_experts"] = hf.pop("num_experts")
    assert from_hf_config(hf, "config.json") == preset


def test_linear_cost_counts_the_experts_that_are_used():
    presets = random_weights.PRESETS
    assert presets["qwen3-235b-a22b"].linear_cost == 13600
    assert presets["qwen3-30b-a3b"].linear_cost == (2048 * (72 * 128 + 3 * 8 * 768 + 128)) / (2 * 32 * 128)
    mixed = dataclasses.replace(presets["tiny-moe"], num_layers=4, dense_layers=(2,))
    attention = 64 * (2 * 4 + 2 * 2) * 16
    dense, experts = 64 * 3 * 128, 64 * (3 * 2 * 32 + 8)
    assert mixed.linear_cost == (attention + 0.25 * dense + 0.75 * experts) / (2 * 4 * 16)


@pytest.mark.parametrize(
    ("change", "dense"),
    [
        ({"mlp_only_layers": [0, 47]}, (0, 47)),
        ({"decoder_sparse_step": 2}, tuple(range(0, 48, 2))),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [2]}, tuple(i for i in range(48) if i % 3 != 2 or i == 2)),
        ({"mlp_only_layers": None}, ()),
    ],
)
def test_layers_without_experts(change, dense):
    assert from_hf_config(QWEN3_30B_A3B | change, "config.json").dense_layers == dense


@pytest.mark.parametrize("change", [{"decoder_sparse_step": 49}, {"mlp_only_layers": list(range(48))}])
def test_a_model_whose_layers_are_all_dense_has_no_experts(change):
    config = from_hf_config(QWEN3_30B_A3B | change, "config.json")
    assert (config.num_experts, config.experts_per_token, config.dense_layers) == (0, 0, ())
    assert layers.parameter_shapes(config).layers.router is None


def test_yarn_in_both_spellings():
    hf = QWEN3_8B | {"rope_scaling": YARN}
    config = from_hf_config(hf, "config.json")
    assert config.rope_scaling == RopeScaling(kind="yarn", factor=4.0, original_max_context=32768)
    assert config.max_context == 131072
    assert config.rope_scaling.yarn_attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    assert from_hf_config(newer(hf), "config.json") == config
    older = {"type": "yarn", "factor": 2, "attention_factor": 1.5, "beta_fast": 16, "beta_slow": 2}
    scaling = from_hf_config(QWEN3_8B | {"rope_scaling": older}, "config.json").rope_scaling
    assert scaling == RopeScaling(
        kind="yarn", factor=2.0, original_max_context=40960, attention_factor=1.5, beta_fast=16.0, beta_slow=2.0
    )
    assert scaling.yarn_attention_factor == 1.5


def test_yarn_frequencies_of_qwen3():
    """Fast waves are kept, slow ones divided by the factor, and the ramp lies between the published dimensions."""
    config = from_hf_config(QWEN3_8B | {"rope_scaling": YARN}, "config.json")
    plain = rope.rope_frequencies(dataclasses.replace(config, rope_scaling=None))
    ratio = plain / rope.rope_frequencies(config)
    assert (ratio[:24] == 1).all()  # 32768 positions are more than 32 turns
    np.testing.assert_allclose(ratio[40:], 4, rtol=1e-6)  # less than one
    assert (np.diff(ratio[23:41]) > 0).all()


def test_llama_in_both_spellings():
    config = from_hf_config(LLAMA, "config.json")
    assert config == from_hf_config(newer(LLAMA), "config.json")
    assert config == ModelConfig(
        architecture="llama",
        vocab_size=128256,
        hidden_size=2048,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        mlp_size=8192,
        rope_theta=500000.0,
        norm_eps=1e-5,
        max_context=131072,
        rope_scaling=RopeScaling(kind="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0),
        tied_embeddings=True,
        dtype="bfloat16",
    )
    assert hash(config) == hash(from_hf_config(newer(LLAMA), "elsewhere"))


def test_older_spelling_of_linear_scaling_and_defaults():
    hf = {**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}, "torch_dtype": "float16"}
    for name in ("num_key_value_heads", "rope_theta", "tie_word_embeddings", "rms_norm_eps"):
        del hf[name]
    config = from_hf_config(hf, "config.json")
    assert config.rope_scaling == RopeScaling(kind="linear", factor=2.0)
    assert (config.num_kv_heads, config.rope_theta, config.norm_eps) == (32, 10000.0, 1e-6)
    assert not config.tied_embeddings
    assert config.dtype == "float32"
    del hf["rope_scaling"]
    assert from_hf_config(hf, "config.json").rope_scaling is None


def test_linear_cost_of_the_toy_of_the_measurements():
    assert random_weights.PRESETS["b"].linear_cost == 768


def test_a_switched_off_sliding_window_is_fine():
    hf = {**QWEN3_8B, "sliding_window": 4096, "use_sliding_window": False}
    assert from_hf_config(hf, "config.json") == random_weights.PRESETS["qwen3-8b"]


FULL_ATTENTION = "front eviction gains by position, which needs full causal attention in every layer"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (
            QWEN3_8B,
            {"use_sliding_window": True, "sliding_window": 4096},
            f"sliding_window=4096 is in use: {FULL_ATTENTION}",
        ),
        (
            QWEN3_8B,
            {"layer_types": ["full_attention", "sliding_attention"]},
            f"layer_types has sliding_attention: {FULL_ATTENTION}",
        ),
        (
            QWEN3_8B,
            {"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"], "num_experts": 512},
            f"layer_types has linear_attention: {FULL_ATTENTION}",
        ),
        (LLAMA, {"model_type": "mistral", "sliding_window": 4096}, f"sliding_window=4096 is in use: {FULL_ATTENTION}"),
        (QWEN3_8B, {"linear_num_key_heads": 16}, f"linear attention (linear_num_key_heads): {FULL_ATTENTION}"),
        (
            LLAMA,
            {"model_type": "mixtral", "num_local_experts": 8},
            "mixture of experts (8 experts) of model_type 'mixtral' is not supported; supported: qwen3_moe",
        ),
        (QWEN3_8B, {"num_experts": 4}, "mixture of experts (4 experts) of model_type 'qwen3' is not supported"),
        (QWEN3_30B_A3B, {"num_local_experts": 64}, "{'num_experts': 128, 'num_local_experts': 64} must be equal"),
        (QWEN3_30B_A3B, {"num_experts": None}, "field 'num_experts' is missing"),
        (QWEN3_30B_A3B, {"num_experts_per_tok": None}, "field 'num_experts_per_tok' is missing"),
        (QWEN3_30B_A3B, {"moe_intermediate_size": None}, "field 'moe_intermediate_size' is missing"),
        (QWEN3_30B_A3B, {"num_experts": 4}, "self.experts_per_token=8 must be at most self.num_experts=4"),
        (QWEN3_30B_A3B, {"num_experts": -1}, "num_experts=-1 must be an integer of at least 0"),
        (QWEN3_30B_A3B, {"moe_intermediate_size": 0}, "expert_size=0 must be an integer of at least 1"),
        (QWEN3_30B_A3B, {"mlp_only_layers": [48]}, "mlp_only_layers=[48] must be a list of layers below 48"),
        (QWEN3_30B_A3B, {"mlp_only_layers": 3}, "mlp_only_layers=3 must be a list of layers below 48"),
        (QWEN3_30B_A3B, {"decoder_sparse_step": 0}, "decoder_sparse_step=0 must be an integer of at least 1"),
        (
            QWEN3_30B_A3B,
            {"model_type": "qwen3_moe", "architectures": ["Qwen3ForCausalLM"]},
            "architectures ['Qwen3ForCausalLM'] is not supported; must hold Qwen3MoeForCausalLM",
        ),
        (QWEN3_8B, {"rope_scaling": {"type": "yarn"}}, "rope scaling: field 'factor' is missing"),
        (QWEN3_8B, {"rope_scaling": YARN | {"factor": 0}}, "rope scaling factor=0.0 must be positive"),
        (QWEN3_8B, {"rope_scaling": YARN | {"beta_slow": 40}}, "self.beta_slow=40.0 must be positive and below"),
        (QWEN3_8B, {"rope_scaling": YARN | {"mscale": 0.7}}, "rope scaling: yarn with mscale=0.7 is not supported"),
        (QWEN3_8B, {"rope_parameters": YARN | {"truncate": False}}, "yarn with truncate=False is not supported"),
        (QWEN3_8B, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope scaling 'dynamic' is not supported"),
        (
            LLAMA,
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "rope scaling: field 'low_freq_factor' is missing",
        ),
        (
            LLAMA,
            {"model_type": "gpt_neox"},
            "model_type 'gpt_neox' is not supported; supported: qwen3, llama, qwen3_moe",
        ),
        (LLAMA, {"model_type": None}, "model_type None is not supported"),
        (
            QWEN3_8B,
            {"architectures": ["Qwen3ForSequenceClassification"]},
            "architectures ['Qwen3ForSequenceClassification'] is not supported; must hold Qwen3ForCausalLM",
        ),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; must be 'silu'"),
        (LLAMA, {"mlp_bias": True}, "mlp_bias=True is not supported"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported; must be 1"),
        (LLAMA, {"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4} is not supported"),
        (LLAMA, {"hidden_size": None}, "field 'hidden_size' is missing"),
        (LLAMA, {"num_hidden_layers": 0}, "num_layers=0 must be an integer of at least 1"),
        (LLAMA, {"vocab_size": "many"}, "vocab_size='many' must be an integer of at least 1"),
        (LLAMA, {"num_key_value_heads": 5}, "num_heads=32 must be a multiple of num_kv_heads=5"),
        (LLAMA, {"head_dim": 63}, "head_dim=63 must be even"),
        (LLAMA, {"rope_theta": 0.0}, "rope_theta=0.0 must be positive"),
        (LLAMA, {"rms_norm_eps": "small"}, "rms_norm_eps='small' must be a number"),
        (LLAMA, {"rope_scaling": {"type": "linear", "factor": None}}, "rope scaling: field 'factor' is missing"),
        (LLAMA, {"rope_parameters": [1]}, "rope_parameters=[1] must be an object"),
    ],
)
def test_refusals(base, change, message):
    with pytest.raises(ValueError) as raised:
        from_hf_config({**base, **change}, "folder/config.json")
    assert str(raised.value).startswith("folder/config.json: ")
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_config_values_are_checked_at_birth():
    tiny = random_weights.PRESETS["tiny"]
    with pytest.raises(ValueError, match="dtype='float64' must be one of float32, bfloat16"):
        dataclasses.replace(tiny, dtype="float64")
    with pytest.raises(ValueError, match="architecture='gpt2' must be one of qwen3, llama"):
        dataclasses.replace(tiny, architecture="gpt2")
    with pytest.raises(ValueError, match="rope scaling kind='dynamic' must be linear, llama3, factors or yarn"):
        RopeScaling(kind="dynamic")
    with pytest.raises(ValueError, match="rope scaling factor=0 must be positive"):
        RopeScaling(kind="linear", factor=0)
    with pytest.raises(ValueError, match="experts_per_token=2 needs experts; self.num_experts=0"):
        dataclasses.replace(tiny, experts_per_token=2)
    moe = random_weights.PRESETS["tiny-moe"]
    for dense in ((0, 1), (2,), (1, 0), (0, 0)):
        with pytest.raises(ValueError, match=r"dense_layers=.* must be ascending and some of 2 layers, not all"):
            dataclasses.replace(moe, dense_layers=dense)
    with pytest.raises(ValueError, match="self.num_kv_heads=2 must be a multiple of self.kv_head_copies=4"):
        dataclasses.replace(tiny, kv_head_copies=4)
    with pytest.raises(ValueError, match="2 rope frequency factors"):
        dataclasses.replace(tiny, rope_scaling=RopeScaling(kind="factors", frequency_factors=(1.0, 2.0)))


def test_random_models_are_repeatable_and_placed():
    first, again, other = (registry.load_model("random:tiny", seed=seed) for seed in (3, 3, 4))
    assert first.tokenizer is None
    assert first.eos_token_ids == ()
    assert first.name == "random:tiny"
    shapes = layers.parameter_shapes(first.config)
    for leaf, same, different, shape in zip(
        *(jax.tree.leaves(tree) for tree in (first.params, again.params, other.params, shapes)), strict=True
    ):
        assert (leaf.shape, leaf.dtype) == (shape.shape, shape.dtype)
        assert leaf.sharding.mesh.axis_names == ("data", "tensor")
        np.testing.assert_array_equal(leaf, same)
        assert np.abs(leaf - different).max() > 0.01
    assert not np.array_equal(first.params.layers.q_proj[0], first.params.layers.q_proj[1])
    assert registry.load_model("random:b", dtype="bfloat16").params.embed.dtype == "bfloat16"


@pytest.mark.parametrize("name", sorted(random_weights.PRESETS))
def test_presets_have_shardable_shapes(name):
    config = random_weights.PRESETS[name]
    specs, shapes = layers.parameter_specs(config), layers.parameter_shapes(config)
    assert jax.tree.structure(specs) == jax.tree.structure(shapes)
    for spec, shape in zip(jax.tree.leaves(specs), jax.tree.leaves(shapes), strict=True):
        assert all(size % 2 == 0 for axis, size in zip(spec, shape.shape, strict=False) if axis == "tensor")


def test_meshes_that_do_not_fit_are_refused():
    config = random_weights.PRESETS["tiny"]
    auto = (AxisType.Auto, AxisType.Auto)
    four = cpu_mesh(1, 4)
    six_heads = dataclasses.replace(config, num_heads=6, num_kv_heads=6)
    with pytest.raises(ValueError, match="mesh axis tensor=4 must divide num_kv_heads=6"):
        random_weights.random_params(six_heads, four)
    with pytest.raises(
        ValueError, match=r"tensor=4 must be a multiple of num_kv_heads=3, which it exceeds, and divide"
    ):
        layers.config_on_mesh(dataclasses.replace(config, num_heads=12, num_kv_heads=3), four)
    with pytest.raises(ValueError, match=r"tensor=4 must be a multiple of num_kv_heads=1, .*, and divide num_heads=6"):
        layers.config_on_mesh(dataclasses.replace(config, num_heads=6, num_kv_heads=1), four)
    with pytest.raises(ValueError, match="mesh axis tensor=4 must divide vocab_size=258"):
        layers.parameter_shardings(dataclasses.replace(config, num_kv_heads=4, vocab_size=258), four)
    with pytest.raises(ValueError, match="mesh axis tensor=4 must divide mlp_size=130"):
        layers.parameter_shardings(dataclasses.replace(config, num_kv_heads=4, mlp_size=130), four)
    experts = dataclasses.replace(random_weights.PRESETS["tiny-moe"], num_experts=6)
    with pytest.raises(ValueError, match=r"mesh of data=2 \* tensor=2 = 4 devices must divide num_experts=6"):
        layers.parameter_shardings(experts, cpu_mesh(2, 2))
    named = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("x", "y"), axis_types=auto)
    with pytest.raises(ValueError, match=r"mesh axes \('x', 'y'\) must be \('data', 'tensor'\)"):
        layers.parameter_shardings(config, named)
    with pytest.raises(ValueError, match=r"mesh axes \('x', 'y'\) must be \('data', 'tensor'\)"):
        registry.load_model("random:tiny", mesh=named)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("random:huge", "model 'random:huge': no such preset; known: random:tiny, random:b, random:qwen3-0.6b"),
        ("no/such/folder", "model 'no/such/folder': no such directory; else a .gguf file, smollm2, or random:tiny"),
        ("no/such.gguf", "no/such.gguf: no such file"),
    ],
)
def test_unknown_models(spec, message):
    with pytest.raises(ValueError) as raised:
        registry.load_model(spec)
    assert message in str(raised.value)
    with pytest.raises(ValueError, match="dtype='int8' must be one of float32, bfloat16"):
        registry.load_model(spec, dtype="int8")


def test_a_directory_without_or_with_a_broken_config(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json: cannot be read: No such file or directory"):
        registry.load_model(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(ValueError, match=r"config\.json: not valid JSON: Expecting value: line 1 column 16"):
        registry.load_model(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config\.json: must hold a JSON object, not list"):
        registry.load_model(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    with pytest.raises(
        ValueError, match="no weights: neither model.safetensors nor model.safetensors.index.json is there"
    ):
        registry.load_model(str(tmp_path))
