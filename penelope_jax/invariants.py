"""What must hold of a cache between any two operations (design rule 13). Tests call it after each one."""

from collections.abc import Iterator

import numpy as np

from penelope_jax import leaf_order
from penelope_jax.moves import MoveKind
from penelope_jax.pages import NO_PAGE, PagePool, Tier
from penelope_jax.radix_tree import (
    LEAVING,
    NO_NODE,
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


def check_cache(cache: CacheState, private_ids: tuple[int, ...] | np.ndarray = ()) -> None:
    """Checks the tree, what is moving, and the conservation of pages in both tiers.

    Each page id of a tier is in exactly one of: free, tree, request, in flight.

    Args:
        cache: the cache.
        private_ids: device pages held by requests, outside the tree.

    Raises:
        AssertionError: what is wrong, and where.
    """
    nodes = list(_nodes(cache))
    _check_orders(cache, nodes)
    _check_moves(cache, nodes)
    device, host = _held(cache, nodes)
    loading = [move.device_ids for move in cache.moves.values() if move.kind is MoveKind.LOAD]
    _check_pool("device", cache.device, [*device, *loading, np.asarray(private_ids, np.int32)])
    let_go = [host_id for host_id, node_id in cache.moving.items() if node_id == NO_NODE]
    _check_pool("host", cache.host, [*host, np.array(let_go, np.int32)])
    num_copies = sum(int((node.copies != NO_PAGE).sum()) for node in nodes if node.copies is not None)
    copied = {node.node_id for node in nodes if node.copies is not None}
    assert set(cache.copied) == copied, "nodes with copies and their index disagree"
    counts = (cache.num_device, cache.num_host, cache.num_copies)
    found = (sum(map(len, device)), sum(map(len, host)) - num_copies, num_copies)
    assert counts == found, f"{counts} pages on the device, on the host and copies, but {found} are in the tree"


def _nodes(cache: CacheState) -> Iterator[Node]:
    """Checks nodes one by one, and yields them."""
    reached = set()
    pins_at: dict[int, int] = {}
    for node_id in cache.pins.values():
        pins_at[node_id] = pins_at.get(node_id, 0) + 1
    stack = list(cache.roots.values())
    while stack:
        node = cache.nodes[stack.pop()]
        place = f"node {node.node_id} at {node.start}"
        reached.add(node.node_id)
        size = node.num_pages
        assert len(node.tokens) == size * cache.page_size * TOKEN_BYTES, f"{place}: tokens and pages disagree"
        assert len(node.tiers) == size, f"{place}: tiers and pages disagree"
        assert size or node.parent_id == NO_PAGE, f"{place}: empty"
        resident, on_host = node.page_ids != NO_PAGE, node.tiers == Tier.HOST
        assert (resident == (node.tiers != Tier.MISSING)).all(), f"{place}: page ids and tiers disagree"
        assert node.num_resident == int(resident.sum()), f"{place}: {node.num_resident=} is wrong"
        assert node.num_host == int(on_host.sum()), f"{place}: {node.num_host=} is wrong"
        if node.owners is not None:
            assert not (resident & (node.owners != NO_OWNER)).any(), f"{place}: a resident page has an owner"
        if node.moving is not None:
            assert not ((node.moving != STILL) & ~on_host).any(), f"{place}: a page moves that is not on the host"
        if node.copies is not None:
            copied = node.copies != NO_PAGE
            assert not (copied & (node.tiers != Tier.DEVICE)).any(), f"{place}: a copy of no device page"
        assert node.num_pins == pins_at.get(node.node_id, 0), f"{place}: {node.num_pins=} but receipts differ"
        if not node.children and not node.num_pins:
            assert size and resident[-1], f"{place}: should have been pruned"
        num_busy = 0
        for key, child_id in node.children.items():
            child = cache.nodes[child_id]
            num_busy += is_busy(child)
            assert child.parent_id == node.node_id, f"{place}: child {child_id} has parent {child.parent_id}"
            assert child.start == node.start + size * cache.page_size, f"{place}: child {child_id} starts elsewhere"
            assert child.tokens.startswith(key), f"{place}: child {child_id} is under another key"
            stack.append(child_id)
        if cache.host_capacity:
            assert node.num_busy == num_busy, f"{place}: {node.num_busy=}, {num_busy} children are busy"
        yield node
    assert reached == set(cache.nodes.keys()), f"unreachable nodes: {set(cache.nodes.keys()) - reached}"


def _check_orders(cache: CacheState, nodes: list[Node]) -> None:
    leaves = {node.stamp: node.node_id for node in nodes if is_leaf(node)}
    assert dict(leaf_order.in_order(cache.leaves)) == leaves, "leaves and their order disagree"
    assert cache.leaves.num_leaves == len(leaves), "leaf count is wrong"
    if cache.host_capacity:
        device_leaves = {node.stamp: node.node_id for node in nodes if is_device_leaf(node)}
        assert dict(leaf_order.in_order(cache.device_leaves)) == device_leaves, "device leaves and their order disagree"
        assert cache.device_leaves.num_leaves == len(device_leaves), "device leaf count is wrong"


def _check_moves(cache: CacheState, nodes: list[Node]) -> None:
    """Checks that marks in the tree, the index of moving pages and the moves under way say the same."""
    expected = {}
    for move in cache.moves.values():
        for host_id, device_id in zip(move.host_ids.tolist(), move.device_ids.tolist(), strict=True):
            assert host_id not in expected, f"host page {host_id} moves twice"
            expected[host_id] = device_id if move.kind is MoveKind.LOAD else LEAVING
    assert set(cache.moving) == set(expected), "the index of moving pages and the moves under way disagree"
    marked = {}
    for node in nodes:
        for page in np.flatnonzero(moving_of(node) != STILL).tolist():
            host_id = int(node.page_ids[page])
            marked[host_id] = int(moving_of(node)[page])
            assert cache.moving.get(host_id) == node.node_id, f"host page {host_id} is indexed elsewhere"
    in_tree = {host_id: target for host_id, target in expected.items() if cache.moving[host_id] != NO_NODE}
    assert marked == in_tree, "pages are marked that do not move, or move and are not marked"


def _held(cache: CacheState, nodes: list[Node]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns the page ids that the tree holds on the device and on the host, copies included."""
    device = [node.page_ids[node.tiers == Tier.DEVICE] for node in nodes]
    host = [node.page_ids[node.tiers == Tier.HOST] for node in nodes]
    host += [node.copies[node.copies != NO_PAGE] for node in nodes if node.copies is not None]
    return device, host


def _check_pool(name: str, pool: PagePool, held: list[np.ndarray]) -> None:
    free = np.fromiter(pool.free_ids(), np.int32)
    counts = np.bincount(np.concatenate([*held, free]).astype(np.int64), minlength=pool.num_pages)
    wrong = np.flatnonzero(counts != 1).tolist()
    assert not wrong, f"{name} pages not in exactly one place: {[(page, int(counts[page])) for page in wrong[:8]]}"
    assert pool.num_free == len(free), f"{name} pool: {pool.num_free=}, {len(free)} ids free"


def check_idle(cache: CacheState) -> None:
    """Checks by counts what must hold when no request is left; cheap enough to do in service.

    Raises:
        AssertionError: a pin is out, or a page is neither free nor in the tree nor moving.
    """
    assert not cache.pins, f"{len(cache.pins)} pins are out, but no request is left"
    loading = sum(len(move.device_ids) for move in cache.moves.values() if move.kind is MoveKind.LOAD)
    held = cache.device.num_free + cache.num_device + loading
    assert held == cache.device.num_pages, (
        f"{cache.device.num_free} pages are free, {cache.num_device} in the tree and {loading} loading, "
        f"of {cache.device.num_pages}"
    )
    let_go = sum(node_id == NO_NODE for node_id in cache.moving.values())
    on_host = cache.host.num_free + cache.num_host + cache.num_copies + let_go
    assert on_host == cache.host.num_pages, (
        f"{cache.host.num_free} host pages are free, {cache.num_host + cache.num_copies} in the tree and {let_go} "
        f"moving, of {cache.host.num_pages}"
    )
