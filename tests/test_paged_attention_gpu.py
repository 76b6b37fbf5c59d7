"""The Hopper kernel on a CPU: in the interpreter with race detection, and lowered for CUDA.

A race raises. The interpreter runs wgmma synchronously and stages weights in shared memory, so what it shows are copies,
barriers, indices, masks and numbers, not that waits for wgmma stand where they must. Controls, pages that are none and
bits of holes: `test_attention_suite.py`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_world import LAYER, Case, Shape, check_output, make_case
from jax.experimental.pallas import mosaic_gpu as plgpu

from penelope_jax.kernels import hopper_worker, paged_attention_gpu
from penelope_jax.kernels.paged_attention import default_implementation, ragged_paged_attention

# Loaded rows are fewer than the rows that are multiplied; what stands in the others is left out afterwards.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")

HOPPER = jax.sharding.AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")


def run(case: Case, keys_per_chunk: int | None = None) -> np.ndarray:
    attended = _program(case.shape, keys_per_chunk)(case.q, case.pool, LAYER, case.tiles, case.page_table)
    return np.asarray(attended.astype(jnp.float32))


@functools.cache
def _program(shape: Shape, keys_per_chunk: int | None = None):
    attend = functools.partial(
        paged_attention_gpu.paged_attention_gpu,
        q_tile=shape.q_tile,
        scale=shape.head_dim**-0.5,
        deterministic=shape.deterministic,
        interpret=True,
        keys_per_chunk=keys_per_chunk,
    )
    return jax.jit(attend)


def check(case: Case, keys_per_chunk: int | None = None) -> np.ndarray:
    return check_output(case, run(case, keys_per_chunk))


def test_phantom_real_and_decode_rows_in_tiles_of_128_packed_rows():
    """Group 4, two computing warpgroups; a hole, new tokens that cross a page, and a decode on shared pages."""
    shape = Shape(4, 1, 64, page_size=64, q_tile=32)
    check(make_case(shape, {0: [(64, 128), (185, 194)], 1: [(130, 131)]}, {1: (0, 2)}))


def test_group_1_with_one_warpgroup_and_pages_of_128():
    shape = Shape(2, 2, 128, page_size=128, q_tile=64, dtype="float16", deterministic=True)
    check(make_case(shape, {0: [(127, 130)], 1: [(0, 1)]}))


def test_split_decodes(monkeypatch):
    """Group 8; positions around borders of pages and chunks; one program takes all items, one after another.

    More items and chunks than stages, so that what is in shared memory is overwritten.
    """
    monkeypatch.setattr(paged_attention_gpu, "_SPLIT_PROGRAMS", 1)
    shape = Shape(8, 1, 64, page_size=32, q_tile=1)
    positions = (0, 31, 32, 127, 128, 650)
    case = make_case(shape, {index: [(position, position + 1)] for index, position in enumerate(positions)})
    out = check(case, keys_per_chunk=128)
    np.testing.assert_array_equal(out, run(case, keys_per_chunk=128))


def test_more_steps_than_stages_and_a_group_of_3():
    shape = Shape(3, 1, 64, page_size=128, q_tile=4, deterministic=True)
    check(make_case(shape, {0: [(640, 642)]}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "keys_per_chunk"),
    [
        (Shape(4, 4, 64, 16, 64), 256),
        (Shape(4, 4, 128, 64, 8, "float16"), 256),
        (Shape(8, 2, 128, 64, 32, deterministic=True), None),
        (Shape(8, 2, 64, 16, 64, deterministic=True), None),
        (Shape(8, 2, 128, 32, 2), 256),
        (Shape(6, 2, 64, 32, 8), 256),
        (Shape(6, 2, 64, 64, 30, "float16"), None),
        (Shape(8, 1, 128, 64, 1), 256),
        (Shape(8, 1, 64, 128, 16), 256),
        (Shape(16, 1, 128, 128, 1, "float16"), 256),
        (Shape(16, 1, 64, 64, 16), None),
    ],
    ids=str,
)
def test_many_shapes(shape, keys_per_chunk):
    size = shape.page_size
    spans = {
        0: [(size, 2 * size), (3 * size, 4 * size), (5 * size, 5 * size + shape.q_tile + 1)],
        1: [(2 * size, 2 * size + shape.q_tile)],
        2: [(0, 1)],
        3: [(size - 1, size)],
        4: [(700, 701)],
    }
    check(make_case(shape, spans, {1: (0, 2)}), keys_per_chunk)


@pytest.mark.slow
def test_a_history_of_thousands_of_pages(monkeypatch):
    """Without race detection: it compares each access with all before."""
    plain = plgpu.InterpretGPUParams()
    monkeypatch.setattr(plgpu, "InterpretGPUParams", lambda **_: plain)
    shape = Shape(4, 1, 64, page_size=16, q_tile=1)
    check(make_case(shape, {0: [(4000 * 16 - 5, 4000 * 16 - 4)]}))


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["keys", "values"])
def test_control_the_interpreter_sees_a_missing_wait(monkeypatch, missing):
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    wait = hopper_worker.RowsOfItem._wait

    def wait_for_others(rows, name, step):
        if name != missing:
            wait(rows, name, step)

    monkeypatch.setattr(hopper_worker.RowsOfItem, "_wait", wait_for_others)
    shape = Shape(4, 1, 64, page_size=64, q_tile=2, deterministic=True)
    case = make_case(shape, {0: [(300, 301)]})
    with pytest.raises(jax.errors.JaxRuntimeError, match="RACE DETECTED"):
        _program.__wrapped__(shape)(case.q, case.pool, LAYER, case.tiles, case.page_table).block_until_ready()
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
