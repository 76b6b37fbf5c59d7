"""Room on the device for the decodes of a step: all at once where the pages are sure to be had."""

import numpy as np
import pytest

from penelope_jax import demotion, engine, eviction, room
from penelope_jax.config import EngineConfig
from penelope_jax.driver import HashExecutor
from penelope_jax.events import MoveDone, Submit
from penelope_jax.invariants import check_cache
from penelope_jax.moves import MoveKind
from penelope_jax.path_view import view_path
from penelope_jax.segments import SamplingParams
from penelope_jax.state import EngineState, make_state, private_page_ids


def decoding(num_histories: int, num_requests: int, host_pages: int) -> EngineState:
    """Returns an engine that decodes `num_requests` for the first time, each at the start of a page, on a full device.

    There are as many histories of one page, all on the device; nothing is on the host.
    """
    config = EngineConfig(
        device_tokens=4 * (2 * num_requests + num_histories),
        host_tokens=4 * host_pages,
        swap_tokens=4,
        page_size=4,
        max_running=num_requests,
        max_step_segments=4 * num_requests,
        max_step_tokens=1024,
        output_reserve=0,
        prefetch_tokens=0,
        scheduler="fcfs",
    )
    state, executor = make_state(config), HashExecutor()
    for number in range(num_histories):
        state = submitted(state, number, [100 + number] * 4 + [1], 1)
        while not state.idle:
            state = stepped(state, executor)
    for number in range(num_requests):
        state = submitted(state, 1000 + number, [500 + number] * 8, 2)
    state = stepped(state, executor)
    assert (state.cache.device.num_free, state.counters.evicted_pages, state.cache.num_host) == (0, 0, 0)
    return state


def submitted(state: EngineState, request_id: int, tokens: list[int], max_tokens: int) -> EngineState:
    sampling = SamplingParams(max_tokens=max_tokens)
    event = Submit(request_id=request_id, tokens=np.array(tokens, np.int32), sampling=sampling)
    return engine.apply(state, (event,))[0]


def stepped(state: EngineState, executor: HashExecutor) -> EngineState:
    """Plans a step and runs it; moves end at once."""
    state, plan = engine.plan(state)
    check_cache(state.cache, private_page_ids(state))
    assert plan is not None
    if plan.moves:
        state, _ = engine.apply(state, (MoveDone(done=tuple(move.move_id for move in plan.moves)),))
    return engine.apply(state, (executor.run(plan),))[0] if plan.segments else state


def finished(state: EngineState) -> tuple[int, int, int]:
    """Runs to the end; returns pages evicted, pages on the host, and retractions."""
    executor = HashExecutor()
    while not state.idle:
        state = stepped(state, executor)
    return state.counters.evicted_pages, state.cache.num_host, state.counters.retractions


@pytest.mark.parametrize(("host_pages", "evicted", "on_host"), [(12, 0, 8), (3, 5, 3)])
def test_all_decodes_get_their_pages_at_once_as_they_would_one_by_one(monkeypatch, host_pages, evicted, on_host):
    before = decoding(12, 8, host_pages)
    calls = []

    def counted(*args, **options):
        calls.append(args[1])
        return demote(*args, **options)

    demote = demotion.demote
    monkeypatch.setattr(demotion, "demote", counted)
    together = engine.plan(before)[0]
    assert calls == [on_host]
    monkeypatch.setattr(room.Room, "free_up_at_once", lambda *_: None)
    single = engine.plan(before)[0]
    assert len(calls) > 2, "one by one each asks for its page"
    for state in (together, single):
        assert (state.counters.evicted_pages, state.cache.num_host) == (evicted, on_host)
        assert state.counters.decode_tokens == before.counters.decode_tokens + 8
    assert set(together.cache.nodes) == set(single.cache.nodes)


def test_nothing_is_evicted_for_pages_that_cannot_be_had(monkeypatch):
    """Sixteen want a page, eight can be had: these leave for the host, which has room, and the others wait."""
    before = decoding(8, 16, 8)
    assert finished(before) == (1, 7, 0)
    monkeypatch.setattr(room, "surely_evictable", lambda *_: 16)
    assert finished(before) == (8, 0, 1), "a control: without the bound all eight histories are lost"


def test_a_demotion_whose_page_is_evicted_again_is_no_move_to_wait_for():
    state = decoding(4, 2, 4)
    found = room.Room(state.config, state.cache)
    assert not found.moving
    found.free_up(2)
    assert (found.tally, found.moving) == ({}, True)
    found.cache, done = eviction.evict(found.cache, 2, state.config.policy)
    assert (done.num_pages, found.moving) == (2, False)
    assert found.start_moves() == ()


def test_who_waits_claims_no_page_that_begins_to_load():
    """A history comes back from the host page by page; a page begins to load while nothing else of its path changes."""
    config = EngineConfig(
        device_tokens=64,
        host_tokens=64,
        swap_tokens=4,
        page_size=4,
        max_running=2,
        max_step_segments=8,
        max_step_tokens=64,
        output_reserve=0,
        max_moving_tokens=8,
        prefetch_tokens=0,
    )
    state, executor = make_state(config), HashExecutor()
    for number in range(4):
        state = submitted(state, number, [100 + number] * 24 + [1], 1)
        while not state.idle:
            state = stepped(state, executor)
    state = submitted(state, 10, [100] * 24 + [2], 1)
    under_way, claims, began_unseen = [], [], 0
    while not state.idle:
        before = state.running[0].view if state.running else None
        state, plan = engine.plan(state)
        if state.running and not state.running[0].prefilled:
            (request,) = state.running
            view = view_path(state.cache, request.pin.node_id, request.path_stop, request.request_id)
            claims.append(request.num_owned)
            assert request.num_owned == view.num_owned + view.num_to_load
            loads = plan is not None and any(move.kind is MoveKind.LOAD for move in plan.moves)
            began_unseen += loads and request.view is before
        under_way += plan.moves if plan is not None else ()
        if plan is not None and plan.segments:
            state, _ = engine.apply(state, (executor.run(plan),))
        if under_way:  # the load ends before the demotion that made room for it
            state, _ = engine.apply(state, (MoveDone(done=(under_way.pop().move_id,)),))
    assert claims == [5, 4, 4, 3, 3, 2, 2, 1, 1, 0] and began_unseen == 4
