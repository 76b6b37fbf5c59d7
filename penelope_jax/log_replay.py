"""A run again, from its event log: the same events and calls of `plan`, and proof that the plans are the same."""

import os
from collections.abc import Iterator
from typing import NamedTuple

from penelope_jax import engine
from penelope_jax.errors import InputError
from penelope_jax.event_log import LogHeader, Planned, plan_digest, read_events
from penelope_jax.events import Event, Update
from penelope_jax.segments import StepDone, StepPlan
from penelope_jax.state import EngineState, make_state


class Moment(NamedTuple):
    """One entry of a log, replayed.

    Attributes:
        entry: what happened.
        before, after: the state around it. States are values: keep as many as you like.
        updates: what clients heard of.
        plan: what `plan` returned, when it was called.
    """

    entry: Event | Planned
    before: EngineState
    after: EngineState
    updates: tuple[Update, ...]
    plan: StepPlan | None

    @property
    def planned_step(self) -> int | None:
        """The step that was planned here; None: something else happened, or a plan that runs nothing."""
        return self.plan.step if self.plan is not None and self.plan.segments else None

    @property
    def step(self) -> int:
        """The step this belongs to: the one planned or done, or else the next one to be planned."""
        match self.entry:
            case StepDone(step=step) | Planned(step=int(step)):
                return step
        return self.before.next_step


class LogReplay:
    """Replays a log, entry by entry, as it is iterated, once.

    Iterating raises InputError where the log is damaged, where a plan is not the one that was logged, or where the
    engine refuses an event; moments before it were right.

    Attributes:
        header: what the log says of its run.
        num_plans: plans made again so far, all as logged.
        last_step: the last step planned so far; -1: none.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.header: LogHeader
        self.header, self._entries = read_events(path)
        self.num_plans = 0
        self.last_step = -1
        self._moments = self._replay()

    @property
    def ending(self) -> str:
        """How the log ends, in words; "" until everything was read."""
        return self._entries.ending

    @property
    def complete(self) -> bool:
        """Whether the log has its last record, once everything was read."""
        return self._entries.complete

    def __iter__(self) -> Iterator[Moment]:
        return self._moments

    def close(self) -> None:
        """Ends the replay early."""
        self._moments.close()
        self._entries.close()

    def _replay(self):
        place = f"event log {self._entries.path}"
        state = make_state(self.header.config)
        for kind, entry in self._entries:
            before = state
            try:
                if isinstance(entry, Planned):
                    state, plan = engine.plan(before)
                    updates = ()
                else:
                    (state, updates), plan = engine.apply(before, (entry,)), None
            except ValueError as error:
                number = self._entries.num_records - 1
                raise InputError(f"{place}: record {number} ({kind}) cannot be replayed: {error}") from error
            if isinstance(entry, Planned):
                self._compare(place, entry, plan)
            yield Moment(entry, before, state, updates, plan)

    def _compare(self, place: str, logged: Planned, plan: StepPlan | None) -> None:
        if plan_digest(plan) != logged.digest:
            step = "what was no step" if logged.step is None else f"step {logged.step}"
            writer = self.header.run.get("commit") or "unknown"
            raise InputError(
                f"{place}: record {self._entries.num_records - 1}: planned again, {step} is another plan; the "
                f"{self.num_plans} plans before it are the same. The log was written by commit {writer}."
            )
        self.num_plans += 1
        if plan is not None and plan.segments:
            self.last_step = plan.step


def rebuild(path: str | os.PathLike[str], step: int | None = None) -> EngineState:
    """Makes a past state again.

    Args:
        path: an event log.
        step: the state is the one right after this step was planned; None: the last one of the log.

    Raises:
        InputError: the log cannot be read or replayed up to there, or there is no such step in it.
    """
    return moment_of(path, step)[0].after


def moment_of(path: str | os.PathLike[str], step: int | None = None) -> tuple[Moment, LogReplay]:
    """Replays a log up to the moment in which a step was planned; see `rebuild`.

    Returns:
        The moment, and the replay that got there.
    """
    replay = LogReplay(path)
    state = make_state(replay.header.config)
    moment = Moment(Planned(None, b""), state, state, (), None)
    for moment in replay:
        if step is not None and moment.planned_step == step:
            replay.close()
            return moment, replay
    if step is not None:
        raise no_such_step(path, step, replay)
    return moment, replay


def no_such_step(path: str | os.PathLike[str], step: int, replay: LogReplay) -> InputError:
    """Returns the error for a step that a log does not have, once it was replayed."""
    steps = f"steps 0 to {replay.last_step}" if replay.last_step >= 0 else "no step"
    note = "" if replay.complete else f" {replay.ending}"
    return InputError(f"event log {path}: has no step {step}; it has {steps}.{note}")
