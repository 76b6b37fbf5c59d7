"""Paged attention on Hopper: the kernel that walks the pages, and the warpgroup that loads them.

A history is walked 128 keys at a step, from position 0 upwards. One warpgroup loads, a TMA copy for each page with its
id as a scalar from the page table, some steps ahead of the one or two that compute (`hopper_worker.py`).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from penelope_jax.kernels.hopper_geometry import ROWS, Geometry, WorkItem
from penelope_jax.kernels.hopper_worker import RowsOfItem, Turns

_LOADER_REGISTERS, _WORKER_REGISTERS = 48, 232  # a thread; 128 * (48 + 2 * 232) = 65,536, all there are


def attend(
    geometry: Geometry,
    num_programs: int,
    scalars: jax.Array,
    work: jax.Array,
    page_table: jax.Array,
    queries: jax.Array,
    pages: jax.Array,
) -> Any:
    """Attends blocks of packed rows to their histories.

    Args:
        geometry: what is static.
        num_programs: CUDA blocks to start. With a split, program i takes the items i, i + num_programs, ...; without
            one there is a program for each item.
        scalars: i32[2], the layer of the pool, and the number of rows of `work` in use.
        work: i32[W, 7], rows of `WorkItem`.
        page_table: i32[S, max_pages]; entries in use are pages of the pool.
        queries: [blocks * K, height, H].
        pages: [P * L * 2 * K, page_size, H].

    Returns:
        Without a split [blocks * K, height, H] in the queries' dtype. With one, for each chunk, sums that are not yet
        divided, f32[blocks * K * num_chunks, rows, H], and f32[blocks * K * num_chunks, 2, 64], the scaled maximum of
        each row's scores and the sum of its weights. What no item covers is not written.
    """
    if geometry.split:
        num_parts = queries.shape[0] * geometry.num_chunks
        out_type = (
            jax.ShapeDtypeStruct((num_parts, geometry.rows, geometry.head_dim), jnp.float32),
            jax.ShapeDtypeStruct((num_parts, 2, ROWS), jnp.float32),
        )
    else:
        out_type = jax.ShapeDtypeStruct(queries.shape, queries.dtype)
    run = plgpu.kernel(
        functools.partial(_program, geometry, num_programs),
        out_type=out_type,
        scratch_types=geometry.scratch(),
        grid=(num_programs,),
        num_threads=geometry.warpgroups + 1,
        **geometry.kernel_options("paged_attention"),
    )
    return run(scalars, work, page_table, queries, pages)


def _program(geometry: Geometry, num_programs: int, scalars, work, page_table, queries, pages, *outs, **scratch):
    """Runs one CUDA block. The last warpgroup loads for the others."""
    warpgroup = lax.axis_index("warpgroup")
    program = lax.axis_index("program")
    layer, num_rows = scalars[0], scalars[1]

    def run_row(run_item: Callable, row, head, number, ring):
        item = WorkItem(*(work[row, column] for column in range(len(WorkItem._fields))))
        num_steps = jnp.maximum(item.end_step - item.first_step, 0)
        pl.when(num_steps > 0)(lambda: run_item(item, head, number, ring))
        return ring + num_steps

    def for_each_item(run_item: Callable):
        """Calls run_item(item, head, number, ring); `number` counts this program's items, `ring` their steps."""
        if not geometry.split:
            # One head after another, so that its keys stay in the L2 cache. Later rows of the table tend to stand
            # deeper and to take longer, so they start first.
            run_row(run_item, num_rows - 1 - lax.rem(program, num_rows), lax.div(program, num_rows), 0, 0)
            return

        def body(number, ring):
            item = program + number * num_programs
            # Heads of one page side by side: they are neighbours in memory.
            row, head = lax.div(item, geometry.num_kv_heads), lax.rem(item, geometry.num_kv_heads)
            return run_row(run_item, row, head, number, ring)

        num_own = lax.div(num_rows * geometry.num_kv_heads - program + num_programs - 1, num_programs)
        lax.fori_loop(0, num_own, body, jnp.int32(0))

    @pl.when(warpgroup == geometry.warpgroups)
    def _():
        if geometry.warpgroups == 2:
            plgpu.set_max_registers(_LOADER_REGISTERS, action="decrease")
        for_each_item(functools.partial(_load_item, geometry, layer, page_table, queries, pages, scratch))

    @pl.when(warpgroup < geometry.warpgroups)
    def _():
        if geometry.warpgroups == 2:
            plgpu.set_max_registers(_WORKER_REGISTERS, action="increase")
        turns = Turns(geometry, warpgroup, scratch)
        turns.start()
        for_each_item(lambda *item: RowsOfItem(geometry, warpgroup, turns, outs, scratch, *item).attend())
        turns.finish()
        plgpu.wait_smem_to_gmem(0)


def _load_item(geometry: Geometry, layer, page_table, queries, pages, scratch, item: WorkItem, head, number, ring):
    """Loads an item's queries, then its pages step by step as stages become free."""
    slot = 0
    if geometry.split:
        slot = lax.rem(number, geometry.query_slots)
        pl.when(number >= geometry.query_slots)(lambda: plgpu.barrier_wait(scratch["queries_free"].at[slot]))
    for warpgroup in range(geometry.warpgroups):
        plgpu.copy_gmem_to_smem(
            queries.at[item.block * geometry.num_kv_heads + head, pl.ds(warpgroup * ROWS, geometry.rows)],
            scratch["queries_smem"].at[slot * geometry.warpgroups + warpgroup, pl.ds(0, geometry.rows)],
            scratch["queries_full"].at[slot],
        )
    page_size, last_page = geometry.page_size, lax.div(item.last_position, geometry.page_size)

    def load_pages(name: str, kind: int, step):
        """Fills a stage with a step's keys or values. What would hold pages behind the last one is left as it is."""
        stage = lax.rem(ring + step, geometry.stages)
        first_page = (item.first_step + step) * geometry.pages_per_step
        full, free = scratch[f"{name}_full"].at[stage], scratch[f"{name}_free"].at[stage]
        pl.when(ring + step >= geometry.stages)(lambda: plgpu.barrier_wait(free))

        def load(place):
            page = page_table[item.segment, first_page + place]
            row = ((page * geometry.num_layers + layer) * 2 + kind) * geometry.num_kv_heads + head
            to = scratch[f"{name}_smem"].at[stage, pl.ds(place * page_size, page_size)]
            plgpu.copy_gmem_to_smem(pages.at[row], to, full)

        def load_or_skip(place, _=None):
            pl.when(first_page + place <= last_page)(lambda: load(place))
            pl.when(first_page + place > last_page)(lambda: plgpu.barrier_arrive(full))

        load(0)
        if geometry.pages_per_step == 2:
            load_or_skip(1)
        else:
            lax.fori_loop(1, geometry.pages_per_step, load_or_skip, None)

    def load_step(step, _):
        load_pages("keys", 0, step)
        load_pages("values", 1, step)

    lax.fori_loop(0, item.end_step - item.first_step, load_step, None)
