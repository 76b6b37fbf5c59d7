"""The engine by example: small runs on the pool of engine_world.py, each for one rule."""

import dataclasses

import pytest
from engine_settings import config_of, hashed_sampler
from engine_world import EngineWorld

from penelope_jax.config import POLICIES, InsertUnit
from penelope_jax.events import Finished, RequestMetrics, Sampled, Scored
from penelope_jax.lookup import match
from penelope_jax.segments import SamplingParams, SegmentKind, StepPlan

PHANTOM, REAL, DECODE, SCORE = SegmentKind.PHANTOM, SegmentKind.REAL, SegmentKind.DECODE, SegmentKind.SCORE
SAMPLER = hashed_sampler(0, vocab_size=5)


def prompt_of(length: int, first: int = 100) -> list[int]:
    return list(range(first, first + length))


def once(max_tokens: int = 1, **changes) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **changes)


def rows_of(plan: StepPlan | None) -> list[tuple[int, SegmentKind, int, int]]:
    assert plan is not None
    return [(segment.request_id, segment.kind, segment.start, segment.stop) for segment in plan.segments]


def submitted(world: EngineWorld, prompt: list[int], sampling: SamplingParams, salt: str = "") -> int:
    request_id = world.submit(prompt, sampling, salt)
    assert request_id is not None
    return request_id


def served(world: EngineWorld, prompt: list[int], sampling: SamplingParams, salt: str = "") -> RequestMetrics:
    """Runs one request to its end."""
    request_id = submitted(world, prompt, sampling, salt)
    world.drain(SAMPLER)
    metrics = world.histories[request_id].metrics
    assert metrics is not None
    return metrics


def spans_of(world: EngineWorld, tokens: list[int]) -> list[tuple[int, int, str]]:
    return [(span.start, span.stop, span.tier.name) for span in match(world.state.cache, tokens).spans]


def world_with_hole(**changes) -> EngineWorld:
    """A history of 8 pages (prompt_of(32)) whose pages 0 and 1 were evicted, in a pool of 10 pages."""
    world = EngineWorld(config_of(4, 10, **changes))
    served(world, prompt_of(32), once())
    served(world, prompt_of(15, 500), once())
    assert spans_of(world, prompt_of(32)) == [(0, 8, "MISSING"), (8, 32, "DEVICE")]
    return world


# What a hit is (rule 3).


@pytest.mark.parametrize(("length", "hit"), [(12, 8), (13, 12), (15, 12), (16, 12), (1, 0), (4, 0), (5, 4)])
def test_a_full_hit_computes_at_least_the_last_token(length: int, hit: int):
    world = EngineWorld(config_of(4, 16))
    cold = served(world, prompt_of(length), once(3))
    again = served(world, prompt_of(length), once(3))
    assert (cold.device_hit, cold.new, cold.compute_spans) == (0, length, ((0, length),))
    assert (again.device_hit, again.refilled, again.new) == (hit, 0, length - hit)


def test_divergence_inside_a_page_counts_whole_pages_only():
    world = EngineWorld(config_of(4, 16))
    served(world, [*prompt_of(11), 1, 1], once())
    metrics = served(world, [*prompt_of(11), 2, 2, 2], once())
    assert (metrics.device_hit, metrics.new) == (8, 6)


def test_the_tree_gets_prompt_and_output_less_the_last_token():
    for max_tokens, num_pages in ((1, 1), (2, 2), (5, 2), (6, 3)):
        world = EngineWorld(config_of(4, 16))
        served(world, prompt_of(7), once(max_tokens))
        assert world.state.cache.num_resident == num_pages == (7 + max_tokens - 1) // 4


def test_what_was_computed_past_a_stop_is_not_kept():
    """The row behind the stop token was planned before the stop was known; its page would be full with it."""
    world = EngineWorld(config_of(4, 16))
    request_id = submitted(world, prompt_of(6), once(9, stop_token_ids=(7,)))
    world.drain(lambda _, position: 7 if position == 7 else 3, overlapped=True)
    history = world.histories[request_id]
    assert (history.reason, history.heard[6:]) == ("stop", [3, 7])
    assert (DECODE, 7, 8) in history.computed
    assert world.state.cache.num_resident == 1


def test_an_output_that_reaches_the_tree_first_leaves_a_last_token_to_compute():
    """The page of a waiting prompt's end is filled by another request's output before it gets there."""
    world = EngineWorld(config_of(4, 16, max_step_tokens=4))
    first = submitted(world, prompt_of(7), once(2))
    world.step(lambda *_: 9)
    world.step(lambda *_: 9)
    second = submitted(world, [*prompt_of(7), 9], once(2, prompt_logprobs_from=0))
    assert rows_of(world.plan(SAMPLER)) == [(first, DECODE, 7, 8), (second, SCORE, 0, 3)]
    world.done()
    assert world.histories[first].reason == "length"
    assert rows_of(world.plan(SAMPLER)) == [(second, SCORE, 3, 4)]
    world.done()
    assert rows_of(world.plan(SAMPLER)) == [(second, REAL, 4, 8)]
    world.done()
    world.drain(SAMPLER)
    assert world.state.cache.num_resident == 2


# Holes (rules 4 and 10, paper part two).


def test_a_hole_is_refilled_in_the_step_of_the_new_tokens():
    world = world_with_hole(max_step_tokens=32)
    request_id = submitted(world, [*prompt_of(32), 1, 2, 3], once(1))
    plan = world.plan(SAMPLER)
    assert rows_of(plan) == [(request_id, PHANTOM, 0, 8), (request_id, REAL, 32, 35)]
    assert plan is not None and [segment.sample is None for segment in plan.segments] == [True, False]
    metrics = world.histories[request_id].metrics
    assert metrics is not None
    assert (metrics.device_hit, metrics.refilled, metrics.new) == (24, 8, 3)
    assert metrics.compute_spans == ((0, 8), (32, 35))
    assert metrics.refilled_units == sum(range(8))
    world.drain(SAMPLER)
    assert spans_of(world, prompt_of(32)) == [(0, 32, "DEVICE")]


def test_several_holes_are_refilled_in_position_order():
    world = EngineWorld(config_of(4, 10, max_step_tokens=4, output_reserve=0))
    history = prompt_of(32)
    served(world, history, once())
    served(world, prompt_of(11, 500), once())  # takes the first page
    submitted(world, prompt_of(3, 600), once(3))
    world.step(SAMPLER)
    branch = submitted(world, [*history[:16], 1, 2, 3, 4, 5], once())
    world.step(SAMPLER)  # a decode leaves less than a page: the branch is admitted, pins four pages, refills nothing
    world.step(SAMPLER)  # the decode needs a page: the front of what the branch does not pin
    world.abort(branch)
    assert spans_of(world, history) == [
        (0, 4, "MISSING"),
        (4, 16, "DEVICE"),
        (16, 20, "MISSING"),
        (20, 32, "DEVICE"),
    ]
    world.drain(SAMPLER)
    last = submitted(world, [*history, 6], once())
    world.drain(SAMPLER)
    assert world.histories[last].computed == [(PHANTOM, 0, 4), (PHANTOM, 16, 20), (REAL, 32, 33)]


def test_a_hole_larger_than_a_step_is_refilled_in_pieces_and_new_tokens_come_last():
    world = world_with_hole(max_step_tokens=4)
    request_id = submitted(world, [*prompt_of(32), 1, 2, 3], once())
    rows = []
    while world.live:
        rows.append(rows_of(world.plan(SAMPLER)))
        world.done()
    assert rows == [[(request_id, PHANTOM, 0, 4)], [(request_id, PHANTOM, 4, 8)], [(request_id, REAL, 32, 35)]]


def test_one_refill_serves_all_who_need_it_and_none_runs_ahead():
    world = world_with_hole(max_step_tokens=4, max_step_segments=8)
    first = submitted(world, [*prompt_of(32), 1], once())
    second = submitted(world, [*prompt_of(32), 2], once())
    assert rows_of(world.plan(SAMPLER)) == [(first, PHANTOM, 0, 4)]
    world.done()
    assert rows_of(world.plan(SAMPLER)) == [(first, PHANTOM, 4, 8)]
    world.done()
    assert rows_of(world.plan(SAMPLER)) == [(first, REAL, 32, 33), (second, REAL, 32, 33)]
    world.drain(SAMPLER)
    metrics = world.histories[second].metrics
    assert metrics is not None and (metrics.device_hit, metrics.refilled, metrics.new) == (32, 0, 1)


def test_a_sharer_joins_the_step_that_finishes_the_refill():
    world = world_with_hole(max_step_tokens=32)
    first = submitted(world, [*prompt_of(32), 1], once())
    second = submitted(world, [*prompt_of(32), 2], once())
    expected = [(first, PHANTOM, 0, 8), (first, REAL, 32, 33), (second, REAL, 32, 33)]
    assert rows_of(world.plan(SAMPLER)) == expected
    world.drain(SAMPLER)


def test_new_tokens_that_a_request_computes_are_an_owned_hole_for_later_ones():
    world = EngineWorld(config_of(4, 24, max_step_tokens=8))
    first = submitted(world, prompt_of(21), once())
    second = submitted(world, [*prompt_of(20), 7, 7], once())
    rows = []
    while world.live:
        rows.extend(rows_of(world.plan(SAMPLER)))
        world.done()
    assert rows == [(first, REAL, 0, 8), (first, REAL, 8, 16), (first, REAL, 16, 21), (second, REAL, 20, 22)]


@pytest.mark.parametrize("in_flight", [False, True])
def test_an_abort_in_a_refill_keeps_what_is_done_and_passes_the_rest_on(in_flight: bool):
    world = world_with_hole(max_step_tokens=4)
    first = submitted(world, [*prompt_of(32), 1], once())
    second = submitted(world, [*prompt_of(32), 2], once())
    world.plan(SAMPLER)
    if in_flight:
        world.abort(first)
        assert not world.histories[first].reason, "its row is still in flight"
        world.done()
    else:
        world.done()
        world.abort(first)
    assert world.histories[first].reason == "abort"
    assert spans_of(world, prompt_of(32)) == [(0, 4, "DEVICE"), (4, 8, "MISSING"), (8, 32, "DEVICE")]
    world.step(SAMPLER)  # whoever was admitted meanwhile goes on where the other was
    assert spans_of(world, prompt_of(32)) == [(0, 32, "DEVICE")]
    assert (PHANTOM, 4, 8) in world.histories[second].computed
    world.drain(SAMPLER)


@pytest.mark.parametrize("name", ["sglang", "vllm"])
def test_policies_that_free_tails_make_no_holes(name: str):
    world = EngineWorld(config_of(4, 10, policy=POLICIES[name]))
    served(world, prompt_of(32), once())
    served(world, prompt_of(15, 500), once())
    expected = {"sglang": [(0, 16, "DEVICE")], "vllm": [(0, 24, "DEVICE")]}  # a node is one chunk of 16 tokens
    assert spans_of(world, prompt_of(32)) == expected[name]


@pytest.mark.parametrize(("unit", "left"), [(InsertUnit.CHUNK, 16), (InsertUnit.PROMPT, 0)])
def test_the_insert_unit_sets_how_much_whole_node_eviction_frees(unit: InsertUnit, left: int):
    policy = dataclasses.replace(POLICIES["sglang"], insert_unit=unit)
    world = EngineWorld(config_of(4, 10, policy=policy))
    served(world, prompt_of(32), once())
    served(world, prompt_of(11, 500), once())
    assert match(world.state.cache, prompt_of(32)).stop == left


# Log-probabilities of the prompt (section 5).


def test_prompt_logprobs_over_reused_pages_and_a_hole():
    world = world_with_hole(max_step_tokens=64)
    request_id = submitted(world, [*prompt_of(32), 1, 2, 3], once(1, prompt_logprobs_from=2))
    assert rows_of(world.plan(SAMPLER)) == [
        (request_id, PHANTOM, 0, 8),
        (request_id, SCORE, 8, 32),
        (request_id, REAL, 32, 35),
    ]
    updates = world.done()
    scored = [(update.start, len(update.logprobs), update.reused) for update in updates if isinstance(update, Scored)]
    assert scored == [(2, 6, False), (8, 24, True), (32, 2, False)]
    metrics = world.histories[request_id].metrics
    assert metrics is not None and metrics.device_hit == 24, "scored positions still count as hits"
    assert metrics.scoring_units == sum(range(8, 32))


def test_scoring_a_single_token_prompt_asks_for_nothing():
    world = EngineWorld(config_of(4, 8))
    served(world, [5], once(1, prompt_logprobs_from=0))
    assert world.histories[0].scores == []


# Retraction (rule 4).


def test_a_retracted_request_goes_to_the_head_of_the_queue_and_keeps_its_first_metrics():
    world = EngineWorld(config_of(4, 7, output_reserve=0, max_running=2, scheduler="fcfs"))
    old = submitted(world, prompt_of(11), once(10))
    young = submitted(world, prompt_of(11, 300), once(10))
    later = submitted(world, prompt_of(3, 600), once(1))
    while not world.histories[young].num_retractions:
        assert world.step(SAMPLER)
    waiting = world.state.waiting
    assert [request.request_id for request in waiting] == [young, later]
    assert waiting[0].prompt.tolist() == world.histories[young].heard
    num_before = len(world.histories[young].heard) - 11
    assert num_before > 0
    ends: dict[int, Finished] = {}
    while world.live:
        world.plan(SAMPLER)
        running = [request.request_id for request in world.state.running]
        assert later not in running or young in running[: running.index(later)] or young in ends
        ends.update({update.request_id: update for update in world.done() if isinstance(update, Finished)})
    assert set(ends) == {old, young, later}
    assert ends[young].output_len == 10 and ends[young].num_retractions == 1
    metrics = ends[young].metrics
    assert metrics is not None and metrics.prompt_len == 11
    assert world.state.counters.retractions == 1


def test_the_history_of_a_retracted_request_is_not_the_first_to_go():
    """D11: what it computed was used last, so something older goes first, and it finds its pages again."""
    world = EngineWorld(config_of(4, 10, output_reserve=0, max_running=2, policy=POLICIES["penelope"]))
    served(world, prompt_of(12, 500), once())
    ids = [submitted(world, prompt_of(11, first), once(14)) for first in (100, 300)]
    while not world.histories[ids[1]].num_retractions:
        assert world.step(SAMPLER)
    assert spans_of(world, prompt_of(12, 500)) == []
    again = world.state.waiting[0]
    assert again.request_id == ids[1]
    hits = match(world.state.cache, again.prompt).stop
    assert hits >= 12, "no page of it was evicted before the older history was gone"
    world.drain(SAMPLER)


def test_an_older_request_is_never_sent_back_for_a_younger_one():
    world = EngineWorld(config_of(4, 7, output_reserve=0, max_running=3))
    ids = [submitted(world, prompt_of(11, 100 * first), once(9)) for first in range(1, 4)]
    world.drain(SAMPLER)
    assert world.histories[ids[0]].num_retractions == 0
    assert max(world.histories[request_id].num_retractions for request_id in ids) >= 1


def test_a_request_with_a_step_in_flight_is_marked_and_released_when_it_is_back():
    world = EngineWorld(config_of(4, 7, output_reserve=0, max_running=2))
    for first in (100, 300):
        submitted(world, prompt_of(11, first), once(10))
    world.drain(SAMPLER, overlapped=True)
    assert sum(history.num_retractions for history in world.histories.values()) >= 1


# Aborts and flushes.


def test_aborts_while_waiting_running_and_between_chunks():
    world = EngineWorld(config_of(4, 16, max_step_tokens=8, max_running=1))
    running = submitted(world, prompt_of(30), once(4))
    waiting = submitted(world, prompt_of(9, 500), once(4))
    world.step(SAMPLER)
    world.abort(waiting)
    assert world.histories[waiting].reason == "abort" and world.histories[waiting].metrics is None
    world.plan(SAMPLER)
    world.abort(running)
    world.abort(running)
    world.done()
    assert world.histories[running].reason == "abort"
    world.drain(SAMPLER)
    assert world.state.cache.num_resident == 4, "two chunks of two pages stay as cache"
    assert world.state.counters.finished == 2


def test_a_flush_spares_what_a_running_request_holds():
    world = EngineWorld(config_of(4, 16, max_step_tokens=8))
    served(world, prompt_of(9, 500), once())
    submitted(world, prompt_of(30), once())
    world.step(SAMPLER)
    world.flush()
    assert spans_of(world, prompt_of(30)) == [(0, 8, "DEVICE"), (8, 28, "MISSING")]
    assert spans_of(world, prompt_of(9, 500)) == []
    world.drain(SAMPLER)
    world.flush()
    assert world.state.cache.num_resident == 0 and not world.state.cache.roots


# Namespaces (rule 12).


def test_salts_share_nothing_and_one_salt_shares_all():
    world = EngineWorld(config_of(4, 24))
    hits = [served(world, prompt_of(13), once(), salt).device_hit for salt in ("", "x", "y", "x", "y", "")]
    assert hits == [0, 0, 0, 12, 12, 12]


def test_a_retracted_request_samples_no_token_twice():
    world = EngineWorld(config_of(4, 7, output_reserve=0, max_running=2))
    for first in (100, 300):
        submitted(world, prompt_of(11, first), once(10))
    sampled = 0
    while world.live:
        world.plan(SAMPLER)
        sampled += sum(isinstance(update, Sampled) for update in world.done())
    assert sampled == 20
