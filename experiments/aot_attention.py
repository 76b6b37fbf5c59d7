"""Calls of paged attention that are compiled for accelerators that are not there."""

import dataclasses
import functools
from collections.abc import Callable

import jax
from jax.sharding import NamedSharding

from penelope_jax.kernels.paged_attention import ragged_paged_attention

_NUM_PAGES, _NUM_LAYERS, _NUM_SEGMENTS = 1024, 36, 64


@dataclasses.dataclass(frozen=True)
class Attention:
    """Sizes of one call of attention.

    Attributes:
        name: what it stands for.
        num_heads: query heads.
        num_kv_heads: kv heads.
        head_dim: of both.
        q_tile: rows of a tile.
        page_size: tokens.
        dtype: of queries and pages.
        deterministic: as in `ragged_paged_attention`.
        num_rows: of the batch.
        num_tiles: of the batch.
        max_context: tokens of the page table's width.
        num_pages: of the pool.
    """

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_tile: int
    page_size: int = 64
    dtype: str = "bfloat16"
    deterministic: bool = False
    num_rows: int = 2048
    num_tiles: int = 96
    max_context: int = 131_072
    num_pages: int = _NUM_PAGES

    def arguments(self, sharding: NamedSharding) -> list[jax.ShapeDtypeStruct]:
        """Returns the arrays of the call; the second is the pool."""
        pool = (self.num_pages, _NUM_LAYERS, 2, self.num_kv_heads, self.page_size, self.head_dim)
        shapes = (
            ((self.num_rows, self.num_heads, self.head_dim), self.dtype),
            (pool, self.dtype),
            ((), "int32"),
            ((self.num_tiles, 4), "int32"),
            ((_NUM_SEGMENTS, self.max_context // self.page_size), "int32"),
        )
        return [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in shapes]

    def function(self, implementation: str) -> Callable:
        """Returns what to compile."""
        return functools.partial(
            ragged_paged_attention,
            q_tile=self.q_tile,
            scale=self.head_dim**-0.5,
            implementation=implementation,
            deterministic=self.deterministic,
        )
