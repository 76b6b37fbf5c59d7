"""A decoder twice: in numpy, one token after another in float64, and the package's functions around dense attention."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from penelope_jax.models import layers, random_weights
from penelope_jax.models.config import ModelConfig, RopeScaling
from penelope_jax.models.layers import Params


def numpy_yarn(scaling: RopeScaling, theta: float, head_dim: int, i: int) -> float:
    """What YaRN divides the angle of pair i by, between 1 / factor and 1; the ramp is by whole pairs."""

    def pair(turns):
        return head_dim / 2 * math.log(scaling.original_max_context / (2 * math.pi * turns), theta)

    first, last = max(math.floor(pair(scaling.beta_fast)), 0), min(math.ceil(pair(scaling.beta_slow)), head_dim - 1)
    slowed = min(max((i - first) / (last - first), 0.0), 1.0)
    return slowed / scaling.factor + 1 - slowed


def numpy_rope(config: ModelConfig, x: np.ndarray, position: int) -> np.ndarray:
    half = config.head_dim // 2
    out = np.empty_like(x)
    scale = 1.0
    for i in range(half):
        angle = position / config.rope_theta ** (2 * i / config.head_dim)
        scaling = config.rope_scaling
        if scaling is not None and scaling.kind == "yarn":
            angle *= numpy_yarn(scaling, config.rope_theta, config.head_dim, i)
            scale = 0.1 * math.log(scaling.factor) + 1 if scaling.attention_factor is None else scaling.attention_factor
        elif scaling is not None and scaling.kind == "linear":
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
    return out * scale


def numpy_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean() + eps) * weight


def numpy_mlp(config: ModelConfig, layer: Any, index: int, row: np.ndarray) -> np.ndarray:
    def gated(gate_proj, up_proj, down_proj):
        gate = row @ gate_proj
        return (gate / (1 + np.exp(-gate)) * (row @ up_proj)) @ down_proj

    if not config.num_experts or index in config.dense_layers:
        return gated(layer.gate_proj, layer.up_proj, layer.down_proj)
    weights = np.exp(row @ layer.router)
    weights /= weights.sum()
    chosen = sorted(range(config.num_experts), key=lambda e: -weights[e])[: config.experts_per_token]
    total = weights[chosen].sum() if config.renormalize_experts else 1.0
    return sum(
        weights[e] / total * gated(layer.expert_gate_proj[e], layer.expert_up_proj[e], layer.expert_down_proj[e])
        for e in chosen
    )


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
            out.append(row + numpy_mlp(config, layer, index, normed))
        rows = out
    head = exact.embed.T if exact.lm_head is None else exact.lm_head
    return np.array([numpy_norm(row, exact.final_norm, config.norm_eps) @ head for row in rows])


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


def cpu_mesh(data: int, tensor: int) -> Mesh:
    """Returns a mesh of the first devices."""
    devices = np.array(jax.devices()[: data * tensor]).reshape(data, tensor)
    return Mesh(devices, layers.MESH_AXES, axis_types=(AxisType.Auto, AxisType.Auto))


def with_layers(params: Params, **changes: Any) -> Params:
    return dataclasses.replace(params, layers=dataclasses.replace(params.layers, **changes))


def swap(params: Params, one: str, other: str) -> Params:
    return with_layers(params, **{one: getattr(params.layers, other), other: getattr(params.layers, one)})
