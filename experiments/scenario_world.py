"""The world of a scenario: one engine, what the scenario calls its parts, and what must hold after every command.

A stand-in for the K/V arrays of both tiers follows every step and every move, so a row that reads a page it should not
fails where it happens.
"""

import collections
import dataclasses
from collections.abc import Callable

import numpy as np

from penelope_jax import pages, radix_tree
from penelope_jax.config import EngineConfig, InsertUnit, policy_named
from penelope_jax.errors import InputError, bad_input
from penelope_jax.events import Finished, RequestMetrics, Scored, Update
from penelope_jax.experiments import render
from penelope_jax.experiments.kv_model import KVModel, history_hashes
from penelope_jax.experiments.scenario_language import Line, Vocabulary
from penelope_jax.invariants import check_cache
from penelope_jax.moves import Move
from penelope_jax.pages import NO_PAGE, Tier
from penelope_jax.radix_tree import CacheState, Match, Node, Pin
from penelope_jax.segments import EvictedSpan, StepDone, StepPlan
from penelope_jax.state import EngineState, make_state, private_page_ids

_CONFIG_NUMBERS = {
    "context": "max_context",
    "running": "max_running",
    "step_segments": "max_step_segments",
    "reserve": "output_reserve",
}
_HOST_PAGES = {  # option -> field in tokens, and pages when it is not given
    "host": ("host_tokens", 0),
    "swap": ("swap_tokens", 1),
    "prefetch": ("prefetch_tokens", 0),
    "moving": ("max_moving_tokens", 0),
}
_MOVES = ("auto", "manual")
_OPTIONS = {"pages", "page_size", "policy", "scheduler", "step_tokens", "max_wait", "insert_unit", *_CONFIG_NUMBERS}
_HOST_OPTIONS = {*_HOST_PAGES, "load_units", "moves"}
_SHOWN = 8  # lines at either end of a long list of requests


@dataclasses.dataclass(slots=True)
class Outcome:
    """What the last command did, for the expectations that follow it."""

    found: Match | None = None
    adopted: int = 0
    returned: int = 0
    evicted: list[str] = dataclasses.field(default_factory=list)
    short: int = 0
    plans: list[StepPlan | None] = dataclasses.field(default_factory=list)
    moves: list[str] = dataclasses.field(default_factory=list)
    retracted: list[str] = dataclasses.field(default_factory=list)
    updates: list[Update] = dataclasses.field(default_factory=list)
    error: str = ""
    changed: bool = True


class World:
    """One engine and what a scenario calls its parts.

    Args:
        line: the `cache` command.
    """

    def __init__(self, line: Line):
        line.only(_OPTIONS | _HOST_OPTIONS)
        for option in sorted(_HOST_OPTIONS.intersection(line.options)):
            if "host" not in line.options:
                raise InputError(f"{line.place}: {option} needs a host tier: host=PAGES.")
        self.moves = line.options.get("moves", "auto")
        if self.moves not in _MOVES:
            raise InputError(f"{line.place}: moves must be one of {', '.join(_MOVES)}, got {self.moves!r}.")
        page_size = line.number("page_size", 4)
        num_pages = line.number("pages", 16)
        limits = {name: line.number(option, 0) for option, name in _CONFIG_NUMBERS.items() if option in line.options}
        limits |= {name: line.number(option, given) * page_size for option, (name, given) in _HOST_PAGES.items()}
        with bad_input(line.place):
            policy = policy_named(line.options.get("policy", "penelope"))
            if "insert_unit" in line.options:
                policy = dataclasses.replace(policy, insert_unit=InsertUnit(line.options["insert_unit"]))
            self.config = EngineConfig(
                device_tokens=num_pages * page_size,
                page_size=page_size,
                policy=policy,
                scheduler=line.options.get("scheduler", "lpm"),
                max_step_tokens=line.number("step_tokens", 64 * page_size),
                max_wait_s=line.number("max_wait", 60),
                load_units=line.number("load_units", 0),
                **limits,  # type: ignore[arg-type]
            )
        self.state: EngineState = make_state(self.config)
        self.kv = KVModel(page_size)
        self.words = Vocabulary(page_size)
        self.requests: list[str] = []
        self.outputs: dict[int, list[str]] = {}
        self.metrics: dict[int, RequestMetrics] = {}
        self.scored: dict[int, tuple[int, int]] = {}  # request id -> next position to be scored, length of the prompt
        self.time_s = 0
        self.pins: dict[str, Pin] = {}
        self.hands: dict[str, np.ndarray] = {}
        self.pending: collections.deque[StepDone] = collections.deque()
        self.saved: dict[str, tuple] = {}
        self.past: list[tuple[EngineState, list[str]]] = []
        self.outcome = Outcome()

    # What is said of it.

    @property
    def names(self) -> render.Names:
        pins = {receipt.pin_id: name for name, receipt in self.pins.items()}
        pins |= {request.pin.pin_id: self.requests[request.request_id] for request in self.state.running}
        return render.Names(page=self.words.page, request=self.requests.__getitem__, pins=pins)

    def texts(self) -> tuple[list[str], list[str]]:
        """Returns the text of the cache, and that of the engine around it."""
        lines = render.tree_lines(self.state.cache, self.names)
        lines.extend(f"{name} holds {render.page_numbers(ids.tolist())}" for name, ids in self.hands.items())
        return lines, render.engine_lines(self.state, self.names)

    def do(self, command: "Command", line: Line) -> list[str]:
        """Runs a command.

        Returns:
            What it did, and the state after it.

        Raises:
            InputError: the line cannot be understood.
            AssertionError: the state is wrong.
        """
        before, texts_before = self.state, self.texts()
        self.outcome = Outcome()
        try:
            said = command(self, line)
        except InputError:
            raise
        except (ValueError, pages.OutOfPages) as error:
            assert self.state is before, f"the state changed although the command failed: {error}"
            self.outcome.error = str(error)
            said = [f"error: {error}"]
        self.check()
        cache_text, engine_text = self.texts()
        self.outcome.changed = (cache_text, engine_text) != texts_before
        self.past.append((self.state, render.tree_lines(self.state.cache, render.Names())))
        if not self.outcome.changed:
            return [*said, "(as before)"]
        return said + (cache_text if cache_text != texts_before[0] else ["(tree as before)"]) + _shortened(engine_text)

    # What must hold after every command.

    def move_on(self, state: EngineState) -> None:
        """Takes the engine's next state; raises AssertionError when a counter falls (T65, T67)."""
        for field in dataclasses.fields(state.counters):
            before, now = (getattr(counters, field.name) for counters in (self.state.counters, state.counters))
            assert now >= before, f"counter {field.name} fell from {before} to {now}"
        self.state = state

    def note_metrics(self, request_id: int, metrics: RequestMetrics) -> None:
        """Notes what a prompt cost; raises AssertionError when the numbers do not add up, or change (T62)."""
        name, cached = self.requests[request_id], metrics.device_hit + metrics.host_hit
        assert 0 <= cached < metrics.prompt_len, f"{name} has {cached} of {metrics.prompt_len} tokens from the cache"
        assert min(metrics.refilled, metrics.new) >= 0, f"{name} has negative counts: {metrics}"
        assert cached + metrics.refilled + metrics.new == metrics.prompt_len, f"{name} does not add up: {metrics}"
        assert self.metrics.setdefault(request_id, metrics) == metrics, f"{name}'s metrics have changed"

    def note_scores(self, update: Update) -> None:
        """Raises AssertionError unless the scores of a prompt come in order and are complete at its end (T76)."""
        name, due = self.requests[update.request_id], self.scored.get(update.request_id)
        if due is None:
            return
        position, prompt_len = due
        if isinstance(update, Scored):
            start, num_scores = update.start + 1, len(update.logprobs)
            assert start == position, f"{name} is scored from position {start} on, but {position} is next"
            assert np.isfinite(update.logprobs).all(), f"{name} has no score at some of {start}-{start + num_scores}"
            self.scored[update.request_id] = start + num_scores, prompt_len
        elif isinstance(update, Finished) and update.reason != "abort":
            assert position == prompt_len, f"{name} ends without scores of {position}-{prompt_len}"

    def check(self) -> None:
        """Raises AssertionError when pages are lost, rows are stale, pins do not balance, or a page has the wrong K/V."""
        cache, running = self.state.cache, self.state.running
        in_hands = np.concatenate([np.empty(0, np.int32), *self.hands.values()])
        check_cache(cache, np.concatenate([private_page_ids(self.state), in_hands]))
        self.kv.forget(cache.device.free_ids())
        self.kv.forget(cache.host.free_ids(), Tier.HOST)
        assert set(self.kv.moves) == set(cache.moves), "the moves under way are not those that were started"
        for request in running:
            tree = request.page_table[: request.path_stop // self.config.page_size]
            path = radix_tree.path_page_ids(cache, request.pin.node_id)
            name = self.requests[request.request_id]
            assert len(path) == len(tree), f"{name}'s pin ends elsewhere than its path"
            assert ((tree == path) | (tree == NO_PAGE)).all(), f"{name}'s row is stale: {tree} but {path}"
        out = {receipt.pin_id for receipt in self.pins.values() if receipt.pin_id in cache.pins}
        assert len(cache.pins) == len(out) + len(running), f"{len(cache.pins)} pins are out, {len(out)} of them given"
        for namespace in cache.roots:
            for end in render.end_nodes(cache, namespace):
                path = radix_tree.path_nodes(cache, end.node_id)
                tokens = np.frombuffer(b"".join(node.tokens for node in path), np.int32)
                hashes = history_hashes(tokens.tolist(), namespace)
                for node in path:
                    self._check_node(node, hashes)

    def _check_node(self, node: Node, hashes: list[int]) -> None:
        """Raises AssertionError unless the pages of a node hold the K/V of a history, and their copies do."""
        size = self.config.page_size
        copies = [NO_PAGE] * node.num_pages if node.copies is None else node.copies.tolist()
        for page, (page_id, tier, copy) in enumerate(zip(node.page_ids.tolist(), node.tiers.tolist(), copies)):
            start = node.start + page * size
            if tier == Tier.DEVICE:
                self.kv.check([-1] * (start // size) + [page_id], start, start + size, hashes, "the tree")
            for host_id in (page_id if tier == Tier.HOST else NO_PAGE, copy):
                if host_id != NO_PAGE:
                    self.kv.check_host(host_id, start, hashes)

    def check_past(self) -> None:
        """Raises AssertionError when a state of the past reads differently now."""
        for state, text in self.past:
            assert render.tree_lines(state.cache, render.Names()) == text, "a past state has changed"

    # What commands need.

    def request_id(self, name: str, place: str) -> int:
        """Returns the id of a request, or raises InputError when there was none of that name."""
        if name not in self.requests:
            raise InputError(f"{place}: there is no request called {name!r}.")
        return self.requests.index(name)

    def start_moves(self, moves: tuple[Move, ...]) -> list[str]:
        """Begins moves that the state has under way, notes them, and returns what they are."""
        for move in moves:
            self.kv.start_move(move)
            self.outcome.moves.append(render.move_summary(self.state.cache, move, self.names))
        return [render.move_text(self.state.cache, move, self.names) for move in moves]

    def note_evicted(self, before: CacheState, spans: tuple[EvictedSpan, ...]) -> str:
        """Notes what was evicted, by name where its node was there before or still is, and says so."""
        evicted = []
        for span in spans:
            cache = before if span.node_id in before.nodes else self.state.cache
            if span.node_id not in cache.nodes:
                evicted.append(f"{span.start}-{span.stop}")
                continue
            node = cache.nodes[span.node_id]
            size = cache.page_size
            first, last = (span.start - node.start) // size, (span.stop - node.start) // size
            evicted.extend(render.page_names(cache, node, self.names)[first:last])
        self.outcome.evicted.extend(evicted)
        return f"evicted {' '.join(evicted) or 'nothing'}"


def _shortened(lines: list[str]) -> list[str]:
    """Returns the lines, or the first and the last of them and how many are between."""
    num_hidden = len(lines) - 2 * _SHOWN
    return lines if num_hidden <= _SHOWN else [*lines[:_SHOWN], f"... {num_hidden} lines ...", *lines[-_SHOWN:]]


Command = Callable[[World, Line], list[str]]
"""Changes the world; returns what it did."""
