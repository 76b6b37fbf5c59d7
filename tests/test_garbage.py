"""Serving leaves no cyclic garbage, so it need not be looked for often."""

import gc

import pytest

from penelope_jax.config import POLICIES, EngineConfig
from penelope_jax.driver import Driver, HashExecutor
from penelope_jax.experiments.closed_loop import ClosedLoop, StepClock, play
from penelope_jax.experiments.synthesize import SynthesisOptions, synthesize
from penelope_jax.garbage import seldom_collected
from penelope_jax.metrics import Recorder


def served(policy: str, *, leak: bool = False) -> int:
    """Returns how many objects a run with both tiers full left in cycles."""
    sessions = synthesize(SynthesisOptions(sessions=6, turns=12, scale=64, context=800, seed=1))
    config = EngineConfig(
        device_tokens=1024,
        host_tokens=128,
        swap_tokens=64,
        page_size=8,
        max_context=1024,
        max_step_tokens=256,
        max_running=4,
        vocab_size=512,
        policy=POLICIES[policy],
    )
    clock = StepClock()
    driver = Driver(config, HashExecutor(512, move_delay=2), clock=clock)
    loop, recorder = ClosedLoop(sessions, 4, 512), Recorder(config.page_size, config.linear_cost)
    gc.disable()
    gc.freeze()  # what is there already is not looked at: with JAX imported that takes a second
    try:
        assert play(driver, loop, recorder, clock, on_update=lambda _: cycle() if leak else None)
        counters = driver.state.counters
        assert counters.evicted_pages and counters.loaded_pages
        return gc.collect()
    finally:
        gc.unfreeze()
        gc.enable()


def cycle() -> None:
    itself: list = []
    itself.append(itself)


@pytest.mark.parametrize("policy", ["penelope", "sglang"])
def test_serving_leaves_no_cycles(policy):
    served(policy)  # what is imported on first use does
    assert served(policy) == 0
    assert served(policy, leak=True) > 0, "a control: a list that holds itself is found"


def test_the_collector_is_as_before_afterwards():
    before = gc.get_threshold()
    try:
        gc.set_threshold(700, 10, 11)
        with pytest.raises(KeyError), seldom_collected():
            assert gc.get_threshold() == (10_000, 10, 11)
            raise KeyError
        assert gc.get_threshold() == (700, 10, 11)
        for unlike in ((50_000, 5, 5), (0, 10, 10)):  # seldomer already, or never
            gc.set_threshold(*unlike)
            with seldom_collected():
                assert gc.get_threshold() == unlike
    finally:
        gc.set_threshold(*before)
