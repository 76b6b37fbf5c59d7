"""Admission: what a request gets when it starts to run, and whether there is room for it."""

from collections.abc import Sequence

import numpy as np

from penelope_jax import cost, histories, lookup, radix_tree, tiers
from penelope_jax.changed import changed
from penelope_jax.config import EngineConfig
from penelope_jax.events import RequestMetrics
from penelope_jax.pages import NO_PAGE, Tier, frozen
from penelope_jax.radix_tree import NO_OWNER, CacheState, LookUp
from penelope_jax.state import Request


def refusal(config: EngineConfig, prompt_len: int, max_tokens: int | None) -> str | None:
    """Says why a request can never run (rule 14), or None if it can.

    Prefix, holes, new tokens and output need device pages all at once, and one page more, since a prompt that is
    cached to its end recomputes its last page into a private one.
    """
    size = config.page_size
    total = prompt_len + (max_tokens or 1)
    if total > config.max_context:
        return (
            f"prompt of {prompt_len} tokens and {max_tokens or 1} output tokens exceed the context of "
            f"{config.max_context} tokens."
        )
    needed = -(-total // size) + 1
    if needed > config.num_device_pages:
        return (
            f"prompt of {prompt_len} tokens and {max_tokens or 1} output tokens need {needed} pages of {size} tokens; "
            f"the device pool has {config.num_device_pages} (--device-tokens {config.device_tokens})."
        )
    return None


def resolved_max_tokens(config: EngineConfig, prompt_len: int, max_tokens: int | None) -> int:
    """Returns `max_tokens`, or what context and pool leave if it is None."""
    if max_tokens is not None:
        return max_tokens
    pool = (config.num_device_pages - 1) * config.page_size
    return min(config.max_context, pool) - prompt_len


def look_up(cache: CacheState, request: Request) -> LookUp:
    """Looks up what the cache holds of a waiting request's prompt; the last token is computed in any case."""
    limit = (len(request.prompt) - 1) // cache.page_size
    return lookup.look_up(cache, request.prompt, request.namespace, limit, request.lookup)


def admit(cache: CacheState, config: EngineConfig, request: Request) -> tuple[CacheState, Request]:
    """Gives a waiting request its path: matched, touched, pinned, its holes owned (rule 10).

    Pages are taken later, step by step. Pinning first means that no allocation can evict the request's own hits (T30).

    Returns:
        The cache, and the request as a running one.
    """
    size = config.page_size
    prompt_len = len(request.prompt)
    found = look_up(cache, request).found
    load_units = 0.0 if config.policy.inclusive else config.load_units  # SGLang loads whatever is there
    cheaper = tiers.drop_cheap(cache, found.node_ids, found.stop, config.linear_cost, load_units)
    if cheaper is not cache:
        cache, found = cheaper, look_up(cheaper, request).found
    path_pages = prompt_len // size
    if prompt_len % size == 0 and _last_page_known(cache, request, path_pages):
        path_pages -= 1  # a full hit: the last page is recomputed into a private page (rule 3)
    cache, claim = histories.claim(cache, request.prompt, path_pages, request.request_id, request.namespace)
    path_stop = path_pages * size
    table = radix_tree.path_page_ids(cache, claim.pin.node_id)
    refilled = tuple((start, min(stop, found.stop)) for start, stop in claim.owned if start < found.stop)
    if request.metrics is None:
        metrics = _metrics(config, request, found, refilled)
        request = changed(request, metrics=metrics)
    return cache, changed(
        request,
        lookup=None,
        pin=claim.pin,
        path_stop=path_stop,
        match_stop=found.stop,
        page_table=frozen(table.copy()),
        num_owned=int(np.count_nonzero(table == NO_PAGE)) if cache.num_host else _num_pages(claim.owned, size),
        target_pages=_target_pages(config, request),
        next_pos=0,
    )


def _num_pages(spans: tuple[tuple[int, int], ...], page_size: int) -> int:
    return sum(stop - start for start, stop in spans) // page_size


def _last_page_known(cache: CacheState, request: Request, num_pages: int) -> bool:
    found = lookup.match(cache, request.prompt, request.namespace, num_pages)
    if found.stop < num_pages * cache.page_size:
        return False
    return found.page_ids[-1] != NO_PAGE or found.spans[-1].owner != NO_OWNER


def _metrics(
    config: EngineConfig, request: Request, found: radix_tree.Match, refilled: tuple[tuple[int, int], ...]
) -> RequestMetrics:
    prompt_len = len(request.prompt)
    num_refilled = sum(stop - start for start, stop in refilled)
    host = sum(span.stop - span.start for span in found.spans if span.tier is Tier.HOST)
    spans = [*refilled, (found.stop, prompt_len)]
    if len(spans) > 1 and spans[-2][1] == found.stop:
        spans[-2:] = [(spans[-2][0], prompt_len)]
    c = config.linear_cost
    resident = [(span.start, span.stop) for span in found.spans if (span.start, span.stop) not in refilled]
    scored = [
        (max(start, request.score_pos), min(stop, request.original_len - 1))
        for start, stop in resident
        if max(start, request.score_pos) < min(stop, request.original_len - 1)
    ]
    return RequestMetrics(
        prompt_len=prompt_len,
        device_hit=found.stop - num_refilled - host,
        host_hit=host,
        refilled=num_refilled,
        new=prompt_len - found.stop,
        compute_spans=tuple(spans),
        refilled_units=cost.units_of(refilled, c),
        compute_units=cost.units_of(spans, c),
        scoring_units=cost.units_of(scored, c),
    )


def have_room(cache: CacheState, config: EngineConfig, running: Sequence[Request]) -> bool:
    """Whether the device has pages for all that these requests may still take."""
    needed = sum([claimed_pages(request) for request in running]) - cache.device.num_free
    return needed <= surely_evictable(cache, config, running) or needed <= evictable_pages(cache, config, running)


def claimed_pages(request: Request) -> int:
    """Returns the pages a running request may still take: its unfilled pages, its tail, and its output reserve."""
    left = request.target_pages - len(request.page_table)
    return request.num_owned + left if left > 0 else request.num_owned


def _target_pages(config: EngineConfig, request: Request) -> int:
    """Returns how many pages its prompt and its output reserve fill."""
    earlier_outputs = len(request.prompt) - request.original_len
    reserve = min(request.max_tokens - earlier_outputs, config.output_reserve)
    return -(-(len(request.prompt) + reserve) // config.page_size)


def surely_evictable(cache: CacheState, config: EngineConfig, running: Sequence[Request]) -> int:
    """Returns a number that `evictable_pages` is at least, at less cost: pages that requests share count for each."""
    on_paths = sum([request.path_stop for request in running]) // config.page_size
    return cache.num_device - on_paths + sum([request.num_owned for request in running])


def evictable_pages(cache: CacheState, config: EngineConfig, running: Sequence[Request]) -> int:
    """Returns how many device pages of the tree no running request needs: they can be evicted, or move to the host."""
    pinned = np.zeros(config.num_device_pages + 1, bool)  # the last one stands for NO_PAGE
    tables = [request.page_table[: request.path_stop // config.page_size] for request in running]
    if tables:
        pinned[np.concatenate(tables)] = True
    return cache.num_device - int(np.count_nonzero(pinned[:-1]))
