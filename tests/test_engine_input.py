"""What the engine does with requests it cannot run and with callers that misuse it: the exact texts."""

import numpy as np
import pytest
from engine_settings import config_of, hashed_sampler
from engine_world import EngineWorld

from penelope_jax import engine
from penelope_jax.config import EngineConfig
from penelope_jax.events import Abort, Finished, Flush, Refused, Submit
from penelope_jax.segments import SamplingParams, StepDone


def once(max_tokens: int = 1, **changes) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **changes)


def config(**changes) -> EngineConfig:
    return config_of(4, 8, vocab_size=1000, max_context=24, **changes)


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        (np.empty(0, np.int32), once(), "prompt is empty; at least 1 token is needed."),
        (np.array([1, 1000]), once(), "token id 1000 at position 1 is outside [0, 1000)."),
        (np.array([-7]), once(), "token id -7 at position 0 is outside [0, 1000)."),
        (np.array([2**40]), once(), f"token id {2**40} at position 0 is outside [0, 1000)."),
        (np.zeros(3), once(), "prompt must be a list of token ids, got an array of float64 with shape (3,)."),
        (
            np.zeros((1, 3), np.int32),
            once(),
            "prompt must be a list of token ids, got an array of int32 with shape (1, 3).",
        ),
        (np.zeros(20, int), once(5), "prompt of 20 tokens and 5 output tokens exceed the context of 24 tokens."),
        (
            np.zeros(24, int),
            SamplingParams(),
            "prompt of 24 tokens and 1 output tokens exceed the context of 24 tokens.",
        ),
        (
            np.zeros(5, int),
            once(1, prompt_logprobs_from=5),
            "prompt_logprobs_from=5 must be below the prompt's 5 tokens.",
        ),
    ],
)
def test_bad_requests_are_refused_with_the_numbers(prompt: np.ndarray, sampling: SamplingParams, message: str):
    state = engine.make_state(config())
    event = Submit(request_id=1, tokens=prompt, sampling=sampling)
    after, (refused,) = engine.apply(state, [event])
    assert refused == Refused(request_id=1, message=message)
    assert engine.refusal_of(config(), event) == message
    assert after.idle and after.counters.refused == 1


def test_a_pool_that_is_too_small_is_named_with_the_flag():
    refused = engine.refusal_of(config_of(4, 8), Submit(request_id=0, tokens=np.zeros(27, int), sampling=once(2)))
    assert refused == (
        "prompt of 27 tokens and 2 output tokens need 9 pages of 4 tokens; the device pool has 8 (--device-tokens 32)."
    )
    assert engine.refusal_of(config_of(4, 8), Submit(request_id=0, tokens=np.zeros(27, int), sampling=once())) is None


def test_a_request_of_exactly_the_room_there_is_runs():
    for length, max_tokens in ((27, 1), (1, 27), (20, None), (28 - 4, 4)):
        world = EngineWorld(config_of(4, 8))
        for request_id in range(2):
            world.submit(range(length), SamplingParams(max_tokens=max_tokens))
            world.drain(hashed_sampler(0))
            assert len(world.histories[request_id].heard) == 28


def test_a_request_id_in_use_is_an_error():
    event = Submit(request_id=5, tokens=np.array([1]), sampling=once())
    state, _ = engine.apply(engine.make_state(config()), [event])
    with pytest.raises(ValueError, match=r"^request id 5 is in use\.$"):
        engine.apply(state, [event])


def test_a_step_that_is_not_the_oldest_in_flight_is_an_error():
    nothing = np.empty(0, np.int32), np.empty(0, np.float32)
    state = engine.make_state(config())
    with pytest.raises(ValueError, match=r"^step 0 is done, but the steps in flight are \[\]\.$"):
        engine.apply(state, [StepDone(step=0, tokens=nothing[0], logprobs=nothing[1])])
    state, _ = engine.apply(state, [Submit(request_id=0, tokens=np.array([1, 2]), sampling=once(4))])
    state, _ = engine.plan(state)
    state, _ = engine.plan(state)
    with pytest.raises(ValueError, match=r"^step 1 is done, but the steps in flight are \[0, 1\]\.$"):
        engine.apply(state, [StepDone(step=1, tokens=np.array([3]), logprobs=np.zeros(1, np.float32))])
    with pytest.raises(ValueError, match=r"^2 steps are in flight; at most 1 may be when a step is planned\.$"):
        engine.plan(state)


def test_results_of_another_shape_are_an_error():
    sampling = once(4, prompt_logprobs_from=0)
    state, _ = engine.apply(engine.make_state(config()), [Submit(request_id=0, tokens=np.arange(6), sampling=sampling)])
    state, plan = engine.plan(state)
    assert plan is not None and plan.num_samples == 1 and len(plan.segments) == 1
    one, scores = np.zeros(1, np.float32), (np.zeros(6, np.float32),)
    with pytest.raises(ValueError) as caught:
        engine.apply(state, [StepDone(step=0, tokens=np.empty(0, np.int32), logprobs=one, scores=scores)])
    assert str(caught.value) == "step 0 returned 0 samples and 1 scored segments; 1 and 1 were planned."
    with pytest.raises(ValueError) as caught:
        engine.apply(state, [StepDone(step=0, tokens=np.array([1]), logprobs=one)])
    assert str(caught.value) == "step 0 returned 1 samples and 0 scored segments; 1 and 1 were planned."
    with pytest.raises(ValueError) as caught:
        engine.apply(state, [StepDone(step=0, tokens=np.array([1]), logprobs=one[:0], scores=scores)])
    assert str(caught.value) == "step 0 returned 0 log-probabilities for 1 samples."
    with pytest.raises(ValueError) as caught:
        engine.apply(state, [StepDone(step=0, tokens=np.array([1]), logprobs=one, scores=(one,))])
    assert str(caught.value) == ("step 0 returned 1 scores for a segment of request 0; at least 5 were planned.")


def test_an_unknown_event_is_an_error():
    event = Finished(request_id=0, reason="stop", metrics=None, output_len=1, num_retractions=0)
    with pytest.raises(TypeError, match=r"^unknown event Finished\("):
        engine.apply(engine.make_state(config()), [event])  # type: ignore[list-item]


def test_time_never_goes_back():
    state, _ = engine.apply(engine.make_state(config()), [Flush(time_s=5.0), Flush(time_s=3.0)])
    assert state.now_s == 5.0


def test_an_abort_of_nobody_is_ignored():
    state = engine.make_state(config_of(4, 8))
    after, updates = engine.apply(state, [Abort(request_id=3)])
    assert (after, updates) == (state, ())
