"""The one place where tree nodes change: a transient editor over a persistent cache state."""

from typing import Any

import immutables
import numpy as np

from penelope_jax import leaf_order
from penelope_jax.changed import changed
from penelope_jax.leaf_order import LeafOrder
from penelope_jax.pages import NO_PAGE, Tier, frozen
from penelope_jax.radix_tree import (
    NO_OWNER,
    STILL,
    TOKEN_BYTES,
    CacheState,
    Node,
    is_busy,
    is_device_leaf,
    is_leaf,
    moving_of,
)


class TreeEdit:
    """A transient editor: collects changes to one cache value and yields the next one.

    It never escapes the function that made it, so the functions built on it stay pure.
    """

    def __init__(self, cache: CacheState):
        self.cache = cache
        self.nodes = cache.nodes.mutate()
        self.roots = cache.roots
        self.leaves = cache.leaves
        self.device_leaves = cache.device_leaves
        self.tiered = cache.host_capacity > 0
        self.moving = cache.moving
        self.num_host = cache.num_host
        self.num_copies = cache.num_copies
        self.copied = cache.copied
        self.clock = cache.clock
        self.num_resident = cache.num_resident
        self.next_node_id = cache.next_node_id

    def finish(self, **changes) -> CacheState:
        return changed(
            self.cache,
            nodes=self.nodes.finish(),
            roots=self.roots,
            leaves=self.leaves,
            device_leaves=self.device_leaves,
            moving=self.moving,
            num_host=self.num_host,
            num_copies=self.num_copies,
            copied=self.copied,
            clock=self.clock,
            num_resident=self.num_resident,
            next_node_id=self.next_node_id,
            **changes,
        )

    def put(self, new: Node) -> Node:
        """Stores a node; keeps the orders of leaves, the counts and, up to the root, what is busy right."""
        if not self.tiered or new.parent_id == NO_PAGE:
            self._store(new)
            return new
        old = self.nodes.get(new.node_id)
        was_busy, busy = old is not None and is_busy(old), is_busy(new)
        # A node and the one above may have one stamp, so the upper leaves the order before the lower enters it.
        if busy and not was_busy:
            parent = self.nodes[new.parent_id]
            self.put(parent._replace(num_busy=parent.num_busy + 1))
        self._store(new)
        if was_busy and not busy:
            parent = self.nodes[new.parent_id]
            stamp = max(parent.stamp, new.stamp)
            self.put(parent._replace(num_busy=parent.num_busy - 1, stamp=stamp))
        return new

    def _store(self, new: Node) -> None:
        """Stores a node without telling its parent."""
        old = self.nodes.get(new.node_id)
        stamp_before = old.stamp if old is not None and is_leaf(old) else None
        stamp_now = new.stamp if is_leaf(new) else None
        self.leaves = _in_order(self.leaves, new.node_id, stamp_before, stamp_now)
        if self.tiered:
            stamp_before = old.stamp if old is not None and is_device_leaf(old) else None
            stamp_now = new.stamp if is_device_leaf(new) else None
            self.device_leaves = _in_order(self.device_leaves, new.node_id, stamp_before, stamp_now)
        self.num_resident += new.num_resident - (old.num_resident if old is not None else 0)
        self.num_host += new.num_host - (old.num_host if old is not None else 0)
        if new.copies is not None or (old is not None and old.copies is not None):
            known = new.node_id in self.copied
            if known != (new.copies is not None):
                self.copied = self.copied.delete(new.node_id) if known else self.copied.set(new.node_id, True)
        self.nodes[new.node_id] = new

    def stamp(self, node: Node) -> Node:
        """Stamps the node where a touch ended and, while nothing below is on the device or pinned, what is above it.

        So the device leaf above has the stamp at once, and others have it when they become one.
        """
        now = self.tick()
        stamped = self.put(node._replace(stamp=now))
        while self.tiered and node.parent_id != NO_PAGE and not is_busy(node):
            node = self.put(self.nodes[node.parent_id]._replace(stamp=now))
        return stamped

    def new_id(self) -> int:
        self.next_node_id += 1
        return self.next_node_id - 1

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    def root(self, namespace: str) -> Node:
        """Returns the namespace's root, made if need be."""
        root_id = self.roots.get(namespace)
        if root_id is not None:
            return self.nodes[root_id]
        empty = frozen(np.empty(0, np.int32))
        no_tiers = frozen(np.empty(0, np.int8))
        root = Node(
            node_id=self.new_id(),
            parent_id=NO_PAGE,
            start=0,
            tokens=b"",
            page_ids=empty,
            tiers=no_tiers,
            num_resident=0,
            num_host=0,
            owners=None,
            moving=None,
            copies=None,
            children=immutables.Map(),
            num_pins=0,
            num_busy=0,
            stamp=0,
        )
        self.roots = self.roots.set(namespace, root.node_id)
        return self.put(root)

    def key(self, tokens: bytes) -> bytes:
        """Returns the key under which a node that begins with `tokens` stands in its parent."""
        return tokens[: self.cache.page_size * TOKEN_BYTES]

    def split(self, node_id: int, num_pages: int) -> Node:
        """Cuts a node after `num_pages` pages and returns the new prefix half.

        The suffix half keeps the node id, so whoever holds it still holds the whole path. Arrays are copied: a view
        would keep the whole node's memory alive.
        """
        node = self.nodes[node_id]
        size = num_pages * self.cache.page_size * TOKEN_BYTES
        assert 0 < num_pages < node.num_pages, f"split of node {node_id} after {num_pages} of {node.num_pages} pages"
        prefix_id = self.new_id()
        prefix = node._replace(
            node_id=prefix_id,
            tokens=node.tokens[:size],
            children=immutables.Map({self.key(node.tokens[size:]): node_id}),
            num_pins=0,
            **_pages_in(node, slice(0, num_pages)),
        )
        suffix = node._replace(
            parent_id=prefix_id,
            start=node.start + num_pages * self.cache.page_size,
            tokens=node.tokens[size:],
            **_pages_in(node, slice(num_pages, None)),
        )
        prefix = prefix._replace(num_busy=int(self.tiered and is_busy(suffix)))
        # The two halves together are as busy as the node was, so nothing changes for the parent.
        self._store(suffix)
        self._store(prefix)
        if prefix.moving is not None:
            self.list_moving(prefix.page_ids[prefix.moving != STILL], prefix_id)
        parent = self.nodes[node.parent_id]
        self.put(parent._replace(children=parent.children.set(self.key(node.tokens), prefix_id)))
        return prefix

    def set_pages(self, node: Node, first: int, page_ids: np.ndarray, tier: Tier, moving: int = STILL) -> Node:
        """Returns the stored node with pages `[first, first + len(page_ids))` changed to these ids and this tier.

        Whoever owned them owns them no more, and no host page is a copy of them. They move as `moving` says.
        """
        part = slice(first, first + len(page_ids))
        new_ids, new_tiers = node.page_ids.copy(), node.tiers.copy()
        before = len(page_ids)  # in a node without missing pages
        if node.num_resident < node.num_pages:
            before = int(np.count_nonzero(new_ids[part] != NO_PAGE)) if node.num_resident else 0
        host_before = int(np.count_nonzero(new_tiers[part] == Tier.HOST)) if node.num_host else 0
        new_ids[part] = page_ids
        new_tiers[part] = tier
        if node.copies is not None:
            self.num_copies -= int(np.count_nonzero(node.copies[part] != NO_PAGE))
        return self.put(
            node._replace(
                page_ids=frozen(new_ids),
                tiers=frozen(new_tiers),
                num_resident=node.num_resident + (0 if tier is Tier.MISSING else len(page_ids)) - before,
                num_host=node.num_host + (len(page_ids) if tier is Tier.HOST else 0) - host_before,
                owners=_changed(node.owners, part, NO_OWNER),
                moving=_changed(node.moving, part, STILL) if moving == STILL else _marked(node, part, moving),
                copies=_changed(node.copies, part, NO_PAGE),
            )
        )

    def set_moving(self, node: Node, moving: np.ndarray) -> Node:
        """Returns the stored node with what moves changed; `moving` i32[num_pages] is adopted."""
        return self.put(node._replace(moving=_or_none(moving, STILL)))

    def list_moving(self, host_ids: np.ndarray, node_id: int) -> None:
        """Lists moving host pages as those of a node."""
        self.moving = self.moving.update(dict.fromkeys(host_ids.tolist(), node_id))

    def set_copies(self, node: Node, copies: np.ndarray) -> Node:
        """Returns the stored node with its copies changed; `copies` i32[num_pages] is adopted."""
        before = 0 if node.copies is None else int((node.copies != NO_PAGE).sum())
        self.num_copies += int((copies != NO_PAGE).sum()) - before
        return self.put(node._replace(copies=_or_none(copies, NO_PAGE)))

    def set_owners(self, node: Node, owners: np.ndarray) -> Node:
        return self.put(node._replace(owners=_or_none(owners, NO_OWNER)))

    def prune(self, node_id: int) -> None:
        """Trims trailing missing pages of a childless, unpinned node; removes it when none is left, and so on up."""
        node = self.nodes[node_id]
        while not node.children and not node.num_pins:
            if node.num_resident and node.page_ids[-1] != NO_PAGE:
                return
            if node.num_resident:
                keep = int((node.page_ids != NO_PAGE).nonzero()[0][-1]) + 1
                size = keep * self.cache.page_size * TOKEN_BYTES
                self.put(node._replace(tokens=node.tokens[:size], **_pages_in(node, slice(0, keep))))
                return
            if node.parent_id == NO_PAGE:
                del self.nodes[node.node_id]
                self.roots = self.roots.delete(next(key for key, id_ in self.roots.items() if id_ == node.node_id))
                return
            node = self._remove(node)

    def cut(self, node: Node) -> None:
        """Takes a childless, unpinned node out of the tree, whatever pages it has: `eviction.free` them before.

        What then ends in missing pages is pruned.
        """
        self.prune(self._remove(node).node_id)

    def _remove(self, node: Node) -> Node:
        """Takes a childless, unpinned node out of the tree, and those above that had nothing but it.

        Returns:
            The lowest node that is left, stored.
        """
        if is_leaf(node):
            self.leaves = leaf_order.remove(self.leaves, node.stamp, node.node_id)
        if self.tiered and is_device_leaf(node):
            self.device_leaves = leaf_order.remove(self.device_leaves, node.stamp, node.node_id)
        self.num_resident -= node.num_resident
        self.num_host -= node.num_host
        if node.copies is not None:
            self.num_copies -= int(np.count_nonzero(node.copies != NO_PAGE))
            self.copied = self.copied.delete(node.node_id)
        stamp = node.stamp
        while True:
            del self.nodes[node.node_id]
            parent = self.nodes[node.parent_id]
            stamp = max(stamp, parent.stamp)
            if len(parent.children) > 1 or parent.num_pins or parent.num_resident or parent.parent_id == NO_PAGE:
                break
            node = parent  # all its pages are missing: it is in no order and no count
        return self.put(
            parent._replace(
                children=parent.children.delete(self.key(node.tokens)),
                num_busy=parent.num_busy - int(self.tiered and is_busy(node)),
                stamp=stamp,
            )
        )


def _in_order(order: LeafOrder, node_id: int, before: int | None, now: int | None) -> LeafOrder:
    """Returns an order in which a node that stood at stamp `before` stands at `now`; None: not in it."""
    if before != now:
        if before is not None:
            order = leaf_order.remove(order, before, node_id)
        if now is not None:
            order = leaf_order.add(order, now, node_id)
    return order


def _or_none(values: np.ndarray, nothing: int) -> np.ndarray | None:
    return frozen(values) if (values != nothing).any() else None


def _changed(values: np.ndarray | None, part: slice, nothing: int) -> np.ndarray | None:
    """Returns a copy of `values` with nothing in `part`, or None when nothing is left."""
    if values is None:
        return None
    values = values.copy()
    values[part] = nothing
    return _or_none(values, nothing)


def _marked(node: Node, part: slice, moving: int) -> np.ndarray:
    values = moving_of(node).copy()
    values[part] = moving
    return frozen(values)


def _pages_in(node: Node, part: slice) -> dict[str, Any]:
    """Returns the page fields of a node cut to `part`, as copies."""
    page_ids = frozen(node.page_ids[part].copy())
    tiers = frozen(node.tiers[part].copy())
    return {
        "page_ids": page_ids,
        "tiers": tiers,
        "num_resident": int(np.count_nonzero(page_ids != NO_PAGE)),
        "num_host": int(np.count_nonzero(tiers == Tier.HOST)) if node.num_host else 0,
        "owners": None if node.owners is None else _or_none(node.owners[part].copy(), NO_OWNER),
        "moving": None if node.moving is None else _or_none(node.moving[part].copy(), STILL),
        "copies": None if node.copies is None else _or_none(node.copies[part].copy(), NO_PAGE),
    }
