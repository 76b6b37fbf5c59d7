"""The loop that holds a state and an executor: apply, plan, run."""

import dataclasses
import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from penelope_jax import engine
from penelope_jax.config import EngineConfig
from penelope_jax.event_log import EventLogWriter
from penelope_jax.events import (
    Abort,
    Admitted,
    Event,
    Finished,
    Flush,
    MoveDone,
    Refused,
    RequestMetrics,
    Sampled,
    Scored,
    Stop,
    Submit,
    Update,
)
from penelope_jax.invariants import check_idle
from penelope_jax.moves import Move
from penelope_jax.radix_tree import CacheState
from penelope_jax.segments import SamplingParams, Segment, StepDone, StepPlan
from penelope_jax.state import EngineState, make_state
from penelope_jax.transfer_faults import TransferFaults

# Is told each output token of a request, in order; returns whether the request is over with it.
Watch = Callable[[int], bool]


class Executor(Protocol):
    """What runs plans, in the order of dispatch."""

    def dispatch(self, plan: StepPlan) -> Any:
        """Starts a step and does not wait for it; returns what `collect` wants."""
        ...

    def collect(self, pending: Any, time_s: float = 0.0) -> StepDone:
        """Waits for a step."""
        ...

    def start_moves(self, moves: tuple[Move, ...]) -> None:
        """Starts a plan's moves, before its segments are dispatched, and waits for none."""
        ...

    def finish_moves(self, *, wait: bool = False) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns ids of the moves that ended, done ones and failed ones, each in order of start and each once.

        With `wait` nothing else can run: it returns when at least one has ended, if any is under way.
        """
        ...


class GenerateResult(NamedTuple):
    """One request, from prompt to end.

    Attributes:
        tokens: sampled token ids.
        logprobs: f32[len(tokens)].
        prompt_logprobs: f32[n] of prompt tokens from `prompt_logprobs_from + 1` on; empty when not asked for.
        metrics: what the prompt cost.
        reason: why it ended.
    """

    tokens: list[int]
    logprobs: np.ndarray
    prompt_logprobs: np.ndarray
    metrics: RequestMetrics | None
    reason: str


class Driver:
    """Runs requests on an executor, one step at a time.

    With `overlap` the host plans step t + 1 while the device runs step t: sampled tokens go from step to step on the
    device, and the host hears of them one step late. Outputs are the same; a request that ends on a stop token costs
    one more row.

    With `log`, every event and plan is written there before it takes effect; whoever opened the log closes it. With
    `cache` it starts with what a snapshot restored.

    Not thread safe: one thread owns it.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        clock: Callable[[], float] = time.perf_counter,
        *,
        overlap: bool = False,
        log: EventLogWriter | None = None,
        cache: CacheState | None = None,
    ):
        if log is not None and log.config != config:
            raise ValueError("the event log was opened for another configuration.")
        if log is not None and cache is not None and cache.num_resident:
            raise ValueError(f"an event log begins with an empty cache; this one holds {cache.num_resident} pages.")
        self.state: EngineState = make_state(config)
        if cache is not None:
            self.state = dataclasses.replace(self.state, cache=cache)
        self.log = log
        self.executor = executor
        self.clock = clock
        self.overlap = overlap
        self._flying: list[Any] = []  # dispatched and not collected, oldest first
        self._moving: set[int] = set()  # ids of moves that were started and have not ended
        self._next_id = 0
        self._announced: set[int] = set()
        self._watched: dict[int, tuple[Watch, int]] = {}  # of a request: who watches, and the length of its prompt
        self._pending: list[Update] = []

    @property
    def idle(self) -> bool:
        """Whether no request is waiting or running."""
        return self.state.idle

    def submit(
        self,
        tokens,
        sampling: SamplingParams = SamplingParams(),
        *,
        session_id: str = "",
        cache_salt: str = "",
        watch: Watch | None = None,
    ) -> int:
        """Queues a request.

        Args:
            tokens: token ids, i32[n] or a list.
            sampling: how to sample.
            session_id: whose turn it is; for reports only.
            cache_salt: requests with different salts share no cache.
            watch: is told each output token before the next step is planned; where it returns True the request ends
                with reason `stop`. `TextStream.push` ends requests at stop strings.

        Returns:
            The id that updates will carry.

        Raises:
            ValueError: it can never run; the message says why.
        """
        request_id = self._next_id
        self._next_id += 1  # also of a refused request: the log names each by its own id
        event = Submit(
            request_id=request_id,
            tokens=np.asarray(tokens) if len(tokens) else np.empty(0, np.int32),
            sampling=sampling,
            session_id=session_id,
            cache_salt=cache_salt,
            time_s=self.clock(),
        )
        for update in self._apply(event):
            if isinstance(update, Refused):
                raise ValueError(update.message)
        if watch is not None:
            self._watched[request_id] = (watch, len(event.tokens))
        return request_id

    def submit_many(
        self,
        tokens,
        sampling: SamplingParams = SamplingParams(),
        number: int = 1,
        *,
        session_id: str = "",
        cache_salt: str = "",
        watches: Sequence[Watch] | None = None,
    ) -> list[int]:
        """Queues `number` requests of one prompt, with `choice` 0, 1, ...; the prompt is computed once.

        Args:
            tokens: as in `submit`.
            sampling: how to sample; its `choice` does not matter.
            number: how many.
            session_id: as in `submit`.
            cache_salt: as in `submit`.
            watches: one for each; None: none.

        Returns:
            Their ids, by choice.

        Raises:
            ValueError: they can never run, or `number` is below 1 or not the number of watches; none is queued.
        """
        if number < 1:
            raise ValueError(f"{number=} of choices must be at least 1.")
        if watches is not None and len(watches) != number:
            raise ValueError(f"{len(watches)} watches for {number=} choices; there must be one for each.")
        return [
            self.submit(
                tokens,
                dataclasses.replace(sampling, choice=choice),
                session_id=session_id,
                cache_salt=cache_salt,
                watch=None if watches is None else watches[choice],
            )
            for choice in range(number)
        ]

    def stop(self, request_id: int, num_tokens: int) -> None:
        """Ends a request with reason `stop` after its first `num_tokens` outputs; its `Finished` comes with a step.

        Raises:
            ValueError: it has not sampled that many, or `num_tokens` is below 1.
        """
        self._pending.extend(self._apply(Stop(request_id=request_id, num_tokens=num_tokens, time_s=self.clock())))

    def abort(self, request_id: int) -> None:
        """Ends a request. What it computed stays as cache; its `Finished` comes with the next step."""
        self._pending.extend(self._apply(Abort(request_id=request_id, time_s=self.clock())))

    def flush(self) -> None:
        """Drops all K/V that no request holds."""
        self._apply(Flush(time_s=self.clock()))

    def step(self) -> list[Update]:
        """Plans and starts one step, and waits for it; with `overlap`, for the one before.

        Moves between the tiers are waited for only when no step can run before one of them ends.

        Returns:
            What happened, in order; empty when there was nothing to do.

        Raises:
            RuntimeError: requests are left but none can go on, which is a fault of the engine.
        """
        updates, self._pending = self._pending, []
        updates.extend(self._finish_moves(wait=False))
        if self.state.idle:
            return updates
        self.state, plan = engine.plan(self.state)
        if self.log is not None:
            self.log.planned(plan)
        for request in self.state.running:
            if request.request_id not in self._announced:
                assert request.metrics is not None, "an admitted request has metrics"
                self._announced.add(request.request_id)
                updates.append(Admitted(request_id=request.request_id, metrics=request.metrics))
        if plan is not None and plan.moves:
            self._moving.update(move.move_id for move in plan.moves)
            self.executor.start_moves(plan.moves)
        runs = plan is not None and bool(plan.segments)
        if plan is not None and plan.segments:
            self._flying.append(self.executor.dispatch(plan))
        if self._flying:
            if not runs or not self.overlap or len(self._flying) > 1:
                done = self.executor.collect(self._flying.pop(0))
                updates.extend(self._apply(dataclasses.replace(done, time_s=self.clock())))
        elif self._moving:
            updates.extend(self._finish_moves(wait=True))
        else:
            raise RuntimeError(
                f"{len(self.state.running)} running and {len(self.state.waiting)} waiting requests, "
                f"{self.state.cache.device.num_free} free pages, and none can go on."
            )
        if self.state.idle:
            check_idle(self.state.cache)
        return updates

    def drain_moves(self) -> None:
        """Waits until no move between the tiers is under way; before a snapshot, and at the end."""
        while self._moving:
            self._pending.extend(self._finish_moves(wait=True))

    def _finish_moves(self, *, wait: bool) -> list[Update]:
        if not self._moving:
            return []
        done, failed = self.executor.finish_moves(wait=wait)
        if not done and not failed:
            if wait:
                raise RuntimeError(f"{len(self._moving)} moves are under way, but the executor knows of none.")
            return []
        self._moving.difference_update(done, failed)
        return self._apply(MoveDone(done=done, failed=failed, time_s=self.clock()))

    def _apply(self, event: Event) -> list[Update]:
        if self.log is not None:
            self.log.event(event)
        self.state, applied = engine.apply(self.state, (event,))
        updates = list(applied)
        stops: dict[int, int] = {}
        for update in applied:
            match update:
                case Sampled(request_id=id_) if id_ in self._watched:
                    watch, prompt_len = self._watched[id_]
                    if watch(update.token):
                        stops[id_] = update.position + 1 - prompt_len
                case Finished(request_id=id_):
                    self._announced.discard(id_)
                    self._watched.pop(id_, None)
                    stops.pop(id_, None)
        for request_id, num_tokens in stops.items():
            updates.extend(self._apply(Stop(request_id=request_id, num_tokens=num_tokens, time_s=self.clock())))
        return updates

    def generate(self, tokens, sampling: SamplingParams = SamplingParams(), **options: Any) -> GenerateResult:
        """Runs steps until one request is done. Updates of other requests are kept for the next `step`.

        `options` are those of `submit`.

        Raises:
            ValueError: it can never run.
        """
        request_id = self.submit(tokens, sampling, **options)
        sampled: list[Sampled] = []
        scores: list[np.ndarray] = []
        others: list[Update] = []
        finished: Finished | None = None
        while finished is None:
            for update in self.step():
                match update:
                    case Sampled(request_id=id_) if id_ == request_id:
                        sampled.append(update)
                    case Scored(request_id=id_) if id_ == request_id:
                        scores.append(update.logprobs)
                    case Finished(request_id=id_) if id_ == request_id:
                        finished = update
                    case Admitted(request_id=id_) if id_ == request_id:
                        pass
                    case _:
                        others.append(update)
        self._pending = [*others, *self._pending]
        return GenerateResult(
            [token.token for token in sampled],
            np.array([token.logprob for token in sampled], np.float32),
            np.concatenate(scores) if scores else np.empty(0, np.float32),
            finished.metrics,
            finished.reason,
        )


class HashExecutor:
    """Samples a hash of (request, position), without a device: for tests of what surrounds the model.

    Args:
        vocab_size: samples are below it.
        move_delay: most polls for which a move lasts; how many is drawn by seed.
        fail_moves: share of moves that fail.
        seed: of delays and failures.
    """

    def __init__(self, vocab_size: int = 50_000, *, move_delay: int = 0, fail_moves: float = 0.0, seed: int = 0):
        self.vocab_size = vocab_size
        self._faults = TransferFaults(seed=seed, fail_starts=fail_moves, delay_polls=move_delay)
        self._moves: dict[int, tuple[Move, int]] = {}  # by id, in order of start, with the polls left

    def dispatch(self, plan: StepPlan) -> StepDone:
        """Makes up the samples of a plan; log-probabilities are -1, of the ranks below -2, -3 and so on."""
        sampling = [segment for segment in plan.segments if segment.sample is not None]
        scored = [segment.targets for segment in plan.segments if segment.targets is not None]
        tokens = np.array([self._token(segment) for segment in sampling], np.int32)
        ranks = np.broadcast_to(np.arange(plan.top_logprobs, dtype=np.int32), (len(tokens), plan.top_logprobs))
        return StepDone(
            step=plan.step,
            tokens=tokens,
            logprobs=np.full(len(sampling), -1.0, np.float32),
            scores=tuple(np.where(targets >= 0, -1.0, np.nan).astype(np.float32) for targets in scored),
            top_tokens=(tokens[:, None] + ranks) % self.vocab_size if plan.top_logprobs else None,
            top_logprobs=np.subtract(-1, ranks, dtype=np.float32) if plan.top_logprobs else None,
        )

    def collect(self, pending: StepDone, time_s: float = 0.0) -> StepDone:
        """Returns what `dispatch` made up."""
        return dataclasses.replace(pending, time_s=time_s)

    def run(self, plan: StepPlan, time_s: float = 0.0) -> StepDone:
        """Runs a step at once."""
        return self.collect(self.dispatch(plan), time_s)

    def start_moves(self, moves: tuple[Move, ...]) -> None:
        """Notes moves; nothing is copied."""
        self._moves.update((move.move_id, (move, self._faults.polls(move))) for move in moves)

    def finish_moves(self, *, wait: bool = False) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ends the moves whose time has come."""
        ended = self._poll_moves()
        while wait and self._moves and not ended:
            ended = self._poll_moves()
        failed = tuple(move.move_id for move in ended if self._faults.start_fails(move))
        return tuple(move.move_id for move in ended if move.move_id not in failed), failed

    def _poll_moves(self) -> list[Move]:
        ended = [move for move, polls in self._moves.values() if not polls]
        self._moves = {id_: (move, polls - 1) for id_, (move, polls) in self._moves.items() if polls}
        return ended

    def _token(self, segment: Segment) -> int:
        digest = hashlib.blake2b(f"{segment.request_id}:{segment.stop}".encode(), digest_size=4).digest()
        return int.from_bytes(digest, "little") % self.vocab_size
