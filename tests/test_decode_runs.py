"""Counting runs of decode steps leaves what planning each of them leaves: records, state, clock, outputs."""

import dataclasses

import numpy as np
import pytest

from penelope_jax.config import POLICIES, SCHEDULERS, EngineConfig
from penelope_jax.cost_executor import CostExecutor, VirtualClock
from penelope_jax.device_profiles import profile_named
from penelope_jax.experiments.closed_loop import ClosedLoop, play
from penelope_jax.experiments.decode_runs import RunningDriver
from penelope_jax.experiments.sessions import Piece, Session, Turn, cut_session
from penelope_jax.experiments.synthesize import SynthesisOptions, synthesize
from penelope_jax.invariants import check_cache
from penelope_jax.metrics import Recorder
from penelope_jax.models.model_costs import model_costs
from penelope_jax.models.presets import PRESETS
from penelope_jax.step_time import StepTimer

VOCAB = 512
TOY = model_costs(PRESETS["b"], "b")


def config(policy, **more):
    options = {"device_tokens": 2048, "page_size": 16, "max_context": 1600, "max_step_tokens": 256}
    options |= {"linear_cost": 768.0, "output_reserve": 32, "max_running": 8, "vocab_size": VOCAB}
    return EngineConfig(policy=POLICIES[policy], **options | more)


def simulate(engine_config, sessions, num_live, *, overlap, count_runs, scale=1):
    """Returns (driver, records, updates with the times at which they were seen)."""
    names = {}
    executor = CostExecutor(
        StepTimer(TOY, profile_named("toy"), scale=4),
        page_size=engine_config.page_size,
        clock=VirtualClock(),
        vocab_size=VOCAB,
        session_of=names.__getitem__,
    )
    loop = ClosedLoop(sessions, num_live, VOCAB)
    driver = RunningDriver(
        engine_config,
        executor,
        next_arrival_s=lambda: loop.next_arrival_s,
        overlap=overlap,
        count_runs=count_runs,
    )
    recorder = Recorder(engine_config.page_size, engine_config.linear_cost)
    updates = []
    assert play(
        driver,
        loop,
        recorder,
        executor.clock,
        on_submit=lambda request_id, call: names.__setitem__(request_id, call.session_id),
        on_update=updates.append,
    )
    return driver, recorder.records, updates


def contents(driver):
    """Returns what the engine, the device and the clock are left with, in a form that compares."""
    state, executor = driver.state, driver.executor
    nodes = {
        number: node._replace(
            page_ids=node.page_ids.tolist(),
            tiers=node.tiers.tolist(),
            owners=None if node.owners is None else node.owners.tolist(),
            moving=None if node.moving is None else node.moving.tolist(),
            copies=None if node.copies is None else node.copies.tolist(),
        )
        for number, node in state.cache.nodes.items()
    }
    cache = dataclasses.replace(state.cache, nodes=None, device=None, host=None)
    pools = [list(pool.free_ids()) for pool in (state.cache.device, state.cache.host)]
    rest = dataclasses.replace(state, cache=cache)
    return nodes, pools, rest, executor.clock.now_s, executor.free_s, executor.busy_s, executor.moves


@pytest.mark.parametrize(
    ("policy", "scheduler", "overlap"),
    [(policy, scheduler, True) for policy in ("sglang", "penelope") for scheduler in SCHEDULERS]
    + [("vllm", "lpm", True), ("penelope", "lpm", False), ("sglang", "lpm-cost", False)],
)
def test_counted_and_planned_steps_leave_the_same(policy, scheduler, overlap):
    options = SynthesisOptions(sessions=6, turns=6, scale=32, context=1600, seed=3)
    sessions = [cut_session(session, max_delay_s=5.0) for session in synthesize(options)]
    engine_config = config(policy, scheduler=scheduler, max_wait_s=0.7)
    counted, records, updates = simulate(engine_config, sessions, 5, overlap=overlap, count_runs=True)
    planned, records_2, updates_2 = simulate(engine_config, sessions, 5, overlap=overlap, count_runs=False)
    assert counted.counted_steps > planned.state.counters.steps / 3 and planned.counted_steps == 0
    assert planned.state.counters.evicted_pages > 50
    assert records == records_2
    assert updates == updates_2
    assert contents(counted) == contents(planned)
    check_cache(counted.state.cache)


@pytest.mark.parametrize("prefetch_tokens", [0, 64])
@pytest.mark.parametrize("policy", ["sglang", "penelope"])
def test_two_tiers_too(policy, prefetch_tokens):
    sessions = [long_replies(name) for name in "abcde"]
    engine_config = config(policy, device_tokens=1600, host_tokens=960, swap_tokens=32, prefetch_tokens=prefetch_tokens)
    counted, records, updates = simulate(engine_config, sessions, 5, overlap=True, count_runs=True)
    planned, records_2, updates_2 = simulate(engine_config, sessions, 5, overlap=True, count_runs=False)
    assert counted.counted_steps > planned.state.counters.steps / 4
    assert planned.state.counters.moved_pages > 50 and planned.state.counters.evicted_pages > 10
    assert records == records_2 and updates == updates_2
    assert contents(counted) == contents(planned)
    check_cache(counted.state.cache)


def long_replies(name, num_turns=2):
    """A session of long replies, whose decodes others have to wait for."""
    turns = []
    for index in range(num_turns):
        keep = turns[-1].history_len if turns else 0
        new = (Piece(f"{name}/{index}", 0, 40 if keep else 400),)
        turns.append(Turn(base=index - 1, keep=keep, new=new, output_len=120, delay_s=0.01))
    return Session(session_id=name, turns=tuple(turns))


@pytest.mark.parametrize("policy", ["sglang", "penelope"])
def test_runs_are_counted_while_requests_wait(policy, monkeypatch):
    """The pool holds two requests: the others wait, are stamped at each round, and the stamps come out the same."""
    counted_steps = RunningDriver._counted
    ahead = []

    def watched(self, num_steps):
        ahead.append((len(self.state.waiting), num_steps))
        return counted_steps(self, num_steps)

    monkeypatch.setattr(RunningDriver, "_counted", watched)
    sessions = [long_replies(name) for name in "abcde"]
    engine_config = config(policy, device_tokens=1600)
    counted, records, _ = simulate(engine_config, sessions, 5, overlap=True, count_runs=True)
    planned, records_2, _ = simulate(engine_config, sessions, 5, overlap=True, count_runs=False)
    assert sum(steps for waiting, steps in ahead if waiting) > 150
    assert planned.state.counters.evicted_pages > 20
    assert records == records_2 and contents(counted) == contents(planned)


def test_scaled_steps_are_counted_too():
    sessions = synthesize(SynthesisOptions(sessions=4, turns=5, scale=32, context=1600, seed=2))
    counted, records, _ = simulate(config("penelope"), sessions, 4, overlap=True, count_runs=True, scale=4)
    planned, records_2, _ = simulate(config("penelope"), sessions, 4, overlap=True, count_runs=False, scale=4)
    assert counted.counted_steps > 100
    assert records == records_2 and contents(counted) == contents(planned)


def test_the_counted_tokens_are_those_that_were_sampled():
    sessions = synthesize(SynthesisOptions(sessions=2, turns=2, scale=32, context=1600, seed=4))
    driver, _, updates = simulate(config("penelope"), sessions, 2, overlap=True, count_runs=True)
    tokens = {}
    for update in updates:
        if hasattr(update, "token"):
            tokens.setdefault(update.request_id, []).append((update.position, update.token))
    for request_id, sampled in tokens.items():
        positions = [position for position, _ in sampled]
        assert positions == list(range(positions[0], positions[0] + len(positions)))
        wanted = driver.executor.tokens(driver.executor.session_of(request_id), positions[0], positions[-1] + 1)
        np.testing.assert_array_equal([token for _, token in sampled], wanted)


def test_nothing_is_counted_without_a_step_before():
    driver = RunningDriver(
        config("penelope"),
        CostExecutor(StepTimer(TOY, profile_named("toy")), page_size=16, clock=VirtualClock()),
        next_arrival_s=lambda: None,
    )
    assert driver.step() == [] and driver.step() == [] and driver.counted_steps == 0
