"""The text of a cache and an engine: what a person reads in a scenario.

One line a node, indented under the node it continues: its pages, their ids, `@` the stamp of the last touch that ended
there, and who pins it. A page is its name where its K/V is on the device, `_` where it is missing, `_r1` where request
r1 will fill it; on the host its name is followed by a small h. Nothing here changes anything.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from penelope_jax.pages import NO_PAGE, Tier
from penelope_jax.radix_tree import NO_OWNER, TOKEN_BYTES, CacheState, Node, owners_of, path_nodes
from penelope_jax.state import EngineState, Request

HOST_MARK = "\N{LATIN SUBSCRIPT SMALL LETTER H}"


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
    for name, tier, owner in zip(page_names(cache, node, names), node.tiers.tolist(), owners_of(node).tolist()):
        if tier == Tier.DEVICE:
            marks.append(name)
        elif tier == Tier.HOST:
            marks.append(name + HOST_MARK)
        else:
            marks.append("_" if owner == NO_OWNER else f"_{names.request(owner)}")
    return marks


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
    """Returns the tree of every namespace, columns aligned, and a last line with free pages and the clock."""
    pins = _pin_names(cache, names)
    rows: list[tuple[str, str, str]] = []

    def visit(node: Node, depth: int) -> None:
        text = "  " * depth + " ".join(page_marks(cache, node, names))
        who = f"  pin {' '.join(pins[node.node_id])}" if node.node_id in pins else ""
        rows.append((text, page_numbers(node.page_ids.tolist()), f"@{node.stamp}{who}"))
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
    return [*lines, f"free {cache.device.num_free} of {cache.device.num_pages}, clock {cache.clock}"]


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
