"""`penelope simulate`: its JSON, its repeatability, what it decides against a replay, samples, scale, bad input."""

import json
import math
import re
import signal

import pytest

from penelope_jax import cli
from penelope_jax.config import POLICIES, EngineConfig
from penelope_jax.device_profiles import profile_named
from penelope_jax.driver import HashExecutor
from penelope_jax.experiments import command, simulation_tables
from penelope_jax.experiments.decode_runs import RunningDriver
from penelope_jax.experiments.replay import run_replay
from penelope_jax.experiments.sessions import cut_session
from penelope_jax.experiments.simulate import sample_sessions
from penelope_jax.experiments.simulation import run_simulation
from penelope_jax.experiments.synthesize import SynthesisOptions, synthesize
from penelope_jax.experiments.traces import write_jsonl
from penelope_jax.metrics import summarize
from penelope_jax.models.model_costs import model_costs
from penelope_jax.models.presets import PRESETS
from penelope_jax.step_time import StepTimer

# A pool of 10,240 tokens for four live sessions of up to 8,000.
FLAGS = ("--model", "qwen3-0.6b", "--device", "v5e", "--sessions", 4, "--max-delay-s", 5, "--device-tokens", 10_240)


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("traces") / "trace.jsonl"
    write_jsonl(synthesize(SynthesisOptions(sessions=6, turns=8, context=8000, scale=4, seed=2)), path)
    return path


def penelope(*args):
    """Runs a command in this process; returns its exit code."""
    try:
        return command.execute(cli.parse(["penelope", *map(str, args)]))
    except SystemExit as error:
        return error.code


def simulate(path, trace, *more):
    """Simulates; returns the JSON document or documents."""
    assert penelope("simulate", trace, *FLAGS, "--json", path, *more) == 0
    return json.loads(path.read_text())


def without_wall(document):
    run = {name: value for name, value in document["run"].items() if name != "wall_s"}
    return document | {"run": run, "per_request": None}


def test_the_document_has_the_keys_of_a_replay_and_says_what_was_assumed(tmp_path, trace):
    document = simulate(tmp_path / "a.json", trace)
    assert document.keys() == summarize([], last_turns={}, evicted_pages=0, config={}, run={}).keys()
    assert document["config"]["policy"] == "penelope" and document["config"]["device_tokens"] == 10_240
    assert document["config"]["linear_cost"] == PRESETS["qwen3-0.6b"].linear_cost
    run = document["run"]
    assert run["device"] == "1 x v5e, simulated" and run["device_profile"]["memory_bandwidth"] == 819e9
    assert run["model_costs"]["kv_bytes_per_token"] == 28 * 2 * 2 * 8 * 128
    assert {"seed", "commit", "jax", "simulated_s", "wall_s"} <= run.keys() and not run["partial"]
    tokens = document["tokens"]
    hits = tokens["device_hit"] + tokens["host_hit"]
    assert hits + tokens["refilled"] + tokens["new"] == tokens["prompt"] > 0 and document["evicted_pages"] > 0
    records = (tmp_path / "a.requests.jsonl").read_text().splitlines()
    assert len(records) == document["requests"]


def test_the_same_seed_gives_the_same_document_and_every_step_planned_too(tmp_path, trace):
    first = simulate(tmp_path / "a.json", trace, "--policy", "sglang")
    again = simulate(tmp_path / "b.json", trace, "--policy", "sglang")
    planned = simulate(tmp_path / "c.json", trace, "--policy", "sglang", "--every-step")
    assert without_wall(first) == without_wall(again)
    assert first["run"].pop("counted_steps") > 0 == planned["run"].pop("counted_steps")
    assert without_wall(first) == without_wall(planned)


def test_policies_are_compared_with_the_first(tmp_path, trace, capsys):
    documents = simulate(tmp_path / "a.json", trace, "--policy", "sglang,penelope")
    assert [document["config"]["policy"] for document in documents] == ["sglang", "penelope"]
    assert len({document["run"]["fingerprint"] for document in documents}) == 1
    assert documents[1]["recompute_units"] < documents[0]["recompute_units"]
    lines = capsys.readouterr().out.splitlines()
    change = documents[1]["ttft_s"]["mean"] / documents[0]["ttft_s"]["mean"] - 1
    assert lines[-1].startswith("penelope") and f"{change:+.1%}" in lines[-1]
    assert "Assumed: 50% of 197 TFLOP/s, 80% of 0.82 TB/s, link 80% of 16 GB/s each way." in lines
    assert {path.name for path in tmp_path.iterdir()} == {
        "a.json",
        "a.sglang.requests.jsonl",
        "a.penelope.requests.jsonl",
    }


# Two tiers.


def test_a_host_tier_moves_pages_and_loading_is_priced_by_the_device(tmp_path, trace):
    document = simulate(tmp_path / "a.json", trace, "--host-tokens", 10_240)
    assert document["tokens"]["host_hit"] > 0 and document["moved_pages"] > 0
    config = document["config"]
    assert (config["host_tokens"], config["swap_tokens"], config["prefetch_tokens"]) == (10_240, 1024, 1024)
    profile, costs = profile_named("v5e"), document["run"]["model_costs"]
    page_s = 64 * costs["kv_bytes_per_token"] / (0.8 * 16e9)
    assert config["load_units"] == pytest.approx(page_s * profile.flops / costs["unit_flops"])
    given = simulate(tmp_path / "b.json", trace, "--host-tokens", 10_240, "--load-units", "12.5")
    assert given["config"]["load_units"] == 12.5


# Samples.


def test_samples_are_drawn_by_seed(tmp_path, trace, capsys):
    sessions = synthesize(SynthesisOptions(sessions=9, turns=2, seed=1))
    drawn = sample_sessions(sessions, 4, 7)
    assert drawn == sample_sessions(sessions, 4, 7) != sample_sessions(sessions, 4, 8)
    assert len({session.session_id for session in drawn}) == 4
    assert set(sample_sessions(sessions, 9, 0)) == set(sessions)

    documents = simulate(
        tmp_path / "a.json", trace, "--policy", "vllm,penelope", "--sample", 3, "--samples", 2, "--seed", 5
    )
    runs = [(document["config"]["policy"], document["run"]["seed"]) for document in documents]
    assert runs == [("vllm", 5), ("penelope", 5), ("vllm", 6), ("penelope", 6)]
    alone = simulate(tmp_path / "b.json", trace, "--policy", "penelope", "--sample", 3, "--seed", 6)
    assert without_wall(alone) == without_wall(documents[3])
    means = [document["ttft_s"]["mean"] for document in documents]
    changes = [means[1] / means[0] - 1, means[3] / means[2] - 1]
    assert simulation_tables.changes_text(changes) in capsys.readouterr().out


def test_changes_are_means_over_samples_with_their_range():
    assert simulation_tables.changes_text([-0.4, -0.2]) == "-30.0% ±10.0 (-40% to -20%)"
    assert simulation_tables.changes_text([-0.25]) == "-25.0%"
    assert simulation_tables.changes_text([]) == "-"


# Scale.


def test_a_scaled_simulation_is_near_the_unscaled_one_in_tokens_of_the_trace(tmp_path, trace):
    exact = simulate(tmp_path / "a.json", trace)
    coarse = simulate(tmp_path / "b.json", trace, "--scale", 8)
    assert coarse["config"]["scale"] == 8
    for name in ("device_tokens", "page_size", "max_step_tokens", "max_context", "output_reserve", "linear_cost"):
        assert coarse["config"][name] == exact["config"][name]
    assert coarse["requests"] == exact["requests"]
    assert coarse["run"]["steps"] < exact["run"]["steps"] / 4
    assert coarse["tokens"]["prompt"] == pytest.approx(exact["tokens"]["prompt"], rel=0.02)
    assert coarse["hit_rate"] == pytest.approx(exact["hit_rate"], abs=0.1)
    assert coarse["recompute_units"] == pytest.approx(exact["recompute_units"], rel=0.5)
    assert coarse["run"]["simulated_s"] == pytest.approx(exact["run"]["simulated_s"], rel=0.1)


# Decisions.


@pytest.mark.parametrize("policy", ["sglang", "penelope"])
def test_a_simulation_and_a_replay_decide_the_same(policy):
    """Without delays arrivals do not depend on how long a step takes, and nor may any decision."""
    drawn = synthesize(SynthesisOptions(sessions=6, turns=10, context=1000, scale=32, seed=2))
    sessions = [cut_session(session, max_delay_s=0.0) for session in drawn]
    config = EngineConfig(
        device_tokens=1600,
        page_size=16,
        policy=POLICIES[policy],
        max_context=1000,
        max_step_tokens=256,
        linear_cost=768.0,
        vocab_size=512,
    )
    timer = StepTimer(model_costs(PRESETS["b"], "b"), profile_named("toy"))
    simulated = run_simulation(config, timer, sessions, 4)
    replayed = run_replay(config, HashExecutor(512), sessions, 4, overlap=True)
    assert simulated.counters == replayed.counters and simulated.counters.evicted_pages > 50
    times = ("arrival_s", "first_token_s", "finished_s")

    def decisions(record):
        return {name: getattr(record, name) for name in record.__slots__ if name not in times}

    assert list(map(decisions, simulated.records)) == list(map(decisions, replayed.records))


# Interruption and bad input.


def test_an_interrupted_simulation_writes_what_it_has(tmp_path, trace, monkeypatch, capsys):
    step, steps = RunningDriver.step, iter(range(10_000))

    def interrupted(self):
        if next(steps) == 40:
            signal.raise_signal(signal.SIGINT)
        return step(self)

    monkeypatch.setattr(RunningDriver, "step", interrupted)
    path = tmp_path / "a.json"
    assert penelope("simulate", trace, *FLAGS, "--policy", "vllm,penelope", "--json", path) == 130
    (document,) = json.loads(path.read_text())
    assert document["run"]["partial"] and 0 < document["requests"] < 48
    assert "Interrupted" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--model", "gpt-5"), "unknown model 'gpt-5'; known: tiny"),
        (("--device", "h999"), "unknown device 'h999'; known: a100"),
        (("--policy", "lru"), "unknown policy 'lru'"),
        (("--scale", 3), "scale=3 must be a power of two"),
        (("--scale", 64, "--page-size", 32), "page_size=32 must be a multiple of scale=64"),
        (("--scale", 8, "--device-tokens", 10_244), "multiple of"),
        (("--samples", 2), "--samples 2: must be at least 1, and more than 1 needs --sample"),
        (("--sample", 7), "sample=7 must be from 1 to 6"),
        (("--load-units", "much"), "load_units='much' must be a number"),
        (("--swap-tokens", 3, "--host-tokens", 6400), "swap_tokens=3"),
        (("--mesh", "2"), "--mesh 2: must be two numbers"),
        (("--device-tokens", 640), "needs|need"),
        (("--json", "no/such/folder.json"), "there is no folder"),
    ],
)
def test_bad_input_is_one_line(trace, capsys, flags, message):
    capsys.readouterr()
    assert penelope("simulate", trace, *FLAGS, *flags) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and re.search(message, err), err


def test_no_number_of_a_document_is_infinite(tmp_path, trace):
    document = simulate(tmp_path / "a.json", trace, "--max-delay-s", "2.5")
    assert document["config"]["max_delay_s"] == 2.5
    assert simulate(tmp_path / "b.json", trace, "--max-delay-s", "inf")["config"]["max_delay_s"] is None
    assert math.isfinite(document["ttft_s"]["mean"])
