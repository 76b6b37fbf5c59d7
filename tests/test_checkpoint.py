"""Weights written here by hand and read back: safetensors, single and sharded, whole and broken."""

import dataclasses
import json
import pathlib

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from model_oracle import cpu_mesh

from penelope_jax.models import checkpoint, layers, random_weights, registry
from penelope_jax.models.config import ModelConfig

QWEN3 = dataclasses.replace(random_weights.PRESETS["tiny"], vocab_size=300)
MOE = dataclasses.replace(random_weights.PRESETS["tiny-moe"], vocab_size=300)
MIXED = dataclasses.replace(MOE, num_layers=3, dense_layers=(0, 2))
LLAMA = dataclasses.replace(QWEN3, architecture="llama", qk_norm=False, attention_bias=True, tied_embeddings=True)
HF_NAMES = {
    "attention_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    **{f"{name}_proj": f"self_attn.{name}_proj.weight" for name in "qkvo"},
    **{f"{name}_bias": f"self_attn.{name}_proj.bias" for name in "qkvo"},
    **{f"{name}_proj": f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
    "router": "mlp.gate.weight",
}


DENSE_ONLY = ("gate_proj", "up_proj", "down_proj")
EXPERTS_ONLY = ("router", "expert_gate_proj", "expert_up_proj", "expert_down_proj")


def has(config: ModelConfig, layer: int, field: str) -> bool:
    """Whether that layer of a model with layers of both kinds has that parameter."""
    if not config.dense_layers:
        return True
    return field not in (EXPERTS_ONLY if layer in config.dense_layers else DENSE_ONLY)


def numpy_params(config: ModelConfig) -> layers.Params:
    """Returns random parameters, zero where a layer is of the other kind."""
    params = random_weights.random_params(config, layers.single_device_mesh(), seed=5)
    params = jax.tree.map(np.array, params)
    for layer in range(config.num_layers):
        for field in DENSE_ONLY + EXPERTS_ONLY:
            if not has(config, layer, field):
                getattr(params.layers, field)[layer] = 0
    return params


def assert_same(got: layers.Params, expected: layers.Params) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for (path, leaf), want in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        assert leaf.dtype == want.dtype, path
        np.testing.assert_array_equal(np.asarray(leaf), want, err_msg=str(path))


def hf_config(config: ModelConfig) -> dict:
    experts = {
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "moe_intermediate_size": config.expert_size,
        "norm_topk_prob": config.renormalize_experts,
        "mlp_only_layers": list(config.dense_layers),
    }
    return {
        "model_type": config.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.mlp_size,
        "max_position_embeddings": config.max_context,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_embeddings,
        "attention_bias": config.attention_bias,
        "torch_dtype": config.dtype,
    } | (experts if config.num_experts else {})


def hf_tensors(config: ModelConfig, params: layers.Params, experts: str = "each") -> dict[str, np.ndarray]:
    """Names and turns parameters as the published files do: projections are [out, in].

    Args:
        config: the model.
        params: its parameters.
        experts: `each` has tensors of its own, or those of a layer are fused, `out-in` or `in-out`.
    """
    tensors = {"model.embed_tokens.weight": params.embed, "model.norm.weight": params.final_norm}
    if params.lm_head is not None:
        tensors["lm_head.weight"] = params.lm_head.T
    for field, name in HF_NAMES.items():
        stacked = getattr(params.layers, field)
        for i, leaf in enumerate([] if stacked is None else stacked):
            if has(config, i, field):
                tensors[f"model.layers.{i}.{name}"] = leaf.T if leaf.ndim == 2 else leaf
    for i in range(config.num_layers if config.num_experts else 0):
        if not has(config, i, "router"):
            continue
        prefix = f"model.layers.{i}.mlp.experts"
        parts = {name: getattr(params.layers, f"expert_{name}_proj")[i] for name in ("gate", "up", "down")}
        if experts == "each":
            for name, part in parts.items():
                tensors |= {f"{prefix}.{e}.{name}_proj.weight": part[e].T for e in range(config.num_experts)}
            continue
        fused = {"gate_up": np.concatenate([parts["gate"], parts["up"]], axis=2), "down": parts["down"]}
        for name, part in fused.items():
            tensors[f"{prefix}.{name}_proj"] = part.swapaxes(1, 2) if experts == "out-in" else part
    return {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}


def write_hf(directory: pathlib.Path, config: ModelConfig, tensors: dict[str, np.ndarray], num_shards: int = 1) -> None:
    (directory / "config.json").write_text(json.dumps(hf_config(config)))
    if num_shards == 1:
        safetensors.numpy.save_file(tensors, directory / "model.safetensors")
        return
    names = sorted(tensors)
    weight_map = {name: f"model-{i % num_shards + 1:05}-of-{num_shards:05}.safetensors" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        safetensors.numpy.save_file(
            {name: tensors[name] for name in names if weight_map[name] == file}, directory / file
        )
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("config", [QWEN3, LLAMA, MOE, MIXED], ids=["qwen3", "llama", "moe", "mixed"])
def test_safetensors_round_trip(tmp_path, config, dtype, num_shards):
    config = dataclasses.replace(config, dtype=dtype)
    params = numpy_params(config)
    write_hf(tmp_path, config, hf_tensors(config, params), num_shards)
    loaded = registry.load_model(str(tmp_path))
    assert loaded.config == config
    assert loaded.name == tmp_path.name
    assert_same(loaded.params, params)


@pytest.mark.parametrize("size", [24, 32, 64], ids=["oblong", "gate-up-square", "down-square"])
@pytest.mark.parametrize("experts", ["out-in", "in-out"])
def test_fused_experts_in_both_orders(tmp_path, experts, size):
    """Hidden size 64: with experts of 32 the gates and ups are square, with 64 the downs; the other one tells."""
    config = dataclasses.replace(MIXED, expert_size=size, dense_layers=(0,))
    params = numpy_params(config)
    write_hf(tmp_path, config, hf_tensors(config, params, experts))
    assert_same(registry.load_model(str(tmp_path)).params, params)


def with_copied_heads(config: ModelConfig, params: layers.Params, copies: int) -> layers.Params:
    def copied(leaf):
        heads = leaf.reshape(*leaf.shape[:-1], config.num_kv_heads, config.head_dim)
        return np.repeat(heads, copies, axis=-2).reshape(*leaf.shape[:-1], -1)

    changed = {name: copied(getattr(params.layers, name)) for name in ("k_proj", "v_proj", "k_bias", "v_bias")}
    return dataclasses.replace(params, layers=dataclasses.replace(params.layers, **changed))


@pytest.mark.parametrize(("data", "tensor"), [(2, 2), (1, 4)])
def test_each_device_reads_its_own_part(tmp_path, monkeypatch, data, tensor):
    config = dataclasses.replace(MIXED, attention_bias=True, dtype="bfloat16")
    params = numpy_params(config)
    write_hf(tmp_path, config, hf_tensors(config, params), num_shards=2)
    read = {}  # number of values by parameter
    stack = checkpoint.stack_sources

    def count(leaf, index, sources, read_tensor):
        part = stack(leaf, index, sources, read_tensor)
        name = next(iter(sources.values())).name
        read[name] = [*read.get(name, ()), part.size / np.prod(leaf.shape)]
        return part

    monkeypatch.setattr(checkpoint, "stack_sources", count)
    mesh = cpu_mesh(data, tensor)
    loaded = registry.load_model(str(tmp_path), mesh=mesh)
    assert loaded.config.kv_head_copies == tensor // 2
    assert_same(loaded.params, with_copied_heads(config, params, tensor // 2))
    for leaf, sharding in zip(
        jax.tree.leaves(loaded.params), jax.tree.leaves(layers.parameter_shardings(loaded.config, mesh)), strict=True
    ):
        assert leaf.sharding == sharding
    for name, parts in (
        ("model.layers.1.mlp.experts.0.up_proj.weight", [0.25] * 4),
        ("model.layers.0.self_attn.o_proj.weight", [1 / tensor] * tensor),  # once for all of `data`
        ("model.layers.0.self_attn.k_proj.weight", [0.5] * tensor),  # a copy needs the head it is of
        ("model.norm.weight", [1]),
    ):
        assert read[name] == parts


def test_dtype_is_converted(tmp_path):
    params = numpy_params(QWEN3)
    half = {name: tensor.astype(np.float16) for name, tensor in hf_tensors(QWEN3, params).items()}
    write_hf(tmp_path, QWEN3, half)
    assert_same(registry.load_model(str(tmp_path)).params, jax.tree.map(lambda x: x.astype("f2").astype("f4"), params))
    low = registry.load_model(str(tmp_path), dtype="bfloat16")
    assert low.config.dtype == "bfloat16"
    assert_same(low.params, jax.tree.map(lambda x: x.astype("f2").astype(ml_dtypes.bfloat16), params))


def test_extra_copies_of_a_tied_embedding_and_old_buffers_are_ignored(tmp_path):
    params = numpy_params(LLAMA)
    tensors = hf_tensors(LLAMA, params)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    write_hf(tmp_path, LLAMA, tensors)
    assert_same(registry.load_model(str(tmp_path)).params, params)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [7, 8]}, {}, (7, 8)),
        ({"eos_token_id": 7}, {"eos_token_id": 9}, (7,)),
        (None, {"eos_token_id": 9}, (9,)),
        (None, {}, ()),
    ],
)
def test_eos_token_ids(tmp_path, generation, config, expected):
    write_hf(tmp_path, QWEN3, hf_tensors(QWEN3, numpy_params(QWEN3)))
    (tmp_path / "config.json").write_text(json.dumps(hf_config(QWEN3) | config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert registry.load_model(str(tmp_path)).eos_token_ids == expected


def test_bad_eos_token_id(tmp_path):
    write_hf(tmp_path, QWEN3, hf_tensors(QWEN3, numpy_params(QWEN3)))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id='</s>' must be an integer or a list"):
        registry.load_model(str(tmp_path))


def without(name):
    return lambda tensors: tensors.pop(name)


def with_tensor(name, tensor):
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("lm_head.weight"), "missing tensors (1): lm_head.weight."),
        (
            without("model.layers.1.self_attn.q_norm.weight"),
            "missing tensors (1): model.layers.1.self_attn.q_norm.weight.",
        ),
        (lambda tensors: tensors.clear() or tensors.update(a=np.ones(1, "f4")), "missing tensors (25): "),
        (with_tensor("extra.weight", np.ones(3, "f4")), "tensors that are not part of this model (1): extra.weight."),
        (
            with_tensor("model.layers.2.mlp.up_proj.weight", np.ones((128, 64), "f4")),
            "tensors that are not part of this model (1): model.layers.2.mlp.up_proj.weight.",
        ),
        (
            with_tensor("model.layers.0.mlp.down_proj.weight", np.ones((128, 64), "f4")),
            "model.safetensors: tensor model.layers.0.mlp.down_proj.weight has shape [128, 64]; the model needs [64, 128].",
        ),
        (
            with_tensor("model.norm.weight", np.ones(64, "i8")),
            "model.safetensors: tensor model.norm.weight is stored as I64; supported: F32, F16, BF16.",
        ),
    ],
)
def test_wrong_tensors_are_refused(tmp_path, change, message):
    tensors = hf_tensors(QWEN3, numpy_params(QWEN3))
    change(tensors)
    write_hf(tmp_path, QWEN3, tensors)
    with pytest.raises(ValueError) as raised:
        registry.load_model(str(tmp_path))
    assert str(tmp_path) in str(raised.value)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("experts", "change", "message"),
    [
        (
            "each",
            lambda tensors: [tensors.pop(name) for name in list(tensors) if "experts.7." in name],
            "layer 0 has 7 experts; the configuration says num_experts=8",
        ),
        (
            "each",
            lambda tensors: [tensors.pop(name) for name in list(tensors) if "experts" in name],
            "layer 0 has 0 experts; the configuration says num_experts=8",
        ),
        (
            "each",
            lambda tensors: tensors.update({"model.layers.0.mlp.experts.8.up_proj.weight": np.ones((32, 64), "f4")}),
            "layer 0 has 9 experts; the configuration says num_experts=8",
        ),
        (
            "each",
            without("model.layers.1.mlp.experts.3.up_proj.weight"),
            "missing tensors (1): model.layers.1.mlp.experts.3.up_proj.weight.",
        ),
        (
            "each",
            with_tensor("model.layers.1.mlp.experts.3.up_proj.weight", np.ones((31, 64), "f4")),
            "tensor model.layers.1.mlp.experts.3.up_proj.weight has shape [31, 64]; the model needs [32, 64].",
        ),
        (
            "each",
            with_tensor("model.layers.1.mlp.gate.weight", np.ones((7, 64), "f4")),
            "tensor model.layers.1.mlp.gate.weight has shape [7, 64]; the model needs [8, 64].",
        ),
        (
            "out-in",
            with_tensor("model.layers.0.mlp.experts.gate_up_proj", np.ones((7, 64, 64), "f4")),
            "tensor model.layers.0.mlp.experts.gate_up_proj has shape [7, 64, 64]; the model needs [8, 64, 64].",
        ),
        (
            "out-in",
            with_tensor("model.layers.1.mlp.experts.down_proj", np.ones((8, 32, 64), "f4")),
            "tensor model.layers.1.mlp.experts.down_proj has shape [8, 32, 64]; the model needs [8, 64, 32].",
        ),
        (
            "out-in",
            without("model.layers.0.mlp.experts.down_proj"),
            "missing tensors (1): model.layers.0.mlp.experts.down_proj.",
        ),
    ],
)
def test_wrong_experts_are_refused(tmp_path, experts, change, message):
    tensors = hf_tensors(MOE, numpy_params(MOE), experts)
    change(tensors)
    write_hf(tmp_path, MOE, tensors)
    with pytest.raises(ValueError) as raised:
        registry.load_model(str(tmp_path))
    assert str(tmp_path) in str(raised.value)
    assert message in str(raised.value)


@pytest.mark.parametrize("keep", [0, 5, 100, 4000, -1])
def test_truncated_safetensors(tmp_path, keep):
    write_hf(tmp_path, QWEN3, hf_tensors(QWEN3, numpy_params(QWEN3)))
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:keep])
    size = len(whole[:keep])
    with pytest.raises(ValueError, match=rf"model\.safetensors: broken or truncated safetensors file of {size} bytes"):
        registry.load_model(str(tmp_path))


def test_broken_shards(tmp_path):
    write_hf(tmp_path, QWEN3, hf_tensors(QWEN3, numpy_params(QWEN3)), num_shards=2)
    second = tmp_path / "model-00002-of-00002.safetensors"
    kept = second.read_bytes()
    second.unlink()
    with pytest.raises(
        ValueError, match=r"model-00002-of-00002\.safetensors: missing; .*index\.json has 12 tensors in it"
    ):
        registry.load_model(str(tmp_path))
    second.write_bytes(kept[:-7])
    with pytest.raises(ValueError, match=r"model-00002-of-00002\.safetensors: broken or truncated"):
        registry.load_model(str(tmp_path))
    second.write_bytes((tmp_path / "model-00001-of-00002.safetensors").read_bytes())
    with pytest.raises(
        ValueError, match=r"model-00002-of-00002\.safetensors: tensor .* is also in model-00001-of-00002"
    ):
        registry.load_model(str(tmp_path))


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ('{"weight_map": []}', "field 'weight_map' must map tensor names to file names"),
        (
            '{"weight_map": {"a": "../model.safetensors"}}',
            "'../model.safetensors' must be a file name without a folder",
        ),
        ("{", "not valid JSON"),
    ],
)
def test_broken_index(tmp_path, index, message):
    (tmp_path / "config.json").write_text(json.dumps(hf_config(QWEN3)))
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError) as raised:
        registry.load_model(str(tmp_path))
    assert f"{tmp_path / 'model.safetensors.index.json'}: " in str(raised.value)
    assert message in str(raised.value)
