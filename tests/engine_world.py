"""A world for the pure engine: it runs plans on a pool that knows what it holds, and believes nothing it is told.

Each slot of the pool holds a hash of the tokens up to its own, which is what K/V is a function of. A row that reads
position p of a history must find there the hash of that history's first p + 1 tokens: a wrong page, a stale page, a
page with two owners, or a read before the write all show as another hash. Pages that nobody holds are poisoned.
"""

import dataclasses
from collections import deque

import numpy as np
from deep_copies import rendered
from engine_settings import Sampler
from repeated_lookups import check_waiting
from request_history import History, chain_behind, seed_of

from penelope_jax import engine
from penelope_jax.config import EngineConfig, Start
from penelope_jax.events import Abort, Event, Finished, Flush, Refused, Sampled, Scored, Stop, Submit, Update
from penelope_jax.invariants import check_cache
from penelope_jax.pages import NO_PAGE
from penelope_jax.radix_tree import CacheState, Node
from penelope_jax.segments import SamplingParams, Segment, SegmentKind, StepDone, StepPlan
from penelope_jax.state import EngineState, private_page_ids

POISON = -1


class EngineWorld:
    """An engine state, the pool, and the truth about every request."""

    def __init__(self, config: EngineConfig):
        self.config = config
        self.state: EngineState = engine.make_state(config)
        self.slots = np.full((config.num_device_pages, config.page_size), POISON, np.int64)
        self.memories: dict[int, list[int]] = {}  # of the requests whose sampling needs one, by slot
        self.histories: dict[int, History] = {}
        self.flights: deque[tuple[StepPlan, StepDone]] = deque()
        self.last_plan: StepPlan | None = None
        self.log: list[tuple[Event, ...] | StepPlan | None] = []  # what was applied, and the plans between
        self.counters = self.state.counters
        self.sound = True  # False once a check failed
        self.kinds = dict.fromkeys(SegmentKind, 0)
        self.num_repeated = 0  # lookups of waiting requests that went on from earlier ones
        self.num_steps = self.num_evicted = self.num_retractions = self.num_finished = self.num_refused = 0

    @property
    def live(self) -> list[History]:
        return [history for history in self.histories.values() if not history.reason]

    @property
    def room(self) -> int:
        """Most tokens, prompt and output, of one request."""
        return min(self.config.max_context, (self.config.num_device_pages - 1) * self.config.page_size)

    # Events.

    def apply(self, event: Event) -> tuple[Update, ...]:
        self.sound = False
        self.state, updates = engine.apply(self.state, (event,))
        self.log.append((event,))
        for update in updates:
            self.hear(update)
        self.note_retractions()
        self.check_state()
        return updates

    def submit(self, prompt, sampling: SamplingParams = SamplingParams(), cache_salt: str = "") -> int | None:
        """Returns the request id, or None when it is refused, which must be right."""
        prompt = np.asarray(prompt, np.int32)
        request_id = len(self.histories) + self.num_refused
        event = Submit(request_id=request_id, tokens=prompt, sampling=sampling, cache_salt=cache_salt)
        room = self.room - len(prompt)
        max_tokens = room if sampling.max_tokens is None else sampling.max_tokens
        fits = 1 <= max_tokens <= room
        if fits:
            self.histories[request_id] = History(request_id, prompt, sampling, max_tokens, cache_salt)
        else:
            self.num_refused += 1
        updates = self.apply(event)
        assert fits == (not updates), f"{len(prompt)} + {max_tokens} tokens, room for {room}: {updates}"
        assert fits or isinstance(updates[0], Refused)
        return request_id if fits else None

    def abort(self, request_id: int) -> None:
        history = self.histories[request_id]
        if not history.ended:  # otherwise only its last step is missing, and the abort comes too late
            history.abort_asked = True
        self.apply(Abort(request_id=request_id))

    def stop(self, request_id: int, num_tokens: int) -> None:
        """The reader of a request that was not aborted saw its end after `num_tokens` outputs."""
        self.histories[request_id].stop(num_tokens)
        self.apply(Stop(request_id=request_id, num_tokens=num_tokens))

    def flush(self) -> None:
        self.apply(Flush())
        assert self.state.cache.num_resident == len(np.unique(self.pinned_page_ids())), "a flush left unpinned pages"

    def pinned_page_ids(self) -> np.ndarray:
        """Returns the resident pages of every pinned path."""
        nodes = self.state.cache.nodes
        parts = [np.empty(0, np.int32)]
        for node_id in self.state.cache.pins.values():
            while node_id != NO_PAGE:
                parts.append(nodes[node_id].page_ids)
                node_id = nodes[node_id].parent_id
        ids = np.concatenate(parts)
        return ids[ids != NO_PAGE]

    def done(self) -> tuple[Update, ...]:
        """The oldest step in flight comes back."""
        _, event = self.flights.popleft()
        return self.apply(event)

    def note_heirs(self) -> None:
        """A request left: what it did not do may fall to any that runs, and what it did may spare any some work."""
        for request in self.state.running:
            self.histories[request.request_id].as_admitted = False

    def hear(self, update: Update) -> None:
        if isinstance(update, Refused):
            return
        history = self.histories[update.request_id]
        assert not history.reason, f"{update} after the end"
        match update:
            case Sampled():
                history.hear_token(update)
            case Scored():
                history.hear_scores(update)
            case Finished():
                history.hear_end(update, self.config.linear_cost)
                self.num_finished += 1
                self.note_heirs()
            case _:
                raise AssertionError(f"unexpected {update}")

    # Steps.

    def plan(self, sampler: Sampler) -> StepPlan | None:
        """Plans a step and runs it on the pool; its results wait in `flights`."""
        self.sound = False
        self.state, plan = engine.plan(self.state)
        self.log.append(plan)
        self.check_admissions()
        retracted = self.note_retractions()
        if plan is not None:
            self.start_moves(plan)
        if plan is None or not plan.segments:
            waits = self.flights or self.state.idle or self.state.cache.moves
            assert waits, "requests are left, nothing is in flight, and nothing is planned"
            self.check_state()
            return None
        assert sorted(plan.retracted) == sorted(retracted)
        assert plan.step == self.num_steps
        self.num_steps += 1
        self.num_evicted += sum(span.stop - span.start for span in plan.evicted) // self.config.page_size
        self.check_plan(plan)
        self.slots[list(self.state.cache.device.free_ids())] = POISON
        self.run(plan, sampler)
        self.last_plan = plan
        self.check_state()
        return plan

    def start_moves(self, plan: StepPlan) -> None:
        assert not plan.moves, "there is one tier"

    def note_retractions(self) -> list[int]:
        """Returns the requests that were sent back to the queue just now."""
        retracted = []
        for request in self.state.waiting:
            history = self.histories[request.request_id]
            if request.num_retractions > history.num_retractions:
                retracted.append(request.request_id)
                history.num_retractions += 1
                assert request.num_retractions == history.num_retractions
                assert request.prompt.tolist() == history.heard == history.tokens
                self.note_heirs()
        self.num_retractions += len(retracted)
        return retracted

    def check_admissions(self) -> None:
        for request in self.state.running:
            history = self.histories[request.request_id]
            assert request.metrics is not None
            if history.metrics is None:
                metrics = history.metrics = request.metrics
                assert metrics.prompt_len == history.prompt_len
                hits = metrics.device_hit + metrics.host_hit
                assert hits + metrics.refilled + metrics.new == metrics.prompt_len
                assert 0 <= hits <= metrics.prompt_len - 1
                assert metrics.new >= 1
                assert min(metrics.device_hit, metrics.host_hit, metrics.refilled) >= 0
                assert sum(b - a for a, b in metrics.compute_spans) == metrics.refilled + metrics.new
                dropped = self.counters.lost_pages or self.config.load_units  # pages that the policy did not choose
                if self.config.policy.start is Start.LEAF_TAIL and not dropped:
                    assert metrics.refilled == 0, "this policy makes no holes"
            assert request.metrics == history.metrics, "metrics are those of the first admission"

    def check_plan(self, plan: StepPlan) -> None:
        config = self.config
        assert plan.segments
        assert plan.num_tokens <= config.max_step_tokens
        assert len(plan.segments) <= config.max_step_segments
        running = {request.request_id: request for request in self.state.running}
        ends: dict[int, int] = {}
        for segment in plan.segments:
            assert segment.request_id in running, "a row of a request that does not run"
            assert segment.start >= ends.get(segment.request_id, 0), "rows of a request in position order"
            ends[segment.request_id] = segment.stop
            history = self.histories[segment.request_id]
            assert not history.abort_asked and not history.ended, "a row of a request that leaves"
            assert len(segment.tokens) == segment.stop - segment.start > 0
            if segment.kind in (SegmentKind.PHANTOM, SegmentKind.REAL):
                whole = segment.stop == len(running[segment.request_id].prompt)
                assert whole or segment.stop % config.page_size == 0, "an unfinished span ends inside a page"
            if segment.kind is SegmentKind.DECODE:
                assert segment.stop - segment.start == 1 and segment.sample is not None
            last_row = segment.stop == len(running[segment.request_id].prompt)
            assert (segment.sample is not None) == (segment.kind is SegmentKind.DECODE or last_row)
            assert segment.write_from == (segment.stop if segment.kind is SegmentKind.SCORE else segment.start)

    def run(self, plan: StepPlan, sampler: Sampler) -> None:
        """Writes all K/V of the step, then reads as attention would, then samples."""
        written: set[tuple[int, int]] = set()
        for segment in plan.segments:
            history = self.histories[segment.request_id]
            self.check_tokens(segment, history)
            history.computed.append((segment.kind, segment.start, segment.stop))
            self.kinds[segment.kind] += segment.stop - segment.start
            pages = self.page_table(segment)
            for position in range(segment.write_from, segment.stop):
                slot = int(pages[position // self.config.page_size]), position % self.config.page_size
                assert slot not in written, f"two rows of a step write slot {slot}"
                written.add(slot)
                self.slots[slot] = history.chain[position]
        for segment in plan.segments:
            history = self.histories[segment.request_id]
            read = self.slots[self.page_table(segment)].reshape(-1)[: segment.stop]
            wrong = np.flatnonzero(read != history.chain[: segment.stop])
            assert not len(wrong), f"{segment.kind} of request {segment.request_id} reads other K/V at {wrong[:4]}"
        samples, tops, scores = [], [], []
        for segment in plan.segments:
            history = self.histories[segment.request_id]
            if segment.sample is not None:
                assert len(history.tokens) == segment.stop, "a sample that does not follow the last token"
                self.remember(segment, history)
                history.append(sampler(segment.request_id, segment.stop))
                samples.append((history.tokens[-1], -segment.stop))
                tops.append(history.top(history.tokens[-1], plan.top_logprobs))
            if segment.targets is not None:
                scores.append(self.scores(segment, history))
        done = StepDone(
            step=plan.step,
            tokens=np.array([token for token, _ in samples], np.int32),
            logprobs=np.array([logprob for _, logprob in samples], np.float32),
            scores=tuple(scores),
            top_tokens=np.array([[token for token, _ in top] for top in tops], np.int32),
            top_logprobs=np.array([[logprob for _, logprob in top] for top in tops], np.float32),
        )
        self.flights.append((plan, done))

    def remember(self, segment: Segment, history: History) -> None:
        """The device's memory of a request's tokens holds just its history when it is to sample by it."""
        assert (segment.slot >= 0) == history.sampling.needs_slot
        if segment.slot < 0:
            return
        assert segment.slot < self.config.max_step_segments
        if segment.slot_start is not None:
            assert segment.slot_start.prompt_len == history.prompt_len
            self.memories[segment.slot] = segment.slot_start.tokens.tolist()
        memory = self.memories[segment.slot]
        memory.append(history.tokens[segment.stop - 1])
        assert memory == history.tokens[: segment.stop], "the memory of another request, or not all of its own"

    def page_table(self, segment: Segment) -> np.ndarray:
        table = segment.page_table[: -(-segment.stop // self.config.page_size)]
        assert len(table) * self.config.page_size >= segment.stop, "the page table is too short"
        assert ((table >= 0) & (table < self.config.num_device_pages)).all(), "the page table has a missing page"
        return table

    def check_tokens(self, segment: Segment, history: History) -> None:
        """The tokens of a row are those of the history; what is in flight is fed by the sample it names."""
        tokens = segment.tokens.tolist()
        if segment.feed >= 0:
            assert tokens == [-1] and self.last_plan is not None and len(self.flights) == 1
            assert self.last_plan.step == self.num_steps - 2, "fed by a step that is not the one before"
            source = [other for other in self.last_plan.segments if other.sample is not None][segment.feed]
            assert (source.request_id, source.stop) == (segment.request_id, segment.start), "fed by another sample"
        else:
            assert tokens == history.heard[segment.start : segment.stop], "tokens that are not the history's"

    def scores(self, segment: Segment, history: History) -> np.ndarray:
        """Returns each wanted row's position, so that a score tells where it comes from."""
        assert segment.targets is not None and (segment.targets >= 0).any()
        wanted = segment.targets >= 0
        positions = np.arange(segment.start, segment.stop)
        assert segment.targets[wanted].tolist() == [history.tokens[position + 1] for position in positions[wanted]]
        return np.where(wanted, positions, np.nan).astype(np.float32)

    def step(self, sampler: Sampler) -> bool:
        """Plans, runs and hears of one step with nothing else in flight; returns whether there was one."""
        while self.flights:
            self.done()
        if self.plan(sampler) is None:
            return False
        self.done()
        return True

    def drain(self, sampler: Sampler, *, overlapped: bool = False) -> None:
        """Runs until nothing is left, within a bound on the steps."""
        tokens = sum(len(history.tokens) + history.max_tokens for history in self.live)
        bound = 20 + 4 * tokens
        for _ in range(bound):
            if overlapped and len(self.flights) < 2:
                planned = self.plan(sampler) is not None
                if self.flights and (len(self.flights) == 2 or not planned):
                    self.done()
                if not planned and not self.flights and self.state.idle:
                    break
            elif not self.step(sampler):
                break
        while self.flights:
            self.done()
        assert self.state.idle, f"{len(self.live)} requests are left after {bound} steps"
        assert not self.state.in_flight and not self.live
        assert not len(private_page_ids(self.state)), "private pages at idle"
        assert not self.state.cache.pins, "pins at idle"

    # What must hold.

    def check_state(self) -> None:
        state = self.state
        private = private_page_ids(state)
        check_cache(state.cache, private)
        self.num_repeated += check_waiting(state)
        assert len(state.running) <= self.config.max_running
        ids = [request.request_id for request in (*state.waiting, *state.running)]
        assert sorted(ids) == sorted(history.request_id for history in self.live), "requests got lost"
        assert len(state.cache.pins) == len(state.running), "each running request holds one pin"
        self.check_tree()
        counters = state.counters
        assert all(
            now >= before
            for now, before in zip(dataclasses.astuple(counters), dataclasses.astuple(self.counters), strict=True)
        )
        self.counters = counters
        assert counters.steps == self.num_steps
        assert counters.phantom_tokens == self.kinds[SegmentKind.PHANTOM]
        assert counters.real_tokens == self.kinds[SegmentKind.REAL]
        assert counters.decode_tokens == self.kinds[SegmentKind.DECODE]
        assert counters.score_tokens == self.kinds[SegmentKind.SCORE]
        assert counters.retractions == self.num_retractions
        assert counters.finished == self.num_finished
        assert counters.refused == self.num_refused
        assert counters.evicted_pages >= self.num_evicted
        self.sound = True

    def check_tree(self) -> None:
        """Every page of the tree holds the K/V of its own tokens."""
        cache: CacheState = self.state.cache
        stack = [(root_id, seed_of(namespace)) for namespace, root_id in cache.roots.items()]
        while stack:
            node_id, last = stack.pop()
            node = cache.nodes[node_id]
            chain = chain_behind(last, node.tokens)
            expected = chain.reshape(-1, cache.page_size)
            for pool, page_ids in self.held(node):
                resident = page_ids != NO_PAGE
                same = pool[page_ids[resident]] == expected[resident]
                assert same.all(), f"node {node_id} has a page with other K/V"
            last = int(chain[-1]) if len(chain) else last
            stack.extend((child_id, last) for child_id in node.children.values())

    def held(self, node: Node) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns pools and the ids of a node's pages there, NO_PAGE where it has none."""
        return [(self.slots, node.page_ids)]

    def check_replay(self) -> None:
        """A run is its events: the same events and calls give the same plans and the same state."""
        state = engine.make_state(self.config)
        for entry in self.log:
            if isinstance(entry, tuple):
                state, _ = engine.apply(state, entry)
            else:
                state, plan = engine.plan(state)
                assert rendered(plan) == rendered(entry), "another plan"
        assert rendered(state) == rendered(self.state), "another state"
