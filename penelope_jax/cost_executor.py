"""Runs plans on a virtual clock: the simulator's executor. Steps and moves take the time that `StepTimer` says.

The device runs steps in the order of dispatch, the next one as soon as it was dispatched and the one before is over;
`collect` is where the host waits, so the clock goes on there. Each direction of the host link is a queue of its own
(or both share one, where the device's link is not full duplex) that runs beside the steps. A demotion is gathered on
the device behind the steps dispatched before it; a load may start at once. A move is over when the link is through
with it, and the host hears of it in `finish_moves`.
"""

import dataclasses
import hashlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from penelope_jax.moves import Move, MoveKind
from penelope_jax.segments import Segment, StepDone, StepPlan
from penelope_jax.step_time import StepTimer

_CHUNK = 256  # samples hashed at once
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class VirtualClock:
    """Seconds since the start of a simulation."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def wait(self, seconds: float) -> None:
        """Lets time pass while nothing runs."""
        self.now_s += max(seconds, 0.0)

    def advance_to(self, time_s: float) -> None:
        """Goes on to `time_s`, if that is not past."""
        self.now_s = max(self.now_s, time_s)

    def stepped(self) -> None:
        """A step ended; the executor has moved the clock already."""

    def stop(self) -> None:
        """Ends a wait at once; a virtual one takes no time."""


class PendingStep(NamedTuple):
    """A step on its way: what it will have produced, and when."""

    done: StepDone
    end_s: float


class MoveRecord(NamedTuple):
    """A move as the link carried it, on the virtual clock.

    Attributes:
        kind: which way.
        num_pages: its pages. num_swapped: those of them that were swapped.
        prefetch: whether it was for a request that waited.
        request_id: whom it was for; -1 for demotions.
        asked_s: when its plan was dispatched. start_s, end_s: when the link carried it.
    """

    kind: MoveKind
    num_pages: int
    num_swapped: int
    prefetch: bool
    request_id: int
    asked_s: float
    start_s: float
    end_s: float


class CostExecutor:
    """An executor without a device.

    Samples are a hash of (session, position), so that all policies see the same replies; log-probabilities are -1.

    Args:
        timer: how long things take.
        page_size: tokens a page.
        clock: moved by `collect` and `finish_moves`.
        vocab_size: samples are below it.
        session_of: names the session of a request; by default each request is its own.

    Attributes:
        moves: every move, in the order in which they were asked for.
        busy_s: time in which the device computed.
        move_wait_s: time in which the host waited for moves with nothing to compute.
    """

    def __init__(
        self,
        timer: StepTimer,
        *,
        page_size: int,
        clock: VirtualClock,
        vocab_size: int = 50_000,
        session_of: Callable[[int], str] = str,
    ):
        self.timer = timer
        self.clock = clock
        self.page_size = page_size
        self.vocab_size = vocab_size
        self.session_of = session_of
        self.moves: list[MoveRecord] = []
        self.busy_s = 0.0
        self.move_wait_s = 0.0
        self._free_s = 0.0  # when the device is through with all steps dispatched
        self._link_free_s = [0.0, 0.0]  # host to device, device to host
        self._moving: list[tuple[float, int]] = []  # (end, move id)
        self._samples: dict[tuple[str, int], np.ndarray] = {}  # by session and chunk of positions

    @property
    def free_s(self) -> float:
        """When the device is through with all steps dispatched so far."""
        return self._free_s

    # Steps.

    def dispatch(self, plan: StepPlan) -> PendingStep:
        """Starts a step when the device is free."""
        tokens = np.array([self._sample(s) for s in plan.segments if s.sample is not None], np.int32)
        scored = [segment.targets for segment in plan.segments if segment.targets is not None]
        ranks = np.broadcast_to(np.arange(plan.top_logprobs, dtype=np.int32), (len(tokens), plan.top_logprobs))
        end_s = self.run_for(self.timer.seconds(plan.segments))
        done = StepDone(
            step=plan.step,
            tokens=tokens,
            logprobs=np.full(len(tokens), -1.0, np.float32),
            scores=tuple(np.where(targets >= 0, -1.0, np.nan).astype(np.float32) for targets in scored),
            time_s=end_s,
            top_tokens=(tokens[:, None] + ranks) % self.vocab_size if plan.top_logprobs else None,
            top_logprobs=np.subtract(-1, ranks, dtype=np.float32) if plan.top_logprobs else None,
        )
        return PendingStep(done, end_s)

    def run_for(self, seconds: float) -> float:
        """Occupies the device, from now or from when it is free; returns until when."""
        self.busy_s += seconds
        self._free_s = max(self._free_s, self.clock.now_s) + seconds
        return self._free_s

    def collect(self, pending: PendingStep, time_s: float = 0.0) -> StepDone:
        """Waits for a step."""
        self.clock.advance_to(pending.end_s)
        return dataclasses.replace(pending.done, time_s=max(time_s, pending.end_s))

    # Samples.

    def tokens(self, session_id: str, start: int, stop: int) -> np.ndarray:
        """Returns i32[stop - start]: what a session's requests sample at positions `[start, stop)`."""
        chunks = range(start // _CHUNK, -(-stop // _CHUNK))
        found = [self._chunk(session_id, chunk) for chunk in chunks]
        first = start - chunks.start * _CHUNK
        return np.concatenate(found)[first : first + stop - start] if found else np.empty(0, np.int32)

    def _sample(self, segment: Segment) -> int:
        chunk, place = divmod(segment.stop, _CHUNK)
        return int(self._chunk(self.session_of(segment.request_id), chunk)[place])

    def _chunk(self, session_id: str, chunk: int) -> np.ndarray:
        found = self._samples.get((session_id, chunk))
        if found is None:
            if len(self._samples) >= 4096:
                self._samples.clear()
            digest = hashlib.blake2b(f"{session_id}:{chunk}".encode(), digest_size=8).digest()
            x = np.uint64(int.from_bytes(digest, "little")) + np.arange(_CHUNK, dtype=np.uint64) * _GOLDEN
            x = (x ^ (x >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9)
            found = ((x ^ (x >> np.uint64(29))) % np.uint64(self.vocab_size)).astype(np.int32)
            self._samples[session_id, chunk] = found
        return found

    # Moves.

    def start_moves(self, moves: tuple[Move, ...]) -> None:
        """Puts moves into the queue of their link; called before the plan's step is dispatched."""
        now_s = self.clock.now_s
        for move in moves:
            demotes = move.kind is MoveKind.DEMOTE
            link = int(demotes and self.timer.device.full_duplex)
            ready_s = max(now_s, self._free_s) if demotes else now_s
            start_s = max(ready_s, self._link_free_s[link])
            end_s = start_s + self.timer.move_seconds(len(move.device_ids), self.page_size)
            self._link_free_s[link] = end_s
            if move.blocking:
                self._free_s = max(self._free_s, end_s)
            self._moving.append((end_s, move.move_id))
            self.moves.append(
                MoveRecord(
                    kind=move.kind,
                    num_pages=len(move.device_ids),
                    num_swapped=move.num_swapped,
                    prefetch=move.prefetch,
                    request_id=move.request_id,
                    asked_s=now_s,
                    start_s=start_s,
                    end_s=end_s,
                )
            )

    def finish_moves(self, *, wait: bool = False) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the ids of the moves that are over, and of those that failed (none); each once.

        Args:
            wait: whether to wait for the next one to be over, if none is and some are on their way.
        """
        if wait and self._moving:
            next_s = min(end_s for end_s, _ in self._moving)
            self.move_wait_s += max(0.0, next_s - self.clock.now_s)
            self.clock.advance_to(next_s)
        over = [(end_s, move_id) for end_s, move_id in self._moving if end_s <= self.clock.now_s]
        if over:
            self._moving = [move for move in self._moving if move[0] > self.clock.now_s]
        return tuple(move_id for _, move_id in over), ()

    @property
    def next_move_s(self) -> float:
        """When the next move on its way is over; infinity when none is."""
        return min((end_s for end_s, _ in self._moving), default=float("inf"))
