"""The decoder functions against three oracles: numpy in float64, transformers on torch, and recorded llama.cpp."""

import dataclasses
import functools
import json
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from penelope_jax.models import layers, random_weights, registry
from penelope_jax.models.config import ModelConfig, RopeScaling
from penelope_jax.models.layers import Params

LLAMA3 = RopeScaling(kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_context=32)
QWEN3 = dataclasses.replace(random_weights.PRESETS["tiny"], rope_theta=1e4)
LLAMA = dataclasses.replace(QWEN3, architecture="llama", qk_norm=False, tied_embeddings=True, rope_scaling=LLAMA3)
BIASED = dataclasses.replace(LLAMA, attention_bias=True, rope_scaling=RopeScaling(kind="linear", factor=2.0))
FACTORS = dataclasses.replace(
    LLAMA, rope_scaling=RopeScaling(kind="factors", frequency_factors=(1.0, 1.0, 1.5, 2.0, 3.0, 8.0, 8.0, 8.0))
)
TOKENS = np.random.default_rng(0).integers(0, 256, 80).astype(np.int32)


# The oracle: one token after another, one head after another, in float64.


def numpy_rope(config: ModelConfig, x: np.ndarray, position: int) -> np.ndarray:
    half = config.head_dim // 2
    out = np.empty_like(x)
    for i in range(half):
        angle = position / config.rope_theta ** (2 * i / config.head_dim)
        scaling = config.rope_scaling
        if scaling is not None and scaling.kind == "linear":
            angle /= scaling.factor
        elif scaling is not None and scaling.kind == "factors":
            angle /= scaling.frequency_factors[i]
        elif scaling is not None:
            wavelength = 2 * math.pi * config.rope_theta ** (2 * i / config.head_dim)
            slow = scaling.original_max_context / scaling.low_freq_factor
            fast = scaling.original_max_context / scaling.high_freq_factor
            if wavelength > slow:
                angle /= scaling.factor
            elif wavelength >= fast:
                turns = scaling.original_max_context / wavelength
                smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
                angle = (1 - smooth) * angle / scaling.factor + smooth * angle
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def numpy_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean() + eps) * weight


def numpy_logits(config: ModelConfig, params: Params, tokens: np.ndarray) -> np.ndarray:
    """Returns f64[T, V]."""
    exact: Any = jax.tree.map(lambda leaf: np.asarray(leaf, dtype=np.float64), params)
    size = config.head_dim
    rows = [exact.embed[token] for token in tokens]
    for index in range(config.num_layers):
        layer = jax.tree.map(lambda leaf, index=index: leaf[index], exact.layers)

        def project(row, name, layer=layer):
            bias = getattr(layer, f"{name}_bias")
            return row @ getattr(layer, f"{name}_proj") + (0 if bias is None else bias)

        keys, values, out = [], [], []
        for position, row in enumerate(rows):
            normed = numpy_norm(row, layer.attention_norm, config.norm_eps)
            q, k, v = (project(normed, name).reshape(-1, size) for name in "qkv")
            if config.qk_norm:
                q = np.array([numpy_norm(head, layer.q_norm, config.norm_eps) for head in q])
                k = np.array([numpy_norm(head, layer.k_norm, config.norm_eps) for head in k])
            keys.append([numpy_rope(config, head, position) for head in k])
            values.append(v)
            attended = []
            for number, head in enumerate(q):
                shared = number * config.num_kv_heads // config.num_heads
                turned = numpy_rope(config, head, position)
                weights = np.exp([turned @ key[shared] / math.sqrt(size) for key in keys])
                attended.append(
                    sum(w * value[shared] for w, value in zip(weights, values, strict=True)) / weights.sum()
                )
            row = row + project(np.concatenate(attended), "o")
            normed = numpy_norm(row, layer.mlp_norm, config.norm_eps)
            gate = normed @ layer.gate_proj
            out.append(row + (gate / (1 + np.exp(-gate)) * (normed @ layer.up_proj)) @ layer.down_proj)
        rows = out
    head = exact.embed.T if exact.lm_head is None else exact.lm_head
    return np.array([numpy_norm(row, exact.final_norm, config.norm_eps) @ head for row in rows])


# Ours: the functions of layers.py around plain dense attention.


@functools.partial(jax.jit, static_argnames=("config", "tile"))
def dense_logits(config: ModelConfig, params: Params, tokens: jax.Array, tile: int | None = None) -> jax.Array:
    """Returns f32[T, V]; with a tile, the row-wise parts run over tiles of so many rows."""
    positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    causal = positions[:, None] >= positions[None, :]

    def rowwise(function, *rows):
        if tile is None:
            return function(*rows)
        tiled = [row.reshape(-1, tile, *row.shape[1:]) for row in rows]
        out = jax.lax.map(lambda args: function(*args), tuple(tiled))
        return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), out)

    def one_layer(x, layer):
        q, k, v = rowwise(functools.partial(layers.qkv, config, layer), x, positions)
        group = config.num_heads // config.num_kv_heads
        k, v = jnp.repeat(k, group, axis=1), jnp.repeat(v, group, axis=1)
        scores = jnp.einsum("tnh,snh->nts", q, k, preferred_element_type=jnp.float32) / math.sqrt(config.head_dim)
        weights = jax.nn.softmax(jnp.where(causal[None], scores, -jnp.inf), axis=-1)
        attended = jnp.einsum("nts,snh->tnh", weights.astype(v.dtype), v).astype(x.dtype)
        return rowwise(functools.partial(layers.mix, config, layer), x, attended), None

    x, _ = jax.lax.scan(one_layer, layers.embed(config, params, tokens), params.layers)
    return layers.logits(config, params, x)


def params_of(config: ModelConfig, mesh: Mesh | None = None) -> Params:
    return random_weights.random_params(config, mesh or layers.single_device_mesh(), seed=1)


@pytest.mark.parametrize("config", [QWEN3, LLAMA, BIASED, FACTORS], ids=["qwen3", "llama3", "linear-bias", "factors"])
def test_logits_equal_numpy_in_float64(config):
    params = params_of(config)
    expected = numpy_logits(config, params, TOKENS)
    assert expected.std() > 0.5
    np.testing.assert_allclose(dense_logits(config, params, TOKENS), expected, rtol=0, atol=1e-4)


def swap(params: Params, one: str, other: str) -> Params:
    changed = {one: getattr(params.layers, other), other: getattr(params.layers, one)}
    return dataclasses.replace(params, layers=dataclasses.replace(params.layers, **changed))


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
    ],
    ids=["no-qk-norm", "gate-up", "q-k-norm", "norms", "k-v", "no-rope-scaling", "eps"],
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
    devices = np.array(jax.devices()[:2]).reshape(1, 2)
    mesh = Mesh(devices, layers.MESH_AXES, axis_types=(AxisType.Auto, AxisType.Auto))
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
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
}


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
    got = np.asarray(dense_logits(model.config, model.params, TOKENS))
    print(
        f"{name}: largest difference {np.abs(got - expected).max():.2e} of logits with deviation {expected.std():.2f}"
    )
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)
