"""Ragged paged attention for NVIDIA Hopper: packs rows, says what there is to do, unpacks.

The query heads of a kv head are packed as rows beside the queries of a tile, row = query * group + head, so that a page
is loaded once for all of them. Packed rows are cut into blocks that a CUDA block works on for one kv head: of 128 rows
(two warpgroups of 64) where a tile packs more than 64, else of one warpgroup that holds the whole tile. Packing and
unpacking are gathers in XLA; the kernels are in `hopper_attend.py` and `hopper_combine.py`.

Small tiles, as decodes have them, are too few to fill the machine, so their histories are split into chunks of a fixed
number of keys, anchored at position 0, that are attended to independently and combined in the order of positions. The
number depends on nothing but the number of kv heads. `deterministic` does not split: then a row adds up its keys in
the same order whatever the tile.

Nothing here has run on a GPU. What is known comes from the interpreter, which does not model how wgmma is asynchronous,
and from compiling to machine code.
"""

import dataclasses

import jax
import jax.numpy as jnp

from penelope_jax.kernels.hopper_attend import attend
from penelope_jax.kernels.hopper_combine import combine
from penelope_jax.kernels.hopper_geometry import ROWS, STEP, Geometry, WorkItem

DTYPES = ("bfloat16", "float16")
HEAD_DIMS = (64, 128)
PAGE_SIZES = (16, 32, 64, 128)
MAX_GROUP = 64

_MAX_PACKED_ROWS = 1024
_SPLIT_ROWS = 32  # packed rows of the largest tiles whose histories are split
_SPLIT_PROGRAMS = 132  # CUDA blocks that share the chunks: multiprocessors of an H100 or H200


def paged_attention_gpu(
    q: jax.Array,
    kv_pool: jax.Array,
    layer: jax.Array | int,
    tiles: jax.Array,
    page_table: jax.Array,
    *,
    q_tile: int,
    scale: float,
    deterministic: bool = False,
    interpret: bool = False,
    keys_per_chunk: int | None = None,
) -> jax.Array:
    """Implements `paged_attention.ragged_paged_attention` (see there for the arguments).

    Args:
        q: of the pool's dtype.
        kv_pool: bfloat16 or float16.
        layer: which layer.
        tiles: what to attend.
        page_table: where its keys are.
        q_tile: rows of a tile.
        scale: of scores.
        deterministic: never split a history.
        interpret: run in the interpreter, with its race detection.
        keys_per_chunk: instead of what `default_keys_per_chunk` says; a multiple of 128.
    """
    _check_supported(q, kv_pool, q_tile, keys_per_chunk)
    num_rows, num_heads, head_dim = q.shape
    num_pages, num_layers, _, num_kv_heads, page_size, _ = kv_pool.shape
    max_pages = page_table.shape[1]
    packed_rows = q_tile * (num_heads // num_kv_heads)
    warpgroups = 2 if packed_rows > ROWS else 1
    if keys_per_chunk is None:
        keys_per_chunk = default_keys_per_chunk(num_kv_heads)
    split = not deterministic and packed_rows <= _SPLIT_ROWS
    geometry = Geometry(
        group=num_heads // num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        num_layers=num_layers,
        dtype=kv_pool.dtype,
        warpgroups=warpgroups,
        rows=ROWS if warpgroups == 2 else _round_up(packed_rows, 8),
        num_chunks=-(-max_pages * page_size // keys_per_chunk) if split else 1,
        scale=scale,
        simulated=interpret,
    )
    blocks = _cut_blocks(geometry, tiles, page_table, num_pages, packed_rows)
    source = _packed_heads(geometry, tiles, q_tile, num_rows)
    queries = q.reshape(-1, head_dim).at[source].get(mode="fill", fill_value=0)
    queries = queries.reshape(-1, geometry.height, head_dim)
    pages = kv_pool.reshape(-1, page_size, head_dim)
    page_table = jnp.clip(page_table, 0, num_pages - 1)
    layer = jnp.asarray(layer, jnp.int32)
    num_blocks = blocks.end_step.shape[0]

    if geometry.split:
        steps_per_chunk = keys_per_chunk // STEP
        work, num_items, num_parts = _split_work(blocks, geometry.num_chunks, steps_per_chunk)
        scalars = jnp.stack([layer, num_items])
        num_programs = min(_SPLIT_PROGRAMS, work.shape[0] * num_kv_heads)
        sums, stats = attend(geometry, num_programs, scalars, work, page_table, queries, pages)
        attended = combine(geometry, num_parts, sums, stats)
    else:
        scalars = jnp.stack([layer, jnp.int32(num_blocks)])
        work = jnp.stack(_whole_items(blocks), axis=1)
        attended = attend(geometry, num_blocks * num_kv_heads, scalars, work, page_table, queries, pages)

    # The other way: each head of a row finds the packed row it came from.
    packed = attended.reshape(-1, head_dim)
    place = jnp.full(num_rows * num_heads, source.shape[0], jnp.int32)
    place = place.at[source].set(jnp.arange(source.shape[0], dtype=jnp.int32), mode="drop")
    out = packed.at[place].get(mode="fill", fill_value=0)
    unread = jnp.repeat(blocks.unread, num_kv_heads * geometry.height)
    unread = unread.at[place].get(mode="fill", fill_value=False)
    return jnp.where(unread[:, None], jnp.asarray(jnp.nan, out.dtype), out).reshape(num_rows, num_heads, head_dim)


def default_keys_per_chunk(num_kv_heads: int) -> int:
    """Returns the keys of a chunk: 2048, or fewer where few kv heads would leave multiprocessors idle."""
    return min(2048, max(512, _round_up(256 * num_kv_heads, STEP)))


def _check_supported(q: jax.Array, kv_pool: jax.Array, q_tile: int, keys_per_chunk: int | None) -> None:
    """Raises ValueError, naming argument, value and what is supported. Runs while tracing."""
    num_heads, head_dim = q.shape[1:]
    num_kv_heads, page_size = kv_pool.shape[3:5]
    if kv_pool.dtype.name not in DTYPES:
        raise ValueError(f"kv_pool has dtype {kv_pool.dtype}; the GPU kernel supports {', '.join(DTYPES)}.")
    if q.dtype != kv_pool.dtype:
        raise ValueError(f"q has dtype {q.dtype}; the GPU kernel supports that of kv_pool, {kv_pool.dtype}.")
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"q has head dim {head_dim}; the GPU kernel supports {_listed(HEAD_DIMS)}.")
    if page_size not in PAGE_SIZES:
        raise ValueError(f"kv_pool has page_size={page_size}; the GPU kernel supports {_listed(PAGE_SIZES)}.")
    if num_heads // num_kv_heads > MAX_GROUP:
        raise ValueError(
            f"q has {num_heads // num_kv_heads} heads for each of kv_pool's {num_kv_heads} kv heads; the GPU kernel "
            f"supports at most {MAX_GROUP}."
        )
    most = _MAX_PACKED_ROWS * num_kv_heads // num_heads
    if q_tile > most:
        raise ValueError(f"{q_tile=}; the GPU kernel supports at most {most} here.")
    if keys_per_chunk is not None and (keys_per_chunk < 1 or keys_per_chunk % STEP):
        raise ValueError(f"{keys_per_chunk=}; supported: positive multiples of {STEP}.")


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """What to do for each block, all [blocks]. `end_step` is 0 where that is nothing."""

    segment: jax.Array
    limit: jax.Array
    last_position: jax.Array
    end_step: jax.Array
    unread: jax.Array  # bool: a page in use is no page of the pool, so the block's rows are NaN


def _cut_blocks(
    geometry: Geometry, tiles: jax.Array, page_table: jax.Array, num_pages: int, packed_rows: int
) -> _Blocks:
    """Cuts the tiles into blocks of `geometry.height` packed rows."""
    group, height = geometry.group, geometry.height
    max_pages = page_table.shape[1]
    segment, _, first_position, num_valid = (tiles[:, column, None] for column in range(4))  # i32[tiles, 1]
    first_row = jnp.arange(0, packed_rows, height, dtype=jnp.int32)[None, :]  # i32[1, blocks of a tile]
    last_query = jnp.minimum(num_valid - 1, (first_row + height - 1) // group)
    last_position = first_position + last_query
    in_use = first_row < num_valid * group

    # The first entry that is no page of the pool, of each row of the table.
    is_page = (page_table >= 0) & (page_table < num_pages)
    first_bad = jnp.where(is_page, max_pages, jnp.arange(max_pages)[None, :]).min(axis=1)
    segment = jnp.clip(segment, 0, page_table.shape[0] - 1)
    unread = in_use & (first_bad[segment] <= last_position // geometry.page_size)
    fields = (
        segment,
        first_position * group + first_row,
        last_position,
        jnp.where(in_use & ~unread, last_position // STEP + 1, 0),
        unread,
    )
    shape = jnp.broadcast_shapes(*(field.shape for field in fields))
    return _Blocks(*(jnp.broadcast_to(field, shape).reshape(-1) for field in fields))


def _packed_heads(geometry: Geometry, tiles: jax.Array, q_tile: int, num_rows: int) -> jax.Array:
    """Returns for each packed row, i32[blocks * K * height], the head it is: row * N + head, or T * N for none."""
    group, num_kv_heads = geometry.group, geometry.num_kv_heads
    num_heads = group * num_kv_heads
    packed_row = jnp.arange(_round_up(q_tile * group, geometry.height), dtype=jnp.int32)
    packed_row = packed_row.reshape(1, -1, 1, geometry.height)  # [tiles, blocks of a tile, K, height]
    kv_head = jnp.arange(num_kv_heads, dtype=jnp.int32).reshape(1, 1, -1, 1)
    first_row, num_valid = (tiles[:, column].reshape(-1, 1, 1, 1) for column in (1, 3))
    head = (first_row + packed_row // group) * num_heads + kv_head * group + packed_row % group
    valid = packed_row < jnp.minimum(num_valid, q_tile) * group
    return jnp.where(valid, head, num_rows * num_heads).reshape(-1)


def _whole_items(blocks: _Blocks) -> WorkItem:
    zeros = jnp.zeros_like(blocks.segment)
    return WorkItem(
        block=jnp.arange(zeros.shape[0], dtype=jnp.int32),
        segment=blocks.segment,
        limit=blocks.limit,
        last_position=blocks.last_position,
        first_step=zeros,
        end_step=blocks.end_step,
        chunk=zeros,
    )


def _split_work(blocks: _Blocks, num_chunks: int, steps_per_chunk: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Lists the chunks of all blocks without gaps.

    Returns:
        i32[blocks * num_chunks, 7] rows of `WorkItem`, i32[] how many are in use, and i32[blocks] chunks of each block.
    """
    num_parts = -(-blocks.end_step // steps_per_chunk)
    ends = jnp.cumsum(num_parts)
    index = jnp.arange(num_parts.shape[0] * num_chunks, dtype=jnp.int32)
    block = jnp.minimum((ends[None, :] <= index[:, None]).sum(axis=1), num_parts.shape[0] - 1).astype(jnp.int32)
    chunk = index - (ends - num_parts)[block]
    item = WorkItem(
        block=block,
        segment=blocks.segment[block],
        limit=blocks.limit[block],
        last_position=blocks.last_position[block],
        first_step=chunk * steps_per_chunk,
        end_step=jnp.minimum((chunk + 1) * steps_per_chunk, blocks.end_step[block]),
        chunk=chunk,
    )
    return jnp.stack(item, axis=1), ends[-1], num_parts


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _listed(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))
