"""What is static of paged attention on Hopper: sizes, the plan of the shared memory, and the table of what to do."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 64  # of a warpgroup: the height of one wgmma
STEP = 128  # keys at a time

_SHARED_MEMORY = 225 * 1024  # bytes for what is counted below, of the 227 KiB that a block can have
_MAX_STAGES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Geometry:
    """What is static of a call.

    Attributes:
        group: query heads for each kv head.
        num_kv_heads: kv heads.
        head_dim: 64 or 128.
        page_size: 16, 32, 64 or 128.
        num_layers: layers of the pool.
        dtype: of queries, keys and values; sums are float32.
        warpgroups: how many compute, each on 64 rows of a block: 1 or 2.
        rows: rows of each warpgroup that matter, a multiple of 8; 64 where there are two.
        num_chunks: parts that the longest history is split into; 1: never split.
        scale: what scores are multiplied by.
        simulated: runs in the interpreter, which knows no products with an operand in registers.
    """

    group: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    num_layers: int
    dtype: Any
    warpgroups: int
    rows: int
    num_chunks: int
    scale: float
    simulated: bool

    @property
    def split(self) -> bool:
        return self.num_chunks > 1

    @property
    def height(self) -> int:
        """Rows of a block."""
        return self.warpgroups * self.rows

    @property
    def pages_per_step(self) -> int:
        return STEP // self.page_size

    @property
    def scale_log2(self) -> float:
        """The scale for weights that are powers of two."""
        return self.scale * math.log2(math.e)

    @property
    def query_slots(self) -> int:
        """Blocks whose queries are in shared memory: with a split, those of the next item are loaded ahead."""
        return 2 if self.split else 1

    @property
    def stages(self) -> int:
        """Steps whose keys and values are in shared memory."""
        itemsize = jnp.dtype(self.dtype).itemsize
        queries = self.query_slots * self.warpgroups * ROWS * self.head_dim * itemsize
        partial = ROWS * (self.head_dim + 2) * 4 if self.split else 0
        return min(_MAX_STAGES, (_SHARED_MEMORY - queries - partial) // (2 * STEP * self.head_dim * itemsize))

    def scratch(self) -> dict[str, Any]:
        """Returns the types of an `attend` program's shared memory and barriers.

        A barrier `*_full` says that a stage (or slot) has been loaded, `*_free` that nobody needs it any more.
        """
        scratch = {
            "queries_smem": matrix((self.query_slots * self.warpgroups, ROWS, self.head_dim), self.dtype),
            "queries_full": plgpu.Barrier(num_arrivals=self.warpgroups, num_barriers=self.query_slots),
        }
        for name in ("keys", "values"):
            scratch[f"{name}_smem"] = matrix((self.stages, STEP, self.head_dim), self.dtype)
            scratch[f"{name}_full"] = plgpu.Barrier(num_arrivals=self.pages_per_step, num_barriers=self.stages)
            scratch[f"{name}_free"] = plgpu.Barrier(num_arrivals=self.warpgroups, num_barriers=self.stages)
        if self.warpgroups == 2:
            scratch["turns"] = plgpu.Barrier(num_arrivals=1, num_barriers=2)
        if self.split:
            scratch["queries_free"] = plgpu.Barrier(num_arrivals=self.warpgroups, num_barriers=self.query_slots)
            scratch["sums_smem"] = matrix((ROWS, self.head_dim), jnp.float32)
            scratch["stats_smem"] = plgpu.SMEM((2, ROWS), jnp.float32)
        if self.simulated:
            scratch["weights_smem"] = plgpu.SMEM((self.warpgroups, ROWS, STEP), self.dtype)
        return scratch

    def kernel_options(self, name: str) -> dict[str, Any]:
        """Returns what both kernels pass to `plgpu.kernel`."""
        return {
            "kernel_name": name,
            "grid_names": ("program",),
            "thread_name": "warpgroup",
            "compiler_params": plgpu.CompilerParams(approx_math=True),
            "interpret": plgpu.InterpretGPUParams(detect_races=True) if self.simulated else None,
        }


def matrix(shape: tuple[int, ...], dtype: Any) -> Any:
    """Returns a type of matrices in shared memory as wgmma and TMA want them: tiles with a swizzle of 128 bytes."""
    tiles = plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize))  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, dtype, transforms=(tiles, plgpu.SwizzleTransform(128)))  # pyright: ignore[reportAbstractUsage]


class WorkItem(NamedTuple):
    """A row of the work table, i32[W, 7]. A program takes a row and a kv head at a time.

    Attributes:
        block: which block of the packed queries.
        segment: row of the page table.
        limit: row r of the block stands at position (limit + r) // group.
        last_position: of the block's last valid row.
        first_step: first step of 128 keys of the history.
        end_step: where the steps end; not behind first_step: nothing to do.
        chunk: which part of a split history this is.
    """

    block: jax.Array
    segment: jax.Array
    limit: jax.Array
    last_position: jax.Array
    first_step: jax.Array
    end_step: jax.Array
    chunk: jax.Array
