"""The comparison: device and host memory as two caches, as in SGLang (caches.md names the versions read).

Inclusive, written back: a node that leaves the device is copied to the host, or keeps the copy it has there from when it
was loaded. Each tier has its own order: the device evicts its least recently used leaf, whole, and so does the host
among what is only there; copies of what is on the device stay (0.5.10), or are given up first (0.5.23). So a move may
evict, and what it evicts is not what one order over both tiers would. A node for which the host finds no place is
dropped with all below it, since without holes nothing behind it can be found.

As in the original, the device waits for what is written back.
"""

from typing import NamedTuple

import numpy as np

from penelope_jax import leaf_order, pages
from penelope_jax.eviction import drop, runs
from penelope_jax.pages import NO_PAGE, PagePool, Tier, frozen
from penelope_jax.radix_tree import PLANNED, CacheState, Node, held, moving_of, under_way
from penelope_jax.segments import EvictedSpan
from penelope_jax.tree_edit import TreeEdit


class WrittenBack(NamedTuple):
    """What making room did.

    Attributes:
        device_ids, host_ids: i32[n], pages that are to be copied to the host.
        spans: what was dropped for good, in order.
        num_evicted: pages of them.
    """

    device_ids: np.ndarray
    host_ids: np.ndarray
    spans: tuple[EvictedSpan, ...]
    num_evicted: int


def make_room(
    cache: CacheState, num_pages: int, most_copied: int, *, reclaim_copies: bool
) -> tuple[CacheState, WrittenBack]:
    """Takes nodes off the device until `num_pages` more device pages are free, or nothing unpinned is left.

    Args:
        cache: the cache, with a host tier.
        num_pages: device pages to free; whole nodes may free more.
        most_copied: stop before more pages than this would have to be copied.
        reclaim_copies: as in `Policy`.
    """
    work = _WriteBack(cache, most_copied, reclaim_copies)
    while num_pages > 0:
        leaf_id = leaf_order.oldest(work.edit.device_leaves)
        if leaf_id is None:
            break
        number = work.write_back(work.edit.nodes[leaf_id])
        if not number:
            break
        num_pages -= number
    return work.finish()


class _WriteBack:
    """Collects changes to one cache value; never escapes `make_room`."""

    def __init__(self, cache: CacheState, most_copied: int, reclaim_copies: bool):
        self.cache = cache
        self.reclaim_copies = reclaim_copies
        self.edit = TreeEdit(cache)
        self.host: PagePool = cache.host
        self.room = cache.host_capacity - (cache.host.num_pages - cache.host.num_free)
        self.left = most_copied
        self.device_freed: list[np.ndarray] = []
        self.copied: list[tuple[np.ndarray, np.ndarray]] = []
        self.spans: list[EvictedSpan] = []
        self.num_evicted = 0

    def write_back(self, node: Node) -> int:
        """Takes a device leaf off the device; returns how many pages, 0 when moves must end first."""
        on_device = node.tiers == Tier.DEVICE
        copies = np.full(node.num_pages, NO_PAGE, np.int32) if node.copies is None else node.copies
        to_copy = on_device & (copies == NO_PAGE)
        number = int(to_copy.sum())
        if number > self.left and (self.copied or self.cache.moves):  # a node larger than the bound goes alone
            return 0
        if not self.find_host_room(number, node.node_id):
            return self.drop_subtree(self.edit.nodes[node.node_id])
        node = self.edit.nodes[node.node_id]
        self.host, host_ids = pages.take(self.host, number)
        self.room -= number
        self.left -= number
        self.copied.append((node.page_ids[to_copy], host_ids))
        self.device_freed.append(node.page_ids[on_device])
        new_ids = copies.copy()
        new_ids[to_copy] = host_ids
        marks = np.where(to_copy, np.int32(PLANNED), moving_of(node))
        self.edit.set_copies(node, np.full(node.num_pages, NO_PAGE, np.int32))
        node = self.edit.nodes[node.node_id]
        for first, last in runs(on_device, node.num_pages):
            node = self.edit.set_pages(node, first, new_ids[first:last], Tier.HOST)
        self.edit.set_moving(node, marks)
        self.edit.list_moving(host_ids, node.node_id)
        return int(on_device.sum())

    def find_host_room(self, number: int, keep_id: int) -> bool:
        """Frees host pages until `number` are free; returns whether they are."""
        while self.room < number:
            node = self.oldest_copied(keep_id) if self.reclaim_copies else None
            if node is not None:
                assert node.copies is not None, "only nodes with copies are listed"
                freed = node.copies[node.copies != NO_PAGE]
                self.edit.set_copies(node, np.full(node.num_pages, NO_PAGE, np.int32))
            else:
                node = self.oldest_host_leaf()
                if node is None:
                    return False
                freed = self.evict_from_host(node)
            self.host = pages.give_back(self.host, freed)
            self.room += len(freed)
        return True

    def oldest_copied(self, keep_id: int) -> Node | None:
        """Returns the least recently used node with copies on the host, other than the one that is leaving."""
        nodes = (self.edit.nodes[node_id] for node_id in self.edit.copied if node_id != keep_id)
        return min(nodes, key=lambda node: node.stamp, default=None)

    def oldest_host_leaf(self) -> Node | None:
        nodes = (self.edit.nodes[node_id] for _, node_id in leaf_order.in_order(self.edit.leaves))
        return next((node for node in nodes if not node.num_device), None)

    def evict_from_host(self, leaf: Node) -> np.ndarray:
        """Drops a host leaf, or what of its end is not moving; returns the host ids."""
        moving = held(leaf)
        still = np.ones(leaf.num_pages, bool) if moving is None else ~moving
        still &= leaf.page_ids != NO_PAGE
        first = 0 if still.all() else int(np.flatnonzero(~still)[-1]) + 1
        freed: dict[Tier, list[np.ndarray]] = {Tier.DEVICE: [], Tier.HOST: []}
        self.drop(leaf, first, leaf.num_pages, freed)
        self.edit.prune(leaf.node_id)
        return np.concatenate(freed[Tier.HOST])

    def drop_subtree(self, node: Node) -> int:
        """Drops the device pages of a node and all behind them; returns how many, 0 when some are moving."""
        freed: dict[Tier, list[np.ndarray]] = {Tier.DEVICE: [], Tier.HOST: []}
        subtree = [node]
        for current in subtree:
            subtree.extend(self.edit.nodes[child_id] for child_id in current.children.values())
        if any(current.moving is not None and under_way(current.moving).any() for current in subtree):
            return 0
        leaves = [current.node_id for current in subtree if not current.children]
        for current in subtree:
            for first, last in runs(current.page_ids != NO_PAGE, current.num_pages):
                self.drop(self.edit.nodes[current.node_id], first, last, freed)
        for leaf_id in leaves:
            if leaf_id in self.edit.nodes:
                self.edit.prune(leaf_id)
        device_ids = np.concatenate(freed[Tier.DEVICE])
        self.device_freed.append(device_ids)
        host_ids = np.concatenate([_NONE, *freed[Tier.HOST]])
        self.host = pages.give_back(self.host, host_ids)
        self.room += len(host_ids)
        return len(device_ids)

    def drop(self, node: Node, first: int, last: int, freed: dict[Tier, list[np.ndarray]]) -> None:
        drop(self.edit, node, first, last, freed)
        size = self.cache.page_size
        self.spans.append(EvictedSpan(node.node_id, node.start + first * size, node.start + last * size))
        self.num_evicted += last - first

    def finish(self) -> tuple[CacheState, WrittenBack]:
        device_ids = np.concatenate([_NONE, *self.device_freed])
        cache = self.edit.finish(device=pages.give_back(self.cache.device, device_ids), host=self.host)
        sources = np.concatenate([_NONE, *(source for source, _ in self.copied)])
        targets = np.concatenate([_NONE, *(target for _, target in self.copied)])
        return cache, WrittenBack(frozen(sources), frozen(targets), tuple(self.spans), self.num_evicted)


_NONE = np.empty(0, np.int32)
