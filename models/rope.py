"""Rotary position embeddings: frequencies, and the rules that stretch them to longer contexts."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from penelope_jax.models import llama
from penelope_jax.models.config import ModelConfig


def rope_frequencies(config: ModelConfig) -> np.ndarray:
    """Returns f32[H / 2], radians per position. Computed in float64 on the host: it is a constant of the program."""
    half = config.head_dim // 2
    frequencies = config.rope_theta ** -(np.arange(half, dtype=np.float64) / half)
    scaling = config.rope_scaling
    if scaling is None:
        pass
    elif scaling.kind == "linear":
        frequencies = frequencies / scaling.factor
    elif scaling.kind == "factors":
        frequencies = frequencies / np.asarray(scaling.frequency_factors, dtype=np.float64)
    elif scaling.kind == "llama3":
        frequencies = llama.stretch_frequencies(
            frequencies,
            factor=scaling.factor,
            low_freq_factor=scaling.low_freq_factor,
            high_freq_factor=scaling.high_freq_factor,
            original_max_context=scaling.original_max_context,
        )
    else:
        frequencies = yarn_frequencies(
            frequencies,
            rope_theta=config.rope_theta,
            factor=scaling.factor,
            beta_fast=scaling.beta_fast,
            beta_slow=scaling.beta_slow,
            original_max_context=scaling.original_max_context,
        )
    return frequencies.astype(np.float32)


def yarn_frequencies(
    frequencies: np.ndarray,
    *,
    rope_theta: float,
    factor: float,
    beta_fast: float,
    beta_slow: float,
    original_max_context: int,
) -> np.ndarray:
    """Applies YaRN's rule: slow waves are slowed by `factor`, fast ones kept, a ramp over the dimensions between.

    Args:
        frequencies: f64[H / 2], radians per position.
        rope_theta: their base.
        factor: what the slow waves are divided by.
        beta_fast: a wave that turns more often than this within the original context is kept.
        beta_slow: a wave that turns fewer times is slow.
        original_max_context: positions the model was first trained on.

    Returns:
        f64[H / 2].
    """
    head_dim = 2 * len(frequencies)

    def dimension(turns: float) -> float:
        """Where, counted in pairs, a wave turns so often within the original context."""
        return head_dim * math.log(original_max_context / (turns * 2 * math.pi)) / (2 * math.log(rope_theta))

    first = max(math.floor(dimension(beta_fast)), 0)
    last = min(math.ceil(dimension(beta_slow)), head_dim - 1)
    width = last - first if last != first else 0.001  # a step in place of a ramp
    slowed = np.clip((np.arange(len(frequencies), dtype=np.float64) - first) / width, 0.0, 1.0)
    return frequencies * ((1 - slowed) + slowed / factor)


def rope_angles(config: ModelConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns cos and sin, f32[T, H / 2], of i32[T] positions; YaRN scales both by its attention factor."""
    angles = positions.astype(jnp.float32)[:, None] * rope_frequencies(config)[None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if config.rope_scaling is None or config.rope_scaling.kind != "yarn":
        return cos, sin
    factor = jnp.float32(config.rope_scaling.yarn_attention_factor)
    return cos * factor, sin * factor


def rotate(heads: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates [T, heads, H] by f32[T, H / 2] angles; dimension i pairs with i + H / 2."""
    first, second = jnp.split(heads.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(heads.dtype)
