"""A layer of experts: each row goes through the few that its router picks. Nothing is dropped.

Rows are sorted by expert and cut into tiles of a fixed number of rows, and a loop runs one matrix product of fixed
shape for each tile: the work follows the rows that were routed, not the number of experts. A row's result depends on
its own values alone, bit by bit: its products have the same shape wherever it lies, and its experts are added in
their own order, one at a time. On a mesh each device runs the tiles of its own experts and the sums meet at the end.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec

from penelope_jax.models.linear import gated_mlp, matmul

EXPERT_AXES = ("data", "tensor")  # mesh axes over which the experts lie

_SMALLEST_TILE = 16  # rows; smaller products waste the machine
_LARGEST_TILE = 128


def route(x: jax.Array, router: jax.Array, experts_per_token: int, renormalize: bool) -> tuple[jax.Array, jax.Array]:
    """Picks the experts of each row, the likeliest first.

    Args:
        x: [T, D].
        router: [D, E].
        experts_per_token: k.
        renormalize: whether a row's weights are scaled to a sum of one.

    Returns:
        Weights f32[T, k] and experts i32[T, k].
    """
    weights, experts = jax.lax.top_k(jax.nn.softmax(matmul(x, router), axis=-1), experts_per_token)
    if renormalize:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return weights, experts


def tile_rows(num_rows: int, num_experts: int, experts_per_token: int) -> int:
    """Returns the rows of a tile: the power of two from the mean number of rows of an expert on."""
    mean = -(-num_rows * experts_per_token // num_experts)
    return min(max(1 << (mean - 1).bit_length(), _SMALLEST_TILE), _LARGEST_TILE)


def mix_experts(
    x: jax.Array,
    weights: jax.Array,
    experts: jax.Array,
    gate_proj: jax.Array,
    up_proj: jax.Array,
    down_proj: jax.Array,
) -> jax.Array:
    """Sends rows through their experts and adds up what comes back, by weight.

    Args:
        x: [T, D]. A row of zeros (padding) stays zero and costs nothing.
        weights: f32[T, k].
        experts: i32[T, k], different ones in a row.
        gate_proj: [E, D, I]; on a mesh, E lies over its axes.
        up_proj: [E, D, I].
        down_proj: [E, I, D].

    Returns:
        f32[T, D].
    """
    rows = tile_rows(x.shape[0], gate_proj.shape[0], experts.shape[1])
    experts = jnp.where(jnp.any(x != 0, axis=-1, keepdims=True), experts, gate_proj.shape[0])
    mesh = jax.typeof(gate_proj).sharding.mesh
    if mesh.size == 1 or mesh.empty:
        return _mix_some(x, weights, experts, gate_proj, up_proj, down_proj, rows)
    return _mix_on_mesh(mesh, rows, x, weights, experts, gate_proj, up_proj, down_proj)


def _mix_on_mesh(mesh: AbstractMesh, rows: int, x, weights, experts, gate_proj, up_proj, down_proj) -> jax.Array:
    def on_device(x, weights, experts, gate_proj, up_proj, down_proj):
        first = jax.lax.axis_index(EXPERT_AXES) * gate_proj.shape[0]
        return jax.lax.psum(_mix_some(x, weights, experts - first, gate_proj, up_proj, down_proj, rows), EXPERT_AXES)

    everywhere, by_expert = PartitionSpec(), PartitionSpec(EXPERT_AXES)
    return jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(everywhere, everywhere, everywhere, by_expert, by_expert, by_expert),
        out_specs=everywhere,
        check_vma=False,
    )(x, weights, experts, gate_proj, up_proj, down_proj)


def _mix_some(x, weights, experts, gate_proj, up_proj, down_proj, rows: int) -> jax.Array:
    """As `mix_experts` for the experts [0, E) whose parameters are given; others in `experts` are left out."""
    num_experts, num_rows, num_choices = gate_proj.shape[0], *experts.shape
    choices = experts.reshape(-1)  # [T * k]
    choices = jnp.where((choices >= 0) & (choices < num_experts), choices, num_experts)
    by_expert = jnp.argsort(choices, stable=True)
    starts = jnp.searchsorted(choices[by_expert], jnp.arange(num_experts + 1, dtype=jnp.int32)).astype(jnp.int32)
    tile_stops = jnp.cumsum((jnp.diff(starts) + rows - 1) // rows)  # [E]

    def add_tile(tile, total):
        expert = jnp.searchsorted(tile_stops, tile, side="right").astype(jnp.int32)
        before = jnp.where(expert > 0, tile_stops[expert - 1], 0)
        places = starts[expert] + (tile - before) * rows + jnp.arange(rows, dtype=jnp.int32)
        used = places < starts[expert + 1]
        choice = by_expert[jnp.where(used, places, 0)]
        row = jnp.where(used, choice // num_choices, num_rows)
        take = functools.partial(jax.lax.dynamic_index_in_dim, index=expert, axis=0, keepdims=False)
        taken = x.at[row].get(mode="fill", fill_value=0)
        out = gated_mlp(taken, take(gate_proj), take(up_proj), take(down_proj))
        weighted = out * weights.reshape(-1)[choice][:, None]
        return total.at[row].add(weighted, mode="drop")

    return jax.lax.fori_loop(0, tile_stops[-1], add_tile, jnp.zeros(x.shape, jnp.float32))
