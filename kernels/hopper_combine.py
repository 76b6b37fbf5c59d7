"""Paged attention on Hopper: the kernel that joins the chunks of split histories, in the order of their positions."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from penelope_jax.kernels.hopper_geometry import ROWS, Geometry, matrix
from penelope_jax.kernels.hopper_worker import along_rows

_AHEAD = 4  # parts in shared memory


def combine(geometry: Geometry, num_parts: jax.Array, sums: jax.Array, stats: jax.Array) -> jax.Array:
    """Joins what a split `attend` left of each chunk.

    Args:
        geometry: as there.
        num_parts: i32[blocks], how many chunks of each block there are, from chunk 0.
        sums: f32[blocks * K * num_chunks, rows, H], not yet divided.
        stats: f32[blocks * K * num_chunks, 2, 64], the scaled maximum of each row's scores and the sum of its weights.

    Returns:
        [blocks * K, rows, H] in the queries' dtype; blocks without parts are not written.
    """
    num_programs = sums.shape[0] // geometry.num_chunks
    run = plgpu.kernel(
        functools.partial(_program, geometry),
        out_type=jax.ShapeDtypeStruct((num_programs, geometry.rows, geometry.head_dim), geometry.dtype),
        scratch_types={
            "sums_smem": matrix((_AHEAD, ROWS, geometry.head_dim), jnp.float32),
            "stats_smem": plgpu.SMEM((_AHEAD, 2, ROWS), jnp.float32),
            "out_smem": matrix((ROWS, geometry.head_dim), geometry.dtype),
            "full": plgpu.Barrier(num_arrivals=2, num_barriers=_AHEAD),
        },
        grid=(num_programs,),
        num_threads=1,
        **geometry.kernel_options("paged_attention_combine"),
    )
    return run(num_parts, sums, stats)


def _program(geometry: Geometry, num_parts, sums, stats, out, *, sums_smem, stats_smem, out_smem, full):
    """Runs one CUDA block: a block of rows for one kv head."""
    program = lax.axis_index("program")
    count = num_parts[lax.div(program, geometry.num_kv_heads)]

    def load(part):
        slot, index = lax.rem(part, _AHEAD), program * geometry.num_chunks + part
        plgpu.copy_gmem_to_smem(sums.at[index], sums_smem.at[slot, pl.ds(0, geometry.rows)], full.at[slot])
        plgpu.copy_gmem_to_smem(stats.at[index], stats_smem.at[slot], full.at[slot])

    def add(part, carry):
        row_max, row_sum, total = carry
        slot = lax.rem(part, _AHEAD)
        plgpu.barrier_wait(full.at[slot])
        part_max = plgpu.load(stats_smem.at[slot, 0], layout=plgpu.Layout.WGMMA.reduce(1))
        part_sum = plgpu.load(stats_smem.at[slot, 1], layout=plgpu.Layout.WGMMA.reduce(1))
        part_total = plgpu.load(sums_smem.at[slot], layout=plgpu.Layout.WGMMA)
        plgpu.commit_smem()  # all have read the slot before it is loaded again
        pl.when(part + _AHEAD < count)(lambda: load(part + _AHEAD))
        new_max = jnp.maximum(row_max, part_max)
        keep, take = jnp.exp2(row_max - new_max), jnp.exp2(part_max - new_max)
        total = total * along_rows(keep, total.shape) + part_total * along_rows(take, total.shape)
        return new_max, row_sum * keep + part_sum * take, total

    @pl.when(count > 0)
    def _():
        for part in range(_AHEAD):
            pl.when(part < count)(lambda part=part: load(jnp.int32(part)))
        zeros = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), plgpu.Layout.WGMMA.reduce(1))
        total = plgpu.layout_cast(jnp.zeros((ROWS, geometry.head_dim), jnp.float32), plgpu.Layout.WGMMA)
        # Smaller than any maximum, the masked ones too.
        _, row_sum, total = lax.fori_loop(0, count, add, (zeros - 1e38, zeros, total))
        out_smem[...] = (total / along_rows(row_sum, total.shape)).astype(geometry.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem.at[pl.ds(0, geometry.rows)], out.at[program])
        plgpu.wait_smem_to_gmem(0)
