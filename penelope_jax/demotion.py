"""What leaves the device when it must make room: the same histories and the same end as in eviction, device pages only.

A demotion evicts nothing: the pages stay resident, on the host. Together with one order for final eviction over both
tiers this is the paper's part three: what would be evicted soon is on the host already.
"""

from typing import NamedTuple

import numpy as np

from penelope_jax import leaf_order, pages
from penelope_jax.config import Policy, Start
from penelope_jax.eviction import runs
from penelope_jax.pages import NO_PAGE, Tier
from penelope_jax.radix_tree import PLANNED, CacheState, Node
from penelope_jax.tree_edit import TreeEdit


class Demotion(NamedTuple):
    """Pages that are to move.

    Attributes:
        device_ids: i32[n], where their K/V is; back in the pool already.
        host_ids: i32[n], where it is to go; the tree's page ids now.
    """

    device_ids: np.ndarray
    host_ids: np.ndarray


def demote(
    cache: CacheState, num_pages: int, policy: Policy, *, newest: int | None = None
) -> tuple[CacheState, Demotion]:
    """Moves up to `num_pages` unpinned device pages to free host pages, in the order of eviction.

    Args:
        cache: the cache, with a host tier.
        num_pages: pages to move; also bounded by the free host pages, swap buffer included.
        policy: which first. Whole-node policies evict whole nodes, but move just the pages asked for.
        newest: leave alone what was touched after this logical time.

    Returns:
        The cache, in which they are on the host with their move `PLANNED`, and the pages.
    """
    edit = TreeEdit(cache)
    host = cache.host
    device_ids: list[np.ndarray] = []
    host_ids: list[np.ndarray] = []
    left = min(num_pages, host.num_free)
    while left > 0:
        found = leaf_order.oldest_entry(edit.device_leaves)
        if found is None or (newest is not None and found[0] > newest):
            break
        for node, first, last in _CHOOSERS[policy.start](edit, edit.nodes[found[1]], left):
            host, new_ids = pages.take(host, last - first)
            device_ids.append(node.page_ids[first:last])
            host_ids.append(new_ids)
            _put_on_host(edit, edit.nodes[node.node_id], first, new_ids)
            left -= last - first
    if not device_ids:
        return cache, Demotion(_NONE, _NONE)
    moved = Demotion(np.concatenate(device_ids), np.concatenate(host_ids))
    return edit.finish(device=pages.give_back(cache.device, moved.device_ids), host=host), moved


_NONE = np.empty(0, np.int32)


def _put_on_host(edit: TreeEdit, node: Node, first: int, host_ids: np.ndarray) -> None:
    edit.set_pages(node, first, host_ids, Tier.HOST, PLANNED)
    edit.list_moving(host_ids, node.node_id)


def _leaf_tail(edit: TreeEdit, node: Node, num_pages: int) -> list[tuple[Node, int, int]]:
    from_the_end = runs(node.tiers[::-1] == Tier.DEVICE, num_pages)
    return [(node, node.num_pages - last, node.num_pages - first) for first, last in from_the_end]


def _leaf_head(edit: TreeEdit, node: Node, num_pages: int) -> list[tuple[Node, int, int]]:
    return [(node, first, last) for first, last in _device_runs(node, 0, num_pages)]


def _private_front(edit: TreeEdit, node: Node, num_pages: int) -> list[tuple[Node, int, int]]:
    chain = [node]
    while node.num_resident == node.num_pages:
        above = edit.nodes[node.parent_id]
        # The same stops as in eviction, but for pages that are moving: they are on the host, and nothing frees them.
        if not above.num_pages or len(above.children) > 1 or above.num_pins or above.page_ids[-1] == NO_PAGE:
            break
        chain.append(above)
        node = above
    chosen: list[tuple[Node, int, int]] = []
    while chain and num_pages > 0:
        node = chain.pop()
        # In the uppermost node the history begins behind its last missing page.
        start = 0
        if node.num_resident < node.num_pages and not chosen:
            start = int((node.page_ids == NO_PAGE).nonzero()[0][-1]) + 1
        for first, last in _device_runs(node, start, num_pages):
            chosen.append((node, first, last))
            num_pages -= last - first
    return chosen or _leaf_tail(edit, node, num_pages)


def _device_runs(node: Node, start: int, num_pages: int) -> list[tuple[int, int]]:
    """Returns the runs of device pages from page `start` on, `num_pages` pages in all or what there is."""
    if node.num_resident == node.num_host:
        return []
    if node.num_host == 0 and node.num_resident == node.num_pages:
        return [(start, min(node.num_pages, start + num_pages))]
    return [(start + first, start + last) for first, last in runs(node.tiers[start:] == Tier.DEVICE, num_pages)]


_CHOOSERS = {Start.LEAF_TAIL: _leaf_tail, Start.LEAF_HEAD: _leaf_head, Start.PRIVATE_FRONT: _private_front}
