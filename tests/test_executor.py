"""The executor: programs compiled once, steps in flight, pages read back, and its messages."""

import gc

import jax
import numpy as np
import pytest
from step_world import DRAWN, GREEDY, History, bits, geometry, plan

from penelope_jax import executor as executor_module
from penelope_jax.executor import JaxExecutor, default_token_buckets
from penelope_jax.models import random_weights
from penelope_jax.models.layers import Params, single_device_mesh
from penelope_jax.segments import SegmentKind

CONFIG = geometry(4, 2, 16, 64)
PAGE_SIZE, NUM_PAGES = 8, 40
OPTIONS = {
    "num_pages": NUM_PAGES,
    "page_size": PAGE_SIZE,
    "max_context": 128,
    "max_segments": 4,
    "max_step_tokens": 64,
}


@pytest.fixture(scope="module")
def params() -> Params:
    return random_weights.random_params(CONFIG, single_device_mesh())


@pytest.fixture(scope="module")
def executor(params) -> JaxExecutor:
    executor = JaxExecutor(CONFIG, params, **OPTIONS, scoring=True)
    seen = []
    before = executor.num_compilations
    assert executor.warm_up(lambda done, count: seen.append((done, count))) == 4
    assert executor.num_compilations <= before + 4
    assert seen == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]
    return executor


def make_history(seed: int = 0, length: int = 128, scored: bool = False) -> History:
    random = np.random.default_rng(seed)
    return History(random.integers(0, 256, length), random.permutation(NUM_PAGES)[:16], scored=scored)


def test_no_compilation_after_warm_up(executor):
    """20 steps of varied size, kind, sampling and scoring, read-backs between them."""
    before = executor.num_compilations
    random = np.random.default_rng(2)
    for step in range(20):
        first, second = np.split(random.permutation(NUM_PAGES)[:32], 2)
        one = History(random.integers(0, 256, 128), first, scored=step % 3 == 0)
        two = History(random.integers(0, 256, 128), second, request_id=1, scored=step % 4 == 0)
        page, length = 8 * int(random.integers(0, 8)), int(random.integers(1, 40))
        segments = [
            one.segment(page, page + length, sample=(None, GREEDY, DRAWN)[step % 3]),
            two.segment(step, step + 1, SegmentKind.DECODE, sample=DRAWN, feed=0 if step % 2 else -1),
            two.segment(64, 72, SegmentKind.PHANTOM),
        ]
        done = executor.run(plan(*segments[: 1 + step % 3], step=step), time_s=2.5)
        assert (done.step, done.time_s) == (step, 2.5)
        assert len(done.tokens) == len(done.logprobs) == sum(s.sample is not None for s in segments[: 1 + step % 3])
        executor.read_pages(first[: step % 5])
    assert executor.num_compilations == before


def test_steps_in_flight(executor):
    """Dispatching ahead of collecting gives what one step at a time gives: samples and pool stay on the device."""
    history = make_history()

    def steps():
        yield plan(history.segment(0, 50, sample=GREEDY))
        for step in range(1, 8):
            row = history.segment(49 + step, 50 + step, SegmentKind.DECODE, sample=GREEDY, feed=0)
            yield plan(row, step=step)

    one_by_one = [executor.run(step) for step in steps()]
    pending = [executor.dispatch(step) for step in steps()]
    in_flight = [executor.collect(step) for step in pending]
    assert [int(done.tokens[0]) for done in in_flight] == [int(done.tokens[0]) for done in one_by_one]
    # With the tokens known to the host the samples are the same.
    tokens = [int(done.tokens[0]) for done in one_by_one]
    history.tokens[50 : 50 + len(tokens)] = tokens
    again = executor.run(plan(history.segment(56, 57, SegmentKind.DECODE, sample=GREEDY)))
    assert again.tokens[0] == tokens[7]


def test_outputs_are_the_callers(executor):
    """They do not change when later steps run, and they can be written to."""
    history = make_history(scored=True)
    done = executor.run(plan(history.segment(0, 20, sample=GREEDY)))
    kept = (done.tokens.copy(), done.logprobs.copy(), done.scores[0].copy())
    for seed in range(3):
        executor.run(plan(make_history(seed, scored=True).segment(0, 20, sample=DRAWN)))
    gc.collect()
    for array, before in zip((done.tokens, done.logprobs, done.scores[0]), kept, strict=True):
        np.testing.assert_array_equal(array, before)
        array[...] = 0
    assert done.scores[0].shape == (20,)


def test_scores_of_each_segment(executor):
    """One array for each segment with targets, NaN where there is none."""
    scored, plain = make_history(1, scored=True), make_history(2)
    plain.pages = np.setdiff1d(np.arange(NUM_PAGES), scored.pages)[:16].astype(np.int32)
    done = executor.run(plan(plain.segment(0, 9), scored.segment(0, 5), scored.segment(120, 128)))
    assert [len(scores) for scores in done.scores] == [5, 8]
    assert np.isnan(done.scores[1]).tolist() == [False] * 7 + [True]
    assert np.isfinite(done.scores[0]).all() and (done.scores[0] < 0).all()


def test_read_pages_in_any_number_and_order(executor):
    history = make_history()
    executor.run(plan(history.segment(0, 64)))
    executor.run(plan(history.segment(64, 128)))
    pool = np.asarray(executor.kv_pool)
    for ids in ([], [5], [7, 7, 0], np.arange(NUM_PAGES)[::-1], np.arange(16)):
        pages = executor.read_pages(ids)
        assert pages.dtype == np.float32 and pages.shape == (len(ids), 2, 2, 2, PAGE_SIZE, 16)
        np.testing.assert_array_equal(pages, pool[np.asarray(ids, int)])
    with pytest.raises(ValueError, match=r"page_id=40 must be in \[0, 40\)"):
        executor.read_pages([3, 40])


def test_flip_bit(executor):
    """One bit of the whole pool changes, where it was asked for; a second flip takes it back."""
    history = make_history()
    executor.run(plan(history.segment(0, 64)))
    before = np.asarray(executor.kv_pool).copy()
    executor.flip_bit(int(history.pages[2]), layer=1, token=3)
    changed = bits(before) ^ bits(np.asarray(executor.kv_pool))
    assert np.bitwise_count(changed).sum() == 1
    assert changed[history.pages[2], 1, 0, 0, 3, 0] == 1 << 22
    executor.flip_bit(int(history.pages[2]), layer=1, token=3)
    np.testing.assert_array_equal(bits(before), bits(np.asarray(executor.kv_pool)))
    with pytest.raises(ValueError, match=r"page_id=-1 must be in \[0, 40\)"):
        executor.flip_bit(-1)
    with pytest.raises(ValueError, match=r"token=8 must be in \[0, 8\)"):
        executor.flip_bit(0, token=8)
    with pytest.raises(ValueError, match=r"layer=2 must be in \[0, 2\)"):
        executor.flip_bit(0, layer=2)


def test_flip_bit_of_bfloat16():
    config = geometry(4, 2, 16, 64, "bfloat16")
    executor = JaxExecutor(config, random_weights.random_params(config, single_device_mesh()), **OPTIONS)
    executor.flip_bit(1)
    assert np.bitwise_count(bits(executor.read_pages(np.arange(NUM_PAGES)))).sum() == 1


def test_a_refused_plan_leaves_the_executor_as_it_was(executor, params):
    history = make_history()
    expected = executor.run(plan(history.segment(0, 30, sample=GREEDY))).tokens
    with pytest.raises(ValueError, match="step 9 has 65 tokens; the largest bucket has 64 rows"):
        executor.dispatch(plan(history.segment(0, 65), step=9))
    with pytest.raises(ValueError, match="step 9 has 5 segments; the buckets hold 4"):
        executor.dispatch(plan(*[history.segment(i, i + 1) for i in range(5)], step=9))
    silent = JaxExecutor(CONFIG, params, **OPTIONS)
    with pytest.raises(ValueError, match="step 0 scores tokens; this executor was made with scoring=False"):
        silent.dispatch(plan(make_history(scored=True).segment(0, 5)))
    assert executor.run(plan(history.segment(29, 30, sample=GREEDY))).tokens == expected


def test_an_interrupt_that_loses_the_pool_is_named(params, monkeypatch):
    executor = JaxExecutor(CONFIG, params, **OPTIONS)

    def interrupted(config, settings, params, kv_pool, batch, last_samples, slots):
        kv_pool.delete()
        raise KeyboardInterrupt

    monkeypatch.setattr(executor_module, "forward_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        executor.dispatch(plan(make_history().segment(0, 5)))
    for use in (lambda: executor.dispatch(plan(make_history().segment(0, 5))), lambda: executor.read_pages([0])):
        with pytest.raises(RuntimeError, match="the KV pool was lost when a step or a load was interrupted"):
            use()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_size": 12}, "page_size=12 must be a power of two"),
        ({"num_pages": 0}, "num_pages=0 must be at least 1"),
        ({"max_segments": 0}, "max_segments=0 must be at least 1"),
        ({"implementation": "tpu2"}, "implementation='tpu2' cannot run here; what can: cpu"),
        ({"token_buckets": (8, 32)}, r"max_step_tokens=64 needs a bucket as large; token_buckets=\(8, 32\)"),
    ],
)
def test_bad_options(params, change, message):
    with pytest.raises(ValueError, match=message):
        JaxExecutor(CONFIG, params, **(OPTIONS | change))


def test_params_without_a_mesh(params):
    plain = jax.device_put(jax.device_get(params), jax.devices()[0])
    with pytest.raises(ValueError, match="they need a NamedSharding, or pass a mesh"):
        JaxExecutor(CONFIG, plain, **OPTIONS)


def test_default_buckets():
    assert default_token_buckets(16, 8192, deterministic=False) == (16, 128, 512, 2048, 8192)
    assert default_token_buckets(16, 3000, deterministic=False) == (16, 128, 512, 2048, 3000)
    assert default_token_buckets(300, 512, deterministic=False) == (300, 512)
    assert default_token_buckets(16, 8, deterministic=False) == (8,)
    assert default_token_buckets(16, 8192, deterministic=True) == (128, 2048, 8192)
    assert default_token_buckets(16, 64, deterministic=True) == (64,)
    assert default_token_buckets(200, 8192, deterministic=True) == (200, 3200, 8192)


def test_where_tiles_differ_in_bits_there_is_one_tile(params, monkeypatch, caplog):
    """Deterministic mode rests on what this machine shows, and says so when decodes get slower for it."""
    monkeypatch.setattr(executor_module, "tiles_agree", lambda **geometry: False)
    executor = JaxExecutor(CONFIG, params, **OPTIONS, deterministic=True)
    assert (executor.buckets.q_tile, executor.buckets.decode_q_tile) == (128, 128)
    assert "tiles of 4 and 128 rows differ in bits: decoding uses 128" in caplog.text
    assert JaxExecutor(CONFIG, params, **OPTIONS).buckets.decode_q_tile == 4
