"""The cache state: a radix tree of histories with per-page residency, as a persistent value.

A node is a run of whole pages of tokens. Tokens and links say what a history is; `page_ids` and `tiers` say, page by
page, where its K/V is. Evicting, moving and refilling change residency only, so they never split a node: a split
happens on divergence, or where a pin, a touch or an insert ends inside a node (design rule 2).

Invariants, checked by `invariants.check_cache`:
    - Every node has K/V or a pin in its subtree; what has neither is pruned at once (rule 8). So "child subtrees with
      K/V or a pin" is simply "children".
    - The last page of a childless, unpinned node is resident. Such a node is a leaf, and only leaves are in `leaves`.
    - A pin counts on the node where it ends and protects the path above it. Walking up from a leaf therefore meets a
      pin as a node with pins of its own, or as a second child.

With a host tier a second order says what leaves the device next: `device_leaves` holds the nodes with device pages and
neither device pages nor pins below. `Node.num_busy` counts the children that stand in the way, so the order is kept up
where pages change their tier and never searched for.

Stamps are kept where a touch ended. A parent inherits its child's stamp when the child goes, which gives every node
the stamp it would have had if whole paths were stamped, without rewriting them. It inherits it as well when the child
has nothing on the device any more, and a touch that ends there stamps the device leaf above.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import immutables
import numpy as np

from penelope_jax import pages
from penelope_jax.leaf_order import LeafOrder
from penelope_jax.pages import NO_PAGE, PagePool, Tier

TOKEN_BYTES = 4
NO_OWNER = -1
NO_NODE = -1

# What `Node.moving` says of a page; from 0 up it is the device page that a host page is being loaded into.
STILL = -1
LEAVING = -2  # on the host, its copy from the device still under way
PLANNED = -3  # on the host once the plan that is being made has started; until then nothing is under way


class Node(NamedTuple):
    """A run of whole pages below its parent. Token positions are absolute in the history."""

    node_id: int
    parent_id: int  # NO_PAGE for the root of a namespace
    start: int  # position of its first token
    tokens: bytes  # i32 little endian, num_pages * page_size tokens
    page_ids: np.ndarray  # i32[num_pages], in the pool of the page's tier; NO_PAGE where missing
    tiers: np.ndarray  # i8[num_pages], of Tier
    num_resident: int  # pages in some tier
    num_host: int  # of these on the host
    owners: np.ndarray | None  # i64[num_pages]: request that fills a missing page, NO_OWNER elsewhere; None: nobody
    moving: np.ndarray | None  # i32[num_pages]: STILL, or how the page is moving; None: all still
    copies: np.ndarray | None  # i32[num_pages]: host page with the K/V of a device page, else NO_PAGE; None: no copies
    children: immutables.Map  # first page of tokens (bytes) -> node id
    num_pins: int  # pins that end at this node
    num_busy: int  # children with device pages or pins in their subtree; kept up only with a host tier
    stamp: int  # logical time of the last touch that ended here

    @property
    def num_pages(self) -> int:
        return len(self.page_ids)

    @property
    def num_device(self) -> int:
        return self.num_resident - self.num_host


class Span(NamedTuple):
    """Positions `[start, stop)` with one residency. `owner`: the request filling it, when missing; else NO_OWNER."""

    start: int
    stop: int
    tier: Tier
    owner: int


class Match(NamedTuple):
    """What a lookup found; a query that changed nothing.

    Attributes:
        spans: in order from position 0, adjacent; the last one is resident or being filled.
        stop: end of the last span, in tokens.
        node_ids: nodes of the path, root first; the match may end inside the last one.
        page_ids: i32[stop / page_size], in the pool of each page's tier; NO_PAGE where missing.
    """

    spans: tuple[Span, ...]
    stop: int
    node_ids: tuple[int, ...]
    page_ids: np.ndarray


class LookUp(NamedTuple):
    """A lookup and what it met on its way, which spares the next lookup of the same tokens most of its work.

    Attributes:
        path: nodes met after the namespace's root, as they were.
        last_pages: pages of the last one that match.
        found: the match.
    """

    path: tuple[Node, ...]
    last_pages: int
    found: Match


class Pin(NamedTuple):
    """Receipt of a pin: it protects the path to `node_id`, up to position `stop`."""

    pin_id: int
    node_id: int
    stop: int


@dataclasses.dataclass(frozen=True)
class CacheState:
    """Radix tree, pools and logical clock. Every old value stays valid.

    Attributes:
        page_size: tokens a page.
        device, host: pools of the two tiers. The host pool has `host_capacity` pages and the swap buffer.
        host_capacity: pages that may stay on the host; more only while pages change places.
        nodes: node id -> Node.
        roots: namespace (tenant salt and weights fingerprint, rule 12) -> node id of its root.
        leaves: evictable leaves by stamp.
        device_leaves: nodes whose pages leave the device next, by stamp; kept up only with a host tier.
        pins: pin id -> node id, of pins that are out.
        moving: host page id -> node id, of pages whose move is planned or under way; NO_NODE when the tree let go of it.
        moves: move id -> Move, of moves under way.
        clock: logical time of the last touch.
        num_resident: pages held by the tree, in both tiers.
        num_host: of these on the host.
        num_copies: host pages that are copies of device pages.
        copied: node id -> True, of nodes with such copies.
        next_node_id, next_pin_id, next_move_id: ids are never used twice.
    """

    page_size: int
    device: PagePool
    host: PagePool
    host_capacity: int = 0
    nodes: immutables.Map = immutables.Map()
    roots: immutables.Map = immutables.Map()
    leaves: LeafOrder = LeafOrder()
    device_leaves: LeafOrder = LeafOrder()
    pins: immutables.Map = immutables.Map()
    moving: immutables.Map = immutables.Map()
    moves: immutables.Map = immutables.Map()
    clock: int = 0
    num_resident: int = 0
    num_host: int = 0
    num_copies: int = 0
    copied: immutables.Map = immutables.Map()
    next_node_id: int = 0
    next_pin_id: int = 0
    next_move_id: int = 0

    @property
    def num_device(self) -> int:
        """Device pages held by the tree."""
        return self.num_resident - self.num_host


def make_cache(page_size: int, num_device_pages: int, num_host_pages: int = 0, num_swap_pages: int = 0) -> CacheState:
    """Returns an empty cache. Raises ValueError when the device pool would have no page."""
    if num_device_pages < 1:
        raise ValueError(f"{num_device_pages=} must be at least 1.")
    host = pages.make_pool(num_host_pages + num_swap_pages if num_host_pages else 0)
    return CacheState(page_size, pages.make_pool(num_device_pages), host, num_host_pages)


def is_leaf(node: Node) -> bool:
    """Whether eviction may start here: nothing below, no pin, and a last page that is not moving."""
    if node.children or node.num_pins or not len(node.page_ids):
        return False
    return node.moving is None or not under_way(node.moving[-1])


def is_device_leaf(node: Node) -> bool:
    """Whether pages leave the device from here: it has some, with no other device page and no pin below."""
    return node.num_resident > node.num_host and not node.num_pins and not node.num_busy


def is_busy(node: Node) -> bool:
    """Whether a device page or a pin is in this subtree."""
    return node.num_resident > node.num_host or node.num_pins > 0 or node.num_busy > 0


def under_way(moving):
    """Whether pages are moving, element by element of `Node.moving`: they stay where they are until the move ends."""
    return (moving == LEAVING) | (moving >= 0)


def held(node: Node) -> np.ndarray | None:
    """Returns bool[num_pages]: which pages stay because they are moving; None: none does."""
    return None if node.moving is None else under_way(node.moving)


def as_tokens(tokens) -> np.ndarray:
    """Returns `tokens` as a contiguous i32[n] array (the same one if it is one)."""
    return np.ascontiguousarray(tokens, dtype=np.int32)


def owners_of(node: Node) -> np.ndarray:
    """Returns i64[num_pages]: which request fills each page of a node."""
    return np.full(node.num_pages, NO_OWNER, np.int64) if node.owners is None else node.owners


def path_nodes(cache: CacheState, node_id: int) -> list[Node]:
    """Returns the nodes from the namespace's root (excluded) to `node_id`, in order."""
    path = []
    node = cache.nodes[node_id]
    while node.parent_id != NO_PAGE:
        path.append(node)
        node = cache.nodes[node.parent_id]
    path.reverse()
    return path


def path_page_ids(cache: CacheState, node_id: int) -> np.ndarray:
    """Returns i32[num_pages]: the device page ids of the path to `node_id`, NO_PAGE where not on the device."""
    return device_ids_along(path_nodes(cache, node_id))


def device_ids_along(path: Sequence[Node]) -> np.ndarray:
    """Returns i32[num_pages]: the device page ids of nodes, NO_PAGE where not on the device."""
    if not path:
        return np.empty(0, np.int32)
    ids = np.concatenate([node.page_ids for node in path])
    first = 0
    for node in path:
        if node.num_host:
            ids[first : first + node.num_pages][node.tiers != Tier.DEVICE] = NO_PAGE
        first += node.num_pages
    return ids


def moving_of(node: Node) -> np.ndarray:
    """Returns i32[num_pages]: `Node.moving`, STILL where nothing moves."""
    return np.full(node.num_pages, STILL, np.int32) if node.moving is None else node.moving


def owners_along(path: Sequence[Node]) -> np.ndarray:
    """Returns i64[num_pages]: which request fills each page of nodes."""
    owners = np.full(sum(node.num_pages for node in path), NO_OWNER, np.int64)
    first = 0
    for node in path:
        if node.owners is not None:
            owners[first : first + node.num_pages] = node.owners
        first += node.num_pages
    return owners
