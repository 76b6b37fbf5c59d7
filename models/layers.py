"""The decoder as pure functions of rows.

Every function here takes rows of hidden state without a batch axis and treats each row by itself, so the caller may
split rows into tiles as it likes; attention, the only place where rows meet, is a kernel. Matrix products run in the
parameters' dtype and accumulate in float32; norms, RoPE and the gate are float32 inside.

Letters: T rows, R rows of the head, D model, N query heads, K kv heads, H head, F MLP width, E experts, I their
width, V vocabulary, L layers.

`lax.scan` over the layers hands out one layer at a time, so every leaf has all L layers. In a model whose layers are
not all of one kind each layer therefore holds the parameters of both, zeros for the kind it is not, and a flag; a
layer runs one. Of the published models all layers are of one kind.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from penelope_jax.models import moe
from penelope_jax.models.config import ModelConfig
from penelope_jax.models.linear import gated_mlp, matmul, precision, project
from penelope_jax.models.rope import rope_angles, rotate

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
    gate_proj: jax.Array | None = None  # [D, F]
    up_proj: jax.Array | None = None  # [D, F]
    down_proj: jax.Array | None = None  # [F, D]
    q_norm: jax.Array | None = None  # [H]
    k_norm: jax.Array | None = None  # [H]
    q_bias: jax.Array | None = None  # [N * H]
    k_bias: jax.Array | None = None  # [K * H]
    v_bias: jax.Array | None = None  # [K * H]
    o_bias: jax.Array | None = None  # [D]
    router: jax.Array | None = None  # [D, E]
    expert_gate_proj: jax.Array | None = None  # [E, D, I]
    expert_up_proj: jax.Array | None = None  # [E, D, I]
    expert_down_proj: jax.Array | None = None  # [E, I, D]
    has_experts: jax.Array | None = None  # bool; where layers differ


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
    }
    if not config.num_experts or config.dense_layers:
        layers |= {"gate_proj": (d, f), "up_proj": (d, f), "down_proj": (f, d)}
    if config.qk_norm:
        layers |= {"q_norm": (h,), "k_norm": (h,)}
    if config.attention_bias:
        layers |= {"q_bias": (q_size,), "k_bias": (kv_size,), "v_bias": (kv_size,), "o_bias": (d,)}

    if config.num_experts:
        e, i = config.num_experts, config.expert_size
        layers |= {"router": (d, e)}
        layers |= {"expert_gate_proj": (e, d, i), "expert_up_proj": (e, d, i), "expert_down_proj": (e, i, d)}
        layers |= {"has_experts": ()} if config.dense_layers else {}

    def leaf(*shape, dtype=config.dtype) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    def layer_leaf(name, shape) -> Any:
        return leaf(config.num_layers, *shape, dtype="bool" if name == "has_experts" else config.dtype)

    return Params(
        embed=leaf(v, d),
        layers=LayerParams(**{name: layer_leaf(name, shape) for name, shape in layers.items()}),
        final_norm=leaf(d),
        lm_head=None if config.tied_embeddings else leaf(d, v),
    )


# Axis of each leaf (L included) that lies over `tensor`, of experts over both; leaves not named are replicated.
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
    "expert_gate_proj": 1,
    "expert_up_proj": 1,
    "expert_down_proj": 1,
}


def parameter_specs(config: ModelConfig) -> Params:
    """Returns a `Params` whose leaves are `PartitionSpec`s over a mesh with axes `data` and `tensor`."""
    shapes = parameter_shapes(config)

    def spec(name: str) -> Any:
        axis = _SHARDED_LAYER_AXIS.get(name)
        over = moe.EXPERT_AXES if name.startswith("expert_") else "tensor"
        return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, over)

    fields = [field.name for field in dataclasses.fields(LayerParams)]
    top: dict[str, Any] = {"embed": PartitionSpec("tensor", None), "final_norm": PartitionSpec()}
    if shapes.lm_head is not None:
        top["lm_head"] = PartitionSpec(None, "tensor")
    layers = LayerParams(**{name: spec(name) for name in fields if getattr(shapes.layers, name) is not None})
    return Params(layers=layers, **top)


def single_device_mesh() -> Mesh:
    """Returns the 1 x 1 mesh of the first device."""
    return Mesh(np.array(jax.local_devices()[:1]).reshape(1, 1), MESH_AXES, axis_types=(AxisType.Auto, AxisType.Auto))


def device_mesh(data: int, tensor: int) -> Mesh:
    """Returns the `data` x `tensor` mesh of the first devices.

    Raises:
        ValueError: there are not that many devices.
    """
    devices = jax.devices()
    if data < 1 or tensor < 1 or data * tensor > len(devices):
        raise ValueError(f"a mesh of {data} x {tensor} needs {data * tensor} devices; there are {len(devices)}.")
    return Mesh(
        np.array(devices[: data * tensor]).reshape(data, tensor), MESH_AXES, axis_types=(AxisType.Auto, AxisType.Auto)
    )


def config_on_mesh(config: ModelConfig, mesh: Mesh) -> ModelConfig:
    """Returns `config` with its kv heads copied as often as it takes to give each device along `tensor` its own.

    Raises:
        ValueError: the mesh has other axes, or the heads cannot be spread evenly.
    """
    tensor = _tensor_size(mesh)
    num_kv_heads = config.num_kv_heads // config.kv_head_copies
    if tensor <= num_kv_heads:
        return dataclasses.replace(config, num_kv_heads=num_kv_heads, kv_head_copies=1)
    if tensor % num_kv_heads or config.num_heads % tensor:
        raise ValueError(
            f"mesh axis tensor={tensor} must be a multiple of {num_kv_heads=}, which it exceeds, and divide "
            f"num_heads={config.num_heads}."
        )
    return dataclasses.replace(config, num_kv_heads=tensor, kv_head_copies=tensor // num_kv_heads)


def parameter_shardings(config: ModelConfig, mesh: Mesh) -> Params:
    """Returns a `Params` of `NamedSharding`s.

    Raises:
        ValueError: the mesh has other axes, or they do not divide what lies over them.
    """
    tensor = _tensor_size(mesh)
    dense = ("mlp_size",) if not config.num_experts or config.dense_layers else ()
    for name in ("num_kv_heads", "num_heads", *dense, "vocab_size"):
        if getattr(config, name) % tensor:
            raise ValueError(f"mesh axis tensor={tensor} must divide {name}={getattr(config, name)}.")
    if config.num_experts % mesh.size:
        axes = " * ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
        raise ValueError(f"mesh of {axes} = {mesh.size} devices must divide num_experts={config.num_experts}.")
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), parameter_specs(config))


def _tensor_size(mesh: Mesh) -> int:
    if tuple(mesh.axis_names) != MESH_AXES:
        raise ValueError(f"mesh axes {tuple(mesh.axis_names)} must be {MESH_AXES}.")
    return mesh.shape["tensor"]


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
    q = project(normed, layer.q_proj, layer.q_bias).reshape(-1, config.num_heads, config.head_dim)
    k = project(normed, layer.k_proj, layer.k_bias).reshape(-1, config.num_kv_heads, config.head_dim)
    v = project(normed, layer.v_proj, layer.v_bias).reshape(-1, config.num_kv_heads, config.head_dim)
    if config.qk_norm:
        assert layer.q_norm is not None and layer.k_norm is not None, "a model with qk_norm has both weights"
        q = rms_norm(q, layer.q_norm, config.norm_eps)
        k = rms_norm(k, layer.k_norm, config.norm_eps)
    cos, sin = rope_angles(config, positions)
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def mix(config: ModelConfig, layer: LayerParams, x: jax.Array, attended: jax.Array) -> jax.Array:
    """Finishes a layer: output projection, residual, norm, gated MLP or experts, residual.

    Args:
        config: the model.
        layer: one layer's parameters (no L axis).
        x: [T, D], what entered the layer.
        attended: [T, N, H], what attention returned.

    Returns:
        x [T, D] for the next layer.
    """
    attended = attended.reshape(-1, config.num_heads * config.head_dim).astype(x.dtype)
    x = x + project(attended, layer.o_proj, layer.o_bias)
    normed = rms_norm(x, layer.mlp_norm, config.norm_eps)
    if not config.num_experts:
        mixed = _dense_mlp(layer, normed)
    elif not config.dense_layers:
        mixed = _experts(config, layer, normed)
    else:
        assert layer.has_experts is not None, "a model with layers of both kinds says which is which"
        experts = functools.partial(_experts, config, layer)
        mixed = jax.lax.cond(layer.has_experts, experts, functools.partial(_dense_mlp, layer), normed)
    return x + mixed.astype(x.dtype)


def _dense_mlp(layer: LayerParams, x: jax.Array) -> jax.Array:
    assert layer.gate_proj is not None and layer.up_proj is not None and layer.down_proj is not None
    return gated_mlp(x, layer.gate_proj, layer.up_proj, layer.down_proj)


def _experts(config: ModelConfig, layer: LayerParams, x: jax.Array) -> jax.Array:
    gate, up, down = layer.expert_gate_proj, layer.expert_up_proj, layer.expert_down_proj
    assert layer.router is not None and gate is not None and up is not None and down is not None
    with jax.named_scope("experts"):
        weights, experts = moe.route(x, layer.router, config.experts_per_token, config.renormalize_experts)
        return moe.mix_experts(x, weights, experts, gate, up, down)


def logits(config: ModelConfig, params: Params, x: jax.Array) -> jax.Array:
    """Returns f32[R, V] for the rows x [R, D] that left the last layer."""
    normed = rms_norm(x, params.final_norm, config.norm_eps)
    if params.lm_head is not None:
        return matmul(normed, params.lm_head)
    return jax.lax.dot_general(
        normed,
        params.embed,
        (((1,), (1,)), ((), ())),
        precision=precision(normed),
        preferred_element_type=jnp.float32,
    )


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Divides the last axis of x by its root mean square and scales it by `weight`, in float32."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * scale * jnp.expand_dims(weight.astype(jnp.float32), tuple(range(x.ndim - 1)))).astype(x.dtype)
