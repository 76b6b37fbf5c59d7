"""The decoder as pure functions of rows.

Every function here takes rows of hidden state without a batch axis and treats each row by itself, so the caller may
split rows into tiles as it likes; attention, the only place where rows meet, is a kernel. Matrix products run in the
parameters' dtype and accumulate in float32; norms, RoPE and the gate are float32 inside.

Letters: T rows, R rows of the head, D model, N query heads, K kv heads, H head, F MLP width, V vocabulary, L layers.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from penelope_jax.models import llama
from penelope_jax.models.config import ModelConfig

MESH_AXES = ("data", "tensor")


@struct.dataclass
class LayerParams:
    """Parameters of the layers. In `Params` every leaf has a leading L axis; the functions take one layer's slice."""

    attention_norm: jax.Array  # [D]
    q_proj: jax.Array  # [D, N * H]
    k_proj: jax.Array  # [D, K * H]
    v_proj: jax.Array  # [D, K * H]
    o_proj: jax.Array  # [N * H, D]
    mlp_norm: jax.Array  # [D]
    gate_proj: jax.Array  # [D, F]
    up_proj: jax.Array  # [D, F]
    down_proj: jax.Array  # [F, D]
    q_norm: jax.Array | None = None  # [H]
    k_norm: jax.Array | None = None  # [H]
    q_bias: jax.Array | None = None  # [N * H]
    k_bias: jax.Array | None = None  # [K * H]
    v_bias: jax.Array | None = None  # [K * H]
    o_bias: jax.Array | None = None  # [D]


@struct.dataclass
class Params:
    """All parameters of a model. `lm_head` is None when the embedding serves as the head."""

    embed: jax.Array  # [V, D]
    layers: LayerParams  # every leaf with a leading L axis
    final_norm: jax.Array  # [D]
    lm_head: jax.Array | None = None  # [D, V]


def parameter_shapes(config: ModelConfig) -> Params:
    """Returns a `Params` whose leaves are `jax.ShapeDtypeStruct`."""
    d, f, v, h = config.hidden_size, config.mlp_size, config.vocab_size, config.head_dim
    q_size, kv_size = config.num_heads * h, config.num_kv_heads * h
    layers = {
        "attention_norm": (d,),
        "q_proj": (d, q_size),
        "k_proj": (d, kv_size),
        "v_proj": (d, kv_size),
        "o_proj": (q_size, d),
        "mlp_norm": (d,),
        "gate_proj": (d, f),
        "up_proj": (d, f),
        "down_proj": (f, d),
    }
    if config.qk_norm:
        layers |= {"q_norm": (h,), "k_norm": (h,)}
    if config.attention_bias:
        layers |= {"q_bias": (q_size,), "k_bias": (kv_size,), "v_bias": (kv_size,), "o_bias": (d,)}

    def leaf(*shape) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(config.dtype))

    return Params(
        embed=leaf(v, d),
        layers=LayerParams(**{name: leaf(config.num_layers, *shape) for name, shape in layers.items()}),
        final_norm=leaf(d),
        lm_head=None if config.tied_embeddings else leaf(d, v),
    )


# Axis of each leaf (L included) that lies over `tensor`; leaves not named are replicated.
_SHARDED_LAYER_AXIS = {
    "q_proj": 2,
    "k_proj": 2,
    "v_proj": 2,
    "o_proj": 1,
    "gate_proj": 2,
    "up_proj": 2,
    "down_proj": 1,
    "q_bias": 1,
    "k_bias": 1,
    "v_bias": 1,
}


def parameter_specs(config: ModelConfig) -> Params:
    """Returns a `Params` whose leaves are `PartitionSpec`s over a mesh with axes `data` and `tensor`."""
    shapes = parameter_shapes(config)

    def spec(name: str) -> Any:
        axis = _SHARDED_LAYER_AXIS.get(name)
        return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, "tensor")

    fields = [field.name for field in dataclasses.fields(LayerParams)]
    top: dict[str, Any] = {"embed": PartitionSpec("tensor", None), "final_norm": PartitionSpec()}
    if shapes.lm_head is not None:
        top["lm_head"] = PartitionSpec(None, "tensor")
    layers = LayerParams(**{name: spec(name) for name in fields if getattr(shapes.layers, name) is not None})
    return Params(layers=layers, **top)


def single_device_mesh() -> Mesh:
    """Returns the 1 x 1 mesh of the first device."""
    return Mesh(np.array(jax.local_devices()[:1]).reshape(1, 1), MESH_AXES, axis_types=(AxisType.Auto, AxisType.Auto))


def parameter_shardings(config: ModelConfig, mesh: Mesh) -> Params:
    """Returns a `Params` of `NamedSharding`s.

    Raises:
        ValueError: the mesh has other axes, or its `tensor` axis does not divide what lies over it.
    """
    if tuple(mesh.axis_names) != MESH_AXES:
        raise ValueError(f"mesh axes {tuple(mesh.axis_names)} must be {MESH_AXES}.")
    tensor = mesh.shape["tensor"]
    for name in ("num_kv_heads", "num_heads", "mlp_size", "vocab_size"):
        if getattr(config, name) % tensor:
            more = "; this version does not replicate kv heads" if name == "num_kv_heads" else ""
            raise ValueError(f"mesh axis tensor={tensor} must divide {name}={getattr(config, name)}{more}.")
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), parameter_specs(config))


def embed(config: ModelConfig, params: Params, tokens: jax.Array) -> jax.Array:
    """Looks up the rows of i32[T] `tokens`; returns x [T, D]. Ids out of range are clipped, never NaN."""
    return jnp.take(params.embed, tokens, axis=0, mode="clip").astype(config.dtype)


def qkv(
    config: ModelConfig, layer: LayerParams, x: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Projects rows to heads, rotated at their positions.

    Args:
        config: the model.
        layer: one layer's parameters (no L axis).
        x: [T, D].
        positions: i32[T].

    Returns:
        q [T, N, H], k [T, K, H], v [T, K, H], in x's dtype.
    """
    normed = rms_norm(x, layer.attention_norm, config.norm_eps)
    q = _project(normed, layer.q_proj, layer.q_bias).reshape(-1, config.num_heads, config.head_dim)
    k = _project(normed, layer.k_proj, layer.k_bias).reshape(-1, config.num_kv_heads, config.head_dim)
    v = _project(normed, layer.v_proj, layer.v_bias).reshape(-1, config.num_kv_heads, config.head_dim)
    if config.qk_norm:
        assert layer.q_norm is not None and layer.k_norm is not None, "a model with qk_norm has both weights"
        q = rms_norm(q, layer.q_norm, config.norm_eps)
        k = rms_norm(k, layer.k_norm, config.norm_eps)
    cos, sin = rope_angles(config, positions)
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def mix(config: ModelConfig, layer: LayerParams, x: jax.Array, attended: jax.Array) -> jax.Array:
    """Finishes a layer: output projection, residual, norm, gated MLP, residual.

    Args:
        config: the model.
        layer: one layer's parameters (no L axis).
        x: [T, D], what entered the layer.
        attended: [T, N, H], what attention returned.

    Returns:
        x [T, D] for the next layer.
    """
    attended = attended.reshape(-1, config.num_heads * config.head_dim).astype(x.dtype)
    x = x + _project(attended, layer.o_proj, layer.o_bias)
    normed = rms_norm(x, layer.mlp_norm, config.norm_eps)
    gate = _matmul(normed, layer.gate_proj)
    up = _matmul(normed, layer.up_proj)
    hidden = (jax.nn.silu(gate) * up).astype(x.dtype)
    return x + _project(hidden, layer.down_proj, None)


def logits(config: ModelConfig, params: Params, x: jax.Array) -> jax.Array:
    """Returns f32[R, V] for the rows x [R, D] that left the last layer."""
    normed = rms_norm(x, params.final_norm, config.norm_eps)
    if params.lm_head is not None:
        return _matmul(normed, params.lm_head)
    return jax.lax.dot_general(
        normed,
        params.embed,
        (((1,), (1,)), ((), ())),
        precision=_precision(normed),
        preferred_element_type=jnp.float32,
    )


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Divides the last axis of x by its root mean square and scales it by `weight`, in float32."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * scale * jnp.expand_dims(weight.astype(jnp.float32), tuple(range(x.ndim - 1)))).astype(x.dtype)


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
    else:
        frequencies = llama.stretch_frequencies(
            frequencies,
            factor=scaling.factor,
            low_freq_factor=scaling.low_freq_factor,
            high_freq_factor=scaling.high_freq_factor,
            original_max_context=scaling.original_max_context,
        )
    return frequencies.astype(np.float32)


def rope_angles(config: ModelConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns cos and sin, f32[T, H / 2], of i32[T] positions."""
    angles = positions.astype(jnp.float32)[:, None] * rope_frequencies(config)[None, :]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(heads: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates [T, heads, H] by f32[T, H / 2] angles; dimension i pairs with i + H / 2."""
    first, second = jnp.split(heads.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(heads.dtype)


def _precision(x: jax.Array) -> jax.lax.Precision:
    """float32 means float32 everywhere: the default on an accelerator would round the operands first."""
    return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT


def _matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.matmul(x, weight, precision=_precision(x), preferred_element_type=jnp.float32)


def _project(x: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
    out = _matmul(x, weight)
    if bias is not None:
        out = out + bias.astype(jnp.float32)[None, :]
    return out.astype(x.dtype)
