"""Writes a step's keys and values into the pool, by whole pages.

Whole-page scatters are the form that leaves a donated pool in place on CPU, GPU and TPU alike, also inside a scan over
layers; a scatter of single tokens copies the pool on some of them. A page that is written in part is read, merged and
written back. Nobody else may write such a page in the same step, which holds as requests write only pages they own.
"""

import jax
import jax.numpy as jnp

# A page id that no pool has: writes to it are dropped.
DROP_PAGE = 2**31 - 1


def write_kv(
    kv_pool: jax.Array,
    layer: jax.Array | int,
    keys: jax.Array,
    values: jax.Array,
    write_pages: jax.Array,
    write_source: jax.Array,
) -> jax.Array:
    """Writes rows of K and V to slots of pages.

    Args:
        kv_pool: [P, L, 2, K, page_size, H]. In a jitted caller that donates the pool the update is in place.
        layer: i32[], which layer of the pool.
        keys: [T, K, H].
        values: [T, K, H].
        write_pages: i32[W], distinct page ids; `DROP_PAGE` where there is nothing to write. One that is no page of the
            pool writes nothing.
        write_source: i32[W, page_size], for each slot the row that goes there, or -1 to keep what the slot holds.

    Returns:
        The pool with those slots changed.
    """
    num_pages = kv_pool.shape[0]
    write_pages = jnp.where(write_pages < 0, DROP_PAGE, write_pages)  # else they would count from the end
    rows = jnp.stack([keys, values], axis=1).astype(kv_pool.dtype)  # [T, 2, K, H]
    new = rows[jnp.maximum(write_source, 0)].transpose(0, 2, 3, 1, 4)  # [W, 2, K, page_size, H]
    old = kv_pool[jnp.minimum(write_pages, num_pages - 1), layer]
    merged = jnp.where((write_source >= 0)[:, None, None, :, None], new, old)
    return kv_pool.at[write_pages, layer].set(merged, mode="drop")
