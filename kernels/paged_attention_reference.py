"""Ragged paged attention, the plain way: gather the whole page table, mask, softmax in float32.

The oracle of the other implementations. Work and memory are proportional to the width of the page table.
"""

import jax
import jax.numpy as jnp


def paged_attention_reference(
    q: jax.Array,
    kv_pool: jax.Array,
    layer: jax.Array,
    tiles: jax.Array,
    page_table: jax.Array,
    *,
    q_tile: int,
    scale: float,
    deterministic: bool = False,
) -> jax.Array:
    """Implements `paged_attention.ragged_paged_attention` (see there for the arguments)."""
    del deterministic
    num_rows, num_heads, head_dim = q.shape
    num_pages, _, _, num_kv_heads, page_size, _ = kv_pool.shape
    num_tiles, max_pages = tiles.shape[0], page_table.shape[1]
    segment, first_row, first_position, num_valid = (tiles[:, column, None] for column in range(4))  # i32[num_tiles, 1]
    offset = jnp.arange(q_tile)[None, :]
    live = offset < num_valid  # bool[num_tiles, q_tile]
    position = first_position + offset
    last_position = first_position + num_valid - 1

    rows = jnp.where(live, first_row + offset, num_rows)
    queries = q.at[rows].get(mode="fill", fill_value=0).astype(jnp.float32)
    queries = queries.reshape(num_tiles, q_tile, num_kv_heads, num_heads // num_kv_heads, head_dim)

    pages = page_table[segment[:, 0]]
    pages = jnp.where((pages >= 0) & (pages < num_pages), pages, num_pages)
    kv = kv_pool.at[pages, layer].get(mode="fill", fill_value=jnp.nan).astype(jnp.float32)
    kv = kv.transpose(2, 0, 3, 1, 4, 5).reshape(2, num_tiles, num_kv_heads, max_pages * page_size, head_dim)
    key_position = jnp.arange(max_pages * page_size)
    behind = key_position[None, :] > last_position
    keys, values = jnp.where(behind[None, :, None, :, None], 0.0, kv)

    highest = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("iqkgh,ikph->ikgqp", queries, keys, precision=highest) * scale
    seen = key_position[None, None, :] <= position[:, :, None]  # bool[num_tiles, q_tile, keys]
    scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1)
    attended = jnp.einsum("ikgqp,ikph->iqkgh", weights, values, precision=highest)
    attended = attended.reshape(num_tiles, q_tile, num_heads, head_dim).astype(q.dtype)
    return jnp.zeros_like(q).at[rows].set(attended, mode="drop")
