"""Eviction as a pure function of the cache and a policy (paper, part one; design rule 7).

Device and host memory are one cache: one order over both says what is evicted, whatever tier it is in (rule 11). What
only leaves the device is chosen by the same rules in `demotion.py`. Pages that are moving stay until they have arrived.

LRU picks a history by the stamp of its leaf. The policy says where in that history freeing starts and how much is
freed at once. PRIVATE_FRONT with PAGE is Penelope: from the leaf walk up while the page above is resident and private,
then free from there towards the leaf, exactly the pages needed, then take the next history.
"""

from typing import NamedTuple

import numpy as np

from penelope_jax import leaf_order, pages
from penelope_jax.config import Policy, Start, Unit
from penelope_jax.pages import NO_PAGE, Tier
from penelope_jax.radix_tree import CacheState, Node, held, under_way
from penelope_jax.segments import EvictedSpan
from penelope_jax.tree_edit import TreeEdit

_NONE = np.empty(0, np.int32)


class Eviction(NamedTuple):
    """What eviction did.

    Attributes:
        spans: what was freed, in order.
        num_pages: pages freed, in both tiers; whole-node policies may free more than was asked.
        num_short: pages asked for that could not be freed; nothing evictable was left.
    """

    spans: tuple[EvictedSpan, ...]
    num_pages: int
    num_short: int


def evict(cache: CacheState, num_pages: int, policy: Policy) -> tuple[CacheState, Eviction]:
    """Frees at least `num_pages` pages of either tier if that many are evictable; pinned and moving pages never.

    Args:
        cache: the cache.
        num_pages: pages to free.
        policy: what to free.

    Returns:
        The cache with the pages back in the pool, and what was freed.
    """
    edit = TreeEdit(cache)
    freed: dict[Tier, list[np.ndarray]] = {Tier.DEVICE: [], Tier.HOST: []}
    spans: list[EvictedSpan] = []
    left = num_pages
    while left > 0:
        leaf_id = leaf_order.oldest(edit.leaves)
        if leaf_id is None:
            break
        for node, first, last in _CHOOSERS[policy.start](edit, edit.nodes[leaf_id], left, policy.unit):
            node = edit.nodes[node.node_id]
            if node.node_id == leaf_id and last - first == node.num_resident:
                free(edit, node, first, last, freed)
                edit.cut(node)
            else:
                drop(edit, node, first, last, freed)
            left -= last - first
            size = cache.page_size
            spans.append(EvictedSpan(node.node_id, node.start + first * size, node.start + last * size))
        if leaf_id in edit.nodes:
            edit.prune(leaf_id)
    device_ids, host_ids = (np.concatenate(freed[tier]) if freed[tier] else _NONE for tier in (Tier.DEVICE, Tier.HOST))
    after = edit.finish(device=pages.give_back(cache.device, device_ids), host=pages.give_back(cache.host, host_ids))
    return after, Eviction(tuple(spans), len(device_ids) + len(host_ids), max(0, left))


def drop(edit: TreeEdit, node: Node, first: int, last: int, freed: dict[Tier, list[np.ndarray]]) -> None:
    """Makes resident pages `[first, last)` of a node missing; their ids go to `freed`, by tier."""
    free(edit, node, first, last, freed)
    edit.set_pages(node, first, np.full(last - first, NO_PAGE, np.int32), Tier.MISSING)


def free(edit: TreeEdit, node: Node, first: int, last: int, freed: dict[Tier, list[np.ndarray]]) -> None:
    """Adds the ids of resident pages `[first, last)` of a node, and of their copies, to `freed`.

    A demotion of them that was only planned is off. The node itself is the caller's to change, or to cut.
    """
    page_ids, part = node.page_ids[first:last], slice(first, last)
    if node.num_host:
        on_host = node.tiers[part] == Tier.HOST
        freed[Tier.DEVICE].append(page_ids[~on_host])
        freed[Tier.HOST].append(page_ids[on_host])
        if node.moving is not None:
            for host_id in page_ids[on_host].tolist():
                edit.moving = edit.moving.delete(host_id) if host_id in edit.moving else edit.moving
    else:
        freed[Tier.DEVICE].append(page_ids)
    if node.copies is not None:
        copies = node.copies[part]
        freed[Tier.HOST].append(copies[copies != NO_PAGE])


def _leaf_tail(edit: TreeEdit, leaf: Node, num_pages: int, unit: Unit) -> list[tuple[Node, int, int]]:
    first = _tail_run(leaf)
    return [(leaf, first if unit is Unit.NODE else max(first, leaf.num_pages - num_pages), leaf.num_pages)]


def _leaf_head(edit: TreeEdit, leaf: Node, num_pages: int, unit: Unit) -> list[tuple[Node, int, int]]:
    return _resident_runs(leaf, leaf.num_resident if unit is Unit.NODE else num_pages)


def _private_front(edit: TreeEdit, leaf: Node, num_pages: int, unit: Unit) -> list[tuple[Node, int, int]]:
    chain = [leaf]
    node = leaf
    while node.num_resident == node.num_pages and (node.moving is None or not under_way(node.moving).any()):
        above = edit.nodes[node.parent_id]
        # The page above is absent (the root), shared, pinned, or missing: the paper's four stops. A moving page is
        # pinned.
        if not above.num_pages or len(above.children) > 1 or above.num_pins or above.page_ids[-1] == NO_PAGE:
            break
        if above.moving is not None and under_way(above.moving[-1]):
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
    """Returns the first page of the run of evictable pages at the node's end."""
    if node.num_resident == node.num_pages and node.moving is None:
        return 0
    stays = _stays(node).nonzero()[0]
    return int(stays[-1]) + 1 if len(stays) else 0


def _stays(node: Node) -> np.ndarray:
    """Returns bool[num_pages]: which pages cannot be evicted, being missing already or moving."""
    moving = held(node)
    return node.page_ids == NO_PAGE if moving is None else (node.page_ids == NO_PAGE) | moving


def _resident_runs(node: Node, num_pages: int) -> list[tuple[Node, int, int]]:
    """Returns runs of evictable pages from the node's start, `num_pages` pages in all or what there is.

    Each run is freed in the node as it then is, so later runs name the node again.
    """
    return [(node, first, last) for first, last in runs(~_stays(node), num_pages)]


def runs(wanted: np.ndarray, num_pages: int) -> list[tuple[int, int]]:
    """Returns the runs `[first, last)` of True in `wanted`, from the front, `num_pages` in all or what there is."""
    padded = np.zeros(len(wanted) + 2, bool)
    padded[1:-1] = wanted
    edges = (padded[1:] != padded[:-1]).nonzero()[0].tolist()
    found: list[tuple[int, int]] = []
    for first, last in zip(edges[::2], edges[1::2]):
        if num_pages <= 0:
            break
        last = min(last, first + num_pages)
        found.append((first, last))
        num_pages -= last - first
    return found
