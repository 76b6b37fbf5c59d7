"""How many query rows an attention tile holds.

Large tiles read each page for more rows; small ones waste less on a decode, whose tile holds one row. What matters to
the processor are packed rows: tile rows times query heads per kv head.

Measured 2026-11-29 on 2 cores of a busy AMD EPYC (AVX512), jax 0.12.0.1: a model of 2 layers, 128 wide, 4/2 heads x 32,
deterministic, page 64, shortest times of interleaved runs. Prefill from 0 to 16K with tiles of 64 / 128 / 256 rows:
4.2K / 5.2K / 6.2K tok/s; 256 would waste most of a tile on a hole of one page. A decode at 16K with tiles of 4 rows:
75 to 101 a second for one sequence, 25 steps a second for four; with one tile size of 64 rows: 38 and 10.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from penelope_jax.kernels.paged_attention import ragged_paged_attention

_PREFILL_PACKED_ROWS = 256
_DECODE_PACKED_ROWS = 8


def prefill_q_tile(num_heads: int, num_kv_heads: int) -> int:
    """Returns the rows of a tile for prompts and holes: 256 packed rows, but 32 to 128 rows."""
    group = num_heads // num_kv_heads
    return min(128, max(32, _power_of_two_from(-(-_PREFILL_PACKED_ROWS // group))))


def decode_q_tile(num_heads: int, num_kv_heads: int) -> int:
    """Returns the rows of a tile for decodes: at least 8 packed rows, where bits stop depending on their number."""
    return _power_of_two_from(-(-_DECODE_PACKED_ROWS // (num_heads // num_kv_heads)))


@functools.cache
def tiles_agree(
    *, num_heads: int, num_kv_heads: int, head_dim: int, page_size: int, dtype: str, implementation: str
) -> bool:
    """Tells whether tiles for decodes give the same bits as tiles for prompts, by trying on this machine.

    The compiler may sum in another order for another number of rows, and its choice can depend on the processor and
    on how many cores there are. Deterministic mode must not rest on a measurement made elsewhere.
    """
    max_pages = -(-1600 // page_size)
    last = max_pages * page_size
    random = np.random.default_rng(0)
    pool = random.standard_normal((max_pages, 1, 2, num_kv_heads, page_size, head_dim)).astype(dtype)
    num_rows = 24
    q = (3 * random.standard_normal((num_rows, num_heads, head_dim))).astype(dtype)
    table = random.permutation(max_pages).astype(np.int32)[None]
    results = []
    for q_tile in (prefill_q_tile(num_heads, num_kv_heads), decode_q_tile(num_heads, num_kv_heads)):
        rows = np.arange(0, num_rows, min(q_tile, num_rows))
        tiles = [(0, row, last - num_rows + row, min(q_tile, num_rows - row)) for row in rows]
        attend = functools.partial(
            ragged_paged_attention,
            q_tile=q_tile,
            scale=head_dim**-0.5,
            implementation=implementation,
            deterministic=True,
        )
        attended = jax.jit(attend)(q, pool, 0, np.array(tiles, np.int32), table)
        results.append(np.asarray(attended.astype(jnp.float32)))
    return bool(np.array_equal(*results))


def _power_of_two_from(number: int) -> int:
    return 1 << (number - 1).bit_length()
