"""Agent sessions as data.

A session is a list of turns. A turn's prompt is the first `keep` tokens of an earlier turn's history (its prompt and
the reply that was actually sampled), then new tokens. A trace holds no text: new tokens are drawn from labels, and a
label always gives the same tokens, so two sessions share exactly what their labels share.
"""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

KINDS: tuple[str, ...] = ("tool", "human")


class Piece(NamedTuple):
    """Tokens `[start, stop)` of the endless token sequence that `label` stands for."""

    label: str
    start: int
    stop: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One request of a session.

    Attributes:
        base: index of the earlier turn whose history (prompt + reply) this one starts with; -1: none.
        keep: tokens of that history that stay.
        new: what follows them.
        output_len: tokens of the reply.
        delay_s: tool or human time between the reply before and this request.
        kind: "tool" or "human".
        cancel_s: the client leaves this long after the request if the reply is not complete; no later turn builds on
            it.
    """

    base: int
    keep: int
    new: tuple[Piece, ...]
    output_len: int
    delay_s: float = 0.0
    kind: str = "tool"
    cancel_s: float = math.inf

    @property
    def new_len(self) -> int:
        return sum(piece.stop - piece.start for piece in self.new)

    @property
    def prompt_len(self) -> int:
        return self.keep + self.new_len

    @property
    def history_len(self) -> int:
        return self.prompt_len + self.output_len


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """One conversation: turns in order, each waiting for the reply of the one before."""

    session_id: str
    turns: tuple[Turn, ...]

    def __post_init__(self):
        for index, turn in enumerate(self.turns):
            where = f"session {self.session_id!r}, turn {index}"
            if not -1 <= turn.base < index:
                raise ValueError(f"{where}: base={turn.base} must be an earlier turn, or -1 for none.")
            limit = self.turns[turn.base].history_len if turn.base >= 0 else 0
            if not 0 <= turn.keep <= limit:
                raise ValueError(f"{where}: keep={turn.keep} must be in [0, {limit}], the history of its base.")
            if turn.prompt_len < 1 or turn.output_len < 1:
                raise ValueError(
                    f"{where}: its prompt ({turn.prompt_len} tokens) and its output ({turn.output_len}) must have at "
                    "least 1."
                )
            if not (math.isfinite(turn.delay_s) and turn.delay_s >= 0):
                raise ValueError(f"{where}: delay_s={turn.delay_s} must be finite and at least 0.")
            if turn.kind not in KINDS:
                raise ValueError(f"{where}: kind={turn.kind!r} must be one of {', '.join(KINDS)}.")
            if not turn.cancel_s > 0:
                raise ValueError(f"{where}: cancel_s={turn.cancel_s} must be above 0.")
            if turn.base >= 0 and math.isfinite(self.turns[turn.base].cancel_s):
                raise ValueError(f"{where}: base={turn.base} is a turn that may be cancelled.")

    @property
    def last_turn(self) -> int:
        """The last turn that is not cancelled; -1 if there is none."""
        return max((index for index, turn in enumerate(self.turns) if math.isinf(turn.cancel_s)), default=-1)


def cut_session(
    session: Session,
    *,
    max_context: int | None = None,
    max_turns: int | None = None,
    max_delay_s: float = math.inf,
    time_scale: float = 1.0,
) -> Session:
    """Returns `session` up to the first turn past a limit, its times scaled, delays capped; the first has no delay."""
    turns: list[Turn] = []
    for turn in session.turns[:max_turns]:
        if max_context is not None and turn.history_len > max_context:
            break
        delay_s = min(turn.delay_s * time_scale, max_delay_s) if turns else 0.0
        turns.append(dataclasses.replace(turn, delay_s=delay_s, cancel_s=turn.cancel_s * (time_scale or 1.0)))
    return Session(session_id=session.session_id, turns=tuple(turns))


def draw_tokens(pieces: Iterable[Piece], vocab_size: int) -> np.ndarray:
    """Returns the tokens of `pieces`, below `vocab_size`, one piece after the other: i32[sum of lengths]."""
    pieces = [piece for piece in pieces if piece.stop > piece.start]
    if not pieces:
        return np.zeros(0, np.int32)
    lengths = np.array([piece.stop - piece.start for piece in pieces])
    keys = np.array([_label_key(piece.label) for piece in pieces], np.uint64)
    starts = np.array([piece.start for piece in pieces])
    index = np.arange(lengths.sum()) + np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    mixed = _mix(np.repeat(keys, lengths) + index.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    return (mixed % np.uint64(vocab_size)).astype(np.int32)


@functools.lru_cache(maxsize=1 << 16)
def _label_key(label: str) -> int:
    return int.from_bytes(hashlib.blake2b(label.encode(), digest_size=8).digest(), "little")


def _mix(x: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64, elementwise over u64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Conversation:
    """A session being played: turns come out as tokens, replies go in. Keeps only histories a later turn needs."""

    def __init__(self, session: Session, vocab_size: int):
        self.session = session
        self.next_turn = 0
        self._vocab_size = vocab_size
        self._prompt: np.ndarray | None = None
        self._histories: dict[int, np.ndarray] = {}
        self._last_use = {turn.base: index for index, turn in enumerate(session.turns)}

    @property
    def done(self) -> bool:
        return self.next_turn == len(self.session.turns)

    def prompt(self) -> np.ndarray:
        """Returns the prompt of the next turn, i32[prompt_len], read-only."""
        if self._prompt is None:
            turn = self.session.turns[self.next_turn]
            kept = self._histories[turn.base][: turn.keep] if turn.base >= 0 else np.zeros(0, np.int32)
            self._prompt = np.concatenate([kept, draw_tokens(turn.new, self._vocab_size)])
            self._prompt.flags.writeable = False
        return self._prompt

    def reply(self, tokens: np.ndarray) -> None:
        """Takes the sampled reply of the next turn, i32[output_len], and goes on to the turn after it."""
        index = self.next_turn
        wanted = self.session.turns[index].output_len
        if len(tokens) != wanted:
            raise ValueError(
                f"session {self.session.session_id!r}, turn {index}: a reply of {len(tokens)} tokens; it must have "
                f"{wanted}."
            )
        if self._last_use.get(index, -1) > index:
            self._histories[index] = np.concatenate([self.prompt(), np.asarray(tokens, np.int32)])
        self.skip()

    def skip(self) -> None:
        """Goes on to the turn after the next one, which was cancelled."""
        index = self.next_turn
        for base in [base for base in self._histories if self._last_use[base] <= index]:
            del self._histories[base]
        self.next_turn = index + 1
        self._prompt = None
