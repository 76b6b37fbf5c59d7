"""The engine: a pure state machine around the device.

`apply` takes what happened, `plan` says what to do next. Nothing here reads a clock, draws a number or touches a
device, so the code that serves also replays and simulates.
"""

import dataclasses

import numpy as np

from penelope_jax import tiers
from penelope_jax.admission import refusal, resolved_max_tokens
from penelope_jax.changed import changed
from penelope_jax.config import EngineConfig
from penelope_jax.events import (
    Abort,
    Event,
    Finished,
    Flush,
    MoveDone,
    Refused,
    Sampled,
    Scored,
    Stop,
    Submit,
    Update,
)
from penelope_jax.eviction import evict
from penelope_jax.leaving import release, with_retracted
from penelope_jax.pages import frozen
from penelope_jax.planning import plan
from penelope_jax.segments import StepDone
from penelope_jax.state import EngineState, Request, count, make_state

__all__ = ["apply", "make_state", "plan", "refusal_of"]


def apply(state: EngineState, events: tuple[Event, ...] | list[Event]) -> tuple[EngineState, tuple[Update, ...]]:
    """Applies events in order.

    Returns:
        The next state, and what clients should hear of.

    Raises:
        ValueError: a step that is not the oldest in flight, a move that is not under way, a request id used twice,
            results of the wrong shape, or a stop at tokens that were not sampled.
        TypeError: not an event.
    """
    updates: list[Update] = []
    for event in events:
        if not isinstance(event, Event):
            raise TypeError(f"unknown event {event!r}.")
        state = changed(state, now_s=max(state.now_s, event.time_s))
        match event:
            case Submit():
                state = _submit(state, event, updates)
            case Abort():
                state = _abort(state, event, updates)
            case Stop():
                state = _stop(state, event, updates)
            case StepDone():
                state = _step_done(state, event, updates)
            case MoveDone():
                state = _move_done(state, event)
            case Flush():
                cache = tiers.let_go(state.cache) if state.cache.moves else state.cache
                cache, _ = evict(cache, cache.num_resident, state.config.policy)
                state = changed(state, cache=cache)
    return state, tuple(updates)


def refusal_of(config: EngineConfig, event: Submit) -> str | None:
    """Says why a request is refused at arrival, or None if it is not."""
    tokens = event.tokens
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        return f"prompt must be a list of token ids, got an array of {tokens.dtype} with shape {tokens.shape}."
    if len(tokens) == 0:
        return "prompt is empty; at least 1 token is needed."
    bad = np.flatnonzero((tokens < 0) | (tokens >= config.vocab_size))
    if len(bad):
        index = int(bad[0])
        return f"token id {int(tokens[index])} at position {index} is outside [0, {config.vocab_size})."
    start = event.sampling.prompt_logprobs_from
    if start is not None and start >= len(tokens):
        return f"prompt_logprobs_from={start} must be below the prompt's {len(tokens)} tokens."
    for token, _ in event.sampling.logit_bias:
        if token >= config.vocab_size:
            return f"logit_bias: token id {token} is outside [0, {config.vocab_size})."
    message = refusal(config, len(tokens), event.sampling.max_tokens)
    room = resolved_max_tokens(config, len(tokens), event.sampling.max_tokens)
    if message is None and event.sampling.min_tokens > room:
        return f"min_tokens={event.sampling.min_tokens} exceeds the {room} tokens that context and pool leave."
    return message


def _submit(state: EngineState, event: Submit, updates: list[Update]) -> EngineState:
    if any(event.request_id == other.request_id for other in (*state.waiting, *state.running)):
        raise ValueError(f"request id {event.request_id} is in use.")
    message = refusal_of(state.config, event)
    if message is not None:
        updates.append(Refused(request_id=event.request_id, message=message))
        return changed(state, counters=count(state.counters, refused=1))
    prompt = frozen(np.array(event.tokens, np.int32))
    start = event.sampling.prompt_logprobs_from
    max_tokens = resolved_max_tokens(state.config, len(prompt), event.sampling.max_tokens)
    request = Request(
        request_id=event.request_id,
        session_id=event.session_id,
        namespace=state.config.namespace(event.cache_salt),
        arrival=state.next_arrival,
        arrival_s=event.time_s,
        prompt=prompt,
        original_len=len(prompt),
        sampling=dataclasses.replace(event.sampling, max_tokens=max_tokens),
        score_pos=len(prompt) if start is None else start,
    )
    return changed(state, waiting=(*state.waiting, request), next_arrival=state.next_arrival + 1)


def _abort(state: EngineState, event: Abort, updates: list[Update]) -> EngineState:
    for request in state.waiting:
        if request.request_id == event.request_id:
            updates.append(_finished(request, "abort"))
            waiting = tuple(other for other in state.waiting if other is not request)
            return changed(state, waiting=waiting, counters=count(state.counters, finished=1))
    for request in state.running:
        if request.request_id == event.request_id and request.leaving in ("", "retract"):
            marked = changed(request, leaving="abort")
            running = tuple(marked if other is request else other for other in state.running)
            return _let_go(changed(state, running=running), updates)
    return state


def _stop(state: EngineState, event: Stop, updates: list[Update]) -> EngineState:
    for request in (*state.waiting, *state.running):
        if request.request_id == event.request_id and request.leaving != "abort":
            break
    else:
        return state
    if not 1 <= event.num_tokens <= request.output_len:
        raise ValueError(
            f"request {event.request_id} stops at {event.num_tokens} tokens; it has sampled {request.output_len}."
        )
    num_dropped = request.output_len - event.num_tokens
    num_kept = max(0, len(request.outputs) - num_dropped)
    num_cut = request.num_cut + num_dropped - (len(request.outputs) - num_kept)
    stopped = changed(request, outputs=request.outputs[:num_kept], num_cut=num_cut, leaving="stop")
    if any(other is request for other in state.waiting):
        updates.append(_finished(stopped, "stop"))
        waiting = tuple(other for other in state.waiting if other is not request)
        return changed(state, waiting=waiting, counters=count(state.counters, finished=1))
    running = tuple(stopped if other is request else other for other in state.running)
    return _let_go(changed(state, running=running), updates)


def _step_done(state: EngineState, event: StepDone, updates: list[Update]) -> EngineState:
    if not state.in_flight or state.in_flight[0].step != event.step:
        waiting_for = [flight.step for flight in state.in_flight]
        raise ValueError(f"step {event.step} is done, but the steps in flight are {waiting_for}.")
    flight, *rest = state.in_flight
    if len(event.tokens) != len(flight.sampled) or len(event.scores) != len(flight.scored):
        raise ValueError(
            f"step {event.step} returned {len(event.tokens)} samples and {len(event.scores)} scored segments; "
            f"{len(flight.sampled)} and {len(flight.scored)} were planned."
        )
    if len(event.logprobs) != len(event.tokens):
        raise ValueError(
            f"step {event.step} returned {len(event.logprobs)} log-probabilities for {len(event.tokens)} samples."
        )
    running = {request.request_id: request for request in state.running}
    tops = _tops(event, [running[request_id].sampling.top_logprobs for request_id in flight.sampled])
    for request_id, token, logprob, top in zip(
        flight.sampled, event.tokens.tolist(), event.logprobs.tolist(), tops, strict=True
    ):
        request = running[request_id]
        outputs, leaving = request.outputs, request.leaving
        if leaving in ("", "retract"):
            position = len(request.prompt) + len(outputs)
            updates.append(Sampled(request_id=request_id, token=token, logprob=logprob, position=position, top=top))
            outputs = (*outputs, token)
            if token in request.sampling.end_token_ids and request.output_len >= request.sampling.min_tokens:
                leaving = "stop"
            elif request.output_len + 1 >= request.max_tokens:
                leaving = "length"
        running[request_id] = changed(
            request, outputs=outputs, leaving=leaving, num_in_flight=request.num_in_flight - 1
        )
    for (request_id, start, num_rows, first, reused), scores in zip(flight.scored, event.scores):
        request = running[request_id]
        if len(scores) < first + num_rows:
            raise ValueError(
                f"step {event.step} returned {len(scores)} scores for a segment of request {request_id}; "
                f"at least {first + num_rows} were planned."
            )
        if request.leaving != "abort":
            values = frozen(np.array(scores[first : first + num_rows], np.float32))
            updates.append(Scored(request_id=request_id, start=start, logprobs=values, reused=reused))
            running[request_id] = changed(request, score_pos=start + num_rows)
    return _let_go(changed(state, running=tuple(running.values()), in_flight=tuple(rest)), updates)


def _move_done(state: EngineState, event: MoveDone) -> EngineState:
    cache, num_lost = state.cache, 0
    for move_id in event.done:
        cache = tiers.arrive(cache, move_id, keep_copies=state.config.policy.inclusive)
    heirs = tuple(
        (request.request_id, request.pin) for request in state.running if not request.prefilled and not request.leaving
    )
    for move_id in event.failed:
        cache, number = tiers.fail(cache, move_id, heirs)
        num_lost += number
    return changed(state, cache=cache, counters=count(state.counters, lost_pages=num_lost))


def _tops(event: StepDone, wanted: list[int]) -> list[tuple[tuple[int, float], ...]]:
    """Returns the most probable tokens of each sample, as many as it wants."""
    most = max(wanted, default=0)
    if not most:
        return [()] * len(wanted)
    shapes = [None if part is None else part.shape for part in (event.top_tokens, event.top_logprobs)]
    if shapes != [(len(wanted), most)] * 2:
        raise ValueError(
            f"step {event.step} returned {shapes[0]} most probable tokens with {shapes[1]} log-probabilities; "
            f"{(len(wanted), most)} were planned."
        )
    assert event.top_tokens is not None and event.top_logprobs is not None, "compared above"
    rows = zip(event.top_tokens.tolist(), event.top_logprobs.tolist(), wanted)
    return [tuple(zip(tokens[:number], logprobs[:number])) for tokens, logprobs, number in rows]


def _let_go(state: EngineState, updates: list[Update]) -> EngineState:
    """Releases requests that are leaving and have no row in flight."""
    oldest = state.in_flight[0].step if state.in_flight else state.next_step
    cache, running, waiting = state.cache, list(state.running), state.waiting
    counters = state.counters
    for request in state.running:
        if request.leaving and request.last_step < oldest:
            running = [other for other in running if other.request_id != request.request_id]
            cache, again = release(cache, running, request, request.leaving)
            if again is not None:
                waiting = with_retracted(waiting, again)
                counters = count(counters, retractions=1)
            else:
                updates.append(_finished(request, request.leaving))
                counters = count(counters, finished=1)
    return changed(state, cache=cache, running=tuple(running), waiting=waiting, counters=counters)


def _finished(request: Request, reason: str) -> Finished:
    return Finished(
        request_id=request.request_id,
        reason=reason,
        metrics=request.metrics,
        output_len=request.output_len,
        num_retractions=request.num_retractions,
    )
