"""The command line: one clear line and exit code 2 for bad input, the JSON of a replay, Ctrl-C."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from penelope_jax import cli
from penelope_jax.driver import HashExecutor
from penelope_jax.experiments import command, engine_options
from penelope_jax.experiments.synthesize import SynthesisOptions, synthesize
from penelope_jax.experiments.traces import ReadOptions, read_traces

LINE = b'{"session_id": "s%d", "turns": [{"new": [["shared", 300], ["s%d", 100]], "output": 6}%s]}\n'
TURN = b', {"new": [["s%d/%d", 40]], "output": 5, "delay_s": 0.01, "kind": "tool"}'


class PlaceExecutor(HashExecutor):
    """Samples from the position alone, so that outputs do not depend on the order of requests."""

    num_compilations = 0

    def warm_up(self, progress):
        progress(3, 3)
        return 3

    def _token(self, segment):
        return segment.stop * 7 % self.vocab_size


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"".join(LINE % (i, i, b"".join(TURN % (i, j) for j in range(5))) for i in range(4)))
    return path


@pytest.fixture
def place_executor(monkeypatch):
    monkeypatch.setattr(engine_options, "make_executor", lambda *_args, **_options: PlaceExecutor(256))


def penelope(*args):
    """Runs a command in this process; returns its exit code."""
    try:
        return command.execute(cli.parse(["penelope", *map(str, args)]))
    except SystemExit as error:
        return error.code


def error_line(capsys, *args):
    assert penelope(*args) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.endswith("\n") and err.count("\n") == 1, err
    return err[:-1]


BAD_FLAGS = [
    (
        ["--policy", "lru"],
        "unknown policy 'lru'; known: sglang, sglang-reclaim, sglang-device-lpm, vllm, leaf-head, leaf-head-node, front-node, penelope.",
    ),
    (["--policy", "vllm,vllm"], "--policy vllm,vllm: a policy is named twice."),
    (["--page-size", "48"], "page_size=48 must be a power of two from 1 to 1024."),
    (["--device-tokens", "0"], "device_tokens=0 must be at least 1."),
    (["--device-tokens", "100"], "device_tokens=100 must be a multiple of page_size=64."),
    (["--host-tokens", "100"], "host_tokens=100 must be a multiple of page_size=64."),
    (["--scheduler", "sjf"], "unknown scheduler 'sjf'; known: lpm, lpm-cost, fcfs."),
    (["--sessions", "0"], "sessions=0 must be from 1 to 4096."),
    (["--max-context", "0"], "max_context=0 must be at least 1."),
    (["--seed", "-1"], "seed=-1 must be at least 0."),
    (["--insert-unit", "node"], "unknown insert_unit='node'; known: chunk, prompt."),
    (["--mesh", "3x"], "--mesh 3x: must be two numbers of at least 1 with an x between, as in 1x4."),
    (["--mesh", "0x1"], "--mesh 0x1: must be two numbers of at least 1 with an x between, as in 1x4."),
    (["--mesh", "2x4"], "--mesh 2x4: a mesh of 2 x 4 needs 8 devices; there are 4."),
    (
        ["--mesh", "1x3"],
        "--model, --mesh 1x3: mesh axis tensor=3 must be a multiple of num_kv_heads=2, which it exceeds, and divide ",
    ),
    (["--scale", "3"], "scale=3 must be a power of two from 1 to 64."),
    (["--sessions", "100000000"], "sessions=100000000 must be from 1 to 4096."),
    (["--json", "/dev/null"], "--json /dev/null: is not a file."),
    (["--event-log", "/proc/e.log"], "--event-log /proc/e.log: folder /proc: "),
    (["--json", "none/x.json"], "--json none/x.json: there is no folder none."),
    (["--dtype", "int8"], "--model: dtype='int8' must be one of float32, bfloat16."),
    (["--model", "random:x"], "--model: model 'random:x': no such preset; known: random:tiny, "),
    (["--model", "nowhere"], "--model: model 'nowhere': no such directory; "),
    (["--max-context", "9999"], "--max-context 9999 must be at most 4096, the context of random:tiny."),
    (
        ["--max-context", "100"],
        "no session to replay (4 read; none has a first turn within 100 tokens; a smaller trace ",
    ),
    (["--device-tokens", "256"], "session 's0', turn 0: prompt of 400 tokens and 6 output tokens need 8 pages of 64"),
    (["--pages", "3"], "unrecognized arguments: --pages 3"),
    (["--model", "trace.jsonl"], "--model: model 'trace.jsonl': is a file; of files only .gguf is read."),
    (["--polic", "vllm"], "unrecognized arguments: --polic vllm"),
    (["--seed", "x"], "argument --seed: invalid int value: 'x'"),
]


@pytest.mark.parametrize(("flags", "reason"), BAD_FLAGS)
def test_bad_flags_of_replay(capsys, trace, flags, reason, place_executor, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = error_line(capsys, "replay", trace, *(() if "--model" in flags else ("--model", "random:tiny")), *flags)
    assert line.startswith(("penelope replay: error: ", "penelope: error: ")) and reason in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace.jsonl"]


def test_a_broken_trace_line_is_named_or_left_out(capsys, trace, place_executor):
    trace.write_bytes(trace.read_bytes() + b"{oops\n")
    line = error_line(capsys, "replay", trace, "--model", "random:tiny")
    assert line.startswith(f"penelope replay: error: {trace}:5: not JSON: ")
    assert penelope("replay", trace, "--model", "random:tiny", "--skip-bad") == 0
    out, err = capsys.readouterr()
    assert "4 sessions, 24 requests" in out
    assert f"left out: {trace}:5: not JSON" in err and "left out 1 broken entry." in err


def test_missing_and_truncated_weights(capsys, trace, tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    assert "config.json" in error_line(capsys, "replay", trace, "--model", directory)
    config = {"model_type": "qwen3", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 32}
    config |= {"max_position_embeddings": 4096, "rms_norm_eps": 1e-6}
    (directory / "config.json").write_text(json.dumps(config))
    assert "safetensors" in error_line(capsys, "replay", trace, "--model", directory)
    (directory / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    assert "model.safetensors" in error_line(capsys, "replay", trace, "--model", directory)
    (directory / "config.json").write_text(json.dumps(config | {"layer_types": ["sliding_attention"]}))
    assert "full causal attention" in error_line(capsys, "replay", trace, "--model", directory)


def test_a_pool_that_does_not_fit_the_memory(capsys, trace):
    line = error_line(capsys, "replay", trace, "--model", "random:tiny", "--device-tokens", 64 * 2**24)
    assert "error: a pool of 1073741824 tokens cannot be allocated: RESOURCE_EXHAUSTED: " in line


def test_a_misspelt_flag_is_named_where_another_is_missing(capsys):
    line = error_line(
        capsys,
        "replay",
        "t.jsonl",
        "--modl=random:tiny",
        "--sessions",
        2,
        "--verbosity=0",
        "--x",
        "--noalsologtostderr",
        "--",
        "--y",
    )
    assert line == ("penelope replay: error: the following arguments are required: --model; unrecognized: --modl, --x")


def test_usage_errors(capsys):
    assert error_line(capsys, "replay", "x.jsonl").endswith("the following arguments are required: --model")
    assert error_line(capsys).endswith("the following arguments are required: COMMAND")
    assert "invalid choice: 'frobnicate'" in error_line(capsys, "frobnicate")
    assert error_line(capsys, "replay", "x.jsonl", "--model", "random:tiny").endswith(
        "x.jsonl: no such file or folder."
    )
    assert error_line(capsys, "scenario", "none.txt").startswith("penelope scenario: error: ")


def test_synthesize_writes_what_replay_reads(capsys, place_executor, tmp_path):
    path = tmp_path / "made.jsonl.gz"
    flags = ["--sessions", 3, "--turns", 5, "--scale", 64, "--context", 900, "--side-rate", 0.5, "--seed", 3]
    assert penelope("synthesize", *flags, "--out", path) == 0
    options = SynthesisOptions(sessions=3, turns=5, scale=64, context=900, side_rate=0.5, seed=3)
    trace = read_traces([path], ReadOptions())
    assert trace.sessions == synthesize(options)
    assert f"3 sessions, {trace.num_requests} requests" in capsys.readouterr().out
    assert penelope("replay", path, "--model", "random:tiny", "--time-scale", 0.001) == 0


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--out", "x.json"], "--out x.json: the name must end in .jsonl or .jsonl.gz."),
        (["--out", "none/x.jsonl"], "--out none/x.jsonl: there is no folder none."),
        (["--out", "x.jsonl", "--turns", 0], "turns=0 must be at least 1."),
        (["--out", "x.jsonl", "--context", 99], "context=99 (scaled tokens) is too small: the shared prefix has 15000"),
    ],
)
def test_bad_flags_of_synthesize(capsys, tmp_path, monkeypatch, flags, reason):
    monkeypatch.chdir(tmp_path)
    assert error_line(capsys, "synthesize", *flags).startswith(f"penelope synthesize: error: {reason}")
    assert not list(tmp_path.iterdir())


def test_replay_writes_the_documented_json(capsys, trace, place_executor, tmp_path):
    out = tmp_path / "out.json"
    flags = ["--model", "random:tiny", "--device-tokens", "800", "--page-size", "16", "--sessions", "3", "--seed", "5"]
    assert penelope("replay", trace, *flags, "--json", out) == 0
    document = json.loads(out.read_text())
    assert list(document)[:12] == [
        "config",
        "requests",
        "ttft_s",
        "jct_s",
        "hit_rate",
        "tokens",
        "recompute_units",
        "evicted_pages",
        "moved_pages",
        "swapped_loads",
        "lost_90",
        "per_request",
    ]
    assert list(document["ttft_s"]) == list(document["jct_s"]) == ["mean", "p50", "p90", "p99"]
    assert list(document["lost_90"]) == ["requests", "recompute_share"]
    counts = document["tokens"]
    assert list(counts) == ["prompt", "device_hit", "host_hit", "refilled", "new"]
    assert counts["device_hit"] + counts["host_hit"] + counts["refilled"] + counts["new"] == counts["prompt"]
    assert document["requests"] == 24 and document["evicted_pages"] > 0 and counts["refilled"] > 0
    assert document["config"]["policy"] == "penelope" and document["config"]["device_tokens"] == 800
    run = document["run"]
    assert run["seed"] == 5 and run["jax"] and "cpu" in run["device"] and not run["partial"]
    assert run["compiled_in_run"] == 0 and run["programs"] == 3
    records = [json.loads(line) for line in (tmp_path / "out.requests.jsonl").read_text().splitlines()]
    assert document["per_request"] == str(tmp_path / "out.requests.jsonl") and len(records) == 24
    assert sum(record["recomputed"] for record in records) == run["recomputed_tokens"]
    assert np.mean([record["ttft_s"] for record in records]) == pytest.approx(document["ttft_s"]["mean"])
    assert "penelope" in capsys.readouterr().out
    assert not list(tmp_path.glob("*.part"))


def test_replay_compares_policies_in_a_table(capsys, trace, place_executor, tmp_path):
    out = tmp_path / "out.json"
    flags = ["--model", "random:tiny", "--device-tokens", "800", "--page-size", "16", "--json", out]
    assert penelope("replay", trace, *flags, "--policy", "sglang,vllm,penelope") == 0
    text = capsys.readouterr().out
    header, *rows = text.splitlines()[1:5]
    assert [row.split()[0] for row in rows] == ["sglang", "vllm", "penelope"]
    for column in ("TTFT mean s", "p50 s", "p90 s", "JCT mean s", "hit rate", "recomputed tokens", "recomputed units"):
        assert column in header
    assert "Outputs are identical under these policies." in text
    documents = json.loads(out.read_text())
    assert [document["config"]["policy"] for document in documents] == ["sglang", "vllm", "penelope"]
    assert len(list(tmp_path.glob("out.*.requests.jsonl"))) == 3


def test_nothing_is_imported_that_a_command_line_does_not_need():
    code = (
        "import sys; from penelope_jax import cli; cli.parse(['penelope', 'replay', 'x', '--model', 'm']); "
        "assert not {'jax', 'matplotlib'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_installed_command_exits_with_2_and_one_line(tmp_path):
    for args in (["replay", "none.json", "--model", "random:tiny"], ["verify", "--perturbed"]):
        code = f"from penelope_jax import cli; cli.main(['penelope', *{args!r}])"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, check=False, text=True, timeout=60, cwd=tmp_path
        )
        assert done.returncode == 2 and done.stdout == ""
        assert re.fullmatch(r"penelope( replay)?: error: .*\n", done.stderr), done.stderr


SLOW = """
import signal, sys, time
sys.path.insert(0, {tests!r})
from test_cli import PlaceExecutor
from penelope_jax import cli
from penelope_jax.experiments import engine_options

class Slow(PlaceExecutor):
    def dispatch(self, plan):
        if plan.step == 12:
            print("step 12", flush=True)
        time.sleep(0.002 if plan.step < 12 else {pause_s})
        return super().dispatch(plan)

engine_options.make_executor = lambda *_args, **_options: Slow(256)
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
cli.main(["penelope", "replay", {trace!r}, "--model", "random:tiny", "--page-size", "16", "--json", {out!r},
          "--policy", "sglang,penelope"])
"""


def interrupted(trace, tmp_path, number, pause_s, times=1):
    """Sends a signal in a step that takes `pause_s`; returns the exit code, and what comes on stdout and stderr then."""
    code = SLOW.format(
        tests=os.path.dirname(__file__), trace=str(trace), out=str(tmp_path / "out.json"), pause_s=pause_s
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line == "step 12\n":
                break
        for _ in range(times):
            time.sleep(0.05)
            process.send_signal(number)
        text, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, text, errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_prints_what_was_measured_so_far(trace, tmp_path, number):
    out = tmp_path / "out.json"
    returncode, text, errors = interrupted(trace, tmp_path, number, 0.05)
    assert returncode == 130, errors
    assert "Interrupted: what was measured so far follows." in text
    assert "sglang (partial)" in text and "Traceback" not in errors
    (document,) = json.loads(out.read_text())
    assert document["run"]["partial"] is True and 0 < document["requests"] < 24
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_the_second_signal_ends_a_replay_at_once(trace, tmp_path, number, code, word):
    """The first one lets the step end, which takes long here."""
    assert interrupted(trace, tmp_path, number, 30, times=2) == (code, "", f"penelope replay: {word}.\n")
    assert not (tmp_path / "out.json").exists()
