"""Commands of a scenario that go through the engine: requests, plans, steps and moves."""

import dataclasses

import numpy as np

from penelope_jax import engine
from penelope_jax.errors import InputError
from penelope_jax.events import (
    Abort,
    Event,
    Finished,
    Flush,
    MoveDone,
    Refused,
    RequestMetrics,
    Sampled,
    Scored,
    Submit,
    Update,
)
from penelope_jax.experiments.kv_model import Row
from penelope_jax.experiments.scenario_language import Line, is_token, no_words, one_word, parts, whole
from penelope_jax.experiments.scenario_world import Command, World
from penelope_jax.segments import SamplingParams, StepDone, StepPlan
from penelope_jax.state import EngineState

_MAX_STEPS = 1000


def submit(world: World, line: Line) -> list[str]:
    """`submit NAME HISTORY`: a request arrives. It samples `outputs`, then tokens of its own: `r1.1` is r1's first.

    `max_tokens=most` leaves the number of outputs to the engine.
    """
    name, _, history = line.text.partition(" ")
    if not is_token(name):
        raise InputError(f"{line.place}: {name!r} is no name for a request (r1, short).")
    if name in world.requests:
        raise InputError(f"{line.place}: there was a request called {name!r} already.")
    request_id = len(world.requests)
    logprobs_from = line.number("logprobs_from", 0) if "logprobs_from" in line.options else None
    event = Submit(
        request_id=request_id,
        tokens=world.words.tokens(history, line.place),
        sampling=SamplingParams(
            max_tokens=None if line.options.get("max_tokens") == "most" else line.number("max_tokens", 1),
            stop_token_ids=tuple(world.words.token(word) for word in parts(line.options.get("stop", ""))),
            prompt_logprobs_from=logprobs_from,
        ),
        cache_salt=line.options.get("salt", ""),
        time_s=world.time_s,
    )
    world.requests.append(name)
    if logprobs_from is not None:
        world.scored[request_id] = logprobs_from + 1, len(event.tokens)
    world.outputs[request_id] = parts(line.options.get("outputs", ""))
    return _apply(world, event)


def abort(world: World, line: Line) -> list[str]:
    """`abort NAME`: the client of a request leaves."""
    return _apply(world, Abort(request_id=world.request_id(one_word(line), line.place), time_s=world.time_s))


def flush(world: World, line: Line) -> list[str]:
    """`flush`: drops all K/V that no request holds."""
    no_words(line)
    return _apply(world, Flush(time_s=world.time_s))


def plan(world: World, line: Line) -> list[str]:
    """`plan`: plans a step and starts it."""
    no_words(line)
    return _plan(world)


def done(world: World, line: Line) -> list[str]:
    """`done`: the oldest step in flight comes back."""
    no_words(line)
    if not world.pending:
        raise InputError(f"{line.place}: no step is in flight.")
    return _finish_step(world)


def step(world: World, line: Line) -> list[str]:
    """`step`: plans a step, starts it, and waits for every step in flight."""
    no_words(line)
    said = _plan(world)
    while world.pending:
        said.extend(_finish_step(world))
    return said


def run(world: World, line: Line) -> list[str]:
    """`run`: steps until no request is left."""
    said: list[str] = []
    for _ in range(_MAX_STEPS):
        if world.state.idle:
            return said
        started = world.state.next_step
        said.extend(step(world, line))
        world.check()
        moving = world.moves == "auto" and bool(world.kv.moves)
        assert world.state.next_step > started or world.state.idle or moving, "requests are left, but none can go on"
    raise AssertionError(f"requests are left after {_MAX_STEPS} steps")


def moved(world: World, line: Line) -> list[str]:
    """`moved [NUMBER ...]`: moves between the tiers arrive; without numbers, all that are under way."""
    return _end_moves(world, _move_ids(world, line), fail=False)


def fails(world: World, line: Line) -> list[str]:
    """`fails [NUMBER ...]`: moves end and nothing has moved; without numbers, all that are under way."""
    return _end_moves(world, _move_ids(world, line), fail=True)


def _move_ids(world: World, line: Line) -> tuple[int, ...]:
    given = [whole(word, f"{line.place}: {line.command}") for word in line.text.split()]
    return tuple(given or sorted(world.kv.moves))


def _end_moves(world: World, move_ids: tuple[int, ...], *, fail: bool) -> list[str]:
    """Tells the engine that moves ended, and only then lets them end in the pools."""
    before = world.state.counters.lost_pages
    ended, failed = ((), move_ids) if fail else (move_ids, ())
    said = _apply(world, MoveDone(done=ended, failed=failed, time_s=world.time_s))
    for move_id in move_ids:
        world.kv.end_move(move_id, fails=fail)
    lost = world.state.counters.lost_pages - before
    numbers = " ".join(map(str, move_ids)) or "nothing"
    return [f"{'failed' if fail else 'moved'} {numbers}" + (f", {lost} pages lost" if fail else ""), *said]


def time(world: World, line: Line) -> list[str]:
    """`time SECONDS`: what comes from now on comes at that time, which the engine learns from it."""
    seconds = whole(one_word(line), f"{line.place}: time")
    if seconds < world.time_s:
        raise InputError(f"{line.place}: time {seconds} is before {world.time_s}.")
    world.time_s = seconds
    return []


def _finish_step(world: World) -> list[str]:
    return _apply(world, dataclasses.replace(world.pending.popleft(), time_s=world.time_s))


def _apply(world: World, event: Event) -> list[str]:
    before = world.state
    after, updates = engine.apply(before, (event,))
    world.move_on(after)
    world.outcome.updates.extend(updates)
    for update in updates:
        world.note_scores(update)
        if isinstance(update, Finished) and update.metrics is not None:
            world.note_metrics(update.request_id, update.metrics)
    return [*(update_text(world, update) for update in updates), *_retracted(world, before)]


def _retracted(world: World, before: EngineState) -> list[str]:
    """Notes which requests wait again that were running, and says so."""
    running = {request.request_id for request in before.running}
    names = [world.requests[request.request_id] for request in world.state.waiting if request.request_id in running]
    world.outcome.retracted.extend(names)
    return [f"retracted {' '.join(names)}"] if names else []


def update_text(world: World, update: Update) -> str:
    """Returns what a client hears of, in words."""
    name = world.requests[update.request_id]
    match update:
        case Sampled():
            return f"{name} sampled {world.words.name(update.token)} at {update.position}"
        case Scored():
            start, stop = update.start + 1, update.start + 1 + len(update.logprobs)
            return f"{name} scored {start}-{stop} {'reused' if update.reused else 'computed'}"
        case Finished():
            return f"{name} finished by {update.reason}"
        case Refused():
            return f"{name} refused: {update.message}"
    raise TypeError(f"unknown update {update!r}.")


def hits_text(metrics: RequestMetrics) -> str:
    """Returns where the tokens of a prompt come from."""
    host = f", {metrics.host_hit} host hit" if metrics.host_hit else ""
    return f"{metrics.device_hit} hit{host}, {metrics.refilled} refilled, {metrics.new} new"


def _plan(world: World) -> list[str]:
    arrived = []
    if world.moves == "auto" and world.kv.moves and len(world.pending) < 2:
        arrived = _end_moves(world, tuple(sorted(world.kv.moves)), fail=False)
    before = world.state
    after, step_plan = engine.plan(before)
    world.move_on(after)
    world.outcome.plans.append(step_plan)
    admitted = {request.request_id for request in (*before.running, *before.waiting) if request.metrics is not None}
    said = arrived
    for request in (*after.running, *after.waiting):
        if request.metrics is not None:
            world.note_metrics(request.request_id, request.metrics)
        if request.metrics is not None and request.request_id not in admitted:
            said.append(f"{world.requests[request.request_id]} admitted: {hits_text(request.metrics)}")
    said.extend(_retracted(world, before))
    if step_plan is None:
        return [*said, "nothing to run"]
    if step_plan.evicted:
        said.append(world.note_evicted(before.cache, step_plan.evicted))
    said.extend(world.start_moves(step_plan.moves))
    if step_plan.segments:
        said.append(f"step {step_plan.step}: {', '.join(segment_texts(world, step_plan))}")
        _start(world, step_plan)
    return said


def segment_texts(world: World, step_plan: StepPlan) -> list[str]:
    """Returns each segment of a plan, as in `r1 phantom 4-12`; `sample` where its last row is sampled."""
    return [
        f"{world.requests[segment.request_id]} {segment.kind.value} {segment.start}-{segment.stop}"
        + (" sample" if segment.sample is not None else "")
        for segment in step_plan.segments
    ]


def _start(world: World, step_plan: StepPlan) -> None:
    """Runs a plan on the stand-in for the device; its results wait for `done`."""
    requests = {request.request_id: request for request in world.state.running}
    rows: list[Row] = []
    tokens: list[int] = []
    for segment in step_plan.segments:
        request = requests[segment.request_id]
        prompt_len = request.original_len
        outputs = [_sample(world, segment.request_id, index) for index in range(segment.stop - prompt_len)]
        history = np.array([*request.prompt[:prompt_len].tolist(), *outputs], np.int32)
        rows.append(Row(segment, history, request.namespace, world.requests[segment.request_id]))
        if segment.sample is not None:
            tokens.append(_sample(world, segment.request_id, segment.stop - prompt_len))
    world.kv.run(rows)
    targets = [segment.targets for segment in step_plan.segments if segment.targets is not None]
    world.pending.append(
        StepDone(
            step=step_plan.step,
            tokens=np.array(tokens, np.int32),
            logprobs=np.full(len(tokens), -1.0, np.float32),
            scores=tuple(np.where(wanted >= 0, -1.0, np.nan).astype(np.float32) for wanted in targets),
        )
    )


def _sample(world: World, request_id: int, index: int) -> int:
    given = world.outputs[request_id]
    return world.words.token(given[index] if index < len(given) else f"{world.requests[request_id]}.{index + 1}")


_SUBMIT_OPTIONS = ("max_tokens", "outputs", "stop", "salt", "logprobs_from")

COMMANDS: dict[str, tuple[Command, tuple[str, ...]]] = {
    "submit": (submit, _SUBMIT_OPTIONS),
    "abort": (abort, ()),
    "flush": (flush, ()),
    "moved": (moved, ()),
    "fails": (fails, ()),
    "time": (time, ()),
    "plan": (plan, ()),
    "done": (done, ()),
    "step": (step, ()),
    "run": (run, ()),
}
"""Command -> what it does, and the options it takes."""
