"""Moves of pages: bytes of both memories against a model in numpy, order, bounds, faults, delays, interrupts."""

import re
import time

import jax
import numpy as np
import pytest
from transfer_world import LAYOUTS, PAGE_SHAPE, PLAIN, World, demote, load, random_pages

from penelope_jax import host_pages
from penelope_jax import transfer as transfer_module
from penelope_jax.kernels.page_copy import PAGE_BUCKETS
from penelope_jax.moves import MAX_MOVE_PAGES, Move
from penelope_jax.transfer import PageTransfer
from penelope_jax.transfer_faults import TransferFaults

PAGE_BYTES = 4 * int(np.prod(PAGE_SHAPE))


def test_a_move_fits_the_largest_copy():
    assert MAX_MOVE_PAGES == PAGE_BUCKETS[-1]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_T43_T44_every_bit_comes_back_in_moves_of_every_size(layout):
    world = World(layout, num_pages=32, num_host_pages=16)
    sizes = range(1, 17) if layout is PLAIN else (1, 3, 4)
    for move_id, number in enumerate(sizes):
        ids = world.random.permutation(32)
        world.start(demote(2 * move_id, ids[:number], world.random.permutation(16)[:number]))
        world.step(ids[:number])
        host_ids = world.random.permutation(sorted(world.host))[: min(number, len(world.host))]
        world.start(load(2 * move_id + 1, host_ids, ids[number : number + len(host_ids)]))
        assert world.drain() == ([2 * move_id, 2 * move_id + 1], [])
        world.check()
    pages = world.transfer.host_pages.get(sorted(world.host))
    assert {page.sharding.memory_kind for page in pages} == {"pinned_host"}
    parts = {shard.data.shape for page in pages for shard in page.addressable_shards}
    assert parts == {(*PAGE_SHAPE[:2], PAGE_SHAPE[2] // layout.mesh_shape[1], *PAGE_SHAPE[3:])}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_random_moves_and_steps_against_the_model(layout):
    """Moves of both kinds and steps in any order, host pages overwritten under way, some moves slow, some failing."""
    num_done = num_failed = 0
    for seed in range(12):
        faults = TransferFaults(seed=seed, fail_starts=0.1, fail_demotions=0.1, fail_loads=0.1, delay_polls=seed % 5)
        world = World(layout, faults=None if seed % 3 == 0 else faults, max_moving_pages=12, seed=seed)
        random = world.random
        for move_id in range(40):
            loading = {id_ for move, _ in world.moving.values() if move.kind.value == "load" for id_ in move.device_ids}
            still = random.permutation([page for page in range(10) if page not in loading])
            number = min(int(random.integers(1, 5)), len(still), 12 - world.transfer.num_moving_pages)
            match random.integers(4):
                case 0 if number:
                    world.start(demote(move_id, still[:number], random.permutation(8)[:number]))
                case 1 if number and world.host:
                    host_ids = random.permutation(sorted(world.host))[:number]
                    world.start(load(move_id, host_ids, still[: len(host_ids)]))
                case 2 if len(still):
                    world.step(still[:1])
                case _:
                    done, failed = world.finish(wait=bool(random.integers(2)))
                    num_done, num_failed = num_done + len(done), num_failed + len(failed)
        done, failed = world.drain()
        num_done, num_failed = num_done + len(done), num_failed + len(failed)
        assert world.transfer.num_moving_pages == 0 and world.finish(wait=True) == ((), ())
        world.check()
        assert len(world.transfer.host_pages) == len(world.host)
    assert num_done > 120 and num_failed > 20


def test_T25_a_page_is_demoted_right_after_the_step_that_writes_it():
    world = World()
    world.step([3, 4], slow=True)
    world.start(demote(0, [3, 4], [0, 1]))
    assert not world.pool.is_ready(), "the step was over too soon to show anything"
    assert world.finish() == ((), ()), "it cannot have arrived"
    world.step([3, 4])  # its pages are written again at once
    world.drain()
    world.check()


def test_T24_a_load_into_a_page_that_a_step_still_writes():
    world = World()
    world.start(demote(0, [1], [0]))
    world.drain()
    world.step([5], slow=True)
    world.start(load(1, [0], [5]))
    while not world.finish()[0]:
        assert not world.pool.is_ready()
    world.check()


def test_T23_a_host_page_used_again_during_a_load():
    world = World(faults=TransferFaults(delay_polls=200, seed=1))
    world.start(demote(0, [1, 2], [0, 1]))
    world.drain()
    world.start(load(1, [0, 1], [8, 9]), demote(2, [3, 4], [1, 0]))
    world.transfer.host_pages.write([1], random_pages(world.random, 1))
    world.host[1] = world.transfer.host_pages.read([1])[0]
    assert sorted(world.drain()[0]) == [1, 2]
    world.check()


def test_T26_ids_of_a_move_are_read_when_it_starts():
    world = World()
    move = demote(0, [1, 2, 3], [0, 1, 2])
    world.step([1, 2, 3], slow=True)
    world.start(move)
    move.device_ids[:] = 9
    expected = {0: world.host[0], 1: world.host[1], 2: world.host[2]}
    world.drain()
    assert {host_id: page.tobytes() for host_id, page in expected.items()} == {
        host_id: world.transfer.host_pages.read([host_id])[0].tobytes() for host_id in (0, 1, 2)
    }


def test_T27_two_pages_change_places_through_one_swap_page():
    """Device and host have a page each and a third host page is the buffer: nothing is lost, in whatever order."""
    world = World(num_pages=1, num_host_pages=2)
    world.start(demote(0, [0], [0]))
    world.step([0])
    for turn in range(5):
        swap, source = (1, 0) if turn % 2 == 0 else (0, 1)
        on_device, on_host = world.device[0].tobytes(), world.host[source].tobytes()
        world.start(demote(2 * turn + 1, [0], [swap]), load(2 * turn + 2, [source], [0]))
        world.drain()
        assert (world.device[0].tobytes(), world.host[swap].tobytes()) == (on_host, on_device)
        world.check()


def test_T19_pages_of_one_demotion_go_different_ways_while_it_is_under_way():
    world = World(faults=TransferFaults(delay_polls=9, seed=3))
    world.step([0, 1, 2], slow=True)
    world.start(demote(0, [0, 1, 2], [5, 6, 7]))
    world.start(load(1, [5], [8]), load(2, [7, 6], [0, 1]))
    done, _ = world.drain()
    assert sorted(done) == [0, 1, 2] and done[0] == 0, "a load ends after the demotion that brings its pages"
    world.check()


def test_T39_more_pages_than_may_move_are_refused_whole():
    world = World(max_moving_pages=6, faults=TransferFaults(delay_polls=3))
    world.start(demote(0, [0, 1, 2], [0, 1, 2]))
    with pytest.raises(ValueError, match=r"^7 pages would be moving at once, 3 of them already; at most 6 may\.$"):
        world.transfer.start(world.pool, [demote(1, [3, 4], [3, 4]), load(2, [0, 1], [5, 6])])
    assert world.transfer.num_moving_pages == 3 and 3 not in world.transfer.host_pages
    world.start(demote(3, [3, 4, 5], [3, 4, 5]))
    world.drain()
    world.check()
    world.start(load(4, [0, 1, 2, 3, 4, 5], [9, 8, 7, 6, 5, 4]))
    world.drain()
    world.check()
    assert world.transfer.stats.peak_moving_pages == 6


def test_a_load_fails_with_the_demotion_that_was_to_bring_its_page():
    for faults in (TransferFaults(fail_starts=1.0), TransferFaults(fail_demotions=1.0, delay_polls=4, seed=1)):
        world = World(faults=faults)
        world.start(demote(0, [1, 2], [0, 1]), load(1, [1, 0], [5, 6]))
        assert world.drain() == ([], [0, 1])
        assert len(world.transfer.host_pages) == 0
        world.check()


def test_a_host_page_belongs_to_the_last_demotion_to_it():
    faults = next(
        faults
        for faults in (TransferFaults(seed=seed, fail_starts=0.5, delay_polls=9) for seed in range(99))
        if [faults.start_fails(demote(i, [0], [0])) for i in range(3)] == [True, False, False]
    )
    world = World(faults=faults)
    world.start(demote(0, [1], [0]), demote(1, [2], [0]), load(2, [0], [5]))
    assert sorted(world.drain()[0]) == [1, 2]
    world.check()


def test_failures_are_told_once_and_the_rest_goes_on(caplog):
    faults = TransferFaults(seed=5, fail_starts=0.2, fail_demotions=0.2, fail_loads=0.3)
    world = World(faults=faults)
    world.transfer.host_pages.write(range(8), random_pages(world.random, 8))
    world.host = dict(enumerate(world.transfer.host_pages.read(range(8))))
    moves = [load(i, [i % 4], [i]) if i % 2 else demote(i, [i], [4 + i % 4]) for i in range(10)]
    world.start(*moves)
    done, failed = world.drain()
    wrong = [move.move_id for move in moves if faults.start_fails(move) or faults.copy_fails(move)]
    assert failed == wrong and sorted(done + failed) == list(range(10)) and 2 <= len(wrong) <= 8
    world.check()
    stats = world.transfer.stats
    assert stats.failed_moves == len(wrong) == caplog.text.count("failed:")
    pages = (sum(i % 2 == 0 for i in done), sum(i % 2 for i in done))
    assert (stats.demoted_pages, stats.loaded_pages) == pages
    assert (stats.demoted_bytes, stats.loaded_bytes) == tuple(number * PAGE_BYTES for number in pages)


def test_errors_of_the_runtime_fail_the_move_they_hit(monkeypatch):
    """No memory when a move starts, a copy that breaks, no memory when it is put into the pool."""
    world = World()
    world.start(demote(0, [0, 1], [0, 1]))
    world.drain()
    real = jax.device_put
    error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory.\nmore")

    def no_memory(arrays, sharding):
        if sharding.memory_kind == "pinned_host":
            raise error
        return real(arrays, sharding)

    with monkeypatch.context() as patch:
        patch.setattr(jax, "device_put", no_memory)
        world.start(demote(1, [2], [0]), load(2, [1], [5]))
        assert world.drain() == ([2], [1])

    def broken(arrays):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(jax, "block_until_ready", broken)
        world.start(demote(3, [2], [0]), load(4, [1], [6]))
        assert world.drain() == ([], [3, 4])

    world.start(load(5, [1], [7]))
    assert world.transfer.finish(lambda ids, pages: broken(pages), wait=True) == ((), (5,))
    world.moving.clear()
    world.check()
    assert 0 not in world.transfer.host_pages
    world.start(demote(6, [2], [0]), load(7, [0], [8]))
    assert world.drain() == ([6, 7], [])
    world.check()


def test_a_slow_load_is_not_waited_for():
    world = World(faults=TransferFaults(delay_s=60.0, seed=2))
    slow = next(i for i in range(100) if world.transfer._faults.seconds(load(i, [0], [0])) > 20)
    world.transfer.host_pages.write([0], random_pages(world.random, 1))
    world.host[0] = world.transfer.host_pages.read([0])[0]
    began_s = time.perf_counter()
    world.start(load(slow, [0], [9]))
    for _ in range(50):
        world.step([1, 2])
        assert world.finish() == ((), ())
    world.check()  # waits for the steps
    assert time.perf_counter() - began_s < 15
    stats = world.transfer.stats
    assert (stats.polls, stats.waits, stats.wait_s) == (50, 0, 0.0)
    assert 0 < stats.longest_poll_s <= stats.poll_s < 5
    world.transfer._moving[slow].not_before_s = 0.0  # it is there
    world.drain()
    world.check()


def test_a_wait_ends_with_the_first_move_that_does():
    faults = TransferFaults(delay_s=0.1, seed=4)
    world = World(faults=faults)
    first, last = sorted(range(20), key=lambda i: faults.seconds(demote(i, [0], [0])))[::19]
    world.start(demote(last, [0], [0]), demote(first, [1], [1]))
    assert world.finish(wait=True) == ((first,), ())
    assert world.finish(wait=True) == ((last,), ())
    stats = world.transfer.stats
    assert 1 <= stats.waits <= 2 and 0 < stats.longest_wait_s <= stats.wait_s < 5


def test_an_interrupt_loses_no_move(monkeypatch):
    world = World()
    world.start(demote(0, [0], [0]), demote(1, [1], [1]))
    jax.block_until_ready(world.transfer.host_pages.get([0, 1]))
    real = PageTransfer._end

    def interrupted(self, moving, put_pages):
        if moving.move.move_id == 1:
            raise KeyboardInterrupt
        real(self, moving, put_pages)

    with monkeypatch.context() as patch:
        patch.setattr(PageTransfer, "_end", interrupted)
        with pytest.raises(KeyboardInterrupt):
            world.transfer.finish(world.put)
    assert world.drain() == ([0, 1], [])

    def in_start(*_args, **_options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(transfer_module, "gather_pages", in_start)
        with pytest.raises(KeyboardInterrupt):
            world.transfer.start(world.pool, [demote(2, [0], [0])])
    assert world.transfer.finish(world.put) == ((), (2,)), "what did not start is not done"


@pytest.mark.parametrize(
    ("moves", "message"),
    [
        ([load(5, [0], [1])], "move 5 loads host page 0, which holds nothing."),
        ([load(5, [8], [1])], "move 5: host page 8 must be in [0, 8)."),
        ([demote(5, [10], [1])], "move 5: device page 10 must be in [0, 10)."),
        ([demote(5, [-1], [1])], "move 5: device page -1 must be in [0, 10)."),
        ([demote(5, [0, 1], [1])], "move 5 has 2 device and 1 host pages; as many of each, from 1 to 16."),
        ([demote(5, [], [])], "move 5 has 0 device and 0 host pages; as many of each, from 1 to 16."),
        ([demote(5, range(17), range(17))], "move 5 has 17 device and 17 host pages; as many of each, from 1 to 16."),
        ([demote(5, [0, 0], [1, 2])], "move 5 names a device page twice: [0, 0]."),
        ([demote(5, [0, 1], [2, 2])], "move 5 names a host page twice: [2, 2]."),
        ([demote(5, [0], [1]), demote(5, [1], [2])], "move 5 is under way already."),
        ([demote(4, [0], [1]), load(5, [1], [3]), demote(6, [3], [2])], "move 6: device page 3 is still being loaded."),
    ],
)
def test_moves_that_cannot_be_are_refused_before_any_starts(moves: list[Move], message):
    world = World()
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        world.transfer.start(world.pool, moves)
    assert world.transfer.num_moving_pages == 0 and len(world.transfer.host_pages) == 0
    assert world.finish() == ((), ())


def test_host_pages_say_what_they_cannot_do():
    world = World()
    store = world.transfer.host_pages
    for use, message in (
        (lambda: store.read([3]), "host page 3 holds nothing."),
        (lambda: store.read([8]), "host page 8 must be in [0, 8)."),
        (
            lambda: store.write([0], np.zeros((1, 2), np.float32)),
            f"pages are float32[1, 2]; must be float32{[1, *PAGE_SHAPE]}.",
        ),
        (lambda: store.flip_bit(3), "host page 3 holds nothing."),
        (lambda: store.flip_bit(3, layer=2), "layer=2 must be in [0, 2)."),
        (lambda: store.flip_bit(3, token=-1), "token=-1 must be in [0, 4)."),
        (lambda: World(num_host_pages=-1), "num_host_pages=-1 must not be negative."),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            use()


def test_a_backend_without_pinned_host_memory_is_named(monkeypatch):
    monkeypatch.setattr(host_pages, "HOST_MEMORY", "tape")
    with pytest.raises(ValueError, match="^num_host_pages=4 need memory of kind tape; cpu has device, pinned_host, "):
        World(num_host_pages=4)
    World(num_host_pages=0)


def test_more_pinned_memory_than_jax_takes_is_refused_at_the_start():
    page = 9 << 20
    host_pages.check_limit(7281, page, {})
    host_pages.check_limit(20_000, page, {host_pages.LIMIT_VARIABLE: "200"})
    for environ, limit in (({}, 64), ({host_pages.LIMIT_VARIABLE: "100"}, 100), ({host_pages.LIMIT_VARIABLE: "x"}, 64)):
        with pytest.raises(ValueError) as caught:
            host_pages.check_limit(20_000, page, environ)
        assert str(caught.value) == (
            f"num_host_pages=20000 of 9,437,184 bytes are 175.8 GiB; jax takes at most {limit} GiB of pinned memory. Set "
            "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB to a larger number before it starts, or take fewer."
        )


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_control_one_bit_of_a_host_page_is_seen(layout):
    world = World(layout)
    world.start(demote(0, [0, 1], [0, 1]))
    world.drain()
    world.check()
    world.transfer.host_pages.flip_bit(1, layer=1, token=2)
    with pytest.raises(AssertionError, match="host page 1"):
        world.check()
    unsigned = f"u{world.device.dtype.itemsize}"
    changed = world.transfer.host_pages.read([1])[0].view(unsigned) ^ world.host[1].view(unsigned)
    assert np.argwhere(changed).tolist() == [[1, 0, 0, 2, 0]] and np.bitwise_count(changed).sum() == 1
    world.transfer.host_pages.flip_bit(1, layer=1, token=2)
    world.check()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fail_starts": 1.5}, "fail_starts=1.5 must be in [0, 1]."),
        ({"fail_loads": -0.1}, "fail_loads=-0.1 must be in [0, 1]."),
        ({"fail_demotions": float("nan")}, "fail_demotions=nan must be in [0, 1]."),
        ({"delay_polls": -1}, "delay_polls=-1 must be finite and at least 0."),
        ({"delay_s": float("inf")}, "delay_s=inf must be finite and at least 0."),
    ],
)
def test_faults_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        TransferFaults(**options)


def test_faults_are_as_frequent_as_asked():
    faults = TransferFaults(seed=3, fail_starts=0.2, fail_loads=0.6, delay_polls=3, delay_s=2.0)
    moves = [load(i, [0], [0]) for i in range(1000)]
    assert 150 < sum(faults.start_fails(move) for move in moves) < 250
    assert 540 < sum(faults.copy_fails(move) for move in moves) < 660
    assert not any(faults.copy_fails(demote(i, [0], [0])) for i in range(100))
    assert {faults.polls(move) for move in moves} == {0, 1, 2, 3}
    assert 0.9 < np.mean([faults.seconds(move) for move in moves]) < 1.1
