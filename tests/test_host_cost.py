"""A guard against accidental slowness of the cache: limits ten times the target, on a smaller tree.

`python -m penelope_jax.experiments.host_cost` measures the real one.
"""

import pytest

from penelope_jax.experiments import host_cost


@pytest.fixture(scope="module")
def measured() -> dict:
    return host_cost.measure(num_sessions=8, num_turns=10, num_tokens=118_000)


def test_match_insert_and_eviction_stay_cheap(measured: dict):
    assert measured["pages"] == 8 * (118_000 // 64) - 7 * (15_600 // 64)
    medians = {name: times["p50"] for name, times in measured["ms"].items()}
    assert medians["match + insert"] <= 20.0, medians
    assert medians["pin + unpin"] <= 20.0, medians
    assert max(medians[f"evict 480 pages, {name}"] for name in ("sglang", "vllm", "penelope")) <= 100.0, medians


def test_planning_with_two_tiers_stays_cheap():
    seconds = host_cost.measure_tiers(num_requests=8, num_host_pages=500, num_tokens=6_000, num_steps=20)
    medians = {name: times["p50"] for name, times in host_cost.milliseconds(seconds).items()}
    assert list(medians) == [f"{name}, two tiers, 8 x 6,000 tokens, 500 host pages" for name in ("plan", "apply")]
    assert max(medians.values()) <= 20.0, medians


def test_an_operation_does_not_cost_more_because_there_are_more_histories():
    few, many = (host_cost.measure_leaves(number, num_tokens=512)["ms"] for number in (20, 2_000))
    for name in ("match", "touch", "pin", "unpin", "evict 1 page"):
        assert many[name] <= 1.0 + 10 * few[name], (name, few[name], many[name])
