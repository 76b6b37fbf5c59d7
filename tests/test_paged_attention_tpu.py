"""The TPU kernel on a CPU: races in the TPU interpreter, sizes of generations, lowering, the step that uses it.

A race raises. `test_attention_suite.py` has numbers, masks and bits, in the interpreter that knows no time.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_world import LAYER, Case, Shape, check_output, make_case
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, Mesh
from step_world import GREEDY, History, dense_logits, geometry, plan, poison

from penelope_jax.executor import JaxExecutor
from penelope_jax.kernels import paged_attention, tpu_attend
from penelope_jax.kernels.paged_attention import default_implementation, ragged_paged_attention
from penelope_jax.kernels.paged_attention_tpu import paged_attention_tpu
from penelope_jax.kernels.tpu_geometry import GENERATIONS, Generation, generation_of
from penelope_jax.models import layers, random_weights
from penelope_jax.segments import SegmentKind

KINDS = {"v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite", "tpu7x": "TPU7x"}
# Copies arrive at once, and what reads them without having waited is a race.
WITH_RACES = pltpu.InterpretParams(detect_races=True, dma_execution_mode="eager", vector_clock_size=64)
BOTH_CORES = dataclasses.replace(WITH_RACES, num_cores_or_threads=2)  # at the same time

# One chunk of keys a step, so that there are many steps; blocks of few rows; of the two cores each takes every other block.
TWO_CORES, ONE_CORE = "two cores", "one core"
OTHERS = {
    TWO_CORES: Generation(step_bytes=1, vmem_bytes=3 * 2**19, cores=2),
    ONE_CORE: Generation(step_bytes=1, vmem_bytes=2**26),
}


@pytest.fixture(autouse=True)
def other_generations(monkeypatch):
    # The detector of races draws from it, and takes some copies for one where the draws agree.
    np.random.seed(0)
    for name, generation in OTHERS.items():
        monkeypatch.setitem(GENERATIONS, name, generation)


def run(case: Case, generation: str, interpret=True) -> np.ndarray:
    attended = program(case.shape, generation, interpret)(case.q, case.pool, LAYER, case.tiles, case.page_table)
    return np.asarray(attended.astype(jnp.float32))


@functools.cache
def program(shape: Shape, generation: str, interpret):
    attend = functools.partial(
        paged_attention_tpu,
        q_tile=shape.q_tile,
        scale=shape.head_dim**-0.5,
        interpret=interpret,
        generation=generation,
    )
    return jax.jit(attend)


def test_no_races_between_steps_and_blocks():
    """Decodes of one, two and three steps, on pages they share; one whose page is none reads nothing."""
    positions = (0, 1030, 511, 600, 512)
    spans = {index: [(position, position + 1)] for index, position in enumerate(positions)}
    case = make_case(Shape(8, 1, 128, 128, 2), spans, {3: (1, 4)})
    out = check_output(case, run(case, TWO_CORES, BOTH_CORES))
    table = case.page_table.copy()
    table[2, 0] = -1
    spoilt = run(dataclasses.replace(case, page_table=table), TWO_CORES, BOTH_CORES)
    others = np.array([history != 2 for history, _ in case.rows])
    assert np.isnan(spoilt[: len(case.rows)][~others]).all()
    np.testing.assert_array_equal(spoilt[: len(case.rows)][others], out[: len(case.rows)][others])


def test_no_races_in_a_hole_and_new_tokens():
    """Bits do not depend on how many keys a step has, into how many blocks a tile is cut, or how many cores there are."""
    case = make_case(Shape(4, 2, 128, 64, 32), {0: [(64, 128), (500, 515)], 1: [(130, 131)]}, {1: (0, 2)})
    out = check_output(case, run(case, TWO_CORES, BOTH_CORES))
    np.testing.assert_array_equal(out, run(case, "v6e"))


@pytest.mark.parametrize("missing_keys", [128, 512], ids=["for a page", "for a whole step"])
def test_control_the_interpreter_sees_a_missing_wait(monkeypatch, missing_keys):
    make_copy = pltpu.make_async_copy

    class Copy:
        def __init__(self, source, destination, semaphore):
            self.copy = make_copy(source, destination, semaphore)
            self.waits = source.shape[2] != missing_keys
            self.start = self.copy.start

        def wait(self):
            if self.waits:
                self.copy.wait()

    monkeypatch.setattr(tpu_attend.pltpu, "make_async_copy", Copy)
    case = make_case(Shape(8, 1, 128, 128, 2), {0: [(600, 601)]})
    with pytest.raises(jax.errors.JaxRuntimeError, match="(?i)race"):
        program.__wrapped__(case.shape, ONE_CORE, WITH_RACES)(case.q, case.pool, LAYER, case.tiles, case.page_table)
    pltpu.reset_tpu_interpret_mode_state()


def test_the_step_on_two_devices_uses_it(monkeypatch):
    """Named by nobody, under `jax.shard_map`: a prompt, then its next part beside a refilled hole."""

    def interpreted(*arguments, interpret, **options):
        assert not interpret
        calls.append(arguments[1].shape)
        return paged_attention_tpu(*arguments, interpret=True, **options)

    calls = []
    monkeypatch.setattr(paged_attention, "_has_device", lambda kernel: kernel == "tpu")
    monkeypatch.setitem(paged_attention.KERNELS, "tpu", interpreted)
    config = geometry(4, 2, 128, 64)
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(1, 2), layers.MESH_AXES, axis_types=(AxisType.Auto,) * 2)
    params = random_weights.random_params(config, mesh)
    executor = JaxExecutor(
        config,
        params,
        num_pages=8,
        page_size=16,
        max_context=64,
        max_segments=2,
        max_step_tokens=48,
        token_buckets=(48,),
        scoring=True,
    )
    history = History(np.arange(3, 67), np.random.default_rng(0).permutation(8)[:4], scored=True)
    scores = [*executor.run(plan(history.segment(0, 45))).scores]
    poison(executor, history.pages[1:2])
    hole, new = history.segment(16, 32, SegmentKind.PHANTOM), history.segment(45, 60, sample=GREEDY)
    scores += executor.run(plan(hole, new)).scores

    expected = jax.nn.log_softmax(dense_logits(config, params, history.tokens))
    expected = np.asarray(expected)[np.arange(60), history.tokens[1:61]]
    for found, (start, stop) in zip(scores, ((0, 45), (16, 32), (45, 60)), strict=True):
        np.testing.assert_allclose(found, expected[start:stop], atol=2e-5, rtol=0)
    assert set(calls) == {(8, config.num_layers, 2, 1, 16, 128)}


def abstract_arguments(**change) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns what a call takes, at the sizes of Qwen3-8B unless told."""
    dtype, head_dim = change.get("dtype", "bfloat16"), change.get("head_dim", 128)
    num_kv_heads = change.get("num_kv_heads", 8)
    return (
        jax.ShapeDtypeStruct((64, 4 * num_kv_heads, head_dim), change.get("q_dtype", dtype)),
        jax.ShapeDtypeStruct((100, 2, 2, num_kv_heads, change.get("page_size", 64), head_dim), dtype),
        jax.ShapeDtypeStruct((), "int32"),
        jax.ShapeDtypeStruct((change.get("num_tiles", 8), 4), "int32"),
        jax.ShapeDtypeStruct((64, change.get("max_pages", 2048)), "int32"),
    )


@pytest.mark.parametrize("generation", KINDS)
def test_lowers_for_tpus_on_a_machine_without(generation):
    device = jax.sharding.AbstractDevice(device_kind=KINDS[generation], num_cores=1, platform="tpu")
    mesh = jax.sharding.AbstractMesh((1,), ("device",), abstract_device=device)
    attend = functools.partial(ragged_paged_attention, q_tile=2, scale=0.1)
    with jax.sharding.use_abstract_mesh(mesh):
        assert default_implementation() == "tpu"
        text = jax.jit(attend).trace(*abstract_arguments()).lower(lowering_platforms=("tpu",)).as_text()
        with pytest.raises(ValueError, match="implementation='gpu' cannot run here; what can: cpu, reference, tpu"):
            jax.eval_shape(functools.partial(attend, implementation="gpu"), *abstract_arguments())
    assert text.count("@tpu_custom_call") == 1


def test_kinds_of_devices():
    assert {generation_of(kind) for kind in KINDS.values()} == set(KINDS)
    assert [generation_of(kind) for kind in ("TPU v4", "cpu", "NVIDIA H100 80GB HBM3")] == [None] * 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float16"}, "kv_pool has dtype float16; the TPU kernel supports bfloat16, float32"),
        ({"q_dtype": "float32"}, "q has dtype float32; the TPU kernel supports that of kv_pool, bfloat16"),
        ({"head_dim": 64}, "q has head dim 64; the TPU kernel supports 128"),
        ({"page_size": 8}, "kv_pool has page_size=8; the TPU kernel supports 16, 32, 64, 128"),
        ({"page_size": 256}, "kv_pool has page_size=256; the TPU kernel supports 16, 32, 64, 128"),
        (
            {"max_pages": 100_000},
            "page_table has max_pages=100000 and tiles make 8 blocks; the TPU kernel supports tab",
        ),
        ({"num_tiles": 100_000}, "page_table has max_pages=2048 and tiles make 100000 blocks; the TPU kernel supports"),
        (
            {"num_kv_heads": 512},
            "kv_pool has 512 kv heads; blocks of 16 rows of them take 289538048 bytes of vector memory, the TPU k",
        ),
        ({"generation": "v4"}, "generation='v4'; the TPU kernel supports v5e, v5p, v6e, tpu7x"),
        ({"generation": None, "interpret": False}, "generation=None and the device is 'cpu'; the TPU kernel supports"),
    ],
)
def test_arguments_are_checked_while_tracing(change, message):
    options = {"q_tile": 4, "scale": 1.0, "interpret": True}
    options |= {name: change[name] for name in ("generation", "interpret") if name in change}
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(functools.partial(paged_attention_tpu, **options), *abstract_arguments(**change))


def test_naming_the_kernel_where_it_cannot_run_says_what_can():
    attend = functools.partial(ragged_paged_attention, q_tile=1, scale=1.0, implementation="tpu")
    with pytest.raises(ValueError, match="implementation='tpu' cannot run here; what can: cpu, reference"):
        jax.eval_shape(attend, *[None] * 5)
