"""Pages: the unit of KV allocation, and the pools they come from.

A pool hands out page ids and takes them back. It is a persistent value: an old pool stays valid after any operation.
The free ids are a linked list of read-only runs, so taking or returning n ids costs O(n), never O(pool).
"""

import enum
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

NO_PAGE = -1
"""Page id of a page that is nowhere."""


class Tier(enum.IntEnum):
    """Where a page's K/V is. A page is in exactly one tier, or missing."""

    DEVICE = 0
    HOST = 1
    MISSING = 2


class OutOfPages(Exception):
    """A pool cannot give what was asked of it.

    Attributes:
        needed: pages asked for.
        available: pages the pool had.
    """

    def __init__(self, needed: int, available: int):
        super().__init__(f"{needed} pages needed, {available} available.")
        self.needed = needed
        self.available = available


class _Run(NamedTuple):
    ids: np.ndarray  # i32[n], read-only
    rest: "_Run | None"


def frozen(array: np.ndarray) -> np.ndarray:
    """Returns `array`, marked read-only. The caller must own its memory."""
    array.flags.writeable = False
    return array


class PagePool(NamedTuple):
    """Free page ids of one tier.

    Attributes:
        num_pages: ids are in `[0, num_pages)`.
        num_free: how many are free.
        runs: which, next one first; for the functions of this module.
    """

    num_pages: int
    num_free: int
    runs: _Run | None

    def free_ids(self) -> Iterator[int]:
        """Yields the free ids, next one first."""
        run = self.runs
        while run is not None:
            yield from run.ids.tolist()
            run = run.rest


def make_pool(num_pages: int) -> PagePool:
    """Returns a pool of `num_pages` pages, all free; ids are handed out from 0 up."""
    if num_pages < 0:
        raise ValueError(f"{num_pages=} must not be negative.")
    ids = frozen(np.arange(num_pages, dtype=np.int32))
    return PagePool(num_pages, num_pages, _Run(ids, None) if num_pages else None)


def take(pool: PagePool, num_pages: int) -> tuple[PagePool, np.ndarray]:
    """Takes `num_pages` free ids.

    Returns:
        The pool without them, and the ids, i32[num_pages], read-only.

    Raises:
        OutOfPages: fewer are free.
    """
    if num_pages > pool.num_free:
        raise OutOfPages(num_pages, pool.num_free)
    parts: list[np.ndarray] = []
    left, runs = num_pages, pool.runs
    while left:
        assert runs is not None, "num_free disagrees with the free runs"
        ids, rest = runs
        if len(ids) <= left:
            parts.append(ids)
            left -= len(ids)
            runs = rest
        else:
            parts.append(ids[:left])
            runs = _Run(ids[left:], rest)
            left = 0
    ids = parts[0] if len(parts) == 1 else frozen(np.concatenate(parts) if parts else np.empty(0, np.int32))
    return PagePool(pool.num_pages, pool.num_free - num_pages, runs), ids


def give_back(pool: PagePool, page_ids: np.ndarray) -> PagePool:
    """Returns ids to the pool. They are handed out again before older ones.

    Args:
        pool: the pool they came from.
        page_ids: i32[n]; copied.

    Raises:
        ValueError: an id is not one of this pool's, is given twice, or more would be free than there are.
    """
    if len(page_ids) == 0:
        return pool
    ids = np.array(page_ids, dtype=np.int32)
    values = ids.tolist()
    if min(values) < 0 or max(values) >= pool.num_pages:
        raise ValueError(f"page id {min(values)}..{max(values)} is outside [0, {pool.num_pages}).")
    if len(set(values)) != len(values):
        raise ValueError(f"page ids given back twice: {values}.")
    if pool.num_free + len(ids) > pool.num_pages:
        raise ValueError(f"{len(ids)} pages given back, but only {pool.num_pages - pool.num_free} are out.")
    return PagePool(pool.num_pages, pool.num_free + len(ids), _Run(frozen(ids), pool.runs))
