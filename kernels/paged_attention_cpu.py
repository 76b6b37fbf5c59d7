"""Ragged paged attention in plain XLA, with work proportional to position.

Tiles run one after another; each walks the pages of its history in groups, anchored at position 0, up to the group of
its last query, with an online softmax in float32. Pages behind that group are not read, so the cost of a token follows
its position, which is what front eviction trades on. The query heads of a kv head are packed as rows of one matrix, so
each K/V page is loaded once per tile. Groups that end before a tile's first query skip the masks.

The reduction over keys has a fixed order that depends on positions alone. Whether a row's *bits* also do is up to XLA:
on a 2-core AMD EPYC (AVX512), 2026-11-29, jax 0.12.0.1, eight geometries of N/K/H from 4/4/32 to 16/8/128, a row was
identical for 64 to 256 packed rows a tile wherever it stood, with and without masks; below 64 rows only the product of
weights and V differed (XLA splits its long sum over keys when the result is small), and below 8 the row sums as well.
`deterministic` therefore pads that product to 64 rows; then everything from 8 to 256 packed rows agreed.
"""

import jax
import jax.numpy as jnp

# 256 / 512 / 1,024 keys a group, deterministic, as in q_tiles.py: 4.7K / 5.3K / 4.8K tok/s, 77 / 101 / 89 decodes/s.
KEYS_PER_GROUP = 512
_MIN_PRODUCT_ROWS = 64
_MASKED = -1e30  # finite: the difference of two masked scores is not NaN


def paged_attention_cpu(
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
    num_rows, num_heads, head_dim = q.shape
    num_pages, _, _, num_kv_heads, page_size, _ = kv_pool.shape
    num_groups_of_heads = num_heads // num_kv_heads
    packed_rows = num_groups_of_heads * q_tile
    pages_per_group = max(1, KEYS_PER_GROUP // page_size)
    group_len = pages_per_group * page_size

    # Out of range on purpose: a gather in `fill` mode then yields NaN instead of some other page.
    page_table = jnp.where((page_table >= 0) & (page_table < num_pages), page_table, num_pages)
    more = -page_table.shape[1] % pages_per_group
    page_table = jnp.pad(page_table, ((0, 0), (0, more)), constant_values=num_pages)
    # Slices of q_tile rows must not be clipped at the end.
    q_rows = jnp.pad(q.astype(jnp.float32) * scale, ((0, q_tile), (0, 0), (0, 0)))

    def load_group(segment, group):
        """Returns K and V of one group, f32[K, group_len, H] each."""
        pages = jax.lax.dynamic_slice(page_table, (segment, group * pages_per_group), (1, pages_per_group))[0]
        kv = kv_pool.at[pages, layer].get(mode="fill", fill_value=jnp.nan)
        kv = kv.transpose(1, 2, 0, 3, 4).reshape(2, num_kv_heads, group_len, head_dim)
        return kv[0].astype(jnp.float32), kv[1].astype(jnp.float32)

    def attend_group(group, carry, queries, segment, position, last_position, masked):
        row_max, row_sum, total = carry
        keys, values = load_group(segment, group)
        key_position = group * group_len + jnp.arange(group_len)
        seen = (key_position[None, :] <= position[:, None])[None]  # bool[1, packed_rows, group_len]
        if masked:
            # What stands behind the last query may be anything, NaN too, and 0 * NaN is NaN.
            behind = (key_position > last_position)[None, :, None]
            keys, values = jnp.where(behind, 0.0, keys), jnp.where(behind, 0.0, values)
        scores = jnp.einsum("krh,kph->krp", queries, keys, precision=jax.lax.Precision.HIGHEST)
        if masked:
            scores = jnp.where(seen, scores, _MASKED)
        new_max = jnp.maximum(row_max, scores.max(axis=-1))
        weights = jnp.exp(scores - new_max[:, :, None])
        if masked:
            weights = jnp.where(seen, weights, 0.0)
        keep = jnp.exp(row_max - new_max)
        row_sum = row_sum * keep + weights.sum(axis=-1)
        total = total * keep[:, :, None] + _weigh(weights, values, deterministic)
        return new_max, row_sum, total

    def attend_tile(index, out):
        segment, first_row, first_position, num_valid = tiles[index]
        last_position = first_position + num_valid - 1
        offset = jnp.arange(q_tile)
        # Rows behind the valid ones repeat the last position: they cost nothing extra and are not stored.
        position = jnp.minimum(first_position + offset, last_position)
        position = jnp.tile(position, num_groups_of_heads)  # i32[packed_rows]
        queries = jax.lax.dynamic_slice(q_rows, (first_row, 0, 0), (q_tile, num_heads, head_dim))
        queries = queries.reshape(q_tile, num_kv_heads, num_groups_of_heads, head_dim).transpose(1, 2, 0, 3)
        queries = queries.reshape(num_kv_heads, packed_rows, head_dim)

        def attend(masked):
            return lambda group, carry: attend_group(group, carry, queries, segment, position, last_position, masked)

        num_groups = last_position // group_len + 1
        num_full = (first_position + 1) // group_len
        carry = (
            jnp.full((num_kv_heads, packed_rows), _MASKED),
            jnp.zeros((num_kv_heads, packed_rows)),
            jnp.zeros((num_kv_heads, packed_rows, head_dim)),
        )
        carry = jax.lax.fori_loop(0, num_full, attend(masked=False), carry)
        _, row_sum, total = jax.lax.fori_loop(num_full, num_groups, attend(masked=True), carry)
        attended = total / row_sum[:, :, None]
        attended = attended.reshape(num_kv_heads, num_groups_of_heads, q_tile, head_dim).transpose(2, 0, 1, 3)
        attended = attended.reshape(q_tile, num_heads, head_dim).astype(q.dtype)
        # Rows behind the valid ones belong to other tiles.
        before = jax.lax.dynamic_slice(out, (first_row, 0, 0), (q_tile, num_heads, head_dim))
        attended = jnp.where((offset < num_valid)[:, None, None], attended, before)
        return jax.lax.dynamic_update_slice(out, attended, (first_row, 0, 0))

    num_tiles = jnp.sum(tiles[:, 3] > 0)
    out = jnp.zeros((num_rows + q_tile, num_heads, head_dim), q.dtype)
    return jax.lax.fori_loop(0, num_tiles, attend_tile, out)[:num_rows]


def _weigh(weights: jax.Array, values: jax.Array, deterministic: bool) -> jax.Array:
    """Returns f32[K, rows, H], the sums of `values` f32[K, keys, H] under `weights` f32[K, rows, keys]."""
    num_rows = weights.shape[1]
    more = max(0, _MIN_PRODUCT_ROWS - num_rows) if deterministic else 0
    weights = jnp.pad(weights, ((0, 0), (0, more), (0, 0)))
    return jnp.einsum("krp,kph->krh", weights, values, precision=jax.lax.Precision.HIGHEST)[:, :num_rows]
