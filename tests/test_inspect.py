"""penelope inspect: what it prints of a small run, that what it says is true of the run, and its errors, word by word."""

import dataclasses
import itertools
import re

import logged_runs
import numpy as np
import pytest

from penelope_jax import cli
from penelope_jax.driver import Driver
from penelope_jax.event_log import EventLogWriter
from penelope_jax.experiments import command, log_conversations, log_query, log_text
from penelope_jax.experiments.log_conversations import Conversations
from penelope_jax.log_replay import LogReplay
from penelope_jax.pages import Tier
from penelope_jax.segments import SamplingParams, SegmentKind

PAGE = logged_runs.PAGE


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "run.log"
    driver, executor = logged_runs.run(path, overlap=True, seed=5)
    return path, driver, executor


def numbers(start, stop):
    return np.arange(start, stop, dtype=np.int32) % 50


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """Two sessions in a pool of 10 pages: the second needs the front of the first, which comes back."""
    path = tmp_path_factory.mktemp("story") / "story.log"
    config = dataclasses.replace(logged_runs.config_of(num_pages=10), weights_fingerprint="ab12")
    executor = logged_runs.WatchedExecutor()
    with EventLogWriter(path, config, {"seed": 3, "model": "none"}) as log:
        driver = executor.driver = Driver(config, executor, logged_runs.Clock(), log=log)
        first = driver.generate(numbers(0, 20), SamplingParams(max_tokens=2), session_id="a")
        driver.generate(numbers(20, 48), SamplingParams(max_tokens=1), session_id="b b")
        again = np.concatenate([numbers(0, 20), first.tokens, numbers(40, 44)])
        driver.submit(again, SamplingParams(max_tokens=2), session_id="a")
        driver.step()
        driver.submit(again[:8], SamplingParams(max_tokens=1))
        driver.abort(2)
        while not driver.idle:
            driver.step()
    return path


def inspect(capsys, *args):
    """Runs the command; returns its exit code, output and errors."""
    try:
        code = command.execute(cli.parse(["penelope", "inspect", *map(str, args)]))
    except SystemExit as error:
        code = error.code
    return code, *capsys.readouterr()


def output(capsys, *args):
    code, out, err = inspect(capsys, *args)
    assert (code, err) == (0, "")
    return out


def test_a_state_of_the_past(capsys, story):
    assert output(capsys, story, "--step", 3) == (
        f"{story}: step 3 is planned, 0.750 s\n"
        "plan:\n"
        "  r2 (session a) phantom [0, 8)\n"
        "  r2 (session a) real [20, 26), sample\n"
        "  evicts session b b: [0, 16), 4 pages\n"
        "running: 1\n"
        "  r2 (session a): prompt 26, next 26, 0 of 2 outputs, 1 in flight; 12 hit, 8 refilled, 6 new\n"
        "waiting: 0\n"
        "steps in flight: 3\n"
        "pages: 0 of 10 free, 9 in the tree, 1 of requests; clock 9\n"
        "counters: steps 4, admitted 3, finished 2, refused 0, retractions 0, evicted_pages 6, phantom_segments 1, "
        "phantom_tokens 8, real_tokens 54, decode_tokens 1, score_tokens 0\n"
        "tree:\n"
        "  [0, 20) device  @7\n"
        "  [20, 24) device  @9  pin r2  session a\n"
        "  [0, 16) missing, [16, 28) device  @6  session b b\n"
    )


def test_a_state_page_by_page(capsys, story):
    assert output(capsys, story, "--step", 3, "--pages").splitlines()[5:] == [
        "r2 runs: prompt 26, next 26, 1 in flight, row 0 1 2 3 4 5 | 6",
        "in flight: step 3",
        "salt ab12:",
        "  afa9 41fc 7542 9b17 1a7f   0 1 2 3 4       @7",
        "    1507                     5               @9  pin r2",
        "  _ _ _ _ 2c11 18af f6fa     - - - - 7 8 9   @6",
        "free 0 of 10, clock 9",
    ]


def test_the_end(capsys, story):
    lines = output(capsys, story, "--step", "end").splitlines()
    assert lines[:3] == [f"{story}: the end, after step 4, 1.250 s", "running: 0", "waiting: 0"]
    assert lines[-6:] == [
        "tree:",
        "  [0, 16) missing, [16, 28) device  @6  session b b",
        "  [0, 4) device  @12",
        "  [4, 8) device  @13  r3",
        "  [8, 20) device  @7",
        "  [20, 24) device  @10  session a",
    ]


def test_what_changed(capsys, story):
    assert output(capsys, story, "--diff", 2, 3) == (
        f"{story}: from step 2 to step 3, 0.250 s\n"
        "requests:\n"
        "  r1 (session b b): finish in step 2 (length, 1 output)\n"
        "  r2 (session a): submit in step 3 (prompt of 26 tokens, at most 2 outputs), "
        "admit in step 3 (12 hit, 8 refilled, 6 new), next 0 -> 26\n"
        "residency:\n"
        "  session a: [0, 8) missing -> device\n"
        "  session a: [20, 24) missing -> device\n"
        "  session b b: [0, 16) device -> missing\n"
        "evictions:\n"
        "  step 3, session b b: [0, 16), 4 pages\n"
        "counters: steps +1, admitted +1, finished +1, evicted_pages +4, phantom_segments +1, phantom_tokens +8, "
        "real_tokens +6, free pages 0 -> 0\n"
    )
    assert output(capsys, story, "--diff", 0, 1).splitlines()[1:] == [
        "requests:",
        "  r0 (session a): next 20 -> 21, outputs 0 -> 1",
        "residency: none",
        "evictions: none",
        "counters: steps +1, decode_tokens +1, free pages 5 -> 4",
    ]


@pytest.mark.parametrize(
    ("query", "lines"),
    [
        (
            "evict",
            ["step 2      evict    session a: [0, 8), 2 pages", "step 3      evict    session b b: [0, 16), 4 pages"],
        ),
        ("evict session='b b'", ["step 3      evict    session b b: [0, 16), 4 pages"]),
        ("evict request=1 step=3", ["step 3      evict    session b b: [0, 16), 4 pages"]),
        ("evict session=b", []),
        ("refill", ["step 3      refill   r2 (session a): [0, 8)"]),
        ("finish session=", ["step 4      finish   r3: length, 1 output"]),
        ("abort", ["step 4      abort    r2 (session a): after 1 output"]),
        ("admit step=2", ["step 2      admit    r1 (session b b): 0 hit, 0 refilled, 28 new"]),
        ("submit request=3", ["step 4      submit   r3: prompt of 8 tokens, at most 1 output"]),
        ("retract", []),
    ],
)
def test_find(capsys, story, query, lines):
    assert output(capsys, story, "--find", query).splitlines() == [*lines, f"{len(lines)} found."]


def test_the_overview(capsys, story):
    assert output(capsys, story, "--list") == (
        f"{story}: event log\n"
        "run: seed 3, model none\n"
        "engine: penelope, 10 pages of 4 tokens, lpm, context 160, 3 running, steps of 32 tokens\n"
        "entries: 4 submit, 5 plan, 5 done, 1 abort\n"
        "steps: 5, 5 tokens sampled, 1.125 s\n"
        "session a: 2 requests before steps 0 to 3, the last of 26 tokens\n"
        "session b b: 1 request before steps 2 to 2, the last of 28 tokens\n"
        "no session: 1 request before steps 4 to 4, the last of 8 tokens\n"
        "The run ended by itself.\n"
    )


# What it says is true.


def moments(path):
    """Yields the moments of a log, and the conversations that have seen them."""
    conversations = Conversations()
    for moment in LogReplay(path):
        conversations.see(moment)
        yield moment, conversations


def test_every_evicted_page_has_its_conversation(log):
    path, driver, _ = log
    num_evicted, shared = 0, 0
    for moment, conversations in moments(path):
        losses = conversations.losses(moment)
        spans = moment.plan.evicted if moment.plan is not None else ()
        if moment.plan is not None:
            assert sum(loss.stop - loss.start for loss in losses) == sum(span.stop - span.start for span in spans)
            num_evicted += sum(loss.stop - loss.start for loss in losses) // PAGE
        assert all(loss.conversations for loss in losses)
        shared += any(len(loss.conversations) > 1 for loss in losses)
        for conversation in conversations:
            told = {
                page for loss in losses if conversation in loss.conversations for page in range(loss.start, loss.stop)
            }
            before = log_conversations.residency(conversation, moment.before.cache)
            after = log_conversations.residency(conversation, moment.after.cache)
            assert len(before) == len(after)
            gone = np.flatnonzero((before == Tier.DEVICE) & (after == Tier.MISSING)) * PAGE
            assert told.issuperset(gone.tolist()), "an evicted page that nobody is told of"
    assert num_evicted == driver.state.counters.evicted_pages and shared


def test_a_node_that_left_no_trace_is_found_by_what_is_missing(log):
    for moment, conversations in moments(log[0]):
        losses = conversations.losses(moment)
        if moment.plan is None or not losses:
            continue
        unknown = tuple(span._replace(node_id=10**9 + index) for index, span in enumerate(moment.plan.evicted))
        moved = moment._replace(plan=dataclasses.replace(moment.plan, evicted=unknown))
        for loss in conversations.losses(moved):
            expected = [other for other in losses if other.start <= loss.start < other.stop]
            assert all(any(one in other.conversations for other in expected) for one in loss.conversations)


def test_occurrences_are_what_happened(log):
    path, driver, executor = log
    found = [
        occurrence
        for moment, conversations in moments(path)
        for occurrence in log_query.occurrences(moment, conversations)
    ]
    counts = {kind: sum(item.kind == kind for item in found) for kind in log_query.KINDS}
    counters = driver.state.counters
    assert counts["submit"] == counters.finished + counters.refused
    assert counts["finish"] + counts["abort"] == counters.finished and counts["abort"] == 2
    assert (counts["admit"], counts["refuse"]) == (counters.admitted, counters.refused)
    assert counts["retract"] == counters.retractions > 0
    assert counts["refill"] == counters.phantom_segments > 0
    refills = [
        (plan.step, (segment.request_id,), f"[{segment.start}, {segment.stop})")
        for plan, _ in executor.planned
        for segment in plan.segments
        if segment.kind is SegmentKind.PHANTOM
    ]
    assert [(item.step, item.requests, item.text) for item in found if item.kind == "refill"] == refills
    steps = [item.step for item in found]
    assert all(later >= earlier - 1 for earlier, later in itertools.pairwise(steps)), (
        "done one step after the next plan"
    )


def test_the_tree_shows_every_resident_page_once(log):
    for moment, conversations in list(moments(log[0]))[::7]:
        cache = moment.after.cache
        text = "\n".join(log_text.tree_lines(cache, conversations, moment.after))
        spans = re.findall(r"\[(\d+), (\d+)\) (device|missing)", text)
        assert sum(int(b) - int(a) for a, b, tier in spans if tier == "device") == cache.num_resident * PAGE
        assert sum(int(b) - int(a) for a, b, _ in spans) == PAGE * sum(node.num_pages for node in cache.nodes.values())
        pinned = re.findall(r"pin (r\d+(?: r\d+)*)", text)
        roots = [request for request in moment.after.running if request.pin.stop == 0]
        assert sum(len(names.split()) for names in pinned) == len(moment.after.running) - len(roots)


def test_states_of_a_longer_run_have_a_text(capsys, log):
    path, driver, executor = log
    for plan, state in executor.planned:
        text = output(capsys, path, "--step", plan.step) if plan.step % 9 == 0 or len(plan.retracted) else ""
        for request_id in plan.retracted:
            assert f"  retracts r{request_id} (session " in text
        if text:
            assert len(re.findall(r"^  r\d+.*: prompt ", text, re.MULTILINE)) == len(state.running) + len(state.waiting)
            assert text.count("leaves (abort)") == sum(request.leaving == "abort" for request in state.running)
            assert text.count("retracted") == sum(bool(r.num_retractions) for r in (*state.running, *state.waiting))
            assert ("  salt tenant\n" in text) == ("tenant" in state.cache.roots)
    last = driver.state.counters.steps - 1
    assert "session s3: [0, " in output(capsys, path, "--diff", 0, last)


# Errors.


def error_line(capsys, *args):
    code, out, err = inspect(capsys, *args)
    assert code == 2 and out == "" and err.count("\n") == 1, (out, err)
    return err.removeprefix("penelope inspect: error: ")[:-1]


KNOWN = "submit, admit, evict, refill, retract, finish, abort, refuse, demote, load, moved, lost"


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ([], "one of the arguments --step --diff --find --list is required"),
        (["--step", "x"], "argument --step: 'x' is not a step number."),
        (["--step", "-1"], "argument --step: '-1' is not a step number."),
        (["--diff", "1"], "argument --diff: expected 2 arguments"),
        (["--diff", "1", "end"], "argument --diff: 'end' is not a step number."),
        (["--diff", "3", "3"], "--diff 3 3: the first step must be before the second."),
        (["--step", "1", "--list"], "argument --list: not allowed with argument --step"),
        (["--list", "--pages"], "--pages goes with --step."),
        (["--find", ""], f"query '': '' is not one of {KNOWN}."),
        (["--find", "evicts"], f"query 'evicts': 'evicts' is not one of {KNOWN}."),
        (["--find", "evict 3"], "query 'evict 3': '3' is not one of session=NAME, request=N, step=N."),
        (["--find", "evict user=3"], "query 'evict user=3': 'user=3' is not one of session=NAME, request=N, step=N."),
        (["--find", "evict step=1 step=2"], "query 'evict step=1 step=2': step= is given twice."),
        (["--find", "evict step=-1"], "query 'evict step=-1': step=-1 must be a whole number, at least 0."),
        (["--find", "evict session='"], 'query "evict session=\'": No closing quotation.'),
        (["--step", "9"], "event log {story}: has no step 9; it has steps 0 to 4."),
        (["--diff", "1", "9"], "event log {story}: has no step 9; it has steps 0 to 4."),
    ],
)
def test_bad_flags(capsys, story, flags, reason):
    assert error_line(capsys, story, *flags) == reason.format(story=story)


def test_unknown_flags(capsys, story):
    assert error_line(capsys, story, "--list", "--steps", "3").endswith("unrecognized arguments: --steps 3")
    assert error_line(capsys, story, "--lis").endswith("one of the arguments --step --diff --find --list is required")
    assert error_line(capsys, "none", "--list") == "event log none: No such file or directory."


def test_a_cut_log_is_shown_up_to_its_last_whole_record(capsys, story, tmp_path):
    path = tmp_path / "cut.log"
    data = story.read_bytes()
    borders = logged_runs.record_borders(data)
    path.write_bytes(data[: borders[-3] + 3])  # the last record is the end mark; before it, the last step is done
    ending = (
        f"The log ends inside record {len(borders) - 3}, at byte {borders[-3] + 3:,}; "
        f"the {len(borders) - 3} records before it, {borders[-3]:,} bytes, are whole.\n"
    )
    code, out, err = inspect(capsys, path, "--step", "end")
    assert (code, err) == (0, ending) and "the end, after step 4" in out and "steps in flight: 4" in out
    assert inspect(capsys, path, "--step", 4)[::2] == (0, "")
    code, out, err = inspect(capsys, path, "--list")
    assert code == 0 and out.endswith(ending)
    assert inspect(capsys, path, "--find", "retract") == (0, "0 found.\n", ending)
    missing = f"event log {path}: has no step 5; it has steps 0 to 4. {ending}"
    assert error_line(capsys, path, "--step", 5) + "\n" == missing


def test_a_damaged_log_is_shown_before_the_damage(capsys, story, tmp_path):
    path = tmp_path / "damaged.log"
    data = bytearray(story.read_bytes())
    borders = logged_runs.record_borders(data)
    data[borders[-4] + 12] ^= 4
    path.write_bytes(data)
    damage = (
        f"event log {path}: record {len(borders) - 4} at byte {borders[-4]:,} is damaged (its checksum is wrong); "
        f"the {len(borders) - 4} records before it are right."
    )
    assert error_line(capsys, path, "--step", "end") == f"{damage} The last step before it is 3."
    assert "step 3 is planned" in output(capsys, path, "--step", 3)
    code, out, err = inspect(capsys, path, "--list")
    assert code == 2 and "session a: 2 requests" in out and err == f"penelope inspect: error: {damage}\n"


def test_a_log_in_which_nothing_happened(capsys, tmp_path):
    path = tmp_path / "empty.log"
    EventLogWriter(path, logged_runs.config_of()).close("KeyboardInterrupt")
    assert output(capsys, path, "--step", "end") == f"{path}: nothing has happened yet.\n"
    assert output(capsys, path, "--list").endswith(
        "entries: none\nsteps: 0, 0 tokens sampled\nThe run ended with KeyboardInterrupt.\n"
    )
