"""A stand-in for the K/V arrays: what a page holds, told apart by the whole history before it.

Under causal attention the K/V at a position is a function of all tokens up to it. Here it is a hash of them, so
whoever reads a page that was never written, was given away, or holds another history is found at once. It runs plans in
their order, as a device does, and keeps to the rules a device relies on: all K/V of a step is written before any of it
is read, and no two rows of a step write one page.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

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


class KVModel:
    """The device pool: page id -> what each of its positions holds."""

    def __init__(self, page_size: int):
        self.page_size = page_size
        self.pages: dict[int, list[int | None]] = {}

    def copy(self) -> "KVModel":
        """Returns a pool with the same content."""
        other = KVModel(self.page_size)
        other.pages = {page_id: list(values) for page_id, values in self.pages.items()}
        return other

    def write(self, page_ids: Sequence[int], start: int, stop: int, hashes: Sequence[int]) -> None:
        """Writes positions `[start, stop)` of a history whose pages from position 0 are `page_ids`."""
        for position in range(start, stop):
            page_id = int(page_ids[position // self.page_size])
            if page_id < 0:
                raise AssertionError(f"position {position} is written, but has no page.")
            values = self.pages.setdefault(page_id, [None] * self.page_size)
            values[position % self.page_size] = hashes[position]

    def check(self, page_ids: Sequence[int], start: int, stop: int, hashes: Sequence[int], reader: str) -> None:
        """Raises AssertionError unless these positions hold their history's K/V."""
        for position in range(start, stop):
            page_id = int(page_ids[position // self.page_size])
            found = self.pages.get(page_id, [None] * self.page_size)[position % self.page_size]
            if found != hashes[position]:
                what = "nothing" if found is None else "the K/V of another history"
                raise AssertionError(f"{reader} reads position {position} from page {page_id}, which holds {what}.")

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

    def forget(self, page_ids: Iterable[int]) -> None:
        """Empties pages that nobody owns, so that a stray read shows."""
        for page_id in page_ids:
            self.pages.pop(page_id, None)
