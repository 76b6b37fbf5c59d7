"""What happens to a history in the cache: it is inserted, touched, pinned, claimed by a request, and refilled.

Every function takes a cache and returns the next one. Page ids passed in belong to the caller until they are adopted.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from penelope_jax.eviction import runs
from penelope_jax.lookup import walk
from penelope_jax.pages import NO_PAGE, Tier, frozen
from penelope_jax.radix_tree import (
    NO_OWNER,
    TOKEN_BYTES,
    CacheState,
    Match,
    Node,
    Pin,
    as_tokens,
    owners_of,
    path_nodes,
)
from penelope_jax.tree_edit import TreeEdit


class Insertion(NamedTuple):
    """What an insert did with the caller's pages (rule 4).

    Attributes:
        adopted: i32[a], now the tree's.
        refused: i32[r], the tree had these positions already; still the caller's to free.
        node_id: node at the end of the history.
    """

    adopted: np.ndarray
    refused: np.ndarray
    node_id: int


class Claim(NamedTuple):
    """What a request got at admission.

    Attributes:
        pin: protects the request's whole path.
        owned: spans `[start, stop)`, in tokens, that this request must fill.
    """

    pin: Pin
    owned: tuple[tuple[int, int], ...]


def _end_node(edit: TreeEdit, tokens: np.ndarray, num_pages: int, namespace: str) -> Node:
    """Makes the path of `tokens[: num_pages * page_size]` end at a node border; new pages are missing."""
    cache = edit.cache
    root = edit.root(namespace)
    if num_pages == 0:
        return root
    path, last_pages = walk(cache, tokens, namespace, num_pages)
    page_bytes = cache.page_size * TOKEN_BYTES
    if not path:
        node = root
    elif last_pages < path[-1].num_pages:
        node = edit.split(path[-1].node_id, last_pages) if last_pages else edit.nodes[path[-1].parent_id]
    else:
        node = edit.nodes[path[-1].node_id]
    start = node.start + node.num_pages * cache.page_size
    missing = num_pages - start // cache.page_size
    if missing == 0:
        return node
    text = tokens[start : num_pages * cache.page_size].tobytes()
    child = edit.put(
        Node(
            node_id=edit.new_id(),
            parent_id=node.node_id,
            start=start,
            tokens=text,
            page_ids=frozen(np.full(missing, NO_PAGE, np.int32)),
            tiers=frozen(np.full(missing, Tier.MISSING, np.int8)),
            num_resident=0,
            num_host=0,
            owners=None,
            moving=None,
            copies=None,
            children=type(node.children)(),
            num_pins=0,
            num_busy=0,
            stamp=edit.tick(),
        )
    )
    parent = edit.nodes[node.node_id]
    edit.put(parent._replace(children=parent.children.set(text[:page_bytes], child.node_id)))
    return child


def insert(
    cache: CacheState, tokens, page_ids: np.ndarray, start: int = 0, namespace: str = ""
) -> tuple[CacheState, Insertion]:
    """Inserts the pages of `tokens[start : start + len(page_ids) * page_size]` and touches the history.

    A missing page is adopted wherever it stands, so a refilled hole is adopted like any other page.

    Args:
        cache: the cache.
        tokens: i32[n], the history from its first token; at least to the end of the pages.
        page_ids: i32[p], the caller's pages with the K/V, in order.
        start: position of the first page; a multiple of the page size.
        namespace: the namespace.

    Returns:
        The cache, and which pages it adopted and refused.
    """
    tokens = as_tokens(tokens)
    size = cache.page_size
    num_pages = start // size + len(page_ids)
    if start % size or num_pages * size > len(tokens):
        raise ValueError(f"{len(page_ids)} pages from {start=} do not fit {len(tokens)} tokens of {size} a page.")
    edit = TreeEdit(cache)
    end = _end_node(edit, tokens, num_pages, namespace)
    adopted: list[np.ndarray] = []
    refused: list[np.ndarray] = []
    node = edit.nodes[end.node_id]
    while node.parent_id != NO_PAGE and node.start + node.num_pages * size > start:
        first = max(0, (start - node.start) // size)
        offset = (node.start - start) // size + first
        given = np.asarray(page_ids[offset : offset + node.num_pages - first], np.int32)
        missing = node.page_ids[first:] == NO_PAGE
        adopted.append(given[missing])
        refused.append(given[~missing])
        if missing.any():
            _fill_where(edit, node, first, missing, given)
        node = edit.nodes[node.parent_id]
    end = edit.stamp(edit.nodes[end.node_id]) if num_pages else end
    edit.prune(end.node_id)
    empty = np.empty(0, np.int32)
    return edit.finish(), Insertion(
        np.concatenate(adopted[::-1]) if adopted else empty,
        np.concatenate(refused[::-1]) if refused else empty,
        end.node_id,
    )


def _fill_where(edit: TreeEdit, node: Node, first: int, missing: np.ndarray, given: np.ndarray) -> None:
    """Fills the missing pages of `node` from page `first` on, run by run."""
    for begin, end in runs(missing, len(missing)):
        node = edit.set_pages(node, first + begin, given[begin:end], Tier.DEVICE)


def _end_of_match(edit: TreeEdit, found: Match) -> Node:
    """Returns the node where a match ends, split there if it ends inside one."""
    node = edit.nodes[found.node_ids[-1]]
    while node.start >= found.stop:  # split since: the half that keeps the id begins behind the match
        node = edit.nodes[node.parent_id]
    num_pages = (found.stop - node.start) // edit.cache.page_size
    return edit.split(node.node_id, num_pages) if num_pages < node.num_pages else node


def touch(cache: CacheState, found: Match) -> CacheState:
    """Stamps what matched, and only that (rule 6). The match must be of this cache value."""
    return touch_all(cache, (found,))


def touch_all(cache: CacheState, matches: Iterable[Match]) -> CacheState:
    """Touches one match after the other, all of this cache value."""
    edit = TreeEdit(cache)
    for found in matches:
        if found.node_ids:
            edit.stamp(_end_of_match(edit, found))
    return edit.finish() if edit.clock != cache.clock else cache


def pin(cache: CacheState, found: Match, namespace: str = "") -> tuple[CacheState, Pin]:
    """Protects the matched path from eviction. The match must be of this cache value.

    Returns:
        The cache, and the receipt that `unpin` wants back.
    """
    edit = TreeEdit(cache)
    node = _end_of_match(edit, found) if found.node_ids else edit.root(namespace)
    return _pin_node(edit, node)


def _pin_node(edit: TreeEdit, node: Node) -> tuple[CacheState, Pin]:
    edit.put(node._replace(num_pins=node.num_pins + 1))
    cache = edit.cache
    receipt = Pin(cache.next_pin_id, node.node_id, node.start + node.num_pages * cache.page_size)
    return (
        edit.finish(pins=cache.pins.set(receipt.pin_id, node.node_id), next_pin_id=cache.next_pin_id + 1),
        receipt,
    )


def unpin(cache: CacheState, receipt: Pin) -> CacheState:
    """Gives a pin back. Pages nobody fills any more at the end of the path are pruned.

    Raises:
        ValueError: this pin is not out (given back twice, or never given).
    """
    if cache.pins.get(receipt.pin_id) != receipt.node_id:
        raise ValueError(f"pin {receipt.pin_id} on node {receipt.node_id} is not out; unpin balances one pin.")
    edit = TreeEdit(cache)
    node = edit.nodes[receipt.node_id]
    edit.put(node._replace(num_pins=node.num_pins - 1))
    edit.prune(node.node_id)
    return edit.finish(pins=cache.pins.delete(receipt.pin_id))


def claim(cache: CacheState, tokens, num_pages: int, owner: int, namespace: str = "") -> tuple[CacheState, Claim]:
    """Gives a request its path: made, touched, pinned, and every missing page nobody fills is now its own (rule 10).

    All at once, so two requests can never wait for each other.

    Args:
        cache: the cache.
        tokens: i32[n], the prompt.
        num_pages: pages of the path.
        owner: the request, >= 0.
        namespace: the namespace.
    """
    tokens = as_tokens(tokens)
    if num_pages * cache.page_size > len(tokens):
        raise ValueError(f"{num_pages=} of {cache.page_size} tokens exceed the {len(tokens)} tokens given.")
    edit = TreeEdit(cache)
    end = _end_node(edit, tokens, num_pages, namespace)
    owned: list[tuple[int, int]] = []
    node = edit.nodes[end.node_id]
    while node.parent_id != NO_PAGE:
        if node.num_resident < node.num_pages:
            owners = owners_of(node)
            free = (node.page_ids == NO_PAGE) & (owners == NO_OWNER)
            if free.any():
                edit.set_owners(node, np.where(free, owner, owners))
                owned.extend(reversed(_runs(free, node.start, cache.page_size)))
        node = edit.nodes[node.parent_id]
    if num_pages:
        edit.stamp(edit.nodes[end.node_id])
    after, receipt = _pin_node(edit, edit.nodes[end.node_id])
    return after, Claim(receipt, tuple(_joined(owned[::-1])))


def _runs(mask: np.ndarray, start: int, page_size: int) -> list[tuple[int, int]]:
    return [(first * page_size + start, last * page_size + start) for first, last in runs(mask, len(mask))]


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, stop in spans:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


def fill(cache: CacheState, receipt: Pin, start: int, page_ids: np.ndarray, owner: int) -> CacheState:
    """Makes missing pages of a pinned path resident; the step that writes them is planned.

    Args:
        cache: the cache.
        receipt: the owner's pin.
        start: position of the first page.
        page_ids: i32[p], taken from the device pool; adopted.
        owner: the request; it must own every one of these pages.

    Raises:
        ValueError: a page is resident or somebody else's.
    """
    size = cache.page_size
    stop = start + len(page_ids) * size
    edit = TreeEdit(cache)
    node = edit.nodes[receipt.node_id]
    while node.parent_id != NO_PAGE and node.start + node.num_pages * size > start:
        parent_id = node.parent_id
        if node.start < stop:
            first = max(0, (start - node.start) // size)
            last = min(node.num_pages, (stop - node.start) // size)
            offset = (node.start - start) // size
            given = page_ids[offset + first : offset + last]
            if node.owners is None or (node.owners[first:last] != owner).any():
                raise ValueError(f"request {owner} fills [{start}, {stop}) but does not own all of it.")
            edit.set_pages(node, first, given, Tier.DEVICE)
        node = edit.nodes[parent_id]
    return edit.finish()


def split_at(cache: CacheState, receipt: Pin, position: int) -> CacheState:
    """Makes a node border at `position` of a pinned path: one insert ends there (rule 7, the baselines' node size)."""
    for node in reversed(path_nodes(cache, receipt.node_id)):
        if node.start < position:
            num_pages = (position - node.start) // cache.page_size
            if num_pages >= node.num_pages:
                return cache
            edit = TreeEdit(cache)
            edit.split(node.node_id, num_pages)
            return edit.finish()
    return cache


def pass_on(cache: CacheState, receipt: Pin, owner: int, heirs: tuple[tuple[int, Pin], ...]) -> CacheState:
    """Takes a leaving request's unfilled pages and gives each to the first heir whose path needs it (rule 10).

    Args:
        cache: the cache.
        receipt: the leaving request's pin.
        owner: the leaving request.
        heirs: admitted requests and their pins, oldest first.
    """
    edit = TreeEdit(cache)
    paths = [(heir, {node.node_id for node in path_nodes(cache, pin_.node_id)}) for heir, pin_ in heirs]
    for node in path_nodes(cache, receipt.node_id):
        if node.owners is not None and (node.owners == owner).any():
            heir = next((heir for heir, ids in paths if node.node_id in ids), NO_OWNER)
            edit.set_owners(node, np.where(node.owners == owner, heir, node.owners))
    return edit.finish()
