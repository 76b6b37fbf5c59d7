"""How a request gives back what it holds: when it finishes, is aborted, or is retracted.

There is one release path. Computed pages become cache, the rest is freed, unfilled holes pass to whoever waits for
them, and the pin goes back last.
"""

import numpy as np

from penelope_jax import histories, pages
from penelope_jax.changed import changed
from penelope_jax.pages import NO_PAGE
from penelope_jax.radix_tree import CacheState
from penelope_jax.state import NO_PIN, Request


def release(
    cache: CacheState, running: list[Request], request: Request, reason: str
) -> tuple[CacheState, Request | None]:
    """Releases a request that has no step in flight and is no longer in `running`.

    Args:
        cache: the cache.
        running: the other admitted requests, oldest first.
        request: the request that leaves.
        reason: `retract`, `abort`, `stop` or `length`.

    Returns:
        The cache, in which others may own more pages now; and, when retracted, the request as it waits again.
    """
    size = cache.page_size
    known = len(request.prompt) + len(request.outputs)
    # The last sampled token has no K/V, and what was computed past a stop does not count (rule 4).
    valid = min(request.next_pos, known - (reason in ("stop", "length")))
    path_pages = request.path_stop // size
    full_pages = max(path_pages, valid // size) if request.next_pos > request.path_stop else path_pages
    kept = request.page_table[path_pages:full_pages]
    cache, inserted = histories.insert(
        cache, request.tokens(full_pages * size), kept, path_pages * size, request.namespace
    )
    freed = np.concatenate([inserted.refused, request.page_table[full_pages:]])
    assert (freed != NO_PAGE).all(), f"request {request.request_id} frees a page it does not have"
    cache = changed(cache, device=pages.give_back(cache.device, freed))
    heirs = tuple((other.request_id, other.pin) for other in running if not other.prefilled and not other.leaving)
    cache = histories.pass_on(cache, request.pin, request.request_id, heirs)
    cache = histories.unpin(cache, request.pin)
    if reason != "retract":
        return cache, None
    prompt = request.tokens(known)
    prompt.flags.writeable = False
    return (
        cache,
        changed(
            request,
            prompt=prompt,
            num_retractions=request.num_retractions + 1,
            pin=NO_PIN,
            path_stop=0,
            match_stop=0,
            page_table=np.empty(0, np.int32),
            view=None,
            num_owned=0,
            target_pages=0,
            next_pos=0,
            outputs=(),
            feed=-1,
            slot=-1,
            last_step=-1,
            leaving="",
        ),
    )


def with_retracted(waiting: tuple[Request, ...], request: Request) -> tuple[Request, ...]:
    """Puts a retracted request at the head, among those retracted before by arrival."""
    head = [other for other in waiting if other.num_retractions]
    rest = [other for other in waiting if not other.num_retractions]
    return (*sorted([*head, request], key=lambda other: other.arrival), *rest)
