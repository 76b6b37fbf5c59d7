"""Which waiting request runs next.

`lpm` runs the longest match first, as the paper's comparisons do: no ageing, ties by arrival; what is on the host counts
as well, unless the policy says otherwise. `lpm-cost` counts what a hit saves in units instead of tokens, since two equal
hits differ once histories have holes, less what loading costs, and lets what has waited longer than `max_wait_s` go
first. `fcfs` is by arrival. Retracted requests are before all others in each of them.
"""

import math
from collections.abc import Callable

import numpy as np

from penelope_jax import cost
from penelope_jax.config import EngineConfig
from penelope_jax.pages import Tier
from penelope_jax.radix_tree import Match
from penelope_jax.state import EngineState, Request

_Key = tuple[float, int]
_NOTHING = Match((), 0, (), np.empty(0, np.int32))


def _hit_tokens(state: EngineState, request: Request, found: Match) -> _Key:
    counted = (Tier.DEVICE, Tier.HOST) if state.config.policy.count_host_hits else (Tier.DEVICE,)
    hits = sum(span.stop - span.start for span in found.spans if span.tier in counted)
    return -hits, request.arrival


def _saved_units(state: EngineState, request: Request, found: Match) -> _Key:
    if state.now_s - request.arrival_s > state.config.max_wait_s:
        return -float("inf"), request.arrival
    config = state.config
    saved = 0.0
    for span in found.spans:
        if span.tier is Tier.DEVICE:
            saved += cost.units(span.start, span.stop, config.linear_cost)
        elif span.tier is Tier.HOST and config.policy.count_host_hits:
            saved += _saved_by_loading(config, span.start, span.stop)
    return -saved, request.arrival


def _saved_by_loading(config: EngineConfig, start: int, stop: int) -> float:
    """Returns the units that loading saves, of the pages of a span that cost more to compute than to load."""
    size = config.page_size
    # A page at position p costs size * (c + p + (size - 1) / 2) units.
    cheap_until = config.load_units / size - config.linear_cost - (size - 1) / 2
    start += max(0, math.ceil((cheap_until - start) / size)) * size
    if start >= stop:
        return 0.0
    return cost.units(start, stop, config.linear_cost) - (stop - start) // size * config.load_units


def _arrival(state: EngineState, request: Request, found: Match) -> _Key:
    return 0.0, request.arrival


_KEYS: dict[str, Callable[[EngineState, Request, Match], _Key]] = {
    "lpm": _hit_tokens,
    "lpm-cost": _saved_units,
    "fcfs": _arrival,
}


def needs_match(scheduler: str) -> bool:
    """Whether the order depends on what the cache holds."""
    return scheduler != "fcfs"


def ordered(state: EngineState, matches: dict[int, Match]) -> tuple[Request, ...]:
    """Returns the waiting requests, next one first.

    Args:
        state: the engine.
        matches: request id -> what the cache holds of it; may be empty under `fcfs`.
    """
    key = _KEYS[state.config.scheduler]

    def order(request: Request):
        found = matches.get(request.request_id, _NOTHING)
        return request.num_retractions == 0, *key(state, request, found)

    return tuple(sorted(state.waiting, key=order))
