"""Steps of attention, what they must give, and ways to be wrong, for the tests of every implementation.

Pages that nobody owns, other layers and slots behind the last token are full of NaN; unused table entries are out of
range on both sides; rows are in no order, and some of q belong to no tile.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from penelope_jax.kernels.kv_write import DROP_PAGE
from penelope_jax.kernels.paged_attention import KERNELS, ragged_paged_attention

NUM_LAYERS, LAYER = 2, 1
TOLERANCE = {"float32": 2e-6, "bfloat16": 1e-2, "float16": 2e-3}  # of a row and head, relative to its norm

Spans = dict[int, list[tuple[int, int]]]  # history: the positions that are computed


@dataclasses.dataclass(frozen=True)
class Shape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    q_tile: int
    dtype: str = "bfloat16"
    deterministic: bool = False


@dataclasses.dataclass(frozen=True)
class Case:
    shape: Shape
    q: np.ndarray  # [T, N, H]
    pool: np.ndarray
    tiles: np.ndarray
    page_table: np.ndarray
    rows: list[tuple[int, int]]  # (row of the page table, position) of each row of q

    @functools.cached_property
    def expected(self) -> np.ndarray:
        """Attends each row by itself, in float64. Returns [len(rows), N, H]."""
        shape, group = self.shape, self.shape.num_heads // self.shape.num_kv_heads
        out = np.zeros((len(self.rows), *self.q.shape[1:]))
        for row, (history, position) in enumerate(self.rows):
            pages = self.page_table[history, : position // shape.page_size + 1]
            kv = np.concatenate(list(self.pool[pages, LAYER].astype(np.float64)), axis=2)[:, :, : position + 1]
            for head in range(shape.num_heads):
                keys, values = kv[:, head // group]
                scores = keys @ self.q[row, head].astype(np.float64) * shape.head_dim**-0.5
                weights = np.exp(scores - scores.max())
                out[row, head] = weights @ values / weights.sum()
        return out


def mixed_spans(shape: Shape) -> Spans:
    """Phantom, real and decode rows; lengths at and around borders of pages, tiles and groups of keys."""
    size, tile = shape.page_size, shape.q_tile
    return {
        0: [(size, 2 * size), (3 * size, 4 * size), (5 * size, 5 * size + tile + 1)],  # two holes, new tokens
        1: [(2 * size, 2 * size + tile)],  # shares its first two pages with history 0; one whole tile
        2: [(0, 1)],  # one token on one page
        3: [(size - 1, size)],  # a decode in the last slot of a page
        4: [(size, size + 1)],  # ... and in the first slot of one
        5: [(0, max(1, tile - 1))],
        6: [(530, 531), (544, 544 + size)],  # behind the first group of keys, across its border
        7: [(511, 512)],  # the last of a group, on pages of history 6, as the next two
        8: [(512, 513)],
        9: [(640, 641)],
    }


def make_case(shape: Shape, spans: Spans, shared: dict[int, tuple[int, int]] | None = None, seed: int = 3) -> Case:
    """Makes a step that computes `spans`.

    Args:
        shape: sizes.
        spans: what is computed.
        shared: for a history, whose pages it shares, and how many from the first on.
        seed: of the values and of the order of pages.
    """
    size, tile = shape.page_size, shape.q_tile
    random = np.random.default_rng(seed)
    lengths = [max(stop for _, stop in spans[history]) for history in range(len(spans))]
    num_used = [-(-length // size) for length in lengths]
    num_pages = sum(num_used) + 3
    free = random.permutation(num_pages).tolist()
    table = np.full((len(spans) + 1, max(num_used) + 1), DROP_PAGE, np.int32)
    table[:, 1::2] = -7
    for history, used in enumerate(num_used):
        table[history, :used] = [free.pop() for _ in range(used)]
    for history, (owner, number) in (shared or {}).items():
        table[history, :number] = table[owner, :number]

    pool_shape = (num_pages, NUM_LAYERS, 2, shape.num_kv_heads, size, shape.head_dim)
    pool = random.standard_normal(pool_shape).astype(shape.dtype)
    pool[:, 0] = np.nan  # another layer
    owned = {int(page) for history, used in enumerate(num_used) for page in table[history, :used]}
    pool[sorted(set(range(num_pages)) - owned)] = np.nan
    for history, length in enumerate(lengths):  # the last page is shared with none
        if length % size:
            pool[table[history, length // size], :, :, :, length % size :] = np.nan

    tiles, rows = [], []
    for history in random.permutation(len(spans)).tolist():
        for start, stop in reversed(spans[history]):
            for first in range(start, stop, tile):
                tiles.append((history, len(rows) + first - start, first, min(tile, stop - first)))
            rows += [(history, position) for position in range(start, stop)]
    tiles += [(0, 0, 0, 0)] * 2
    q = random.standard_normal((len(rows) + 5, shape.num_heads, shape.head_dim)).astype(shape.dtype)
    return Case(shape, q, pool, np.array(tiles, np.int32), table, rows)


@functools.cache
def mixed_case(shape: Shape) -> Case:
    """Makes a step that computes `mixed_spans`, of histories that share pages. It is made once: leave it as it is."""
    pages_of_256, pages_of_384 = -(-256 // shape.page_size), -(-384 // shape.page_size)
    shared = {1: (0, 2), 7: (6, pages_of_256), 8: (6, pages_of_256), 9: (6, pages_of_384)}
    return make_case(shape, mixed_spans(shape), shared)


def run(implementation: str, case: Case) -> np.ndarray:
    """Returns [T, N, H], by the interpreter where the implementation is a kernel."""
    attended = _program(implementation, case.shape)(case.q, case.pool, LAYER, case.tiles, case.page_table)
    return np.asarray(attended.astype(jnp.float32))


@functools.cache
def _program(implementation: str, shape: Shape):
    attend = functools.partial(
        ragged_paged_attention,
        q_tile=shape.q_tile,
        scale=shape.head_dim**-0.5,
        implementation=implementation,
        deterministic=shape.deterministic,
        interpret=implementation in KERNELS,
    )
    return jax.jit(attend)


def worst_row(case: Case, out: np.ndarray) -> float:
    """Returns the largest error of a row and head, relative to its norm; infinite if anything is not finite."""
    error = np.linalg.norm(out[: len(case.rows)].astype(np.float64) - case.expected, axis=-1)
    error = error / np.linalg.norm(case.expected, axis=-1)
    return float(error.max()) if np.isfinite(error).all() else np.inf


def check_output(case: Case, out: np.ndarray) -> np.ndarray:
    assert worst_row(case, out) < TOLERANCE[case.shape.dtype]
    assert not out[len(case.rows) :].any(), "rows that no tile covers are zero"
    return out


def check(implementation: str, case: Case) -> np.ndarray:
    return check_output(case, run(implementation, case))


def swap_keys_and_values(case: Case) -> Case:
    return dataclasses.replace(case, pool=case.pool[:, :, ::-1])


def shift_a_page(case: Case) -> Case:
    """Makes history 0 start with a page of another."""
    table = case.page_table.copy()
    whole = np.isfinite(case.pool[:, LAYER].astype(np.float32)).all(axis=(1, 2, 3, 4))
    table[0, 0] = next(page for page in np.flatnonzero(whole) if page not in table[0])
    return dataclasses.replace(case, page_table=table)


def mask_one_less(case: Case) -> Case:
    return dataclasses.replace(case, tiles=case.tiles - np.array([0, 0, 1, 0], np.int32) * (case.tiles[:, 2:3] > 0))


def mask_one_more(case: Case) -> Case:
    return dataclasses.replace(case, tiles=case.tiles + np.array([0, 0, 1, 0], np.int32))


CONTROLS = (swap_keys_and_values, shift_a_page, mask_one_less, mask_one_more)
