"""Lookups: what the cache holds of some tokens. They write nothing."""

import itertools
from collections.abc import Sequence

import numpy as np

from penelope_jax.pages import NO_PAGE, Tier, frozen
from penelope_jax.radix_tree import (
    NO_OWNER,
    TOKEN_BYTES,
    CacheState,
    LookUp,
    Match,
    Node,
    Span,
    as_tokens,
    owners_along,
)


def walk(
    cache: CacheState, tokens: np.ndarray, namespace: str, num_pages: int, path: list[Node] | None = None
) -> tuple[list[Node], int]:
    """Follows tokens down the tree.

    Args:
        cache: the cache.
        tokens: i32[n], contiguous, at least `num_pages` pages of them.
        namespace: the namespace.
        num_pages: pages to follow at most.
        path: begin behind these nodes of this cache, which match whole; adopted.

    Returns:
        The nodes met after the namespace's root, and how many pages of the last one match (all pages of the others do).
    """
    path = path or []
    root_id = cache.roots.get(namespace)
    if root_id is None:
        return path, 0
    nodes = cache.nodes
    page_bytes = cache.page_size * TOKEN_BYTES
    node = path[-1] if path else nodes[root_id]
    position, limit = node.start * TOKEN_BYTES + len(node.tokens), num_pages * page_bytes
    if position >= limit:
        return path, path[-1].num_pages if path else 0
    # Most lookups of a queue end where they begin: all tokens as bytes are wanted only where a page goes on.
    key = tokens[position // TOKEN_BYTES : position // TOKEN_BYTES + cache.page_size].tobytes()
    if key not in node.children:
        return path, path[-1].num_pages if path else 0
    data = tokens.tobytes()
    while position < limit:
        child_id = node.children.get(data[position : position + page_bytes])
        if child_id is None:
            break
        node = nodes[child_id]
        path.append(node)
        size = len(node.tokens)
        if position + size > limit or not data.startswith(node.tokens, position):
            rest = data[position : min(position + size, limit)]
            return path, common_pages(node.tokens, rest, cache.page_size)
        position += size
    return path, path[-1].num_pages if path else 0


def match(cache: CacheState, tokens, namespace: str = "", max_pages: int | None = None) -> Match:
    """Finds the longest known path of `tokens`, through holes (rule 1). Writes nothing.

    Trailing missing pages that nobody is filling are not part of the match.

    Args:
        cache: the cache.
        tokens: i32[n].
        namespace: the namespace.
        max_pages: pages to match at most; None: all whole pages of `tokens`.

    Returns:
        The match, whole pages only.
    """
    return look_up(cache, tokens, namespace, max_pages).found


def look_up(
    cache: CacheState, tokens, namespace: str = "", max_pages: int | None = None, before: LookUp | None = None
) -> LookUp:
    """As `match`, for one who will look up the same tokens again: a queue is looked up in every step.

    Args:
        cache: the cache.
        tokens, namespace, max_pages: as in `match`.
        before: what an earlier value of this cache had of them, with the same `max_pages`. Only what changed since is
            looked at.

    Returns:
        What is found now; `before` itself when that is the same, and its nodes have the same pages.
    """
    if before is not None and _unchanged(cache, before.path):
        return before
    tokens = as_tokens(tokens)
    limit = len(tokens) // cache.page_size
    limit = limit if max_pages is None else min(limit, max_pages)
    path = _same_way(cache, before.path) if before is not None else []
    if before is not None and path and len(path) == len(before.path) and before.last_pages < path[-1].num_pages:
        last_pages = before.last_pages  # it ended inside a node, which has the same tokens
    else:
        path, last_pages = walk(cache, tokens, namespace, limit, path)
    if before is not None and last_pages == before.last_pages and _all_same(path, before.path):
        return before
    return LookUp(tuple(path), last_pages, _found(path, last_pages, cache.page_size))


def _unchanged(cache: CacheState, before: Sequence[Node]) -> bool:
    """Whether an earlier path that is not empty has the same pages, and nothing new goes on from its end."""
    get = cache.nodes.get
    node = old = None
    for old in before:
        node = get(old.node_id)
        if node is not old and (node is None or not _same_pages(node, old)):
            return False
    return old is not None and node is not None and node.children is old.children


def _same_way(cache: CacheState, before: Sequence[Node]) -> list[Node]:
    """Returns the nodes of an earlier path as they are now, as far as they lead the same way."""
    path: list[Node] = []
    get = cache.nodes.get
    for old in before:
        node = get(old.node_id)
        # Ids are never used again, and a node that is cut has new tokens.
        if node is None or node.tokens is not old.tokens or node.parent_id != old.parent_id:
            break
        path.append(node)
    return path


def _same_pages(node: Node, old: Node) -> bool:
    """Whether a node has the same pages as before, on the same way; what else may change makes no difference."""
    return node is old or (
        node.tokens is old.tokens
        and node.parent_id == old.parent_id
        and node.page_ids is old.page_ids
        and node.tiers is old.tiers
        and node.owners is old.owners
    )


def _all_same(path: Sequence[Node], before: Sequence[Node]) -> bool:
    return len(path) == len(before) and all(_same_pages(node, old) for node, old in zip(path, before, strict=True))


def _found(path: Sequence[Node], last_pages: int, page_size: int) -> Match:
    """Returns what a path holds, of which `last_pages` pages of its last node match."""
    if not path:
        return Match((), 0, (), frozen(np.empty(0, np.int32)))
    page_ids = np.concatenate([*(node.page_ids for node in path[:-1]), path[-1].page_ids[:last_pages]])
    tiers = np.concatenate([*(node.tiers for node in path[:-1]), path[-1].tiers[:last_pages]])
    owners = owners_along(path)[: len(page_ids)] if any(node.owners is not None for node in path) else None
    known = page_ids != NO_PAGE if owners is None else (page_ids != NO_PAGE) | (owners != NO_OWNER)
    if not known[-1]:
        size = int(known.nonzero()[0][-1]) + 1 if known.any() else 0
        page_ids, tiers, owners = page_ids[:size], tiers[:size], None if owners is None else owners[:size]
    stop = len(page_ids) * page_size
    if path[-1].start >= stop:
        path = [node for node in path if node.start < stop]
    node_ids = tuple([node.node_id for node in path])
    return Match(_spans(tiers, owners, page_size), stop, node_ids, frozen(page_ids.copy()))


def _spans(tiers: np.ndarray, owners: np.ndarray | None, page_size: int) -> tuple[Span, ...]:
    if len(tiers) == 0:
        return ()
    changes = tiers[1:] != tiers[:-1]
    if owners is not None:
        changes = changes | (owners[1:] != owners[:-1])
    edges = [0, *(changes.nonzero()[0] + 1).tolist(), len(tiers)]
    return tuple(
        Span(
            start * page_size,
            stop * page_size,
            Tier(int(tiers[start])),
            NO_OWNER if owners is None else int(owners[start]),
        )
        for start, stop in itertools.pairwise(edges)
    )


def common_pages(left: bytes, right: bytes, page_size: int) -> int:
    """Returns how many whole pages two runs of tokens have in common from their start."""
    count = min(len(left), len(right)) // TOKEN_BYTES
    differs = np.frombuffer(left, np.int32, count) != np.frombuffer(right, np.int32, count)
    first = int(differs.argmax()) if count else 0
    return (first if count and differs[first] else count) // page_size
