"""Each thing that can go wrong with moves, in engine, loop and executor: nothing is lost, nothing leaks, same replies."""

import dataclasses
import functools

import pytest
from test_driver import CONFIG
from test_moves_end_to_end import executor_of, replies_of

from penelope_jax.config import POLICIES
from penelope_jax.driver import Driver
from penelope_jax.invariants import check_cache, check_idle
from penelope_jax.transfer_faults import TransferFaults

SEED = 1
LARGE = dataclasses.replace(CONFIG, max_context=96, max_step_segments=6, max_running=4, device_tokens=3200)
TIERS = dataclasses.replace(
    LARGE, device_tokens=4 * 30, host_tokens=4 * 24, swap_tokens=8, prefetch_tokens=16, output_reserve=4
)
ALWAYS, SOMETIMES = 1.0, 0.2


FAULTS = {
    "none": (TransferFaults(), {}, False),
    "no memory on the host, ever": (TransferFaults(fail_starts=ALWAYS), {}, False),
    "no memory at times": (TransferFaults(fail_starts=SOMETIMES), {}, False),
    "no demotion arrives": (TransferFaults(fail_demotions=ALWAYS), {}, False),
    "no load arrives": (TransferFaults(fail_loads=ALWAYS), {}, False),
    "copies fail at times": (TransferFaults(fail_loads=SOMETIMES, fail_demotions=SOMETIMES), {}, False),
    "copies are slow": (TransferFaults(delay_polls=25), {}, False),
    "copies are slow in time": (TransferFaults(delay_s=0.01), {}, False),
    "no host": (TransferFaults(), {"host_tokens": 0}, False),
    "a host of one page": (TransferFaults(delay_polls=3), {"host_tokens": 4}, False),
    "a swap buffer of one page": (TransferFaults(delay_polls=3), {"swap_tokens": 4}, False),
    "two pages move at once": (TransferFaults(delay_polls=3), {"max_moving_tokens": 8, "swap_tokens": 4}, False),
    "aborts and flushes with moves under way": (TransferFaults(delay_polls=25), {}, True),
    "all": (
        TransferFaults(fail_starts=0.1, fail_loads=0.1, fail_demotions=0.1, delay_polls=9),
        {"swap_tokens": 4},
        True,
    ),
}
LONG = pytest.param("penelope", 14, marks=pytest.mark.slow), pytest.param("sglang", 14, marks=pytest.mark.slow)


@functools.cache
def expected(num_turns: int):
    """The replies of a pool that holds everything, to requests that nobody disturbs."""
    driver = Driver(LARGE, executor_of(LARGE, None, (1, 1)))
    return replies_of(driver, SEED, disturbed=False, num_turns=num_turns)


@pytest.mark.parametrize(("policy", "num_turns"), [("penelope", 7), *LONG])
@pytest.mark.parametrize("fault", FAULTS)
def test_no_fault_changes_a_reply(fault, policy, num_turns):
    faults, changes, disturbed = FAULTS[fault]
    config = dataclasses.replace(TIERS, policy=POLICIES[policy], **changes)
    executor = executor_of(config, faults, (1, 1))
    replies = expected(num_turns)
    compiled = executor.num_compilations
    driver = Driver(config, executor, overlap=disturbed)
    assert replies_of(driver, SEED, disturbed=disturbed, num_turns=num_turns) == replies
    assert executor.num_compilations == compiled and executor.num_moving_pages == 0
    counters, stats = driver.state.counters, executor.transfer_stats
    if not config.host_tokens:
        assert counters.moved_pages == 0 and len(executor.host_pages) == 0
    elif faults.fail_starts == ALWAYS or faults.fail_demotions == ALWAYS:
        assert counters.demoted_pages == counters.lost_pages > 0 and counters.loaded_pages == 0
        assert stats.demoted_pages == stats.loaded_pages == 0 and len(executor.host_pages) == 0
    elif faults.fail_loads == ALWAYS:
        assert counters.loaded_pages == counters.lost_pages > 0 and stats.loaded_pages == 0
    elif not disturbed:
        assert counters.demoted_pages > 0 and (stats.failed_moves > 0) == (counters.lost_pages > 0)
        assert stats.loaded_pages > 0
    # Nothing leaks: without requests every page of both tiers can be free again.
    check_idle(driver.state.cache)
    driver.flush()
    check_cache(driver.state.cache)
    cache = driver.state.cache
    assert cache.num_resident == 0 and not cache.moves and not cache.pins
    assert cache.device.num_free == config.num_device_pages
    assert cache.host.num_free == config.num_host_pages + config.num_swap_pages
