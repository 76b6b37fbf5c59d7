"""What a cache holds, without pools, ids or requests: what a snapshot keeps of it, and a cache made of it again.

Rows number the resident pages of an outline, in its order of nodes. A cache made again may be smaller: what would be
evicted first is left out, what would be evicted last goes to the device, and the host takes what lies between.
"""

import dataclasses
from typing import NamedTuple

import immutables
import numpy as np

from penelope_jax import pages
from penelope_jax.config import Policy
from penelope_jax.eviction import evict, runs
from penelope_jax.pages import NO_PAGE, Tier, frozen
from penelope_jax.radix_tree import TOKEN_BYTES, CacheState, is_busy, make_cache
from penelope_jax.tree_edit import TreeEdit

NO_ROW = -1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outline:
    """Histories as nodes, each behind its parent.

    Attributes:
        page_size: tokens a page.
        namespaces: of roots.
        roots: i32[n], index of each node's namespace.
        parents: i32[n], index of the node above; -1: none.
        sizes: i32[n], pages of each node.
        ages: i32[n], ranks of their stamps; the larger, the later the node was touched.
        tokens: i32[sum(sizes) * page_size], of all nodes.
        rows: i32[sum(sizes)], of all nodes' pages; NO_ROW where missing.
    """

    page_size: int
    namespaces: tuple[str, ...]
    roots: np.ndarray
    parents: np.ndarray
    sizes: np.ndarray
    ages: np.ndarray
    tokens: np.ndarray
    rows: np.ndarray

    @property
    def num_rows(self) -> int:
        """Resident pages."""
        return int((self.rows != NO_ROW).sum())


class Sources(NamedTuple):
    """Where the K/V of an outline's rows is: i8[rows] of Tier, and i32[rows]."""

    tiers: np.ndarray
    page_ids: np.ndarray


class Rebuilt(NamedTuple):
    """A cache made of an outline.

    Attributes:
        cache: it.
        device_rows, device_ids: rows whose K/V goes to these device pages.
        host_rows, host_ids: rows whose K/V goes to these host pages.
        num_left_out: rows for which there was no room.
    """

    cache: CacheState
    device_rows: np.ndarray
    device_ids: np.ndarray
    host_rows: np.ndarray
    host_ids: np.ndarray
    num_left_out: int


def outline_of(cache: CacheState) -> tuple[Outline, Sources]:
    """Returns what a cache holds, and where.

    Raises:
        ValueError: a pin is out or a page is moving; such a cache holds what is not there yet.
    """
    if cache.pins or cache.moves:
        raise ValueError(f"{len(cache.pins)} pins are out and {len(cache.moves)} moves under way; both must be 0.")
    namespaces = tuple(sorted(cache.roots))
    nodes, roots, parents = [], [], []
    for index, namespace in enumerate(namespaces):
        stack = [(child, -1) for child in cache.nodes[cache.roots[namespace]].children.values()]
        while stack:
            node_id, parent = stack.pop()
            stack.extend((child, len(nodes)) for child in cache.nodes[node_id].children.values())
            nodes.append(cache.nodes[node_id])
            roots.append(index)
            parents.append(parent)
    # A node and the one above may have one stamp; the upper one is then the older.
    order = np.lexsort((np.arange(len(nodes)), [node.stamp for node in nodes])) if nodes else np.empty(0, np.int32)
    ages = np.empty(len(nodes), np.int32)
    ages[order] = np.arange(1, len(nodes) + 1)
    page_ids = np.concatenate([np.empty(0, np.int32), *(node.page_ids for node in nodes)])
    tiers = np.concatenate([np.empty(0, np.int8), *(node.tiers for node in nodes)])
    resident = page_ids != NO_PAGE
    outline = Outline(
        page_size=cache.page_size,
        namespaces=namespaces,
        roots=np.array(roots, np.int32),
        parents=np.array(parents, np.int32),
        sizes=np.array([node.num_pages for node in nodes], np.int32),
        ages=ages,
        tokens=np.frombuffer(b"".join(node.tokens for node in nodes), np.int32),
        rows=np.where(resident, np.cumsum(resident) - 1, NO_ROW).astype(np.int32),
    )
    return outline, Sources(tiers[resident], page_ids[resident])


def rebuild(outline: Outline, empty: CacheState, policy: Policy) -> Rebuilt:
    """Makes a cache of an outline.

    Args:
        outline: what it is to hold.
        empty: an empty cache of the same page size, with the pools that it is to use.
        policy: says what would be evicted first.

    Raises:
        ValueError: the outline contradicts itself; the message says where.
    """
    check_outline(outline)
    num_rows = outline.num_rows
    large = make_cache(outline.page_size, max(1, num_rows))
    pool, rows = pages.take(large.device, num_rows)  # their ids are the rows: they are handed out from 0 up
    everything = _placed(dataclasses.replace(large, device=pool), outline, {Tier.DEVICE: rows})
    order = _eviction_order(everything, policy)
    num_device = min(len(order), empty.device.num_free)
    num_host = min(len(order) - num_device, empty.host_capacity)
    first = len(order) - num_device - num_host
    host_rows, device_rows = order[first : first + num_host], order[first + num_host :]
    device, device_ids = pages.take(empty.device, num_device)
    host, host_ids = pages.take(empty.host, num_host)
    places = {tier: np.full(num_rows, NO_PAGE, np.int32) for tier in (Tier.DEVICE, Tier.HOST)}
    places[Tier.DEVICE][device_rows] = device_ids
    places[Tier.HOST][host_rows] = host_ids
    cache = _placed(dataclasses.replace(empty, device=device, host=host), outline, places)
    return Rebuilt(cache, device_rows, device_ids, host_rows, host_ids, first)


def check_outline(outline: Outline) -> None:
    """Raises ValueError unless an outline is one that `outline_of` could have given."""
    number = len(outline.sizes)
    for name in ("roots", "parents", "ages"):
        if len(getattr(outline, name)) != number:
            raise ValueError(f"{number} nodes have {len(getattr(outline, name))} {name}.")
    num_pages = int(outline.sizes.sum())
    if number and outline.sizes.min() < 1:
        raise ValueError(f"a node has {outline.sizes.min()} pages; at least 1.")
    if len(outline.rows) != num_pages or len(outline.tokens) != num_pages * outline.page_size:
        raise ValueError(f"{num_pages} pages have {len(outline.rows)} rows and {len(outline.tokens)} tokens.")
    if not ((outline.parents >= -1) & (outline.parents < np.arange(number))).all():
        raise ValueError("a node stands before its parent.")
    if not ((outline.roots >= 0) & (outline.roots < len(outline.namespaces))).all():
        raise ValueError(f"a node is of none of the {len(outline.namespaces)} namespaces.")
    below = outline.parents >= 0
    if (outline.roots[below] != outline.roots[outline.parents[below]]).any():
        raise ValueError("a node and its parent are of two namespaces.")
    if sorted(outline.ages.tolist()) != list(range(1, number + 1)):
        raise ValueError("two nodes have one age.")
    rows = outline.rows[outline.rows != NO_ROW]
    if (rows != np.arange(len(rows))).any():
        raise ValueError("rows are not numbered in order.")
    starts = np.cumsum(outline.sizes) - outline.sizes
    keys = set()
    for index, start in enumerate(starts.tolist()):
        first = outline.tokens[start * outline.page_size : (start + 1) * outline.page_size].tobytes()
        keys.add((int(outline.roots[index]), int(outline.parents[index]), first))
    if len(keys) < number:
        raise ValueError("two nodes below one begin alike.")


def _placed(cache: CacheState, outline: Outline, places: dict[Tier, np.ndarray]) -> CacheState:
    """Returns an empty cache with the outline's nodes, its rows at the page ids of `places`; NO_PAGE: not in that tier."""
    edit = TreeEdit(cache)
    ids: list[int] = []
    ends: list[int] = []
    position = 0
    page_bytes = outline.page_size * TOKEN_BYTES
    data = outline.tokens.tobytes()
    for root, parent, size, age in zip(
        outline.roots.tolist(), outline.parents.tolist(), outline.sizes.tolist(), outline.ages.tolist(), strict=True
    ):
        like = edit.root(outline.namespaces[root])
        above_id, start = (ids[parent], ends[parent]) if parent >= 0 else (like.node_id, 0)
        rows = outline.rows[position : position + size]
        tokens = data[position * page_bytes : (position + size) * page_bytes]
        node = like._replace(
            node_id=edit.new_id(),
            parent_id=above_id,
            start=start,
            tokens=tokens,
            page_ids=frozen(np.full(size, NO_PAGE, np.int32)),
            tiers=frozen(np.full(size, Tier.MISSING, np.int8)),
            children=immutables.Map(),
            num_resident=0,
            num_host=0,
            num_busy=0,
            stamp=age,
        )
        edit.put(node)
        above = edit.nodes[above_id]
        edit.put(above._replace(children=above.children.set(tokens[:page_bytes], node.node_id)))
        for tier, page_ids in places.items():
            found = np.where(rows == NO_ROW, NO_PAGE, page_ids[rows]) if len(page_ids) else np.full(size, NO_PAGE)
            for first, last in runs(found != NO_PAGE, size):
                edit.set_pages(edit.nodes[node.node_id], first, found[first:last].astype(np.int32), tier)
        ids.append(node.node_id)
        ends.append(start + size * outline.page_size)
        position += size
    edit.clock = max(edit.clock, len(ids))
    for node_id in reversed(ids):
        if node_id in edit.nodes:
            edit.prune(node_id)
        node = edit.nodes.get(node_id)
        if node is not None and edit.tiered and not is_busy(node):  # then the one above leaves the device as late
            above = edit.nodes[node.parent_id]
            edit.put(above._replace(stamp=max(above.stamp, node.stamp)))
    return edit.finish()


def _eviction_order(cache: CacheState, policy: Policy) -> np.ndarray:
    """Returns i32[n]: the page ids of a cache in one tier, in the order in which they would be evicted."""
    _, eviction = evict(cache, cache.num_resident, policy)
    order = [np.empty(0, np.int32)]
    assert not eviction.num_short, f"{eviction.num_short} pages of a cache without pins cannot be evicted"
    for node_id, start, stop in eviction.spans:
        node = cache.nodes[node_id]
        part = slice((start - node.start) // cache.page_size, (stop - node.start) // cache.page_size)
        order.append(node.page_ids[part])
    return np.concatenate(order)
