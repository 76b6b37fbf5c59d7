"""The event log: what goes in comes out, and damage is found."""

import dataclasses
import errno
import os
import re

import logged_runs
import numpy as np
import pytest
from deep_copies import rendered

from penelope_jax import engine, event_log
from penelope_jax.config import POLICIES, EngineConfig, InsertUnit
from penelope_jax.errors import InputError
from penelope_jax.event_log import EventLogWriter, Planned, plan_digest, read_events
from penelope_jax.events import Abort, Flush, MoveDone, Submit
from penelope_jax.segments import SamplingParams, StepDone

CONFIG = EngineConfig(device_tokens=640)


def entries_of(path):
    return list(read_events(path)[1])


def prompt(*tokens, dtype=np.int32):
    return np.array(tokens, dtype)


PROMPTS = [
    prompt(1, 2, 3),
    prompt(1, 2, 3, 4),
    prompt(1, 2, 9),
    prompt(1, 2, 3),
    prompt(1, 2),
    prompt(300, 70_000, 2**31 - 1),
    prompt(5, 6, dtype=np.int64),
    prompt(5, 6, 7, dtype=np.uint16),
    prompt(255),
    prompt(256),
    prompt(-1, 4),  # this and what follows is refused by the engine, and still part of the run
    prompt(2**40, dtype=np.int64),
    prompt(0.5, 1.5, dtype=np.float32),
    prompt(),
    np.zeros((2, 3), np.int32),
    np.array(["a", "bc"]),
    np.array(7),
]


def events():
    """Returns events of every kind, with extreme values."""
    sampling = SamplingParams(
        temperature=0.7,
        top_p=0.9,
        top_k=40,
        seed=2**32 - 1,
        choice=3,
        max_tokens=1,
        stop_token_ids=(1, 70_000),
        prompt_logprobs_from=5,
    )
    nan = np.array([np.nan, -0.25], np.float32)
    return [
        *(Submit(request_id=i, tokens=tokens, session_id=f"s{i % 2}") for i, tokens in enumerate(PROMPTS)),
        Submit(
            request_id=2**70, tokens=prompt(1), sampling=sampling, session_id="\ud800ü", cache_salt="x", time_s=-1.5
        ),
        Abort(request_id=0, time_s=1e300),
        Flush(time_s=0.1),
        MoveDone(done=(2, 2**40), failed=(0,), time_s=0.5),
        MoveDone(done=()),
        StepDone(step=0, tokens=prompt(), logprobs=np.empty(0, np.float32)),
        StepDone(step=2**40, tokens=prompt(5, -1), logprobs=nan, scores=(nan, nan[:0]), time_s=3.25),
    ]


def test_every_event_comes_back(tmp_path):
    run = {"seed": 5, "model": "random:tiny", "commit": None}
    with EventLogWriter(tmp_path / "log", CONFIG, run) as log:
        for event in events():
            log.event(event)
        log.planned(None)
    header, entries = read_events(tmp_path / "log")
    assert header.config == CONFIG and header.run == run
    *found, plan = list(entries)
    assert [rendered(entry) for _, entry in found] == [rendered(event) for event in events()]
    kinds = ["submit"] * (len(PROMPTS) + 1) + ["abort", "flush", "moved", "moved", "done", "done"]
    assert [kind for kind, _ in found] == kinds
    assert plan == ("plan", Planned(None, plan_digest(None)))
    assert entries.complete and entries.ending == "The run ended by itself."


def test_a_prompt_of_objects_keeps_what_the_engine_looks_at(tmp_path):
    event = Submit(request_id=0, tokens=np.array([[None, "x"]], object))
    with EventLogWriter(tmp_path / "log", CONFIG) as log:
        log.event(event)
    ((_, found),) = entries_of(tmp_path / "log")
    assert engine.refusal_of(CONFIG, found) == engine.refusal_of(CONFIG, event)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=list(POLICIES))
def test_the_configuration_comes_back(tmp_path, policy):
    policy = dataclasses.replace(policy, insert_unit=InsertUnit.PROMPT)
    config = dataclasses.replace(CONFIG, policy=policy, scheduler="fcfs", max_wait_s=float("inf"), linear_cost=0.5)
    EventLogWriter(tmp_path / "log", config).close("Interrupt")
    header, entries = read_events(tmp_path / "log")
    assert header.config == config and header.run == {} and list(entries) == []
    assert entries.ending == "The run ended with Interrupt." and entries.complete


def test_forgetting_keeps_memory_bounded_and_prompts_right(tmp_path):
    random = np.random.default_rng(0)
    history, prompts = random.integers(0, 99, 40), []
    with EventLogWriter(tmp_path / "log", CONFIG, max_kept_tokens=100) as log:
        for i in range(30):
            history = np.concatenate([history[: random.integers(20, 41)], random.integers(0, 99, 20)])
            prompts.append(history.astype(np.int32))
            log.event(Submit(request_id=i, tokens=prompts[-1]))
    found = [entry.tokens.tolist() for _, entry in entries_of(tmp_path / "log")]
    assert found == [tokens.tolist() for tokens in prompts]


def test_size_does_not_grow_with_the_history(tmp_path):
    random = np.random.default_rng(0)
    sizes = []
    with EventLogWriter(tmp_path / "log", CONFIG) as log:
        histories = [random.integers(0, 150_000, 20_000) for _ in range(3)]
        for turn in range(40):
            for session, history in enumerate(histories):
                before = log.num_bytes
                log.event(Submit(request_id=3 * turn + session, tokens=history, session_id="" if session else "s"))
                sizes.append(log.num_bytes - before)
                histories[session] = np.concatenate([history, random.integers(0, 150_000, 500)])
    assert len(histories[0]) == 40_000
    assert max(sizes[3:]) <= 3 * 500 + 260
    assert log.num_bytes < 3 * 3 * 40_000 + 40 * 3 * 300
    assert entries_of(tmp_path / "log")[-1][1].tokens.tolist() == histories[2][:-500].tolist()


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return logged_runs.write_small(tmp_path_factory.mktemp("small") / "log")


def test_cut_at_every_byte(small, tmp_path):
    whole = [rendered(entry) for entry in entries_of(small)]
    data, path = small.read_bytes(), tmp_path / "cut"
    counts = []
    for size in range(len(data)):
        path.write_bytes(data[:size])
        try:
            _, entries = read_events(path)
        except InputError as error:
            expected = "is empty." if size == 0 else f"ends inside its header, after {size} bytes."
            assert str(error) == f"event log {path}: {expected}" and not counts
            continue
        found = list(entries)
        assert [rendered(entry) for entry in found] == whole[: len(found)]
        assert not entries.complete
        if re.search(r"no last record", entries.ending):
            counts.append(len(found))
        else:
            assert f"ends inside record {len(found) + 1}, at byte {size:,}; " in entries.ending
    assert counts == list(range(len(whole) + 1)), "each whole record reads, and each only once it is whole"


def test_every_flipped_byte_is_found(small, tmp_path):
    whole = [rendered(entry) for entry in entries_of(small)]
    data, path = small.read_bytes(), tmp_path / "flipped"
    for index in range(len(data)):
        flipped = bytearray(data)
        flipped[index] ^= 1 << index % 8
        path.write_bytes(flipped)
        found = []
        with pytest.raises(InputError, match=r"is damaged|is not an event log|is of version|ends inside its header"):
            for entry in read_events(path)[1]:
                found.append(rendered(entry))
        assert found == whole[: len(found)]


def test_lost_repeated_and_swapped_records_are_found(small, tmp_path):
    data = small.read_bytes()
    borders, path = logged_runs.record_borders(data), tmp_path / "moved"
    first, second, third = data[borders[2] : borders[3]], data[borders[3] : borders[4]], data[borders[4] :]
    for middle in (second, first + first + second, second + first):
        path.write_bytes(data[: borders[2]] + middle + third)
        with pytest.raises(InputError, match="is damaged"):
            entries_of(path)


def test_the_text_of_damage(small, tmp_path):
    data = bytearray(small.read_bytes())
    borders, path = logged_runs.record_borders(data), tmp_path / "log"
    data[borders[3] + 12] ^= 1
    path.write_bytes(data)
    with pytest.raises(InputError) as caught:
        entries_of(path)
    assert str(caught.value) == (
        f"event log {path}: record 3 at byte {borders[3]:,} is damaged (its checksum is wrong); "
        "the 3 records before it are right."
    )
    path.write_bytes(data[: borders[2] + 5])
    _, entries = read_events(path)
    assert len(list(entries)) == 1
    assert entries.ending == (
        f"The log ends inside record 2, at byte {borders[2] + 5:,}; "
        f"the 2 records before it, {borders[2]:,} bytes, are whole."
    )


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "is empty."),
        (b"penelope", "ends inside its header, after 8 bytes."),
        (b"penelope event log 2\nwhatever", "is of version 2; this program reads version 1."),
        (b"\x7fELF\n", "is not an event log."),
        (b"\0" * 9999, "is not an event log."),
        (b"penelope event log 1\n", "ends inside its header, after 21 bytes."),
    ],
)
def test_what_is_no_log(tmp_path, data, reason):
    path = tmp_path / "log"
    path.write_bytes(data)
    with pytest.raises(InputError) as caught:
        read_events(path)
    assert str(caught.value) == f"event log {path}: {reason}"


def test_files_that_cannot_be_opened(tmp_path):
    for call in (read_events, lambda path: EventLogWriter(path / "log", CONFIG)):
        with pytest.raises(InputError) as caught:
            call(tmp_path / "none")
        assert str(caught.value).endswith(": No such file or directory.")
    with pytest.raises(InputError, match=r": Is a directory\.$"):
        read_events(tmp_path)
    (tmp_path / "log").write_bytes(b"precious")
    with pytest.raises(InputError) as caught:
        EventLogWriter(tmp_path / "log", CONFIG)
    assert str(caught.value) == f"event log {tmp_path / 'log'}: exists; a log is never written over."
    assert (tmp_path / "log").read_bytes() == b"precious"


def write_record(log, kind, payload):
    log._record(kind, payload)


@pytest.mark.parametrize(
    ("kind", "payload", "reason"),
    [
        (10, b"", "10 is not a valid Kind"),
        (event_log.Kind.HEADER, b"{}", "<Kind.HEADER: 1>"),
        (event_log.Kind.ABORT, b"\x04when\0\0", "Abort has no field 'when' in this version."),
        (event_log.Kind.FLUSH, b"\0more", "it is longer than what it holds."),
        (event_log.Kind.PLAN, b"\1abc", "16 bytes wanted, 3 left."),
        (event_log.Kind.SUBMIT, b"\0q", "unknown prompt tag b'q'."),
        (event_log.Kind.SUBMIT, b"\0p\x03<i4\7\0\0\1", "tail 7 is not among the 1 known."),
    ],
)
def test_records_of_another_version(tmp_path, kind, payload, reason):
    path = tmp_path / "log"
    with EventLogWriter(path, CONFIG) as log:
        log.event(Flush())
        write_record(log, kind, payload)
    with pytest.raises(InputError) as caught:
        entries_of(path)
    assert str(caught.value) == f"event log {path}: record 2 cannot be read by this version: {reason}"


def test_nothing_may_follow_the_last_record(tmp_path):
    with EventLogWriter(tmp_path / "log", CONFIG) as log:
        write_record(log, event_log.Kind.END, b"\0")
    with pytest.raises(InputError, match=r"record 2 cannot be read by this version: it follows the last record\.$"):
        entries_of(tmp_path / "log")


def test_a_header_of_another_version(tmp_path, monkeypatch):
    monkeypatch.setattr(event_log, "_header_bytes", lambda header: b'{"config": {"policy": {}, "x": 1}, "run": {}}')
    EventLogWriter(tmp_path / "log", CONFIG).close()
    with pytest.raises(InputError, match="record 0 cannot be read by this version: .*missing 3 required"):
        read_events(tmp_path / "log")


def test_a_full_disk(tmp_path, monkeypatch):
    path = tmp_path / "log"
    log = EventLogWriter(path, CONFIG)
    log.event(Flush())
    size, write = log.num_bytes, os.write

    def full(file, data):
        if len(data) > 5:
            return write(file, data[:5])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    message = f"event log {path}: No space left on device, after {size:,} bytes."
    for _ in range(2):
        with pytest.raises(InputError) as caught:
            log.event(Flush())
        assert str(caught.value) == message
    monkeypatch.undo()
    with pytest.raises(InputError, match="No space left"):
        log.planned(None)
    log.close()
    log.close()
    _, entries = read_events(path)
    assert [kind for kind, _ in entries] == ["flush"] and "ends inside record 2" in entries.ending
    with pytest.raises(InputError, match=r"is closed\.$|No space left"):
        log.event(Flush())


def test_a_disk_that_is_full_from_the_start(tmp_path, monkeypatch):
    def full(file, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(InputError, match=r"No space left on device, after 0 bytes\.$"):
        EventLogWriter(tmp_path / "log", CONFIG)


def test_the_log_says_what_ended_the_run(tmp_path):
    with pytest.raises(ZeroDivisionError), EventLogWriter(tmp_path / "log", CONFIG) as log:
        log.event(Flush())
        raise ZeroDivisionError
    with pytest.raises(InputError, match=r"is closed\.$"):
        log.event(Flush())
    _, entries = read_events(tmp_path / "log")
    assert len(list(entries)) == 1 and entries.ending == "The run ended with ZeroDivisionError."
