"""A driver for simulations that goes through runs of like decode steps at once.

Most steps of a simulation only decode: one token more for each running request, and nothing else. While that is so the
next state follows from the last one by counting, and `RunningDriver` counts instead of planning each step. What it
skips is bookkeeping and no decision: every step that takes a page, admits, evicts, moves, finishes or hears of a new
request is planned by the engine, and a run of counted steps leaves the state, the clock and the updates exactly as the
engine would have left them (`tests/test_decode_runs.py` compares both).

A run of m steps is counted only if
- every running request had a decode row in the last step, so that it has one in the next, and nothing else is to run;
- if requests wait, the last step was planned by the engine and changed nothing in the cache but stamps (and pins given
  back) of waiting histories; so the next plan, which sees the same, does the same;
- no request takes a page, or reaches its last token, within the m steps, and if requests wait in the one behind them;
- no new request arrives, no move ends and no waiting request becomes overdue (`lpm-cost`) before the step behind them,
  which the engine plans and which stamps what each of them would have stamped.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from penelope_jax.config import EngineConfig
from penelope_jax.cost_executor import CostExecutor, PendingStep
from penelope_jax.driver import Driver
from penelope_jax.events import Sampled, Update
from penelope_jax.pages import PagePool
from penelope_jax.radix_tree import CacheState
from penelope_jax.segments import StepDone
from penelope_jax.state import EngineState, InFlight, Request, count

_LEAST_STEPS = 2  # shorter runs are not worth it


class RunningDriver(Driver):
    """Runs requests on a `CostExecutor`.

    Args:
        config: of the engine.
        executor: the simulated device; its clock is the driver's.
        next_arrival_s: when the next request will be submitted, as far as is known; None: not before a reply.
        overlap: as in `Driver`.
        count_runs: whether runs of decode steps are counted; else the engine plans each.

    Attributes:
        counted_steps: steps that were counted.
    """

    executor: CostExecutor

    def __init__(
        self,
        config: EngineConfig,
        executor: CostExecutor,
        *,
        next_arrival_s: Callable[[], float | None],
        overlap: bool = True,
        count_runs: bool = True,
    ):
        super().__init__(config, executor, clock=executor.clock, overlap=overlap)
        self.counted_steps = 0
        self._next_arrival_s = next_arrival_s
        self._count_runs = count_runs
        self._before: EngineState | None = None  # before the last step that the engine planned

    def step(self) -> list[Update]:
        """Counts a run of decode steps, if one is ahead; then plans and starts one step as `Driver.step` does."""
        updates: list[Update] = []
        if self._count_runs and not self._pending and not self._watched:
            updates = self._count_ahead()
        self._before = self.state
        updates.extend(super().step())
        return updates

    def _count_ahead(self) -> list[Update]:
        state = self.state
        if not _only_decodes(state, self.overlap):
            return []
        if state.waiting and (self._before is None or not _steady(self._before, state)):
            return []
        # Where requests wait, the step behind the run must stamp them before anything else happens.
        most = min(_steps_left(request, state.config.page_size) for request in state.running) - bool(state.waiting)
        if most < _LEAST_STEPS:
            return []
        num_steps = self._run_clock(most, self._until_s())
        return self._counted(num_steps) if num_steps else []

    def _until_s(self) -> float:
        """Returns the time from which on the engine would see something new."""
        next_arrival_s = self._next_arrival_s()
        until_s = (
            self.executor.next_move_s if next_arrival_s is None else min(next_arrival_s, self.executor.next_move_s)
        )
        if self.state.config.scheduler == "lpm-cost":
            for request in self.state.waiting:
                overdue_s = request.arrival_s + self.state.config.max_wait_s
                if overdue_s >= self.state.now_s:
                    until_s = min(until_s, overdue_s)
        return until_s

    def _run_clock(self, most: int, until_s: float) -> int:
        """Lets up to `most` decode steps pass, as long as the clock stays below `until_s`; returns how many."""
        executor, clock, timer = self.executor, self.executor.clock, self.executor.timer
        num_rows = len(self.state.running)
        positions = sum(request.next_pos for request in self.state.running) * timer.scale
        for step in range(most):
            seconds = timer.decode_seconds(num_rows, positions + step * num_rows * timer.scale)
            # The host waits for the step in flight, or without overlap for this one.
            seen_s = executor.free_s if self.overlap else max(executor.free_s, clock.now_s) + seconds
            if max(seen_s, clock.now_s) >= until_s:
                return step
            executor.run_for(seconds)
            clock.advance_to(seen_s)
        return most

    def _counted(self, num_steps: int) -> list[Update]:
        """Brings the state to where `num_steps` decode steps leave it; the clock is there already."""
        self.counted_steps += num_steps
        state, executor = self.state, self.executor
        sampled = [self._samples(request, num_steps).tolist() for request in state.running]
        updates: list[Update] = [
            Sampled(
                request_id=request.request_id,
                token=tokens[step],
                logprob=-1.0,
                position=len(request.prompt) + len(request.outputs) + step,
            )
            for step in range(num_steps)
            for request, tokens in zip(state.running, sampled, strict=True)
        ]
        running = tuple(
            dataclasses.replace(
                request,
                next_pos=request.next_pos + num_steps,
                outputs=(*request.outputs, *tokens),
                last_step=request.last_step + num_steps,
            )
            for request, tokens in zip(state.running, sampled, strict=True)
        )
        cache = state.cache
        if state.waiting:
            assert self._before is not None, "requests wait, so a step was compared"
            before = self._before.cache
            cache = dataclasses.replace(
                cache,
                clock=cache.clock + num_steps * (cache.clock - before.clock),
                next_pin_id=cache.next_pin_id + num_steps * (cache.next_pin_id - before.next_pin_id),
            )
        self.state = dataclasses.replace(
            state,
            cache=cache,
            running=running,
            in_flight=tuple(dataclasses.replace(flight, step=flight.step + num_steps) for flight in state.in_flight),
            next_step=state.next_step + num_steps,
            now_s=max(state.now_s, executor.clock.now_s),
            counters=count(state.counters, steps=num_steps, decode_tokens=num_steps * len(running)),
        )
        self._flying = [self._pending_step(flight, running) for flight in self.state.in_flight]
        return updates

    def _pending_step(self, flight: InFlight, running: tuple[Request, ...]) -> PendingStep:
        done = StepDone(
            step=flight.step,
            tokens=np.concatenate([self._samples(request, 1) for request in running]),
            logprobs=np.full(len(running), -1.0, np.float32),
            time_s=self.executor.free_s,
        )
        return PendingStep(done, self.executor.free_s)

    def _samples(self, request: Request, number: int) -> np.ndarray:
        """Returns i32[number]: what the executor samples next for a request."""
        start = len(request.prompt) + len(request.outputs)
        return self.executor.tokens(self.executor.session_of(request.request_id), start, start + number)


def _only_decodes(state: EngineState, overlap: bool) -> bool:
    """Whether the last step gave each running request a decode row, as the next one will."""
    if not state.running or len(state.in_flight) != overlap:
        return False
    ids = tuple(request.request_id for request in state.running)
    if any(flight.sampled != ids or flight.scored for flight in state.in_flight):
        return False
    return all(
        request.outputs
        and request.prefilled
        and request.feed == index
        and request.last_step == state.next_step - 1
        and request.num_in_flight == overlap
        and not request.leaving
        and not request.sampling.end_token_ids
        and not request.sampling.top_logprobs
        for index, request in enumerate(state.running)
    )


# What a plan changes in the cache when it only decodes and looks at waiting requests: stamps, where those are kept, and
# the numbers of pins that are given back at once.
_MAY_CHANGE = {"nodes", "leaves", "device_leaves", "clock", "next_pin_id"}
_REQUEST_FIELDS = dataclasses.fields(Request)


def _steady(before: EngineState, after: EngineState) -> bool:
    """Whether planning left the queue and the cache as they were, but for stamps."""
    if not _same_queue(before.waiting, after.waiting) or len(before.running) != len(after.running):
        return False
    if any(a.request_id != b.request_id for a, b in zip(before.running, after.running, strict=True)):
        return False
    for field in dataclasses.fields(CacheState):
        old, new = getattr(before.cache, field.name), getattr(after.cache, field.name)
        if field.name not in _MAY_CHANGE and old is not new and (isinstance(old, PagePool) or old != new):
            return False
    return True


def _same_queue(before: tuple[Request, ...], after: tuple[Request, ...]) -> bool:
    """Whether the same requests wait, whatever is remembered of their last lookup."""
    return len(before) == len(after) and all(
        old is new
        or all(vars(old)[field.name] is vars(new)[field.name] for field in _REQUEST_FIELDS if field.name != "lookup")
        for old, new in zip(before, after, strict=True)
    )


def _steps_left(request: Request, page_size: int) -> int:
    """Returns how many decode steps a request goes on for without a new page and without its last token."""
    room = len(request.page_table) * page_size - request.next_pos
    return min(room, request.max_tokens - 1 - request.output_len)
