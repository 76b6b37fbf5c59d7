"""Readers of traces: what a session becomes, what is shared, and the exact text of every error."""

import gzip
import json

import numpy as np
import pytest

from penelope_jax.experiments import traces
from penelope_jax.experiments.sessions import Conversation, Piece, Session, Turn, draw_tokens
from penelope_jax.experiments.traces import ReadOptions, TraceError, read_traces, write_jsonl

VOCAB = 50_000


def request(prompt_len, output_len, block_ids, *, think_time=0.0, kind="tool_result", **more):
    assert len(block_ids) == prompt_len // 64
    return {
        "t": 0.0,
        "type": "n",
        "in": prompt_len,
        "out": output_len,
        "hash_ids": block_ids,
        "input_types": [kind],
        "think_time": think_time,
        "api_time": 1.5,
    } | more


def document(requests, tool_tokens=100, system_tokens=28):
    return {"block_size": 64, "tool_tokens": tool_tokens, "system_tokens": system_tokens, "requests": requests}


def three_turns():
    """Two shared blocks; a turn that extends the first, then one that goes back to block 4."""
    return [
        request(300, 20, [1, 2, 3, 4], kind="text"),
        request(500, 10, [1, 2, 3, 4, 5, 6, 7], think_time=9.0),
        request(330, 5, [1, 2, 3, 4, 9], think_time=100.0, kind="text"),
    ]


@pytest.fixture
def write(tmp_path):
    def write_file(name, content):
        path = tmp_path / name
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return path

    return write_file


def play(session, vocab_size=VOCAB):
    """Plays a session with replies of 7s, 8s, 9s ...; returns its prompts."""
    conversation, prompts = Conversation(session, vocab_size), []
    while not conversation.done:
        prompts.append(conversation.prompt())
        turn = session.turns[conversation.next_turn]
        conversation.reply(np.full(turn.output_len, 7 + conversation.next_turn, np.int32))
    return prompts


def test_a_turn_that_extends_the_prompt_holds_the_sampled_reply(write):
    (session,) = read_traces([write("a.json", document(three_turns()))], ReadOptions()).sessions
    first, second, third = play(session)
    assert [len(prompt) for prompt in (first, second, third)] == [300, 500, 330]
    np.testing.assert_array_equal(second[:300], first)
    np.testing.assert_array_equal(second[300:320], 7)
    # What the trace adds behind the recorded reply: positions 320 to 500, which are blocks 5 to 7 and a partial block.
    np.testing.assert_array_equal(second[320:384], draw_tokens([Piece("a:6", 0, 64)], VOCAB))
    np.testing.assert_array_equal(second[384:448], draw_tokens([Piece("a:7", 0, 64)], VOCAB))
    np.testing.assert_array_equal(second[448:], draw_tokens([Piece("a:after 7", 0, 52)], VOCAB))


def test_a_turn_that_diverges_keeps_the_history_up_to_the_last_shared_block(write):
    requests = three_turns()
    requests.append(request(350, 5, [1, 2, 3, 8, 9]))
    (session,) = read_traces([write("a.json", document(requests))], ReadOptions()).sessions
    first, *_, last = play(session)
    np.testing.assert_array_equal(last[:192], first[:192])
    np.testing.assert_array_equal(last[192:256], draw_tokens([Piece("a:8", 0, 64)], VOCAB))
    assert session.turns[3].keep == 192


def test_a_turn_builds_on_the_earlier_one_that_shares_most(write):
    side = request(130, 5, [1, 2], think_time=1.0)
    requests = [three_turns()[0], side, three_turns()[1]]
    (session,) = read_traces([write("a.json", document(requests))], ReadOptions()).sessions
    first, _, third = play(session)
    assert session.turns[2].base == 0
    np.testing.assert_array_equal(third[:300], first)
    np.testing.assert_array_equal(third[300:320], 7)


def test_a_reply_longer_than_what_the_next_prompt_adds_is_cut(write):
    requests = [request(300, 100, [1, 2, 3, 4]), request(350, 5, [1, 2, 3, 4, 5])]
    (session,) = read_traces([write("a.json", document(requests))], ReadOptions()).sessions
    first, second = play(session)
    np.testing.assert_array_equal(second, np.concatenate([first, np.full(50, 7)]))


def test_tool_and_system_blocks_are_shared_across_files_and_nothing_else(write):
    paths = [write("a.json", document(three_turns())), write("b.json.gz", document(three_turns()))]
    moved = three_turns()
    for entry in moved:
        entry["in"] += 1  # not the same conversation, for the search for duplicates
    paths[1] = write("b.json.gz", document(moved))
    first, second = (play(session)[0] for session in read_traces(paths, ReadOptions()).sessions)
    np.testing.assert_array_equal(first[:128], second[:128])
    assert np.mean(first[128:300] == second[128:300]) < 0.01


def test_shared_prefix_overrides_the_file_and_fills_what_was_not_recorded(write):
    requests = three_turns()
    path = write("a.json", document(requests))
    (session,) = read_traces([path], ReadOptions(shared_prefix=192)).sessions
    labels = [piece.label for piece in session.turns[0].new]
    assert labels == ["shared:0", "shared:1", "shared:2", "a:4", "a:after 4"]
    path = write("a.json", document(requests, tool_tokens=0, system_tokens=0))
    (session,) = read_traces([path], ReadOptions(shared_prefix=192)).sessions
    assert [piece.label for piece in session.turns[0].new][:4] == ["shared:0", "shared:1", "shared:2", "a:1"]
    assert [turn.prompt_len for turn in session.turns] == [492, 692, 522]
    assert [len(prompt) for prompt in play(session)] == [492, 692, 522]


@pytest.mark.parametrize("scale", [1, 4, 64])
def test_scale_divides_every_count_and_keeps_what_is_shared(write, scale):
    path = write("a.json", document(three_turns()))
    (session,) = read_traces([path], ReadOptions(scale=scale)).sessions
    first, second, third = play(session)
    assert [len(prompt) for prompt in (first, second, third)] == [300 // scale, 500 // scale, 330 // scale]
    np.testing.assert_array_equal(second[: len(first)], first)
    assert [turn.output_len for turn in session.turns] == [max(1, n // scale) for n in (20, 10, 5)]


def test_limits_end_a_session_and_delays_are_scaled_then_cut(write):
    path = write("a.json", document(three_turns()))

    def turns(**options):
        return read_traces([path], ReadOptions(**options)).sessions[0].turns

    assert [turn.delay_s for turn in turns()] == [0.0, 9.0, 100.0]
    assert [turn.kind for turn in turns()] == ["human", "tool", "human"]
    assert [turn.delay_s for turn in turns(time_scale=2, max_delay_s=50)] == [0.0, 18.0, 50.0]
    assert len(turns(max_context=510)) == 3
    assert len(turns(max_context=509)) == 1
    assert len(turns(max_turns=2)) == 2


def subagent(requests, **more):
    return {"type": "subagent", "agent_id": "agent_1", "subagent_type": "Explore", "requests": requests} | more


def test_subagents_are_skipped_or_sessions_of_their_own(write):
    requests = three_turns()
    requests.insert(1, subagent([request(200, 3, [11, 12, 13])], tool_tokens=64, system_tokens=0))
    path = write("a.json", document(requests))
    assert len(read_traces([path], ReadOptions()).sessions) == 1
    main, side = read_traces([path], ReadOptions(subagents="separate")).sessions
    assert (main.session_id, side.session_id) == ("a", "a/agent_1")
    assert [piece.label for piece in side.turns[0].new][:2] == ["shared/Explore:0", "a/agent_1:12"]


def test_files_that_hold_one_conversation_are_taken_once(write):
    requests = three_turns()
    paths = [write("a.json", document(requests[:2])), write("b.json", document(requests))]
    trace = read_traces(paths, ReadOptions())
    assert [session.session_id for session in trace.sessions] == ["b"]
    assert trace.duplicates == (f"{paths[0]}: the same conversation as {paths[1]}",)


def test_a_folder_is_read_by_name(write, tmp_path):
    write("b.json", document(three_turns()[:1]))
    write("a.jsonl", b'{"session_id": "x", "turns": [{"new": [["s", 9]], "output": 1}]}\n')
    write("notes.txt", b"not a trace")
    assert [session.session_id for session in read_traces([tmp_path], ReadOptions()).sessions] == ["x", "b"]


WEKA_ERRORS = [
    ({"in": 0}, "'in' must be a whole number of at least 1, not 0."),
    ({"in": 300.5}, "'in' must be a whole number of at least 1, not 300.5."),
    ({"out": -1}, "'out' must be a whole number of at least 0, not -1."),
    ({"out": None}, "'out' must be a whole number of at least 0, not None."),
    ({"hash_ids": [1, 2]}, "2 hash_ids do not fit in=300, which has 4 blocks."),
    ({"hash_ids": [1, 2, 3, "4"]}, "'hash_ids' must be a list of whole numbers of at least 0."),
    ({"type": "x"}, '\'type\' must be "n", "s" or "subagent", not \'x\'.'),
    ({"think_time": -2}, "'think_time' must be a number of seconds of at least 0, not -2."),
    ({"think_time": float("nan")}, "'think_time' must be a number of seconds of at least 0, not nan."),
]


@pytest.mark.parametrize(("change", "reason"), WEKA_ERRORS)
def test_a_broken_weka_entry_is_named_or_left_out(write, change, reason):
    requests = three_turns()
    requests.append(request(300, 20, [1, 2, 3, 4]) | change)
    path = write("a.json", document(requests))
    with pytest.raises(TraceError) as error:
        read_traces([path], ReadOptions())
    assert str(error.value) == f"{path}: entry 3: {reason}"
    trace = read_traces([path], ReadOptions(skip_bad=True))
    assert trace.problems == (f"{path}: entry 3: {reason}",)
    assert trace.num_requests == 3


BROKEN_FILES = [
    ("a.json", b'{"requests": [\n{"in": 3,}\n]}', ":2: not JSON: "),
    ("a.json", b"[]", ": must hold one JSON object, not list."),
    ("a.json", b'{"requests": 3}', ": 'requests' must be a list."),
    ("a.json", b'{"requests": [], "block_size": 0}', ": block_size=0 must be a positive multiple of scale=1."),
    (
        "a.json",
        b'{"requests": [], "tool_tokens": "x"}',
        ": 'tool_tokens' must be a whole number of at least 0, not 'x'.",
    ),
    ("a.json", b'{"requests": []}', ": holds no requests."),
    ("a.json", b"\xff{", ": not JSON: invalid start byte at byte 0."),
]


@pytest.mark.parametrize(("name", "content", "reason"), BROKEN_FILES)
def test_a_broken_weka_file_is_named_or_left_out(write, name, content, reason):
    path, good = write(name, content), write("good.json", document(three_turns()))
    with pytest.raises(TraceError) as error:
        read_traces([path, good], ReadOptions())
    assert str(error.value).startswith(f"{path}{reason}")
    trace = read_traces([path, good], ReadOptions(skip_bad=True))
    assert [session.session_id for session in trace.sessions] == ["good"]
    assert len(trace.problems) == 1


def test_a_truncated_gzip_file_is_named(write, tmp_path):
    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress(json.dumps(document(three_turns())).encode())[:-20])
    with pytest.raises(TraceError, match=r"a\.json\.gz: cannot be read: Compressed file ended before"):
        read_traces([path], ReadOptions())
    path.write_bytes(b"no gzip")
    with pytest.raises(TraceError, match=r"a\.json\.gz: cannot be read: Not a gzipped file"):
        read_traces([path], ReadOptions())


JSONL_ERRORS = [
    (b"{", "not JSON: "),
    (b"[]", "a session must be an object, not list."),
    (b'{"turns": []}', "a session needs 'session_id'."),
    (b'{"session_id": "a", "turns": []}', "session 'a': 'turns' must be a list that is not empty."),
    (b'{"session_id": "", "turns": [1]}', "session_id='' must be a string that is not empty."),
    (
        b'{"session_id": "a", "turns": [], "x": 1}',
        "a session has no 'x'; known: session_id, turns.",
    ),
    (
        b'{"session_id": "a", "turns": [{"new": [["s", 0]], "output": 1}]}',
        "session 'a', turn 0: 'new' must be a list of [label, number of tokens].",
    ),
    (
        b'{"session_id": "a", "turns": [{"new": [["s", 3]], "output": 0}]}',
        "session 'a', turn 0: 'output' must be a whole number of at least 1, not 0.",
    ),
    (
        b'{"session_id": "a", "turns": [{"new": [], "output": 1}]}',
        "session 'a', turn 0: its prompt (0 tokens) and its output (1) must have at least 1.",
    ),
    (
        b'{"session_id": "a", "turns": [{"new": [["s", 3]], "output": 1}, {"new": [], "output": 1, "keep": 9}]}',
        "session 'a', turn 1: keep=9 must be in [0, 4], the history of its base.",
    ),
    (
        b'{"session_id": "a", "turns": [{"new": [["s", 3]], "output": 1, "base": 0}]}',
        "session 'a', turn 0: 'base' must be an earlier turn, not 0.",
    ),
    (
        b'{"session_id": "a", "turns": [{"new": [["s", 3]], "output": 1, "delay_s": -1}]}',
        "session 'a', turn 0: delay_s=-1 must be finite and at least 0.",
    ),
    (
        b'{"session_id": "a", "turns": [{"new": [["s", 3]], "output": 1, "kind": "x"}]}',
        "session 'a', turn 0: kind='x' must be one of tool, human.",
    ),
    (
        b'{"session_id": "a", "turns": [{"new": [["s", 3]], "output": 1, "cancel_s": 0}]}',
        "session 'a', turn 0: cancel_s=0 must be above 0.",
    ),
    (
        b'{"session_id": "a", "turns": [{"new": [["s", 3]], "output": 1, "cancel_s": 2}, {"new": [], "output": 1}]}',
        "session 'a', turn 1: base=0 is a turn that may be cancelled.",
    ),
    (
        b'{"session_id": "a", "turns": [{"new": [["s", 3]], "output": 1, "delay_s": "1"}]}',
        "session 'a', turn 0: 'delay_s' must be a number of seconds, not '1'.",
    ),
]


@pytest.mark.parametrize(("line", "reason"), JSONL_ERRORS)
def test_a_broken_line_is_named_or_left_out(write, line, reason):
    good = b'{"session_id": "good", "turns": [{"new": [["s", 3]], "output": 1}]}\n\n'
    path = write("a.jsonl", good + line + b"\n")
    with pytest.raises(TraceError) as error:
        read_traces([path], ReadOptions())
    assert str(error.value).startswith(f"{path}:3: {reason}")
    trace = read_traces([path], ReadOptions(skip_bad=True))
    assert [session.session_id for session in trace.sessions] == ["good"]
    assert len(trace.problems) == 1


def test_paths_that_are_no_traces(write, tmp_path):
    (tmp_path / "empty").mkdir()
    for path, reason in (
        (tmp_path / "none.json", "no such file or folder."),
        (tmp_path / "empty", "holds no trace (.jsonl, .jsonl.gz, .json, .json.gz)."),
        (write("a.csv", b""), "not a trace; its name must end in one of .jsonl, .jsonl.gz, .json, .json.gz."),
        (write("a.jsonl", b""), "holds no session."),
    ):
        with pytest.raises(TraceError) as error:
            read_traces([path], ReadOptions())
        assert str(error.value) == f"{path}: {reason}"
    path = write("a.json", document(three_turns()))
    with pytest.raises(TraceError, match=r"\(1 read; none has a first turn within 300 tokens; "):
        read_traces([path], ReadOptions(max_context=300))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"scale": 3}, "scale=3 must be a power of two from 1 to 64."),
        ({"shared_prefix": -1}, "shared_prefix=-1 must be at least 0."),
        ({"max_context": 0}, "max_context=0 must be at least 1."),
        ({"max_delay_s": -1}, "max_delay_s=-1 must be at least 0."),
        ({"time_scale": float("inf")}, "time_scale=inf must be finite and at least 0."),
        ({"subagents": "x"}, "unknown subagents='x'; known: skip, separate."),
    ],
)
def test_bad_options(options, reason):
    with pytest.raises(ValueError) as error:
        ReadOptions(**options)
    assert str(error.value) == reason


def test_what_is_written_is_read_back(tmp_path):
    turns = (
        Turn(base=-1, keep=0, new=(Piece("shared", 0, 100), Piece("x", 0, 5)), output_len=3, kind="tool"),
        Turn(base=0, keep=108, new=(Piece("y", 0, 7),), output_len=2, delay_s=2.5, kind="human"),
        Turn(base=0, keep=60, new=(Piece("z", 0, 1),), output_len=2, delay_s=1.0, cancel_s=4.0),
        Turn(base=-1, keep=0, new=(Piece("w", 0, 2),), output_len=2),
    )
    sessions = (Session(session_id="s", turns=turns), Session(session_id="t", turns=turns[:1]))
    for name in ("a.jsonl", "a.jsonl.gz"):
        write_jsonl(sessions, tmp_path / name)
        assert read_traces([tmp_path / name], ReadOptions()).sessions == sessions
        assert not list(tmp_path.glob("*.part"))


def test_sessions_of_one_name_are_told_apart(write):
    line = b'{"session_id": "x", "turns": [{"new": [["s", 9]], "output": 1}]}\n'
    trace = read_traces([write("a.jsonl", line * 2)], ReadOptions())
    assert [session.session_id for session in trace.sessions] == ["x", "x#2"]


def test_shared_prefix_is_refused_for_our_own_format(write):
    path = write("a.jsonl", b'{"session_id": "x", "turns": [{"new": [["s", 9]], "output": 1}]}\n')
    with pytest.raises(TraceError, match="shared_prefix is for Weka files"):
        read_traces([path], ReadOptions(shared_prefix=64))


def test_tokens_follow_from_label_and_place():
    whole = draw_tokens([Piece("a", 0, 100)], 512)
    np.testing.assert_array_equal(draw_tokens([Piece("a", 30, 60)], 512), whole[30:60])
    np.testing.assert_array_equal(draw_tokens([Piece("b", 0, 9), Piece("a", 5, 8)], 512)[9:], whole[5:8])
    assert whole.dtype == np.int32 and whole.min() >= 0 and whole.max() < 512
    # Pinned, so that a trace keeps its tokens from version to version.
    assert draw_tokens([Piece("pinned", 0, 4)], 50_000).tolist() == [45107, 39709, 315, 1573]


def test_a_conversation_drops_histories_that_no_turn_needs():
    turns = [Turn(base=-1, keep=0, new=(Piece("a", 0, 50),), output_len=4)]
    for index in range(1, 5):
        turns.append(Turn(base=index - 1, keep=turns[-1].history_len, new=(Piece("b", 0, 5),), output_len=4))
    conversation = Conversation(Session(session_id="s", turns=tuple(turns)), VOCAB)
    for _ in turns:
        conversation.prompt()
        conversation.reply(np.zeros(4, np.int32))
        assert len(conversation._histories) <= 1
    with pytest.raises(ValueError, match="a reply of 3 tokens; it must have 4"):
        Conversation(Session(session_id="s", turns=tuple(turns)), VOCAB).reply(np.zeros(3, np.int32))


def test_the_documented_example_is_read(write):
    text = traces.__doc__.split("one session a line of JSON (`.jsonl`, `.jsonl.gz`):")[1].split("\n\n")[1]
    (session,) = read_traces([write("a.jsonl", " ".join(text.split()).encode())], ReadOptions()).sessions
    assert [turn.prompt_len for turn in session.turns] == [1200, 1258, 1020]
