"""The closed loop: N sessions live at once, each waiting for its reply, then its delay, then sending its next turn.

`ClosedLoop` says which turns are due; `play` runs them on a driver. Both take the time from a clock they are given, so
the same loop runs in real time and, for tests and comparisons, on a clock that counts steps.
"""

import heapq
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from penelope_jax.errors import InputError
from penelope_jax.events import Finished, Update
from penelope_jax.experiments.sessions import Conversation, Session
from penelope_jax.garbage import seldom_collected
from penelope_jax.metrics import Recorder
from penelope_jax.segments import SamplingParams

_MAX_IDLE_STEPS = 10_000  # steps in a row without any update, most of them moves, before `play` calls the engine stuck


class Call(NamedTuple):
    """A turn that is due: `tokens` i32[prompt_len] are its prompt."""

    session: int
    session_id: str
    turn: int
    tokens: np.ndarray
    output_len: int
    arrival_s: float
    cancel_s: float


class ClosedLoop:
    """Which turns are due.

    Args:
        sessions: started in this order; a finished one makes room for the next.
        num_live: sessions alive at once.
        vocab_size: of the model that reads the prompts.
    """

    def __init__(self, sessions: Sequence[Session], num_live: int, vocab_size: int):
        if num_live < 1:
            raise ValueError(f"{num_live=} must be at least 1.")
        self._sessions = sessions
        self._vocab_size = vocab_size
        self._live: dict[int, Conversation] = {}
        self._arrivals: list[tuple[float, int]] = []  # a heap of (time, session)
        self._num_started = 0
        self._num_ended = 0
        self._num_live = num_live

    @property
    def done(self) -> bool:
        return self._num_ended == len(self._sessions)

    @property
    def next_arrival_s(self) -> float | None:
        """When the next turn is due, as far as is known before a reply comes back."""
        return self._arrivals[0][0] if self._arrivals else None

    def due(self, now_s: float) -> list[Call]:
        """Returns the turns due at `now_s`, in order of arrival, each once. Starts sessions while there is room."""
        while len(self._live) < self._num_live and self._num_started < len(self._sessions):
            index = self._num_started
            self._num_started += 1
            conversation = Conversation(self._sessions[index], self._vocab_size)
            if conversation.done:
                self._num_ended += 1
                continue
            self._live[index] = conversation
            heapq.heappush(self._arrivals, (now_s, index))
        calls = []
        while self._arrivals and self._arrivals[0][0] <= now_s:
            arrival_s, index = heapq.heappop(self._arrivals)
            conversation = self._live[index]
            turn = conversation.session.turns[conversation.next_turn]
            session_id = conversation.session.session_id
            tokens, number = conversation.prompt(), conversation.next_turn
            calls.append(Call(index, session_id, number, tokens, turn.output_len, arrival_s, turn.cancel_s))
        return calls

    def replied(self, session: int, tokens: np.ndarray, now_s: float) -> None:
        """Takes the reply i32[output_len] to the turn that `session` waits for."""
        self._live[session].reply(tokens)
        self._go_on(session, now_s)

    def cancelled(self, session: int, now_s: float) -> None:
        """The client left the turn that `session` waits for."""
        self._live[session].skip()
        self._go_on(session, now_s)

    def _go_on(self, session: int, now_s: float) -> None:
        conversation = self._live[session]
        if conversation.done:
            del self._live[session]
            self._num_ended += 1
        else:
            delay_s = conversation.session.turns[conversation.next_turn].delay_s
            heapq.heappush(self._arrivals, (now_s + delay_s, session))


class StepClock:
    """A clock that counts steps: `play` moves it by `step_s` a step, and by the whole wait when nothing runs."""

    def __init__(self, step_s: float = 1.0):
        self.now_s = 0.0
        self.step_s = step_s

    def __call__(self) -> float:
        return self.now_s

    def wait(self, seconds: float) -> None:
        self.now_s += max(seconds, 0.0)

    def stepped(self) -> None:
        self.now_s += self.step_s


class RealClock:
    """Wall time since it was made. `stop` (a signal handler may call it) ends a wait at once."""

    def __init__(self):
        self._start_s = time.perf_counter()
        self._stopped = False

    def __call__(self) -> float:
        return time.perf_counter() - self._start_s

    def wait(self, seconds: float) -> None:
        until_s = self() + seconds
        while not self._stopped and (left_s := until_s - self()) > 0:
            time.sleep(min(left_s, 0.05))

    def stepped(self) -> None:
        pass

    def stop(self) -> None:
        self._stopped = True


class Clock(Protocol):
    """Seconds since the start of a run, and how they pass."""

    def __call__(self) -> float: ...
    def wait(self, seconds: float) -> None: ...
    def stepped(self) -> None: ...


class LoopDriver(Protocol):
    """What `play` needs of `penelope_jax.driver.Driver`."""

    @property
    def idle(self) -> bool: ...
    def submit(self, tokens: np.ndarray, sampling: SamplingParams = ..., *, session_id: str = ...) -> int: ...
    def abort(self, request_id: int) -> None: ...
    def step(self) -> list[Update]: ...


@seldom_collected()
def play(
    driver: LoopDriver,
    loop: ClosedLoop,
    recorder: Recorder,
    clock: Clock,
    *,
    sampling: Callable[[Call], SamplingParams] | None = None,
    on_submit: Callable[[int, Call], object] | None = None,
    on_update: Callable[[Update], object] | None = None,
    on_finish: Callable[[Call, np.ndarray], object] | None = None,
    stop: Callable[[], bool] = lambda: False,
    cancel: bool = True,
) -> bool:
    """Runs the loop on a driver until every session is over.

    Args:
        driver: idle, on the same clock.
        loop: the sessions.
        recorder: gets every request and update.
        clock: the time.
        sampling: how a turn samples; by default greedy, stops ignored, for the length that the trace says.
        on_submit, on_update, on_finish: called for each request, update, and reply.
        stop: asked before each step; True ends the run early.
        cancel: whether clients leave when the trace says so; else they wait for the reply.

    Returns:
        Whether it ran to the end.

    Raises:
        InputError: the engine refuses a request; the message says which.
    """
    calls: dict[int, Call] = {}
    num_idle_steps = 0
    while not loop.done:
        if stop():
            return False
        for call in loop.due(clock()):
            params = sampling(call) if sampling else SamplingParams(max_tokens=call.output_len)
            try:
                request_id = driver.submit(call.tokens, params, session_id=call.session_id)
            except ValueError as error:
                raise InputError(f"session {call.session_id!r}, turn {call.turn}: {error}") from error
            calls[request_id] = call
            recorder.submitted(request_id, call.session_id, call.turn, call.tokens, call.arrival_s)
            if on_submit:
                on_submit(request_id, call)
        if cancel:
            for request_id, call in [(i, c) for i, c in calls.items() if clock() >= c.arrival_s + c.cancel_s]:
                driver.abort(request_id)
                recorder.cancelled(request_id)
                loop.cancelled(calls.pop(request_id).session, clock())
                if on_finish:
                    on_finish(call, np.empty(0, np.int32))
        if driver.idle:
            if loop.next_arrival_s is not None:
                clock.wait(loop.next_arrival_s - clock())
            continue
        updates = driver.step()
        clock.stepped()
        num_idle_steps = 0 if updates else num_idle_steps + 1
        if num_idle_steps > _MAX_IDLE_STEPS:
            raise RuntimeError(
                f"the engine made no progress in {num_idle_steps} steps with {len(calls)} requests open."
            )
        now_s = clock()
        for update in updates:
            reply = recorder.update(update, now_s)
            if on_update:
                on_update(update)
            if isinstance(update, Finished) and reply is not None:
                call = calls.pop(update.request_id)
                loop.replied(call.session, reply, now_s)
                if on_finish:
                    on_finish(call, reply)
    return True
