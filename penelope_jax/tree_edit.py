"""The one place where tree nodes change: a transient editor over a persistent cache state."""

import dataclasses
from typing import Any

import immutables
import numpy as np

from penelope_jax import leaf_order
from penelope_jax.pages import NO_PAGE, Tier, frozen
from penelope_jax.radix_tree import NO_OWNER, TOKEN_BYTES, CacheState, Node, is_leaf


class TreeEdit:
    """A transient editor: collects changes to one cache value and yields the next one.

    It never escapes the function that made it, so the functions built on it stay pure.
    """

    def __init__(self, cache: CacheState):
        self.cache = cache
        self.nodes = cache.nodes.mutate()
        self.roots = cache.roots
        self.leaves = cache.leaves
        self.clock = cache.clock
        self.num_resident = cache.num_resident
        self.next_node_id = cache.next_node_id

    def finish(self, **changes) -> CacheState:
        return dataclasses.replace(
            self.cache,
            nodes=self.nodes.finish(),
            roots=self.roots,
            leaves=self.leaves,
            clock=self.clock,
            num_resident=self.num_resident,
            next_node_id=self.next_node_id,
            **changes,
        )

    def put(self, new: Node) -> Node:
        """Stores a node and keeps the order of leaves and the resident count right."""
        old = self.nodes.get(new.node_id)
        stamp_before = old.stamp if old is not None and is_leaf(old) else None
        stamp_now = new.stamp if is_leaf(new) else None
        if stamp_before != stamp_now:
            if stamp_before is not None:
                self.leaves = leaf_order.remove(self.leaves, stamp_before, new.node_id)
            if stamp_now is not None:
                self.leaves = leaf_order.add(self.leaves, stamp_now, new.node_id)
        self.num_resident += new.num_resident - (old.num_resident if old is not None else 0)
        self.nodes[new.node_id] = new
        return new

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
        root = Node(self.new_id(), NO_PAGE, 0, b"", empty, no_tiers, 0, None, immutables.Map(), 0, 0)
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
        self.put(suffix)
        self.put(prefix)
        parent = self.nodes[node.parent_id]
        self.put(parent._replace(children=parent.children.set(self.key(node.tokens), prefix_id)))
        return prefix

    def set_pages(self, node: Node, first: int, page_ids: np.ndarray, tier: Tier) -> Node:
        """Returns the stored node with pages `[first, first + len(page_ids))` changed to these ids and this tier.

        Whoever owned them owns them no more.
        """
        stop = first + len(page_ids)
        new_ids, new_tiers = node.page_ids.copy(), node.tiers.copy()
        before = int((new_ids[first:stop] != NO_PAGE).sum())
        new_ids[first:stop] = page_ids
        new_tiers[first:stop] = tier
        after = 0 if tier is Tier.MISSING else len(page_ids)
        owners = node.owners
        if owners is not None:
            owners = owners.copy()
            owners[first:stop] = NO_OWNER
            owners = _owners_or_none(owners)
        return self.put(
            node._replace(
                page_ids=frozen(new_ids),
                tiers=frozen(new_tiers),
                num_resident=node.num_resident + after - before,
                owners=owners,
            )
        )

    def set_owners(self, node: Node, owners: np.ndarray) -> Node:
        return self.put(node._replace(owners=_owners_or_none(owners)))

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
            if is_leaf(node):
                self.leaves = leaf_order.remove(self.leaves, node.stamp, node.node_id)
            del self.nodes[node.node_id]
            if node.parent_id == NO_PAGE:
                self.roots = self.roots.delete(next(key for key, id_ in self.roots.items() if id_ == node.node_id))
                return
            parent = self.nodes[node.parent_id]
            children = parent.children.delete(self.key(node.tokens))
            node = self.put(parent._replace(children=children, stamp=max(parent.stamp, node.stamp)))


def _owners_or_none(owners: np.ndarray) -> np.ndarray | None:
    return frozen(owners) if (owners != NO_OWNER).any() else None


def _pages_in(node: Node, part: slice) -> dict[str, Any]:
    """Returns the page fields of a node cut to `part`, as copies."""
    page_ids = frozen(node.page_ids[part].copy())
    return {
        "page_ids": page_ids,
        "tiers": frozen(node.tiers[part].copy()),
        "num_resident": int(np.count_nonzero(page_ids != NO_PAGE)),
        "owners": None if node.owners is None else _owners_or_none(node.owners[part].copy()),
    }
