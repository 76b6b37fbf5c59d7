"""Random events against the engine with two tiers (tiered_world.py): moves end late, in any order, or fail."""

import random
from collections import Counter
from typing import ClassVar

import hypothesis.strategies as st
import pytest
import seeded_machines
from engine_settings import hashed_sampler
from hypothesis.stateful import initialize, precondition, rule
from test_engine_machine import EngineMachine, configs, seeds
from tiered_world import TieredWorld, with_host

from penelope_jax import tiers
from penelope_jax.config import EngineConfig
from penelope_jax.pages import NO_PAGE
from penelope_jax.planning import _Planner
from penelope_jax.radix_tree import LEAVING
from penelope_jax.segments import SamplingParams

MIN_OPERATIONS = 20_000


@st.composite
def tiered_configs(draw: st.DrawFn):
    config = draw(configs())
    return with_host(
        config,
        draw(st.sampled_from([1, 2, 4, 8, 16, 40])),
        draw(st.sampled_from([1, 1, 2, 4])),
        prefetch_tokens=draw(st.sampled_from([0, 1, 2, 8])) * config.page_size,
        max_moving_tokens=draw(st.sampled_from([0, 2, 3, 8])) * config.page_size,
        load_units=float(draw(st.sampled_from([0, 0, 0, 40 * config.page_size]))),
    )


class TieredMachine(EngineMachine):
    """The engine's machine, with moves."""

    totals: ClassVar[Counter[str]] = Counter()

    @initialize(config=tiered_configs())
    def start(self, config):
        self.world = TieredWorld(config)
        self.size = config.page_size
        self.next_token = 100

    @precondition(lambda self: self.world.moves)
    @rule(data=st.data())
    def end_a_move(self, data: st.DataObject):
        self.world.end_move(data.draw(st.sampled_from(sorted(self.world.moves))))
        self.count()

    @precondition(lambda self: self.world.moves)
    @rule()
    def end_all_moves(self):
        self.world.end_moves()
        self.count()

    @precondition(lambda self: len(self.world.moves) > 2)
    @rule(data=st.data())
    def a_move_fails(self, data: st.DataObject):
        self.world.end_move(data.draw(st.sampled_from(sorted(self.world.moves))), fails=True)
        self.count()

    @rule(seed=seeds, rounds=st.integers(1, 6))
    def live(self, seed: int, rounds: int):
        """Steps, with moves that end one step later."""
        for _ in range(rounds):
            moves = list(self.world.moves)
            self.world.step(self.sampler(seed))
            for move_id in moves:
                if move_id in self.world.moves:
                    self.world.end_move(move_id)
            self.count()

    @rule(pages=st.integers(1, 3), sessions=st.integers(2, 4), turns=st.integers(2, 3), seed=seeds, fails=st.booleans())
    def take_turns(self, pages: int, sessions: int, turns: int, seed: int, fails: bool):
        """Sessions that share a page go on one after the other; together they are more than the device holds."""
        prompts = []
        for _ in range(sessions):
            self.next_token += 1
            prompts.append([0] * self.size + [self.next_token] * (pages * self.size))
        for turn in range(turns):
            for prompt in prompts:
                if len(prompt) + 2 * self.size < self.world.room:
                    self.submit(prompt + [turn], SamplingParams(max_tokens=1), "")
                    prompt += [turn] * self.size
                    self.live(seed, 4)
            if fails and self.world.moves:
                self.world.end_move(min(self.world.moves), fails=True)

    def tally(self) -> None:
        super().tally()
        counters = self.world.state.counters
        for name in ("demoted_pages", "loaded_pages", "prefetched_pages", "swapped_loads", "lost_pages"):
            self.totals[name] += getattr(counters, name)


def run(seeds_: range, **options: bool) -> None:
    TieredMachine.totals.clear()
    seeded_machines.run(TieredMachine, seeds_, **options)


def test_two_tiers_keep_the_engines_promises():
    happened = ("demoted_pages", "loaded_pages", "prefetched_pages", "swapped_loads", "lost_pages", "retractions")
    totals = TieredMachine.totals
    totals.clear()
    for seed in range(40):
        seeded_machines.run(TieredMachine, range(seed, seed + 1))
        if totals["operations"] >= MIN_OPERATIONS and all(totals[name] >= 10 for name in happened):
            return
    raise AssertionError(totals)


@pytest.mark.slow
def test_two_tiers_keep_the_engines_promises_at_length():
    for seed in range(2_000, 2_600):
        seeded_machines.run(TieredMachine, range(seed, seed + 1))
        if TieredMachine.totals["operations"] >= 10 * MIN_OPERATIONS:
            return
    raise AssertionError(TieredMachine.totals)


# Claims that are too low, and who is sent back then.


def crowded(seed: int) -> TieredWorld:
    """Returns a world in which four histories that share two pages take turns in a pool that holds one or two."""
    random_ = random.Random(seed)
    config = EngineConfig(device_tokens=10, page_size=1, max_running=4, max_step_tokens=2, output_reserve=1)
    world = TieredWorld(with_host(config, 16))
    prompts = [[0] * 2 + [10 * number + position for position in range(7)] for number in range(1, 5)]
    for _ in range(24):
        world.submit(random_.choice(prompts)[: random_.choice([5, 8])], SamplingParams(max_tokens=1))
        for _ in range(random_.randint(0, 3)):
            world.step(hashed_sampler(0))
    return world


def let_everybody_in(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Puts claims out of force; returns a list that grows each time nothing can go on."""
    times: list[int] = []
    real = _Planner.stuck

    def stuck(planner: _Planner) -> bool:
        if real(planner):
            times.append(planner.state.next_step)
        return real(planner)

    monkeypatch.setattr("penelope_jax.planning.have_room", lambda cache, config, running: True)
    monkeypatch.setattr(_Planner, "stuck", stuck)
    return times


def test_when_nothing_can_go_on_the_last_one_goes_back(monkeypatch: pytest.MonkeyPatch):
    times = let_everybody_in(monkeypatch)
    for seed in range(8):
        crowded(seed).drain(hashed_sampler(0))
    assert len(times) >= 10


def test_control_without_it_requests_wait_for_ever(monkeypatch: pytest.MonkeyPatch):
    let_everybody_in(monkeypatch)
    monkeypatch.setattr(_Planner, "stuck", lambda planner: False)
    with pytest.raises(AssertionError, match="requests are left"):
        for seed in range(8):
            crowded(seed).drain(hashed_sampler(0))


def test_control_a_claim_without_pages_that_are_leaving_is_noticed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("penelope_jax.tiers.to_load", tiers.loadable)
    with pytest.raises(AssertionError, match=r"request \d+ claims \d+ of \d+"):
        run(range(5, 25), shrink=False)


def test_a_full_hit_behind_a_page_that_is_on_its_way_to_the_host():
    """The second of two requests finds its last page computed by the first, and the one before still on the move."""

    def always(request_id: int, position: int) -> int:
        return 1

    world = TieredWorld(with_host(EngineConfig(device_tokens=6, page_size=1, max_step_tokens=4, output_reserve=0), 4))
    for prompt in ([1], [2, 3, 4, 5], [6, 7, 8]):  # the last one sends the first to the host
        world.submit(prompt, SamplingParams(max_tokens=1))
        while world.live:
            assert world.plan(always) is not None
            world.done()
    (node,) = (node for node in world.state.cache.nodes.values() if node.tokens == b"\1\0\0\0")
    assert node.moving is not None and node.moving.tolist() == [LEAVING] and world.moves
    first = world.submit([1], SamplingParams(max_tokens=2))
    second = world.submit([1, 1], SamplingParams(max_tokens=1))
    assert first is not None and second is not None
    while not world.histories[first].reason:
        assert world.plan(always) is not None
        world.done()
    world.plan(always)
    (waits,) = world.state.running
    assert (waits.request_id, waits.path_stop, waits.page_table.tolist()) == (second, 1, [NO_PAGE])
    world.plan(always)
    world.drain(always)
    assert world.histories[second].reason == "length"
