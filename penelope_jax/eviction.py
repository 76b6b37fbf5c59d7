"""Eviction as a pure function of the cache and a policy (paper, part one; design rule 7).

LRU picks a history by the stamp of its leaf. The policy says where in that history freeing starts and how much is
freed at once. PRIVATE_FRONT with PAGE is Penelope: from the leaf walk up while the page above is resident and private,
then free from there towards the leaf, exactly the pages needed, then take the next history.
"""

from typing import NamedTuple

import numpy as np

from penelope_jax import leaf_order, pages
from penelope_jax.config import Policy, Start, Unit
from penelope_jax.pages import NO_PAGE, Tier
from penelope_jax.radix_tree import CacheState, Node
from penelope_jax.segments import EvictedSpan
from penelope_jax.tree_edit import TreeEdit


class Eviction(NamedTuple):
    """What eviction did.

    Attributes:
        spans: what was freed, in order.
        num_pages: pages freed; whole-node policies may free more than was asked.
        num_short: pages asked for that could not be freed; nothing evictable was left.
    """

    spans: tuple[EvictedSpan, ...]
    num_pages: int
    num_short: int


def evict(cache: CacheState, num_pages: int, policy: Policy) -> tuple[CacheState, Eviction]:
    """Frees at least `num_pages` device pages if that many are evictable; pinned pages never.

    Args:
        cache: the cache.
        num_pages: pages to free.
        policy: what to free.

    Returns:
        The cache with the pages back in the pool, and what was freed.
    """
    edit = TreeEdit(cache)
    freed: list[np.ndarray] = []
    spans: list[EvictedSpan] = []
    left = num_pages
    while left > 0:
        leaf_id = leaf_order.oldest(edit.leaves)
        if leaf_id is None:
            break
        for node, first, last in _CHOOSERS[policy.start](edit, edit.nodes[leaf_id], left, policy.unit):
            freed.append(node.page_ids[first:last])
            left -= last - first
            size = cache.page_size
            spans.append(EvictedSpan(node.node_id, node.start + first * size, node.start + last * size))
            missing = np.full(last - first, NO_PAGE, np.int32)
            edit.set_pages(edit.nodes[node.node_id], first, missing, Tier.MISSING)
        edit.prune(leaf_id)
    page_ids = np.concatenate(freed) if freed else np.empty(0, np.int32)
    after = edit.finish(device=pages.give_back(cache.device, page_ids))
    return after, Eviction(tuple(spans), len(page_ids), max(0, left))


def _leaf_tail(edit: TreeEdit, leaf: Node, num_pages: int, unit: Unit) -> list[tuple[Node, int, int]]:
    if unit is Unit.NODE:
        return _resident_runs(leaf, leaf.num_resident)
    first = _tail_run(leaf)
    return [(leaf, max(first, leaf.num_pages - num_pages), leaf.num_pages)]


def _leaf_head(edit: TreeEdit, leaf: Node, num_pages: int, unit: Unit) -> list[tuple[Node, int, int]]:
    return _resident_runs(leaf, leaf.num_resident if unit is Unit.NODE else num_pages)


def _private_front(edit: TreeEdit, leaf: Node, num_pages: int, unit: Unit) -> list[tuple[Node, int, int]]:
    chain = [leaf]
    node = leaf
    while node.num_resident == node.num_pages:
        above = edit.nodes[node.parent_id]
        # The page above is absent (the root), shared, pinned, or missing: the paper's four stops.
        if not above.num_pages or len(above.children) > 1 or above.num_pins or above.page_ids[-1] == NO_PAGE:
            break
        chain.append(above)
        node = above
    chosen: list[tuple[Node, int, int]] = []
    first = _tail_run(node)
    while chain and num_pages > 0:
        node = chain.pop()
        last = node.num_pages if unit is Unit.NODE else min(node.num_pages, first + num_pages)
        chosen.append((node, first, last))
        num_pages -= last - first
        first = 0
    return chosen


_CHOOSERS = {Start.LEAF_TAIL: _leaf_tail, Start.LEAF_HEAD: _leaf_head, Start.PRIVATE_FRONT: _private_front}


def _tail_run(node: Node) -> int:
    """Returns the first page of the run of resident pages at the node's end."""
    if node.num_resident == node.num_pages:
        return 0
    return int((node.page_ids == NO_PAGE).nonzero()[0][-1]) + 1


def _resident_runs(node: Node, num_pages: int) -> list[tuple[Node, int, int]]:
    """Returns runs of resident pages from the node's start, `num_pages` pages in all or what there is.

    Each run is freed in the node as it then is, so later runs name the node again.
    """
    padded = np.concatenate([[False], node.page_ids != NO_PAGE, [False]])
    edges = np.flatnonzero(padded[1:] != padded[:-1]).tolist()
    runs: list[tuple[Node, int, int]] = []
    for first, last in zip(edges[::2], edges[1::2]):
        if num_pages <= 0:
            break
        last = min(last, first + num_pages)
        runs.append((node, first, last))
        num_pages -= last - first
    return runs
