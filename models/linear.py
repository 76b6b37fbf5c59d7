"""Matrix products of rows: operands in their own dtype, sums in float32."""

import jax
import jax.numpy as jnp


def precision(x: jax.Array) -> jax.lax.Precision:
    """float32 means float32 everywhere: the default on an accelerator would round the operands first."""
    return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT


def matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns f32[T, out] of x [T, in] and weight [in, out]."""
    return jnp.matmul(x, weight, precision=precision(x), preferred_element_type=jnp.float32)


def project(x: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Returns [T, out] in x's dtype, with bias [out] added where there is one."""
    out = matmul(x, weight)
    if bias is not None:
        out = out + bias.astype(jnp.float32)[None, :]
    return out.astype(x.dtype)


def gated_mlp(x: jax.Array, gate_proj: jax.Array, up_proj: jax.Array, down_proj: jax.Array) -> jax.Array:
    """Returns f32[T, D] of x [T, D] through silu(x @ gate) * (x @ up) of width F, then down [F, D]."""
    gate = matmul(x, gate_proj)
    up = matmul(x, up_proj)
    return matmul((jax.nn.silu(gate) * up).astype(x.dtype), down_proj)
