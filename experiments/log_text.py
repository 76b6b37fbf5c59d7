"""The text of a past state: its requests and its tree as spans of histories, and what changed between two states."""

import collections
import dataclasses
import zlib
from collections.abc import Iterator, Sequence

import numpy as np

from penelope_jax import tiers
from penelope_jax.experiments import log_conversations, log_query, render
from penelope_jax.experiments.log_conversations import Conversations
from penelope_jax.experiments.log_query import Occurrence
from penelope_jax.log_replay import Moment
from penelope_jax.lookup import walk
from penelope_jax.moves import Move, MoveKind
from penelope_jax.pages import NO_PAGE, Tier
from penelope_jax.radix_tree import LEAVING, NO_OWNER, CacheState, Node, moving_of, owners_of
from penelope_jax.state import EngineState, Request, private_page_ids

_OF_MOVES = ("demoted_pages", "loaded_pages", "prefetched_pages", "swapped_loads", "lost_pages")
_ON_THE_WAY = {0: "", 1: " (arriving)", 2: " (loading)"}


def plan_lines(moment: Moment, conversations: Conversations) -> list[str]:
    """Returns what a plan computes, evicts, moves and sends back."""
    if moment.plan is None:
        return []
    lines = ["plan:"]
    for segment in moment.plan.segments:
        sample = ", sample" if segment.sample is not None else ""
        who = conversations.who(segment.request_id)
        lines.append(f"  {who} {segment.kind.value} [{segment.start}, {segment.stop}){sample}")
    for loss in conversations.losses(moment):
        text = log_query.span_text(loss.start, loss.stop, moment.after.config.page_size)
        lines.append(f"  evicts {log_conversations.names(loss.conversations)}: {text}")
    for move in moment.plan.moves:
        lines.extend(f"  {text}" for text in _move_texts(move, moment.after, conversations))
    lines.extend(f"  retracts {conversations.who(request_id)}" for request_id in moment.plan.retracted)
    return lines


def state_lines(state: EngineState, conversations: Conversations) -> list[str]:
    """Returns the requests, the totals, the moves and the tree of a state, residency by spans."""
    lines = [f"running: {len(state.running)}"]
    lines.extend(f"  {_running_text(request, conversations)}" for request in state.running)
    lines.append(f"waiting: {len(state.waiting)}")
    lines.extend(f"  {_waiting_text(request, conversations)}" for request in state.waiting)
    steps = ", ".join(str(flight.step) for flight in state.in_flight) or "none"
    cache = state.cache
    lines.append(f"steps in flight: {steps}")
    loading = f", {tiers.num_loading(cache)} being loaded" if _tiered(state) else ""
    lines.append(
        f"pages: {cache.device.num_free} of {cache.device.num_pages} free, {cache.num_device} in the tree, "
        f"{len(private_page_ids(state))} of requests{loading}; clock {cache.clock}"
    )
    if _tiered(state):
        lines.append(_host_text(cache))
        moves = [cache.moves[move_id] for move_id in sorted(cache.moves.keys())]
        lines.append(f"moves under way: {len(moves)}")
        lines.extend(f"  {text}" for move in moves for text in _move_texts(move, state, conversations))
    lines.append("counters: " + ", ".join(f"{name} {value}" for name, value in _counters(state).items()))
    return [*lines, "tree:", *(f"  {line}" for line in tree_lines(cache, conversations, state))]


def _tiered(state: EngineState) -> bool:
    return state.config.num_host_pages > 0


def _host_text(cache: CacheState) -> str:
    copies = f", {log_query.counted(cache.num_copies, 'copy', 'copies')}" if cache.num_copies else ""
    swap = cache.host.num_pages - cache.host_capacity
    return (
        f"host pages: {cache.host.num_free} of {cache.host_capacity} + {swap} free, {cache.num_host} in the tree{copies}, "
        f"{tiers.num_moving(cache)} moving"
    )


def _move_texts(move: Move, state: EngineState, conversations: Conversations) -> list[str]:
    """Returns a line for each part of a history that a move under way moves."""
    verb = "demotes" if move.kind is MoveKind.DEMOTE else "loads"
    texts = []
    for part in conversations.moving(state.cache, move):
        who, text = (
            log_conversations.names(part.conversations),
            log_query.span_text(part.start, part.stop, state.config.page_size),
        )
        texts.append(f"{verb} {who}: {text}, {log_query.move_text(move, conversations)}")
    return texts or [f"{verb} what was flushed, {log_query.move_text(move, conversations)}"]


def _counters(state: EngineState) -> dict[str, int]:
    counters = dataclasses.asdict(state.counters)
    return counters if _tiered(state) else {name: counters[name] for name in counters if name not in _OF_MOVES}


def _running_text(request: Request, conversations: Conversations) -> str:
    parts = [f"prompt {len(request.prompt)}, next {request.next_pos}"]
    if request.output_len or request.num_in_flight:
        parts.append(f"{request.output_len} of {request.max_tokens} outputs")
    if request.num_in_flight:
        parts.append(f"{request.num_in_flight} in flight")
    if request.num_retractions:
        parts.append(f"retracted {request.num_retractions} x")
    if request.leaving:
        parts.append(f"leaves ({request.leaving})")
    assert request.metrics is not None, "a running request has metrics"
    return f"{conversations.who(request.request_id)}: {', '.join(parts)}; {log_query.hits_text(request.metrics)}"


def _waiting_text(request: Request, conversations: Conversations) -> str:
    again = f", retracted after {log_query.counted(request.output_len, 'output')}" if request.num_retractions else ""
    who = conversations.who(request.request_id)
    return f"{who}: prompt {len(request.prompt)}, since {request.arrival_s:.3f} s{again}"


def tree_lines(cache: CacheState, conversations: Conversations, state: EngineState) -> list[str]:
    """Returns a line for each node: its spans and where they are, `@` its stamp, who pins it, whose history ends there.

    A node stands under the one it continues, and further right where histories fork.
    """
    pinned = collections.defaultdict(list)
    for request in state.running:
        pinned[request.pin.node_id].append(f"r{request.request_id}")
    ends = collections.defaultdict(list)
    for conversation in conversations:
        tokens = np.frombuffer(bytes(conversation.tokens), np.int32)
        path, _ = walk(cache, tokens, conversation.namespace, len(tokens) // cache.page_size)
        if path:
            ends[path[-1].node_id].append(conversation)
    lines = []
    for namespace in sorted(cache.roots.keys()):
        salt = namespace.removeprefix(state.config.namespace(""))
        if salt:
            lines.append(f"salt {salt}")
        for node, depth in _in_order(cache, cache.nodes[cache.roots[namespace]]):
            text = "  " * (depth + bool(salt)) + ", ".join(_span_texts(cache, node)) + f"  @{node.stamp}"
            text += f"  pin {' '.join(pinned[node.node_id])}" if node.node_id in pinned else ""
            text += f"  {log_conversations.names(ends[node.node_id])}" if node.node_id in ends else ""
            lines.append(text)
    return lines or ["empty"]


def _in_order(cache: CacheState, root: Node) -> Iterator[tuple[Node, int]]:
    """Yields the nodes below a root, each with the number of forks above it."""
    stack = [(root, 0)]
    while stack:
        node, depth = stack.pop()
        if node is not root:
            yield node, depth
        children = sorted(node.children.values(), reverse=True)
        forks = node is not root and len(children) > 1
        stack.extend((cache.nodes[child_id], depth + forks) for child_id in children)


def _span_texts(cache: CacheState, node: Node) -> Iterator[str]:
    owners = owners_of(node)
    moving = moving_of(node)
    on_the_way = np.where(moving >= 0, 2, np.where(moving == LEAVING, 1, 0))
    copied = np.zeros(node.num_pages, bool) if node.copies is None else node.copies != NO_PAGE
    size = cache.page_size
    for first, last in log_conversations.runs(np.stack([node.tiers.astype(np.int64), owners, on_the_way, copied])):
        owner = int(owners[first])
        tier = Tier(int(node.tiers[first])).name.lower()
        more = "" if owner == NO_OWNER else f" (r{owner} fills it)"
        more += _ON_THE_WAY[int(on_the_way[first])] + (" and host" if copied[first] else "")
        yield f"[{node.start + first * size}, {node.start + last * size}) {tier}{more}"


def page_lines(state: EngineState) -> list[str]:
    """Returns requests and tree page by page, as `penelope scenario` prints them; a page's name is a hash of it."""
    names = render.Names(
        page=lambda tokens: f"{zlib.crc32(tokens.tobytes()) & 0xFFFF:04x}",
        request=lambda request_id: f"r{request_id}",
        pins={request.pin.pin_id: f"r{request.request_id}" for request in state.running},
    )
    return [*render.engine_lines(state, names), *render.tree_lines(state.cache, names)]


def diff_lines(
    before: EngineState, after: EngineState, happened: Sequence[Occurrence], conversations: Conversations
) -> list[str]:
    """Returns what changed between two states.

    Args:
        before, after: the states.
        happened: all that happened between them, in order.
        conversations: as they are in `after`.
    """
    lines = ["requests:", *(f"  {line}" for line in _request_changes(before, after, happened, conversations))]
    lines.append("residency:")
    tiers = {tier: tier.name.lower() for tier in Tier}
    for conversation in conversations:
        for change in log_conversations.changes(conversation, before.cache, after.cache):
            text = f"[{change.start}, {change.stop}) {tiers[change.before]} -> {tiers[change.after]}"
            lines.append(f"  {conversation.name}: {text}")
    lines.append("evictions:")
    lines.extend(f"  step {item.step}, {item.who}: {item.text}" for item in happened if item.kind == "evict")
    if _tiered(after):
        lines.append("moves:")
        moves = (item for item in happened if item.kind in log_query.MOVES)
        lines.extend(f"  step {item.step}, {item.kind} {item.who}: {item.text}" for item in moves)
    old, new = _counters(before), _counters(after)
    grown = [f"{name} +{new[name] - old[name]}" for name in new if new[name] != old[name]]
    free = f"free pages {before.cache.device.num_free} -> {after.cache.device.num_free}"
    if _tiered(after):
        free += f", on the host {before.cache.host.num_free} -> {after.cache.host.num_free}"
    lines.append(f"counters: {', '.join([*grown, free])}")
    empty = {index for index, line in enumerate(lines[:-1]) if line.endswith(":") and not lines[index + 1][0].isspace()}
    return [f"{line} none" if index in empty else line for index, line in enumerate(lines)]


def _request_changes(
    before: EngineState, after: EngineState, happened: Sequence[Occurrence], conversations: Conversations
) -> list[str]:
    said: dict[int, list[str]] = {}
    for item in happened:
        if item.kind not in ("evict", "refill", *log_query.MOVES):
            text = said.setdefault(item.requests[0], [])
            text.append(f"{item.kind} in step {item.step} ({item.text})")
    olds = {request.request_id: request for request in before.running}
    for new in after.running:
        old = olds.get(new.request_id)
        moves = [
            f"{name} {start} -> {stop}"
            for name, start, stop in (
                ("next", old.next_pos if old else 0, new.next_pos),
                ("outputs", old.output_len if old else 0, new.output_len),
            )
            if start != stop
        ]
        if moves:
            said.setdefault(new.request_id, []).extend(moves)
    return [f"{conversations.who(request_id)}: {', '.join(texts)}" for request_id, texts in sorted(said.items())]
