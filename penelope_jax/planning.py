"""Planning a step: decodes first, then prefills in the order of admission, then admissions, while the budget lasts.

All decisions are here; the plan is plain data and the executor only does what it says. The planner object collects
changes to one state and never escapes `plan`.
"""

import numpy as np

from penelope_jax import histories, radix_tree, scheduler
from penelope_jax.admission import admit, have_room, look_up
from penelope_jax.changed import changed
from penelope_jax.config import InsertUnit
from penelope_jax.leaving import release, with_retracted
from penelope_jax.pages import NO_PAGE, Tier, frozen
from penelope_jax.path_view import PathView, view_path
from penelope_jax.room import Room
from penelope_jax.rows import decode_row, expected, fed_back, prompt_row
from penelope_jax.segments import Segment, SegmentKind, StepPlan
from penelope_jax.state import EngineState, Request, count

_COUNTER_OF = {
    SegmentKind.PHANTOM: "phantom_tokens",
    SegmentKind.REAL: "real_tokens",
    SegmentKind.DECODE: "decode_tokens",
    SegmentKind.SCORE: "score_tokens",
}


def plan(state: EngineState) -> tuple[EngineState, StepPlan | None]:
    """Plans the next step.

    At most one step may be in flight: its sampled tokens may feed this one, older ones must be back.

    Returns:
        The state in which the step counts as planned, and the plan; None when there is nothing to do now. A plan
        without segments has only moves and is no step.
    """
    if len(state.in_flight) > 1:
        raise ValueError(f"{len(state.in_flight)} steps are in flight; at most 1 may be when a step is planned.")
    planner = _Planner(state)
    planner.decode()
    planner.prefill()
    planner.admit()
    while planner.stuck():
        planner.retract(planner.running[-1])
        planner.decode()
        planner.prefill()
    return planner.finish()


class _Planner(Room):
    def __init__(self, state: EngineState):
        super().__init__(state.config, state.cache)
        self.state = state
        self.page_size = state.config.page_size
        self.running = list(state.running)
        self.waiting = state.waiting
        self.tokens_left = state.config.max_step_tokens
        self.segments_left = state.config.max_step_segments
        self.segments: list[Segment] = []
        self.retracted: list[int] = []
        self.marked: set[int] = set()  # requests to be retracted when their last step is back
        self.planned: set[int] = set()  # requests with a row in this step
        self.num_samples = 0

    def stuck(self) -> bool:
        """Whether requests run, but none has a row or pages under way, and nothing is in flight that would change this.

        Claims at admission are meant to leave room for all. Where they did not, whoever came last goes back.
        """
        idle = not self.segments and not self.moving and not self.state.in_flight
        return idle and len(self.running) > 1

    # Pages.

    def allocate(self, num_pages: int, requester: Request, *, last_resort: bool) -> np.ndarray | None:
        """Takes pages: those that `take` finds and, as a last resort, those of younger requests.

        Returns:
            i32[num_pages], or None if there are not that many to be had now.
        """
        while True:
            page_ids = self.take(num_pages)
            # Where pages are under way there may soon be more.
            if page_ids is not None or not last_resort or self.moving or not self.retract_younger(requester):
                return page_ids

    def retract_younger(self, requester: Request) -> bool:
        """Sends back the youngest request that is younger than `requester` and has no row in this step.

        If every one of them has a row in a step that is not back, the youngest is marked to go when it is (rule 4).

        Returns:
            Whether pages became free or evictable now.
        """
        younger = [
            other for other in self.running[self.index_of(requester) + 1 :] if other.request_id not in self.planned
        ]
        staying = [other for other in younger if not other.leaving]
        for request in reversed(staying):
            if not self.flying(request):
                self.retract(request)
                return True
        if staying and len(staying) == len(younger):
            self.store(changed(staying[-1], leaving="retract"))
            self.marked.add(staying[-1].request_id)
        return False

    def stays(self, request: Request) -> bool:
        """Whether a request that was running when planning began is to have rows in this step."""
        id_ = request.request_id
        return not request.leaving and id_ not in self.marked and id_ not in self.retracted

    def retract(self, request: Request) -> None:
        """Sends a request back to the head of the queue; what it computed stays as cache."""
        others = [other for other in self.running if other.request_id != request.request_id]
        self.cache, again = release(self.cache, others, request, "retract")
        assert again is not None, "a retracted request waits again"
        self.running = others
        self.waiting = with_retracted(self.waiting, again)
        self.retracted.append(request.request_id)
        self.tell("retractions", 1)

    def flying(self, request: Request) -> bool:
        """Whether the request has a row in a step that is not back."""
        return bool(self.state.in_flight) and request.last_step >= self.state.in_flight[0].step

    # Rows.

    def add(self, segment: Segment) -> None:
        """Adds a row."""
        num_tokens = segment.stop - segment.start
        self.segments.append(segment)
        self.tokens_left -= num_tokens
        self.segments_left -= 1
        self.planned.add(segment.request_id)
        self.tell(_COUNTER_OF[segment.kind], num_tokens)
        if segment.kind is SegmentKind.PHANTOM:
            self.tell("phantom_segments", 1)

    def planned_to(self, request: Request, position: int, *, sampled: bool) -> Request:
        """Returns the request with rows in this step up to `position`, the last one sampled or not.

        Its sample, if any, is numbered among this step's.
        """
        self.num_samples += sampled
        return changed(
            request,
            next_pos=position,
            last_step=self.state.next_step,
            num_in_flight=request.num_in_flight + sampled,
            feed=self.num_samples - 1 if sampled else request.feed,
        )

    def store(self, request: Request, index: int = 0) -> None:
        """Puts a changed request in its place, which is looked for where it is not `index`."""
        if index >= len(self.running) or self.running[index].request_id != request.request_id:
            index = self.index_of(request)
        self.running[index] = request

    def index_of(self, request: Request) -> int:
        return next(i for i, other in enumerate(self.running) if other.request_id == request.request_id)

    def decode(self) -> None:
        """One token for each request whose prompt is done, oldest first."""
        decoding = [pair for pair in enumerate(self.running) if pair[1].decodes and self.stays(pair[1])]
        first = decoding[: min(self.tokens_left, self.segments_left)]
        self.free_up_at_once(sum([self.needs_page(request) for _, request in first]), self.running)
        for (index, request), tokens in zip(decoding, fed_back(request for _, request in decoding), strict=True):
            if not self.tokens_left or not self.segments_left:
                break
            if not self.stays(request):
                continue
            if self.needs_page(request):
                page_ids = self.allocate(1, request, last_resort=True)
                if page_ids is None:
                    # Pages come with the last step of one that leaves, and when moves have ended.
                    waits = self.moving or any(other.leaving for other in self.running)
                    if len(self.running) > 1 and not waits and not self.flying(request):
                        self.retract(request)  # older requests go on and finish
                    continue
                request = changed(request, page_table=frozen(np.concatenate([request.page_table, page_ids])))
            self.add(decode_row(request, self.page_size, tokens))
            self.store(self.planned_to(request, request.next_pos + 1, sampled=True), index)

    def needs_page(self, request: Request) -> bool:
        """Whether its next token begins a page."""
        return request.next_pos // self.page_size == len(request.page_table)

    def prefill(self) -> None:
        """Goes on with admitted requests whose prompt is not done, oldest first."""
        for index, request in enumerate(tuple(self.running)):
            if not request.prefilled and self.stays(request) and not self.still_waits(request, index):
                self.extend(request, index)

    def still_waits(self, request: Request, index: int) -> bool:
        """Whether it waits as in an earlier plan, since nothing of its path has changed; begins to load more of it."""
        view = request.view
        if view is None or not view.waits or self.view_of(request) is not view:
            return False
        num_owned = view.num_owned + self.load_path(request, view)
        if num_owned != request.num_owned:
            self.store(changed(request, num_owned=num_owned), index)
        return True

    def extend(self, request: Request, index: int) -> None:
        """Takes the front of the request's compute list, up to the budget."""
        request = self.seen_again(request)
        if not self.tokens_left or not self.segments_left:
            self.store(request, index)
            return
        rows: list[tuple[SegmentKind, int, int]] = []
        tokens_left = self.tokens_left
        while request.next_pos < len(request.prompt) and len(rows) < self.segments_left:
            taken = self.next_span(request, tokens_left)
            if taken is None:
                break
            request, kind, start, stop = taken
            if kind is None:
                continue
            tokens_left -= stop - start
            if rows and rows[-1][0] is kind and rows[-1][2] == start:
                rows[-1] = (kind, rows[-1][1], stop)
            else:
                rows.append((kind, start, stop))
        if rows:
            done = request.prefilled
            for kind, start, stop in rows:
                sample = done and stop == len(request.prompt)
                self.add(prompt_row(request, self.page_size, kind, start, stop, sample=sample))
            request = self.planned_to(request, request.next_pos, sampled=done)
            request = changed(request, view=None) if done else request
            stop = rows[-1][2]
            chunked = self.config.policy.insert_unit is InsertUnit.CHUNK and rows[-1][0] is SegmentKind.REAL
            if chunked and stop < request.path_stop:
                self.cache = histories.split_at(self.cache, request.pin, stop // self.page_size * self.page_size)
        elif request.view is not None and self.is_others(request, request.view):
            request = changed(request, view=request.view._replace(waits=True))
        self.store(request, index)

    def seen_again(self, request: Request) -> Request:
        """Brings its page table up to date with pages that others filled or that were loaded, and begins to load more.

        What it still has to take is counted anew.
        """
        path_pages = request.path_stop // self.page_size
        if not (request.page_table[:path_pages] == NO_PAGE).any():
            return request
        view = self.view_of(request)
        if view is not request.view:
            table = request.page_table.copy()
            table[:path_pages] = radix_tree.device_ids_along(view.nodes)[:path_pages]
            if request.path_stop == len(request.prompt) and view.nodes[-1].tiers[-1] != Tier.MISSING:
                # Another request's output reached the tree first: now a full hit, recomputed into a private page.
                path_pages -= 1
                table = table[:path_pages].copy()
                request = changed(request, path_stop=path_pages * self.page_size, view=None)
                view = self.view_of(request)
            request = changed(request, page_table=frozen(table), view=view)
        num_owned = view.num_owned + self.load_path(request, view)
        return request if num_owned == request.num_owned else changed(request, num_owned=num_owned)

    def is_others(self, request: Request, view: PathView) -> bool:
        """Whether its next page is missing, to be loaded or filled by another request in a later step than this."""
        page = request.next_pos // self.page_size
        if page >= request.path_stop // self.page_size or request.page_table[page] != NO_PAGE:
            return False
        return bool(view.owners[page] != request.request_id)

    def view_of(self, request: Request) -> PathView:
        return view_path(self.cache, request.pin.node_id, request.path_stop, request.request_id, request.view)

    def next_span(self, request: Request, tokens_left: int) -> tuple[Request, SegmentKind | None, int, int] | None:
        """Takes the next piece of the compute list.

        Returns:
            The request past that piece, its kind (None: resident, nothing to compute) and its positions; or None when
            nothing more can be taken in this step.
        """
        size, position = self.page_size, request.next_pos
        table = request.page_table
        path_pages = request.path_stop // size
        page = position // size
        if page < path_pages and table[page] != NO_PAGE:
            missing = np.flatnonzero(table[page:path_pages] == NO_PAGE)
            stop = (page + int(missing[0]) if len(missing) else path_pages) * size
            score_stop = min(stop, request.original_len - 1)
            first = max(position, request.score_pos)
            if first >= score_stop:
                return changed(request, next_pos=stop), None, position, stop
            last = min(score_stop, first + tokens_left)
            if last == first:
                return None
            after = stop if last == score_stop else last
            return changed(request, next_pos=after), SegmentKind.SCORE, first, last
        if page < path_pages:
            assert request.view is not None, "its path was looked at, since a page is missing"
            if self.is_others(request, request.view):
                return None
            owners = request.view.owners
            mine = (owners[page:path_pages] == request.request_id) & (table[page:path_pages] == NO_PAGE)
            stop = (page + (len(mine) if mine.all() else int((~mine).argmax()))) * size
            kind = SegmentKind.PHANTOM if position < request.match_stop else SegmentKind.REAL
            if kind is SegmentKind.PHANTOM:
                stop = min(stop, request.match_stop)
        else:
            stop, kind = len(request.prompt), SegmentKind.REAL
        if stop - position > tokens_left:
            # A piece that does not finish its span ends on a page border (rule 3).
            stop = position + tokens_left // size * size
        if stop <= position:
            return None
        num_pages = -(-stop // size) - page
        page_ids = self.allocate(num_pages, request, last_resort=request.request_id == self.running[0].request_id)
        if page_ids is None:
            wanted, num_pages = num_pages, self.cache.device.num_free
            stop = position + num_pages * size
            if not num_pages or self.too_few(num_pages, wanted):
                return None
            page_ids = self.allocate(num_pages, request, last_resort=False)
            assert page_ids is not None, "free pages cannot be taken"
        if page < path_pages:
            self.cache = histories.fill(self.cache, request.pin, position, page_ids, request.request_id)
            new_table = table.copy()
            new_table[page : page + num_pages] = page_ids
            num_owned = request.num_owned - num_pages
        else:
            new_table, num_owned = np.concatenate([table, page_ids]), request.num_owned
        request = changed(request, page_table=frozen(new_table), next_pos=stop, num_owned=num_owned)
        return request, kind, position, stop

    def admit(self) -> None:
        """Admits waiting requests in the scheduler's order, as long as rows, tokens and pages last.

        For those that must wait, loads begin.
        """
        full = not self.tokens_left or not self.segments_left
        if not self.waiting or full and not self.cache.num_host:
            return
        matches: dict[int, radix_tree.Match] = {}
        before = self.cache.clock
        if scheduler.needs_match(self.config.scheduler):
            queue = list(self.waiting)
            for index, request in enumerate(self.waiting):
                lookup = look_up(self.cache, request)
                matches[request.request_id] = lookup.found
                if lookup is not request.lookup:
                    queue[index] = changed(request, lookup=lookup)
            if self.config.policy.stamp_waiting:
                self.cache = histories.touch_all(self.cache, matches.values())
            self.waiting = tuple(queue)
        state = changed(self.state, waiting=self.waiting)
        for request in scheduler.ordered(state, matches):
            full = full or not self.tokens_left or not self.segments_left
            if full or len(self.running) >= self.config.max_running or request.request_id in self.retracted:
                break
            slot = self.free_slot() if request.sampling.needs_slot else -1
            if slot == self.config.max_step_segments:
                break
            cache, admitted = admit(self.cache, self.config, request)
            if self.running and not have_room(cache, self.config, (*self.running, admitted)):
                break
            self.cache = cache
            self.waiting = tuple(other for other in self.waiting if other.request_id != request.request_id)
            admitted = changed(admitted, slot=slot)
            self.running.append(admitted)
            self.tell("admitted", int(request.metrics is None))
            self.extend(admitted, len(self.running) - 1)
        if self.cache.num_host and not self.is_short and not self.config.policy.inclusive:
            waiting = changed(self.state, waiting=self.waiting)
            self.prefetch(scheduler.ordered(waiting, matches), before)

    def free_slot(self) -> int:
        """Returns the smallest slot that no running request has; there are as many as rows of a step."""
        taken = {request.slot for request in self.running}
        return next(slot for slot in range(len(taken) + 1) if slot not in taken)

    def finish(self) -> tuple[EngineState, StepPlan | None]:
        moves = self.start_moves()
        state = changed(
            self.state,
            cache=self.cache,
            running=tuple(self.running),
            waiting=self.waiting,
            counters=count(self.state.counters, **self.tally),
        )
        if not self.segments and not moves:
            return state, None
        plan_ = StepPlan(
            step=state.next_step,
            segments=tuple(self.segments),
            evicted=tuple(self.evicted),
            retracted=tuple(self.retracted),
            moves=moves,
        )
        if not self.segments:
            return state, plan_
        flying, counters = (*state.in_flight, expected(plan_)), count(state.counters, steps=1)
        return changed(state, next_step=plan_.step + 1, in_flight=flying, counters=counters), plan_
