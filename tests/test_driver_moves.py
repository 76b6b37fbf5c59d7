"""Moves between the tiers in the loop: when they are started, polled, waited for and told, with a scripted engine."""

import dataclasses
import types

import numpy as np
import pytest
from test_driver import conversations

from penelope_jax import driver as driver_module
from penelope_jax.config import EngineConfig
from penelope_jax.driver import Driver, HashExecutor
from penelope_jax.event_log import EventLogWriter, plan_digest, read_events
from penelope_jax.events import MoveDone
from penelope_jax.invariants import check_cache
from penelope_jax.moves import Move, MoveKind
from penelope_jax.segments import Segment, SegmentKind, StepDone, StepPlan

CONFIG = EngineConfig(device_tokens=64, page_size=4, max_step_tokens=16, vocab_size=100)


def move(move_id: int, kind: MoveKind = MoveKind.LOAD) -> Move:
    ids = np.array([move_id], np.int32)
    return Move(move_id=move_id, kind=kind, device_ids=ids, host_ids=ids)


def plan(step: int, *, runs: bool, moves: tuple[Move, ...] = ()) -> StepPlan:
    pages = np.arange(4, dtype=np.int32)
    segment = Segment(
        request_id=0,
        kind=SegmentKind.REAL,
        start=0,
        stop=1,
        tokens=pages[:1],
        page_table=pages,
        write_from=0,
    )
    return StepPlan(step=step, segments=(segment,) if runs else (), moves=moves)


class Script:
    """An engine that plans what it is told to and notes what happens; it is idle once everything is planned."""

    def __init__(self, plans):
        self.plans = list(plans)
        self.calls: list = []

    def state(self):
        cache = types.SimpleNamespace(device=types.SimpleNamespace(num_free=7))
        idle = not self.plans
        return types.SimpleNamespace(idle=idle, running=(), waiting=(), cache=cache)

    def plan(self, _state):
        planned = self.plans.pop(0)
        self.calls.append("plan")
        return self.state(), planned

    def apply(self, _state, events):
        self.calls.extend(event if isinstance(event, MoveDone) else type(event).__name__ for event in events)
        return self.state(), ()


class Noting(HashExecutor):
    def __init__(self, script: Script, **options):
        super().__init__(**options)
        self.script = script

    def dispatch(self, plan):
        self.script.calls.append(f"dispatch {plan.step}")
        return super().dispatch(plan)

    def start_moves(self, moves):
        self.script.calls.append(f"start {','.join(str(move.move_id) for move in moves)}")
        super().start_moves(moves)

    def finish_moves(self, *, wait=False):
        self.script.calls.append("wait" if wait else "poll")
        return super().finish_moves(wait=wait)


def played(monkeypatch, plans, *, overlap: bool = False, log=None, **options) -> list:
    """Returns what happened, in order; times are counted."""
    script = Script(plans)
    monkeypatch.setattr(driver_module, "engine", script)
    monkeypatch.setattr(driver_module, "check_idle", lambda cache: None)
    times = iter(range(100))
    driver = Driver(CONFIG, Noting(script, **options), lambda: float(next(times)), overlap=overlap, log=log)
    driver.state = script.state()
    while script.plans:
        driver.step()
        script.calls.append("|")
    driver.drain_moves()
    return script.calls


def ended(*ids: int, failed: tuple[int, ...] = (), time_s: float) -> MoveDone:
    return MoveDone(done=ids, failed=failed, time_s=time_s)


def test_moves_are_started_before_the_step_and_polled_before_the_next_plan(monkeypatch):
    plans = [plan(0, runs=True, moves=(move(0), move(1))), plan(1, runs=True), plan(2, runs=True)]
    assert played(monkeypatch, plans) == [
        *["plan", "start 0,1", "dispatch 0", "StepDone", "|"],
        *["poll", ended(0, 1, time_s=1.0), "plan", "dispatch 1", "StepDone", "|"],
        *["plan", "dispatch 2", "StepDone", "|"],
    ]


def test_nobody_waits_for_a_move_while_steps_can_run(monkeypatch):
    plans = [plan(step, runs=True, moves=(move(0),) if not step else ()) for step in range(6)]
    calls = played(monkeypatch, plans, move_delay=20, seed=2)
    assert calls.count("poll") == 5 and calls.count("wait") == 1
    assert calls[-2:] == ["wait", ended(0, time_s=6.0)]  # drained at the end


def test_with_nothing_to_run_moves_are_waited_for(monkeypatch):
    plans = [plan(0, runs=False, moves=(move(0), move(1))), None, plan(0, runs=True)]
    calls = played(monkeypatch, plans, move_delay=9, seed=3)
    assert calls[:3] == ["plan", "start 0,1", "wait"]
    told = [call for call in calls if isinstance(call, MoveDone)]
    assert sorted(id_ for event in told for id_ in event.done) == [0, 1] and len(told) == 2, "each once"
    assert calls.index("dispatch 0") > calls.index(told[1])


@pytest.mark.parametrize("moves", [(), (move(0),)])
def test_with_overlap_a_flying_step_is_collected_first(monkeypatch, moves):
    plans = [plan(0, runs=True), plan(1, runs=True), plan(2, runs=False, moves=moves) if moves else None]
    calls = played(monkeypatch, plans, overlap=True)
    assert calls[:7] == ["plan", "dispatch 0", "|", "plan", "dispatch 1", "StepDone", "|"]
    assert [call for call in calls[7:] if call not in ("start 0", "poll")][:2] == ["plan", "StepDone"]
    assert "wait" not in calls[:-2]


def test_failed_moves_are_told_once(monkeypatch):
    plans = [plan(0, runs=True, moves=(move(0), move(1))), plan(1, runs=True), plan(2, runs=True)]
    calls = played(monkeypatch, plans, fail_moves=1.0)
    assert [call for call in calls if isinstance(call, MoveDone)] == [ended(failed=(0, 1), time_s=1.0)]


def test_only_with_no_step_and_no_move_none_can_go_on(monkeypatch):
    with pytest.raises(RuntimeError, match="0 running and 0 waiting requests, 7 free pages, and none can go on"):
        played(monkeypatch, [plan(0, runs=True, moves=(move(0),)), None, None])
    with pytest.raises(RuntimeError, match="none can go on"):
        played(monkeypatch, [plan(0, runs=False)])


def test_an_executor_that_forgets_a_move_is_an_error_and_no_endless_loop(monkeypatch):
    monkeypatch.setattr(HashExecutor, "start_moves", lambda self, moves: None)
    with pytest.raises(RuntimeError, match="1 moves are under way, but the executor knows of none"):
        played(monkeypatch, [plan(0, runs=False, moves=(move(0),)), None])


def test_ends_of_moves_are_logged_before_they_are_applied(monkeypatch, tmp_path):
    moving = plan(0, runs=False, moves=(move(0), move(1)))
    with EventLogWriter(tmp_path / "log", CONFIG) as log:
        calls = played(monkeypatch, [moving, plan(0, runs=True)], log=log, move_delay=5, seed=3)
    _, entries = read_events(tmp_path / "log")
    logged = list(entries)
    assert [entry for kind, entry in logged if kind == "moved"] == [call for call in calls if type(call) is MoveDone]
    planned = [entry for kind, entry in logged if kind == "plan"]
    assert [entry.step for entry in planned] == [None, 0]
    assert planned[0].digest == plan_digest(moving) != plan_digest(plan(0, runs=False, moves=(move(0), move(2))))
    assert [kind for kind, _ in logged if kind != "moved"] == ["plan", "plan", "done"]
    assert isinstance(next(entry for kind, entry in logged if kind == "done"), StepDone)


def test_hash_executor_ends_each_move_once_after_a_seeded_delay():
    orders = set()
    for seed in (0, 0, 1, 2):
        executor = HashExecutor(move_delay=4, fail_moves=0.3, seed=seed)
        assert executor.finish_moves(wait=True) == ((), ())
        executor.start_moves(tuple(move(i) for i in range(20)))
        polls = [executor.finish_moves() for _ in range(5)]
        assert executor.finish_moves(wait=True) == ((), ())
        assert sorted(id_ for poll in polls for ids in poll for id_ in ids) == list(range(20))
        assert all(list(ids) == sorted(ids) for poll in polls for ids in poll)
        assert 1 <= sum(len(failed) for _, failed in polls) <= 12
        orders.add(str(polls))
    assert len(orders) == 3


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("move_delay", "fail_moves"), [(0, 0.0), (6, 0.0), (3, 0.3)])
def test_replies_do_not_depend_on_how_moves_end(overlap: bool, move_delay: int, fail_moves: float):
    """The real engine with tiny tiers: slow and failing moves change no reply, and nothing leaks."""
    expected = conversations(Driver(dataclasses.replace(CONFIG, device_tokens=2400), HashExecutor(90)), 4, 12)
    config = dataclasses.replace(CONFIG, device_tokens=160, host_tokens=120, swap_tokens=4, prefetch_tokens=8)
    executor = HashExecutor(90, move_delay=move_delay, fail_moves=fail_moves)
    driver = Driver(config, executor, overlap=overlap)
    assert conversations(driver, 4, 12) == expected
    driver.drain_moves()
    cache, counters = driver.state.cache, driver.state.counters
    assert counters.loaded_pages > 40 and not cache.moves and not cache.pins
    assert (counters.lost_pages > 0) == (fail_moves > 0)
    check_cache(cache)
    driver.flush()
    assert not driver.state.cache.nodes and driver.state.cache.host.num_free == 31
