"""A stand-in for the K/V arrays: what a page holds, told apart by the whole history before it.

Under causal attention the K/V at a position is a function of all tokens up to it. Here it is a hash of them, so
whoever reads a page that was never written, was given away, or holds another history is found at once. It runs plans in
their order, as a device does, and keeps to the rules a device relies on: all K/V of a step is written before any of it
is read, and no two rows of a step write one page.

Moves between the tiers are as slow as whoever ends them wants. A demotion carries what the device page held when it
began; the host page holds nothing until it has ended. A load reads the host page up to its end, and the device page
holds nothing until then. What takes part in a move is written by nobody else.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from penelope_jax.moves import Move, MoveKind
from penelope_jax.pages import Tier
from penelope_jax.segments import Segment


class Row(NamedTuple):
    """A segment and the tokens of its history, i32[>= segment.stop], with those in flight known."""

    segment: Segment
    tokens: np.ndarray
    namespace: str
    name: str


def history_hashes(tokens: Iterable[int], namespace: str) -> list[int]:
    """Returns one number for each position, which depends on all tokens up to it and on the namespace."""
    value, hashes = hash(tuple(namespace.encode())), []
    for token in tokens:
        value = hash((value, token))
        hashes.append(value)
    return hashes


Values = list[int | None]


class KVModel:
    """Both pools: page id -> what each of its positions holds.

    Attributes:
        page_size: tokens a page.
        pages, host: device and host pages that hold something.
        moves: move id -> the move and what it carries, a list for each page.
    """

    def __init__(self, page_size: int):
        self.page_size = page_size
        self.pages: dict[int, Values] = {}
        self.host: dict[int, Values] = {}
        self.moves: dict[int, tuple[Move, list[Values]]] = {}

    def copy(self) -> "KVModel":
        """Returns pools with the same content, and the same moves under way."""
        other = KVModel(self.page_size)
        other.pages = {page_id: list(values) for page_id, values in self.pages.items()}
        other.host = {page_id: list(values) for page_id, values in self.host.items()}
        other.moves = dict(self.moves)
        return other

    def _held(self, pool: dict[int, Values], page_id: int) -> Values:
        return list(pool.get(page_id, [None] * self.page_size))

    def write(self, page_ids: Sequence[int], start: int, stop: int, hashes: Sequence[int]) -> None:
        """Writes positions `[start, stop)` of a history whose pages from position 0 are `page_ids`."""
        loading = self._targets(MoveKind.LOAD)
        for position in range(start, stop):
            page_id = int(page_ids[position // self.page_size])
            if page_id < 0:
                raise AssertionError(f"position {position} is written, but has no page.")
            if page_id in loading:
                raise AssertionError(f"position {position} is written to page {page_id}, which is being loaded.")
            values = self.pages.setdefault(page_id, [None] * self.page_size)
            values[position % self.page_size] = hashes[position]

    def check(self, page_ids: Sequence[int], start: int, stop: int, hashes: Sequence[int], reader: str) -> None:
        """Raises AssertionError unless these positions hold their history's K/V."""
        for position in range(start, stop):
            page_id = int(page_ids[position // self.page_size])
            found = self._held(self.pages, page_id)[position % self.page_size]
            self._compare(found, hashes[position], f"{reader} reads position {position} from page {page_id}")

    def check_host(self, page_id: int, start: int, hashes: Sequence[int]) -> None:
        """Raises AssertionError unless a host page holds the K/V from position `start` on, or will when it arrives."""
        for move, carried in self.moves.values():
            if move.kind is MoveKind.DEMOTE and page_id in move.host_ids:
                values = carried[move.host_ids.tolist().index(page_id)]
                break
        else:
            values = self._held(self.host, page_id)
        for position, found in enumerate(values, start):
            self._compare(found, hashes[position], f"the tree reads position {position} from host page {page_id}")

    def _compare(self, found: int | None, expected: int, what: str) -> None:
        if found != expected:
            held = "nothing" if found is None else "the K/V of another history"
            raise AssertionError(f"{what}, which holds {held}.")

    def _targets(self, kind: MoveKind) -> set[int]:
        """Returns the pages that moves of a kind are to fill."""
        moves = [move for move, _ in self.moves.values() if move.kind is kind]
        parts = [move.device_ids if kind is MoveKind.LOAD else move.host_ids for move in moves]
        return {page_id for part in parts for page_id in part.tolist()}

    def start_move(self, move: Move) -> None:
        """Begins a move: nothing can be read from its targets until it ends."""
        if move.kind is MoveKind.DEMOTE:
            source, target, name = self.pages, self.host, "page"
            source_ids, target_ids = move.device_ids.tolist(), move.host_ids.tolist()
        else:
            source, target, name = self.host, self.pages, "host page"
            source_ids, target_ids = move.host_ids.tolist(), move.device_ids.tolist()
        carried = [self._held(source, page_id) for page_id in source_ids]
        for page_id, values in zip(source_ids, carried):
            if None in values or move.kind is MoveKind.LOAD and page_id in self._targets(MoveKind.DEMOTE):
                raise AssertionError(f"move {move.move_id} reads {name} {page_id}, which holds nothing.")
        taken = self._targets(move.kind).intersection(target_ids)
        if taken:
            raise AssertionError(f"move {move.move_id} goes to pages {sorted(taken)}, and so does another one.")
        for page_id in target_ids:
            target.pop(page_id, None)
        self.moves[move.move_id] = move, carried

    def end_move(self, move_id: int, *, fails: bool = False) -> None:
        """Ends a move: its targets hold what it carried, or nothing if it failed."""
        move, carried = self.moves.pop(move_id)
        for host_id, device_id, values in zip(move.host_ids.tolist(), move.device_ids.tolist(), carried):
            if move.kind is MoveKind.LOAD and self._held(self.host, host_id) != values:
                raise AssertionError(f"host page {host_id} changed while move {move_id} read it.")
            if not fails and move.kind is MoveKind.DEMOTE:
                self.host[host_id] = values
            elif not fails:
                self.pages[device_id] = list(values)

    def run(self, rows: Sequence[Row]) -> None:
        """Runs a step: every row writes, then every row reads all positions up to its last."""
        writers: dict[int, str] = {}
        all_hashes = []
        for segment, tokens, namespace, name in rows:
            known = segment.tokens >= 0
            if (segment.tokens[known] != tokens[segment.start : segment.stop][known]).any():
                raise AssertionError(f"{name} computes other tokens than its history has at {segment.start}.")
            hashes = history_hashes(tokens[: segment.stop].tolist(), namespace)
            all_hashes.append(hashes)
            first = max(segment.start, segment.write_from)
            for page in (
                range(first // self.page_size, -(-segment.stop // self.page_size)) if first < segment.stop else ()
            ):
                page_id = int(segment.page_table[page])
                if page_id in writers:
                    raise AssertionError(f"{writers[page_id]} and {name} write page {page_id} in one step.")
                writers[page_id] = name
            self.write(segment.page_table.tolist(), first, segment.stop, hashes)
        for (segment, _, _, name), hashes in zip(rows, all_hashes):
            self.check(segment.page_table.tolist(), 0, segment.stop, hashes, name)

    def forget(self, page_ids: Iterable[int], tier: Tier = Tier.DEVICE) -> None:
        """Empties pages that nobody owns, so that a stray read shows."""
        pool = self.pages if tier is Tier.DEVICE else self.host
        for page_id in page_ids:
            pool.pop(page_id, None)
