"""The jitted step against a dense forward pass; that the pool stays in place; steps over two devices."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from step_world import DRAWN, GREEDY, History, dense_logits, geometry, plan, poison

from penelope_jax.batch import Buckets, build_batch, padding_batch
from penelope_jax.executor import JaxExecutor
from penelope_jax.forward import StepSettings, forward_step, map_row_tiles
from penelope_jax.models import layers, random_weights
from penelope_jax.models.layers import Params, single_device_mesh
from penelope_jax.sampling_slots import slots_like
from penelope_jax.segments import SamplingParams, SegmentKind, SlotStart

CONFIG = geometry(4, 2, 16, 64)
PAGE_SIZE, NUM_PAGES, LENGTH = 8, 40, 60
TOLERANCE = 2e-5  # of log-probabilities of order 5


@pytest.fixture(scope="module")
def params() -> Params:
    return random_weights.random_params(CONFIG, single_device_mesh())


def make_executor(params: Params, **options) -> JaxExecutor:
    return JaxExecutor(
        CONFIG,
        params,
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
        max_context=128,
        max_segments=4,
        max_step_tokens=64,
        token_buckets=(64,),
        scoring=True,
        **options,
    )


def tensor_parallel(params: Params) -> JaxExecutor:
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(1, 2), layers.MESH_AXES, axis_types=(AxisType.Auto,) * 2)
    return make_executor(jax.device_put(params, layers.parameter_shardings(CONFIG, mesh)))


EXECUTORS = {
    "cpu": make_executor,
    "reference": functools.partial(make_executor, implementation="reference"),
    "two devices": tensor_parallel,
}


def dense_logprobs(params: Params, tokens: np.ndarray) -> jax.Array:
    """Returns f32[T, V], the distribution of the next token at every position."""
    return jax.nn.log_softmax(dense_logits(CONFIG, params, tokens), axis=-1)


@pytest.mark.parametrize("name", EXECUTORS)
def test_prompt_hole_and_decode_against_a_dense_forward(params, name):
    """A prompt in two chunks, a lost hole refilled beside another prompt, then decodes fed from the device."""
    executor = EXECUTORS[name](params)
    random = np.random.default_rng(0)
    ids = random.permutation(NUM_PAGES)
    history = History(random.integers(0, 256, LENGTH), ids[:8], scored=True)
    other = History(random.integers(0, 256, LENGTH), ids[8:16], request_id=1, scored=True)
    poison(executor, ids)
    expected = np.asarray(dense_logprobs(params, history.tokens))
    expected_other = np.asarray(dense_logprobs(params, other.tokens))

    def check_scores(scores, start, history, expected):
        rows = np.arange(start, min(start + len(scores), LENGTH - 1))
        known = expected[rows, history.tokens[rows + 1]]
        np.testing.assert_allclose(scores[: len(rows)], known, atol=TOLERANCE, rtol=0)

    done = executor.run(plan(history.segment(0, 40)))
    check_scores(done.scores[0], 0, history, expected)
    poison(executor, history.pages[1:3])
    hole, new = history.segment(8, 24, SegmentKind.PHANTOM), history.segment(40, 50, sample=GREEDY)
    done = executor.run(plan(other.segment(0, 24, sample=DRAWN), new, hole))
    check_scores(done.scores[0], 0, other, expected_other)
    check_scores(done.scores[1], 40, history, expected)
    check_scores(done.scores[2], 8, history, expected)
    assert done.tokens[1] == expected[49].argmax()
    np.testing.assert_allclose(done.logprobs[1], expected[49].max(), atol=TOLERANCE)
    np.testing.assert_allclose(done.logprobs[0], expected_other[23, done.tokens[0]], atol=TOLERANCE)

    history.tokens[50] = done.tokens[1]
    for step in range(3):
        row = history.segment(50 + step, 51 + step, SegmentKind.DECODE, sample=GREEDY, feed=1 - min(step, 1))
        done = executor.run(plan(row))
        expected = np.asarray(dense_logprobs(params, history.tokens))[50 + step]
        assert done.tokens[0] == expected.argmax()
        np.testing.assert_allclose(done.logprobs[0], expected.max(), atol=TOLERANCE)
        history.tokens[51 + step] = done.tokens[0]
    assert executor.kv_pool.sharding.spec[3:4] == (("tensor",) if name == "two devices" else ())

    before = executor.num_compilations
    sampling = SamplingParams(logit_bias=((int(expected.argmax()), -20.0),), top_logprobs=2)
    for start in (SlotStart(history.tokens[:52], 50), None):
        row = history.segment(52, 53, SegmentKind.DECODE, sample=sampling)
        done = executor.run(plan(dataclasses.replace(row, slot=3, slot_start=start)))
        assert [done.top_tokens[0].tolist(), *done.tokens] == [
            np.argsort(-expected)[:2].tolist(),
            np.argsort(-expected)[1],
        ]
        np.testing.assert_allclose(done.top_logprobs[0], np.sort(expected)[::-1][:2], atol=TOLERANCE)
    assert executor.num_compilations == before


@pytest.mark.parametrize(("dtype", "deterministic"), [("float32", True), ("bfloat16", False)])
def test_the_pool_stays_in_place(dtype, deterministic):
    """Neither the scan over layers nor the loops of attention copy the donated pool, or a layer of it."""
    config = geometry(4, 2, 16, 64, dtype)
    buckets = Buckets(page_size=16, max_pages=16, max_segments=2, token_buckets=(32,), q_tile=64, decode_q_tile=4)
    pool = jax.ShapeDtypeStruct((4096, config.num_layers, 2, 2, 16, 16), jnp.dtype(dtype))
    settings = StepSettings(mesh=single_device_mesh(), implementation="cpu", deterministic=deterministic)
    shapes = layers.parameter_shapes(config)
    batch = padding_batch(buckets, 32, scoring=False)
    last_samples = jax.ShapeDtypeStruct((2,), jnp.int32)
    slots = slots_like(2, config.vocab_size)
    lowered = forward_step.lower(config, settings, shapes, pool, batch, last_samples, slots)
    memory = lowered.compile().memory_analysis()
    pool_bytes = pool.size * pool.dtype.itemsize
    slot_bytes = sum(part.size * part.dtype.itemsize for part in jax.tree.leaves(slots))
    assert memory.alias_size_in_bytes >= pool_bytes + slot_bytes
    assert memory.temp_size_in_bytes < pool_bytes / config.num_layers / 4


def test_a_batch_of_padding_changes_nothing(params):
    executor = make_executor(params)
    random = np.random.default_rng(0)
    history = History(random.integers(0, 256, LENGTH), random.permutation(NUM_PAGES)[:8], scored=True)
    executor.run(plan(history.segment(0, LENGTH)))
    before = executor.read_pages(np.arange(NUM_PAGES))
    done = executor.run(plan())
    assert done.tokens.shape == done.logprobs.shape == (0,) and done.scores == ()
    np.testing.assert_array_equal(executor.read_pages(np.arange(NUM_PAGES)), before)


def test_row_tiles():
    """Tiles up to the last row in use, the end padded; what is behind stays zero."""
    x = np.arange(22, dtype=np.float32).reshape(11, 2)
    positions = np.arange(11, dtype=np.int32)

    @jax.jit
    def by_tiles(num_rows):
        return map_row_tiles(lambda x, p: {"sum": x.sum(-1) + p, "tile": x * 0 + len(p)}, num_rows, 4, x, positions)

    for num_rows, in_use in ((0, 0), (1, 4), (4, 4), (5, 8), (11, 11)):
        out = by_tiles(np.int32(num_rows))
        used = np.arange(11) < in_use
        np.testing.assert_array_equal(out["sum"], np.where(used, x.sum(-1) + positions, 0))
        np.testing.assert_array_equal(out["tile"], np.where(used[:, None], 4, 0) * np.ones((11, 2)))


def test_batches_are_one_program_per_bucket(params):
    """What a step is made of is data: phantom, real and decode rows, options of sampling, and padding."""
    executor = make_executor(params)
    executor.warm_up()
    before = executor.num_compilations
    history = History(np.arange(60), np.arange(8), scored=True)
    for segments in (
        [history.segment(0, 8)],
        [history.segment(0, 1, sample=GREEDY), history.segment(8, 30, sample=DRAWN)],
        [history.segment(16, 24, SegmentKind.PHANTOM), history.segment(31, 32, SegmentKind.DECODE, feed=0)],
        [history.segment(0, 60, SegmentKind.SCORE)],
    ):
        batch = build_batch(plan(*segments), executor.buckets, NUM_PAGES)
        assert len(batch.tokens) == 64
        executor.run(plan(*segments))
    assert executor.num_compilations == before
