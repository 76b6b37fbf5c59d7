"""The decoder functions against three oracles: numpy in float64, transformers on torch, and recorded llama.cpp."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_oracle import cpu_mesh, dense_logits, numpy_logits, params_of, swap

from penelope_jax.models import layers, random_weights, registry, rope
from penelope_jax.models.config import ModelConfig, RopeScaling

LLAMA3 = RopeScaling(kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_context=32)
QWEN3 = dataclasses.replace(random_weights.PRESETS["tiny"], rope_theta=1e4)
LLAMA = dataclasses.replace(QWEN3, architecture="llama", qk_norm=False, tied_embeddings=True, rope_scaling=LLAMA3)
BIASED = dataclasses.replace(LLAMA, attention_bias=True, rope_scaling=RopeScaling(kind="linear", factor=2.0))
FACTORS = dataclasses.replace(
    LLAMA, rope_scaling=RopeScaling(kind="factors", frequency_factors=(1.0, 1.0, 1.5, 2.0, 3.0, 8.0, 8.0, 8.0))
)
YARN = dataclasses.replace(
    LLAMA,
    rope_theta=50.0,
    rope_scaling=RopeScaling(kind="yarn", factor=4.0, original_max_context=256, beta_fast=8.0, beta_slow=2.0),
)
TOKENS = np.random.default_rng(0).integers(0, 256, 80).astype(np.int32)


def rescaled(config: ModelConfig, **changes) -> ModelConfig:
    assert config.rope_scaling is not None
    return dataclasses.replace(config, rope_scaling=dataclasses.replace(config.rope_scaling, **changes))


@pytest.mark.parametrize(
    "config", [QWEN3, LLAMA, BIASED, FACTORS, YARN], ids=["qwen3", "llama3", "linear-bias", "factors", "yarn"]
)
def test_logits_equal_numpy_in_float64(config):
    params = params_of(config)
    expected = numpy_logits(config, params, TOKENS)
    assert expected.std() > 0.5
    np.testing.assert_allclose(dense_logits(config, params, TOKENS), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "wrong_config", "wrong_params"),
    [
        (QWEN3, dataclasses.replace(QWEN3, qk_norm=False), lambda params: params),
        (QWEN3, QWEN3, lambda params: swap(params, "gate_proj", "up_proj")),
        (QWEN3, QWEN3, lambda params: swap(params, "q_norm", "k_norm")),
        (QWEN3, QWEN3, lambda params: swap(params, "attention_norm", "mlp_norm")),
        (LLAMA, LLAMA, lambda params: swap(params, "k_proj", "v_proj")),
        (LLAMA, dataclasses.replace(LLAMA, rope_scaling=None), lambda params: params),
        (LLAMA, dataclasses.replace(LLAMA, norm_eps=1e-2), lambda params: params),
        (YARN, rescaled(YARN, attention_factor=1.0), lambda params: params),
        (YARN, rescaled(YARN, beta_fast=16.0), lambda params: params),
        (YARN, rescaled(YARN, beta_slow=4.0), lambda params: params),
        (YARN, rescaled(YARN, original_max_context=128), lambda params: params),
        (YARN, rescaled(YARN, kind="linear"), lambda params: params),
    ],
    ids=[
        *("no-qk-norm", "gate-up", "q-k-norm", "norms", "k-v", "no-rope-scaling", "eps"),
        *("yarn-attention", "yarn-fast", "yarn-slow", "yarn-context", "yarn-linear"),
    ],
)
def test_numpy_comparison_can_fail(config, wrong_config, wrong_params):
    params = params_of(config)
    right = dense_logits(config, params, TOKENS)
    wrong = dense_logits(wrong_config, wrong_params(params), TOKENS)
    assert np.abs(right - wrong).max() > 100 * 1e-4


def test_bfloat16_stays_near_float32():
    low = dataclasses.replace(QWEN3, dtype="bfloat16")
    params = params_of(low)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    got = dense_logits(low, params, TOKENS)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, dense_logits(QWEN3, wide, TOKENS), rtol=0, atol=0.2)


def test_rows_may_be_split_into_tiles():
    params = params_of(QWEN3)
    whole = dense_logits(QWEN3, params, TOKENS)
    np.testing.assert_allclose(dense_logits(QWEN3, params, TOKENS, tile=16), whole, rtol=0, atol=2e-5)


def test_sharded_over_tensor_gives_the_same_logits():
    mesh = cpu_mesh(1, 2)
    sharded = params_of(QWEN3, mesh)
    spec = jax.sharding.PartitionSpec(None, None, "tensor")
    assert sharded.layers.k_proj.sharding == jax.sharding.NamedSharding(mesh, spec)
    assert sharded.layers.k_proj.addressable_shards[0].data.shape == (2, 64, 16)
    expected = dense_logits(QWEN3, params_of(QWEN3), TOKENS)
    np.testing.assert_allclose(dense_logits(QWEN3, sharded, TOKENS), expected, rtol=0, atol=2e-5)


def test_embed_clips_ids_out_of_range():
    params = params_of(QWEN3)
    rows = layers.embed(QWEN3, params, jnp.array([0, 255, 256, 9999], jnp.int32))
    np.testing.assert_array_equal(rows[1], rows[2])
    np.testing.assert_array_equal(rows[1], rows[3])


def test_smollm2_predicts_what_llama_cpp_predicts():
    pytest.importorskip("gguf", reason="needs the extra [demo]")
    recorded = json.loads((pathlib.Path(__file__).parent / "golden" / "smollm2_llama_cpp.json").read_text("utf-8"))
    try:
        model = registry.load_model("smollm2")
    except ValueError as error:
        pytest.skip(str(error))
    assert model.tokenizer is not None
    tokens = model.tokenizer.encode(recorded["text"])
    assert tokens.tolist() == recorded["tokens"]
    got = np.asarray(dense_logits(model.config, model.params, tokens))
    assert got.argmax(-1).tolist() == recorded["argmax"]
    np.testing.assert_allclose(got.max(-1), recorded["largest_logit"], rtol=0, atol=1e-3)
    # With quantised weights llama.cpp rounds activations to 8 bits, we do not: near ties fall either way.
    assert np.mean(got.argmax(-1) == recorded["argmax_quantized"]) > 0.95


EXPERTS = {
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
}
ORACLE_CONFIGS = {
    "qwen3": ("Qwen3", {"head_dim": 32, "attention_bias": True}),
    "qwen3-tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True, "rope_parameters": {"rope_theta": 1e6}}),
    "llama": ("Llama", {}),
    "llama3": (
        "Llama",
        {
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "qwen3-yarn": (
        "Qwen3",
        {
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 100.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "moe": ("Qwen3Moe", EXPERTS),
    "moe-plain-mixed": ("Qwen3Moe", EXPERTS | {"norm_topk_prob": False, "mlp_only_layers": [1]}),
    "moe-sparse-step": ("Qwen3Moe", EXPERTS | {"decoder_sparse_step": 2, "attention_bias": True}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
}


@pytest.mark.oracle
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("theta", "head_dim", "factor", "context"), [(1e6, 128, 4.0, 32768), (1e4, 64, 8.0, 4096)])
def test_yarn_frequencies_equal_transformers(theta, head_dim, factor, context):
    """Theirs are computed in float32, ours in float64 and rounded: the last bit may differ."""
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    rope_init = pytest.importorskip("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS["yarn"]
    rule = {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": factor,
        "original_max_position_embeddings": context,
    }
    longest = int(factor * context)
    theirs = transformers.Qwen3Config(head_dim=head_dim, rope_parameters=rule, max_position_embeddings=longest)
    expected, attention_factor = rope_init(theirs, None)
    scaling = RopeScaling(kind="yarn", factor=factor, original_max_context=context)
    config = dataclasses.replace(QWEN3, head_dim=head_dim, rope_theta=theta, rope_scaling=scaling)
    np.testing.assert_allclose(rope.rope_frequencies(config), expected.numpy(), rtol=2.5e-7, atol=0)
    assert scaling.yarn_attention_factor == pytest.approx(attention_factor, rel=1e-12)


@pytest.mark.oracle
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ORACLE_CONFIGS)
def test_logits_equal_transformers(name, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    family, options = ORACLE_CONFIGS[name]
    if "rope_parameters" in options:
        options = options | {"rope_parameters": {"rope_type": "default", **options["rope_parameters"]}}
    config = getattr(transformers, f"{family}Config")(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.25,
        **options,
    )
    torch.manual_seed(0)
    theirs = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in theirs.named_parameters():
            if "norm" in parameter_name or "bias" in parameter_name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    theirs.save_pretrained(tmp_path)
    model = registry.load_model(str(tmp_path))
    with torch.no_grad():
        expected = theirs(torch.from_numpy(TOKENS.astype(np.int64))[None]).logits[0].numpy()
    assert expected.std() > 0.5
    if family == "Qwen3Moe":
        assert np.asarray(model.params.layers.router).std(axis=(1, 2)).max() > 0.1
    got = np.asarray(dense_logits(model.config, model.params, TOKENS))
    print(
        f"{name}: largest difference {np.abs(got - expected).max():.2e} of logits with deviation {expected.std():.2f}"
    )
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)
