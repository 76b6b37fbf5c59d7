"""Lookups of the same tokens, again and again while the cache changes, against lookups from scratch."""

from penelope_jax.lookup import look_up
from penelope_jax.radix_tree import CacheState, LookUp
from penelope_jax.state import EngineState


def content(found: LookUp) -> tuple:
    """Returns all that a lookup says, for comparison; the nodes by what leads on from them."""
    match = found.found
    path = [(node.node_id, node.parent_id, node.tokens, node.page_ids.tolist()) for node in found.path]
    return path, found.last_pages, match.spans, match.stop, match.node_ids, match.page_ids.tolist()


class RepeatedLookups:
    """What was looked up before, by tokens, namespace and limit."""

    def __init__(self, most: int = 6):
        self.most = most
        self.known: dict[tuple, tuple] = {}

    def check(self, cache: CacheState, tokens, namespace: str, limit: int | None = None) -> None:
        """Looks up these tokens, and all those before once more."""
        self.known.setdefault((bytes(tokens), namespace, limit), (tokens, None))
        if len(self.known) > self.most:
            del self.known[next(iter(self.known))]
        for (data, name, most), (again, before) in list(self.known.items()):
            after = look_up(cache, again, name, most, before)
            assert content(after) == content(look_up(cache, again, name, most))
            self.known[data, name, most] = (again, after)


def check_waiting(state: EngineState) -> int:
    """Compares what waiting requests would be told with a lookup from scratch; returns how many know something."""
    number = 0
    for request in state.waiting:
        if request.lookup is not None:
            limit = (len(request.prompt) - 1) // state.config.page_size
            after = look_up(state.cache, request.prompt, request.namespace, limit, request.lookup)
            assert content(after) == content(look_up(state.cache, request.prompt, request.namespace, limit))
            number += len(request.lookup.path) > 0
    return number
