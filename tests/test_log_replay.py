"""A run replayed from its log is the same run, at every step, whoever ended it and however."""

import dataclasses
import pathlib
import re
import signal
import subprocess
import sys

import logged_runs
import numpy as np
import pytest
from deep_copies import rendered

from penelope_jax import cli, engine
from penelope_jax.config import EngineConfig
from penelope_jax.driver import Driver, HashExecutor
from penelope_jax.errors import InputError
from penelope_jax.event_log import EventLogWriter, plan_digest, read_events
from penelope_jax.experiments import command, engine_options
from penelope_jax.log_replay import LogReplay, rebuild
from penelope_jax.segments import StepDone

CONFIG = EngineConfig(device_tokens=640)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return logged_runs.write_small(tmp_path_factory.mktemp("small") / "log")


RUNS = [("penelope", False), ("penelope", True), ("sglang", True), ("vllm", False), ("leaf-head", True)]


@pytest.mark.parametrize(("policy", "overlap"), RUNS)
def test_the_replayed_run_is_the_run(tmp_path, policy, overlap):
    path = tmp_path / "log"
    driver, executor = logged_runs.run(path, policy, overlap=overlap)
    counters = driver.state.counters
    assert counters.evicted_pages > 100 and counters.finished == 32 and counters.refused == 1
    assert (counters.phantom_tokens > 0) == (policy in ("penelope", "leaf-head"))
    kinds = {kind for kind, _ in read_events(path)[1]}
    assert kinds == {"submit", "abort", "done", "flush", "plan"}

    replay = LogReplay(path)
    moments = [moment for moment in replay if moment.plan is not None]
    assert len(moments) == len(executor.planned) == replay.last_step + 1 == counters.steps
    for moment, (plan, state) in zip(moments, executor.planned):
        assert moment.step == plan.step
        assert rendered(moment.plan) == rendered(plan)
        assert plan_digest(moment.plan) == plan_digest(plan)
        assert rendered(moment.after) == rendered(state)
    assert rendered(rebuild(path)) == rendered(driver.state)
    for plan, state in executor.planned[:: len(executor.planned) // 4]:
        assert rendered(rebuild(path, plan.step)) == rendered(state)
    assert len({plan_digest(plan) for plan, _ in executor.planned}) == counters.steps
    in_flight = {len(moment.after.in_flight) for moment in moments}
    assert in_flight == ({1, 2} if overlap else {1})


def test_a_plan_that_differs_is_named(tmp_path, monkeypatch):
    path = tmp_path / "log"
    logged_runs.run(path)
    plan = engine.plan

    def other(state):
        after, found = plan(state)
        if found is not None and found.step >= 7:
            found = dataclasses.replace(found, evicted=(*found.evicted, found.evicted))
        return after, found

    monkeypatch.setattr(engine, "plan", other)
    assert rebuild(path, 6).next_step == 7
    with pytest.raises(InputError) as caught:
        rebuild(path)
    assert re.fullmatch(
        rf"event log {path}: record \d+: planned again, step 7 is another plan; the \d+ plans before it are the same\. "
        r"The log was written by commit 0123abcd\.",
        str(caught.value),
    )


def test_events_that_do_not_fit(tmp_path):
    with EventLogWriter(tmp_path / "log", CONFIG) as log:
        log.event(StepDone(step=3, tokens=np.empty(0, np.int32), logprobs=np.empty(0, np.float32)))
    with pytest.raises(InputError) as caught:
        rebuild(tmp_path / "log")
    assert str(caught.value) == (
        f"event log {tmp_path / 'log'}: record 1 (done) cannot be replayed: step 3 is done, but the steps in flight "
        "are []."
    )


def test_steps_that_the_log_does_not_have(small, tmp_path):
    last = LogReplay(small)
    assert list(last) and last.last_step == 1 and last.complete
    with pytest.raises(InputError) as caught:
        rebuild(small, 2)
    assert str(caught.value) == f"event log {small}: has no step 2; it has steps 0 to 1."
    data, path = small.read_bytes(), tmp_path / "cut"
    path.write_bytes(data[: logged_runs.record_borders(data)[1]])
    with pytest.raises(InputError) as caught:
        rebuild(path, 0)
    assert str(caught.value) == (
        f"event log {path}: has no step 0; it has no step. "
        "The log has no last record: its run was killed, or still goes on."
    )
    assert rebuild(path).idle


def test_a_driver_takes_only_a_log_of_its_own_configuration(tmp_path):
    message = r"^the event log was opened for another configuration\.$"
    with EventLogWriter(tmp_path / "log", CONFIG) as log, pytest.raises(ValueError, match=message):
        Driver(logged_runs.config_of(), HashExecutor(), log=log)


ENDLESS = """
import sys
sys.path.insert(0, {tests!r})
import logged_runs, numpy as np
from penelope_jax.driver import Driver, HashExecutor
from penelope_jax.event_log import EventLogWriter
from penelope_jax.segments import SamplingParams

config = logged_runs.config_of()
with EventLogWriter({path!r}, config) as log:
    driver = Driver(config, HashExecutor(50), logged_runs.Clock(), overlap=True, log=log)
    while True:
        driver.submit(np.random.randint(0, 50, 40), SamplingParams(max_tokens=9), session_id="s")
        for _ in range(3):
            driver.step()
            print(driver.state.next_step, flush=True)
"""


def test_a_killed_run_is_read_up_to_its_last_event(tmp_path):
    path = tmp_path / "log"
    code = ENDLESS.format(tests=str(pathlib.Path(__file__).parent), path=str(path))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            seen = 0
            while seen < 60:
                seen = int(process.stdout.readline())
        finally:
            process.kill()
        # `communicate` would skip what `readline` has buffered.
        seen = max([seen, *map(int, process.stdout.read().split())])
    assert process.returncode == -signal.SIGKILL
    replay = LogReplay(path)
    last = [moment for moment in replay][-1]
    assert not replay.complete and replay.ending.startswith("The log ")
    assert seen <= last.after.next_step <= seen + 1, "every step that was printed is in the log"
    assert rebuild(path, seen - 1).next_step == seen


# The log of `penelope replay`.


@pytest.fixture
def trace(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_options, "make_executor", lambda *_args, **_options: WarmExecutor(256))
    path = tmp_path / "trace.jsonl"
    turn = '{"new": [["s%d/%d", 40]], "output": 5, "kind": "tool"}'
    first = '{"new": [["shared", 60], ["s%d", 100]], "output": 6}'
    lines = [
        f'{{"session_id": "s{i}", "turns": [{", ".join([first % i, *(turn % (i, j) for j in range(4))])}]}}\n'
        for i in range(4)
    ]
    path.write_text("".join(lines))
    return path


class WarmExecutor(HashExecutor):
    num_compilations = 0

    def warm_up(self, progress=None):
        return 0


FLAGS = ["--model", "random:tiny", "--page-size", "16", "--device-tokens", "800", "--seed", "7"]


def penelope(capsys, *args):
    """Runs a command; returns its exit code, output and errors."""
    return command.execute(cli.parse(["penelope", *map(str, args)])), *capsys.readouterr()


def test_replay_writes_a_log_for_each_policy(capsys, trace, tmp_path):
    out = tmp_path / "run.log"
    assert penelope(capsys, "replay", trace, *FLAGS, "--event-log", out)[::2] == (0, "")
    code, text, _ = penelope(capsys, "inspect", out, "--list")
    assert "run: seed 7, model random:tiny, dtype float32, commit " in text and "session s3: 5 requests" in text
    assert code == 0 and text.endswith("The run ended by itself.\n")
    assert penelope(capsys, "inspect", out, "--find", "admit session=s2")[1].endswith("\n5 found.\n")
    assert rebuild(out).idle and rebuild(out).counters.finished == 20

    assert penelope(capsys, "replay", trace, *FLAGS, "--event-log", out) == (
        2,
        "",
        f"penelope replay: error: --event-log {out}: exists; a log is never written over.\n",
    )
    code, _, err = penelope(capsys, "replay", trace, *FLAGS, "--event-log", tmp_path / "none" / "x.log")
    assert code == 2 and err.endswith(f"there is no folder {tmp_path / 'none'}.\n")
    assert penelope(capsys, "replay", trace, *FLAGS, "--event-log", out, "--policy", "vllm,penelope")[0] == 0
    assert sorted(path.name for path in tmp_path.glob("run*.log")) == ["run.log", "run.penelope.log", "run.vllm.log"]
