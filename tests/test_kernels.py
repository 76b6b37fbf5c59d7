"""One suite for all attention implementations against a numpy oracle in float64, and the page writes.

Pages that nobody owns are full of NaN, unused table entries are out of range, and controls show that the tolerance
sees a swapped K and V, a wrong page and a mask that is off by one.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penelope_jax.kernels import q_tiles
from penelope_jax.kernels.kv_write import DROP_PAGE, write_kv
from penelope_jax.kernels.paged_attention import IMPLEMENTATIONS, ragged_paged_attention

NUM_LAYERS, LAYER = 2, 1
TOLERANCE = {"float32": 2e-6, "bfloat16": 1e-2}  # of a row, relative to its norm


@dataclasses.dataclass(frozen=True)
class Shape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    q_tile: int
    dtype: str = "float32"


SHAPES = {
    "group1-page4": Shape(4, 4, 8, 4, 8),
    "group4-page16": Shape(8, 2, 16, 16, 4),
    "group8-page64": Shape(8, 1, 8, 64, 16),
    "group2-page16-bf16": Shape(4, 2, 32, 16, 8, "bfloat16"),
}


@dataclasses.dataclass
class Case:
    q: np.ndarray  # [T, N, H]
    pool: np.ndarray
    tiles: np.ndarray
    page_table: np.ndarray
    rows: list[tuple[int, int]]  # (row of the page table, position) of each row of q


def make_case(shape: Shape) -> Case:
    """Phantom, real and decode rows; histories that share pages; lengths at and around page, tile and group borders."""
    size, tile = shape.page_size, shape.q_tile
    random = np.random.default_rng(3)
    spans = {  # history: what is computed of it
        0: [(size, 2 * size), (3 * size, 4 * size), (5 * size, 5 * size + tile + 1)],  # two holes, new tokens
        1: [(2 * size, 2 * size + tile)],  # shares its first two pages with history 0; one whole tile
        2: [(0, 1)],  # one token on one page
        3: [(size - 1, size)],  # a decode in the last slot of a page
        4: [(size, size + 1)],  # ... and in the first slot of one
        5: [(0, tile - 1)],
        6: [(530, 531), (544, 544 + size)],  # behind the first group of keys, across its border
    }
    lengths = [max(stop for _, stop in spans[history]) for history in spans]
    max_pages = -(-max(lengths) // size) + 1
    num_pages = sum(-(-length // size) for length in lengths) + 3
    free = random.permutation(num_pages).tolist()
    table = np.full((len(spans) + 1, max_pages), DROP_PAGE, np.int32)
    table[:, 1::2] = -7  # unused entries are out of range on both sides
    for history, length in enumerate(lengths):
        num_used = -(-length // size)
        table[history, :num_used] = [free.pop() for _ in range(num_used)]
    table[1, :2] = table[0, :2]

    pool_shape = (num_pages, NUM_LAYERS, 2, shape.num_kv_heads, size, shape.head_dim)
    pool = random.standard_normal(pool_shape).astype(shape.dtype)
    pool[:, 0] = np.nan  # another layer
    owned = {int(page) for history, length in enumerate(lengths) for page in table[history, : -(-length // size)]}
    pool[sorted(set(range(num_pages)) - owned)] = np.nan
    for history, length in enumerate(lengths):  # slots behind the last token, on a page that is shared with none
        if length % size:
            pool[table[history, length // size], :, :, :, length % size :] = np.nan

    tiles, rows = [], []
    for history in (3, 0, 6, 2, 5, 1, 4):
        for start, stop in reversed(spans[history]):
            for first in range(start, stop, tile):
                tiles.append((history, len(rows) + first - start, first, min(tile, stop - first)))
            rows += [(history, position) for position in range(start, stop)]
    tiles += [(0, 0, 0, 0)] * 2
    q = random.standard_normal((len(rows) + 5, shape.num_heads, shape.head_dim)).astype(shape.dtype)
    return Case(q, pool, np.array(tiles, np.int32), table, rows)


def oracle(shape: Shape, case: Case) -> np.ndarray:
    """Attends each row by itself, in float64."""
    group = shape.num_heads // shape.num_kv_heads
    out = np.zeros(case.q.shape)
    for row, (history, position) in enumerate(case.rows):
        pages = case.page_table[history, : position // shape.page_size + 1]
        kv = np.concatenate(list(case.pool[pages, LAYER].astype(np.float64)), axis=2)[:, :, : position + 1]
        for head in range(shape.num_heads):
            keys, values = kv[:, head // group]
            scores = keys @ case.q[row, head].astype(np.float64) * shape.head_dim**-0.5
            weights = np.exp(scores - scores.max())
            out[row, head] = weights @ values / weights.sum()
    return out


def run(shape: Shape, case: Case, implementation: str, deterministic: bool = False) -> np.ndarray:
    attend = functools.partial(
        ragged_paged_attention,
        q_tile=shape.q_tile,
        scale=shape.head_dim**-0.5,
        implementation=implementation,
        deterministic=deterministic,
    )
    return np.asarray(_jitted(attend)(case.q, case.pool, LAYER, case.tiles, case.page_table))


def _jitted(attend):
    key = (attend.func, *sorted(attend.keywords.items()))
    if key not in _programs:
        _programs[key] = jax.jit(attend)
    return _programs[key]


_programs: dict = {}


def worst_row(shape: Shape, case: Case, out: np.ndarray) -> float:
    """Returns the largest error of a row and head, relative to its norm; infinite if anything is not finite."""
    expected = oracle(shape, case)[: len(case.rows)]
    error = np.linalg.norm(out[: len(case.rows)].astype(np.float64) - expected, axis=-1)
    error = error / np.linalg.norm(expected, axis=-1)
    return float(error.max()) if np.isfinite(error).all() else np.inf


@pytest.fixture(params=SHAPES.values(), ids=SHAPES.keys())
def shape(request) -> Shape:
    return request.param


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_attention_matches_the_oracle(shape, implementation):
    case = make_case(shape)
    out = run(shape, case, implementation)
    assert worst_row(shape, case, out) < TOLERANCE[shape.dtype]
    assert not out[len(case.rows) :].any(), "rows that no tile covers are zero"
    np.testing.assert_array_equal(out, run(shape, case, implementation))


def test_deterministic_attention_matches_the_oracle():
    shape = SHAPES["group4-page16"]
    case = make_case(shape)
    assert worst_row(shape, case, run(shape, case, "cpu", deterministic=True)) < TOLERANCE[shape.dtype]


def swap_keys_and_values(case: Case) -> Case:
    return dataclasses.replace(case, pool=case.pool[:, :, ::-1])


def shift_a_page(case: Case) -> Case:
    table = case.page_table.copy()
    table[0, 2], table[0, 3] = table[0, 3], table[0, 2]
    return dataclasses.replace(case, page_table=table)


def mask_one_less(case: Case) -> Case:
    return dataclasses.replace(case, tiles=case.tiles - np.array([0, 0, 1, 0], np.int32) * (case.tiles[:, 2:3] > 0))


def mask_one_more(case: Case) -> Case:
    return dataclasses.replace(case, tiles=case.tiles + np.array([0, 0, 1, 0], np.int32))


@pytest.mark.parametrize("control", [swap_keys_and_values, shift_a_page, mask_one_less, mask_one_more])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_control_a_wrong_kernel_fails(shape, implementation, control):
    case = make_case(shape)
    out = run(shape, control(case), implementation)
    assert worst_row(shape, case, out) > 4 * TOLERANCE[shape.dtype]


@pytest.mark.parametrize("page_id", [-1, DROP_PAGE])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_page_that_is_none_reads_as_nan(implementation, page_id):
    shape = SHAPES["group4-page16"]
    case = make_case(shape)
    case.page_table[0, 2] = page_id
    out = run(shape, case, implementation)
    spoilt = np.array([history == 0 and position >= 2 * shape.page_size for history, position in case.rows])
    assert np.isnan(out[: len(case.rows)][spoilt]).all()
    assert np.isfinite(out[: len(case.rows)][~spoilt]).all()


def test_no_rows():
    shape = SHAPES["group4-page16"]
    case = make_case(shape)
    case.tiles[:] = 0
    for implementation in IMPLEMENTATIONS:
        assert not run(shape, case, implementation).any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"implementation": "gpu2"}, "implementation='gpu2' cannot run here; what can: cpu"),
        ({"implementation": "reference", "interpret": True}, "interpret=True needs a Pallas implementation"),
        ({"q": (7, 4)}, r"q has shape \(7, 4\); supported: \[T, N, H\]"),
        ({"q": (7, 5, 8)}, "q has 5 heads; supported: multiples of kv_pool's 2 kv heads"),
        ({"q": (7, 4, 16)}, "q has head dim 16 and kv_pool has 8"),
        ({"q": (7, 4, 8), "dtype": "int32"}, "q has dtype int32; supported: float32, bfloat16"),
        ({"kv_pool": (3, 2, 2, 8)}, r"kv_pool has shape \(3, 2, 2, 8\)"),
        ({"kv_pool": (3, 1, 2, 2, 12, 8)}, "kv_pool has page_size=12; supported: powers of two"),
        ({"tiles": (5, 3)}, r"tiles is int32\[5, 3\]; supported: int32\[num_tiles, 4\]"),
        ({"page_table": (5,)}, r"page_table is int32\[5\]; supported: int32\[S, max_pages\]"),
        ({"q_tile": 0}, "q_tile=0; supported: integers of at least 1"),
        ({"scale": 0.0}, "scale=0.0; supported: positive numbers"),
    ],
)
def test_arguments_are_checked_while_tracing(change, message):
    def zeros(name, default, dtype=np.float32):
        return jax.ShapeDtypeStruct(change.get(name, default), dtype)

    arrays = (
        zeros("q", (7, 4, 8), change.get("dtype", np.float32)),
        zeros("kv_pool", (3, 1, 2, 2, 16, 8)),
        zeros("layer", (), np.int32),
        zeros("tiles", (5, 4), np.int32),
        zeros("page_table", (2, 3), np.int32),
    )
    options = {"q_tile": 4, "scale": 1.0} | {
        name: value for name, value in change.items() if name in ("q_tile", "scale", "implementation", "interpret")
    }
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(functools.partial(ragged_paged_attention, **options), *arrays)


def test_tile_sizes():
    assert [q_tiles.prefill_q_tile(heads, 2) for heads in (2, 4, 8, 18, 32)] == [128, 128, 64, 32, 32]
    assert [q_tiles.decode_q_tile(heads, 2) for heads in (2, 4, 8, 18, 32)] == [8, 4, 2, 1, 1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_write_changes_the_named_slots_only(dtype):
    num_pages, num_kv_heads, size, head_dim, num_rows = 6, 2, 4, 8, 9
    random = np.random.default_rng(0)
    pool = random.standard_normal((num_pages, NUM_LAYERS, 2, num_kv_heads, size, head_dim)).astype(dtype)
    keys, values = (random.standard_normal((num_rows, num_kv_heads, head_dim)).astype(dtype) for _ in range(2))
    pages = np.array([4, DROP_PAGE, 0, 5, num_pages, -3], np.int32)
    source = np.array([[0, 1, 2, 3], [8] * 4, [-1, -1, 4, 5], [7, -1, -1, -1], [6] * 4, [6] * 4], np.int32)
    expected = pool.copy()
    for page, rows in zip(pages, source, strict=True):
        for slot, row in enumerate(rows):
            if 0 <= page < num_pages and row >= 0:
                expected[page, LAYER, 0, :, slot] = keys[row]
                expected[page, LAYER, 1, :, slot] = values[row]
    written = jax.jit(write_kv, donate_argnums=0)(jnp.array(pool), LAYER, keys, values, pages, source)
    np.testing.assert_array_equal(np.asarray(written), expected)
