"""Whose pages they are: the conversations of a run, as its event log tells of them, and where each one's K/V is."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from penelope_jax import lookup, radix_tree
from penelope_jax.events import Finished, Flush, Refused, Sampled, Submit
from penelope_jax.log_replay import Moment
from penelope_jax.moves import Move
from penelope_jax.pages import NO_PAGE, Tier
from penelope_jax.radix_tree import TOKEN_BYTES, CacheState
from penelope_jax.segments import EvictedSpan


@dataclasses.dataclass(slots=True)
class Conversation:
    """A history and who sends it.

    Attributes:
        session_id, namespace: of its requests.
        request_id: of the last one.
        tokens: i32 as bytes: its prompt and what was sampled after it.
    """

    session_id: str
    namespace: str
    request_id: int
    tokens: bytearray

    @property
    def name(self) -> str:
        return f"session {self.session_id}" if self.session_id else f"r{self.request_id}"

    def array(self) -> np.ndarray:
        """Returns the tokens, i32[n], as a copy."""
        return np.frombuffer(bytes(self.tokens), np.int32)


class Change(NamedTuple):
    """Tokens `[start, stop)` of a conversation went from one tier to another."""

    start: int
    stop: int
    before: Tier
    after: Tier


class Part(NamedTuple):
    """Tokens `[start, stop)` of one history, or of several that share them."""

    start: int
    stop: int
    conversations: tuple[Conversation, ...]


class Conversations:
    """The conversations seen so far. A prompt that goes on with a finished one is the same conversation."""

    def __init__(self):
        self._all: dict[tuple[str, str], list[Conversation]] = {}
        self._live: dict[int, Conversation] = {}
        self._session_of: dict[int, str] = {}

    def __iter__(self) -> Iterator[Conversation]:
        for conversations in self._all.values():
            yield from conversations

    def see(self, moment: Moment) -> None:
        """Takes note of a moment; call it for each, in order."""
        if isinstance(moment.entry, Submit):
            self._session_of[moment.entry.request_id] = moment.entry.session_id
            if not any(isinstance(update, Refused) for update in moment.updates):
                self._submitted(moment.entry, moment.after.config.namespace(moment.entry.cache_salt))
        for update in moment.updates:
            if isinstance(update, Sampled):
                self._live[update.request_id].tokens.extend(np.array(update.token, np.int32).tobytes())
            elif isinstance(update, Finished):
                del self._live[update.request_id]

    def _submitted(self, event: Submit, namespace: str) -> None:
        tokens = bytearray(np.array(event.tokens, np.int32).tobytes())
        same = self._all.setdefault((event.session_id, namespace), [])
        live = {id(conversation) for conversation in self._live.values()}
        found = next((other for other in same if id(other) not in live and tokens.startswith(other.tokens)), None)
        if found is None:
            found = Conversation(event.session_id, namespace, event.request_id, tokens)
            same.append(found)
        found.request_id, found.tokens = event.request_id, tokens
        self._live[event.request_id] = found

    def session_of(self, request_id: int) -> str:
        return self._session_of.get(request_id, "")

    def who(self, request_id: int) -> str:
        """Returns a request's name, with its session."""
        session_id = self.session_of(request_id)
        return f"r{request_id} (session {session_id})" if session_id else f"r{request_id}"

    def losses(self, moment: Moment) -> list[Part]:
        """Returns what was evicted in a moment, in order, as spans of histories."""
        if isinstance(moment.entry, Flush):
            return [
                Part(change.start, change.stop, (conversation,))
                for conversation in self
                for change in _missed(conversation, moment.before.cache, moment.after.cache)
            ]
        spans = moment.plan.evicted if moment.plan is not None else ()
        return _joined([(span.start, span.stop, self._through(moment, span)) for span in spans])

    def moving(self, cache: CacheState, move: Move) -> list[Part]:
        """Returns what a move that is under way moves, in order, without what the tree has let go of."""
        found: list[tuple[int, int, tuple[Conversation, ...]]] = []
        for host_id in move.host_ids.tolist():
            node = cache.nodes.get(cache.moving[host_id])
            if node is not None:
                (page,) = np.flatnonzero((node.page_ids == host_id) & (node.tiers == Tier.HOST)).tolist()
                start = node.start + page * cache.page_size
                found.append((start, start + cache.page_size, self._at(cache, node.node_id, start)))
        return _joined(found)

    def _through(self, moment: Moment, span: EvictedSpan) -> tuple[Conversation, ...]:
        """Returns the conversations whose history has an evicted span, as far as its node still tells."""
        caches = (moment.before.cache, moment.after.cache)
        cache = next((cache for cache in caches if span.node_id in cache.nodes), None)
        if cache is None:  # made and removed within one plan: it was theirs who lost something just there
            return tuple(
                conversation
                for conversation in self
                if any(change.start <= span.start < change.stop for change in _missed(conversation, *caches))
            )
        return self._at(cache, span.node_id, span.start)

    def _at(self, cache: CacheState, node_id: int, start: int) -> tuple[Conversation, ...]:
        """Returns the conversations whose history has the page of a node that starts at a position."""
        path = b"".join(node.tokens for node in radix_tree.path_nodes(cache, node_id))
        path = path[: (start + cache.page_size) * TOKEN_BYTES]
        namespace = namespace_of(cache, node_id)
        return tuple(
            conversation
            for conversation in self
            if conversation.namespace == namespace and conversation.tokens.startswith(path)
        )


def _joined(parts: list[tuple[int, int, tuple[Conversation, ...]]]) -> list[Part]:
    """Returns parts of histories in their order, adjacent ones of the same histories as one."""
    found: list[Part] = []
    for start, stop, conversations in parts:
        last = found[-1] if found else None
        if last is not None and last.stop == start and last.conversations == conversations:
            found[-1] = Part(last.start, stop, conversations)
        else:
            found.append(Part(start, stop, conversations))
    return found


def namespace_of(cache: CacheState, node_id: int) -> str:
    """Returns the namespace that a node is in."""
    while cache.nodes[node_id].parent_id != NO_PAGE:
        node_id = cache.nodes[node_id].parent_id
    return next(namespace for namespace, root_id in cache.roots.items() if root_id == node_id)


def residency(conversation: Conversation, cache: CacheState) -> np.ndarray:
    """Returns i8[pages]: the tier of each whole page of a conversation."""
    tiers = np.full(len(conversation.tokens) // (TOKEN_BYTES * cache.page_size), Tier.MISSING, np.int8)
    for span in lookup.match(cache, conversation.array(), conversation.namespace).spans:
        tiers[span.start // cache.page_size : span.stop // cache.page_size] = span.tier
    return tiers


def changes(conversation: Conversation, before: CacheState, after: CacheState) -> list[Change]:
    """Returns where a conversation's pages changed tier between two states, in order of position."""
    both = np.stack([residency(conversation, before), residency(conversation, after)])
    size = before.page_size
    return [
        Change(start * size, stop * size, Tier(int(both[0, start])), Tier(int(both[1, start])))
        for start, stop in runs(both)
        if both[0, start] != both[1, start]
    ]


def _missed(conversation: Conversation, before: CacheState, after: CacheState) -> list[Change]:
    return [change for change in changes(conversation, before, after) if change.after is Tier.MISSING]


def runs(columns: np.ndarray) -> list[tuple[int, int]]:
    """Returns the runs `[start, stop)` of equal columns of a matrix."""
    num_columns = columns.shape[1]
    if not num_columns:
        return []
    edges = np.flatnonzero((columns[:, 1:] != columns[:, :-1]).any(axis=0)) + 1
    borders = [0, *edges.tolist(), num_columns]
    return list(itertools.pairwise(borders))


def names(conversations: Sequence[Conversation]) -> str:
    """Returns the names of conversations, each once."""
    return ", ".join(dict.fromkeys(conversation.name for conversation in conversations)) or "no known conversation"
