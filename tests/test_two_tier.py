"""The experiment on two tiers: its tables, sweep and timeline, on small synthetic sessions."""

import importlib.util
import json
import os
import signal
import time

import pytest
from process_group import started

from penelope_jax.cost_executor import CostExecutor, MoveRecord
from penelope_jax.errors import InputError
from penelope_jax.experiments import command, engine_options, move_timeline, two_tier
from penelope_jax.experiments.synthesize import SynthesisOptions, synthesize
from penelope_jax.experiments.traces import write_jsonl
from penelope_jax.metrics import write_json
from penelope_jax.moves import MoveKind

FLAGS = ("--model", "qwen3-0.6b", "--device", "v5e", "--max-delay-s", "5", "--device-tokens", "10240", "--scale", "8")


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("traces") / "trace.jsonl"
    write_jsonl(synthesize(SynthesisOptions(sessions=6, turns=6, context=8000, scale=4, seed=2)), path)
    return path


def two_tiers(trace, *more) -> int:
    parser = command.Parser(prog="two_tier")
    two_tier.add_flags(parser)
    parser.set_defaults(run=two_tier.run, prog="two_tier")
    flags = [*FLAGS, "--host-tokens", "4096", "--swap-tokens", "512", *map(str, more)]
    return command.execute(parser.parse_args([str(trace), *flags]))


def test_policies_are_compared_by_sample_and_what_moved_is_told(trace, tmp_path, capsys):
    path = tmp_path / "two.json"
    flags = ("--part", "tables", "--live", "2,5", "--policy", "sglang,penelope", "--sample", 5, "--samples", 2)
    assert two_tiers(trace, *flags, "--json", path) == 0
    documents = json.loads(path.read_text())["tables"]
    found = [(d["config"]["sessions"], d["config"]["policy"], d["run"]["seed"]) for d in documents]
    assert found == [(n, policy, seed) for n in (2, 5) for policy in ("sglang", "penelope") for seed in (0, 1)]
    for document in documents:
        run = document["run"]
        assert document["moved_pages"] == run["demoted_pages"] + run["loaded_pages"]
        assert run["loaded_pages"] >= document["swapped_loads"] and run["loads"] >= run["swapped_moves"]
        assert (run["loading_s"] > 0) == (run["loaded_pages"] > 0)
    assert sum(document["swapped_loads"] for document in documents) > 0
    assert sum(document["tokens"]["host_hit"] for document in documents) > 0
    text = capsys.readouterr().out
    assert "2 sessions live" in text and "5 sessions live" in text and "through the buffer" in text


def test_the_host_tier_is_swept(trace, tmp_path, capsys):
    path = tmp_path / "sweep.json"
    flags = ("--part", "sweep", "--sweep", "1,4", "--sweep-live", 4, "--sweep-schedulers", "fcfs")
    assert two_tiers(trace, *flags, "--policy", "sglang,penelope", "--json", path, "--jobs", 2) == 0
    documents = json.loads(path.read_text())["sweep"]
    assert [d["config"]["host_tokens"] for d in documents] == [10_240] * 2 + [40_960] * 2
    assert {d["config"]["scheduler"] for d in documents} == {"fcfs"}
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines[-2:]] == [["fcfs", "4", "1"], ["fcfs", "4", "4"]]


def test_moves_are_shown_over_time(trace, capsys):
    assert two_tiers(trace, "--part", "timeline", "--live", 4, "--policy", "penelope") == 0
    assert "pages demoted" in capsys.readouterr().out


def test_bins_hold_all_pages():
    def move(kind, end_s, pages, swapped=0, prefetch=False):
        return MoveRecord(kind, pages, swapped, prefetch, 0, 0.0, end_s - 0.5, end_s)

    moves = [move(MoveKind.DEMOTE, 1.0, 3), move(MoveKind.LOAD, 5.0, 4, 2), move(MoveKind.LOAD, 10.0, 5, 0, True)]
    edges, series = move_timeline.binned(moves, 10)
    assert edges.tolist() == [float(i) for i in range(11)]
    assert series["demoted"].tolist() == [3] + [0] * 9
    assert series["loaded"].tolist() == [0] * 4 + [4] + [0] * 4 + [5]
    assert series["swapped"].sum() == 2 and series["ahead"].tolist() == [0] * 9 + [5]
    assert move_timeline.text([]) == "Nothing moved."


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--live", "0"), "--live 0: must be numbers of at least 1 with commas between."),
        (("--sweep", "1,x"), "--sweep 1,x: must be numbers of at least 1"),
        (("--jobs", "0"), "--jobs 0 must be from 1 to 64."),
        (("--samples", "2"), "--samples 2: must be at least 1, and more than 1 needs --sample."),
        (("--sweep-schedulers", "sjf"), "unknown scheduler 'sjf'"),
        (("--host-tokens", "0"), "--host-tokens 0: must be above 0."),
        (("--sessions", "2"), "--sessions 2: --live and --sweep-live say how many"),
        (("--plot", "/nowhere/a.png"), "/nowhere"),
    ],
)
def test_bad_flags(trace, capsys, flags, message):
    assert two_tiers(trace, *flags) == command.BAD_INPUT
    assert message in capsys.readouterr().err


def test_a_picture_that_cannot_be_drawn_is_refused_before_the_work(tmp_path):
    for path, message in ((tmp_path / "a.xyz", "must end in one of .pdf, .png, .svg"), ("no/a.png", "no folder no")):
        with pytest.raises(InputError, match=message):
            engine_options.check_plot("--plot", str(path))


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is not None, reason="matplotlib is installed")
def test_a_picture_needs_matplotlib():
    with pytest.raises(InputError, match="needs matplotlib"):
        engine_options.check_plot("--plot", "plot.png")


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_a_picture_is_drawn(tmp_path):
    path = tmp_path / "a.png"
    move_timeline.plot([MoveRecord(MoveKind.LOAD, 4, 2, False, 0, 0.0, 0.5, 1.0)], str(path), "title")
    assert path.stat().st_size > 0
    with pytest.raises(InputError, match="nothing moved"):
        move_timeline.plot([], str(path), "title")


@pytest.fixture
def ctrl_c():
    """Ctrl-C as at a terminal, however these tests were started."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_keeps_the_simulations_that_ended(trace, tmp_path, capsys, monkeypatch, ctrl_c):
    path = tmp_path / "two.json"
    real, started = two_tier.simulate.run_simulation, []

    def interrupted(*args, **options):
        started.append(options["label"])
        if len(started) == 2:
            monkeypatch.setattr(CostExecutor, "dispatch", stop_at_the_next_step)
        return real(*args, **options)

    dispatch = CostExecutor.dispatch

    def stop_at_the_next_step(self, plan):
        monkeypatch.setattr(CostExecutor, "dispatch", dispatch)
        signal.raise_signal(signal.SIGINT)
        return dispatch(self, plan)

    monkeypatch.setattr(two_tier.simulate, "run_simulation", interrupted)
    flags = ("--part", "tables", "--live", 4, "--policy", "sglang,vllm,penelope")
    assert two_tiers(trace, *flags, "--json", path) == 130
    assert started == ["sglang", "vllm"]
    told = f"two_tier: simulations that had ended: 1, kept in {path}.\ntwo_tier: interrupted.\n"
    assert capsys.readouterr().err == "1 of 3 simulations: sglang, lpm, 4 live, host 4,096 tokens, seed 0.\n" + told
    (document,) = json.loads(path.read_text())["tables"]
    assert document["config"]["policy"] == "sglang" and not document["run"]["partial"]


ENDED = ((1, "sglang"), (2, "vllm"))


@pytest.mark.parametrize("late", [False, True])
def test_what_an_interruption_tells_is_what_the_file_holds(trace, tmp_path, capsys, monkeypatch, ctrl_c, late):
    """Ctrl-C right before or after the second result is written."""
    path, written = tmp_path / "two.json", []

    def interrupted(path, document):
        written.append(path)
        if late:
            write_json(path, document)
        if len(written) == 2:
            signal.raise_signal(signal.SIGINT)
        if not late:
            write_json(path, document)

    monkeypatch.setattr(two_tier, "write_json", interrupted)
    flags = ("--part", "tables", "--live", 4, "--policy", "sglang,vllm,penelope")
    assert two_tiers(trace, *flags, "--json", path) == 130
    told = f"two_tier: simulations that had ended: 2, kept in {path}.\ntwo_tier: interrupted.\n"
    told = (
        "".join(f"{n} of 3 simulations: {name}, lpm, 4 live, host 4,096 tokens, seed 0.\n" for n, name in ENDED) + told
    )
    assert capsys.readouterr().err == told
    assert [document["config"]["policy"] for document in json.loads(path.read_text())["tables"]] == ["sglang", "vllm"]


JOBS = """
import multiprocessing.context, signal, sys
from penelope_jax.experiments import command, two_tier

def told(function, word):
    def call(*args):
        function(*args)
        print(word, flush=True)
    return call

signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
two_tier.write_json = told(two_tier.write_json, "kept")
process = multiprocessing.context.SpawnProcess
process.start = told(process.start, "started")
command.start_module("two_tier", "", two_tier.add_flags, two_tier.run)
"""


@pytest.mark.parametrize(
    ("sample", "awaited", "send", "number", "code", "message"),
    [
        (1000, ["started", "started"], os.killpg, signal.SIGINT, 130, "two_tier: interrupted.\n"),
        (5, ["started", "started", "kept"], os.kill, signal.SIGTERM, 143, "two_tier: terminated.\n"),
    ],
)
def test_no_worker_outlives_an_interruption(tmp_path, sample, awaited, send, number, code, message):
    """Ctrl-C, which a terminal sends to all, while workers start what takes a minute; SIGTERM to the parent, later on."""
    trace, path = tmp_path / "trace.jsonl", tmp_path / "two.json"
    write_jsonl(synthesize(SynthesisOptions(sessions=1000, turns=6, context=8000, scale=4)), trace)
    flags = [*FLAGS, "--scale", "1", "--host-tokens", "4096", "--part", "tables", "--jobs", "2"]
    flags += ["--sample", str(sample), "--samples", "99"]
    with started(JOBS, str(trace), *flags, "--json", str(path)) as process:
        assert process.stdout is not None
        assert [process.stdout.readline().strip() for _ in awaited] == awaited
        time.sleep(0.3)
        send(process.pid, number)
        # Returns only when nobody is left who could write to stdout or stderr; workers can.
        _, errors = process.communicate(timeout=20)
    kept = json.loads(path.read_text())["tables"] if "kept" in awaited else []
    assert bool(kept) == ("kept" in awaited)
    told = f"two_tier: simulations that had ended: {len(kept)}, kept in {path}.\n"
    ended = [line for line in errors.splitlines(keepends=True) if " of 792 simulations: " in line]
    assert len(ended) == len(kept)
    assert (process.returncode, errors) == (code, "".join(ended) + told + message)
