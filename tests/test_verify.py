"""penelope verify on a tiny model: equal bits, and a changed bit that is found."""

import dataclasses
import json

import numpy as np
import pytest

from penelope_jax import cli, radix_tree
from penelope_jax.config import POLICIES, EngineConfig
from penelope_jax.experiments import command
from penelope_jax.experiments.perturbers import HolePerturber
from penelope_jax.experiments.synthesize import SynthesisOptions, synthesize
from penelope_jax.experiments.traces import write_jsonl
from penelope_jax.experiments.verify import chosen, large_pool_pages, resident_histories, verify
from penelope_jax.histories import insert
from penelope_jax.models import registry
from penelope_jax.pages import Tier, take

PAGE = 16


@pytest.fixture(scope="module")
def model():
    return registry.load_model("random:tiny")


@pytest.fixture(scope="module")
def sessions():
    return synthesize(
        SynthesisOptions(sessions=4, turns=8, context=384, scale=64, shared_prefix=3200, side_rate=0.5, seed=1)
    )


@pytest.fixture(scope="module")
def config(model):
    return EngineConfig(
        device_tokens=512,
        page_size=PAGE,
        policy=POLICIES["penelope"],
        max_context=384,
        max_running=4,
        max_step_tokens=64,
        max_step_segments=32,
        linear_cost=model.config.linear_cost,
        vocab_size=model.config.vocab_size,
    )


def test_all_bits_are_equal(model, config, sessions):
    report = verify(model, config, sessions, score_share=0.5)
    assert report.identical and report.text().endswith("\nIDENTICAL")
    assert (report.output_bits, report.score_bits, report.page_bits, report.unmatched_pages) == (0, 0, 0, 0)
    assert report.requests == sum(turn.cancel_s > 1e9 for session in sessions for turn in session.turns)
    assert report.requests_with_holes >= 3 and report.refilled_tokens >= PAGE * report.holes
    assert report.evicted_pages > 0 and report.pages > 10
    assert report.scored_recomputed > 0 and report.scored_reused > 0 and report.scored_new > 0
    assert report.scored_recomputed + report.scored_reused + report.scored_new == sum(
        turn.prompt_len - 1
        for session in sessions
        for index, turn in enumerate(session.turns)
        if turn.cancel_s > 1e9 and chosen(session.session_id, index, 0.5)
    )


def test_control_a_changed_bit_is_found(model, config, sessions):
    report = verify(model, config, sessions, score_share=0.5, perturb=HolePerturber)
    assert not report.identical and report.text().endswith("\nDIFFERENT")
    assert report.output_bits + report.score_bits + report.page_bits > 0
    assert report.perturbed.startswith("one bit of a key at position ")


def test_control_nothing_to_change_without_holes(model, config, sessions):
    roomy = dataclasses.replace(config, device_tokens=(large_pool_pages(sessions, config) - 1) * PAGE)
    report = verify(model, roomy, sessions, score_share=0.0, perturb=HolePerturber)
    assert report.identical and report.perturbed == "nothing: no hole was refilled"


def run(*args):
    return command.execute(cli.parse(["penelope", "verify", *map(str, args)]))


def test_the_command_reports_and_exits(capsys, tmp_path, sessions):
    trace, out = tmp_path / "trace.jsonl", tmp_path / "out.json"
    write_jsonl(sessions, trace)
    # The shapes of the configuration above, so that nothing is compiled again.
    flags = [trace, "--device-tokens", 512, "--max-context", 384, "--max-step-tokens", 64, "--sessions", 4]
    assert run(*flags, "--json", out) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "IDENTICAL"
    report = json.loads(out.read_text())["report"]
    assert report["requests_with_holes"] > 0 and report["output_bits"] == 0
    assert run(*flags, "--perturb") == 1
    assert capsys.readouterr().out.splitlines()[-1] == "DIFFERENT"


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--score-share", 2], "--score-share 2.0 must be in [0, 1]."),
        (["--policy", "vllm,penelope"], "--policy vllm,penelope: verify takes one policy."),
        (["--device-tokens", 0], "device_tokens=0 must be at least 1."),
    ],
)
def test_bad_flags(capsys, flags, reason):
    assert run(*flags) == 2
    assert capsys.readouterr().err == f"penelope verify: error: {reason}\n"


def test_pages_are_named_by_their_whole_history():
    cache = radix_tree.make_cache(4, 16)
    for tokens in ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9, 9, 9, 9], [5, 6, 7, 8]):
        pool, page_ids = take(cache.device, len(tokens) // 4)
        cache = dataclasses.replace(cache, device=pool)
        cache, _ = insert(cache, np.array(tokens, np.int32), page_ids)
    found = list(resident_histories(cache))
    assert len({item.digest for item in found}) == len({item.page_id for item in found}) == 4
    assert {item.tier for item in found} == {Tier.DEVICE}


def test_the_large_pool_holds_every_history(sessions, config):
    num_pages = large_pool_pages(sessions, config)
    assert num_pages * PAGE > max(turn.history_len for session in sessions for turn in session.turns)
    assert num_pages == large_pool_pages(sessions[:1], config) + sum(
        large_pool_pages([session], config) - large_pool_pages([], config) for session in sessions[1:]
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_built_in_trace(capsys, tmp_path, dtype):
    assert run("--dtype", dtype, "--json", tmp_path / "out.json") == 0
    report = json.loads((tmp_path / "out.json").read_text())["report"]
    assert report["requests"] >= 200 and report["requests_with_holes"] >= 50 and report["most_holes"] > 1
    assert run("--dtype", dtype, "--perturb") == 1
