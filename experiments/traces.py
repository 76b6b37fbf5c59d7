"""Reads traces: files and folders of agent sessions, in our own format or Weka's (`experiments/weka.py`).

Our own format has one session a line of JSON (`.jsonl`, `.jsonl.gz`):

    {"session_id": "agent-0", "turns": [
        {"new": [["shared", 960], ["agent-0/0", 240]], "output": 14},
        {"new": [["agent-0/1", 44]], "output": 12, "delay_s": 9.0, "kind": "tool"},
        {"new": [["agent-0/2", 60]], "output": 15, "delay_s": 91.0, "kind": "human", "base": 0, "keep": 960}]}

`new` lists [label, number of tokens] (`experiments/sessions.py` says what a label is); `output` is the reply's length.
`delay_s` (0) is the tool or human time before the request, `kind` ("tool") says which. `base` (the turn before) is the
earlier turn this one builds on, and `keep` (all of it) how many tokens of its history stay. The first turn has neither.
With `cancel_s` the client leaves that long after the request, if it has no complete reply by then.
"""

import dataclasses
import gzip
import hashlib
import json
import math
import pathlib
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

from penelope_jax.experiments import weka
from penelope_jax.experiments.sessions import Piece, Session, Turn, cut_session
from penelope_jax.whole_file import write_whole

SUBAGENTS: tuple[str, ...] = ("skip", "separate")
SUFFIXES: tuple[str, ...] = (".jsonl", ".jsonl.gz", ".json", ".json.gz")


class TraceError(ValueError):
    """A trace that cannot be read; the message names the file, the line or entry, and the reason."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReadOptions:
    """How traces are read.

    Attributes:
        scale: a power of two that divides the trace's block: every token count is divided by it.
        shared_prefix: tokens (of the trace, before scaling) that the prompts of all sessions share; None: what the
            files say. Weka files only: our own format names what is shared.
        max_context: a session ends before the first turn whose prompt and reply exceed this many (scaled) tokens.
        max_turns: a session ends after this many turns.
        max_delay_s: longer delays are cut to this, after `time_scale`.
        time_scale: factor on every delay.
        subagents: "skip" them, or make each a "separate" session that starts like any other.
        skip_bad: leave out broken entries and files, and report them, instead of failing.
    """

    scale: int = 1
    shared_prefix: int | None = None
    max_context: int | None = None
    max_turns: int | None = None
    max_delay_s: float = math.inf
    time_scale: float = 1.0
    subagents: str = "skip"
    skip_bad: bool = False

    def __post_init__(self):
        if self.scale not in (1, 2, 4, 8, 16, 32, 64):
            raise ValueError(f"scale={self.scale} must be a power of two from 1 to 64.")
        if self.shared_prefix is not None and self.shared_prefix < 0:
            raise ValueError(f"shared_prefix={self.shared_prefix} must be at least 0.")
        for name in ("max_context", "max_turns"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1.")
        if not self.max_delay_s >= 0:
            raise ValueError(f"max_delay_s={self.max_delay_s} must be at least 0.")
        if not (math.isfinite(self.time_scale) and self.time_scale >= 0):
            raise ValueError(f"time_scale={self.time_scale} must be finite and at least 0.")
        if self.subagents not in SUBAGENTS:
            raise ValueError(f"unknown subagents={self.subagents!r}; known: {', '.join(SUBAGENTS)}.")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """What was read.

    Attributes:
        sessions: in file order, cut to the options.
        problems: one line for each entry or file left out by `skip_bad`.
        duplicates: one line for each file left out because another holds the same conversation.
        sha256: of the files' unpacked bytes, in order.
    """

    sessions: tuple[Session, ...]
    problems: tuple[str, ...] = ()
    duplicates: tuple[str, ...] = ()
    sha256: str = ""

    @property
    def num_requests(self) -> int:
        return sum(len(session.turns) for session in self.sessions)


class _Problems:
    """Where readers report what is broken: raises, or keeps the line under `skip_bad`."""

    def __init__(self, skip_bad: bool):
        self.skip_bad = skip_bad
        self.lines: list[str] = []

    def report(self, where: str, reason: object) -> None:
        line = f"{where}: {reason}"
        if not self.skip_bad:
            raise TraceError(line)
        self.lines.append(line)


def read_traces(paths: Iterable[str | pathlib.Path], options: ReadOptions) -> Trace:
    """Reads files, and all traces in folders, into one list of sessions.

    Args:
        paths: files with one of `SUFFIXES`, or folders that hold such files (not searched deeper).
        options: how to read and cut them.

    Returns:
        The sessions in file order; a folder's files are taken by name.

    Raises:
        TraceError: something is broken (and `skip_bad` is off), or nothing is left.
    """
    problems = _Problems(options.skip_bad)
    files: list[tuple[pathlib.Path, weka.WekaFile]] = []
    names: dict[str, int] = {}
    digest = hashlib.sha256()
    for path in _trace_files(paths):
        try:
            data = _read_bytes(path)
        except (OSError, EOFError, zlib.error) as error:
            problems.report(str(path), f"cannot be read: {getattr(error, 'strerror', None) or error}.")
            continue
        digest.update(data)
        if ".jsonl" in path.suffixes:
            if options.shared_prefix is not None:
                raise TraceError(f"{path}: shared_prefix is for Weka files; this file names what its sessions share.")
            sessions = tuple(
                dataclasses.replace(session, session_id=_unused(session.session_id, names))
                for session in read_jsonl(data, str(path), options.scale, problems.report)
            )
            files.append((path, weka.WekaFile(sessions, frozenset())))
        else:
            found = weka.read_weka(
                data,
                str(path),
                _unused(path.name.removesuffix(".gz").removesuffix(".json"), names),
                scale=options.scale,
                shared_prefix=options.shared_prefix,
                subagents=options.subagents,
                report=problems.report,
            )
            files.append((path, found))
    duplicates = weka.find_duplicates([found for _, found in files])
    read = [session for index, (_, found) in enumerate(files) if index not in duplicates for session in found.sessions]
    cut = [
        cut_session(
            session,
            max_context=options.max_context,
            max_turns=options.max_turns,
            max_delay_s=options.max_delay_s,
            time_scale=options.time_scale,
        )
        for session in read
    ]
    kept = tuple(session for session in cut if session.turns)
    if not kept:
        where = ", ".join(map(str, paths))
        if not read:
            raise TraceError(f"{where}: holds no session.")
        limit = "" if options.max_context is None else f"; none has a first turn within {options.max_context} tokens"
        raise TraceError(
            f"{where}: no session to replay ({len(read)} read{limit}; a smaller trace comes from synthesize --scale)."
        )
    return Trace(
        sessions=kept,
        problems=tuple(problems.lines),
        duplicates=tuple(f"{files[a][0]}: the same conversation as {files[b][0]}" for a, b in duplicates.items()),
        sha256=digest.hexdigest(),
    )


def _unused(name: str, names: dict[str, int]) -> str:
    """Returns `name`, or `name#2` and so on when it is taken; notes it in `names`."""
    names[name] = names.get(name, 0) + 1
    return name if names[name] == 1 else f"{name}#{names[name]}"


def _trace_files(paths: Iterable[str | pathlib.Path]) -> Iterator[pathlib.Path]:
    for path in map(pathlib.Path, paths):
        if path.is_dir():
            found = sorted(file for file in path.iterdir() if file.is_file() and file.name.endswith(SUFFIXES))
            if not found:
                raise TraceError(f"{path}: holds no trace ({', '.join(SUFFIXES)}).")
            yield from found
        elif not path.exists():
            raise TraceError(f"{path}: no such file or folder.")
        elif not path.name.endswith(SUFFIXES):
            raise TraceError(f"{path}: not a trace; its name must end in one of {', '.join(SUFFIXES)}.")
        else:
            yield path


def _read_bytes(path: pathlib.Path) -> bytes:
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


def read_jsonl(data: bytes, where: str, scale: int, report: weka.Report) -> Iterator[Session]:
    """Yields the sessions of a file in our own format; `report` gets (place, reason) for each broken line."""
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        place = f"{where}:{number}"
        try:
            yield _read_session(json.loads(line), scale)
        except json.JSONDecodeError as error:
            report(place, f"not JSON: {error.msg} (column {error.colno}).")
        except UnicodeDecodeError as error:
            report(place, f"not JSON: {error.reason} at byte {error.start}.")
        except ValueError as error:
            report(place, error)


def _read_session(document: Any, scale: int) -> Session:
    _check_keys("a session", document, ("session_id", "turns"), ())
    session_id, entries = document["session_id"], document["turns"]
    if not isinstance(session_id, str) or not session_id:
        raise ValueError(f"session_id={session_id!r} must be a string that is not empty.")
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"session {session_id!r}: 'turns' must be a list that is not empty.")
    turns: list[Turn] = []
    for index, entry in enumerate(entries):
        try:
            turns.append(_read_turn(entry, turns, scale))
        except ValueError as error:
            raise ValueError(f"session {session_id!r}, turn {index}: {error}") from None
    return Session(session_id=session_id, turns=tuple(turns))


def _read_turn(entry: Any, turns: list[Turn], scale: int) -> Turn:
    _check_keys("a turn", entry, ("new", "output"), ("delay_s", "kind", "base", "keep", "cancel_s"))
    pieces = entry["new"]
    if not isinstance(pieces, list) or not all(
        isinstance(piece, list) and len(piece) == 2 and isinstance(piece[0], str) and _is_whole(piece[1], 1)
        for piece in pieces
    ):
        raise ValueError("'new' must be a list of [label, number of tokens].")
    if not _is_whole(entry["output"], 1):
        raise ValueError(f"'output' must be a whole number of at least 1, not {entry['output']!r}.")
    base = entry.get("base", len(turns) - 1)
    if not _is_whole(base, -1) or base >= len(turns):
        raise ValueError(f"'base' must be an earlier turn, not {base!r}.")
    whole = turns[base].history_len if base >= 0 else 0
    keep = entry.get("keep")
    if keep is not None and not _is_whole(keep, 0):
        raise ValueError(f"'keep' must be a whole number of at least 0, not {keep!r}.")
    delay_s, cancel_s = entry.get("delay_s", 0.0), entry.get("cancel_s", math.inf)
    for key, value in (("delay_s", delay_s), ("cancel_s", cancel_s)):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{key!r} must be a number of seconds, not {value!r}.")
    new = tuple(Piece(label, 0, max(1, count // scale)) for label, count in pieces)
    return Turn(
        base=base,
        keep=whole if keep is None else keep if scale == 1 else min(keep // scale, whole),
        new=new,
        output_len=max(1, entry["output"] // scale),
        delay_s=delay_s,
        kind=entry.get("kind", "tool"),
        cancel_s=cancel_s,
    )


def _check_keys(what: str, document: Any, required: tuple[str, ...], optional: tuple[str, ...]) -> None:
    if not isinstance(document, dict):
        raise ValueError(f"{what} must be an object, not {type(document).__name__}.")
    if missing := [key for key in required if key not in document]:
        raise ValueError(f"{what} needs {', '.join(map(repr, missing))}.")
    if unknown := [key for key in document if key not in required + optional]:
        known = ", ".join(required + optional)
        raise ValueError(f"{what} has no {', '.join(map(repr, unknown))}; known: {known}.")


def _is_whole(value: Any, minimum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def write_jsonl(sessions: Iterable[Session], path: str | pathlib.Path) -> None:
    """Writes sessions in our own format; the file appears whole or not at all."""
    path = pathlib.Path(path)
    lines = [json.dumps(_session_document(session), separators=(",", ":")) + "\n" for session in sessions]
    data = "".join(lines).encode()
    write_whole(path, gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def _session_document(session: Session) -> dict[str, Any]:
    turns = []
    for index, turn in enumerate(session.turns):
        if any(piece.start for piece in turn.new):
            raise ValueError(f"session {session.session_id!r}, turn {index}: pieces must start at 0 to be written.")
        entry: dict[str, Any] = {"new": [[piece.label, piece.stop] for piece in turn.new], "output": turn.output_len}
        if index:
            entry["delay_s"] = turn.delay_s
        if turn.kind != "tool":
            entry["kind"] = turn.kind
        if turn.base != index - 1:
            entry["base"] = turn.base
        if turn.keep != (session.turns[turn.base].history_len if turn.base >= 0 else 0):
            entry["keep"] = turn.keep
        if math.isfinite(turn.cancel_s):
            entry["cancel_s"] = turn.cancel_s
        turns.append(entry)
    return {"session_id": session.session_id, "turns": turns}
