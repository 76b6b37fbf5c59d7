"""Copies whole pages out of the pool and back, for moves between device and host memory.

A page leaves as an array of its own, since a host array cannot be sliced by indices that lie on a device, and comes
back as one. Both directions are jitted for a few numbers of pages, `PAGE_BUCKETS`; ids that are no page of the pool
pad a call. On a mesh a page keeps the pool's split over kv heads, so each device's part moves by itself.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from penelope_jax.kernels.kv_write import DROP_PAGE

PAGE_BUCKETS = (1, 2, 4, 8, 16)  # pages of a call

_DTYPES = ("float32", "bfloat16", "float16")


def page_bucket(num_pages: int) -> int:
    """Returns the smallest bucket of at least `num_pages` pages.

    Raises:
        ValueError: there is none.
    """
    bucket = next((size for size in PAGE_BUCKETS if size >= num_pages), None)
    if num_pages < 1 or bucket is None:
        raise ValueError(f"{num_pages=} of a copy must be in [1, {PAGE_BUCKETS[-1]}].")
    return bucket


def padded_ids(page_ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """Returns a new i32[bucket] with `page_ids` in front and `DROP_PAGE` behind them."""
    out = np.full(page_bucket(len(page_ids)), DROP_PAGE, np.int32)
    out[: len(page_ids)] = page_ids
    return out


def padded_pages(pages: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """Returns as many arrays as `padded_ids` has ids; the last one stands in for padding and takes no more memory."""
    return (*pages, *[pages[-1]] * (page_bucket(len(pages)) - len(pages)))


def page_sharding(pool_sharding: NamedSharding, memory_kind: str | None = None) -> NamedSharding:
    """Returns how one page [L, 2, K, page_size, H] lies on the mesh: like the pool, without its first axis.

    Args:
        pool_sharding: of [P, L, 2, K, page_size, H]; P is not split.
        memory_kind: `device`, `pinned_host`, ...; by default the pool's.
    """
    spec = pool_sharding.spec
    if len(spec) and spec[0] is not None:
        raise ValueError(f"{pool_sharding.spec=} splits the pages of the pool; supported: None on the first axis.")
    return NamedSharding(
        pool_sharding.mesh, PartitionSpec(*spec[1:]), memory_kind=memory_kind or pool_sharding.memory_kind
    )


@functools.partial(jax.jit, static_argnames=("sharding",))
def gather_pages(
    kv_pool: jax.Array, page_ids: jax.Array, *, sharding: NamedSharding | None = None
) -> tuple[jax.Array, ...]:
    """Copies pages out of the pool, which stays as it is.

    Args:
        kv_pool: [P, L, 2, K, page_size, H].
        page_ids: i32[n]. One that is no page of the pool, like `DROP_PAGE`, gives a page of zeros.
        sharding: of the pool on a mesh, as the caller spells it, so that what takes the pages does not compile again
            for another spelling; None leaves it to the compiler.

    Returns:
        n arrays [L, 2, K, page_size, H], each with memory of its own.

    Raises:
        ValueError: an argument has a shape or dtype that is not supported; the message names it.
    """
    _check_arguments(kv_pool, page_ids)
    pages = []
    for index in range(page_ids.shape[0]):
        page_id = page_ids[index]
        page = jax.lax.dynamic_index_in_dim(kv_pool, page_id, axis=0, keepdims=False)  # of another page if not in range
        page = jnp.where((page_id >= 0) & (page_id < kv_pool.shape[0]), page, jnp.zeros((), page.dtype))
        pages.append(page if sharding is None else jax.lax.with_sharding_constraint(page, page_sharding(sharding)))
    return tuple(pages)


@functools.partial(jax.jit, static_argnames=("sharding",), donate_argnames=("kv_pool",))
def scatter_pages(
    kv_pool: jax.Array, page_ids: jax.Array, pages: tuple[jax.Array, ...], *, sharding: NamedSharding | None = None
) -> jax.Array:
    """Copies pages into the pool, in place.

    Args:
        kv_pool: [P, L, 2, K, page_size, H]. Consumed: the array passed in is deleted.
        page_ids: i32[n]. One that is no page of the pool, like `DROP_PAGE`, writes nothing; of equal ones the last wins.
        pages: n arrays [L, 2, K, page_size, H] of the pool's dtype, in device memory.
        sharding: as in `gather_pages`; also that of the pool that is returned.

    Returns:
        The pool with those pages replaced.

    Raises:
        ValueError: an argument has a shape or dtype that is not supported; the message names it.
    """
    _check_arguments(kv_pool, page_ids)
    if len(pages) != page_ids.shape[0]:
        raise ValueError(f"{len(pages)} pages for {page_ids.shape[0]} page_ids; supported: one for each.")
    for index, page in enumerate(pages):
        if page.shape != kv_pool.shape[1:] or page.dtype != kv_pool.dtype:
            raise ValueError(
                f"pages[{index}] is {page.dtype}{list(page.shape)}; this kv_pool has pages of "
                f"{kv_pool.dtype}{list(kv_pool.shape[1:])}."
            )
    page_ids = jnp.where(page_ids < 0, DROP_PAGE, page_ids)  # else they would count from the end
    for index, page in enumerate(pages):
        kv_pool = kv_pool.at[page_ids[index]].set(page, mode="drop")
    return kv_pool if sharding is None else jax.lax.with_sharding_constraint(kv_pool, sharding)


def _check_arguments(kv_pool, page_ids) -> None:
    """Checks shapes and dtypes. Runs while tracing."""
    if kv_pool.ndim != 6 or kv_pool.shape[2] != 2:
        raise ValueError(f"kv_pool has shape {kv_pool.shape}; supported: [P, L, 2, K, page_size, H].")
    if kv_pool.dtype.name not in _DTYPES:
        raise ValueError(f"kv_pool has dtype {kv_pool.dtype}; supported: {', '.join(_DTYPES)}.")
    if page_ids.ndim != 1 or not page_ids.shape[0] or page_ids.dtype != jnp.int32:
        raise ValueError(f"page_ids is {page_ids.dtype}{list(page_ids.shape)}; supported: int32[n], n at least 1.")
