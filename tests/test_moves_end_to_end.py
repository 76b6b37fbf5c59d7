"""Engine, loop and executor with tiny tiers, slow and failing moves, aborts and flushes: no reply changes."""

import dataclasses

import numpy as np
import pytest
from step_world import geometry
from test_driver import CONFIG

from penelope_jax.config import POLICIES, EngineConfig
from penelope_jax.driver import Driver
from penelope_jax.events import Sampled
from penelope_jax.executor import JaxExecutor
from penelope_jax.invariants import check_cache
from penelope_jax.models import random_weights
from penelope_jax.models.layers import device_mesh
from penelope_jax.segments import SamplingParams
from penelope_jax.state import private_page_ids
from penelope_jax.transfer_faults import TransferFaults

MODEL = dataclasses.replace(geometry(8, 4, 8, 32), vocab_size=100)
NUM_SESSIONS, NUM_TURNS = 5, 14


def executor_of(config: EngineConfig, faults: TransferFaults | None, mesh: tuple[int, int]) -> JaxExecutor:
    bounded = config.host_tokens and not config.policy.inclusive  # whole nodes may be larger than the bound
    executor = JaxExecutor(
        MODEL,
        random_weights.random_params(MODEL, device_mesh(*mesh)),
        num_pages=config.num_device_pages,
        page_size=config.page_size,
        max_context=config.max_context,
        max_segments=config.max_step_segments,
        max_step_tokens=config.max_step_tokens,
        token_buckets=(config.max_step_tokens,),
        deterministic=True,
        num_host_pages=config.num_host_pages + config.num_swap_pages,
        max_moving_pages=config.max_moving_pages if bounded else None,
        faults=faults,
    )
    executor.warm_up()
    return executor


def replies_of(
    driver: Driver, seed: int, *, disturbed: bool, num_turns: int = NUM_TURNS
) -> dict[tuple[int, int], tuple[int, ...]]:
    """Plays sessions; a disturbed run also aborts side requests, and flushes, with moves under way.

    Returns:
        The replies to all requests that nobody aborts, by turn and session.
    """
    random = np.random.default_rng(seed)
    histories = [[*range(12), 50 + session] for session in range(NUM_SESSIONS)]
    replies = {}
    for turn in range(num_turns):
        ids: dict[int, int] = {}
        side: list[int] = []
        for session, history in enumerate(histories):
            if random.random() < 0.8:
                sampling = SamplingParams(max_tokens=int(random.integers(1, 5)))
                ids[driver.submit(history, sampling)] = session
            if random.random() < 0.2:
                prompt = history + [int(random.integers(0, 90))] * 8
                side.append(driver.submit(prompt, SamplingParams(max_tokens=6)))
        outputs: dict[int, list[int]] = {}
        stop_at, flush = int(random.integers(0, 6)), random.random() < 0.1
        num_steps = 0
        while not driver.idle:
            for update in driver.step():
                if isinstance(update, Sampled):
                    outputs.setdefault(update.request_id, []).append(update.token)
            num_steps += 1
            if disturbed and num_steps == stop_at:
                for request_id in side:
                    driver.abort(request_id)
                if flush:
                    driver.flush()
            check_cache(driver.state.cache, private_page_ids(driver.state))
        for request_id, session in ids.items():
            replies[turn, session] = tuple(outputs[request_id])
            histories[session] += [*outputs[request_id], *random.integers(0, 90, 3).tolist()]
            if len(histories[session]) > 80:
                histories[session] = [*range(12), 50 + session, turn]
    driver.drain_moves()
    check_cache(driver.state.cache)
    return replies


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(1, 1), (1, 4)])
@pytest.mark.parametrize("seed", range(2))
def test_replies_are_those_of_one_large_pool(seed, mesh):
    large = dataclasses.replace(CONFIG, max_context=96, max_step_segments=6, max_running=4, device_tokens=3200)
    expected = replies_of(Driver(large, executor_of(large, None, mesh)), seed, disturbed=False)
    assert len(expected) > 40
    num_loaded = num_swapped = num_failed = 0
    for name, policy in POLICIES.items():
        random = np.random.default_rng([seed, list(POLICIES).index(name)])
        config = dataclasses.replace(
            large,
            device_tokens=4 * int(random.integers(26, 40)),
            host_tokens=4 * int(random.integers(2, 40)),
            swap_tokens=4 * int(random.choice([1, 2, 4])),
            prefetch_tokens=4 * int(random.integers(0, 6)),
            output_reserve=4,
            policy=policy,
        )
        faults = TransferFaults(
            seed=seed,
            fail_starts=float(random.choice([0, 0.1])),
            fail_loads=float(random.choice([0, 0.2])),
            fail_demotions=float(random.choice([0, 0.2])),
            delay_polls=int(random.integers(0, 8)),
        )
        executor = executor_of(config, faults, mesh)
        compiled = executor.num_compilations
        driver = Driver(config, executor, overlap=bool(random.integers(2)))
        assert replies_of(driver, seed, disturbed=True) == expected, (name, config, faults)
        assert executor.num_compilations == compiled and executor.num_moving_pages == 0
        num_loaded += executor.transfer_stats.loaded_pages
        num_failed += executor.transfer_stats.failed_moves
        num_swapped += driver.state.counters.swapped_loads
    assert num_loaded > 100 and num_swapped > 10 and num_failed > 5
