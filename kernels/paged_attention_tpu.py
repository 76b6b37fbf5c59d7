"""Ragged paged attention for TPU: packs rows, says what there is to do, unpacks.

The query heads of a kv head are packed as rows beside the queries of a tile, row = query * group + head, and one program
takes a block of them for all kv heads, so that a page is loaded once for all heads and all queries. Rows are gathered
and put back in XLA; the kernel is in `tpu_attend.py`, sizes in `tpu_geometry.py`.

A history is reduced 512 keys at a time from position 0 upwards, whatever the tile, with no split: `deterministic` has
nothing to change. That the bits of a product's row do not depend on the number of rows is unproven.

Heads of 128 only: a register has 128 lanes. A kernel for 64 compiles, but XLA lays out a pool of such rows so that they
take no more room than they need, and then copies all of it to where they take twice that, at each call.

Nothing here has run on a TPU. What is known comes from interpreters and from compiling for TPUs that were not there.
"""

from typing import Any

import jax
import jax.numpy as jnp

from penelope_jax.kernels.tpu_attend import attend
from penelope_jax.kernels.tpu_geometry import GENERATIONS, HEAD_DIM, Generation, Geometry, generation_of
from penelope_jax.kernels.traced_device import traced_device_kind

DTYPES = ("bfloat16", "float32")
PAGE_SIZES = (16, 32, 64, 128)

_INTERPRETED = "v6e"  # the generation whose sizes an interpreter uses


def paged_attention_tpu(
    q: jax.Array,
    kv_pool: jax.Array,
    layer: jax.Array | int,
    tiles: jax.Array,
    page_table: jax.Array,
    *,
    q_tile: int,
    scale: float,
    deterministic: bool = False,
    interpret: Any = False,
    generation: str | None = None,
) -> jax.Array:
    """Implements `paged_attention.ragged_paged_attention` (see there for the arguments).

    Args:
        q: of the pool's dtype.
        kv_pool: bfloat16 or float32.
        layer: which layer.
        tiles: what to attend.
        page_table: where its keys are.
        q_tile: rows of a tile.
        scale: of scores.
        deterministic: changes nothing.
        interpret: run in an interpreter: True, or what `pl.pallas_call` takes.
        generation: one of `GENERATIONS`; by default the device's.
    """
    del deterministic
    _check_supported(q, kv_pool)
    num_rows, num_heads, _ = q.shape
    num_pages, _, _, num_kv_heads, page_size, _ = kv_pool.shape
    group = num_heads // num_kv_heads
    geometry = Geometry(
        generation=_generation(generation, interpret),
        group=group,
        num_kv_heads=num_kv_heads,
        page_size=page_size,
        max_pages=page_table.shape[1],
        dtype=kv_pool.dtype,
        packed_rows=q_tile * group,
        scale=scale,
    )
    tiles = jnp.pad(tiles, ((0, -tiles.shape[0] % geometry.generation.cores), (0, 0)))
    geometry.check_memory(tiles.shape[0] * geometry.blocks_per_tile)

    segment, first_row, first_position, num_valid = (tiles[:, column, None] for column in range(4))  # i32[tiles, 1]
    segment = jnp.clip(segment, 0, page_table.shape[0] - 1)
    offset = jnp.arange(q_tile, dtype=jnp.int32)[None, :]
    rows = jnp.where(offset < num_valid, first_row + offset, num_rows)  # i32[tiles, q_tile]
    # The first entry that is no page of the pool, of each row of the table; what stands there is neither read nor seen.
    is_page = (page_table >= 0) & (page_table < num_pages)
    first_bad = jnp.where(is_page, geometry.max_pages, jnp.arange(geometry.max_pages)[None, :]).min(axis=1)
    known = (first_bad * page_size)[segment]  # i32[tiles, 1], keys from position 0

    blocks = _cut_blocks(geometry, segment, first_position, num_valid, known)
    attended = attend(
        geometry,
        jnp.asarray(layer, jnp.int32).reshape(1),
        *_by_core(geometry, *blocks),
        page_table=jnp.clip(page_table, 0, num_pages - 1)[:, None, :],
        queries=_pack(geometry, q.at[rows].get(mode="fill", fill_value=0)),
        kv_pool=kv_pool,
        interpret=interpret,
    )

    by_tile = _unpack(geometry, attended, q_tile)
    unread = first_position + offset >= known
    by_tile = jnp.where(unread[:, :, None, None], jnp.asarray(jnp.nan, by_tile.dtype), by_tile)
    # A scatter: XLA takes a minute and more to compile a gather from so large an array for v6e.
    return jnp.zeros_like(q).at[rows].set(by_tile, mode="drop")


def _generation(name: str | None, interpret: Any) -> Generation:
    if name is None:
        name = _INTERPRETED if interpret else generation_of(traced_device_kind())
    if name not in GENERATIONS:
        kind = f" and the device is {traced_device_kind()!r}" if name is None else ""
        raise ValueError(f"generation={name!r}{kind}; the TPU kernel supports {_listed(GENERATIONS)}.")
    return GENERATIONS[name]


def _check_supported(q: jax.Array, kv_pool: jax.Array) -> None:
    """Raises ValueError, naming argument, value and what is supported. Runs while tracing."""
    head_dim, page_size = q.shape[2], kv_pool.shape[4]
    if kv_pool.dtype.name not in DTYPES:
        raise ValueError(f"kv_pool has dtype {kv_pool.dtype}; the TPU kernel supports {_listed(DTYPES)}.")
    if q.dtype != kv_pool.dtype:
        raise ValueError(f"q has dtype {q.dtype}; the TPU kernel supports that of kv_pool, {kv_pool.dtype}.")
    if head_dim != HEAD_DIM:
        raise ValueError(f"q has head dim {head_dim}; the TPU kernel supports {HEAD_DIM}.")
    if page_size not in PAGE_SIZES:
        raise ValueError(f"kv_pool has page_size={page_size}; the TPU kernel supports {_listed(PAGE_SIZES)}.")


def _cut_blocks(geometry: Geometry, segment, first_position, num_valid, known) -> tuple[jax.Array, ...]:
    """Returns segment, limit and num_keys, as in `attend`, of the blocks of all tiles, i32[blocks]. Takes i32[tiles, 1]."""
    group, rows = geometry.group, geometry.rows
    first_packed = jnp.arange(geometry.blocks_per_tile, dtype=jnp.int32)[None, :] * rows
    last_query = jnp.minimum(num_valid - 1, (first_packed + rows - 1) // group)
    in_use = first_packed < num_valid * group
    num_keys = jnp.where(in_use, jnp.minimum(first_position + last_query + 1, known), 0)
    fields = (segment, first_position * group + first_packed, jnp.maximum(num_keys, 0))
    return tuple(jnp.broadcast_to(field, in_use.shape).reshape(-1) for field in fields)


def _by_core(geometry: Geometry, segment, limit, num_keys) -> tuple[jax.Array, ...]:
    """Deals blocks to cores in turn. Returns segment, limit, num_keys and window, as in `attend`."""
    cores = geometry.generation.cores
    block = jnp.arange(segment.shape[0], dtype=jnp.int32)
    segment, limit, num_keys, block = (
        field.reshape(-1, cores).T for field in (segment, limit, num_keys, block)
    )  # i32[cores, blocks of a core]
    window = jax.lax.cummax(jnp.where(num_keys > 0, block, -1), axis=1)
    window = jnp.where(window < 0, block, window)
    return segment.reshape(-1), limit.reshape(-1), num_keys.reshape(-1), window.reshape(-1)


def _pack(geometry: Geometry, by_tile: jax.Array) -> jax.Array:
    """Takes [tiles, q_tile, N, H] to [blocks, K, rows, H]."""
    num_tiles, q_tile, _, head_dim = by_tile.shape
    shape = (num_tiles, q_tile, geometry.num_kv_heads, geometry.group, head_dim)
    packed = by_tile.reshape(shape).swapaxes(1, 2).reshape(num_tiles, geometry.num_kv_heads, -1, head_dim)
    more = geometry.blocks_per_tile * geometry.rows - packed.shape[2]
    packed = jnp.pad(packed, ((0, 0), (0, 0), (0, more), (0, 0)))
    shape = (num_tiles, geometry.num_kv_heads, geometry.blocks_per_tile, geometry.rows, head_dim)
    return packed.reshape(shape).swapaxes(1, 2).reshape(-1, *shape[1:2], *shape[3:])


def _unpack(geometry: Geometry, blocks: jax.Array, q_tile: int) -> jax.Array:
    """Takes [blocks, K, rows, H] to [tiles, q_tile, N, H]."""
    num_heads, rows, head_dim = blocks.shape[1:]
    packed = blocks.reshape(-1, geometry.blocks_per_tile, num_heads, rows, head_dim).swapaxes(1, 2)
    packed = packed.reshape(packed.shape[0], num_heads, -1, head_dim)[:, :, : geometry.packed_rows]
    by_tile = packed.reshape(packed.shape[0], num_heads, q_tile, geometry.group, head_dim).swapaxes(1, 2)
    return by_tile.reshape(packed.shape[0], q_tile, -1, head_dim)


def _listed(values: Any) -> str:
    return ", ".join(map(str, values))
