"""Random weights: models for benchmarks and tests that need no checkpoint.

Speed and memory do not depend on the values of the weights, and nor does anything the cache does. The scales are
those of a trained model's first moments: hidden state of order one, logits of order one, and attention sharp enough
(scores with a deviation near three) that a token far back in a long context still changes the result.
"""

import concurrent.futures
import dataclasses
import functools
import itertools
import math

import jax
import numpy as np
from jax.sharding import Mesh

from penelope_jax.models.config import ModelConfig
from penelope_jax.models.layers import Params, parameter_shapes
from penelope_jax.models.placement import Index, Leaf, place_params

_HEAD_NORM_MEAN = math.sqrt(3.0)


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


def random_params(config: ModelConfig, mesh: Mesh, seed: int = 0) -> Params:
    """Draws parameters of `config`'s shapes, placed on `mesh`. The same seed gives the same values on every machine.

    Host memory: one stacked leaf at a time; of experts, those of one device.
    """
    paths = [path for path, _ in jax.tree.leaves_with_path(parameter_shapes(config))]
    numbers = {path[-1].name: number for number, path in enumerate(paths)}
    num_stacked = {path[-1].name: len(path) - 1 + path[-1].name.startswith("expert_") for path in paths}

    with concurrent.futures.ThreadPoolExecutor() as threads:  # numpy draws without holding the interpreter's lock

        @functools.lru_cache(maxsize=1)
        def drawn(field: str, leaf: Leaf, stacked: Index) -> np.ndarray:
            """Draws a leaf matrix by matrix, so that those in `stacked` need no others."""
            mean, deviation = _moments(config, field, leaf.shape)
            out = np.empty([part.stop - part.start for part in stacked] + list(leaf.shape[len(stacked) :]), leaf.dtype)
            places = list(itertools.product(*(range(part.start, part.stop) for part in stacked)))
            draw = functools.partial(_draw, seed=(seed, numbers[field]), mean=mean, deviation=deviation)
            list(threads.map(draw, places, out.reshape(len(places), *leaf.shape[len(stacked) :])))
            return out

        def read(field: str, leaf: Leaf, index: Index) -> np.ndarray:
            stacked = num_stacked[field]
            return drawn(field, leaf, index[:stacked])[(slice(None),) * stacked + index[stacked:]]

        return place_params(config, mesh, read)


def _draw(place: tuple[int, ...], out: np.ndarray, *, seed: tuple[int, int], mean: float, deviation: float) -> None:
    generator = np.random.Generator(np.random.SFC64((*seed, *(place or (0,)))))
    out[...] = generator.standard_normal(out.shape, dtype=np.float32) * np.float32(deviation) + np.float32(mean)


def _moments(config: ModelConfig, name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    if name in ("q_norm", "k_norm"):
        return _HEAD_NORM_MEAN, 0.1
    if name.endswith("_norm"):
        return 1.0, 0.1
    if name.endswith("_bias"):
        return 0.0, 0.1
    if name == "embed":
        return 0.0, 1.0 / math.sqrt(config.hidden_size) if config.tied_embeddings else 1.0
    return 0.0, 1.0 / math.sqrt(shape[-2])
