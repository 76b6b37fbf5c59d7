"""Shapes of models by name: real ones, and toys for tests and measurements. No weights, and no jax."""

import dataclasses
import functools

from penelope_jax.models.config import ModelConfig


def _qwen3(layers, hidden, heads, kv_heads, head_dim, mlp, vocab, *, tied, max_context, dtype) -> ModelConfig:
    return ModelConfig(
        architecture="qwen3",
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_size=mlp,
        rope_theta=1e6,
        norm_eps=1e-6,
        tied_embeddings=tied,
        max_context=max_context,
        qk_norm=True,
        dtype=dtype,
    )


def _qwen3_moe(layers, hidden, heads, kv_heads, experts, per_token, expert_size) -> ModelConfig:
    mlp = per_token * expert_size  # of dense layers, which these do not have
    dense = _real(layers, hidden, heads, kv_heads, 128, mlp, 151936, tied=False)
    return _with_experts(dense, experts, per_token, expert_size)


def _with_experts(dense: ModelConfig, experts: int, per_token: int, expert_size: int) -> ModelConfig:
    return dataclasses.replace(
        dense,
        architecture="qwen3_moe",
        num_experts=experts,
        experts_per_token=per_token,
        expert_size=expert_size,
        renormalize_experts=True,
    )


_real = functools.partial(_qwen3, max_context=40960, dtype="bfloat16")
_tiny = _qwen3(2, 64, 4, 2, 16, 128, 256, tied=False, max_context=4096, dtype="float32")

PRESETS: dict[str, ModelConfig] = {
    "tiny": _tiny,
    "b": _qwen3(2, 128, 4, 2, 32, 384, 512, tied=True, max_context=65536, dtype="float32"),
    "qwen3-0.6b": _real(28, 1024, 16, 8, 128, 3072, 151936, tied=True),
    "qwen3-1.7b": _real(28, 2048, 16, 8, 128, 6144, 151936, tied=True),
    "qwen3-4b": _real(36, 2560, 32, 8, 128, 9728, 151936, tied=True),
    "qwen3-8b": _real(36, 4096, 32, 8, 128, 12288, 151936, tied=False),
    "qwen3-14b": _real(40, 5120, 40, 8, 128, 17408, 151936, tied=False),
    "qwen3-32b": _real(64, 5120, 64, 8, 128, 25600, 151936, tied=False),
    "tiny-moe": _with_experts(_tiny, experts=8, per_token=2, expert_size=32),
    "qwen3-30b-a3b": _qwen3_moe(48, 2048, 32, 4, experts=128, per_token=8, expert_size=768),
    "qwen3-235b-a22b": _qwen3_moe(94, 4096, 64, 4, experts=128, per_token=8, expert_size=1536),
}
