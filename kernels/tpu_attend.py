"""Paged attention on TPU: the kernel that walks the pages.

A program takes one block of packed rows, for all kv heads, and walks its history from position 0 upwards. A page of one
layer, keys and values of all heads, is one stretch of memory and one copy. A step of several pages is in flight while
the one before is computed; behind the last step of a block comes the first of the next, so that the memory is never
idle between programs. Which buffer is next is remembered from program to program.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from penelope_jax.kernels.tpu_geometry import CHUNK, HEAD_DIM, Geometry

_PAGES_AT_ONCE = 4  # copies that start in one run of instructions
_MASKED = -1e30  # finite: the difference of two masked scores is not NaN


def attend(
    geometry: Geometry,
    layer: jax.Array,
    segment: jax.Array,
    limit: jax.Array,
    num_keys: jax.Array,
    window: jax.Array,
    page_table: jax.Array,
    queries: jax.Array,
    kv_pool: jax.Array,
    interpret: Any,
) -> jax.Array:
    """Attends blocks of packed rows to their histories.

    Args:
        geometry: what is static.
        layer: i32[1], of the pool.
        segment: i32[blocks], row of the page table. This and the next three are in the order of programs, one core's
            after the other's.
        limit: i32[blocks], row r of the block stands at position (limit + r) // group.
        num_keys: i32[blocks], how many keys of the history are read; 0: nothing is to do.
        window: i32[blocks], which block of `queries` this is; where nothing is to do, that of a program before, so that
            nothing is loaded and stored, or one that nobody else has.
        page_table: i32[S, 1, max_pages]; entries in use are pages of the pool.
        queries: [blocks, K, rows, H].
        kv_pool: [P, L, 2, K, page_size, H].
        interpret: as in `pl.pallas_call`.

    Returns:
        [blocks, K, rows, H]; what has no keys is not written.
    """
    num_programs, num_heads, rows, _ = queries.shape
    cores = geometry.generation.cores
    per_core = num_programs // cores

    def block_index(core, index, layer, segment, limit, num_keys, window):
        return window[core * per_core + index], 0, 0, 0

    def own_pages(core, index, layer, segment, limit, num_keys, window):
        return segment[core * per_core + index], 0, 0

    def next_pages(core, index, layer, segment, limit, num_keys, window):
        return segment[core * per_core + jnp.minimum(index + 1, per_core - 1)], 0, 0

    block = pl.BlockSpec((None, num_heads, rows, HEAD_DIM), block_index)
    table_row = (None, 1, geometry.max_pages)
    mean_keys = geometry.max_pages * geometry.page_size // 2
    scores = num_programs * num_heads * rows * mean_keys
    page_bytes = num_programs * mean_keys * 2 * num_heads * HEAD_DIM * kv_pool.dtype.itemsize
    running = pltpu.VMEM((num_heads, rows, HEAD_DIM), jnp.float32)
    run = pl.pallas_call(
        functools.partial(_program, geometry, per_core),
        out_shape=jax.ShapeDtypeStruct(queries.shape, queries.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(cores, per_core),
            in_specs=[
                pl.BlockSpec(table_row, own_pages, memory_space=pltpu.SMEM),
                pl.BlockSpec(table_row, next_pages, memory_space=pltpu.SMEM),
                block,
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=block,
            scratch_shapes=[
                pltpu.VMEM((2, 2, num_heads, geometry.keys_per_step, HEAD_DIM), kv_pool.dtype),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SMEM((1,), jnp.int32),
                running,
                running,
                running,
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=geometry.vmem_limit,
            disable_bounds_checks=True,
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * scores * HEAD_DIM,
            bytes_accessed=page_bytes + 2 * queries.size * queries.dtype.itemsize,
            transcendentals=scores,
        ),
        name="paged_attention",
        interpret=interpret,
    )
    return run(layer, segment, limit, num_keys, window, page_table, page_table, queries, kv_pool)


def _program(
    geometry: Geometry,
    per_core: int,
    layer,
    segment,
    limit,
    num_keys,
    window,
    pages,
    next_pages,
    queries,
    kv_pool,
    out,
    buffers,
    arrived,
    next_buffer,
    row_max,
    row_sum,
    total,
):
    """Runs one block. Its first step is on its way already, unless it is the first block of a core."""
    del segment, window
    index = pl.program_id(1)
    program = pl.program_id(0) * per_core + index
    own_keys = num_keys[program]
    keys_per_step, page_size = geometry.keys_per_step, geometry.page_size
    num_steps = pl.cdiv(own_keys, keys_per_step)

    def copy(pages, page, place, buffer):
        return pltpu.make_async_copy(
            kv_pool.at[pages[0, page], layer[0]],
            buffers.at[buffer, :, :, pl.ds(pl.multiple_of(place * page_size, page_size), page_size)],
            arrived.at[buffer],
        )

    def pages_in_step(num_keys, step):
        return jnp.clip(pl.cdiv(num_keys, page_size) - step * geometry.pages_per_step, 0, geometry.pages_per_step)

    def start(pages, num_keys, step, buffer):
        """Starts to load the pages of a step; none where there are no more keys."""

        def start_page(place, carry):
            copy(pages, step * geometry.pages_per_step + place, place, buffer).start()
            return carry

        number = pages_in_step(num_keys, step)
        whole = number == geometry.pages_per_step
        at_once = min(_PAGES_AT_ONCE, geometry.pages_per_step)
        pl.when(whole)(lambda: lax.fori_loop(0, geometry.pages_per_step, start_page, None, unroll=at_once))
        pl.when(jnp.logical_not(whole))(lambda: lax.fori_loop(0, number, start_page, None))

    def wait(step, buffer):
        """Waits for the pages of a step of this block."""

        def wait_page(place, carry):
            copy(pages, step * geometry.pages_per_step + place, place, buffer).wait()
            return carry

        number = pages_in_step(own_keys, step)
        whole = number == geometry.pages_per_step
        # A semaphore counts bytes, so one wait for a buffer's bytes is a wait for all its pages.
        everything = pltpu.make_async_copy(buffers.at[buffer], buffers.at[buffer], arrived.at[buffer])
        pl.when(whole)(everything.wait)
        pl.when(jnp.logical_not(whole))(lambda: lax.fori_loop(0, number, wait_page, None))

    def start_next_block(buffer):
        @pl.when(index + 1 < per_core)
        def _():
            start(next_pages, num_keys[program + 1], 0, buffer)

    @pl.when(index == 0)
    def _():
        next_buffer[0] = 0
        start(pages, own_keys, 0, 0)

    first_buffer = next_buffer[0]
    row_max[...] = jnp.full_like(row_max, _MASKED)
    row_sum[...] = jnp.zeros_like(row_sum)
    total[...] = jnp.zeros_like(total)

    def run_step(step, carry):
        buffer = lax.rem(first_buffer + step, 2)
        pl.when(step + 1 < num_steps)(lambda: start(pages, own_keys, step + 1, 1 - buffer))
        pl.when(step + 1 == num_steps)(lambda: start_next_block(1 - buffer))
        wait(step, buffer)

        def run_chunk(chunk, carry):
            place = pl.multiple_of(chunk * CHUNK, CHUNK)
            first_key = step * keys_per_step + place
            everyone_sees_all = (first_key + CHUNK) * geometry.group <= limit[program] + geometry.group
            take_in = functools.partial(
                _take_in,
                geometry,
                buffers.at[buffer],
                place,
                first_key,
                limit[program],
                own_keys,
                queries,
                (row_max, row_sum, total),
            )
            pl.when(everyone_sees_all)(functools.partial(take_in, masked=False))
            pl.when(jnp.logical_not(everyone_sees_all))(functools.partial(take_in, masked=True))
            return carry

        num_chunks = pl.cdiv(jnp.minimum(own_keys - step * keys_per_step, keys_per_step), CHUNK)
        return lax.fori_loop(0, num_chunks, run_chunk, carry)

    lax.fori_loop(0, num_steps, run_step, 0)

    @pl.when(num_steps == 0)
    def _():
        start_next_block(first_buffer)

    @pl.when(num_steps > 0)
    def _():
        next_buffer[0] = lax.rem(first_buffer + num_steps, 2)
        out[...] = (total[...] / row_sum[...]).astype(out.dtype)


def _take_in(geometry: Geometry, kv, place, first_key, limit, num_keys, queries, running, masked: bool):
    """Takes a chunk of keys and values into the running softmax of all heads.

    Args:
        geometry: what is static.
        kv: a buffer [2, K, keys_per_step, H].
        place: of the chunk in it.
        first_key: position of its first key.
        limit: row r stands at position (limit + r) // group.
        num_keys: keys of the history that are read; what is behind may be anything, NaN too.
        queries: [K, rows, H].
        running: maximum of the scaled scores, sum of the weights, and sum of the weighted values, each
            f32[K, rows, H]; the first two hold the same in each lane.
        masked: some row does not see all keys.
    """
    row_max, row_sum, total = running
    rows = geometry.rows
    precision = lax.Precision.HIGHEST if geometry.dtype == jnp.float32 else None
    key = first_key + lax.broadcasted_iota(jnp.int32, (rows, CHUNK), 1)
    seen = key * geometry.group <= limit + lax.broadcasted_iota(jnp.int32, (rows, CHUNK), 0)
    behind = first_key + lax.broadcasted_iota(jnp.int32, (CHUNK, HEAD_DIM), 0) >= num_keys

    def run_head(head, carry):
        keys, values = (kv[kind, head, pl.ds(place, CHUNK), :] for kind in range(2))
        if masked:  # in float32, as not every generation selects among bfloat16; 0 * NaN is NaN
            values = jnp.where(behind, 0.0, values.astype(jnp.float32)).astype(values.dtype)
        scores = _product(queries[head], keys, 1, precision) * geometry.scale_log2
        if masked:
            scores = jnp.where(seen, scores, _MASKED)
        old_max = row_max[head]
        new_max = jnp.maximum(old_max, scores.max(axis=1, keepdims=True))
        weights = jnp.exp2(scores - jnp.tile(new_max, (1, CHUNK // HEAD_DIM)))
        keep = jnp.exp2(old_max - new_max)
        row_max[head] = new_max
        row_sum[head] = row_sum[head] * keep + weights.sum(axis=1, keepdims=True)
        weighted = _product(weights.astype(values.dtype), values, 0, precision)
        total[head] = total[head] * keep + weighted
        return carry

    lax.fori_loop(0, geometry.num_kv_heads, run_head, 0, unroll=geometry.heads_at_once)


def _product(left, right, axis: int, precision) -> jax.Array:
    """Returns f32, the sum over the last axis of `left` and that axis of `right`."""
    return lax.dot_general(
        left, right, (((1,), (axis,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
