"""What happened in a run, one thing at a time, and a small language to look for it.

A query is a kind of occurrence and, after it, filters that must all hold:

    evict session=3        refill step=120        finish request=17

`demote` and `load` are moves between the tiers that begin, `moved` and `lost` how they end.
"""

import shlex
from collections.abc import Iterator
from typing import NamedTuple

from penelope_jax.errors import InputError
from penelope_jax.events import Abort, Finished, MoveDone, Refused, RequestMetrics, Submit
from penelope_jax.experiments import log_conversations
from penelope_jax.experiments.log_conversations import Conversations, Part
from penelope_jax.log_replay import Moment
from penelope_jax.moves import Move, MoveKind
from penelope_jax.segments import SegmentKind
from penelope_jax.state import EngineState, Request

MOVES = ("demote", "load", "moved", "lost")
KINDS = ("submit", "admit", "evict", "refill", "retract", "finish", "abort", "refuse", *MOVES)
FILTERS = ("session", "request", "step")


class Occurrence(NamedTuple):
    """Something that happened.

    Attributes:
        step: the step it belongs to: the one planned or done, or else the next one to be planned.
        kind: one of KINDS.
        requests: ids of the requests it happened to; of the last of each history where it happened to pages.
        sessions: their sessions.
        who: the same as text.
        text: what happened.
    """

    step: int
    kind: str
    requests: tuple[int, ...]
    sessions: tuple[str, ...]
    who: str
    text: str

    def __str__(self) -> str:
        return f"step {self.step:<5}  {self.kind:<7}  {self.who}: {self.text}"


class Query(NamedTuple):
    """What to look for; a filter that is None takes everything."""

    kind: str
    session: str | None
    request: int | None
    step: int | None

    def matches(self, occurrence: Occurrence) -> bool:
        return (
            self.kind == occurrence.kind
            and (self.session is None or self.session in occurrence.sessions)
            and (self.request is None or self.request in occurrence.requests)
            and (self.step is None or self.step == occurrence.step)
        )


def parse_query(text: str) -> Query:
    """Reads a query.

    Raises:
        InputError: it is none; the message says what is.
    """
    try:
        kind, *words = shlex.split(text) or [""]
    except ValueError as error:
        raise InputError(f"query {text!r}: {error}.") from error
    if kind not in KINDS:
        raise InputError(f"query {text!r}: {kind!r} is not one of {', '.join(KINDS)}.")
    given: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name not in FILTERS:
            raise InputError(f"query {text!r}: {word!r} is not one of session=NAME, request=N, step=N.")
        if name in given:
            raise InputError(f"query {text!r}: {name}= is given twice.")
        given[name] = value
    numbers = {name: given[name] for name in ("request", "step") if name in given}
    for name, value in numbers.items():
        if not (value.isascii() and value.isdigit()):
            raise InputError(f"query {text!r}: {name}={value} must be a whole number, at least 0.")
    request, step = (int(numbers[name]) if name in numbers else None for name in ("request", "step"))
    return Query(kind, given.get("session"), request, step)


def hits_text(metrics: RequestMetrics) -> str:
    """Returns where the tokens of a prompt come from."""
    host = f", {metrics.host_hit} host hit" if metrics.host_hit else ""
    return f"{metrics.device_hit} hit{host}, {metrics.refilled} refilled, {metrics.new} new"


def span_text(start: int, stop: int, page_size: int) -> str:
    """Returns a span of pages and its size."""
    return f"[{start}, {stop}), {counted((stop - start) // page_size, 'page')}"


def counted(number: int, word: str, plural: str = "") -> str:
    """Returns a number of things."""
    return f"{number} {word}" if number == 1 else f"{number} {plural or word + 's'}"


def occurrences(moment: Moment, conversations: Conversations) -> Iterator[Occurrence]:
    """Yields what happened in a moment that `conversations` has seen, in order."""

    def one(kind: str, request_id: int, text: str) -> Occurrence:
        session, who = conversations.session_of(request_id), conversations.who(request_id)
        return Occurrence(moment.step, kind, (request_id,), (session,), who, text)

    entry, before, after = moment.entry, moment.before, moment.after
    if isinstance(entry, Submit):
        yield one("submit", entry.request_id, _prompt_text(entry))
    elif isinstance(entry, Abort):
        for request in _live(before):
            if request.request_id == entry.request_id and request.leaving in ("", "retract"):
                yield one("abort", request.request_id, f"after {counted(request.output_len, 'output')}")
    for loss in conversations.losses(moment):
        yield _of_pages(moment, "evict", loss, "")
    yield from _moves(moment, conversations)
    seen = {request.request_id: request for request in _live(before)}
    for request in _live(after):
        earlier = seen.get(request.request_id)
        if earlier is None:
            continue
        if request.metrics is not None and earlier.metrics is None:
            yield one("admit", request.request_id, hits_text(request.metrics))
        if request.num_retractions > earlier.num_retractions:
            yield one("retract", request.request_id, f"after {counted(request.output_len, 'output')}")
    for segment in moment.plan.segments if moment.plan is not None else ():
        if segment.kind is SegmentKind.PHANTOM:
            yield one("refill", segment.request_id, f"[{segment.start}, {segment.stop})")
    for update in moment.updates:
        if isinstance(update, Refused):
            yield one("refuse", update.request_id, update.message)
        elif isinstance(update, Finished) and update.reason != "abort":
            yield one("finish", update.request_id, f"{update.reason}, {counted(update.output_len, 'output')}")


def _of_pages(moment: Moment, kind: str, part: Part, more: str) -> Occurrence:
    requests = tuple(conversation.request_id for conversation in part.conversations)
    sessions = tuple(conversation.session_id for conversation in part.conversations)
    text = span_text(part.start, part.stop, moment.before.config.page_size) + more
    return Occurrence(moment.step, kind, requests, sessions, log_conversations.names(part.conversations), text)


def _moves(moment: Moment, conversations: Conversations) -> Iterator[Occurrence]:
    """Yields the moves that began or ended in a moment, in order."""
    for move in moment.plan.moves if moment.plan is not None else ():
        for part in conversations.moving(moment.after.cache, move):
            yield _of_pages(moment, move.kind.value, part, f", {move_text(move, conversations)}")
    if isinstance(moment.entry, MoveDone):
        cache = moment.before.cache
        for kind, move_ids in (("moved", moment.entry.done), ("lost", moment.entry.failed)):
            for move in (cache.moves[move_id] for move_id in move_ids):
                where = "to the host" if move.kind is MoveKind.DEMOTE else "to the device"
                for part in conversations.moving(cache, move):
                    yield _of_pages(moment, kind, part, f", {where}, move {move.move_id}")


def move_text(move: Move, conversations: Conversations) -> str:
    """Returns the number of a move, whom it is for, and how its place was made."""
    request = f" for {conversations.who(move.request_id)}" if move.request_id >= 0 else ""
    ahead = ", which waits" if move.prefetch else ""
    swapped = f", {move.num_swapped} of {len(move.host_ids)} swapped" if move.num_swapped else ""
    return f"move {move.move_id}{request}{ahead}{swapped}"


def _live(state: EngineState) -> tuple[Request, ...]:
    return (*state.running, *state.waiting)


def _prompt_text(event: Submit) -> str:
    most = event.sampling.max_tokens
    salt = f", salt {event.cache_salt}" if event.cache_salt else ""
    limit = "any number of outputs" if most is None else f"at most {counted(most, 'output')}"
    return f"prompt of {counted(event.tokens.size, 'token')}, {limit}{salt}"
