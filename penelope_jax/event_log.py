"""The event log: a run as a file, from which any state of it can be made again.

The file is a line that says what it is, then records:

    kind u8, size of the payload u32 | crc u32 | payload | crc u32        little endian

Each checksum is the CRC-32 of everything before it in the file, checksums left out, so a record that was changed, lost
or moved is found where it happened. The first record is the header, JSON. Then comes one record for each event, written
before the engine applies it, and one for each call of `plan`, in the order in which they happened: with overlap, step
t + 1 is planned before the event that step t is done. A planned step holds a hash of the plan, so replaying the log
proves that it gives the same plans, byte for byte. The last record says that the run ended by itself.

Prompts are written as what they share with an earlier prompt of the log and the rest (`PromptStore`), so a history that
is sent again every turn costs its new tokens only. Writer and reader hold every token of the log once, at most
`MAX_KEPT_TOKENS`; then both forget them and later prompts are written whole once more.

Each record is handed to the operating system in one write. So it survives the end of the process, by whatever signal;
it is not fsynced, so a power failure may cost the last seconds. A log that was cut reads up to its last whole record.
"""

import contextlib
import dataclasses
import enum
import hashlib
import json
import os
import pathlib
import struct
import zlib
from collections.abc import Generator, Iterator, Mapping
from typing import Any, NamedTuple, Self

import numpy as np

from penelope_jax.config import EngineConfig, Policy, policy_named
from penelope_jax.errors import InputError
from penelope_jax.events import Abort, Event, Flush, MoveDone, Stop, Submit
from penelope_jax.prompt_store import Place, PromptStore
from penelope_jax.segments import SamplingParams, StepDone, StepPlan
from penelope_jax.value_bytes import ByteReader, brief_bytes, put_array, put_count, put_fields, put_text

VERSION = 1
MAX_KEPT_TOKENS = 2**26
_NAME = b"penelope event log "
_MAGIC = b"%s%d\n" % (_NAME, VERSION)
_HEAD = struct.Struct("<BI")
_CRC = struct.Struct("<I")
_CLASSES: dict[str, type] = {"SamplingParams": SamplingParams}


class Kind(enum.IntEnum):
    """What a record is."""

    HEADER = 1
    SUBMIT = 2
    ABORT = 3
    DONE = 4
    FLUSH = 5
    PLAN = 6
    END = 7
    STOP = 8
    MOVED = 9


_EVENTS: dict[Kind, type] = {
    Kind.SUBMIT: Submit,
    Kind.ABORT: Abort,
    Kind.DONE: StepDone,
    Kind.FLUSH: Flush,
    Kind.STOP: Stop,
    Kind.MOVED: MoveDone,
}
_KIND_OF = {cls: kind for kind, cls in _EVENTS.items()}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LogHeader:
    """What a log says of its run: the engine's configuration, and what else the writer noted (seed, model, commit)."""

    config: EngineConfig
    run: Mapping[str, Any]


class Planned(NamedTuple):
    """`plan` was called. `step` is the plan's, None when there was no step to run; `digest` is of the plan."""

    step: int | None
    digest: bytes


def plan_digest(plan: StepPlan | None) -> bytes:
    """Returns 16 bytes that tell whether two plans are the same, byte for byte."""
    return hashlib.sha256(brief_bytes(plan)).digest()[:16]


def _header_bytes(header: LogHeader) -> bytes:
    document = {"config": dataclasses.asdict(header.config), "run": dict(header.run)}
    return json.dumps(document, default=lambda value: value.value).encode()


def _read_header(data: bytes) -> LogHeader:
    document = json.loads(data)
    settings = dict(document["config"])
    known = policy_named("penelope")
    policy = {
        name: type(getattr(known, name))(value) if isinstance(getattr(known, name, None), enum.Enum) else value
        for name, value in settings.pop("policy").items()
    }
    return LogHeader(config=EngineConfig(policy=Policy(**policy), **settings), run=document["run"])


class _Prompts:
    """The prompts of a log as bytes: the same object serves one writer or one reader."""

    def __init__(self, max_kept: int):
        self._max_kept = max_kept
        self._store = PromptStore()

    def put(self, out: bytearray, prompt: np.ndarray) -> None:
        if prompt.dtype.hasobject:  # refused for its dtype and shape, whatever is in it
            out += b"o"
            put_array(out, np.empty(prompt.shape, bool))
            return
        usual = prompt.ndim == 1 and prompt.dtype.kind in "iu" and len(prompt) > 0
        if not usual or prompt.min() < 0 or prompt.max() >= 2**31:
            out += b"w"
            put_array(out, prompt)
            return
        tokens = np.ascontiguousarray(prompt, "<i4")
        place = self._store.find(tokens)
        forget = self._store.num_tokens + len(tokens) - place.start > self._max_kept
        if forget:
            self._store = PromptStore()
            place = self._store.find(tokens)
        tail = tokens[place.start :]
        self._store.add(place, tail)
        width = max(1, (int(tail.max(initial=0)).bit_length() + 7) // 8)
        out += b"g" if forget else b"p"
        put_text(out, prompt.dtype.str)
        for number in (*place, len(tail), width):
            put_count(out, number)
        out += tail.view(np.uint8).reshape(-1, 4)[:, :width].tobytes()

    def read(self, data: ByteReader) -> np.ndarray:
        tag = data.take(1)
        if tag == b"o":
            return np.empty(data.array().shape, object)
        if tag == b"w":
            return data.array()
        if tag not in (b"p", b"g"):
            raise ValueError(f"unknown prompt tag {tag!r}.")
        if tag == b"g":
            self._store = PromptStore()
        dtype = np.dtype(data.text())
        place = Place(data.count(), data.count())
        size, width = data.count(), data.count()
        padded = np.zeros((size, 4), np.uint8)
        padded[:, :width] = np.frombuffer(data.take(size * width), np.uint8).reshape(size, width)
        tail = padded.view("<i4").reshape(-1)
        self._store.add(place, tail)
        return np.concatenate([self._store.prefix(place), tail]).astype(dtype)


class EventLogWriter:
    """Writes the log of one run. Use it as a context manager, or call `close`.

    Args:
        path: a new file.
        config: of the engine.
        run: what else identifies the run: seed, model, commit ...; goes to the header as JSON.
        max_kept_tokens: see the top of this file.

    Raises:
        InputError: the file exists or cannot be written. Every method that writes raises it too, when the disk is full
            for example; what was logged so far stays readable, and nothing more can be written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        config: EngineConfig,
        run: Mapping[str, Any] | None = None,
        *,
        max_kept_tokens: int = MAX_KEPT_TOKENS,
    ):
        self.path = pathlib.Path(path)
        self.config = config
        self.num_bytes = 0
        self._crc = 0
        self._failed = ""
        self._prompts = _Prompts(max_kept_tokens)
        try:
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        except FileExistsError:
            raise InputError(f"event log {self.path}: exists; a log is never written over.") from None
        except OSError as error:
            raise InputError(f"event log {self.path}: {error.strerror}.") from error
        try:
            header = _header_bytes(LogHeader(config=config, run=run or {}))
            self._record(Kind.HEADER, header, before=_MAGIC)
        except BaseException:
            os.close(self._file)
            raise

    def event(self, event: Event) -> None:
        """Writes an event that is about to be applied."""
        out = bytearray()
        if isinstance(event, Submit):
            put_fields(out, event, without=("tokens",))
            self._prompts.put(out, event.tokens)
        else:
            put_fields(out, event)
        self._record(_KIND_OF[type(event)], out)

    def planned(self, plan: StepPlan | None) -> None:
        """Writes that `plan` was called, and what came of it."""
        out = bytearray()
        put_count(out, plan.step + 1 if plan is not None and plan.segments else 0)
        self._record(Kind.PLAN, out + plan_digest(plan))

    def close(self, why: str = "") -> None:
        """Ends the log; `why` says what ended the run, if it did not run to its end."""
        if self._file < 0:
            return
        try:
            if not self._failed:
                out = bytearray()
                put_text(out, why)
                self._record(Kind.END, out)
        finally:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, cls: type[BaseException] | None, *_error: object) -> None:
        self.close("" if cls is None else cls.__name__)

    def _record(self, kind: Kind, payload: bytes | bytearray, before: bytes = b"") -> None:
        if self._failed or self._file < 0:
            raise InputError(self._failed or f"event log {self.path}: is closed.")
        head = _HEAD.pack(kind, len(payload))
        head_crc = zlib.crc32(head, zlib.crc32(before, self._crc))
        crc = zlib.crc32(payload, head_crc)
        left = memoryview(b"".join((before, head, _CRC.pack(head_crc), payload, _CRC.pack(crc))))
        size = self.num_bytes + len(left)
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError as error:
            self._failed = f"event log {self.path}: {error.strerror}, after {self.num_bytes:,} bytes."
            raise InputError(self._failed) from error
        self._crc, self.num_bytes = crc, size


class LogEntries:
    """The entries of a log after its header, in order: (kind, event), where a call of `plan` comes as `Planned`.

    Kinds are `submit`, `abort`, `stop`, `done`, `moved`, `flush` and `plan`. Iterating raises InputError at a record that is
    damaged; all entries before it were right.

    Attributes:
        path: the file.
        header: what the log says of its run.
        num_records: whole records read so far, the header too.
        ending: how the log ends, in words, once everything was read; "" until then.
        complete: whether the log has its last record, once everything was read.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = pathlib.Path(path)
        self.num_records = 0
        self.ending = ""
        self.complete = False
        self._size = 0  # of the whole records read so far
        self._records = self._read_records()
        first = next(self._records, None)
        if first is None or first[0] != Kind.HEADER:
            raise InputError(f"event log {self.path}: ends inside its header, after {self._file_size():,} bytes.")
        with self._decoding():
            self.header = _read_header(first[1])
        self._entries = self._read_entries()

    def __iter__(self) -> Iterator[tuple[str, Event | Planned]]:
        return self._entries

    def close(self) -> None:
        """Closes the file before everything was read."""
        self._entries.close()
        self._records.close()

    def _read_records(self) -> Generator[tuple[int, bytes]]:
        try:
            with open(self.path, "rb") as file:
                self._check_name(file.readline(64))
                crc, self._size = zlib.crc32(_MAGIC), len(_MAGIC)
                while head := file.read(_HEAD.size + _CRC.size):
                    if len(head) < _HEAD.size + _CRC.size:
                        return self._cut()
                    kind, size = _HEAD.unpack_from(head)
                    head_crc = zlib.crc32(head[: _HEAD.size], crc)
                    self._check(head_crc, head[_HEAD.size :])
                    body = file.read(size + _CRC.size)
                    if len(body) < size + _CRC.size:
                        return self._cut()
                    crc = zlib.crc32(body[:size], head_crc)
                    self._check(crc, body[size:])
                    self.num_records += 1
                    self._size += len(head) + len(body)
                    yield kind, body[:size]
        except OSError as error:
            raise InputError(f"event log {self.path}: {error.strerror}.") from error
        if not self.complete:
            self.ending = "The log has no last record: its run was killed, or still goes on."

    def _check_name(self, line: bytes) -> None:
        if line == _MAGIC:
            return
        if not line:
            raise InputError(f"event log {self.path}: is empty.")
        if _MAGIC.startswith(line):
            raise InputError(f"event log {self.path}: ends inside its header, after {len(line)} bytes.")
        if line.startswith(_NAME):
            version = line.removeprefix(_NAME).strip().decode(errors="replace")
            raise InputError(f"event log {self.path}: is of version {version}; this program reads version {VERSION}.")
        raise InputError(f"event log {self.path}: is not an event log.")

    def _check(self, crc: int, stored: bytes) -> None:
        if _CRC.pack(crc) != stored:
            raise InputError(
                f"event log {self.path}: record {self.num_records} at byte {self._size:,} is damaged (its checksum is "
                f"wrong); the {self.num_records} records before it are right."
            )

    def _cut(self) -> None:
        self.ending = (
            f"The log ends inside record {self.num_records}, at byte {self._file_size():,}; "
            f"the {self.num_records} records before it, {self._size:,} bytes, are whole."
        )

    def _file_size(self) -> int:
        return self.path.stat().st_size

    @contextlib.contextmanager
    def _decoding(self) -> Iterator[None]:
        """Says which record cannot be understood although its checksum is right: another version wrote it."""
        try:
            yield
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            place = f"event log {self.path}: record {self.num_records - 1}"
            raise InputError(f"{place} cannot be read by this version: {error}") from error

    def _read_entries(self) -> Generator[tuple[str, Event | Planned]]:
        prompts = _Prompts(MAX_KEPT_TOKENS)
        for number, payload in self._records:
            with self._decoding():
                if self.complete:
                    raise ValueError("it follows the last record.")
                kind = Kind(number)
                data = ByteReader(payload, _CLASSES)
                if kind is Kind.END:
                    why = data.text()
                    self.complete = True
                    self.ending = f"The run ended with {why}." if why else "The run ended by itself."
                    continue
                if kind is Kind.PLAN:
                    step = data.count()
                    entry = Planned(step - 1 if step else None, data.take(16))
                else:
                    cls = _EVENTS[kind]
                    fields = data.fields(cls)
                    if kind is Kind.SUBMIT:
                        fields["tokens"] = prompts.read(data)
                    entry = cls(**fields)
                if not data.done:
                    raise ValueError("it is longer than what it holds.")
            yield kind.name.lower(), entry


def read_events(path: str | os.PathLike[str]) -> tuple[LogHeader, LogEntries]:
    """Opens a log.

    Returns:
        What it says of its run, and its entries, which are read as they are asked for.

    Raises:
        InputError: it cannot be read, is no event log, or ends inside its header.
    """
    entries = LogEntries(path)
    return entries.header, entries
