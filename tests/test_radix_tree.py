"""Matching: what is found, through holes, and that looking changes nothing."""

import numpy as np
import pytest
from deep_copies import rendered
from letter_trees import PAGE_SIZE, make, shown, stored, tokens_of
from repeated_lookups import content

from penelope_jax import eviction, histories, lookup, radix_tree
from penelope_jax.config import POLICIES
from penelope_jax.invariants import check_cache
from penelope_jax.pages import NO_PAGE, Tier
from penelope_jax.radix_tree import NO_OWNER, Span

PENELOPE = POLICIES["penelope"]


def test_a_cache_needs_a_page():
    with pytest.raises(ValueError, match=r"^num_device_pages=0 must be at least 1\.$"):
        radix_tree.make_cache(PAGE_SIZE, 0)


def test_nothing_is_found_in_an_empty_cache_or_another_namespace():
    cache = make(8, "ABC")
    for found in (
        lookup.match(make(8), tokens_of("ABC")),
        lookup.match(cache, tokens_of("ABC"), "tenant"),
        lookup.match(cache, tokens_of("XBC")),
        lookup.match(cache, tokens_of("A")[:3]),
        lookup.match(cache, []),
        lookup.match(cache, tokens_of("ABC"), max_pages=0),
    ):
        assert (found.spans, found.stop, found.node_ids, found.page_ids.tolist()) == ((), 0, (), [])


@pytest.mark.parametrize(
    ("text", "tail", "limit", "stop"),
    [("ABC", 0, None, 12), ("ABCD", 0, None, 12), ("ABX", 0, None, 8), ("AB", 3, None, 8), ("ABC", 0, 2, 8)],
)
def test_a_match_is_whole_pages_up_to_the_divergence(text: str, tail: int, limit: int | None, stop: int):
    cache = make(8, "ABC")
    tokens = np.concatenate([tokens_of(text), tokens_of("C")[:tail]])
    found = lookup.match(cache, tokens, max_pages=limit)
    assert found.stop == stop
    assert found.spans == (Span(0, stop, Tier.DEVICE, NO_OWNER),)
    assert found.page_ids.tolist() == [0, 1, 2][: stop // PAGE_SIZE]


def test_a_divergence_inside_a_page_is_no_match_of_that_page():
    other = tokens_of("ABC")
    other[6] += 1
    assert lookup.match(make(8, "ABC"), other).stop == 4


def test_spans_tell_device_missing_and_who_fills_it():
    cache = make(8, "ABCDEF")
    cache, _ = eviction.evict(cache, 2, PENELOPE)
    found = lookup.match(cache, tokens_of("ABCDEFG"))
    assert found.spans == (Span(0, 8, Tier.MISSING, NO_OWNER), Span(8, 24, Tier.DEVICE, NO_OWNER))
    assert found.page_ids.tolist() == [NO_PAGE, NO_PAGE, 2, 3, 4, 5]
    cache, _ = histories.claim(cache, tokens_of("AX"), 2, owner=7)
    found = lookup.match(cache, tokens_of("ABCDEF"))
    assert found.spans == (
        Span(0, 4, Tier.MISSING, 7),
        Span(4, 8, Tier.MISSING, NO_OWNER),
        Span(8, 24, Tier.DEVICE, NO_OWNER),
    )


def test_trailing_missing_pages_are_no_part_of_a_match_unless_somebody_fills_them():
    cache = make(8, "ABC")
    cache, claim = histories.claim(cache, tokens_of("ABCDE"), 5, owner=1)
    assert lookup.match(cache, tokens_of("ABCDE")).stop == 20
    cache = histories.pass_on(cache, claim.pin, 1, ())
    assert lookup.match(cache, tokens_of("ABCDE")).stop == 12
    assert shown(cache, "ABCDE") == "ABC"


def test_a_match_ends_before_a_trailing_hole_in_a_longer_history():
    cache = make(8, "ABCDEF")
    cache, _ = eviction.evict(cache, 3, PENELOPE)
    assert lookup.match(cache, tokens_of("ABC")).stop == 0
    assert lookup.match(cache, tokens_of("ABCD")).stop == 16


def test_looking_changes_nothing():
    cache = make(12, "SABC", "SXY", "SAB")
    before = rendered(cache)
    lookup.match(cache, tokens_of("SAZ"))
    assert rendered(cache) == before
    found = lookup.match(cache, tokens_of("SABC"))
    with pytest.raises(ValueError, match="read-only"):
        found.page_ids[0] = 3


def test_namespaces_share_nothing():
    cache = stored(make(8, "AB"), "AB", "tenant")
    assert cache.num_resident == 4
    assert lookup.match(cache, tokens_of("AB"), "tenant").page_ids.tolist() == [2, 3]
    assert set(cache.roots) == {"", "tenant"}
    check_cache(cache)


def test_paths_give_pages_and_owners_of_all_nodes():
    cache = make(12, "SABC", "SX")
    cache, claim = histories.claim(cache, tokens_of("SABCD"), 5, owner=3)
    node_ids = [node.node_id for node in radix_tree.path_nodes(cache, claim.pin.node_id)]
    assert len(node_ids) == 3, "S, then ABC, then D"
    assert radix_tree.path_page_ids(cache, claim.pin.node_id).tolist() == [0, 1, 2, 3, NO_PAGE]
    assert radix_tree.owners_along(radix_tree.path_nodes(cache, claim.pin.node_id)).tolist() == [NO_OWNER] * 4 + [3]
    root = cache.roots[""]
    assert (
        radix_tree.path_page_ids(cache, root).shape
        == radix_tree.owners_along(radix_tree.path_nodes(cache, root)).shape
        == (0,)
    )


@pytest.mark.parametrize(
    ("left", "right", "expected"), [("AB", "AB", 2), ("AB", "AC", 1), ("A", "AB", 1), ("X", "A", 0)]
)
def test_common_pages(left: str, right: str, expected: int):
    size = lookup.common_pages(tokens_of(left).tobytes(), tokens_of(right).tobytes(), PAGE_SIZE)
    assert size == expected


def test_tokens_of_any_integer_type_match():
    cache = make(4, "AB")
    assert lookup.match(cache, tokens_of("AB").astype(np.int64)).stop == 8
    assert lookup.match(cache, tokens_of("AB").tolist()).stop == 8


def test_a_lookup_that_goes_on_from_an_earlier_one_sees_what_changed():
    """Each change takes another way through it: pages, a longer history, a cut, a pruned end, the namespace gone."""
    tokens = tokens_of("ABCDEF")
    caches = [make(16, "ABC")]
    caches.append(stored(caches[-1], "ABCDE"))
    caches.append(stored(caches[-1], "ABX"))  # cuts the first node
    caches.append(stored(caches[-1], "ABX"))  # changes stamps only
    cut, _ = eviction.evict(caches[-1], 2, PENELOPE)
    caches.append(cut)
    gone, _ = eviction.evict(cut, cut.num_resident, PENELOPE)
    caches += [gone, stored(gone, "AB")]
    before = None
    for cache in caches:
        after = lookup.look_up(cache, tokens, before=before)
        assert content(after) == content(lookup.look_up(cache, tokens))
        before = after
    assert lookup.look_up(caches[-1], tokens, before=before).found is before.found


def test_control_a_lookup_believes_what_it_was_told(monkeypatch: pytest.MonkeyPatch):
    cache = make(16, "ABC")
    before = lookup.look_up(cache, tokens_of("ABC"))
    cache, _ = eviction.evict(cache, 1, PENELOPE)
    monkeypatch.setattr(lookup, "_same_pages", lambda path, before: True)
    stale = lookup.look_up(cache, tokens_of("ABC"), before=before)
    assert content(stale) != content(lookup.look_up(cache, tokens_of("ABC")))
