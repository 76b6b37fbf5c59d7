"""penelope verify with a host tier: equal bits whatever moves do, and a changed bit of a host page that is found."""

import dataclasses
import json

import pytest
from test_verify import PAGE, run

from penelope_jax.config import POLICIES, EngineConfig
from penelope_jax.experiments.bit_comparison import Report
from penelope_jax.experiments.perturbers import HostPerturber
from penelope_jax.experiments.synthesize import SynthesisOptions, synthesize
from penelope_jax.experiments.verify import large_pool_pages, verify
from penelope_jax.models import registry
from penelope_jax.transfer_faults import TransferFaults


@pytest.fixture(scope="module")
def model():
    return registry.load_model("random:tiny")


@pytest.fixture(scope="module")
def sessions():
    options = SynthesisOptions(sessions=4, turns=8, context=384, scale=64, shared_prefix=3200, side_rate=0.5, seed=1)
    return synthesize(options)


@pytest.fixture(scope="module")
def config(model):
    return EngineConfig(
        device_tokens=26 * PAGE,
        host_tokens=26 * PAGE,
        swap_tokens=2 * PAGE,
        page_size=PAGE,
        policy=POLICIES["penelope"],
        max_context=384,
        max_running=4,
        max_step_tokens=64,
        max_step_segments=32,
        linear_cost=model.config.linear_cost,
        vocab_size=model.config.vocab_size,
    )


def check(report: Report) -> None:
    assert report.identical and report.text().endswith("\nIDENTICAL")
    assert (report.output_bits, report.score_bits, report.page_bits, report.unmatched_pages) == (0, 0, 0, 0)
    assert report.demoted_pages >= 50 and report.loaded_pages >= 50 and report.evicted_pages > 0
    assert 0 < report.host_pages < report.pages and "\nmoved pages " in report.text()


def test_all_bits_are_equal_in_both_tiers(model, config, sessions):
    """One request runs at a time and needs all of the device, so that loads change places with what is there."""
    alone = dataclasses.replace(config, max_running=1, output_reserve=4 * config.output_reserve + 96)
    assert large_pool_pages(sessions, alone) == large_pool_pages(sessions, config)  # nothing is compiled again
    report = verify(model, alone, sessions, num_live=4, score_share=0.2)
    check(report)
    assert 2 * report.swapped_loads >= report.loaded_pages and report.prefetched_pages > 0
    assert (report.failed_moves, report.lost_pages) == (0, 0)


@pytest.mark.parametrize("policy", ["penelope", "sglang"])
def test_slow_and_failing_moves_change_no_bit(model, config, sessions, policy):
    faults = TransferFaults(fail_loads=0.1, fail_demotions=0.1, delay_polls=4)
    report = verify(
        model, dataclasses.replace(config, policy=POLICIES[policy]), sessions, score_share=0.1, faults=faults
    )
    check(report)
    assert report.failed_moves > 0 and report.lost_pages > 0


def test_control_a_changed_bit_of_a_host_page_is_found(model, config, sessions):
    report = verify(model, config, sessions, score_share=0.1, perturb=HostPerturber)
    assert not report.identical and report.text().endswith("\nDIFFERENT")
    assert report.perturbed.startswith("one bit of a key in host page ")


def test_control_nothing_to_change_without_loads(model, config, sessions):
    roomy = dataclasses.replace(config, device_tokens=(large_pool_pages(sessions, config) - 1) * PAGE)
    report = verify(model, roomy, sessions, score_share=0.0, perturb=HostPerturber)
    assert report.identical and report.perturbed == "nothing: no host page was loaded"


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--perturb-host"], "--perturb-host needs a host tier: --host-tokens N."),
        (["--slow-moves", 2], "--slow-moves needs a host tier: --host-tokens N."),
        (["--fail-moves", 0.5], "--fail-moves needs a host tier: --host-tokens N."),
        (["--host-tokens", 96, "--fail-moves", 2], "--fail-moves 2.0 must be in [0, 1]."),
        (["--host-tokens", 96, "--perturb", "--perturb-host"], "--perturb and --perturb-host: one at a time."),
        (["--batch", 0], "--batch 0 must be at least 1."),
        (
            ["--load-units", "auto"],
            "--load-units auto: a measured time differs from run to run; verify takes a number.",
        ),
    ],
)
def test_bad_flags(capsys, flags, reason):
    assert run(*flags) == 2
    assert capsys.readouterr().err == f"penelope verify: error: {reason}\n"


BUILT_IN = ["--swap-tokens", 64, "--score-share", 0.1]
BATCH_1 = [*BUILT_IN, "--batch", 1, "--device-tokens", 784, "--host-tokens", 784]
BATCH_8 = [*BUILT_IN, "--sessions", 8, "--host-tokens", 960]


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        BATCH_1,
        BATCH_8,
        [*BATCH_1, "--mesh", "1x4"],
        [*BATCH_8, "--mesh", "1x4"],
        [*BATCH_1, "--dtype", "bfloat16"],
        [*BATCH_8, "--slow-moves", 6, "--fail-moves", 0.1],
        [*BATCH_1, "--policy", "sglang"],
        [*BATCH_8, "--policy", "sglang"],
    ],
)
def test_the_built_in_trace(capsys, tmp_path, flags):
    assert run(*flags, "--json", tmp_path / "out.json") == 0
    report = json.loads((tmp_path / "out.json").read_text())["report"]
    assert report["requests"] >= 200 and report["loaded_pages"] >= 100 and report["host_pages"] > 0
    if "--policy" not in flags and "--fail-moves" not in flags:
        assert 2 * report["swapped_loads"] >= report["loaded_pages"]
    assert run(*flags, "--perturb-host") == 1
    assert capsys.readouterr().out.endswith("DIFFERENT\n")
