"""Random events against the engine, on a pool that knows what it holds (engine_world.py); no old state may change."""

import dataclasses
from collections import Counter
from typing import ClassVar

import numpy as np
import pytest
import seeded_machines
from deep_copies import rendered
from engine_settings import Sampler, config_of, hashed_sampler
from engine_world import EngineWorld
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from request_history import History

from penelope_jax import leaving
from penelope_jax.config import POLICIES, SCHEDULERS, InsertUnit, Policy
from penelope_jax.lookup import match
from penelope_jax.pages import Tier
from penelope_jax.planning import _Planner
from penelope_jax.segments import SamplingParams, SegmentKind
from penelope_jax.state import EngineState, Request

MIN_OPERATIONS = 20_000  # events applied and steps planned
PHANTOM, REAL = SegmentKind.PHANTOM, SegmentKind.REAL
LETTERS = "ABXSCDEFGHIJYZ"
STOP = len(LETTERS)
VOCAB = 3  # sampled tokens are few, so that replies make shared pages too

salts = st.sampled_from(["", "", "", "tenant"])
openings = st.sampled_from(["SABCD", "SAEFGH", "SAEXY", "SIJA", "XYZABC", "ZCDEF", ""])
pieces = st.text("ABX", max_size=3)
tails = st.sampled_from([0, 0, 1, 2, -1])  # tokens behind the last whole page; -1: one less than a page
samplings = st.builds(
    SamplingParams,
    max_tokens=st.sampled_from([1, 1, 1, 2, 2, 3, 3, 4, 5, 6, 8, 8, 10, 13, 16, None]),
    stop_token_ids=st.sampled_from([(), (STOP,), (STOP, 1)]),
    min_tokens=st.sampled_from([0, 0, 0, 1]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.0]),
    top_logprobs=st.sampled_from([0, 0, 2]),
    prompt_logprobs_from=st.none() | st.sampled_from([0, 0, 1, 3, 9]),
)
seeds = st.integers(0, 5)


@st.composite
def configs(draw: st.DrawFn):
    page_size = draw(st.sampled_from([1, 2, 4, 4, 64]))
    policy: Policy = draw(st.sampled_from([*POLICIES.values(), *[POLICIES["penelope"]] * 4]))
    policy = dataclasses.replace(policy, insert_unit=draw(st.sampled_from(InsertUnit)))
    return config_of(
        page_size,
        draw(st.sampled_from([6, 9, 12, 14, 16, 20, 24])),
        policy=policy,
        scheduler=draw(st.sampled_from(SCHEDULERS)),
        max_running=draw(st.sampled_from([1, 2, 4, 4, 8])),
        max_step_tokens=draw(st.sampled_from([1, 2, 2, 3, 4, 8])) * page_size,
        max_step_segments=draw(st.sampled_from([1, 2, 4, 4, 8])),
        output_reserve=draw(st.sampled_from([0, 0, 1, page_size, 512])),
        linear_cost=float(draw(st.sampled_from([0, 7]))),
        vocab_size=1000,
    )


class EngineMachine(RuleBasedStateMachine):
    """Clients that come, go on with what was said, and leave; steps with none or one in flight."""

    totals: ClassVar[Counter[str]] = Counter()  # what the runs were made of

    def __init__(self):
        super().__init__()
        self.seen: list[tuple[EngineState, object]] = []
        self.num_operations = 0

    @initialize(config=configs())
    def start(self, config):
        self.world = EngineWorld(config)
        self.size = config.page_size
        self.next_token = len(LETTERS) + 1  # of prompts that nobody shares

    def count(self) -> None:
        self.num_operations += 1
        if self.num_operations % 5 == 0:
            self.seen.append((self.world.state, rendered(self.world.state)))

    def tokens_of(self, text: str, tail: int) -> list[int]:
        """Returns a page of equal tokens for each letter, and a last piece of `tail` tokens."""
        tail = self.size - 1 if tail < 0 else min(tail, self.size - 1)
        return [*np.repeat([LETTERS.index(letter) for letter in text], self.size).tolist(), *[0] * tail]

    def sampler(self, seed: int) -> Sampler:
        return hashed_sampler(seed, VOCAB, STOP)

    def submit(self, prompt: list[int], sampling: SamplingParams, salt: str) -> None:
        start = sampling.prompt_logprobs_from
        if start is not None and start >= len(prompt):
            sampling = dataclasses.replace(sampling, prompt_logprobs_from=len(prompt) - 1)
        self.world.submit(prompt, sampling, salt)
        self.count()

    @rule(opening=openings, text=pieces, tail=tails, sampling=samplings, salt=salts)
    def arrive(self, opening: str, text: str, tail: int, sampling: SamplingParams, salt: str):
        self.submit(self.tokens_of(opening + text, tail) or [0], sampling, salt)

    @rule(opening=openings, texts=st.lists(pieces, min_size=2, max_size=4), tail=tails, sampling=samplings)
    def arrive_together(self, opening: str, texts: list[str], tail: int, sampling: SamplingParams):
        for text in texts:
            self.submit(self.tokens_of(opening + text, tail) or [0], sampling, "")

    @precondition(lambda self: self.world.histories)
    @rule(back=st.integers(0, 30), text=pieces, tail=tails, cut=st.sampled_from([0, 0, 0, 1, 5]), sampling=samplings)
    def go_on(self, back: int, text: str, tail: int, cut: int, sampling: SamplingParams):
        """A next turn: what was said so far (or most of it), and more."""
        histories = list(self.world.histories.values())
        history = histories[-1 - back % len(histories)]
        heard = history.heard[: len(history.heard) - cut] or [1]
        self.submit(self.shortened(heard, self.tokens_of(text, tail), sampling), sampling, history.namespace)

    def shortened(self, heard: list[int], more: list[int], sampling: SamplingParams) -> list[int]:
        """Returns a prompt that fits: `heard`, cut if need be, and `more`."""
        room = self.world.room - len(more) - (sampling.max_tokens or 1)
        return [*heard[: max(1, room)], *more]

    @rule(more=st.integers(1, 4), tail=tails)
    def come_from_afar(self, more: int, tail: int):
        """A prompt that nobody shares; it needs a few pages more than are free, so that some must be evicted."""
        room = self.world.config.num_device_pages - 2
        num_pages = max(1, min(self.world.state.cache.device.num_free + more, room))
        self.next_token += 1
        prompt = np.full(num_pages * self.size, self.next_token, np.int32)
        self.submit([*prompt.tolist(), *self.tokens_of("", tail)], SamplingParams(max_tokens=1), "")

    @rule(sharers=st.integers(1, 2), steps=st.integers(1, 2), in_flight=st.booleans(), sampling=samplings, seed=seeds)
    def leave_sharers_alone(self, sharers: int, steps: int, in_flight: bool, sampling: SamplingParams, seed: int):
        """A long prompt is aborted between its chunks, while others wait for what it computes.

        They are admitted because a decode leaves a rest of each step that is less than a page.
        """
        self.drain(seed, overlapped=False)
        self.next_token += 1
        self.submit([self.next_token] * 2, SamplingParams(max_tokens=8), "")
        self.steps(seed, 1)
        num_tokens = min(self.world.config.max_step_tokens * steps + self.size, self.world.room // 2)
        first = len(self.world.histories) + self.world.num_refused
        for number in range(1 + sharers):
            self.submit([self.next_token] * num_tokens + [number], dataclasses.replace(sampling, max_tokens=2), "")
        self.steps(seed, steps)
        if in_flight:
            self.plan(seed)
        if first in self.world.histories and not self.world.histories[first].reason:
            self.world.abort(first)
            self.count()

    @rule(rest=st.integers(3, 5), second=st.integers(0, 2), overlapped=st.booleans(), seed=seeds)
    def squeeze(self, rest: int, second: int, overlapped: bool, seed: int):
        """Two prompts are still being computed while a younger reply grows into the pages that the older one needs."""
        self.drain(seed, overlapped=False)
        self.submit([0], SamplingParams(max_tokens=3), "")
        self.steps(seed, 1)
        num_pages = max(1, self.world.config.num_device_pages - rest - second)
        for length, max_tokens in ((num_pages * self.size, 1), (second * self.size, 1), (self.size - 1, 3 * self.size)):
            self.next_token += 1
            self.submit([self.next_token] * max(1, length), SamplingParams(max_tokens=max_tokens), "")
        (self.overlapped_steps if overlapped else self.steps)(seed, 9)

    @precondition(lambda self: self.world.live)
    @rule(back=st.integers(0, 5), seed=seeds)
    def abort_in_flight(self, back: int, seed: int):
        """A request leaves with two rows on their way."""
        while len(self.world.flights) < 2 and self.world.plan(self.sampler(seed)) is not None:
            self.count()
        planned = [segment.request_id for plan, _ in self.world.flights for segment in plan.segments]
        if planned:
            history = self.world.histories[planned[-1 - back % len(planned)]]
            if not history.reason:
                self.world.abort(history.request_id)
                self.count()

    @rule(number=st.integers(2, 4), less=st.integers(0, 1), sampling=samplings, seed=seeds, steps=st.integers(0, 9))
    def crowd(self, number: int, less: int, sampling: SamplingParams, seed: int, steps: int):
        """Prompts that fill the pool together and end just before a page does, so that replies run out of pages."""
        num_pages = max(1, self.world.config.num_device_pages // number - less)
        for _ in range(number):
            self.next_token += 1
            prompt = np.full(max(1, num_pages * self.size - 1), self.next_token).tolist()
            self.submit(self.shortened(prompt, [0], sampling)[:-1], sampling, "")
        self.overlapped_steps(seed, steps)

    @rule(more=st.integers(1, 4), back=st.integers(0, 30), text=pieces, tail=tails, sampling=samplings, seed=seeds)
    def go_on_over_a_hole(self, more: int, back: int, text: str, tail: int, sampling: SamplingParams, seed: int):
        """Some pages are lost, and whoever lost them comes back."""
        self.come_from_afar(more, tail)
        self.steps(seed, 3)
        if histories := self.histories_with_holes():
            history = histories[-1 - back % len(histories)]
            prompt = self.shortened(history.heard, self.tokens_of(text, tail), sampling)
            self.submit(prompt, sampling, history.namespace)

    def histories_with_holes(self) -> list[History]:
        cache = self.world.state.cache
        return [
            history
            for history in self.world.histories.values()
            if any(span.tier is Tier.MISSING for span in match(cache, history.heard, history.namespace).spans)
        ]

    @precondition(lambda self: any(history.outputs and not history.abort_asked for history in self.world.live))
    @rule(data=st.data(), back=st.integers(0, 2))
    def stop(self, data: st.DataObject, back: int):
        """A stop string is seen, at the last token or a few before."""
        speaking = [history for history in self.world.live if history.outputs and not history.abort_asked]
        history = data.draw(st.sampled_from(speaking))
        self.world.stop(history.request_id, max(1, len(history.outputs) - back))
        self.count()

    @precondition(lambda self: self.world.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject):
        history = data.draw(st.sampled_from(self.world.live))
        self.world.abort(history.request_id)
        self.count()

    @precondition(lambda self: len(self.world.flights) < 2)
    @rule(seed=seeds)
    def plan(self, seed: int):
        self.world.plan(self.sampler(seed))
        self.count()

    @precondition(lambda self: self.world.flights)
    @rule()
    def step_done(self):
        self.world.done()
        self.count()

    @precondition(lambda self: self.world.live)
    @rule(seed=seeds, steps=st.integers(1, 9))
    def overlapped_steps(self, seed: int, steps: int):
        """Each step is planned while the one before is in flight."""
        for _ in range(steps):
            if len(self.world.flights) < 2:
                self.world.plan(self.sampler(seed))
                self.count()
            if self.world.flights:
                self.world.done()
                self.count()

    @precondition(lambda self: self.world.live)
    @rule(seed=seeds, steps=st.integers(1, 9))
    def steps(self, seed: int, steps: int):
        for _ in range(steps):
            if self.world.live:
                self.world.step(self.sampler(seed))
                self.count()

    @precondition(lambda self: len(self.world.histories) % 8 == 7)  # seldom: an empty cache has no holes
    @rule()
    def flush(self):
        self.world.flush()
        self.count()

    @rule(seed=seeds, overlapped=st.booleans())
    def drain(self, seed: int, overlapped: bool):
        self.world.drain(self.sampler(seed), overlapped=overlapped)
        self.count()

    def teardown(self):
        if not hasattr(self, "world") or not self.world.sound:
            return
        self.world.drain(self.sampler(0), overlapped=self.num_operations % 2 == 0)
        if all(history.max_tokens <= self.world.config.output_reserve for history in self.world.histories.values()):
            assert self.world.num_retractions == 0, "room for every output was reserved"
        self.world.check_replay()
        self.tally()
        for state, before in self.seen:
            assert rendered(state) == before, "an old state changed"
        self.world.flush()
        assert (len(self.world.state.cache.nodes), self.world.state.cache.num_resident) == (0, 0)

    def tally(self) -> None:
        world, totals = self.world, self.totals
        totals["runs"] += 1
        totals["operations"] += len(world.log)
        totals["steps"] += world.num_steps
        totals["evicted pages"] += world.num_evicted
        totals["retractions"] += world.num_retractions
        totals["refused"] += world.num_refused
        totals["repeated lookups"] += world.num_repeated
        totals["phantom segments"] += world.state.counters.phantom_segments
        totals.update({f"{kind.value} tokens": number for kind, number in world.kinds.items()})
        for history in world.histories.values():
            totals[f"requests: {history.reason}"] += 1
            totals["retracted requests"] += history.num_retractions > 0
            totals["several refills in a request"] += sum(row[0] is PHANTOM for row in history.computed) > 1
            if history.metrics is not None and not history.num_retractions:
                computed = [stop - start for kind, start, stop in history.computed if kind in (PHANTOM, REAL)]
                totals["hit tokens"] += history.metrics.device_hit
                totals["inheritances"] += sum(computed) > history.metrics.refilled + history.metrics.new


def run(seeds: range, **options: bool) -> None:
    EngineMachine.totals.clear()
    seeded_machines.run(EngineMachine, seeds, **options)


def test_engine_keeps_its_promises():
    happened = (
        "evicted pages",
        "retractions",
        "phantom segments",
        "several refills in a request",
        "inheritances",
        "repeated lookups",
    )
    totals = EngineMachine.totals
    totals.clear()
    # What a seed draws depends on the modules that are loaded, so seeds go on until enough has happened.
    for seed in range(30):
        seeded_machines.run(EngineMachine, range(seed, seed + 1))
        if totals["operations"] >= MIN_OPERATIONS and all(totals[name] >= 10 for name in happened):
            return
    raise AssertionError(totals)


@pytest.mark.slow
def test_engine_keeps_its_promises_at_length():
    run(range(1_000, 1_070))
    for seed in range(1_070, 1_200):
        if EngineMachine.totals["operations"] >= 10 * MIN_OPERATIONS:
            return
        seeded_machines.run(EngineMachine, range(seed, seed + 1))
    raise AssertionError(EngineMachine.totals)


# Controls: a fault in the engine must be noticed.


real_release, real_planned_to = leaving.release, _Planner.planned_to


def release_without_heirs(cache, running, request, reason):
    """Whoever waits for pages of this request waits for ever."""
    return real_release(cache, [], request, reason)


def release_past_the_stop(cache, running, request, reason):
    """Keeps the pages of tokens that were sampled behind a stop."""
    return real_release(cache, running, dataclasses.replace(request, outputs=(*request.outputs, 0)), reason)


def fed_by_the_first(planner: _Planner, request: Request, position: int, *, sampled: bool) -> Request:
    return dataclasses.replace(real_planned_to(planner, request, position, sampled=sampled), feed=0)


@pytest.mark.parametrize(
    ("target", "fault"),
    [
        ("penelope_jax.engine.release", release_without_heirs),
        ("penelope_jax.engine.release", release_past_the_stop),
        ("penelope_jax.planning._Planner.planned_to", fed_by_the_first),
        ("penelope_jax.planning._Planner.flying", lambda planner, request: False),
        ("penelope_jax.lookup._same_pages", lambda path, before: len(path) == len(before)),
        ("penelope_jax.config.EngineConfig.namespace", lambda config, cache_salt: ""),
    ],
    ids=["no heirs", "past the stop", "another's sample", "released in flight", "stale lookup", "one namespace"],
)
def test_a_fault_is_noticed(monkeypatch: pytest.MonkeyPatch, target: str, fault):
    monkeypatch.setattr(target, fault)
    with pytest.raises((AssertionError, KeyError)):
        run(range(5, 25), shrink=False)
