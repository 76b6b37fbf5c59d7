"""penelope inspect of a run with a host tier: what it says of moves, and that every page that changes its tier is told of."""

import dataclasses
from collections import Counter

import logged_runs
import numpy as np
import pytest

from penelope_jax import cli
from penelope_jax.config import policy_named
from penelope_jax.driver import Driver, HashExecutor
from penelope_jax.event_log import EventLogWriter
from penelope_jax.events import Flush
from penelope_jax.experiments import command, log_conversations, log_query, log_text
from penelope_jax.experiments.log_conversations import Conversations
from penelope_jax.log_replay import LogReplay
from penelope_jax.pages import Tier
from penelope_jax.segments import SamplingParams

PAGE = logged_runs.PAGE


def numbers(start, stop):
    return np.arange(start, stop, dtype=np.int32) % 50


def tiered(num_pages: int, num_host_pages: int, **changes):
    config = logged_runs.config_of(num_pages=num_pages)
    sizes = {"host_tokens": num_host_pages * PAGE, "swap_tokens": PAGE, "prefetch_tokens": 2 * PAGE}
    return dataclasses.replace(config, **{**sizes, **changes})


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """Two sessions in 8 device pages and 6 host pages: the second sends the first to the host, which comes back."""
    path = tmp_path_factory.mktemp("tiers") / "story.log"
    config = tiered(8, 6, prefetch_tokens=0)
    with EventLogWriter(path, config, {"seed": 3, "model": "none"}) as log:
        driver = Driver(config, HashExecutor(50, move_delay=2, seed=3), logged_runs.Clock(), log=log)
        first = driver.generate(numbers(0, 20), SamplingParams(max_tokens=2), session_id="a")
        driver.generate(numbers(20, 44), SamplingParams(max_tokens=1), session_id="b")
        again = np.concatenate([numbers(0, 20), first.tokens, numbers(40, 44)])
        driver.generate(again, SamplingParams(max_tokens=2), session_id="a")
        driver.drain_moves()
    return path


def output(capsys, *args):
    command.execute(cli.parse(["penelope", "inspect", *map(str, args)]))
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_a_state_of_the_past(capsys, story):
    assert output(capsys, story, "--step", 3) == (
        f"{story}: step 3 is planned, 1.125 s\n"
        "plan:\n"
        "  r2 (session a) real [20, 26), sample\n"
        "  demotes session b: [12, 20), 2 pages, move 3\n"
        "running: 1\n"
        "  r2 (session a): prompt 26, next 26, 0 of 2 outputs, 1 in flight; 8 hit, 12 host hit, 0 refilled, 6 new\n"
        "waiting: 0\n"
        "steps in flight: 3\n"
        "pages: 0 of 8 free, 7 in the tree, 1 of requests, 0 being loaded; clock 9\n"
        "host pages: 2 of 6 + 1 free, 5 in the tree, 2 moving\n"
        "moves under way: 1\n"
        "  demotes session b: [12, 20), 2 pages, move 3\n"
        "counters: steps 4, admitted 3, finished 2, refused 0, retractions 0, evicted_pages 0, phantom_segments 0, "
        "phantom_tokens 0, real_tokens 50, decode_tokens 1, score_tokens 0, demoted_pages 8, loaded_pages 3, "
        "prefetched_pages 0, swapped_loads 0, lost_pages 0\n"
        "tree:\n"
        "  [0, 20) device  @9\n"
        "  [20, 24) device  @9  pin r2  session a\n"
        "  [0, 12) host, [12, 20) host (arriving), [20, 24) device  @6  session b\n"
    )
    assert output(capsys, story, "--step", 3, "--pages").splitlines()[-4:] == [
        "  1507                               5                  @9  pin r2",
        "f42aₕ c094ₕ 2ec1ₕ c244↓ 2c11↓ 18af   h3 h4 h5 h0 h1 7   @6",
        "under way: move 3 demote c244 2c11, 5 6 to h0 h1",
        "free 0 of 8, host 2 of 6+1, clock 9",
    ]


def test_what_changed(capsys, story):
    lines = output(capsys, story, "--diff", 2, 3).splitlines()
    assert lines[lines.index("residency:") :] == [
        "residency:",
        "  session a: [0, 12) host -> device",
        "  session a: [20, 24) missing -> device",
        "  session b: [0, 20) device -> host",
        "evictions: none",
        "moves:",
        "  step 3, moved session a: [0, 12), 3 pages, to the host, move 0",
        "  step 3, demote session b: [0, 12), 3 pages, move 1",
        "  step 3, load session a: [0, 12), 3 pages, move 2 for r2 (session a)",
        "  step 3, moved session b: [0, 12), 3 pages, to the host, move 1",
        "  step 3, moved session a: [0, 12), 3 pages, to the device, move 2",
        "  step 3, demote session b: [12, 20), 2 pages, move 3",
        (
            "counters: steps +1, admitted +1, finished +1, real_tokens +6, demoted_pages +5, loaded_pages +3, "
            "free pages 0 -> 0, on the host 4 -> 2"
        ),
    ]
    assert "moves: none" in output(capsys, story, "--diff", 0, 1).splitlines()


def test_find_and_overview(capsys, story):
    assert output(capsys, story, "--find", "load request=2") == (
        "step 3      load     session a: [0, 12), 3 pages, move 2 for r2 (session a)\n1 found.\n"
    )
    assert output(capsys, story, "--find", "demote session=a") == (
        "step 2      demote   session a: [0, 12), 3 pages, move 0\n1 found.\n"
    )
    assert output(capsys, story, "--find", "moved step=4") == (
        "step 4      moved    session b: [12, 20), 2 pages, to the host, move 3\n1 found.\n"
    )
    assert output(capsys, story, "--find", "lost") == "0 found.\n"
    lines = output(capsys, story, "--list").splitlines()
    assert lines[2].startswith("engine: penelope, 8 pages of 4 tokens and 6 + 1 host pages, lpm, ")
    assert lines[3] == "entries: 3 submit, 7 plan, 5 done, 4 moved"


def play(path, policy: str, **changes) -> Driver:
    """Plays sessions that are more than the device holds; moves are slow, and some fail."""
    random = np.random.default_rng(7)
    config = dataclasses.replace(tiered(14, 12, **changes), policy=policy_named(policy))
    executor = HashExecutor(50, move_delay=3, fail_moves=0.2, seed=1)
    with EventLogWriter(path, config) as log:
        driver = Driver(config, executor, logged_runs.Clock(), overlap=True, log=log)
        shared = random.integers(0, 50, 6).tolist()
        histories = [[*shared, *random.integers(0, 50, 8).tolist()] for _ in range(5)]
        for turn in range(7):
            for session in random.permutation(5).tolist():
                sampling = SamplingParams(max_tokens=int(random.integers(1, 5)))
                prompt = np.array(histories[session][:36], np.int32)
                driver.submit(prompt, sampling, session_id=f"s{session}")
            if turn == 3:
                driver.step()
                driver.abort(15)
                driver.flush()
            while not driver.idle:
                driver.step()
            for history in histories:
                history.extend(random.integers(0, 50, 5).tolist())
        driver.drain_moves()
    return driver


@pytest.mark.parametrize("policy", ["penelope", "vllm", "sglang"])
def test_every_page_that_changes_its_tier_is_told_of(tmp_path, policy):
    path = tmp_path / "run.log"
    driver = play(path, policy)
    conversations, totals = Conversations(), Counter()
    told_of = {
        (Tier.DEVICE, Tier.HOST): ("demote",),
        (Tier.HOST, Tier.DEVICE): ("moved",),
        (Tier.HOST, Tier.MISSING): ("evict", "lost"),
        (Tier.DEVICE, Tier.MISSING): ("evict",),
    }
    for moment in LogReplay(path):
        conversations.see(moment)
        before, after = moment.before.cache, moment.after.cache
        found = list(log_query.occurrences(moment, conversations))
        for item in found:
            if item.kind in log_query.MOVES:
                totals[item.kind] += 1
        told: dict[str, set[tuple[int, int]]] = {}
        for item in found:
            if item.kind in ("evict", *log_query.MOVES):
                start, stop = map(int, item.text[1 : item.text.index(")")].split(", "))
                pages = {(request, page) for request in item.requests for page in range(start, stop, PAGE)}
                told.setdefault(item.kind, set()).update(pages)
        for conversation in conversations:
            for change in log_conversations.changes(conversation, before, after):
                kinds = told_of.get((change.before, change.after), ())
                copied = change.before is Tier.DEVICE and policy == "sglang"  # leaves the device without a move
                if not kinds or copied or isinstance(moment.entry, Flush):
                    continue
                pages = {(conversation.request_id, page) for page in range(change.start, change.stop, PAGE)}
                known = set().union(*(told.get(kind, set()) for kind in kinds))
                assert pages <= known, f"{conversation.name}: {change} is not told of"
        text = "\n".join(log_text.state_lines(moment.after, conversations))
        assert text.count("(loading)") <= after.num_host and ("(arriving)" in text or "(loading)" in text) == any(
            node_id >= 0 for node_id in after.moving.values()
        )
    counters = driver.state.counters
    assert counters.demoted_pages and counters.loaded_pages and counters.lost_pages and counters.evicted_pages
    assert totals["demote"] and totals["load"] and totals["moved"] and totals["lost"]
