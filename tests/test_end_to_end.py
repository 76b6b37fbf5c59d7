"""The whole engine on a small model: same answers whatever the cache forgets, and nothing compiles after warm-up."""

import numpy as np
import pytest

from penelope_jax.config import EngineConfig, policy_named
from penelope_jax.driver import Driver
from penelope_jax.events import Finished, Sampled, Scored
from penelope_jax.executor import JaxExecutor
from penelope_jax.invariants import check_cache
from penelope_jax.models.registry import load_model
from penelope_jax.segments import SamplingParams
from penelope_jax.state import private_page_ids

PAGE = 16
CONTEXT = 512
NUM_SESSIONS, NUM_TURNS = 5, 8


def engine_config(model, num_pages, policy="penelope", **changes):
    return EngineConfig(
        device_tokens=num_pages * PAGE,
        page_size=PAGE,
        policy=policy_named(policy),
        max_context=CONTEXT,
        max_running=4,
        max_step_tokens=128,
        max_step_segments=8,
        output_reserve=8,
        linear_cost=model.config.linear_cost,
        vocab_size=model.config.vocab_size,
        **changes,
    )


@pytest.fixture(scope="module")
def model():
    return load_model("random:tiny")


@pytest.fixture(scope="module")
def executors(model):
    """Executors by pool size, warmed up; a pool may hold anything from an earlier test."""
    made = {}

    def executor(num_pages):
        if num_pages not in made:
            made[num_pages] = JaxExecutor(
                model.config,
                model.params,
                num_pages=num_pages,
                page_size=PAGE,
                max_context=CONTEXT,
                max_segments=8,
                max_step_tokens=128,
                deterministic=True,
                scoring=True,
            )
            made[num_pages].warm_up()
        return made[num_pages]

    return executor


def turns(seed=0):
    """Returns, per session, the new tokens of each turn, and how the reply is sampled."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, 256, 40).tolist()
    sessions = []
    for session in range(NUM_SESSIONS):
        first = shared + rng.integers(0, 256, int(rng.integers(20, 90))).tolist()
        later = [rng.integers(0, 256, int(rng.integers(5, 40))).tolist() for _ in range(NUM_TURNS - 1)]
        sampling = [
            SamplingParams(
                max_tokens=int(rng.integers(2, 14)),
                temperature=float(rng.choice([0.0, 0.8])),
                top_p=0.9,
                seed=session,
                prompt_logprobs_from=0 if rng.random() < 0.5 else None,
            )
            for _ in range(NUM_TURNS)
        ]
        sessions.append((first, later, sampling))
    return sessions


def play(driver, sessions):
    """Plays all sessions, a new turn in random order; returns outputs by (session, turn), and the metrics."""
    rng = np.random.default_rng(1)
    history = [list(first) for first, _, _ in sessions]
    turn = [0] * len(sessions)
    live, outputs, metrics = {}, {}, {}
    while live or any(number < NUM_TURNS for number in turn):
        for session, (_, later, sampling) in enumerate(sessions):
            if turn[session] < NUM_TURNS and session not in [key[0] for key in live.values()] and rng.random() < 0.4:
                if turn[session]:
                    history[session] += later[turn[session] - 1]
                request_id = driver.submit(history[session], sampling[turn[session]])
                live[request_id] = (session, turn[session])
                outputs[live[request_id]] = ([], [], [])
                turn[session] += 1
        if not live:
            continue
        for update in driver.step():
            match update:
                case Sampled():
                    outputs[live[update.request_id]][0].append(update.token)
                    outputs[live[update.request_id]][1].append(update.logprob)
                case Scored():
                    outputs[live[update.request_id]][2].extend(update.logprobs.tolist())
                case Finished():
                    key = live.pop(update.request_id)
                    metrics[key] = update.metrics
                    history[key[0]] += outputs[key][0]
        check_cache(driver.state.cache, private_page_ids(driver.state))
    return outputs, metrics


@pytest.fixture(scope="module")
def endless(model, executors):
    """What a cache that never evicts answers."""
    driver = Driver(engine_config(model, 200), executors(200))
    outputs, _ = play(driver, turns())
    assert driver.state.counters.evicted_pages == 0, "the reference cache evicted"
    return outputs


@pytest.mark.parametrize("policy", ["sglang", "vllm", "leaf-head", "leaf-head-node", "front-node", "penelope"])
def test_small_cache_gives_the_same_answers_bit_by_bit(model, executors, endless, policy):
    driver = Driver(engine_config(model, 40, policy), executors(40))
    outputs, metrics = play(driver, turns())
    assert driver.state.counters.evicted_pages > 50
    if policy == "penelope":
        assert sum(entry.refilled > 0 for entry in metrics.values()) >= 5
        assert driver.state.counters.phantom_segments >= 5
    assert outputs == endless


def test_answers_depend_on_the_cached_values(model, executors, endless):
    """Control: one bit of one cached value changed must show."""
    driver = Driver(engine_config(model, 200), executors(200))
    first, _, _ = turns()[0]
    prompt_logprobs = SamplingParams(max_tokens=1, prompt_logprobs_from=0)
    clean = driver.generate(first, prompt_logprobs)
    page = int(driver.state.cache.nodes[next(iter(driver.state.cache.pins.values()), 1)].page_ids[0])
    executors(200).flip_bit(page, layer=0, token=0)
    again = driver.generate(first, prompt_logprobs)
    assert again.metrics.device_hit > 0
    assert (clean.prompt_logprobs != again.prompt_logprobs).any()


def test_a_replay_of_500_steps_compiles_nothing(model, executors):
    executor = executors(40)
    before = executor.num_compilations
    driver = Driver(engine_config(model, 40), executor)
    seed = 2
    while driver.state.counters.steps < 500:
        play(driver, turns(seed))
        seed += 1
    assert driver.state.counters.phantom_segments > 0
    assert executor.num_compilations == before


@pytest.mark.parametrize("num_pages", [200, 40])
def test_overlap_gives_the_same_answers(model, executors, endless, num_pages):
    """A step is planned before the last one is back; tokens go from step to step on the device."""
    driver = Driver(engine_config(model, num_pages), executors(num_pages), overlap=True)
    outputs, _ = play(driver, turns())
    assert outputs == endless
    assert driver.state.in_flight == ()
