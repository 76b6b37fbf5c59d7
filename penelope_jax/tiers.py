"""Moves between the tiers in the cache state: what is planned, what is under way, what has arrived.

Design rule 11. A page is in one tier. While it is loaded it stays on the host and its place on the device is reserved;
while it is demoted it is on the host already and its device page is free again. Either way it is pinned until the move
ends, page by page, whatever happens to the requests around it.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from penelope_jax import cost, pages
from penelope_jax.changed import changed
from penelope_jax.eviction import runs
from penelope_jax.moves import MAX_MOVE_PAGES, Move, MoveKind
from penelope_jax.pages import NO_PAGE, Tier, frozen
from penelope_jax.radix_tree import (
    LEAVING,
    NO_NODE,
    NO_OWNER,
    PLANNED,
    STILL,
    CacheState,
    Node,
    Pin,
    moving_of,
    owners_of,
    path_nodes,
)
from penelope_jax.tree_edit import TreeEdit


class Load(NamedTuple):
    """Host pages to be loaded for one request.

    Attributes:
        request_id: whose.
        prefetch: whether it still waits.
        num_swapped: pages whose place was made through the swap buffer.
        host_ids, device_ids: i32[n], from where to where.
    """

    request_id: int
    prefetch: bool
    num_swapped: int
    host_ids: np.ndarray
    device_ids: np.ndarray


def num_loading(cache: CacheState) -> int:
    """Returns how many host pages will be free when the loads under way have ended."""
    return sum(len(move.host_ids) for move in cache.moves.values() if move.kind is MoveKind.LOAD)


def num_moving(cache: CacheState) -> int:
    """Returns how many pages are under way."""
    return sum(len(move.host_ids) for move in cache.moves.values())


def still_on_host(node: Node) -> np.ndarray:
    """Returns bool[num_pages]: which pages are on the host and not moving."""
    on_host = node.tiers == Tier.HOST
    return on_host if node.moving is None else on_host & (node.moving == STILL)


def loadable(cache: CacheState, node_ids: Sequence[int], stop: int) -> int:
    """Returns how many pages below position `stop` of a path are on the host and not moving."""
    return _count(cache, node_ids, stop, still_on_host)


def to_load(cache: CacheState, node_ids: Sequence[int], stop: int) -> int:
    """Returns how many pages below position `stop` of a path are on the host or on their way there, not being loaded."""
    return _count(cache, node_ids, stop, _not_loading)


def _not_loading(node: Node) -> np.ndarray:
    on_host = node.tiers == Tier.HOST
    return on_host if node.moving is None else on_host & (node.moving < 0)


def _count(cache: CacheState, node_ids: Sequence[int], stop: int, wanted: Callable[[Node], np.ndarray]) -> int:
    """Returns how many pages below position `stop` are `wanted`, of those nodes of a path that have host pages."""
    number = 0
    for node_id in node_ids:
        node = cache.nodes[node_id]
        if node.num_host:
            num_pages = max(0, stop - node.start) // cache.page_size
            if node.moving is None and num_pages >= node.num_pages:
                number += node.num_host
            else:
                number += int(np.count_nonzero(wanted(node)[:num_pages]))
    return number


def load(
    cache: CacheState, node_ids: Sequence[int], stop: int, num_pages: int
) -> tuple[CacheState, np.ndarray, np.ndarray]:
    """Begins to load the first `num_pages` pages of a path that are on the host and not moving.

    Args:
        cache: the cache, with that many free device pages.
        node_ids: the path, root first.
        stop: end of the path, in tokens.
        num_pages: how many; at most `loadable`.

    Returns:
        The cache, and i32[num_pages] host ids and device ids, in the order of positions.
    """
    edit = TreeEdit(cache)
    device, device_ids = pages.take(cache.device, num_pages)
    host_ids: list[np.ndarray] = []
    done = 0
    for node_id in node_ids:
        node = edit.nodes[node_id]
        if not node.num_host or done == num_pages:
            continue
        wanted = np.flatnonzero(still_on_host(node)[: max(0, stop - node.start) // cache.page_size])
        wanted = wanted[: num_pages - done]
        if len(wanted):
            moving = moving_of(node).copy()
            moving[wanted] = device_ids[done : done + len(wanted)]
            edit.set_moving(node, moving)
            host_ids.append(node.page_ids[wanted])
            edit.list_moving(host_ids[-1], node_id)
            done += len(wanted)
    assert done == num_pages, f"{num_pages} pages are to be loaded, {done} are on the host"
    return edit.finish(device=device), np.concatenate(host_ids), device_ids


def start(
    cache: CacheState, demoted: dict[int, int], loads: Sequence[Load], *, blocking: bool = False
) -> tuple[CacheState, tuple[Move, ...], tuple[int, ...]]:
    """Makes moves of what a plan decided, demotions first.

    Args:
        cache: the cache.
        demoted: host id -> device id of planned demotions; those evicted or flushed since are left out.
        loads: what was begun with `load`.
        blocking: of the demotions, as in `Move`.

    Returns:
        The cache in which they are under way, the moves, and the host ids of the demotions that start.
    """
    edit = TreeEdit(cache)
    going = tuple(host_id for host_id in demoted if edit.moving.get(host_id, NO_NODE) != NO_NODE)
    for node_id in {edit.moving[host_id] for host_id in going}:
        node = edit.nodes[node_id]
        moving = moving_of(node).copy()
        moving[moving == PLANNED] = LEAVING
        edit.put(node._replace(moving=frozen(moving)))
    moves: list[Move] = []

    def add(kind: MoveKind, device_ids: np.ndarray, host_ids: np.ndarray, **more) -> None:
        moves.append(
            Move(
                move_id=cache.next_move_id + len(moves),
                kind=kind,
                device_ids=frozen(device_ids.astype(np.int32)),
                host_ids=frozen(host_ids.astype(np.int32)),
                **more,
            )
        )

    for part in _parts(len(going)):
        host_ids = np.array(going[part], np.int32)
        add(
            MoveKind.DEMOTE,
            np.array([demoted[host_id] for host_id in going[part]], np.int32),
            host_ids,
            blocking=blocking,
        )
    for item in loads:
        swapped = item.num_swapped
        for part in _parts(len(item.host_ids)):
            number = min(swapped, len(item.host_ids[part]))
            swapped -= number
            add(
                MoveKind.LOAD,
                item.device_ids[part],
                item.host_ids[part],
                request_id=item.request_id,
                prefetch=item.prefetch,
                num_swapped=number,
            )
    open_moves = cache.moves.update({move.move_id: move for move in moves})
    return edit.finish(moves=open_moves, next_move_id=cache.next_move_id + len(moves)), tuple(moves), going


def _parts(number: int) -> Iterable[slice]:
    return (slice(first, min(first + MAX_MOVE_PAGES, number)) for first in range(0, number, MAX_MOVE_PAGES))


def arrive(cache: CacheState, move_id: int, *, keep_copies: bool = False) -> CacheState:
    """Ends a move whose pages are where they were to go.

    Args:
        cache: the cache.
        move_id: the move.
        keep_copies: loaded pages keep their place on the host as well.

    Raises:
        ValueError: no such move is under way.
    """
    move = _move(cache, move_id)
    edit = TreeEdit(cache)
    free_host: list[int] = []
    free_device: list[int] = []
    by_node = _by_node(edit, move, free_host, free_device)
    for node_id, host_ids in by_node.items():
        node = edit.nodes[node_id]
        mask = np.isin(node.page_ids, host_ids) & (node.tiers == Tier.HOST)
        if move.kind is MoveKind.DEMOTE:
            edit.set_moving(node, np.where(mask, np.int32(STILL), moving_of(node)))
            continue
        targets, copies = moving_of(node), node.page_ids
        for first, last in runs(mask, node.num_pages):
            node = edit.set_pages(node, first, targets[first:last], Tier.DEVICE)
        if keep_copies:
            before = np.full(node.num_pages, NO_PAGE, np.int32) if node.copies is None else node.copies
            edit.set_copies(node, np.where(mask, copies, before))
        else:
            free_host.extend(host_ids)
    return _finish(edit, move, free_host, free_device)


def fail(cache: CacheState, move_id: int, heirs: tuple[tuple[int, Pin], ...]) -> tuple[CacheState, int]:
    """Ends a move that did not happen: its pages are lost and, where a request needs them, to be computed again.

    Args:
        cache: the cache.
        move_id: the move.
        heirs: admitted requests whose prompt is not done and their pins, oldest first; each lost page is given to the
            first whose path it is on (rule 10).

    Returns:
        The cache, and how many pages were lost.

    Raises:
        ValueError: no such move is under way.
    """
    move = _move(cache, move_id)
    edit = TreeEdit(cache)
    free_host: list[int] = []
    free_device: list[int] = []
    by_node = _by_node(edit, move, free_host, free_device)
    paths = [(heir, {node.node_id for node in path_nodes(cache, pin.node_id)}) for heir, pin in heirs]
    for node_id, host_ids in by_node.items():
        node = edit.nodes[node_id]
        mask = np.isin(node.page_ids, host_ids) & (node.tiers == Tier.HOST)
        if move.kind is MoveKind.LOAD:
            free_device.extend(moving_of(node)[mask].tolist())
        for first, last in runs(mask, node.num_pages):
            node = edit.set_pages(node, first, np.full(last - first, NO_PAGE, np.int32), Tier.MISSING)
        free_host.extend(host_ids)
        heir = next((heir for heir, ids in paths if node_id in ids), NO_OWNER)
        if heir != NO_OWNER:
            edit.set_owners(node, np.where(mask, heir, owners_of(node)))
    for node_id in by_node:
        if node_id in edit.nodes:
            edit.prune(node_id)
    return _finish(edit, move, free_host, free_device), sum(len(host_ids) for host_ids in by_node.values())


def let_go(cache: CacheState) -> CacheState:
    """Takes moving pages that no pin protects out of the tree; their ids are free when their moves end (a flush)."""
    edit = TreeEdit(cache)
    pinned = {node.node_id for node_id in cache.pins.values() for node in path_nodes(cache, node_id)}
    for node_id in {node_id for node_id in edit.moving.values() if node_id not in pinned and node_id != NO_NODE}:
        node = edit.nodes[node_id]
        mask = moving_of(node) != STILL
        edit.list_moving(node.page_ids[mask], NO_NODE)
        for first, last in runs(mask, node.num_pages):
            node = edit.set_pages(node, first, np.full(last - first, NO_PAGE, np.int32), Tier.MISSING)
        edit.prune(node_id)
    return edit.finish()


def drop_cheap(cache: CacheState, node_ids: Sequence[int], stop: int, linear_cost: float, load_units: float):
    """Drops host pages of a path that cost less to compute than to load: those at the front, if any.

    Args:
        cache: the cache.
        node_ids: the path, root first; the caller is about to claim it.
        stop: its end, in tokens.
        linear_cost: c of the cost formula, in units.
        load_units: what loading a page costs, in units.

    Returns:
        The cache in which they are missing.
    """
    size = cache.page_size
    if not load_units or cost.units(0, size, linear_cost) >= load_units:
        return cache
    edit = TreeEdit(cache)
    freed: list[np.ndarray] = []
    for node_id in node_ids:
        node = edit.nodes[node_id]
        if cost.units(node.start, node.start + size, linear_cost) >= load_units:
            break
        starts = node.start + np.arange(node.num_pages) * size
        cheap = (size * linear_cost + (2 * starts + size - 1) * size / 2 < load_units) & (starts < stop)
        mask = still_on_host(node) & cheap
        for first, last in runs(mask, node.num_pages):
            freed.append(node.page_ids[first:last])
            node = edit.set_pages(node, first, np.full(last - first, NO_PAGE, np.int32), Tier.MISSING)
    if not freed:
        return cache
    return edit.finish(host=pages.give_back(cache.host, np.concatenate(freed)))


def _move(cache: CacheState, move_id: int) -> Move:
    move = cache.moves.get(move_id)
    if move is None:
        raise ValueError(f"move {move_id} is not under way; those that are: {sorted(cache.moves)}.")
    return move


def _by_node(edit: TreeEdit, move: Move, free_host: list[int], free_device: list[int]) -> dict[int, list[int]]:
    """Takes a move's pages off the list of moving ones and returns them by node; those let go of are free."""
    by_node: dict[int, list[int]] = {}
    moving = edit.moving.mutate()
    for host_id, device_id in zip(move.host_ids.tolist(), move.device_ids.tolist(), strict=True):
        node_id = moving.pop(host_id)
        if node_id == NO_NODE:
            free_host.append(host_id)
            if move.kind is MoveKind.LOAD:
                free_device.append(device_id)
        else:
            by_node.setdefault(node_id, []).append(host_id)
    edit.moving = moving.finish()
    return by_node


def _finish(edit: TreeEdit, move: Move, free_host: list[int], free_device: list[int]) -> CacheState:
    cache = edit.cache
    return changed(
        edit.finish(),
        device=pages.give_back(cache.device, np.array(free_device, np.int32)),
        host=pages.give_back(cache.host, np.array(free_host, np.int32)),
        moves=cache.moves.delete(move.move_id),
    )
