"""Reads Weka traces: one JSON file a conversation, prompts as ids of 64-token blocks.

How a file becomes a session:

- A request starts with the earlier request of its file that shares the most blocks with it (the latest of several).
  When all that request's full blocks are shared it is an extension, and keeps that prompt *and the reply sampled for
  it*; what the trace adds behind the recorded reply are the new tokens. Otherwise (compaction, edits) the history is
  kept up to the last shared block, and what follows is as in the trace.
- Block ids are local to a file. The first (tool_tokens + system_tokens) // block ids of every first request stand for
  the same tokens in all files. The last, partial block of a prompt has no id; its tokens follow from the id before it.
- Subagents are skipped, or become sessions of their own; subagents of one type share their first blocks.
"""

import collections
import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from penelope_jax.experiments.sessions import Piece, Session, Turn

Report = Callable[[str, object], None]


class WekaFile(NamedTuple):
    """What one file holds: its sessions (the main one first), and marks to recognise the same requests elsewhere."""

    sessions: tuple[Session, ...]
    marks: frozenset[tuple[float, ...]]


class _Request(NamedTuple):
    prompt_len: int  # trace tokens
    output_len: int  # trace tokens
    block_ids: np.ndarray  # i64[prompt_len // block_size]
    delay_s: float
    kind: str


def read_weka(
    data: bytes, where: str, name: str, *, scale: int, shared_prefix: int | None, subagents: str, report: Report
) -> WekaFile:
    """Reads one conversation.

    Args:
        data: the file's bytes, unpacked.
        where: the file, for messages.
        name: the session's id; block ids stand for tokens of this name.
        scale: divides every token count.
        shared_prefix: trace tokens that all sessions share, in place of the file's figure. Where that figure is 0 the
            initial context was not recorded: this many shared tokens then go in front of every prompt.
        subagents: "skip" or "separate".
        report: called with (place, reason) for what is broken; raises or returns.

    Returns:
        The sessions; none when the file as a whole is broken.
    """
    nothing = WekaFile((), frozenset())
    try:
        document = json.loads(data)
    except json.JSONDecodeError as error:
        report(f"{where}:{error.lineno}", f"not JSON: {error.msg} (column {error.colno}).")
        return nothing
    except UnicodeDecodeError as error:
        report(where, f"not JSON: {error.reason} at byte {error.start}.")
        return nothing
    try:
        block_size, entries = _check_document(document, scale)
    except ValueError as error:
        report(where, error)
        return nothing

    groups: list[tuple[str, str, dict[str, Any], list[Any], str]] = [(name, "shared", document, entries, where)]
    if subagents == "separate":
        for index, entry in enumerate(entries):
            if isinstance(entry, dict) and entry.get("type") == "subagent":
                kind = entry.get("subagent_type")
                inner = entry.get("requests")
                place = f"{where}: entry {index}"
                try:
                    _check_prefix(entry)
                    if not isinstance(inner, list):
                        raise ValueError("a subagent's 'requests' must be a list.")
                except ValueError as error:
                    report(place, error)
                    continue
                groups.append((f"{name}/{entry.get('agent_id', index)}", f"shared/{kind}", entry, inner, place))

    sessions = []
    marks: frozenset[tuple[float, ...]] = frozenset()
    for group_name, namespace, owner, group, place in groups:
        requests, group_marks = _read_requests(group, place, block_size, report)
        if not requests:
            report(place, "holds no requests.")
            continue
        if not sessions:
            marks = group_marks
        recorded = owner.get("tool_tokens", 0) + owner.get("system_tokens", 0)
        shared_len = recorded if shared_prefix is None or not recorded else shared_prefix
        turns = _link(requests, group_name, namespace, block_size, shared_len, scale)
        if shared_prefix and not recorded:
            turns = _fill_front(turns, namespace, shared_prefix // block_size, block_size // scale)
        sessions.append(Session(session_id=group_name, turns=turns))
    return WekaFile(tuple(sessions), marks)


def find_duplicates(files: list[WekaFile]) -> dict[int, int]:
    """Returns {file left out: file kept} for files with most of their requests in another file.

    Some collections hold one conversation cut into several overlapping files. Two files are the same when at least
    half the requests of the shorter (by lengths and times) are in the longer; the longer is kept, the first of equals.
    """
    order = sorted(range(len(files)), key=lambda i: (-len(files[i].marks), i))
    holders: dict[tuple[float, ...], int] = {}
    duplicates: dict[int, int] = {}
    for index in order:
        found = collections.Counter(holders[mark] for mark in files[index].marks if mark in holders)
        kept, count = found.most_common(1)[0] if found else (-1, 0)
        if count and 2 * count >= len(files[index].marks):
            duplicates[index] = kept
            continue
        for mark in files[index].marks:
            holders.setdefault(mark, index)
    return duplicates


def _check_document(document: Any, scale: int) -> tuple[int, list[Any]]:
    if not isinstance(document, dict):
        raise ValueError(f"must hold one JSON object, not {type(document).__name__}.")
    block_size = document.get("block_size", 64)
    if not isinstance(block_size, int) or block_size < 1 or block_size % scale:
        raise ValueError(f"block_size={block_size!r} must be a positive multiple of {scale=}.")
    entries = document.get("requests")
    if not isinstance(entries, list):
        raise ValueError("'requests' must be a list.")
    _check_prefix(document)
    return block_size, entries


def _check_prefix(owner: dict[str, Any]) -> None:
    for key in ("tool_tokens", "system_tokens"):
        _whole(key, owner.get(key, 0), 0)


def _whole(key: str, value: Any, minimum: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"{key!r} must be a whole number of at least {minimum}, not {value!r}.")
    return value


def _read_requests(
    entries: list[Any], where: str, block_size: int, report: Report
) -> tuple[list[_Request], frozenset[tuple[float, ...]]]:
    requests, marks = [], set()
    for index, entry in enumerate(entries):
        if isinstance(entry, dict) and entry.get("type") == "subagent":
            continue
        try:
            request = _read_request(entry, block_size)
        except ValueError as error:
            report(f"{where}: entry {index}", error)
            continue
        requests.append(request)
        marks.add((request.prompt_len, request.output_len, request.delay_s, float(entry.get("api_time") or 0)))
    return requests, frozenset(marks)


def _read_request(entry: Any, block_size: int) -> _Request:
    if not isinstance(entry, dict):
        raise ValueError(f"must be an object, not {type(entry).__name__}.")
    if entry.get("type") not in ("n", "s"):
        raise ValueError(f'\'type\' must be "n", "s" or "subagent", not {entry.get("type")!r}.')
    prompt_len, output_len = _whole("in", entry.get("in"), 1), _whole("out", entry.get("out"), 0)
    ids = entry.get("hash_ids")
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 2**63 for i in ids):
        raise ValueError("'hash_ids' must be a list of whole numbers of at least 0.")
    if len(ids) != prompt_len // block_size:
        raise ValueError(
            f"{len(ids)} hash_ids do not fit in={prompt_len}, which has {prompt_len // block_size} blocks."
        )
    for key in ("think_time", "api_time"):
        value = entry.get(key, 0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            raise ValueError(f"{key!r} must be a number of seconds of at least 0, not {value!r}.")
    kind = "tool" if "tool_result" in (entry.get("input_types") or ()) else "human"
    return _Request(prompt_len, output_len, np.array(ids, np.int64), float(entry.get("think_time", 0)), kind)


def _link(
    requests: list[_Request], name: str, namespace: str, block_size: int, shared_len: int, scale: int
) -> tuple[Turn, ...]:
    """Turns requests into turns: what each keeps of which earlier one, and what is new."""
    first_ids = requests[0].block_ids[: shared_len // block_size].tolist()
    shared = {block_id: index for index, block_id in reversed(list(enumerate(first_ids)))}
    tokens_a_block = block_size // scale

    def block_label(block_id: int) -> str:
        return f"{namespace}:{shared[block_id]}" if block_id in shared else f"{name}:{block_id}"

    def pieces(request: _Request, start: int, stop: int) -> tuple[Piece, ...]:
        found = []
        while start < stop:
            block, offset = divmod(start, tokens_a_block)
            end = min(stop, (block + 1) * tokens_a_block)
            if block < len(request.block_ids):
                label = block_label(int(request.block_ids[block]))
            else:
                label = f"{name}:after {request.block_ids[-1] if len(request.block_ids) else 'nothing'}"
            found.append(Piece(label, offset, offset + end - start))
            start = end
        return tuple(found)

    turns: list[Turn] = []
    for index, request in enumerate(requests):
        prompt_len = max(1, request.prompt_len // scale)
        base, num_shared = _closest(requests, index)
        keep = 0
        if base >= 0:
            extends = num_shared == len(requests[base].block_ids)
            shared_tokens = turns[base].history_len if extends else num_shared * tokens_a_block
            keep = min(shared_tokens, prompt_len)
        turns.append(
            Turn(
                base=base if keep else -1,
                keep=keep,
                new=pieces(request, keep, prompt_len),
                output_len=max(1, request.output_len // scale),
                delay_s=request.delay_s,
                kind=request.kind,
            )
        )
    return tuple(turns)


def _closest(requests: list[_Request], index: int) -> tuple[int, int]:
    """Returns the earlier request that shares the most leading blocks with `requests[index]`, and how many."""
    ids = requests[index].block_ids
    best, most = index - 1, -1
    for other in range(index - 1, -1, -1):
        earlier = requests[other].block_ids
        length = min(len(ids), len(earlier))
        if length <= most:
            continue
        differ = np.flatnonzero(ids[:length] != earlier[:length])
        num_shared = int(differ[0]) if len(differ) else length
        if num_shared > most:
            best, most = other, num_shared
    return best, max(most, 0)


def _fill_front(turns: tuple[Turn, ...], namespace: str, num_blocks: int, tokens_a_block: int) -> tuple[Turn, ...]:
    """Returns `turns` with the first `num_blocks` shared blocks in front of every prompt."""
    front = tuple(Piece(f"{namespace}:{index}", 0, tokens_a_block) for index in range(num_blocks))
    length = num_blocks * tokens_a_block
    return tuple(
        dataclasses.replace(turn, keep=turn.keep + length)
        if turn.keep
        else dataclasses.replace(turn, new=(*front, *turn.new))
        for turn in turns
    )
