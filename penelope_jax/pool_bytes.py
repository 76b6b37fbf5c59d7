"""The bytes of pages of the pool: read for comparisons, and changed by one bit as a control of them."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

_READ_PAGES = 16  # pages gathered at once


def read_pages(kv_pool: jax.Array, page_ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """Returns the bytes of pages [n, L, 2, K, page_size, H] of a pool [P, L, 2, K, page_size, H].

    Raises:
        ValueError: an id is not a page of the pool.
    """
    ids = np.asarray(page_ids, np.int32).reshape(-1)
    for page_id in ids.tolist():
        check_page(kv_pool, page_id)
    out = np.empty((len(ids), *kv_pool.shape[1:]), kv_pool.dtype)
    for start in range(0, len(ids), _READ_PAGES):
        part = ids[start : start + _READ_PAGES]
        padded = np.resize(part, _READ_PAGES)
        out[start : start + len(part)] = np.asarray(_gather_pages(kv_pool, padded))[: len(part)]
    return out


def flip_bit(kv_pool: jax.Array, page_id: int, layer: int, token: int, *, sharding: NamedSharding) -> jax.Array:
    """Flips the highest bit of the mantissa of one stored K value, of the first kv head and dimension.

    Args:
        kv_pool: [P, L, 2, K, page_size, H]. Consumed.
        page_id: the page.
        layer: the layer.
        token: the slot in the page.
        sharding: of the pool, as the caller spells it.

    Returns:
        The pool.

    Raises:
        ValueError: an index is out of range.
    """
    check_page(kv_pool, page_id)
    for name, value, limit in (("layer", layer, kv_pool.shape[1]), ("token", token, kv_pool.shape[4])):
        if not 0 <= value < limit:
            raise ValueError(f"{name}={value} must be in [0, {limit}).")
    return _flip_bit(kv_pool, np.int32(page_id), np.int32(layer), np.int32(token), sharding=sharding)


def check_page(kv_pool: jax.Array, page_id: int) -> None:
    """Raises ValueError unless `page_id` is a page of the pool."""
    if not 0 <= page_id < kv_pool.shape[0]:
        raise ValueError(f"{page_id=} must be in [0, {kv_pool.shape[0]}).")


@jax.jit
def _gather_pages(kv_pool: jax.Array, page_ids: jax.Array) -> jax.Array:
    return kv_pool[page_ids]


@functools.partial(jax.jit, static_argnames=("sharding",), donate_argnames=("kv_pool",))
def _flip_bit(
    kv_pool: jax.Array, page_id: jax.Array, layer: jax.Array, token: jax.Array, *, sharding: NamedSharding
) -> jax.Array:
    place = (page_id, layer, 0, 0, token, 0)
    unsigned = jnp.dtype(f"uint{8 * kv_pool.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(kv_pool[place], unsigned)
    bits = bits ^ unsigned.type(1 << (jnp.finfo(kv_pool.dtype).nmant - 1))
    flipped = jax.lax.bitcast_convert_type(bits, kv_pool.dtype)
    return jax.lax.with_sharding_constraint(kv_pool.at[place].set(flipped), sharding)
