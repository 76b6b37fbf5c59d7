"""The Hopper kernel on a CPU: in the interpreter with race detection, and lowered for CUDA.

A race raises. The interpreter runs wgmma synchronously and stages weights in shared memory, so what it shows are copies,
barriers, indices, masks and numbers, not that waits for wgmma stand where they must. Pages that nobody owns and slots
behind the last token are full of NaN; unused table entries are out of range.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from penelope_jax.kernels import hopper_worker, paged_attention_gpu
from penelope_jax.kernels.paged_attention import default_implementation, ragged_paged_attention

# Loaded rows are fewer than the rows that are multiplied; what stands in the others is left out afterwards.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")

NUM_LAYERS, LAYER = 2, 1
TOLERANCE = {"bfloat16": 1e-2, "float16": 2e-3}  # of a row and head, relative to its norm
HOPPER = jax.sharding.AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")


@dataclasses.dataclass(frozen=True)
class Shape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    q_tile: int
    dtype: str = "bfloat16"
    deterministic: bool = False
    keys_per_chunk: int | None = None


@dataclasses.dataclass
class Case:
    q: np.ndarray  # [T, N, H]
    pool: np.ndarray
    tiles: np.ndarray
    page_table: np.ndarray
    rows: list[tuple[int, int]]  # (row of the page table, position) of each row of q


def make_case(shape: Shape, spans: dict[int, list[tuple[int, int]]], shared_pages: int = 0, seed: int = 0) -> Case:
    """Makes a step that computes `spans` of histories; history 1 shares its first pages with history 0."""
    size, tile = shape.page_size, shape.q_tile
    random = np.random.default_rng(seed)
    lengths = [max(stop for _, stop in spans[history]) for history in range(len(spans))]
    num_used = [-(-length // size) for length in lengths]
    num_pages = sum(num_used) + 2
    free = random.permutation(num_pages).tolist()
    table = np.full((len(spans), max(num_used) + 1), 2**31 - 1, np.int32)
    table[:, 1::2] = -7
    for history, used in enumerate(num_used):
        table[history, :used] = [free.pop() for _ in range(used)]
    if shared_pages:
        table[1, :shared_pages] = table[0, :shared_pages]
    pool_shape = (num_pages, NUM_LAYERS, 2, shape.num_kv_heads, size, shape.head_dim)
    pool = random.standard_normal(pool_shape).astype(shape.dtype)
    pool[:, 0] = np.nan  # another layer
    owned = {int(page) for history, used in enumerate(num_used) for page in table[history, :used]}
    pool[sorted(set(range(num_pages)) - owned)] = np.nan
    for history, length in enumerate(lengths):
        if length % size:
            pool[table[history, length // size], :, :, :, length % size :] = np.nan
    tiles, rows = [], []
    for history, computed in spans.items():
        for start, stop in reversed(computed):
            for first in range(start, stop, tile):
                tiles.append((history, len(rows) + first - start, first, min(tile, stop - first)))
            rows += [(history, position) for position in range(start, stop)]
    tiles.append((0, 0, 0, 0))
    q = random.standard_normal((len(rows) + 3, shape.num_heads, shape.head_dim)).astype(shape.dtype)
    return Case(q, pool, np.array(tiles, np.int32), table, rows)


def run(shape: Shape, case: Case) -> np.ndarray:
    attended = _program(shape)(case.q, case.pool, LAYER, case.tiles, case.page_table)
    return np.asarray(attended.astype(jnp.float32))


@functools.cache
def _program(shape: Shape):
    attend = functools.partial(
        paged_attention_gpu.paged_attention_gpu,
        q_tile=shape.q_tile,
        scale=shape.head_dim**-0.5,
        deterministic=shape.deterministic,
        interpret=True,
        keys_per_chunk=shape.keys_per_chunk,
    )
    return jax.jit(attend)


def worst_row(shape: Shape, case: Case, out: np.ndarray) -> float:
    """Returns the largest error of a row and head against float64; infinite if anything is not finite."""
    group, worst = shape.num_heads // shape.num_kv_heads, 0.0
    for row, (history, position) in enumerate(case.rows):
        pages = case.page_table[history, : position // shape.page_size + 1]
        kv = np.concatenate(list(case.pool[pages, LAYER].astype(np.float64)), axis=2)[:, :, : position + 1]
        for head in range(shape.num_heads):
            keys, values = kv[:, head // group]
            scores = keys @ case.q[row, head].astype(np.float64) * shape.head_dim**-0.5
            weights = np.exp(scores - scores.max())
            expected = weights @ values / weights.sum()
            error = np.linalg.norm(out[row, head] - expected) / np.linalg.norm(expected)
            worst = max(worst, error if np.isfinite(error) else np.inf)
    return worst


def check(shape: Shape, case: Case) -> np.ndarray:
    out = run(shape, case)
    assert worst_row(shape, case, out) < TOLERANCE[shape.dtype]
    assert not out[len(case.rows) :].any(), "rows that no tile covers are zero"
    return out


def test_phantom_real_and_decode_rows_in_tiles_of_128_packed_rows():
    """Group 4, two computing warpgroups; a hole, new tokens that cross a page, and a decode on shared pages."""
    shape = Shape(4, 1, 64, page_size=64, q_tile=32)
    check(shape, make_case(shape, {0: [(64, 128), (185, 194)], 1: [(130, 131)]}, shared_pages=2))


def test_group_1_with_one_warpgroup_and_pages_of_128():
    shape = Shape(2, 2, 128, page_size=128, q_tile=64, dtype="float16", deterministic=True)
    check(shape, make_case(shape, {0: [(127, 130)], 1: [(0, 1)]}))


def test_split_decodes(monkeypatch):
    """Group 8; positions around borders of pages and chunks; one program takes all items, one after another.

    More items and chunks than stages, so that what is in shared memory is overwritten.
    """
    monkeypatch.setattr(paged_attention_gpu, "_SPLIT_PROGRAMS", 1)
    shape = Shape(8, 1, 64, page_size=32, q_tile=1, keys_per_chunk=128)
    positions = (0, 31, 32, 127, 128, 650)
    case = make_case(shape, {index: [(position, position + 1)] for index, position in enumerate(positions)})
    out = check(shape, case)
    np.testing.assert_array_equal(out, run(shape, case))


def test_more_steps_than_stages_and_a_group_of_3():
    shape = Shape(3, 1, 64, page_size=128, q_tile=4, deterministic=True)
    check(shape, make_case(shape, {0: [(640, 642)]}))


def test_rows_of_a_hole_equal_those_of_the_whole_prompt():
    """Bit by bit: a refilled hole in tiles that start elsewhere, and a decode in a small tile."""
    shape = Shape(4, 1, 64, page_size=64, q_tile=32, deterministic=True)
    case = make_case(shape, {0: [(0, 193)]})
    whole = run(shape, case)

    def again(q_tile, first, stop):
        tiles = [(0, row, row, min(q_tile, stop - row)) for row in range(first, stop, q_tile)]
        other = dataclasses.replace(case, tiles=np.array(tiles, np.int32))
        return run(dataclasses.replace(shape, q_tile=q_tile), other)[first:stop]

    np.testing.assert_array_equal(again(32, 56, 128), whole[56:128])
    np.testing.assert_array_equal(again(2, 192, 193), whole[192:193])


CONTROL_SHAPE = Shape(4, 1, 64, page_size=64, q_tile=2, deterministic=True)


def swap_keys_and_values(case: Case) -> Case:
    return dataclasses.replace(case, pool=case.pool[:, :, ::-1])


def shift_a_page(case: Case) -> Case:
    return dataclasses.replace(case, page_table=np.roll(case.page_table, 1, axis=0))


def mask_one_less(case: Case) -> Case:
    return dataclasses.replace(case, tiles=case.tiles - np.array([0, 0, 1, 0], np.int32))


def mask_one_more(case: Case) -> Case:
    return dataclasses.replace(case, tiles=case.tiles + np.array([0, 0, 1, 0], np.int32))


def test_controls_wrong_kernels_fail():
    case = make_case(CONTROL_SHAPE, {0: [(40, 42)], 1: [(20, 21)]})
    check(CONTROL_SHAPE, case)
    for control in (swap_keys_and_values, shift_a_page, mask_one_less, mask_one_more):
        out = run(CONTROL_SHAPE, control(case))
        assert worst_row(CONTROL_SHAPE, case, out) > 4 * TOLERANCE[CONTROL_SHAPE.dtype], control.__name__


def test_a_page_that_is_none_reads_as_nan():
    case = make_case(CONTROL_SHAPE, {0: [(40, 42)], 1: [(20, 21)]})
    for page_id in (-1, 2**31 - 1):
        case.page_table[0, 0] = page_id
        out = run(CONTROL_SHAPE, case)
        assert np.isnan(out[:2]).all()
        assert np.isfinite(out[2:]).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        Shape(4, 4, 64, 16, 64, keys_per_chunk=256),
        Shape(4, 4, 128, 64, 8, "float16", keys_per_chunk=256),
        Shape(8, 2, 128, 64, 32, deterministic=True),
        Shape(8, 2, 64, 16, 64, deterministic=True),
        Shape(8, 2, 128, 32, 2, keys_per_chunk=256),
        Shape(6, 2, 64, 32, 8, keys_per_chunk=256),
        Shape(6, 2, 64, 64, 30, "float16"),
        Shape(8, 1, 128, 64, 1, keys_per_chunk=256),
        Shape(8, 1, 64, 128, 16, keys_per_chunk=256),
        Shape(16, 1, 128, 128, 1, "float16", keys_per_chunk=256),
        Shape(16, 1, 64, 64, 16),
    ],
    ids=str,
)
def test_many_shapes(shape):
    size = shape.page_size
    spans = {
        0: [(size, 2 * size), (3 * size, 4 * size), (5 * size, 5 * size + shape.q_tile + 1)],
        1: [(2 * size, 2 * size + shape.q_tile)],
        2: [(0, 1)],
        3: [(size - 1, size)],
        4: [(700, 701)],
    }
    check(shape, make_case(shape, spans, shared_pages=2))


@pytest.mark.slow
def test_a_history_of_thousands_of_pages(monkeypatch):
    """Without race detection: it compares each access with all before."""
    plain = plgpu.InterpretGPUParams()
    monkeypatch.setattr(plgpu, "InterpretGPUParams", lambda **_: plain)
    shape = Shape(4, 1, 64, page_size=16, q_tile=1)
    check(shape, make_case(shape, {0: [(4000 * 16 - 5, 4000 * 16 - 4)]}))


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["keys", "values"])
def test_control_the_interpreter_sees_a_missing_wait(monkeypatch, missing):
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    wait = hopper_worker.RowsOfItem._wait

    def wait_for_others(rows, name, step):
        if name != missing:
            wait(rows, name, step)

    monkeypatch.setattr(hopper_worker.RowsOfItem, "_wait", wait_for_others)
    case = make_case(CONTROL_SHAPE, {0: [(300, 301)]})
    with pytest.raises(jax.errors.JaxRuntimeError, match="RACE DETECTED"):
        _program.__wrapped__(CONTROL_SHAPE)(case.q, case.pool, LAYER, case.tiles, case.page_table).block_until_ready()
    gpu_callbacks.reset_gpu_interpret_mode_state()


@pytest.mark.parametrize("q_tile", [32, 2], ids=["prefill", "split decode"])
def test_lowers_for_cuda_on_a_machine_without(q_tile):
    attend = functools.partial(ragged_paged_attention, q_tile=q_tile, scale=0.1, implementation="gpu")
    arrays = (
        jax.ShapeDtypeStruct((64, 32, 128), jnp.bfloat16),
        jax.ShapeDtypeStruct((100, 2, 2, 8, 64, 128), jnp.bfloat16),
        jax.ShapeDtypeStruct((), jnp.int32),
        jax.ShapeDtypeStruct((8, 4), jnp.int32),
        jax.ShapeDtypeStruct((4, 512), jnp.int32),
    )
    mesh = jax.sharding.AbstractMesh((1,), ("device",), abstract_device=HOPPER)
    with jax.sharding.use_abstract_mesh(mesh):
        assert default_implementation() == "gpu"
        text = jax.jit(attend).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu") == (2 if q_tile == 2 else 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float32"}, "kv_pool has dtype float32; the GPU kernel supports bfloat16, float16"),
        ({"q_dtype": "float16"}, "q has dtype float16; the GPU kernel supports that of kv_pool, bfloat16"),
        ({"head_dim": 96}, "q has head dim 96; the GPU kernel supports 64, 128"),
        ({"page_size": 8}, "kv_pool has page_size=8; the GPU kernel supports 16, 32, 64, 128"),
        ({"page_size": 256}, "kv_pool has page_size=256; the GPU kernel supports 16, 32, 64, 128"),
        ({"num_heads": 256}, "q has 128 heads for each of kv_pool's 2 kv heads; the GPU kernel supports at most 64"),
        ({"q_tile": 1024}, "q_tile=1024; the GPU kernel supports at most 512 here"),
        ({"keys_per_chunk": 100}, "keys_per_chunk=100; supported: positive multiples of 128"),
    ],
)
def test_arguments_are_checked_while_tracing(change, message):
    head_dim, dtype = change.get("head_dim", 64), change.get("dtype", "bfloat16")
    arrays = (
        jax.ShapeDtypeStruct((7, change.get("num_heads", 4), head_dim), change.get("q_dtype", dtype)),
        jax.ShapeDtypeStruct((3, 1, 2, 2, change.get("page_size", 16), head_dim), dtype),
        jax.ShapeDtypeStruct((), "int32"),
        jax.ShapeDtypeStruct((5, 4), "int32"),
        jax.ShapeDtypeStruct((2, 3), "int32"),
    )
    options = {name: change[name] for name in ("q_tile", "keys_per_chunk") if name in change}
    attend = functools.partial(
        paged_attention_gpu.paged_attention_gpu, **({"q_tile": 4, "scale": 1.0, "interpret": True} | options)
    )
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(attend, *arrays)


def test_naming_the_kernel_where_it_cannot_run_says_what_can():
    with pytest.raises(ValueError, match="implementation='gpu' cannot run here; what can: cpu, reference"):
        jax.eval_shape(
            functools.partial(ragged_paged_attention, q_tile=1, scale=1.0, implementation="gpu"), *[None] * 5
        )
    assert default_implementation() == "cpu"
