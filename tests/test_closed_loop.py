"""The closed loop on a clock that counts steps, over the real engine with made-up samples."""

import dataclasses

import numpy as np
import pytest

from penelope_jax.config import POLICIES, EngineConfig
from penelope_jax.driver import Driver, HashExecutor
from penelope_jax.errors import InputError
from penelope_jax.events import Admitted
from penelope_jax.experiments.closed_loop import ClosedLoop, StepClock, play
from penelope_jax.experiments.sessions import Piece, Session, Turn
from penelope_jax.experiments.synthesize import SynthesisOptions, synthesize
from penelope_jax.metrics import Recorder, summarize

VOCAB = 512


def session(name, *turns):
    """Turns are (new tokens, output, delay)."""
    made = []
    for index, (new_len, output_len, delay_s) in enumerate(turns):
        keep = made[-1].history_len if made else 0
        new = (Piece(f"{name}/{index}", 0, new_len),)
        made.append(Turn(base=index - 1, keep=keep, new=new, output_len=output_len, delay_s=delay_s))
    return Session(session_id=name, turns=tuple(made))


def config(device_tokens, policy="penelope", **more):
    options = {"page_size": 8, "max_context": 2048, "max_step_tokens": 256, "linear_cost": 50.0, "output_reserve": 16}
    options |= {"max_running": 4, "vocab_size": VOCAB} | more
    return EngineConfig(device_tokens=device_tokens, policy=POLICIES[policy], **options)


def run(sessions, num_live, engine_config, **hooks):
    clock = StepClock()
    driver = Driver(engine_config, HashExecutor(VOCAB), clock=clock)
    recorder = Recorder(engine_config.page_size, engine_config.linear_cost)
    loop = ClosedLoop(sessions, num_live, VOCAB)
    complete = play(driver, loop, recorder, clock, **hooks)
    return driver, recorder, complete, clock


def test_turns_are_due_one_at_a_time_after_the_reply_and_the_delay():
    loop = ClosedLoop([session("a", (5, 2, 0), (3, 1, 10.0)), session("b", (4, 1, 0))], 1, VOCAB)
    (call,) = loop.due(3.0)
    assert (call.session_id, call.turn, len(call.tokens), call.output_len, call.arrival_s) == ("a", 0, 5, 2, 3.0)
    assert loop.due(4.0) == [] and loop.next_arrival_s is None
    loop.replied(call.session, np.array([1, 2], np.int32), 5.0)
    assert loop.next_arrival_s == 15.0 and loop.due(14.9) == []
    (call,) = loop.due(20.0)  # seen late, due at 15
    assert (call.session_id, call.turn, call.arrival_s) == ("a", 1, 15.0)
    np.testing.assert_array_equal(call.tokens[5:7], [1, 2])
    assert not loop.done
    loop.replied(call.session, np.array([3], np.int32), 22.0)
    (call,) = loop.due(22.0)  # the finished session makes room for the next
    assert (call.session_id, call.arrival_s) == ("b", 22.0)
    loop.replied(call.session, np.array([3], np.int32), 23.0)
    assert loop.done and loop.due(30.0) == []


def test_no_more_than_the_wanted_sessions_are_live():
    sessions = [session(name, (20, 3, 0), (10, 3, 2.0)) for name in "abcdef"]
    live, most = set(), []

    def submitted(_id, call):
        live.add(call.session_id)
        most.append(len(live))

    def finished(call, _reply):
        if call.turn == 1:
            live.discard(call.session_id)

    _, recorder, complete, _ = run(sessions, 2, config(1024), on_submit=submitted, on_finish=finished)
    assert complete and max(most) == 2
    assert sorted((r.session_id, r.turn) for r in recorder.records) == [(n, t) for n in "abcdef" for t in (0, 1)]


def test_time_passes_by_steps_and_by_waits():
    _, recorder, _, clock = run([session("a", (20, 3, 0), (10, 2, 100.0))], 1, config(1024))
    first, second = recorder.records
    assert (first.arrival_s, first.first_token_s, first.finished_s) == (0.0, 1.0, 3.0)
    assert (second.arrival_s, second.first_token_s, second.finished_s) == (103.0, 104.0, 105.0)
    assert clock() == 105.0
    assert (first.ttft_s, second.ttft_s) == (1.0, 1.0)


def test_a_request_that_arrives_during_a_step_counts_its_wait():
    sessions = [session("a", (20, 3, 0), (10, 2, 0.25)), session("b", (20, 9, 0))]
    _, recorder, _, _ = run(sessions, 2, config(1024))
    (second,) = [record for record in recorder.records if record.turn == 1]
    assert (second.arrival_s, second.first_token_s) == (3.25, 5.0)


@pytest.mark.parametrize("policy", POLICIES)
def test_token_sums_under_pressure(policy):
    sessions = synthesize(SynthesisOptions(sessions=6, turns=15, scale=64, context=800, seed=1))
    engine_config = config(1600, policy, max_context=800)
    driver, recorder, complete, _ = run(sessions, 4, engine_config)
    assert complete and driver.state.counters.evicted_pages > 0
    for record in recorder.records:
        assert record.device_hit + record.host_hit + record.refilled + record.new == record.prompt_len
        assert record.refilled <= record.recomputed <= record.ideal_hit < record.prompt_len
        assert record.device_hit <= record.ideal_hit
        assert record.device_hit + record.recomputed == record.ideal_hit
    document = summarize(recorder.records, last_turns={}, evicted_pages=0, config={}, run={})
    counts = document["tokens"]
    assert counts["device_hit"] + counts["host_hit"] + counts["refilled"] + counts["new"] == counts["prompt"]
    if policy in ("sglang", "vllm"):
        assert counts["refilled"] == 0
    if policy == "penelope":
        assert counts["refilled"] > 0


def test_nothing_is_recomputed_when_nothing_is_evicted():
    sessions = synthesize(SynthesisOptions(sessions=4, turns=10, scale=64, context=800, seed=1))
    driver, recorder, _, _ = run(sessions, 4, config(8000, max_context=800))
    assert driver.state.counters.evicted_pages == 0
    assert sum(record.recomputed for record in recorder.records) == 0
    assert sum(record.device_hit for record in recorder.records) == sum(r.ideal_hit for r in recorder.records)


def with_side_request(cancel_s):
    """Session a: a turn, a side request that is cancelled, and a turn that builds on the first."""
    turns = session("a", (40, 3, 0), (10, 2, 5.0)).turns
    side = Turn(base=0, keep=30, new=(Piece("side", 0, 20),), output_len=9, delay_s=5.0, cancel_s=cancel_s)
    return Session(session_id="a", turns=(turns[0], side, dataclasses.replace(turns[1], delay_s=1.0)))


def test_a_client_leaves_when_the_trace_says_so():
    finished = []
    driver, recorder, complete, clock = run(
        [with_side_request(2.0)],
        1,
        config(1024),
        on_finish=lambda call, reply: finished.append((call.turn, len(reply))),
    )
    # Steps 0-2, wait to 8, two steps of the side request, aborted at 10, wait to 11, two steps.
    assert complete and clock() == 13.0 and driver.idle
    assert finished == [(0, 3), (1, 0), (2, 2)]
    assert [(record.turn, record.arrival_s, record.finished_s) for record in recorder.records] == [
        (0, 0.0, 3.0),
        (2, 11.0, 13.0),
    ]
    document = summarize(recorder.records, last_turns={"a": 2}, evicted_pages=0, config={}, run={})
    assert document["jct_s"]["mean"] == 13.0


def test_a_client_that_has_its_reply_in_time_does_not_leave():
    _, recorder, complete, _ = run([with_side_request(50.0)], 1, config(1024))
    assert complete and [record.turn for record in recorder.records] == [0, 1, 2]


def test_clients_can_be_kept_from_leaving():
    _, recorder, complete, _ = run([with_side_request(2.0)], 1, config(1024), cancel=False)
    assert complete and [record.turn for record in recorder.records] == [0, 1, 2]


def test_cancelled_refills_leave_several_holes_in_one_history():
    sessions = synthesize(
        SynthesisOptions(sessions=10, turns=40, context=768, scale=64, shared_prefix=3200, side_rate=0.7)
    )
    holes = []

    def count(update):
        if isinstance(update, Admitted):
            stop = update.metrics.prompt_len - update.metrics.new
            holes.append(sum(start < stop for start, _ in update.metrics.compute_spans))

    engine_config = config(960, page_size=16, max_context=768, max_step_tokens=32, max_running=6)
    _, _, complete, _ = run(sessions, 6, engine_config, on_update=count)
    assert complete and sum(number > 0 for number in holes) >= 50 and max(holes) > 1


def test_a_refused_request_names_session_and_turn():
    with pytest.raises(
        InputError, match=r"session 'a', turn 1: prompt of 73 tokens and 60 output tokens need 18 pages"
    ):
        run([session("a", (20, 3, 0), (50, 60, 0))], 1, config(128))


def test_stop_ends_the_run_early():
    steps = iter(range(100))
    _, recorder, complete, _ = run(
        [session("a", (20, 3, 0), (10, 2, 0))], 1, config(1024), stop=lambda: next(steps) >= 4
    )
    assert not complete and len(recorder.records) == 1


def test_a_stuck_engine_is_an_error():
    class Stuck:
        idle = False

        def submit(self, tokens, sampling, *, session_id):
            return 0

        def step(self):
            return []

    with pytest.raises(RuntimeError, match="no progress in 10001 steps with 1 requests open"):
        play(Stuck(), ClosedLoop([session("a", (5, 1, 0))], 1, VOCAB), Recorder(8, 1.0), StepClock())


def test_a_loop_without_room_is_refused():
    with pytest.raises(ValueError, match="num_live=0 must be at least 1"):
        ClosedLoop([], 0, VOCAB)
