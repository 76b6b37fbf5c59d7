"""Ragged attention over a paged KV pool: the contract, its checks, and which implementation runs.

A step's queries are dense rows cut into tiles; each tile belongs to one row of the page table and its queries stand
at consecutive positions of that history. A query attends to every position of its history up to its own. All K/V of
the step are in the pool before attention starts, and attention reads nothing else, so one call serves prompts, refilled
holes and decodes alike: to a kernel they are tiles at positions.
"""

import functools

import jax
import jax.numpy as jnp
from absl import logging

from penelope_jax.kernels import paged_attention_gpu, paged_attention_tpu
from penelope_jax.kernels.paged_attention_cpu import paged_attention_cpu
from penelope_jax.kernels.paged_attention_reference import paged_attention_reference
from penelope_jax.kernels.tpu_geometry import HEAD_DIM, generation_of
from penelope_jax.kernels.traced_device import traced_device_kind

# Plain XLA, on every platform.
IMPLEMENTATIONS = {
    "cpu": paged_attention_cpu,
    "reference": paged_attention_reference,
}
# Pallas kernels, each for its own devices, and for all in its interpreter.
KERNELS = {
    "gpu": paged_attention_gpu.paged_attention_gpu,
    "tpu": paged_attention_tpu.paged_attention_tpu,
}
# What of a pool each takes: head dims, page sizes, dtypes.
_TAKES = {
    "gpu": (paged_attention_gpu.HEAD_DIMS, paged_attention_gpu.PAGE_SIZES, paged_attention_gpu.DTYPES),
    "tpu": ((HEAD_DIM,), paged_attention_tpu.PAGE_SIZES, paged_attention_tpu.DTYPES),
}
DTYPES = ("float32", "bfloat16", "float16")

_HOPPER = ("H100", "H200", "H800", "H20", "GH200")  # in names of devices


def default_implementation() -> str:
    """Returns the implementation used when none is named: the device's kernel, else `cpu`, which runs everywhere."""
    return next((name for name in KERNELS if _has_device(name)), "cpu")


def resolve_implementation(name: str | None, *, interpret: bool = False) -> str:
    """Returns the implementation that a name stands for; None is the default.

    Raises:
        ValueError: it cannot run here; the message names what can.
    """
    if name is None:
        return default_implementation()
    if interpret and name in IMPLEMENTATIONS:
        raise ValueError(f"interpret=True needs a Pallas implementation; {name!r} is plain XLA.")
    can_run = [*IMPLEMENTATIONS, *(kernel for kernel in KERNELS if interpret or _has_device(kernel))]
    if name not in can_run:
        raise ValueError(f"implementation={name!r} cannot run here; what can: {', '.join(can_run)}.")
    return name


def fitting_implementation(name: str | None, *, head_dim: int, page_size: int, dtype: str) -> str:
    """Returns the implementation for a pool; where none is named and the device's kernel cannot take it, `cpu`.

    Args:
        name: as in `resolve_implementation`; what is named is taken as it is.
        head_dim: of the pool.
        page_size: of the pool, in tokens.
        dtype: of the pool.
    """
    chosen = resolve_implementation(name)
    if name is not None or chosen not in KERNELS:
        return chosen
    for what, value, supported in zip(
        ("head dim", "page size", "dtype"), (head_dim, page_size, dtype), _TAKES[chosen], strict=True
    ):
        if value not in supported:
            known = ", ".join(map(str, supported))
            logging.warning(
                "%s %s is not among those that the %s attention kernel takes (%s): plain XLA runs, which is slower.",
                what,
                value,
                chosen,
                known,
            )
            return "cpu"
    return chosen


def _has_device(kernel: str) -> bool:
    """Tells whether what is traced runs on a device that a kernel is for."""
    kind = traced_device_kind()
    if kernel == "tpu":
        return generation_of(kind) is not None
    return any(name in kind.replace("-", " ").split() for name in _HOPPER)


def ragged_paged_attention(
    q: jax.Array,
    kv_pool: jax.Array,
    layer: jax.Array | int,
    tiles: jax.Array,
    page_table: jax.Array,
    *,
    q_tile: int,
    scale: float,
    implementation: str | None = None,
    deterministic: bool = False,
    interpret: bool = False,
) -> jax.Array:
    """Attends the rows named by `tiles` to their histories.

    Args:
        q: [T, N, H], dense rows.
        kv_pool: [P, L, 2, K, page_size, H]; index 0 of the third axis is K, 1 is V.
        layer: i32[], which layer of the pool.
        tiles: i32[num_tiles, 4]: row of the page table, first row in q, position of that row, valid rows (at most
            `q_tile`). Empty tiles (0 valid rows) stand behind all others.
        page_table: i32[S, max_pages], page ids of each history in order. Entries behind a history's last query are
            never used; an entry in use that is no page of the pool reads as NaN, never as another page.
        q_tile: rows a tile holds.
        scale: what scores are multiplied by.
        implementation: one of `IMPLEMENTATIONS` or `KERNELS`, or None for the device's default.
        deterministic: the bits of a row do not depend on `q_tile` or on its place in a tile, as long as a tile packs at
            least 8 query heads for each kv head (`q_tile` * N / K). On CPU this is measured, see
            `paged_attention_cpu.py`; `reference` ignores it.
        interpret: run a Pallas implementation in its interpreter.

    Returns:
        [T, N, H] in q's dtype; rows that no tile covers are zero.

    Raises:
        ValueError: an argument has a shape, dtype or value that is not supported; the message names it.
    """
    implementation = resolve_implementation(implementation, interpret=interpret)
    _check_arguments(q, kv_pool, tiles, page_table, q_tile, scale)
    layer = jnp.asarray(layer, jnp.int32)
    if implementation in KERNELS:
        run = functools.partial(KERNELS[implementation], interpret=interpret)
    else:
        run = IMPLEMENTATIONS[implementation]
    return run(q, kv_pool, layer, tiles, page_table, q_tile=q_tile, scale=scale, deterministic=deterministic)


def _check_arguments(q, kv_pool, tiles, page_table, q_tile: int, scale: float) -> None:
    """Checks shapes, dtypes and static values. Runs while tracing, so it costs nothing at run time."""
    if q.ndim != 3:
        raise ValueError(f"q has shape {q.shape}; supported: [T, N, H].")
    if kv_pool.ndim != 6 or kv_pool.shape[2] != 2:
        raise ValueError(f"kv_pool has shape {kv_pool.shape}; supported: [P, L, 2, K, page_size, H].")
    for name, array in (("q", q), ("kv_pool", kv_pool)):
        if array.dtype.name not in DTYPES:
            raise ValueError(f"{name} has dtype {array.dtype}; supported: {', '.join(DTYPES)}.")
    _, num_heads, head_dim = q.shape
    _, _, _, num_kv_heads, page_size, pool_head_dim = kv_pool.shape
    if head_dim != pool_head_dim:
        raise ValueError(f"q has head dim {head_dim} and kv_pool has {pool_head_dim}; supported: equal ones.")
    if num_heads % num_kv_heads:
        raise ValueError(f"q has {num_heads} heads; supported: multiples of kv_pool's {num_kv_heads} kv heads.")
    if page_size & (page_size - 1):
        raise ValueError(f"kv_pool has {page_size=}; supported: powers of two.")
    if tiles.ndim != 2 or tiles.shape[1] != 4 or tiles.dtype != jnp.int32:
        raise ValueError(f"tiles is {tiles.dtype}{list(tiles.shape)}; supported: int32[num_tiles, 4].")
    if page_table.ndim != 2 or page_table.dtype != jnp.int32:
        raise ValueError(f"page_table is {page_table.dtype}{list(page_table.shape)}; supported: int32[S, max_pages].")
    if not isinstance(q_tile, int) or q_tile < 1:
        raise ValueError(f"{q_tile=}; supported: integers of at least 1.")
    if not scale > 0:
        raise ValueError(f"{scale=}; supported: positive numbers.")
