"""The one place where tree nodes change: a transient editor over a persistent cache state."""

import dataclasses

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
        was = old is not None and is_leaf(old)
        now = is_leaf(new)
        if was and not (now and old.stamp == new.stamp):
            self.leaves = leaf_order.remove(self.leaves, old.stamp, old.node_id)
            was = False
        if now and not was:
            self.leaves = leaf_order.add(self.leaves, new.stamp, new.node_id)
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

    def split(self, node_id: int, num_pages: int) -> Node:
        """Cuts a node after `num_pages` pages and returns the new prefix half.

        The suffix half keeps the node id, so whoever holds it still holds the whole path. Arrays are copied: a view
        would keep the whole node's memory alive.
        """
        node = self.nodes[node_id]
        size = num_pages * self.cache.page_size * TOKEN_BYTES
        assert 0 < num_pages < node.num_pages, f"split of node {node_id} after {num_pages} of {node.num_pages} pages"
        page_bytes = self.cache.page_size * TOKEN_BYTES
        prefix_id = self.new_id()
        halves = []
        for part in (slice(0, num_pages), slice(num_pages, None)):
            page_ids = frozen(node.page_ids[part].copy())
            owners = None if node.owners is None else _owners_or_none(node.owners[part].copy())
            resident = int((page_ids != NO_PAGE).sum())
            halves.append((page_ids, frozen(node.tiers[part].copy()), resident, owners))
        first_key = node.tokens[:page_bytes]
        children = immutables.Map({node.tokens[size : size + page_bytes]: node_id})
        prefix = Node(prefix_id, node.parent_id, node.start, node.tokens[:size], *halves[0], children, 0, node.stamp)
        start = node.start + num_pages * self.cache.page_size
        suffix = Node(
            node_id, prefix_id, start, node.tokens[size:], *halves[1], node.children, node.num_pins, node.stamp
        )
        self.put(suffix)
        self.put(prefix)
        parent = self.nodes[node.parent_id]
        self.put(parent._replace(children=parent.children.set(first_key, prefix_id)))
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
                owners = None if node.owners is None else _owners_or_none(node.owners[:keep].copy())
                self.put(
                    node._replace(
                        tokens=node.tokens[:size],
                        page_ids=frozen(node.page_ids[:keep].copy()),
                        tiers=frozen(node.tiers[:keep].copy()),
                        owners=owners,
                    )
                )
                return
            if is_leaf(node):
                self.leaves = leaf_order.remove(self.leaves, node.stamp, node.node_id)
            del self.nodes[node.node_id]
            if node.parent_id == NO_PAGE:
                self.roots = self.roots.delete(next(key for key, id_ in self.roots.items() if id_ == node.node_id))
                return
            parent = self.nodes[node.parent_id]
            key = node.tokens[: self.cache.page_size * TOKEN_BYTES]
            stamp = max(parent.stamp, node.stamp)
            node = self.put(parent._replace(children=parent.children.delete(key), stamp=stamp))


def _owners_or_none(owners: np.ndarray) -> np.ndarray | None:
    return frozen(owners) if (owners != NO_OWNER).any() else None
