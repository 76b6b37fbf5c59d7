"""Requests that end because of their text: the event, who watches, and that such runs replay."""

import dataclasses

import numpy as np
import pytest
from engine_settings import config_of
from engine_world import EngineWorld

from penelope_jax import engine
from penelope_jax.config import EngineConfig
from penelope_jax.driver import Driver, HashExecutor
from penelope_jax.event_log import EventLogWriter, plan_digest, read_events
from penelope_jax.events import Finished, Refused, Sampled, Stop, Submit
from penelope_jax.invariants import check_cache
from penelope_jax.log_replay import LogReplay
from penelope_jax.segments import SamplingParams, StepDone
from penelope_jax.state import private_page_ids
from penelope_jax.text_stream import TextStream

CONFIG = EngineConfig(device_tokens=64, page_size=4, max_step_tokens=16, vocab_size=100)
PROMPT = np.arange(9, dtype=np.int32)


class Letters:
    """A detokenizer: token i is a letter."""

    def push(self, tokens) -> str:
        return "".join(chr(ord("a") + token % 26) for token in tokens)

    def flush(self) -> str:
        return ""


def driver_of(overlap: bool = False, log: EventLogWriter | None = None, **changes) -> Driver:
    config = dataclasses.replace(CONFIG, **changes)
    return Driver(config, HashExecutor(vocab_size=90), iter(range(10_000)).__next__, overlap=overlap, log=log)


def run_to_idle(driver: Driver) -> list:
    updates = []
    while not driver.idle:
        updates.extend(driver.step())
        check_cache(driver.state.cache, private_page_ids(driver.state))
    return [*updates, *driver.step()]


def tokens_of(updates: list, request_id: int) -> list[int]:
    return [update.token for update in updates if isinstance(update, Sampled) and update.request_id == request_id]


def end_of(updates: list, request_id: int) -> Finished:
    (end,) = [update for update in updates if isinstance(update, Finished) and update.request_id == request_id]
    return end


@pytest.mark.parametrize("overlap", [False, True])
def test_a_stop_string_ends_the_request_at_its_last_token(overlap):
    """With overlap a row behind the stop is computed and dropped: tokens, and what is cached, are the same."""
    free = driver_of().generate(PROMPT, SamplingParams(max_tokens=20)).tokens
    text = Letters().push(free)
    driver = driver_of(overlap)
    stream = TextStream(Letters(), (text[6:9],))
    assert text.index(text[6:9]) == 6
    request_id = driver.submit(PROMPT, SamplingParams(max_tokens=20), watch=stream.push)
    updates = run_to_idle(driver)
    assert tokens_of(updates, request_id) == free[:9]
    assert stream.take() == text[:6]
    end = end_of(updates, request_id)
    assert (end.reason, end.output_len) == ("stop", 9)
    assert driver.state.cache.num_resident == (9 + 9 - 1) // 4
    assert not driver._watched


def test_watches_of_other_requests_go_on():
    driver = driver_of(overlap=True)
    heard: dict[int, list[int]] = {0: [], 1: [], 2: []}

    def watch(request_id: int, length: int):
        def push(token: int) -> bool:
            heard[request_id].append(token)
            return len(heard[request_id]) == length

        return push

    for index, length in enumerate((3, 7, 99)):
        sampling = SamplingParams(max_tokens=10)
        assert driver.submit(PROMPT + 10 * index, sampling, watch=watch(index, length)) == index
    updates = run_to_idle(driver)
    assert [len(heard[index]) for index in range(3)] == [3, 7, 10]
    assert all(heard[index] == tokens_of(updates, index) for index in range(3))
    assert [end_of(updates, index).reason for index in range(3)] == ["stop", "stop", "length"]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_stop_at_the_last_token_allowed(overlap):
    """The request is over by then; the text ends before the stop string all the same."""
    driver = driver_of(overlap)
    text = Letters().push(driver.generate(PROMPT, SamplingParams(max_tokens=5)).tokens)
    driver = driver_of(overlap)
    stream = TextStream(Letters(), (text[3:5],))
    assert driver.generate(PROMPT, SamplingParams(max_tokens=5), watch=stream.push).reason == "length"
    assert (stream.take(), stream.stopped_at) == (text[:3], text[3:5])


def test_watches_outlive_a_retraction():
    driver = driver_of(device_tokens=24, output_reserve=0)
    streams = [TextStream(Letters(), ("no such text",)) for _ in range(3)]
    for first, stream in zip((10, 20, 30), streams):
        driver.submit(np.arange(first, first + 7), SamplingParams(max_tokens=12), watch=stream.push)
    updates = run_to_idle(driver)
    assert sum(end_of(updates, index).num_retractions for index in range(3)) > 0
    assert [stream.num_tokens for stream in streams] == [12] * 3


def test_a_stop_may_come_late_and_in_any_state():
    """Two tokens late, to a request that runs, that was sent back, or that runs again; what is behind is dropped."""
    states = set()
    for steps in range(2, 40):
        driver = driver_of(device_tokens=24, output_reserve=0)
        for first in (10, 20, 30):
            driver.submit(np.arange(first, first + 7), SamplingParams(max_tokens=12))
        updates = []
        for _ in range(steps):
            updates.extend(driver.step())
        for request in (*driver.state.waiting, *driver.state.running):
            if request.output_len > 2:
                where = (
                    "waits" if request.slot == -1 and not len(request.page_table) else "runs",
                    bool(request.num_retractions),
                )
                states.add((*where, len(request.outputs) > 2))
                keep = request.output_len - 2
                driver.stop(request.request_id, keep)
                updates.extend(run_to_idle(driver))
                end = end_of(updates, request.request_id)
                assert (end.reason, end.output_len) == ("stop", keep)
                assert len(tokens_of(updates, request.request_id)) == keep + 2
                break
    assert {("waits", True, False), ("runs", False, True), ("runs", True, False)} <= states


def test_stops_that_cross_with_an_end_are_ignored_and_impossible_ones_refused():
    driver = driver_of()
    request_id = driver.submit(PROMPT, SamplingParams(max_tokens=4))
    driver.step()
    for number in (0, 2):
        with pytest.raises(ValueError) as caught:
            driver.stop(request_id, number)
        assert str(caught.value) == f"request 0 stops at {number} tokens; it has sampled 1."
    driver.stop(12345, 1)
    driver.abort(request_id)
    driver.stop(request_id, 1)
    assert end_of(run_to_idle(driver), request_id).reason == "abort"
    driver.stop(request_id, 1)
    assert driver.step() == []


def test_an_abort_in_flight_is_not_made_a_stop():
    world = EngineWorld(config_of(4, 8))
    world.submit([1, 2, 3, 4, 5], SamplingParams(max_tokens=9))
    sampler = lambda request_id, position: position
    world.step(sampler)
    world.plan(sampler)
    state, _ = engine.apply(world.state, (Stop(request_id=0, num_tokens=1),))
    assert state.running[0].leaving == "stop"
    world.abort(0)
    state, updates = engine.apply(world.state, (Stop(request_id=0, num_tokens=1),))
    assert state.running[0].leaving == "abort" and not updates


@pytest.mark.parametrize("overlap", [False, True])
def test_a_logged_run_with_stops_replays(tmp_path, overlap):
    path = tmp_path / "log"
    with EventLogWriter(path, CONFIG) as log:
        driver = driver_of(overlap, log)
        streams = [TextStream(Letters(), ("a", "e", "q", "z")) for _ in range(6)]
        for index, stream in enumerate(streams):
            sampling = SamplingParams(
                max_tokens=15, frequency_penalty=0.5, logit_bias=((3, -1.0),), top_logprobs=index, ignore_eos=True
            )
            driver.submit(PROMPT + index, sampling, watch=stream.push)
        run_to_idle(driver)
    assert sum(stream.stopped_at is not None for stream in streams) >= 3
    kinds = [kind for kind, _ in read_events(path)[1]]
    assert kinds.count("stop") >= 2
    replay = LogReplay(path)
    moments = list(replay)
    assert replay.complete and replay.num_plans == kinds.count("plan")
    assert moments[-1].after.counters == driver.state.counters
    sampled = [update for moment in moments for update in moment.updates if isinstance(update, Sampled)]
    assert {len(update.top) for update in sampled} == set(range(6))
    assert any(plan_digest(moment.plan) for moment in moments if moment.plan)


def test_options_that_do_not_fit_are_refused_at_arrival():
    for sampling, message in (
        (SamplingParams(logit_bias=((100, 1.0),)), "logit_bias: token id 100 is outside [0, 100)."),
        (SamplingParams(min_tokens=60), "min_tokens=60 exceeds the 51 tokens that context and pool leave."),
    ):
        state = engine.make_state(CONFIG)
        _, (update,) = engine.apply(state, (Submit(request_id=0, tokens=PROMPT, sampling=sampling),))
        assert isinstance(update, Refused) and update.message == message


def test_results_of_the_wrong_shape_are_refused():
    state = engine.make_state(CONFIG)
    state, _ = engine.apply(state, (Submit(request_id=0, tokens=PROMPT, sampling=SamplingParams(top_logprobs=3)),))
    state, _ = engine.plan(state)
    tokens, logprobs = np.array([5], np.int32), np.array([-1.0], np.float32)
    done = StepDone(step=0, tokens=tokens, logprobs=logprobs, top_tokens=np.zeros((1, 2), np.int32))
    with pytest.raises(ValueError) as caught:
        engine.apply(state, (done,))
    assert str(caught.value) == (
        "step 0 returned (1, 2) most probable tokens with None log-probabilities; (1, 3) were planned."
    )


def test_ending_tokens_before_min_tokens_do_not_end():
    """Whatever samples them: the device masks them, other executors may not."""
    driver = driver_of()
    free = driver.generate(PROMPT, SamplingParams(max_tokens=8)).tokens
    result = driver_of().generate(PROMPT, SamplingParams(max_tokens=8, min_tokens=5, stop_token_ids=(free[2], free[5])))
    assert (result.tokens, result.reason) == (free[:6], "stop")
