"""The text of a cache and an engine: what a person reads in a scenario.

One line a node, indented under the node it continues: its pages, their ids, `@` the stamp of the last touch that ended
there, and who pins it. A page is its name where its K/V is on the device, `_` where it is missing, `_r1` where request
r1 will fill it. On the host its name is followed by a small h; by an arrow down while it is on its way there, by an
arrow up while it is being loaded; by `+` and a small h where it is on the device and has a copy on the host.

Ids are those of device pages; `h3` is host page 3, `h3>5` is being loaded to device page 5, `5+h3` has its copy in host
page 3. Nothing here changes anything.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from penelope_jax.moves import Move, MoveKind
from penelope_jax.pages import NO_PAGE, Tier
from penelope_jax.radix_tree import (
    LEAVING,
    NO_OWNER,
    STILL,
    TOKEN_BYTES,
    CacheState,
    Node,
    moving_of,
    owners_of,
    path_nodes,
)
from penelope_jax.state import EngineState, Request

HOST_MARK = "\N{LATIN SUBSCRIPT SMALL LETTER H}"
DEMOTED_MARK = "\N{DOWNWARDS ARROW}"
LOADED_MARK = "\N{UPWARDS ARROW}"


def _token_list(tokens: np.ndarray) -> str:
    return f"[{' '.join(map(str, tokens.tolist()))}]"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Names:
    """How to call things.

    Attributes:
        page: names a page by its tokens, i32[page_size].
        request: names a request by its id.
        pins: names of pins by their id; others are called by their number.
    """

    page: Callable[[np.ndarray], str] = _token_list
    request: Callable[[int], str] = str
    pins: Mapping[int, str] = dataclasses.field(default_factory=dict)


def page_names(cache: CacheState, node: Node, names: Names) -> list[str]:
    """Returns the name of each page of a node, wherever its K/V is."""
    size = cache.page_size * TOKEN_BYTES
    return [
        names.page(np.frombuffer(node.tokens[first : first + size], np.int32))
        for first in range(0, len(node.tokens), size)
    ]


def page_marks(cache: CacheState, node: Node, names: Names) -> list[str]:
    """Returns the mark of each page of a node: its name, or what is said of it when it is not on the device."""
    marks = []
    copies = _copies_of(node)
    for page, (name, tier) in enumerate(zip(page_names(cache, node, names), node.tiers.tolist())):
        if tier == Tier.DEVICE:
            marks.append(name if copies[page] == NO_PAGE else f"{name}+{HOST_MARK}")
        elif tier == Tier.HOST:
            moving = moving_of(node)[page]
            marks.append(name + (HOST_MARK if moving == STILL else DEMOTED_MARK if moving == LEAVING else LOADED_MARK))
        else:
            owner = int(owners_of(node)[page])
            marks.append("_" if owner == NO_OWNER else f"_{names.request(owner)}")
    return marks


def _copies_of(node: Node) -> list[int]:
    return [NO_PAGE] * node.num_pages if node.copies is None else node.copies.tolist()


def node_numbers(node: Node) -> str:
    """Returns the ids of a node's pages in both tiers, `-` where there is none."""
    if not node.num_host and node.copies is None:
        return page_numbers(node.page_ids.tolist())
    numbers = []
    rows = zip(node.page_ids.tolist(), node.tiers.tolist(), moving_of(node).tolist(), _copies_of(node))
    for page_id, tier, moving, copy in rows:
        number = page_numbers([page_id])
        if tier == Tier.HOST:
            number = f"h{page_id}" + (f">{moving}" if moving >= 0 else "")
        elif copy != NO_PAGE:
            number += f"+h{copy}"
        numbers.append(number)
    return " ".join(numbers)


def page_numbers(page_ids: Iterable[int]) -> str:
    """Returns page ids, `-` where there is none."""
    return " ".join("-" if page_id == NO_PAGE else str(page_id) for page_id in page_ids)


def history(cache: CacheState, node_id: int, names: Names) -> str:
    """Returns the marks of the path from the root to a node."""
    return " | ".join(" ".join(page_marks(cache, node, names)) for node in path_nodes(cache, node_id))


def _first_id(cache: CacheState, node_id: int) -> int:
    """Returns the lowest node id of a subtree, which a split does not change: its upper half gets a new one."""
    children = cache.nodes[node_id].children.values()
    return min([node_id, *(_first_id(cache, child_id) for child_id in children)])


def _children(cache: CacheState, node: Node) -> list[Node]:
    """Returns the children of a node in the order in which they came."""
    return [cache.nodes[id_] for id_ in sorted(node.children.values(), key=lambda id_: _first_id(cache, id_))]


def end_nodes(cache: CacheState, namespace: str = "") -> list[Node]:
    """Returns the last node of every history of a namespace, in the order of the tree's text."""
    if namespace not in cache.roots:
        return []
    ends, stack = [], [cache.nodes[cache.roots[namespace]]]
    while stack:
        node = stack.pop()
        stack.extend(reversed(_children(cache, node)))
        if not node.children and node.num_pages:
            ends.append(node)
    return ends


def _pin_names(cache: CacheState, names: Names) -> dict[int, list[str]]:
    at_node: dict[int, list[str]] = {}
    for pin_id in sorted(cache.pins.keys()):
        at_node.setdefault(cache.pins[pin_id], []).append(names.pins.get(pin_id, f"#{pin_id}"))
    return at_node


def tree_lines(cache: CacheState, names: Names) -> list[str]:
    """Returns the tree of every namespace, columns aligned, moves under way, and a line with free pages and the clock."""
    pins = _pin_names(cache, names)
    rows: list[tuple[str, str, str]] = []

    def visit(node: Node, depth: int) -> None:
        text = "  " * depth + " ".join(page_marks(cache, node, names))
        who = f"  pin {' '.join(pins[node.node_id])}" if node.node_id in pins else ""
        rows.append((text, node_numbers(node), f"@{node.stamp}{who}"))
        for child in _children(cache, node):
            visit(child, depth + 1)

    for namespace in sorted(cache.roots.keys()):
        root = cache.nodes[cache.roots[namespace]]
        if namespace:
            rows.append((f"salt {namespace}", "", ""))
        if root.node_id in pins:
            rows.append(("(root)", "", f"pin {' '.join(pins[root.node_id])}"))
        for child in _children(cache, root):
            visit(child, bool(namespace))
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    lines = [f"{text:<{widths[0]}}   {ids:<{widths[1]}}   {rest}".rstrip() for text, ids, rest in rows]
    lines.extend(
        f"under way: {move_text(cache, cache.moves[move_id], names)}" for move_id in sorted(cache.moves.keys())
    )
    host = ""
    if cache.host_capacity:
        swap = cache.host.num_pages - cache.host_capacity
        host = f", host {cache.host.num_free} of {cache.host_capacity}+{swap}"
    return [*lines, f"free {cache.device.num_free} of {cache.device.num_pages}{host}, clock {cache.clock}"]


def moved_pages(cache: CacheState, move: Move, names: Names) -> list[str]:
    """Returns the names of the pages of a move under way, `?` where the tree has let go of one."""
    pages = []
    for host_id in move.host_ids.tolist():
        node = cache.nodes.get(cache.moving[host_id])
        if node is None:
            pages.append("?")
        else:
            (page,) = np.flatnonzero((node.page_ids == host_id) & (node.tiers == Tier.HOST)).tolist()
            pages.append(page_names(cache, node, names)[page])
    return pages


def move_text(cache: CacheState, move: Move, names: Names) -> str:
    """Returns a move under way in words: its number, its pages, whom it is for, and from where to where it goes."""
    device = page_numbers(move.device_ids.tolist())
    host = " ".join(f"h{host_id}" for host_id in move.host_ids.tolist())
    demotes = move.kind is MoveKind.DEMOTE
    route = f"{device} to {host}" if demotes else f"{host} to {device}"
    return f"move {move.move_id} {move_summary(cache, move, names)}, {route}"


def move_summary(cache: CacheState, move: Move, names: Names) -> str:
    """Returns what a move under way does: `demote A B`, `load C for r1 swapped 1`, `prefetch C for r2`."""
    words = [move.kind.value if not move.prefetch else "prefetch", *moved_pages(cache, move, names)]
    if move.request_id >= 0:
        words.append(f"for {names.request(move.request_id)}")
    if move.num_swapped:
        words.append(f"swapped {move.num_swapped}")
    return " ".join(words)


def _request_line(state: EngineState, request: Request, names: Names) -> str:
    size = state.config.page_size
    name = names.request(request.request_id)
    outputs = f", {request.output_len} of {request.max_tokens} outputs" if request.output_len else ""
    if request in state.waiting:
        return f"{name} waits: prompt {len(request.prompt)}{outputs}"
    tree, own = np.split(request.page_table, [request.path_stop // size])
    flying = f", {request.num_in_flight} in flight" if request.num_in_flight else ""
    leaving = f", leaves ({request.leaving})" if request.leaving else ""
    row = f"{page_numbers(tree.tolist())} | {page_numbers(own.tolist())}".strip()
    return f"{name} runs: prompt {len(request.prompt)}, next {request.next_pos}{outputs}{flying}{leaving}, row {row}"


def engine_lines(state: EngineState, names: Names) -> list[str]:
    """Returns one line for each request and one for the steps in flight.

    A row shows pages of the tree, then `|`, then pages of the request's own.
    """
    lines = [_request_line(state, request, names) for request in (*state.running, *state.waiting)]
    if state.in_flight:
        lines.append(f"in flight: step {', '.join(str(flight.step) for flight in state.in_flight)}")
    return lines
