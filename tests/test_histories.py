"""Inserting, touching, pinning, claiming and filling (design rules 4, 5, 6, 8 and 10)."""

import dataclasses

import numpy as np
import pytest
from deep_copies import rendered
from letter_trees import PAGE_SIZE, make, shown, stored, tokens_of

from penelope_jax import eviction, histories, lookup, pages, radix_tree
from penelope_jax.config import POLICIES
from penelope_jax.invariants import check_cache
from penelope_jax.pages import NO_PAGE
from penelope_jax.radix_tree import CacheState, Pin

PENELOPE = POLICIES["penelope"]


def taken(cache: CacheState, num_pages: int) -> tuple[CacheState, np.ndarray]:
    pool, page_ids = pages.take(cache.device, num_pages)
    return dataclasses.replace(cache, device=pool), page_ids


def pinned(cache: CacheState, text: str) -> tuple[CacheState, Pin]:
    return histories.pin(cache, lookup.match(cache, tokens_of(text)))


def evict_all(cache: CacheState) -> CacheState:
    return eviction.evict(cache, cache.num_resident, PENELOPE)[0]


# Insert.


def test_insert_adopts_what_is_missing_and_refuses_what_is_there():
    cache = make(12, "ABC")
    cache, page_ids = taken(cache, 5)
    cache, done = histories.insert(cache, tokens_of("ABXYZ"), page_ids)
    assert (done.refused.tolist(), done.adopted.tolist()) == ([3, 4], [5, 6, 7])
    check_cache(cache, (3, 4))
    assert lookup.match(cache, tokens_of("ABXYZ")).page_ids.tolist() == [0, 1, 5, 6, 7]
    assert lookup.match(cache, tokens_of("ABC")).page_ids.tolist() == [0, 1, 2]


def test_insert_adopts_a_refilled_hole_like_any_other_page():
    cache, _ = eviction.evict(make(12, "ABCDE"), 2, PENELOPE)
    cache, page_ids = taken(cache, 6)
    cache, done = histories.insert(cache, tokens_of("ABCDEF"), page_ids)
    assert (done.adopted.tolist(), done.refused.tolist()) == ([*page_ids[:2], page_ids[5]], page_ids[2:5].tolist())
    check_cache(cache, done.refused)
    assert shown(cache, "ABCDEF") == "ABCDEF"


def test_insert_of_the_end_of_a_history_takes_only_its_pages():
    cache = make(12, "AB")
    cache, page_ids = taken(cache, 2)
    cache, done = histories.insert(cache, tokens_of("ABCD"), page_ids, start=2 * PAGE_SIZE)
    assert (done.adopted.tolist(), done.refused.tolist()) == ([2, 3], [])
    cache, page_ids = taken(cache, 1)
    cache, done = histories.insert(cache, tokens_of("XYZ"), page_ids, start=2 * PAGE_SIZE)
    assert shown(cache, "XYZ") == "xyZ"
    check_cache(cache)


def test_insert_of_less_than_a_page_leaves_no_trace():
    cache = make(4)
    after, done = histories.insert(cache, tokens_of("A")[:3], np.empty(0, np.int32))
    assert (done.adopted.shape, done.refused.shape) == ((0,), (0,))
    assert (len(after.nodes), len(after.roots)) == (0, 0)
    check_cache(after)


@pytest.mark.parametrize(("start", "num_pages"), [(3, 1), (4, 2), (0, 3)])
def test_insert_wants_whole_pages_within_the_tokens(start: int, num_pages: int):
    cache, page_ids = taken(make(4), num_pages)
    with pytest.raises(ValueError) as caught:
        histories.insert(cache, tokens_of("AB"), page_ids, start=start)
    assert str(caught.value) == f"{num_pages} pages from {start=} do not fit 8 tokens of 4 a page."


def test_insert_splits_only_where_histories_diverge_or_end():
    cache = make(16, "ABCD")
    assert len(cache.nodes) == 2, "the root and one node"
    cache = stored(cache, "ABCD")
    assert len(cache.nodes) == 2
    cache = stored(cache, "AB")
    assert len(cache.nodes) == 3
    cache = stored(cache, "ABXY")
    assert len(cache.nodes) == 4
    check_cache(cache)


def test_a_split_copies_its_arrays():
    cache = make(16, "ABCD")
    for node in stored(cache, "ABXY").nodes.values():
        for array in (node.page_ids, node.tiers):
            assert array.base is None or array.base.nbytes == array.nbytes, "a view keeps the whole node alive"


def test_eviction_and_refill_split_nothing():
    cache, claim = histories.claim(make(12, "ABCDEF"), tokens_of("ABCDEF"), 6, owner=1)
    cache = histories.unpin(cache, claim.pin)
    num_nodes = len(cache.nodes)
    cache, _ = eviction.evict(cache, 2, PENELOPE)
    cache, claim = histories.claim(cache, tokens_of("ABCDEF"), 6, owner=2)
    cache, page_ids = taken(cache, 1)
    cache = histories.fill(cache, claim.pin, 0, page_ids, owner=2)
    assert (shown(cache, "ABCDEF"), len(cache.nodes)) == ("A2CDEF", num_nodes)


# Touch.


def test_matches_touched_together_are_touched_one_after_the_other():
    """Also where one splits the node in which the other ends."""
    before = make(12, "ABCDE", "XY")
    texts = ("ABCDE", "AB", "ABCD", "A", "Q", "XY", "ABCDE")
    matches = [lookup.match(before, tokens_of(text)) for text in texts]
    together = histories.touch_all(before, matches)
    single = before
    for text in texts:
        single = histories.touch(single, lookup.match(single, tokens_of(text)))
    check_cache(together)
    assert rendered(together) == rendered(single) != rendered(before)
    assert histories.touch_all(before, matches[4:5]) is before


def test_a_touch_stamps_only_what_matched():
    """The prefix is used again, the rest of the history is not: the rest is the oldest."""
    cache = make(12, "ABCD", "XY")
    cache = histories.touch(cache, lookup.match(cache, tokens_of("AB")))
    cache, _ = eviction.evict(cache, 2, POLICIES["vllm"])
    assert (shown(cache, "ABCD"), shown(cache, "XY")) == ("AB", "XY")
    cache, _ = eviction.evict(cache, 2, POLICIES["vllm"])
    assert (shown(cache, "ABCD"), shown(cache, "XY")) == ("AB", "")


def test_a_touch_of_nothing_is_nothing():
    cache = make(4, "A")
    assert histories.touch(cache, lookup.match(cache, tokens_of("X"))) is cache


def test_a_prefix_inherits_the_stamp_of_what_was_below_it():
    cache = make(12, "AB", "XY", "ABC")
    cache, _ = eviction.evict(cache, 2, POLICIES["vllm"])
    assert (shown(cache, "XY"), shown(cache, "ABC")) == ("", "ABC")
    cache = stored(cache, "UV")
    cache, _ = eviction.evict(cache, 1, POLICIES["vllm"])
    assert shown(cache, "ABC") == "AB"
    cache, _ = eviction.evict(cache, 1, POLICIES["vllm"])
    assert (shown(cache, "ABC"), shown(cache, "UV")) == ("A", "UV")


# Pins.


def test_a_pin_protects_its_path_and_nothing_behind_it():
    cache, receipt = pinned(make(12, "ABCD", "XY"), "AB")
    cache = evict_all(cache)
    assert (shown(cache, "ABCD"), shown(cache, "XY")) == ("AB", "")
    cache = evict_all(histories.unpin(cache, receipt))
    assert cache.num_resident == 0 and not cache.nodes


def test_pins_are_counted():
    cache, first = pinned(make(8, "AB"), "AB")
    cache, second = pinned(cache, "AB")
    cache = evict_all(histories.unpin(cache, first))
    assert shown(cache, "AB") == "AB"
    assert evict_all(histories.unpin(cache, second)).num_resident == 0


def test_an_unbalanced_unpin_is_an_error():
    cache, receipt = pinned(make(8, "AB"), "AB")
    cache = histories.unpin(cache, receipt)
    with pytest.raises(ValueError) as caught:
        histories.unpin(cache, receipt)
    assert str(caught.value) == "pin 0 on node 1 is not out; unpin balances one pin."
    with pytest.raises(ValueError, match=r"^pin 5 on node 1 is not out; unpin balances one pin\.$"):
        histories.unpin(cache, Pin(5, 1, 8))


def test_splits_between_pin_and_unpin_leave_the_receipt_right():
    cache, long = pinned(make(16, "ABCD"), "ABCD")
    cache, short = pinned(cache, "AB")
    cache = stored(stored(cache, "AXY"), "ABCQ")
    cache = evict_all(histories.unpin(cache, short))
    assert (shown(cache, "ABCD"), shown(cache, "AXY"), shown(cache, "ABCQ")) == ("ABCD", "A", "ABC")
    check_cache(cache)
    assert evict_all(histories.unpin(cache, long)).num_resident == 0


def test_a_pin_tolerates_missing_pages_that_are_filled_while_it_is_out():
    cache, _ = eviction.evict(make(8, "ABCD"), 2, PENELOPE)
    cache, plain = pinned(cache, "ABCD")
    cache, claim = histories.claim(cache, tokens_of("ABCD"), 4, owner=0)
    assert claim.owned == ((0, 8),)
    cache, page_ids = taken(cache, 2)
    cache = histories.fill(cache, claim.pin, 0, page_ids, owner=0)
    assert shown(evict_all(cache), "ABCD") == "ABCD"
    cache = histories.unpin(histories.unpin(cache, claim.pin), plain)
    check_cache(cache)
    assert cache.num_resident == 4


def test_a_pin_of_an_empty_match_holds_the_root_only():
    cache = make(4)
    cache, receipt = histories.pin(cache, lookup.match(cache, tokens_of("A")), "tenant")
    check_cache(cache)
    assert (receipt.stop, set(cache.roots)) == (0, {"tenant"})
    cache = histories.unpin(cache, receipt)
    assert not cache.nodes and not cache.roots


def test_a_subtree_with_no_page_and_no_pin_is_removed():
    cache, claim = histories.claim(make(8, "AB"), tokens_of("ABCDE"), 5, owner=0)
    assert shown(cache, "ABCDE") == "AB000"
    cache = histories.unpin(histories.pass_on(cache, claim.pin, 0, ()), claim.pin)
    assert shown(cache, "ABCDE") == "AB"
    assert sum(node.num_pages for node in cache.nodes.values()) == 2
    check_cache(cache)


# Claims and fills.


def test_a_claim_owns_every_unowned_missing_page_at_once():
    cache, _ = eviction.evict(make(16, "ABCDEF"), 2, PENELOPE)
    cache, first = histories.claim(cache, tokens_of("ABCX"), 4, owner=1)
    assert first.owned == ((0, 8), (12, 16))
    cache, second = histories.claim(cache, tokens_of("ABCXY"), 5, owner=2)
    assert second.owned == ((16, 20),)
    cache, third = histories.claim(cache, tokens_of("ABCDEF"), 6, owner=3)
    assert third.owned == ()
    assert (shown(cache, "ABCXY"), shown(cache, "ABCDEF")) == ("11C12", "11CDEF")
    check_cache(cache)


def test_a_claim_needs_the_tokens_of_its_pages():
    with pytest.raises(ValueError) as caught:
        histories.claim(make(8), tokens_of("AB"), 3, owner=0)
    assert str(caught.value) == "num_pages=3 of 4 tokens exceed the 8 tokens given."


def test_fill_is_for_the_owner_only():
    cache, first = histories.claim(make(8, "A"), tokens_of("ABC"), 3, owner=1)
    cache, second = histories.claim(cache, tokens_of("ABC"), 3, owner=2)
    cache, page_ids = taken(cache, 1)
    for receipt, start, owner in ((second.pin, 4, 2), (first.pin, 0, 1)):
        with pytest.raises(ValueError) as caught:
            histories.fill(cache, receipt, start, page_ids, owner)
        assert str(caught.value) == f"request {owner} fills [{start}, {start + 4}) but does not own all of it."
    cache = histories.fill(cache, first.pin, 4, page_ids, 1)
    assert shown(cache, "ABC") == "AB1"
    with pytest.raises(ValueError, match=r"^request 1 fills \[4, 8\) but does not own all of it\.$"):
        histories.fill(cache, first.pin, 4, page_ids, 1)


def test_fill_crosses_nodes():
    cache, claim = histories.claim(make(8, "X"), tokens_of("ABCD"), 4, owner=1)
    cache = histories.split_at(histories.split_at(cache, claim.pin, 4), claim.pin, 12)
    cache, page_ids = taken(cache, 4)
    cache = histories.fill(cache, claim.pin, 0, page_ids, 1)
    assert radix_tree.path_page_ids(cache, claim.pin.node_id).tolist() == page_ids.tolist()
    check_cache(cache)


def test_unfilled_pages_pass_to_the_oldest_heir_that_needs_them():
    cache, gone = histories.claim(make(16), tokens_of("ABCD"), 4, owner=1)
    cache, short = histories.claim(cache, tokens_of("AX"), 2, owner=2)
    cache, long = histories.claim(cache, tokens_of("ABCY"), 4, owner=3)
    cache, page_ids = taken(cache, 1)
    cache = histories.fill(cache, gone.pin, 0, page_ids, 1)
    cache = histories.pass_on(cache, gone.pin, 1, ((2, short.pin), (3, long.pin)))
    cache = histories.unpin(cache, gone.pin)
    assert (shown(cache, "ABCY"), shown(cache, "AX"), shown(cache, "ABCD")) == ("A333", "A2", "A33")
    check_cache(cache)


def test_split_at_makes_a_border_where_an_insert_ends():
    cache, claim = histories.claim(make(8), tokens_of("ABCD"), 4, owner=1)
    cut = histories.split_at(cache, claim.pin, 8)
    assert [node.num_pages for node in radix_tree.path_nodes(cut, claim.pin.node_id)] == [2, 2]
    for position in (0, 8, 16):
        assert rendered(histories.split_at(cut, claim.pin, position)) == rendered(cut)


def test_no_operation_changes_an_older_value():
    cache = make(16, "ABCD")
    seen = [(cache, rendered(cache))]

    def keep(new: CacheState) -> CacheState:
        seen.append((new, rendered(new)))
        return new

    cache = keep(stored(cache, "ABXY"))
    cache = keep(histories.touch(cache, lookup.match(cache, tokens_of("ABC"))))
    cache, receipt = pinned(keep(cache), "A")
    cache, _ = eviction.evict(keep(cache), 4, PENELOPE)
    cache, claim = histories.claim(keep(cache), tokens_of("ABCD"), 4, owner=5)
    cache, page_ids = taken(keep(cache), 1)
    missing = int(np.flatnonzero(radix_tree.path_page_ids(cache, claim.pin.node_id) == NO_PAGE)[0])
    cache = keep(histories.fill(cache, claim.pin, missing * PAGE_SIZE, page_ids, 5))
    cache = keep(histories.pass_on(cache, claim.pin, 5, ()))
    cache = keep(histories.unpin(histories.unpin(cache, claim.pin), receipt))
    keep(evict_all(cache))
    assert all(rendered(value) == before for value, before in seen)
