"""A move never evicts (design rule 11): what loads and prefetches find resident stays so, in the tier or the other one.

And a plan finally evicts what it says: what was resident before it is resident after it, or among its final victims.
"""

import dataclasses
import random
from collections import Counter
from typing import ClassVar

import numpy as np
import pytest
from engine_settings import Sampler, config_of, hashed_sampler
from naive_cache import Key
from test_cache_machine import content_of
from test_tiered_cache_machine import ALL, Run
from tiered_world import TieredWorld, with_host

from penelope_jax import eviction, lookup, tiers
from penelope_jax.config import EngineConfig, Policy, Unit
from penelope_jax.eviction import evict
from penelope_jax.invariants import check_cache
from penelope_jax.radix_tree import CacheState
from penelope_jax.room import Room
from penelope_jax.segments import SamplingParams, StepPlan
from penelope_jax.state import Request


def config_for(cache: CacheState, policy: Policy, chance: random.Random) -> EngineConfig:
    size = cache.page_size
    return EngineConfig(
        device_tokens=cache.device.num_pages * size,
        host_tokens=cache.host_capacity * size,
        swap_tokens=(cache.host.num_pages - cache.host_capacity) * size,
        prefetch_tokens=chance.choice([0, 1, 2, 4]) * size,
        max_moving_tokens=chance.choice([0, 2, 3, 8]) * size,
        page_size=size,
        policy=policy,
        max_step_tokens=64 * size,
    )


def request_of(run: Run, request_id: int) -> Request:
    """Returns a waiting request for a history that has pages on the host, if there is one."""
    waiting = sorted(run.model.on_host)
    namespace, data = run.random.choice(waiting) if waiting else ("", b"\0\0\0\0")
    prompt = np.append(np.frombuffer(data, np.int32), np.int32(7))
    return Request(
        request_id=request_id,
        session_id="",
        namespace=namespace,
        arrival=request_id,
        arrival_s=0.0,
        prompt=prompt,
        original_len=len(prompt),
        sampling=SamplingParams(max_tokens=1),
    )


def random_cache(seed: int) -> Run:
    """Returns a cache in which both tiers are about full and, mostly, nothing is pinned or moving."""
    run = Run(seed, ALL)
    for _ in range(20):
        run.random.choice([run.insert, run.pin, run.evict, run.demote, run.load, run.end])()
    for _ in range(run.random.randint(2, 6)):
        run.insert()
        if run.random.random() < 0.8:
            while run.held:
                run.leave()
            while run.model.flights:
                run.end()
    return run


@pytest.mark.parametrize("policy", ALL, ids=lambda policy: policy.name)
def test_loads_and_prefetches_evict_nothing(policy):
    totals: Counter[str] = Counter()
    for seed in range(50):
        run = random_cache(seed)
        config = config_for(run.cache, policy, run.random)
        room = Room(config, run.cache)
        before = set(content_of(run.cache).resident)
        for request_id in range(run.random.randint(0, 2)):
            request = request_of(run, request_id)
            found = lookup.match(room.cache, request.prompt, request.namespace)
            wanted = tiers.loadable(room.cache, found.node_ids, found.stop)
            wanted = min(wanted, run.random.randint(0, 8))
            assert room.load(request_id, found.node_ids, found.stop, wanted) <= wanted
        planned, loaded = set(room._demoted), room.tally.get("loaded_pages", 0)
        newest = run.cache.clock if run.random.random() < 0.5 else run.random.randint(0, run.cache.clock)
        room.prefetch(tuple(request_of(run, 10 + number) for number in range(3)), newest)
        ahead = room.tally.get("loaded_pages", 0) - loaded
        assert ahead == room.tally.get("prefetched_pages", 0) <= config.max_prefetch_pages
        for host_id in set(room._demoted) - planned:
            stamp = room.cache.nodes[room.cache.moving[host_id]].stamp
            assert stamp <= newest, "a prefetch takes the place of something newer"
        moves = room.start_moves()
        check_cache(room.cache)
        assert set(content_of(room.cache).resident) == before
        assert not room.evicted and not room.tally.get("evicted_pages", 0)
        bound = max(0, config.max_moving_pages - tiers.num_moving(run.cache))
        assert sum(len(move.host_ids) for move in moves) <= bound
        totals.update({name: room.tally.get(name, 0) for name in COUNTED})
    assert all(totals[name] >= 8 for name in COUNTED), totals


COUNTED = ("loaded_pages", "demoted_pages", "swapped_loads", "prefetched_pages")


@pytest.mark.parametrize("policy", ALL, ids=lambda policy: policy.name)
def test_room_for_new_pages_evicts_what_lacks_in_both_tiers_together(policy):
    num_evicted = num_demoted = 0
    for seed in range(100, 150):
        run = random_cache(seed)
        config = dataclasses.replace(config_for(run.cache, policy, run.random), max_moving_tokens=0)
        before = set(content_of(run.cache).resident)
        room = Room(config, run.cache)
        wanted, free = run.random.randint(1, 8), run.cache.device.num_free
        lacking = max(0, wanted - free - max(0, room._host_room()))
        _, possible = evict(run.cache, run.cache.num_resident, policy)
        page_ids = room.take(wanted)
        evicted = sum(span.stop - span.start for span in room.evicted) // run.page_size
        room.start_moves()
        check_cache(room.cache, page_ids if page_ids is not None else ())
        after = set(content_of(room.cache).resident)
        assert after <= before and len(before) - len(after) == evicted == room.tally.get("evicted_pages", 0)
        assert evicted >= min(lacking, possible.num_pages)
        if policy.unit is Unit.PAGE:
            assert evicted == min(lacking, possible.num_pages)
        num_evicted += evicted
        num_demoted += room.tally.get("demoted_pages", 0)
    assert num_evicted >= 20 and num_demoted >= 20, (num_evicted, num_demoted)


class Watched(TieredWorld):
    """Compares what is resident around every plan. `victims` are pages that eviction gave up while it was made."""

    victims: ClassVar[set[Key]] = set()
    totals: ClassVar[Counter[str]] = Counter()

    def plan(self, sampler: Sampler) -> StepPlan | None:
        self.victims.clear()
        before = set(content_of(self.state.cache).resident)
        counters = self.state.counters
        plan = super().plan(sampler)
        after = set(content_of(self.state.cache).resident)
        assert before - after <= self.victims, "a page is gone that is no final victim"
        num_evicted = self.state.counters.evicted_pages - counters.evicted_pages
        assert len(self.victims) == num_evicted, "victims are counted"
        if not self.victims:
            assert before <= after
        self.totals["plans"] += 1
        self.totals["that moved and evicted nothing"] += bool(plan and plan.moves and not num_evicted)
        self.totals["that did both"] += bool(plan and plan.moves and num_evicted)
        return plan


def play(seed: int, num_rounds: int) -> None:
    """Sessions that share a page and together are more than both tiers, or about as much, hold."""
    chance = random.Random(seed)
    config = with_host(
        config_of(4, chance.randint(6, 14), policy=chance.choice(ALL), max_running=3, output_reserve=4),
        chance.randint(1, 12),
        chance.choice([1, 1, 2, 4]),
        prefetch_tokens=4 * chance.choice([0, 1, 4]),
        max_moving_tokens=4 * chance.choice([0, 0, 2, 4]),
    )
    world = Watched(config)
    histories = [[0] * 4 + [session] * chance.randint(3, 12) for session in range(1, 6)]
    for _ in range(num_rounds):
        for history in chance.sample(histories, chance.randint(1, 3)):
            del history[max(4, world.room - 12) :]
            world.submit(history, SamplingParams(max_tokens=chance.randint(1, 5)))
            history.extend([chance.randint(0, 9)] * chance.randint(1, 5))
        while world.live:
            if world.flights and (len(world.flights) > 1 or chance.random() < 0.5):
                world.done()
            elif world.moves and chance.random() < 0.4:
                world.end_move(chance.choice(sorted(world.moves)), fails=chance.random() < 0.1)
            elif chance.random() < 0.03:
                world.abort(chance.choice(world.live).request_id)
            elif world.plan(hashed_sampler(seed)) is None and not world.flights and world.moves:
                world.end_move(min(world.moves))
    world.drain(hashed_sampler(seed))


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    def noted(cache: CacheState, num_pages: int, policy: Policy):
        after, done = evict(cache, num_pages, policy)
        Watched.victims.update(set(content_of(cache).resident) - set(content_of(after).resident))
        return after, done

    monkeypatch.setattr(eviction, "evict", noted)
    Watched.totals.clear()
    return Watched.totals


def test_a_plan_loses_nothing_but_its_final_victims(watched):
    for seed in range(30):
        play(seed, 6)
    assert watched["that moved and evicted nothing"] >= 80 and watched["that did both"] >= 30, watched


@pytest.mark.slow
def test_a_plan_loses_nothing_but_its_final_victims_at_length(watched):
    for seed in range(1_000, 1_400):
        play(seed, 10)


def test_control_a_load_that_evicts_is_found(monkeypatch, watched):
    def demote(self, num_pages: int, *, newest: int | None = None) -> int:
        self.cache, done = evict(self.cache, max(0, num_pages), self.config.policy)
        return done.num_pages

    monkeypatch.setattr(Room, "_demote", demote)
    with pytest.raises(AssertionError, match="no final victim"):
        for seed in range(24):
            play(seed, 6)
