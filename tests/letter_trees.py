"""Caches in which a page is a letter: short to write, easy to read."""

import dataclasses

import numpy as np

from penelope_jax import histories, lookup, pages, radix_tree
from penelope_jax.pages import Tier
from penelope_jax.radix_tree import CacheState

PAGE_SIZE = 4


def tokens_of(text: str) -> np.ndarray:
    """Returns i32[4 * len(text)]: four tokens for each letter."""
    letters = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    return (letters[:, None] * 10 + np.arange(PAGE_SIZE, dtype=np.int32)).reshape(-1)


def make(num_pages: int, *texts: str) -> CacheState:
    """Returns a cache of `num_pages` pages with these histories inserted, in this order."""
    cache = radix_tree.make_cache(PAGE_SIZE, num_pages)
    for text in texts:
        cache = stored(cache, text)
    return cache


def stored(cache: CacheState, text: str, namespace: str = "") -> CacheState:
    """Inserts a history, as a request does that found its resident beginning."""
    found = lookup.match(cache, tokens_of(text), namespace)
    hit = found.spans[0].stop if found.spans and found.spans[0].tier is not Tier.MISSING else 0
    pool, page_ids = pages.take(cache.device, len(text) - hit // PAGE_SIZE)
    cache, done = histories.insert(dataclasses.replace(cache, device=pool), tokens_of(text), page_ids, hit, namespace)
    return dataclasses.replace(cache, device=pages.give_back(cache.device, done.refused))


def shown(cache: CacheState, text: str, namespace: str = "") -> str:
    """Returns the letters of the match, small where missing and unowned, and a digit where a request fills the page."""
    found = lookup.match(cache, tokens_of(text), namespace)
    letters = []
    for span in found.spans:
        part = text[span.start // PAGE_SIZE : span.stop // PAGE_SIZE]
        if span.tier is Tier.MISSING:
            part = part.lower() if span.owner < 0 else str(span.owner) * len(part)
        letters.append(part)
    return "".join(letters)
