"""The executor with a host tier: real K/V moves between steps, nothing compiles in a run, a lost pool is named."""

import jax
import numpy as np
import pytest
from step_world import GREEDY, History, bits, geometry, plan
from transfer_world import demote, load

from penelope_jax import executor as executor_module
from penelope_jax.executor import JaxExecutor
from penelope_jax.models import random_weights
from penelope_jax.models.layers import device_mesh
from penelope_jax.segments import SegmentKind
from penelope_jax.transfer import TransferStats
from penelope_jax.transfer_faults import TransferFaults

CONFIG = geometry(8, 4, 8, 32)
PAGE_SIZE, NUM_PAGES, NUM_HOST_PAGES = 8, 24, 20


def executor_of(*mesh_shape: int, **options) -> JaxExecutor:
    options = {"num_host_pages": NUM_HOST_PAGES, "max_step_tokens": 32, "token_buckets": (32,), **options}
    params = random_weights.random_params(CONFIG, device_mesh(*mesh_shape))
    return JaxExecutor(
        CONFIG, params, num_pages=NUM_PAGES, page_size=PAGE_SIZE, max_context=64, max_segments=4, **options
    )


MESHES = [pytest.param((1, 1), marks=pytest.mark.slow, id="one device"), pytest.param((1, 4), id="four devices")]


@pytest.fixture(scope="module", params=MESHES)
def executor(request) -> JaxExecutor:
    executor = executor_of(*request.param)
    executor.warm_up()
    return executor


@pytest.fixture
def compiled():
    """Collects what the compiler is asked to do, whoever asks."""
    seen: list[str] = []

    def listen(event: str, duration_s: float, **_details) -> None:
        if "backend_compile" in event:
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


def test_200_steps_and_moves_of_every_size_compile_nothing(executor, compiled):
    random = np.random.default_rng(0)
    before, move_id, num_moved = executor.num_compilations, 0, 0
    history = History(random.integers(0, 256, 64), np.arange(8))
    executor.host_pages.write(range(NUM_HOST_PAGES), executor.read_pages(range(NUM_HOST_PAGES)))
    compiled.clear()
    for step in range(200):
        start = int(random.integers(0, 40))
        kind = (SegmentKind.REAL, SegmentKind.DECODE)[step % 2]
        stop = start + 1 if step % 2 else start + int(random.integers(1, 24))
        device_ids, host_ids = random.permutation(np.arange(8, NUM_PAGES)), random.permutation(NUM_HOST_PAGES)
        size = 1 + step % 16
        executor.start_moves([demote(move_id, device_ids[:size], host_ids[:size])])
        executor.start_moves([load(move_id + 1, host_ids[-size:], device_ids[-size:])])
        move_id += 2
        pending = executor.dispatch(plan(history.segment(start, stop, kind, sample=GREEDY), step=step))
        while executor.num_moving_pages:
            num_moved += len(executor.finish_moves(wait=True)[0])
        executor.collect(pending)
        executor.read_pages([1, 2])
    assert num_moved == 400
    assert executor.num_compilations == before and compiled == []
    assert executor.transfer_stats.failed_moves == 0


def test_control_a_compilation_is_seen(executor, compiled):
    jax.jit(lambda x: x + 1.5)(np.float32(1)).block_until_ready()
    assert len(compiled) == 1


def test_a_history_that_was_away_goes_on_as_if_it_had_not(executor):
    """Tokens and K/V after a round trip through host memory, by other pages, are those of an undisturbed run."""
    tokens = np.random.default_rng(1).integers(0, 256, 64)
    stay, go = History(tokens, np.arange(8)), History(tokens, np.arange(8, 16))
    for history in (stay, go):
        executor.run(plan(history.segment(0, 32)))
    executor.start_moves([demote(1000, range(8, 12), range(4))])
    executor.run(plan(History(tokens[::-1], np.arange(8, 16)).segment(0, 32)))  # others use its pages
    executor.start_moves([load(1001, range(4), [20, 18, 19, 17])])
    while executor.num_moving_pages:
        executor.finish_moves(wait=True)
    go.pages = np.array([20, 18, 19, 17, 12, 13, 14, 15], np.int32)
    outputs = []
    for history in (stay, go):
        done = executor.run(plan(history.segment(32, 50, sample=GREEDY)))
        outputs.append((done.tokens.tolist(), done.logprobs.tobytes()))
    assert outputs[0] == outputs[1]
    pages = [executor.read_pages(history.pages[:4]) for history in (stay, go)]
    np.testing.assert_array_equal(bits(pages[0]), bits(pages[1]))
    np.testing.assert_array_equal(bits(executor.read_host_pages(range(4))), bits(pages[1]))
    # Control: one bit of one host page.
    executor.flip_host_bit(2, layer=1, token=3)
    executor.start_moves([load(1002, range(4), [20, 18, 19, 17])])
    while executor.num_moving_pages:
        executor.finish_moves(wait=True)
    changed = bits(executor.read_pages(go.pages[:4])) ^ bits(pages[0])
    assert np.argwhere(changed).tolist() == [[2, 1, 0, 0, 3, 0]]


def test_steps_do_not_wait_for_a_slow_load():
    executor = executor_of(1, 1, faults=TransferFaults(delay_s=300.0), max_moving_pages=4)
    history = History(np.arange(64), np.arange(8))
    executor.run(plan(history.segment(0, 9)))
    executor.host_pages.write([0, 1], executor.read_pages([0, 1]))
    executor.start_moves([load(7, [0, 1], [20, 21])])
    with pytest.raises(ValueError, match="5 pages would be moving at once, 2 of them already; at most 4 may"):
        executor.start_moves([demote(8, [1, 2, 3], [5, 6, 7])])
    for step in range(30):
        assert executor.finish_moves() == ((), ())
        executor.run(plan(history.segment(9 + step, 10 + step, SegmentKind.DECODE, sample=GREEDY), step=step))
    stats = executor.transfer_stats
    assert (stats.polls, stats.waits, stats.loaded_pages, executor.num_moving_pages) == (30, 0, 0, 2)
    assert stats.longest_poll_s < 1


def test_starting_over_forgets_host_pages_and_counts():
    executor = executor_of(1, 1)
    executor.start_moves([demote(0, [0, 1], [3, 4])])
    with pytest.raises(RuntimeError, match="^1 moves have not been told; drain them first.$"):
        executor.start_over()
    assert executor.finish_moves(wait=True) == ((0,), ())
    assert executor.transfer_stats.demoted_pages == len(executor.host_pages) == 2
    executor.start_over()
    assert executor.transfer_stats == TransferStats() and len(executor.host_pages) == 0
    with pytest.raises(ValueError, match="host page 3, which holds nothing"):
        executor.start_moves([load(0, [3], [5])])


def test_without_a_host_tier_there_are_no_moves():
    executor = executor_of(1, 1, num_host_pages=0)
    assert executor.finish_moves(wait=True) == ((), ())
    with pytest.raises(ValueError, match=r"move 0: host page 0 must be in \[0, 0\)"):
        executor.start_moves([demote(0, [0], [0])])
    assert executor.transfer_stats == TransferStats()


def test_an_interrupt_that_loses_the_pool_is_named(monkeypatch):
    executor = executor_of(1, 1)
    executor.host_pages.write([0], executor.read_pages([0]))
    executor.start_moves([load(0, [0], [5])])
    real, lose = executor_module.scatter_pages, False

    def interrupted(kv_pool, page_ids, pages, *, sharding):
        if lose:
            kv_pool.delete()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(executor_module, "scatter_pages", interrupted)
        with pytest.raises(KeyboardInterrupt):
            executor.finish_moves(wait=True)
    assert executor.finish_moves(wait=True) == ((0,), ()), "before the pool was taken nothing is lost"

    executor.start_moves([load(1, [0], [6])])
    lose = True
    with monkeypatch.context() as patch:
        patch.setattr(executor_module, "scatter_pages", interrupted)
        with pytest.raises(KeyboardInterrupt):
            executor.finish_moves(wait=True)
    assert executor_module.scatter_pages is real
    for use in (executor.finish_moves, lambda: executor.start_moves([]), lambda: executor.read_pages([0])):
        with pytest.raises(RuntimeError, match="the KV pool was lost when a step or a load was interrupted"):
            use()
