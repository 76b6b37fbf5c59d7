"""What a request gets at admission, and whether there is room for it."""

import dataclasses

import numpy as np
import pytest
from engine_settings import config_of
from letter_trees import make, shown, tokens_of

from penelope_jax import admission, eviction, histories
from penelope_jax.config import POLICIES
from penelope_jax.invariants import check_cache
from penelope_jax.pages import NO_PAGE
from penelope_jax.radix_tree import CacheState
from penelope_jax.segments import SamplingParams
from penelope_jax.state import Request

PENELOPE = POLICIES["penelope"]
CONFIG = config_of(4, 16, output_reserve=6, linear_cost=10.0)


def request_of(
    text: str, tail: int = 0, max_tokens: int = 1, request_id: int = 0, score_from: int | None = None
) -> Request:
    prompt = np.concatenate([tokens_of(text), np.arange(tail, dtype=np.int32)])
    return Request(
        request_id=request_id,
        session_id="",
        namespace="",
        arrival=request_id,
        arrival_s=0.0,
        prompt=prompt,
        original_len=len(prompt),
        sampling=SamplingParams(max_tokens=max_tokens),
        score_pos=len(prompt) if score_from is None else score_from,
    )


def admitted(cache: CacheState, request: Request) -> tuple[CacheState, Request]:
    cache, request = admission.admit(cache, CONFIG, request)
    check_cache(cache)
    return cache, request


def test_a_cold_request_owns_all_whole_pages_of_its_prompt():
    cache, request = admitted(make(16), request_of("ABC", 2))
    metrics = request.metrics
    assert metrics is not None
    assert (metrics.device_hit, metrics.refilled, metrics.new) == (0, 0, 14)
    assert metrics.compute_spans == ((0, 14),)
    assert metrics.compute_units == sum(10 + position for position in range(14))
    assert (request.path_stop, request.match_stop, request.num_owned) == (12, 0, 3)
    assert request.page_table.tolist() == [NO_PAGE] * 3
    assert shown(cache, "ABC") == "000"
    assert cache.device.num_free == 16, "pages are taken later, step by step"


def test_a_full_hit_recomputes_the_last_page_into_a_private_one():
    _, request = admitted(make(16, "ABC"), request_of("ABC"))
    assert request.metrics is not None and (request.metrics.device_hit, request.metrics.new) == (8, 4)
    assert (request.path_stop, request.match_stop, request.page_table.tolist()) == (8, 8, [0, 1])


def test_a_full_hit_of_one_page_has_an_empty_path():
    cache, request = admitted(make(16, "A"), request_of("A"))
    assert (request.path_stop, request.num_owned, request.page_table.tolist()) == (0, 0, [])
    cache = histories.unpin(cache, request.pin)
    check_cache(cache)


def test_a_last_page_that_is_missing_inside_a_longer_history_is_refilled_in_place():
    cache, _ = eviction.evict(make(16, "ABCD"), 2, PENELOPE)
    cache, request = admitted(cache, request_of("AB"))
    assert (request.path_stop, request.num_owned) == (8, 2)
    assert shown(cache, "ABCD") == "00CD"
    assert request.metrics is not None
    assert (request.metrics.device_hit, request.metrics.refilled, request.metrics.new) == (0, 0, 8)


def test_a_last_page_that_another_request_is_computing_is_not_waited_for():
    cache, first = admitted(make(16), request_of("AB", request_id=1))
    cache, second = admitted(cache, request_of("AB", request_id=2))
    assert (first.path_stop, second.path_stop, second.num_owned) == (8, 4, 0)
    assert second.metrics is not None and (second.metrics.device_hit, second.metrics.new) == (4, 4)


def test_holes_are_refilled_and_what_others_refill_counts_as_a_hit():
    cache, _ = eviction.evict(make(16, "ABCDEF"), 3, PENELOPE)
    cache, first = admitted(cache, request_of("ABX", 1, request_id=1))
    cache, second = admitted(cache, request_of("ABCDEF", 1, request_id=2))
    assert first.metrics is not None and first.metrics.refilled == 0, "nothing behind the hole is its own"
    assert second.metrics is not None
    assert (second.metrics.device_hit, second.metrics.refilled, second.metrics.new) == (20, 4, 1)
    assert second.metrics.compute_spans == ((8, 12), (24, 25))
    assert second.metrics.refilled_units == sum(10 + position for position in range(8, 12))
    assert (first.num_owned, second.num_owned) == (3, 1)


def test_metrics_are_those_of_the_first_admission():
    cache, request = admitted(make(16, "AB"), request_of("ABC", 1))
    cache = histories.pass_on(cache, request.pin, 0, ())
    cache = histories.unpin(cache, request.pin)
    cache, _ = eviction.evict(cache, 2, PENELOPE)
    _, again = admitted(cache, request)
    assert again.metrics is request.metrics
    assert again.num_owned == 3


def test_scored_positions_are_hits_and_their_units_are_told_apart():
    _, request = admitted(make(16, "ABC"), request_of("ABCD", score_from=3))
    metrics = request.metrics
    assert metrics is not None and (metrics.device_hit, metrics.new) == (12, 4)
    assert metrics.scoring_units == sum(10 + position for position in range(3, 12))


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "expected"), [(10, 7, 7), (10, None, 50), (1, None, 59), (59, None, 1)]
)
def test_max_tokens_defaults_to_what_the_pool_leaves(prompt_len: int, max_tokens: int | None, expected: int):
    assert admission.resolved_max_tokens(CONFIG, prompt_len, max_tokens) == expected
    assert admission.refusal(CONFIG, prompt_len, max_tokens) is None


def test_max_tokens_defaults_to_what_the_context_leaves():
    config = dataclasses.replace(CONFIG, max_context=40)
    assert admission.resolved_max_tokens(config, 30, None) == 10


def test_the_room_counts_prompt_output_and_one_page():
    assert admission.refusal(CONFIG, 50, 10) is None
    assert admission.refusal(CONFIG, 50, 11) == (
        "prompt of 50 tokens and 11 output tokens need 17 pages of 4 tokens; the device pool has 16 (--device-tokens 64)."
    )
    assert admission.refusal(CONFIG, 60, None) == (
        "prompt of 60 tokens and 1 output tokens need 17 pages of 4 tokens; the device pool has 16 (--device-tokens 64)."
    )
    config = dataclasses.replace(CONFIG, max_context=20)
    assert admission.refusal(config, 15, 5) is None
    assert admission.refusal(config, 15, 6) == (
        "prompt of 15 tokens and 6 output tokens exceed the context of 20 tokens."
    )


@pytest.mark.parametrize(("max_tokens", "expected"), [(1, 4), (2, 4), (3, 5), (6, 5), (7, 5), (60, 5)])
def test_a_request_claims_its_missing_pages_its_tail_and_its_output_reserve(max_tokens: int, expected: int):
    """A page of hit, three to compute, and an output of at most 6 reserved tokens."""
    _, request = admitted(make(16, "A"), request_of("ABCD", 2, max_tokens))
    assert admission.claimed_pages(request) == expected


def test_evictable_pages_are_those_that_no_running_request_needs():
    cache = make(16, "ABCD", "XY")
    assert admission.evictable_pages(cache, CONFIG, ()) == 6
    cache, first = admitted(cache, request_of("ABQ", request_id=1))
    cache, second = admitted(cache, request_of("ABCR", request_id=2))
    assert admission.evictable_pages(cache, CONFIG, (first,)) == 4
    assert admission.evictable_pages(cache, CONFIG, (first, second)) == 3
    _, done = eviction.evict(cache, 16, PENELOPE)
    assert done.num_pages == 3
