"""What must hold of a cache between any two operations (design rule 13). Tests call it after each one."""

import numpy as np

from penelope_jax import leaf_order
from penelope_jax.pages import NO_PAGE, Tier
from penelope_jax.radix_tree import NO_OWNER, TOKEN_BYTES, CacheState, is_leaf


def check_cache(cache: CacheState, private_ids: tuple[int, ...] | np.ndarray = ()) -> None:
    """Checks the tree and the conservation of device pages.

    Args:
        cache: the cache.
        private_ids: device pages held by requests, outside the tree.

    Raises:
        AssertionError: what is wrong, and where.
    """
    seen: list[np.ndarray] = []
    reached = set()
    pins_at: dict[int, int] = {}
    for node_id in cache.pins.values():
        pins_at[node_id] = pins_at.get(node_id, 0) + 1
    leaves = {}
    stack = [root_id for root_id in cache.roots.values()]
    while stack:
        node = cache.nodes[stack.pop()]
        place = f"node {node.node_id} at {node.start}"
        reached.add(node.node_id)
        size = node.num_pages
        assert len(node.tokens) == size * cache.page_size * TOKEN_BYTES, f"{place}: tokens and pages disagree"
        assert len(node.tiers) == size, f"{place}: tiers and pages disagree"
        assert size or node.parent_id == NO_PAGE, f"{place}: empty"
        resident = node.page_ids != NO_PAGE
        assert (resident == (node.tiers != Tier.MISSING)).all(), f"{place}: page ids and tiers disagree"
        assert node.num_resident == int(resident.sum()), f"{place}: {node.num_resident=} is wrong"
        if node.owners is not None:
            assert not (resident & (node.owners != NO_OWNER)).any(), f"{place}: a resident page has an owner"
        assert node.num_pins == pins_at.get(node.node_id, 0), f"{place}: {node.num_pins=} but receipts differ"
        if not node.children and not node.num_pins:
            assert size and resident[-1], f"{place}: should have been pruned"
        if is_leaf(node):
            leaves[node.stamp] = node.node_id
        seen.append(node.page_ids[resident])
        for key, child_id in node.children.items():
            child = cache.nodes[child_id]
            assert child.parent_id == node.node_id, f"{place}: child {child_id} has parent {child.parent_id}"
            assert child.start == node.start + size * cache.page_size, f"{place}: child {child_id} starts elsewhere"
            assert child.tokens.startswith(key), f"{place}: child {child_id} is under another key"
            stack.append(child_id)
    assert reached == set(cache.nodes.keys()), f"unreachable nodes: {set(cache.nodes.keys()) - reached}"
    assert dict(leaf_order.in_order(cache.leaves)) == leaves, "leaves and their order disagree"
    assert cache.leaves.num_leaves == len(leaves), "leaf count is wrong"
    in_tree = np.concatenate(seen) if seen else np.empty(0, np.int32)
    assert cache.num_resident == len(in_tree), f"{cache.num_resident=}, {len(in_tree)} pages in the tree"
    everywhere = np.concatenate(
        [in_tree, np.asarray(private_ids, np.int32), np.fromiter(cache.device.free_ids(), np.int32)]
    )
    counts = np.bincount(everywhere, minlength=cache.device.num_pages)
    wrong = np.flatnonzero(counts != 1).tolist()
    assert not wrong, f"pages not in exactly one place: {[(page, int(counts[page])) for page in wrong[:8]]}"
    free = sum(1 for _ in cache.device.free_ids())
    assert cache.device.num_free == free, f"{cache.device.num_free=}, {free} ids free"


def check_idle(cache: CacheState) -> None:
    """Checks by counts what must hold when no request is left; cheap enough to do in service.

    Raises:
        AssertionError: a pin is out, or a page is neither free nor in the tree.
    """
    assert not cache.pins, f"{len(cache.pins)} pins are out, but no request is left"
    held = cache.device.num_free + cache.num_resident
    assert held == cache.device.num_pages, (
        f"{cache.device.num_free} pages are free and {cache.num_resident} in the tree, of {cache.device.num_pages}"
    )
