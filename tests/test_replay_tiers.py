"""penelope replay with a host tier and with a saved cache, on the real executor."""

import json
import pathlib
import signal

import pytest
from test_cli import penelope

from penelope_jax.executor import JaxExecutor
from penelope_jax.experiments.load_cost import LoadCost, first_loaded
from penelope_jax.experiments.synthesize import SynthesisOptions, synthesize
from penelope_jax.experiments.traces import write_jsonl

SIZES = ["--page-size", 16, "--device-tokens", 512, "--max-context", 384, "--max-step-tokens", 64, "--sessions", 4]
TIERS = [*SIZES, "--host-tokens", 512, "--swap-tokens", 32, "--load-units", 0]
QUICK = ["--model", "random:tiny", "--deterministic", "--time-scale", 1e-6]


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    write_jsonl(synthesize(SynthesisOptions(sessions=4, turns=8, context=384, scale=64, shared_prefix=3200)), path)
    return path


def replayed(trace, out, *flags):
    """Returns the JSON documents of a replay, by policy."""
    assert penelope("replay", trace, *QUICK, *flags, "--json", out) == 0
    found = json.loads(out.read_text())
    return {document["config"]["policy"]: document for document in (found if isinstance(found, list) else [found])}


def test_policies_with_two_tiers_in_one_command(capsys, trace, tmp_path):
    documents = replayed(trace, tmp_path / "out.json", *TIERS, "--policy", "sglang,vllm,penelope")
    assert list(documents) == ["sglang", "vllm", "penelope"]
    for document in documents.values():
        run, tokens, transfers = document["run"], document["tokens"], document["run"]["transfers"]
        assert document["moved_pages"] == run["demoted_pages"] + run["loaded_pages"] > 0
        assert 0 < transfers["demoted_pages"] <= run["demoted_pages"]
        assert 0 < transfers["loaded_pages"] <= run["loaded_pages"]
        assert transfers["failed_moves"] == run["lost_pages"] == 0
        assert transfers["starts"] > 0 and transfers["polls"] > 0 and transfers["waits"] >= 0
        assert run["compiled_in_run"] == 0 and run["load_cost"] is None
        assert tokens["host_hit"] > 0 and tokens["prompt"] == sum(tokens.values()) - tokens["prompt"]
    assert len({document["run"]["fingerprint"] for document in documents.values()}) == 1
    text = capsys.readouterr().out
    assert "device pool 512, host 512 tokens" in text and "Outputs are identical under these policies." in text
    for column in ("host hit", "demoted", "loaded", "ahead", "swapped", "waited s"):
        assert column in text.splitlines()[1]
    one = replayed(trace, tmp_path / "one.json", *SIZES)["penelope"]
    assert one["run"]["fingerprint"] == documents["penelope"]["run"]["fingerprint"]
    assert one["moved_pages"] == one["tokens"]["host_hit"] == 0 and "host hit" not in capsys.readouterr().out


def test_the_cost_of_a_load_is_measured_at_the_start(capsys, trace, tmp_path):
    flags = [*TIERS[:-2], "--max-turns", 2]
    document = replayed(trace, tmp_path / "out.json", *flags)["penelope"]
    measured = document["run"]["load_cost"]
    assert measured["page_bytes"] == 8192 and measured["page_s"] > 0 and measured["unit_s"] > 0
    assert document["config"]["load_units"] == measured["load_units"] >= 0
    assert measured["prefill_tokens"] == [32, 64]  # one size is compiled for
    assert "Measured: a page of 8,192 bytes is loaded at " in capsys.readouterr().out


def test_where_loading_begins_to_pay():
    assert [first_loaded(cost, 100.0, 16) for cost in (0, 1720, 1721, 1976, 1977)] == [0, 0, 16, 16, 32]
    told = LoadCost(
        page_bytes=10**6,
        page_s=1e-4,
        prefill_tokens=(1, 2),
        prefill_s=(1, 2),
        unit_s=2e-9,
        linear_cost=90.4,
        load_units=1976.0,
        recomputed_below=16,
    )
    assert told.text() == (
        "Measured: a page of 1,000,000 bytes is loaded at 10.00 GB/s, a unit takes 2 ns with c = 90: load_units=1,976; "
        "host pages below position 16 are recomputed instead."
    )


def first_turns(directory: pathlib.Path, name: str) -> list[dict]:
    records = (directory / f"{name}.requests.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, records) if record["turn"] == 0]


def hit_share(records: list[dict]) -> float:
    hits = sum(record["device_hit"] + record["host_hit"] for record in records)
    return hits / sum(record["prompt_len"] for record in records)


def test_a_second_run_begins_with_the_cache_of_the_first(capsys, trace, tmp_path):
    directory = tmp_path / "made" / "cache"
    flags = [*TIERS, "--cache-dir", directory]
    first = replayed(trace, tmp_path / "first.json", *flags)["penelope"]
    text = capsys.readouterr().out
    assert f"Restored nothing: {directory} holds no pages.\n" in text
    assert f"Saved to {directory / 'snapshot-0'}: " in text
    second = replayed(trace, tmp_path / "second.json", *flags)["penelope"]
    text = capsys.readouterr().out
    assert f"Restored from {directory}: 32 pages to the device, " in text and " to the host.\n" in text
    assert [path.name for path in directory.iterdir()] == ["snapshot-1"]
    cold, warm = (hit_share(first_turns(tmp_path, name)) for name in ("first", "second"))
    assert cold < 0.3 and warm > 0.6, (cold, warm)
    assert first["run"]["fingerprint"] == second["run"]["fingerprint"]
    # One tier of the same pages takes what it has room for.
    third = replayed(trace, tmp_path / "third.json", *SIZES, "--cache-dir", directory)["penelope"]
    assert third["run"]["fingerprint"] == first["run"]["fingerprint"]
    assert "32 pages to the device, 0 to the host, " in capsys.readouterr().out

    for change, reason in (
        (["--seed", 1], "weights with fingerprint"),
        (["--dtype", "bfloat16"], "weights with fingerprint"),
        (["--page-size", 32], "pages whose size in tokens is 16; this engine has 32."),
    ):
        assert penelope("replay", trace, *QUICK, *flags, *change) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and reason in err and "Choose another directory, or remove it." in err

    (part,) = (path for path in directory.rglob("pages-0/d/*") if path.is_file())
    part.write_bytes(part.read_bytes()[:-1000])
    again = replayed(trace, tmp_path / "again.json", *flags)["penelope"]
    assert again["run"]["fingerprint"] == first["run"]["fingerprint"]
    assert "Restored nothing: what was saved is damaged: " in capsys.readouterr().out
    assert hit_share(first_turns(tmp_path, "again")) == cold


def test_ctrl_c_saves_the_cache(capsys, trace, tmp_path, monkeypatch):
    """The first one: open requests are aborted, moves end, and what was computed is there at the next start."""

    class Interrupted(JaxExecutor):
        def dispatch(self, plan):
            if plan.step == 40:
                signal.raise_signal(signal.SIGINT)
            return super().dispatch(plan)

    flags = [*TIERS, "--cache-dir", tmp_path / "cache"]
    with monkeypatch.context() as patch:
        patch.setattr("penelope_jax.executor.JaxExecutor", Interrupted)
        assert penelope("replay", trace, *QUICK, *flags, "--json", tmp_path / "out.json") == 130
    text = capsys.readouterr().out
    assert "Interrupted: what was measured so far follows." in text and "Saved to " in text
    assert json.loads((tmp_path / "out.json").read_text())["run"]["partial"]
    replayed(trace, tmp_path / "next.json", *flags)
    assert "Restored from " in capsys.readouterr().out
    assert hit_share(first_turns(tmp_path, "next")) > 0.5


def test_ctrl_c_while_the_cache_is_saved_keeps_the_one_before(capsys, trace, tmp_path, monkeypatch):
    """The second one, or the first if the run had ended."""
    flags = [*TIERS, "--cache-dir", tmp_path / "cache", "--max-turns", 1]
    replayed(trace, tmp_path / "first.json", *flags)
    capsys.readouterr()

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("penelope_jax.snapshot._write", interrupt)
        assert penelope("replay", trace, *QUICK, *flags, "--json", tmp_path / "out.json") == 130
    out, err = capsys.readouterr()
    assert out.endswith(f"The cache was not saved: {tmp_path / 'cache'} keeps what it held.\n")
    assert err == "penelope replay: interrupted.\n" and (tmp_path / "out.json").exists()
    replayed(trace, tmp_path / "next.json", *flags)
    assert "Restored from " in capsys.readouterr().out


def test_a_cache_that_cannot_be_saved_costs_no_result(capsys, trace, tmp_path, monkeypatch):
    flags = [*TIERS, "--cache-dir", tmp_path / "cache", "--max-turns", 1]

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("penelope_jax.snapshot._write", fail)
    assert penelope("replay", trace, *QUICK, *flags, "--json", tmp_path / "out.json") == 2
    assert capsys.readouterr().err.endswith(
        f"{tmp_path / 'cache'}: the cache was not saved: [Errno 28] No space left on device\n"
    )
    assert json.loads((tmp_path / "out.json").read_text())["requests"] == 4


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--policy", "vllm,penelope"], "takes one policy; 2 are to be compared."),
        (["--event-log", "e.log"], "does not go with --event-log, since a log begins with an empty cache."),
        ([], "File exists."),
    ],
)
def test_flags_that_do_not_go_with_a_cache_directory(capsys, trace, tmp_path, monkeypatch, flags, reason):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    name = "cache" if flags else "file"
    assert penelope("replay", trace, *QUICK, *TIERS, "--cache-dir", name, *flags) == 2
    out, err = capsys.readouterr()
    assert out == "" and err == f"penelope replay: error: --cache-dir {name}: {reason}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_empty_name_is_no_cache_directory(capsys, trace, tmp_path, monkeypatch):
    """A shell variable that is not set must not fill the working directory with snapshots."""
    monkeypatch.chdir(tmp_path)
    assert penelope("replay", trace, *QUICK, *TIERS, "--cache-dir", "") == 2
    message = "penelope replay: error: --cache-dir '': no directory is named; '.' would be this one.\n"
    assert capsys.readouterr() == ("", message) and not list(tmp_path.iterdir())
