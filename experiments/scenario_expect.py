"""What a scenario states by hand: `expect WHAT ...`, held against the state or against what the last command did."""

import dataclasses
from collections.abc import Callable

from penelope_jax import eviction, leaf_order
from penelope_jax.errors import InputError
from penelope_jax.events import Refused
from penelope_jax.experiments import render
from penelope_jax.experiments.scenario_cache import span_texts
from penelope_jax.experiments.scenario_engine import hits_text, segment_texts, update_text
from penelope_jax.experiments.scenario_language import Line, parts, plain, whole
from penelope_jax.experiments.scenario_world import World
from penelope_jax.leaf_order import LeafOrder
from penelope_jax.pages import Tier

NOTHING = "nothing"


class NotAsExpected(Exception):
    """An expectation does not hold; the message has both values."""


def _same(what: str, expected: str, found: str) -> None:
    if expected != found:
        raise NotAsExpected(f"expected {what} {expected}, found {found}.")


def _number(query: Callable[[World], int]) -> Callable[[World, Line, str, str], None]:
    def expect(world: World, line: Line, what: str, text: str) -> None:
        _same(what, str(whole(text, f"{line.place}: {what}")), str(query(world)))

    return expect


def _listed(query: Callable[[World, Line], list[str]], *, ordered: bool = True):
    def expect(world: World, line: Line, what: str, text: str) -> None:
        expected = [] if text == NOTHING else parts(text)
        found = [plain(item) for item in query(world, line)]
        if not ordered:
            expected, found = sorted(expected), sorted(found)
        _same(what, ", ".join(expected) or NOTHING, ", ".join(found) or NOTHING)

    return expect


def _words(query: Callable[[World], list[str]]):
    def expect(world: World, line: Line, what: str, text: str) -> None:
        _same(what, plain(text), plain(" ".join(query(world))) or NOTHING)

    return expect


def _contains(query: Callable[[World], str]):
    def expect(world: World, line: Line, what: str, text: str) -> None:
        found = query(world)
        if not text or text not in found:
            raise NotAsExpected(f"expected {what} {text!r}, found {found!r}." if found else f"there was no {what}.")

    return expect


def _hit(world: World) -> int:
    if world.outcome.found is None:
        raise NotAsExpected("nothing was looked up.")
    return sum(span.stop - span.start for span in world.outcome.found.spans if span.tier is not Tier.MISSING)


def _evictable(world: World) -> int:
    cache = world.state.cache
    return eviction.evict(cache, cache.num_resident, world.config.policy)[1].num_pages


def _order(world: World, order: LeafOrder) -> list[str]:
    cache, names = world.state.cache, world.names
    return [render.history(cache, node_id, names) for _, node_id in leaf_order.in_order(order)]


def _under_way(world: World) -> list[str]:
    return [str(move_id) for move_id in sorted(world.state.cache.moves.keys())]


def _tree(world: World, line: Line) -> list[str]:
    cache, names = world.state.cache, world.names
    ends = render.end_nodes(cache, line.options.get("salt", ""))
    return [render.history(cache, node.node_id, names) for node in ends]


def _plan(world: World, line: Line) -> list[str]:
    return [text for plan in world.outcome.plans if plan is not None for text in segment_texts(world, plan)]


def _refusal(world: World) -> str:
    return "".join(update.message for update in world.outcome.updates if isinstance(update, Refused))


def _hits(world: World, line: Line, what: str, text: str) -> None:
    name, _, expected = text.partition(" ")
    request_id = world.request_id(name, line.place)
    metrics = world.metrics.get(request_id)
    _same(f"{what} {name}", expected, hits_text(metrics) if metrics is not None else NOTHING)


def _count(world: World, line: Line, what: str, text: str) -> None:
    name, _, expected = text.partition(" ")
    counters = dataclasses.asdict(world.state.counters) | {"moved_pages": world.state.counters.moved_pages}
    if name not in counters:
        raise InputError(f"{line.place}: unknown counter {name!r}; known: {', '.join(counters)}.")
    _same(f"{what} {name}", str(whole(expected, f"{line.place}: {name}")), str(counters[name]))


def _row(world: World, line: Line, what: str, text: str) -> None:
    name, _, expected = text.partition(" ")
    request_id = world.request_id(name, line.place)
    rows = [request.page_table.tolist() for request in world.state.running if request.request_id == request_id]
    _same(f"{what} {name}", expected, render.page_numbers(rows[0]) or NOTHING if rows else NOTHING)


def _error(world: World, line: Line, what: str, text: str) -> None:
    _contains(lambda world: world.outcome.error)(world, line, what, text)
    world.outcome.error = ""


def _unchanged(world: World, line: Line, what: str, text: str) -> None:
    if world.outcome.changed:
        raise NotAsExpected("expected the state as before, but it has changed.")


EXPECTATIONS: dict[str, Callable[[World, Line, str, str], None]] = {
    # the state
    "free": _number(lambda world: world.state.cache.device.num_free),
    "resident": _number(lambda world: world.state.cache.num_resident),
    "evictable": _number(_evictable),
    "nodes": _number(lambda world: len(world.state.cache.nodes) - len(world.state.cache.roots)),
    "pins": _number(lambda world: len(world.state.cache.pins)),
    "tree": _listed(_tree, ordered=False),
    "order": _listed(lambda world, line: _order(world, world.state.cache.leaves)),
    "host_free": _number(lambda world: world.state.cache.host.num_free),
    "on_host": _number(lambda world: world.state.cache.num_host),
    "copies": _number(lambda world: world.state.cache.num_copies),
    "device_order": _listed(lambda world, line: _order(world, world.state.cache.device_leaves)),
    "under_way": _words(_under_way),
    "running": _words(lambda world: [world.requests[request.request_id] for request in world.state.running]),
    "waiting": _words(lambda world: [world.requests[request.request_id] for request in world.state.waiting]),
    "hits": _hits,
    "row": _row,
    "count": _count,
    # what the last command did
    "unchanged": _unchanged,
    "hit": _number(_hit),
    "matched": _listed(lambda world, line: [span_texts(world.outcome.found)] if world.outcome.found else []),
    "adopted": _number(lambda world: world.outcome.adopted),
    "returned": _number(lambda world: world.outcome.returned),
    "evicted": _words(lambda world: world.outcome.evicted),
    "short": _number(lambda world: world.outcome.short),
    "plan": _listed(_plan),
    "moves": _listed(lambda world, line: world.outcome.moves),
    "retracted": _words(lambda world: world.outcome.retracted),
    "updates": _listed(lambda world, line: [update_text(world, update) for update in world.outcome.updates]),
    "refusal": _contains(_refusal),
    "error": _error,
}


def expect(world: World, line: Line) -> None:
    """Checks one expectation.

    Raises:
        InputError: there is no such expectation.
        NotAsExpected: it does not hold.
    """
    what, _, text = line.text.partition(" ")
    if what not in EXPECTATIONS:
        raise InputError(f"{line.place}: unknown expectation {what!r}; known: {', '.join(EXPECTATIONS)}.")
    line.only(("salt",) if what == "tree" else ())
    EXPECTATIONS[what](world, line, what, text)
