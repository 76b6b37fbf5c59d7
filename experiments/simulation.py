"""One simulation: the closed loop and the serving engine on a virtual clock, and what came of it."""

import contextlib
import dataclasses
import math
import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import tqdm

from penelope_jax.config import EngineConfig
from penelope_jax.cost_executor import CostExecutor, MoveRecord, VirtualClock
from penelope_jax.experiments.closed_loop import Call, ClosedLoop, RealClock, play
from penelope_jax.experiments.decode_runs import RunningDriver
from penelope_jax.experiments.replay import Fingerprint, stop_on_interrupt
from penelope_jax.experiments.sessions import Session
from penelope_jax.metrics import Recorder, RequestRecord, summarize
from penelope_jax.state import EngineCounters
from penelope_jax.step_time import StepTimer


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """What one simulation found.

    Attributes:
        records: one for each request that ended, in the order in which they did.
        counters: the engine's totals.
        moves: every copy between the tiers.
        fingerprint: hash of all sampled tokens by session and turn; equal fingerprints are equal outputs.
        simulated_s, busy_s, move_wait_s: the clock at the end; time in which the device computed; time in which it had
            nothing to do until a copy ended.
        wall_s: what the simulation took.
        counted_steps: decode steps that were counted and not planned.
        partial: whether it was stopped before the end.
    """

    records: tuple[RequestRecord, ...]
    counters: EngineCounters
    moves: tuple[MoveRecord, ...]
    fingerprint: str
    simulated_s: float
    busy_s: float
    move_wait_s: float
    wall_s: float
    counted_steps: int
    partial: bool


def run_simulation(
    config: EngineConfig,
    timer: StepTimer,
    sessions: Sequence[Session],
    num_live: int,
    *,
    label: str = "simulate",
    overlap: bool = True,
    count_runs: bool = True,
    interruptible: bool = True,
) -> Simulation:
    """Simulates sessions in a closed loop.

    Args:
        config: of the engine, in tokens of the simulation (`timer.scale` tokens of the trace each).
        timer: how long things take.
        sessions: what to play, in tokens of the simulation.
        num_live: sessions alive at once.
        label: of the progress bar, which shows on a terminal only.
        overlap: whether the host plans a step while the device runs the one before.
        count_runs: whether runs of like decode steps are counted at once; the result is the same.
        interruptible: whether Ctrl-C and SIGTERM end it early, with what there is so far; else they are not handled.
    """
    wall, clock = RealClock(), VirtualClock()
    names: dict[int, str] = {}
    executor = CostExecutor(
        timer,
        page_size=config.page_size,
        clock=clock,
        vocab_size=config.vocab_size,
        session_of=names.__getitem__,
    )
    loop = ClosedLoop(sessions, num_live, config.vocab_size)
    cancels = any(math.isfinite(turn.cancel_s) for session in sessions for turn in session.turns)
    driver = RunningDriver(
        config,
        executor,
        next_arrival_s=lambda: loop.next_arrival_s,
        overlap=overlap,
        count_runs=count_runs and not cancels,
    )
    recorder = Recorder(config.page_size, config.linear_cost)
    fingerprint = Fingerprint()
    num_requests = sum(len(session.turns) for session in sessions)
    with (
        stop_on_interrupt(clock) if interruptible else contextlib.nullcontext(threading.Event()) as stopped,
        tqdm.tqdm(total=num_requests, desc=label, unit="req", disable=not sys.stderr.isatty()) as bar,
    ):

        def finished(call: Call, reply: np.ndarray) -> None:
            if math.isinf(call.cancel_s):
                fingerprint.add(call.session_id, call.turn, reply)
            bar.update()

        complete = play(
            driver,
            loop,
            recorder,
            clock,
            on_submit=lambda request_id, call: names.__setitem__(request_id, call.session_id),
            on_finish=finished,
            stop=stopped.is_set,
        )
    return Simulation(
        records=tuple(_unscaled(record, timer.scale) for record in recorder.records),
        counters=driver.state.counters,
        moves=tuple(executor.moves),
        fingerprint=fingerprint.hexdigest(),
        simulated_s=clock.now_s,
        busy_s=executor.busy_s,
        move_wait_s=executor.move_wait_s,
        wall_s=wall(),
        counted_steps=driver.counted_steps,
        partial=not complete,
    )


_TOKEN_FIELDS = (
    "prompt_len",
    "device_hit",
    "host_hit",
    "refilled",
    "new",
    "ideal_hit",
    "shared_prefix",
    "recomputed",
    "recomputed_private",
    "output_len",
)
_UNIT_FIELDS = ("recompute_units", "compute_units", "scoring_units")


def _unscaled(record: RequestRecord, scale: int) -> RequestRecord:
    """Returns a record in tokens and units of the trace."""
    if scale == 1:
        return record
    tokens = {name: getattr(record, name) * scale for name in _TOKEN_FIELDS}
    units = {name: getattr(record, name) * scale**2 for name in _UNIT_FIELDS}
    return dataclasses.replace(record, **tokens, **units)


def summary(
    simulation: Simulation,
    sessions: Sequence[Session],
    config: dict[str, Any],
    run: dict[str, Any],
    per_request: str | None = None,
) -> dict[str, Any]:
    """Returns the JSON document of a simulation; its keys are those of a replay."""
    counters = simulation.counters
    return summarize(
        simulation.records,
        last_turns={session.session_id: session.last_turn for session in sessions},
        evicted_pages=counters.evicted_pages,
        moved_pages=counters.moved_pages,
        swapped_loads=counters.swapped_loads,
        config=config,
        run={
            **run,
            "partial": simulation.partial,
            "simulated_s": simulation.simulated_s,
            "device_busy_s": simulation.busy_s,
            "move_wait_s": simulation.move_wait_s,
            "wall_s": simulation.wall_s,
            "fingerprint": simulation.fingerprint,
            "steps": counters.steps,
            "counted_steps": simulation.counted_steps,
            "phantom_segments": counters.phantom_segments,
            "retractions": counters.retractions,
        },
        per_request=per_request,
    )
