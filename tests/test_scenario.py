"""The scenarios of tests/golden against their expected texts, and the scenario language itself."""

import dataclasses
import difflib
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

from penelope_jax.errors import InputError
from penelope_jax.events import Finished, Scored
from penelope_jax.experiments import scenario
from penelope_jax.experiments.scenario_language import read_line
from penelope_jax.experiments.scenario_world import World
from penelope_jax.state import EngineCounters

GOLDEN = pathlib.Path(__file__).resolve().parent / "golden"
SCENARIOS = sorted(GOLDEN.glob("*.scenario"))
UPDATE = "python -m penelope_jax.experiments.scenario --update tests/golden/{name}"

RULES = [f"rule{number:02}" for number in range(1, 15)]
CASES = [
    *(
        f"T{number:02}"
        for number in (*range(1, 13), 14, 15, 17, 18, 19, 22, 23, 24, 25, 27, 29, 30, 32, 33, 35, 36, 37)
    ),
    *(
        f"T{number:02}"
        for number in (39, 41, 42, 43, 46, 47, 49, 50, 53, 54, 55, 56, 57, 59, 60, 61, 62, 65, 67, 68, 69, 70)
    ),
    *(f"T{number:02}" for number in (73, 75, 76, 77, 79)),
    *(f"D{number:02}" for number in (1, 2, 3, 4, 7, 8, 9, 10, 11, 13, 14, 15, 16, 17, 19)),
]


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_golden(path):
    found = scenario.run_file(str(path))
    expected = scenario.expected_path(path).read_text()
    if found != expected:
        lines = difflib.unified_diff(expected.splitlines(), found.splitlines(), "expected", "found", lineterm="", n=8)
        pytest.fail("\n".join([*lines, f"If this is right: {UPDATE.format(name=path.name)}"]), pytrace=False)


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_golden_says_what_it_proves_and_states_it_by_hand(path):
    lines = path.read_text().splitlines()
    assert lines[0].startswith("# "), "the first line says which rule or case this is"
    assert sum(line.startswith("expect ") for line in lines) >= 4


def test_every_rule_and_case_has_a_scenario():
    names = {path.stem.partition("_")[0] for path in SCENARIOS}
    assert {*RULES, *CASES, "figure3"} - names == set()


def test_no_expected_text_without_a_scenario():
    assert {path.stem for path in GOLDEN.glob("*.expected")} == {path.stem for path in SCENARIOS}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("insert A", "f:1: the first command must be cache, got 'insert'."),
        ("cache pages=x", "f:1: pages must be a whole number of at least 0, got 'x'."),
        ("cache pages=0", "f:1: device_tokens=0 must be at least 1."),
        ("cache page_size=3", "f:1: page_size=3 must be a power of two from 1 to 1024."),
        (
            "cache policy=lru",
            "f:1: unknown policy 'lru'; known: sglang, sglang-reclaim, sglang-device-lpm, vllm, leaf-head, leaf-head-node, front-node, penelope.",
        ),
        ("cache scheduler=x", "f:1: unknown scheduler 'x'; known: lpm, lpm-cost, fcfs."),
        ("cache insert_unit=x", "f:1: 'x' is not a valid InsertUnit"),
        ("cache swap=2", "f:1: swap needs a host tier: host=PAGES."),
        ("cache moves=manual load_units=3", "f:1: load_units needs a host tier: host=PAGES."),
        ("cache host=2 moves=now", "f:1: moves must be one of auto, manual, got 'now'."),
        (
            "cache host=2 swap=0",
            "f:1: swap_tokens=0 must be a multiple of page_size=4, and at least 1, with a host tier.",
        ),
        ("cache host=two", "f:1: host must be a whole number of at least 0, got 'two'."),
        ("cache host=2\ndemote x", "f:2: pages must be a whole number of at least 0, got 'x'."),
        ("cache host=2\ndemote 1 most=2", "f:2: unknown option 'most' of demote; known: policy."),
        ("cache host=2\nload A pages=2", "f:2: unknown option 'pages' of load; known: most, salt."),
        ("cache host=2\nmoved first", "f:2: moved must be a whole number of at least 0, got 'first'."),
        (
            "cache tokens=4",
            "f:1: unknown option 'tokens' of cache; known: context, host, insert_unit, load_units, ",
        ),
        (
            "cache\n\nremove A",
            "f:3: unknown command 'remove'; known: cache, expect, repeat, insert, match, touch, pin, unpin, evict, ",
        ),
        ("cache\nflush now=1", "f:2: unknown option 'now' of flush; it takes none."),
        ("cache\ninsert A at=1", "f:2: unknown option 'at' of insert; known: from, salt."),
        ("cache\ninsert A from=4 from=8", "f:2: option 'from' is given twice."),
        ("cache\ninsert A x B", "f:2: page B starts at position 5, which is not a multiple of page_size=4."),
        ("cache\ninsert A _ B", "f:2: '_' is neither a page (A, B2) nor a token (x, y2)."),
        ("cache\nevict one", "f:2: pages must be a whole number of at least 0, got 'one'."),
        (
            "cache\nevict 1 policy=x",
            "f:2: unknown policy 'x'; known: sglang, sglang-reclaim, sglang-device-lpm, vllm, ",
        ),
        ("cache\nunpin p", "f:2: no pin was called 'p'."),
        ("cache\ninsert A\npin p A\npin p A", "f:4: pin 'p' is out already."),
        ("cache\ntake a 1\ntake a 1", "f:3: 'a' holds pages already."),
        ("cache\nfree a", "f:2: nobody called 'a' holds pages."),
        ("cache\nsave", "f:2: save needs one name, got ''."),
        ("cache\nrestore s", "f:2: no state was saved as 's'."),
        ("cache\nsubmit r A\nsubmit r A", "f:3: there was a request called 'r' already."),
        ("cache\nabort r", "f:2: there is no request called 'r'."),
        ("cache\nsubmit R A", "f:2: 'R' is no name for a request (r1, short)."),
        ("cache\ndone", "f:2: no step is in flight."),
        ("cache\ntime 5\ntime 4", "f:3: time 4 is before 5."),
        ("cache\ntime soon", "f:2: time must be a whole number of at least 0, got 'soon'."),
        ("cache\nrepeat many plan", "f:2: repeat must be a whole number of at least 0, got 'many'."),
        ("cache\nrepeat 2 expect free 3", "f:2: 'expect' cannot be repeated; what can: insert, match, touch, pin, "),
        ("cache\nrepeat 2", "f:2: '' cannot be repeated; what can: insert, match, touch, pin, "),
        ("cache\nrepeat 2 submit r{n} A B{n} max=3", "f:2: unknown option 'max' of submit; known: logprobs_from, "),
        ("cache\nexpect count pages 3", "f:2: unknown counter 'pages'; known: steps, admitted, finished, "),
        ("cache\nplan now", "f:2: plan takes no words, got 'now'."),
        ("cache\nexpect pages 3", "f:2: unknown expectation 'pages'; known: free, resident, evictable, nodes, pins, "),
        ("cache\nexpect free three", "f:2: free must be a whole number of at least 0, got 'three'."),
        ("cache\nexpect free 3 salt=x", "f:2: unknown option 'salt' of expect; it takes none."),
        ("cache\nexpect row r 1", "f:2: there is no request called 'r'."),
    ],
)
def test_what_cannot_be_understood(lines, message):
    with pytest.raises(InputError) as error:
        scenario.run_text(lines, "f")
    assert str(error.value).startswith(message)
    assert str(error.value) == message or message.endswith((", ", "InsertUnit"))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("insert A B\nexpect free 13", "f:3: expected free 13, found 14."),
        ("insert A\ndemote 1\nexpect short 0", "f:4: expected short 0, found 1."),
        ("expect moves demote A", "f:2: expected moves demote A, found nothing."),
        ("moved 3", "f:2: move 3 is not under way; those that are: []."),
        ("expect count moved_pages 1", "f:2: expected count moved_pages 1, found 0."),
        ("insert A B\nexpect tree A", "f:3: expected tree A, found A B."),
        ("insert A\ninsert B\nexpect tree A", "f:4: expected tree A, found A, B."),
        ("expect tree A", "f:2: expected tree A, found nothing."),
        ("insert A\nexpect unchanged", "f:3: expected the state as before, but it has changed."),
        ("expect error x", "f:2: there was no error."),
        ("expect hit 0", "f:2: nothing was looked up."),
        ("insert A\nexpect evicted A", "f:3: expected evicted A, found nothing."),
        ("submit r A\nexpect refusal x", "f:3: there was no refusal."),
        ("submit r A\nexpect hits r 0 hit", "f:3: expected hits r 0 hit, found nothing."),
        ("submit r A\nexpect count finished 1", "f:3: expected count finished 1, found 0."),
        ("submit r A\nplan\nexpect plan r real 0-4", "f:4: expected plan r real 0-4, found r real 0-4 sample."),
        # An error has to be expected in the next line, and to be the one that is expected.
        ("take a 17\nexpect free 16", "f:2: 17 pages needed, 16 available."),
        ("take a 17\n\n# more\nflush", "f:2: 17 pages needed, 16 available."),
        ("take a 17", "f:2: 17 pages needed, 16 available."),
        ("take a 17\nexpect error 18", "f:3: expected error '18', found '17 pages needed, 16 available.'."),
        # Both steps of the pipeline are out: no third one can be planned.
        (
            "submit r A x max_tokens=5\nplan\nplan\nplan",
            "f:5: 2 steps are in flight; at most 1 may be when a step is planned.",
        ),
    ],
)
def test_what_does_not_hold(lines, message):
    with pytest.raises(scenario.ScenarioFailed) as error:
        scenario.run_text(f"cache\n{lines}", "f")
    assert str(error.value) == message
    assert error.value.output.startswith("cache\n")


def test_output_is_the_script_with_the_state_below_each_command():
    text = "cache pages=4\n# two pages\ninsert A [x y z w]   # a comment stays\nmatch A B\nexpect hit 4\n"
    assert scenario.run_text(text, "f") == (
        "cache pages=4\n"
        "# two pages\n"
        "insert A [x y z w]   # a comment stays\n"
        "    adopted 0 1, returned nothing\n"
        "    A [x y z w]   0 1   @2\n"
        "    free 2 of 4, clock 2\n"
        "match A B\n"
        "    matched 0-4 device\n"
        "    (as before)\n"
        "expect hit 4\n"
    )


def test_exit_codes_of_the_command(tmp_path, capsys):
    path = tmp_path / "a.scenario"
    path.write_text("cache\ninsert A\n")
    assert scenario.main(str(path)) == 0
    assert capsys.readouterr() == (scenario.run_file(str(path)), "")
    path.write_text("cache\ninsert A\nexpect free 0\n")
    assert scenario.main(str(path)) == 1
    out, err = capsys.readouterr()
    assert out.endswith("free 15 of 16, clock 2\nexpect free 0\n")
    assert err == f"{path}:3: expected free 0, found 15.\n"
    with pytest.raises(InputError, match=r"b\.scenario: No such file or directory\.$"):
        scenario.main(str(tmp_path / "b.scenario"))
    path.write_bytes(b"\xff")
    with pytest.raises(InputError, match="can't decode byte 0xff"):
        scenario.main(str(path))


def test_update_writes_the_expected_text_and_nothing_else_does(tmp_path):
    path = tmp_path / "a.scenario"
    path.write_text("cache pages=4\ninsert A\n")
    command = [sys.executable, "-m", "penelope_jax.experiments.scenario"]
    done = subprocess.run([*command, str(path)], check=True, capture_output=True, text=True, timeout=100)
    assert not scenario.expected_path(path).exists()
    subprocess.run([*command, "--update", str(path)], check=True, timeout=100)
    assert scenario.expected_path(path).read_text() == done.stdout == scenario.run_file(str(path))
    path.write_text("cache pages=4\ninsert A\nexpect free 4\n")
    failed = subprocess.run([*command, "--update", str(path)], check=False, capture_output=True, timeout=100)
    assert failed.returncode == 1
    assert scenario.expected_path(path).read_text() == done.stdout


def make_world(*lines: str) -> World:
    first, *rest = [read_line(text, "f") for text in lines]
    assert first is not None
    world = World(first)
    for line in rest:
        assert line is not None
        world.do(scenario.COMMANDS[line.command][0], line)
    return world


def test_control_a_broken_world_is_found():
    world = make_world("cache pages=4", "insert A B", "submit r A B x max_tokens=3", "plan")
    world.check()
    state = world.state
    (node,) = [node for node in state.cache.nodes.values() if node.num_pages]

    world.kv.pages[0][1] = world.kv.pages[1][1]
    with pytest.raises(AssertionError, match="the tree reads position 1 from page 0, which holds the K/V of another"):
        world.check()
    world = make_world("cache pages=4", "insert A B", "submit r A B x max_tokens=3", "plan")
    table = world.state.running[0].page_table
    table.flags.writeable = True
    table[[0, 1]] = table[[1, 0]]
    with pytest.raises(AssertionError, match="r's row is stale"):
        world.check()

    world = make_world("cache pages=4", "insert A B", "insert C")
    (node,) = [node for node in world.state.cache.nodes.values() if node.num_pages == 2]
    node.page_ids.flags.writeable = True
    node.page_ids[1] = 2
    with pytest.raises(AssertionError, match=re.escape("pages not in exactly one place: [(1, 0), (2, 2)]")):
        world.check()
    with pytest.raises(AssertionError, match="a past state has changed"):
        world.check_past()


INSERTED = """insert A B
    adopted 0 1, returned nothing
    A B   0 1   @2
    free 1 of 3, host 4 of 3+1, clock 2
"""

TIERED = """cache pages=3 host=3 moves=manual
insert A B
demote 1
    move 0 demote A, 0 to h0
    A↓ B   h0 1   @2
    under way: move 0 demote A, 0 to h0
    free 2 of 3, host 3 of 3+1, clock 2
moved 0
    moved 0
    Aₕ B   h0 1   @2
    free 2 of 3, host 3 of 3+1, clock 2
load A B
    move 1 load A, h0 to 0
    A↑ B   h0>0 1   @2
    under way: move 1 load A, h0 to 0
    free 1 of 3, host 3 of 3+1, clock 2
save s
    (as before)
fails 1
    failed 1, 1 pages lost
    _ B   - 1   @2
    free 2 of 3, host 4 of 3+1, clock 2
restore s
    A↑ B   h0>0 1   @2
    under way: move 1 load A, h0 to 0
    free 1 of 3, host 3 of 3+1, clock 2
moved
    moved 1
    A B   0 1   @2
    free 1 of 3, host 4 of 3+1, clock 2
"""


def test_pages_on_the_host_and_on_their_way():
    source = "".join(line for line in TIERED.splitlines(keepends=True) if not line.startswith(" "))
    expected = TIERED.replace("insert A B\n", INSERTED)
    assert scenario.run_text(source, "f") == expected


def test_moves_end_by_themselves_before_a_plan_unless_told_otherwise():
    lines = ["insert A", "demote 1", "submit r A x", "plan"]
    world = make_world("cache host=2", *lines)
    assert list(world.kv.moves) == [1] == list(world.state.cache.moves)
    world = make_world("cache host=2 moves=manual", *lines)
    assert list(world.kv.moves) == [0]
    # A step without segments is none: `run` goes on until the load has arrived.
    world = make_world("cache host=2", *lines[:3], "run")
    assert world.state.idle and not world.kv.moves
    with pytest.raises(AssertionError, match="requests are left, but none can go on"):
        make_world("cache host=2 moves=manual", *lines[:3], "run")


def test_repeat_counts_from_one_and_is_one_command():
    text = "cache pages=8\nrepeat 3 insert S A{n}\n"
    assert scenario.run_text(text, "f") == (
        "cache pages=8\n"
        "repeat 3 insert S A{n}\n"
        "    adopted 0 1, returned nothing\n"
        "    adopted 3, returned 2\n"
        "    adopted 4, returned 2\n"
        "    S      0   @2\n"
        "      A1   1   @2\n"
        "      A2   3   @4\n"
        "      A3   4   @6\n"
        "    free 4 of 8, clock 6\n"
    )


def test_the_engine_learns_the_time_from_what_comes():
    world = make_world("cache", "time 7")
    assert world.state.now_s == 0
    world = make_world("cache", "time 7", "submit r A x", "time 9", "plan")
    assert (world.state.now_s, world.state.waiting, world.state.running[0].arrival_s) == (7, (), 7)
    world = make_world("cache", "time 7", "submit r A x", "plan", "time 9", "done")
    assert world.state.now_s == 9


def test_control_wrong_reports_are_found():
    world = make_world("cache pages=4", "submit r A B x max_tokens=3 logprobs_from=2", "plan")
    fewer = dataclasses.replace(world.state, counters=EngineCounters())
    with pytest.raises(AssertionError, match="counter steps fell from 1 to 0"):
        world.move_on(fewer)
    metrics = world.metrics[0]
    with pytest.raises(AssertionError, match="r has 9 of 9 tokens from the cache"):
        world.note_metrics(0, dataclasses.replace(metrics, device_hit=9, new=0))
    with pytest.raises(AssertionError, match="r does not add up"):
        world.note_metrics(0, dataclasses.replace(metrics, new=8))
    with pytest.raises(AssertionError, match="r's metrics have changed"):
        world.note_metrics(0, dataclasses.replace(metrics, new=8, device_hit=1))
    values = np.zeros(3, np.float32)
    with pytest.raises(AssertionError, match="r is scored from position 4 on, but 3 is next"):
        world.note_scores(Scored(request_id=0, start=3, logprobs=values, reused=False))
    with pytest.raises(AssertionError, match="r has no score at some of 3-6"):
        world.note_scores(Scored(request_id=0, start=2, logprobs=values * np.nan, reused=False))
    world.note_scores(Scored(request_id=0, start=2, logprobs=values, reused=False))
    with pytest.raises(AssertionError, match="r ends without scores of 6-9"):
        world.note_scores(Finished(request_id=0, reason="length", metrics=metrics, output_len=1, num_retractions=0))
