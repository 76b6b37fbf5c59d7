"""The loop around state and executor."""

import dataclasses

import numpy as np
import pytest

from penelope_jax import pages
from penelope_jax.config import POLICIES, EngineConfig, Start
from penelope_jax.driver import Driver, HashExecutor
from penelope_jax.events import Admitted, Finished, Sampled
from penelope_jax.segments import SamplingParams

CONFIG = EngineConfig(device_tokens=64, page_size=4, max_step_tokens=16, vocab_size=100)


def driver_of(**changes) -> Driver:
    return Driver(
        dataclasses.replace(CONFIG, **changes), HashExecutor(vocab_size=90), clock=iter(range(10_000)).__next__
    )


def prompt_of(length: int, first: int = 0) -> np.ndarray:
    return np.arange(first, first + length, dtype=np.int32)


def run_to_idle(driver: Driver) -> list:
    updates = []
    while not driver.idle:
        updates.extend(driver.step())
    return updates


def test_a_request_is_admitted_sampled_and_finished_in_order():
    driver = driver_of()
    request_id = driver.submit(prompt_of(9), SamplingParams(max_tokens=3))
    updates = run_to_idle(driver)
    assert [type(update) for update in updates] == [Admitted, Sampled, Sampled, Sampled, Finished]
    assert {update.request_id for update in updates} == {request_id}
    assert [update.position for update in updates if isinstance(update, Sampled)] == [9, 10, 11]
    assert driver.step() == []


@pytest.mark.parametrize("overlap", [False, True])
def test_overlap_changes_no_output(overlap: bool):
    driver = driver_of(max_running=3)
    other = Driver(driver.state.config, HashExecutor(vocab_size=90), overlap=overlap)
    outputs = []
    for runner in (driver, other):
        for length in (5, 12, 16, 1):
            runner.submit(prompt_of(length), SamplingParams(max_tokens=6))
        sampled = [update for update in run_to_idle(runner) if isinstance(update, Sampled)]
        outputs.append(sorted((update.request_id, update.position, update.token) for update in sampled))
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) == 24


def test_generate_returns_tokens_scores_and_metrics():
    driver = driver_of()
    result = driver.generate(prompt_of(9), SamplingParams(max_tokens=2, prompt_logprobs_from=3))
    assert len(result.tokens) == len(result.logprobs) == 2
    assert result.prompt_logprobs.shape == (5,)
    assert (result.metrics is not None, result.reason) == (True, "length")
    again = driver.generate(prompt_of(9), SamplingParams(max_tokens=2))
    assert again.metrics is not None and again.metrics.device_hit == 8
    assert again.prompt_logprobs.shape == (0,)


@pytest.mark.parametrize("overlap", [False, True])
def test_generate_keeps_every_update_of_other_requests(overlap: bool):
    driver = Driver(CONFIG, HashExecutor(vocab_size=90), overlap=overlap)
    driver.submit(prompt_of(4, 10), SamplingParams(max_tokens=2))
    driver.step()
    longer = driver.submit(prompt_of(4, 20), SamplingParams(max_tokens=9))
    driver.step()
    driver.generate(prompt_of(4, 30), SamplingParams(max_tokens=2))
    updates = run_to_idle(driver)
    positions = [update.position for update in updates if isinstance(update, Sampled) and update.request_id == longer]
    assert positions == list(range(13 - len(positions), 13)) and len(positions) > 4
    assert [update for update in updates if isinstance(update, Finished)][-1].request_id == longer


def test_generate_loses_no_update_behind_its_own_end():
    driver = driver_of(max_step_tokens=64)
    driver.generate(prompt_of(9, 50), SamplingParams(max_tokens=1))
    cold = driver.submit(prompt_of(4, 10), SamplingParams(max_tokens=3))
    driver.generate(prompt_of(9, 50), SamplingParams(max_tokens=3))  # has hits, so it runs before the cold one
    assert driver.idle
    kept = driver.step()
    assert [update.position for update in kept if isinstance(update, Sampled)] == [4, 5, 6]
    assert [update.request_id for update in kept if isinstance(update, Finished)] == [cold]


def test_abort_is_heard_with_the_next_step_even_when_nothing_is_left():
    driver = driver_of()
    request_id = driver.submit(prompt_of(9), SamplingParams(max_tokens=50))
    driver.step()
    driver.abort(request_id)
    assert driver.idle
    updates = driver.step()
    assert [(type(update), update.request_id) for update in updates] == [(Finished, request_id)]
    driver.abort(request_id)
    driver.abort(12345)
    assert driver.step() == []


def test_flush_drops_what_no_request_holds():
    driver = driver_of()
    driver.generate(prompt_of(9), SamplingParams(max_tokens=1))
    assert driver.state.cache.num_resident == 2
    driver.flush()
    assert driver.state.cache.num_resident == 0


@pytest.mark.parametrize(
    ("tokens", "sampling", "message"),
    [
        ([], SamplingParams(), "prompt is empty; at least 1 token is needed."),
        ([1, 100], SamplingParams(), "token id 100 at position 1 is outside [0, 100)."),
        ([-1], SamplingParams(), "token id -1 at position 0 is outside [0, 100)."),
        ([0.5], SamplingParams(), "prompt must be a list of token ids, got an array of float64 with shape (1,)."),
        ([[1], [2]], SamplingParams(), "prompt must be a list of token ids, got an array of int64 with shape (2, 1)."),
        ([True], SamplingParams(), "prompt must be a list of token ids, got an array of bool with shape (1,)."),
        (
            [1] * 60,
            SamplingParams(max_tokens=1),
            (
                "prompt of 60 tokens and 1 output tokens need 17 pages of 4 tokens; the device pool has 16 "
                "(--device-tokens 64)."
            ),
        ),
        ([1, 2], SamplingParams(prompt_logprobs_from=2), "prompt_logprobs_from=2 must be below the prompt's 2 tokens."),
    ],
)
def test_what_can_never_run_is_refused_at_arrival_with_the_numbers(tokens, sampling, message):
    driver = driver_of()
    with pytest.raises(ValueError) as caught:
        driver.submit(tokens, sampling)
    assert str(caught.value) == message
    assert driver.idle and driver.state.counters.refused == 1
    driver.submit([1], SamplingParams(max_tokens=1))
    assert isinstance(run_to_idle(driver)[-1], Finished)


def test_a_stuck_engine_is_an_error_and_no_endless_loop(monkeypatch: pytest.MonkeyPatch):
    driver = driver_of()
    driver.submit(prompt_of(5), SamplingParams(max_tokens=1))
    monkeypatch.setattr("penelope_jax.planning._Planner.admit", lambda self: None)
    with pytest.raises(RuntimeError) as caught:
        driver.step()
    assert str(caught.value) == "0 running and 1 waiting requests, 16 free pages, and none can go on."


def test_hash_executor_depends_on_request_and_position_only():
    tokens = []
    for max_step_tokens in (4, 64):
        driver = driver_of(max_step_tokens=max_step_tokens)
        driver.submit(prompt_of(7))
        driver.submit(prompt_of(11), SamplingParams(max_tokens=4))
        updates = [update for update in run_to_idle(driver) if isinstance(update, Sampled)]
        tokens.append({(update.request_id, update.position): update.token for update in updates})
    assert tokens[0] == tokens[1]
    assert len(set(tokens[0].values())) > 10


def test_requests_that_outgrow_the_pool_are_sent_back_and_finish():
    driver = driver_of(device_tokens=24, output_reserve=0)
    for first in (10, 20, 30):
        driver.submit(prompt_of(7, first), SamplingParams(max_tokens=12))
    ends = [update for update in run_to_idle(driver) if isinstance(update, Finished)]
    assert [update.output_len for update in ends] == [12, 12, 12]
    assert sum(update.num_retractions for update in ends) > 0


def conversations(driver: Driver, num_sessions: int, num_turns: int) -> dict[tuple[int, int], list[int]]:
    """Runs turns of several sessions at once; each prompt holds all that was said and a few new tokens."""
    histories = [list(range(20)) + [50 + session] for session in range(num_sessions)]
    replies: dict[tuple[int, int], list[int]] = {}
    for turn in range(num_turns):
        turns = {
            driver.submit(history, SamplingParams(max_tokens=3)): session for session, history in enumerate(histories)
        }
        for update in run_to_idle(driver):
            if isinstance(update, Sampled):
                replies.setdefault((turns[update.request_id], turn), []).append(update.token)
        for session, history in enumerate(histories):
            history.extend([*replies[session, turn], turn, session])
    return replies


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", list(POLICIES))
def test_a_long_run_gives_the_same_replies_under_every_policy_and_stays_small(name: str, overlap: bool):
    """Request ids and positions are the same in each run, and so is what HashExecutor samples."""
    unlimited = conversations(driver_of(device_tokens=4 * 600), 4, 12)
    config = dataclasses.replace(CONFIG, device_tokens=4 * 40, policy=POLICIES[name])
    driver = Driver(config, HashExecutor(vocab_size=90), overlap=overlap)
    assert conversations(driver, 4, 12) == unlimited
    cache = driver.state.cache
    assert driver.state.counters.evicted_pages >= 40
    assert cache.num_resident + cache.device.num_free == 40 and not cache.pins
    assert sum(node.num_pages for node in cache.nodes.values()) <= 4 * 24, "tokens of what is forgotten are kept"
    if POLICIES[name].start is Start.LEAF_TAIL:
        assert driver.state.counters.phantom_tokens == 0
    driver.flush()
    assert not driver.state.cache.nodes


def test_a_lost_page_shows_when_the_engine_is_idle():
    driver = driver_of()
    driver.submit(prompt_of(9), SamplingParams(max_tokens=1))
    run_to_idle(driver)
    cache = driver.state.cache
    pool, _ = pages.take(cache.device, 1)
    driver.state = dataclasses.replace(driver.state, cache=dataclasses.replace(cache, device=pool))
    driver.submit(prompt_of(9), SamplingParams(max_tokens=1))
    with pytest.raises(AssertionError, match=r"^13 pages are free, 2 in the tree and 0 loading, of 16$"):
        run_to_idle(driver)
