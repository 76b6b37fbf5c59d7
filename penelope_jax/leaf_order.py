"""The order of evictable leaves: a persistent map from stamps to node ids with a cheap minimum.

Stamps are non-negative and unique among the leaves held, since the logical clock ticks at every touch. The map is a
radix trie over the stamp's bits with 32-way tuples, so adding, removing and finding the oldest cost O(log(stamp)) and
copy a few short tuples; the order survives between calls (SGLang issue 14339 is what happens when it does not).
"""

from collections.abc import Iterator
from typing import NamedTuple

_BITS = 5
_WIDTH = 1 << _BITS
_EMPTY: tuple = (None,) * _WIDTH


class LeafOrder(NamedTuple):
    """Leaves by stamp. `root` is None when empty; `depth` levels index stamps below `32 ** depth`."""

    root: tuple | None = None
    depth: int = 1
    num_leaves: int = 0


def add(order: LeafOrder, stamp: int, node_id: int) -> LeafOrder:
    """Returns the order with `node_id` at `stamp`. The stamp must be free."""
    root, depth = order.root, order.depth
    while stamp >> (_BITS * depth):
        root = None if root is None else (root, *_EMPTY[1:])
        depth += 1
    return LeafOrder(_added(root, _BITS * (depth - 1), stamp, node_id), depth, order.num_leaves + 1)


def _added(trie: tuple | None, shift: int, stamp: int, node_id: int) -> tuple:
    trie = trie or _EMPTY
    slot = (stamp >> shift) & (_WIDTH - 1)
    if shift == 0:
        assert trie[slot] is None, f"{stamp=} is taken by node {trie[slot]}"
        child = node_id
    else:
        child = _added(trie[slot], shift - _BITS, stamp, node_id)
    return (*trie[:slot], child, *trie[slot + 1 :])


def remove(order: LeafOrder, stamp: int, node_id: int) -> LeafOrder:
    """Returns the order without `node_id`, which must stand at `stamp`."""
    root = _removed(order.root, _BITS * (order.depth - 1), stamp, node_id)
    return LeafOrder(root, order.depth if root else 1, order.num_leaves - 1)


def _removed(trie: tuple | None, shift: int, stamp: int, node_id: int) -> tuple | None:
    assert trie is not None, f"no leaf at {stamp=}"
    slot = (stamp >> shift) & (_WIDTH - 1)
    if shift == 0:
        assert trie[slot] == node_id, f"{stamp=} holds node {trie[slot]}, not {node_id}"
        child = None
    else:
        child = _removed(trie[slot], shift - _BITS, stamp, node_id)
    rest = (*trie[:slot], child, *trie[slot + 1 :])
    return None if child is None and rest == _EMPTY else rest


def oldest(order: LeafOrder) -> int | None:
    """Returns the node id with the smallest stamp, or None when there is no leaf."""
    found = oldest_entry(order)
    return None if found is None else found[1]


def oldest_entry(order: LeafOrder) -> tuple[int, int] | None:
    """Returns the smallest stamp and its node id, or None when there is no leaf."""
    trie, stamp = order.root, 0
    if trie is None:
        return None
    for _ in range(order.depth):
        slot = 0
        while trie[slot] is None:
            slot += 1
        stamp = stamp << _BITS | slot
        trie = trie[slot]
    return stamp, trie  # type: ignore[return-value]


def in_order(order: LeafOrder) -> Iterator[tuple[int, int]]:
    """Yields `(stamp, node_id)`, oldest first."""
    yield from _walk(order.root, order.depth, 0)


def _walk(trie: tuple | None, depth: int, prefix: int) -> Iterator[tuple[int, int]]:
    for slot, child in enumerate(trie or ()):
        if child is not None:
            if depth == 1:
                yield prefix << _BITS | slot, child
            else:
                yield from _walk(child, depth - 1, prefix << _BITS | slot)
