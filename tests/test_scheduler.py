"""Which waiting request runs next."""

import dataclasses

import pytest
from engine_settings import config_of
from letter_trees import make, tokens_of

from penelope_jax import eviction, lookup, scheduler
from penelope_jax.config import POLICIES
from penelope_jax.radix_tree import CacheState, Match
from penelope_jax.segments import SamplingParams
from penelope_jax.state import EngineState, Request, make_state


def request_of(request_id: int, text: str, arrival_s: float = 0.0, num_retractions: int = 0) -> Request:
    return Request(
        request_id=request_id,
        session_id="",
        namespace="",
        arrival=request_id,
        arrival_s=arrival_s,
        prompt=tokens_of(text),
        original_len=4 * len(text),
        sampling=SamplingParams(max_tokens=1),
        num_retractions=num_retractions,
    )


def waiting(
    name: str, cache: CacheState, *requests: Request, now_s: float = 0.0, linear_cost: float = 0.0
) -> EngineState:
    config = config_of(4, cache.device.num_pages, scheduler=name, linear_cost=linear_cost, max_wait_s=60.0)
    return dataclasses.replace(make_state(config), cache=cache, waiting=requests, now_s=now_s)


def order_of(state: EngineState) -> list[int]:
    matches: dict[int, Match] = {}
    if scheduler.needs_match(state.config.scheduler):
        matches = {other.request_id: lookup.match(state.cache, other.prompt) for other in state.waiting}
    return [request.request_id for request in scheduler.ordered(state, matches)]


def test_fcfs_is_by_arrival_and_needs_no_match():
    state = waiting("fcfs", make(12, "ABC"), request_of(2, "ABC"), request_of(0, "XYZ"), request_of(1, "AB"))
    assert order_of(state) == [0, 1, 2]
    assert [scheduler.needs_match(name) for name in ("lpm", "lpm-cost", "fcfs")] == [True, True, False]


def test_lpm_runs_the_longest_hit_first_and_breaks_ties_by_arrival():
    cache = make(12, "ABC", "XY")
    state = waiting("lpm", cache, *(request_of(i, text) for i, text in enumerate(["Q", "XYQ", "ABCD", "XYR", "A"])))
    assert order_of(state) == [2, 1, 3, 4, 0]


def test_lpm_counts_hits_and_not_the_hole_before_them():
    cache, _ = eviction.evict(make(12, "ABCDE", "XYZ"), 3, POLICIES["penelope"])
    state = waiting("lpm", cache, request_of(0, "ABCDEF"), request_of(1, "XYZQ"))
    assert order_of(state) == [1, 0], "5 pages of match, 2 of them hits, against 3"


def test_lpm_does_not_age():
    state = waiting("lpm", make(12, "ABC"), request_of(0, "Q"), request_of(1, "ABC", arrival_s=1e6), now_s=1e6)
    assert order_of(state) == [1, 0]


def test_lpm_cost_prefers_the_hit_that_saves_more():
    """Both have two pages of hits; those behind a hole stand at higher positions, so they save more."""
    cache, _ = eviction.evict(make(12, "ABCDE", "XY"), 3, POLICIES["penelope"])
    requests = request_of(0, "XYZ"), request_of(1, "ABCDEF")
    assert order_of(waiting("lpm", cache, *requests)) == [0, 1]
    assert order_of(waiting("lpm-cost", cache, *requests)) == [1, 0]


@pytest.mark.parametrize(("waited_s", "expected"), [(60.0, [1, 2, 0]), (60.5, [0, 1, 2])])
def test_lpm_cost_lets_who_waited_too_long_go_first(waited_s: float, expected: list[int]):
    requests = request_of(0, "Q"), request_of(1, "ABCD", waited_s), request_of(2, "ABX", waited_s)
    assert order_of(waiting("lpm-cost", make(12, "ABC"), *requests, now_s=waited_s)) == expected


def test_among_those_that_waited_too_long_the_first_to_arrive_goes_first():
    requests = request_of(1, "ABCD"), request_of(0, "Q"), request_of(2, "ABC", 100.0)
    assert order_of(waiting("lpm-cost", make(12, "ABC"), *requests, now_s=100.0)) == [0, 1, 2]


@pytest.mark.parametrize("name", ["lpm", "lpm-cost", "fcfs"])
def test_retracted_requests_go_before_all_others(name: str):
    requests = request_of(0, "ABCD"), request_of(1, "ABC"), request_of(2, "Q", num_retractions=1)
    assert order_of(waiting(name, make(12, "ABC"), *requests, now_s=100.0))[0] == 2


def test_nobody_waits():
    assert order_of(waiting("lpm", make(4))) == []
    assert scheduler.ordered(waiting("fcfs", make(4)), {}) == ()
