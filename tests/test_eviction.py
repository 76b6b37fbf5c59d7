"""Eviction policies (design rule 7, paper part one): where in a history, how much, and in which order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from letter_trees import PAGE_SIZE, make, shown, stored, tokens_of

from penelope_jax import eviction, histories, lookup, radix_tree
from penelope_jax.config import POLICIES, Policy
from penelope_jax.invariants import check_cache
from penelope_jax.radix_tree import CacheState

PENELOPE = POLICIES["penelope"]
FRONT_NODE = POLICIES["front-node"]


def evicted(cache: CacheState, num_pages: int, name: str = "penelope") -> CacheState:
    """Evicts exactly this many pages, or fails."""
    after, done = eviction.evict(cache, num_pages, POLICIES[name])
    check_cache(after)
    assert (done.num_pages, done.num_short) == (num_pages, 0)
    return after


def pinned(cache: CacheState, text: str) -> CacheState:
    return histories.pin(cache, lookup.match(cache, tokens_of(text)))[0]


def test_figure_3_frees_the_first_3_of_8_pages():
    """Three blocks are needed, the node has eight: the first three go, five stay behind the hole."""
    cache = make(8, "ABCDEFGH")
    after, done = eviction.evict(cache, 3, PENELOPE)
    assert shown(after, "ABCDEFGH") == "abcDEFGH"
    assert [(span.start, span.stop) for span in done.spans] == [(0, 12)]
    assert (done.num_pages, done.num_short, after.device.num_free) == (3, 0, 3)
    assert len(after.nodes) == len(cache.nodes), "residency is per page: nothing is split"


def test_an_exact_count_crosses_to_the_next_history():
    """D04: 9 pages are 8 of the oldest history and 1 of the next."""
    cache = evicted(make(20, "ABCDEFGH", "QRST"), 9)
    assert (shown(cache, "ABCDEFGH"), shown(cache, "QRST")) == ("", "qRST")


def test_a_hole_grows_from_its_end():
    cache = make(8, "ABCDEF")
    for expected in ("aBCDEF", "abCDEF", "abcDEF", "abcdEF", "abcdeF", ""):
        cache = evicted(cache, 1)
        assert shown(cache, "ABCDEF") == expected
    assert not cache.nodes


# Where the walk stops.


def test_the_walk_stops_below_a_shared_page():
    cache = evicted(make(16, "STABC", "STXYZ"), 2)
    assert (shown(cache, "STABC"), shown(cache, "STXYZ")) == ("STabC", "STXYZ")


def test_the_walk_stops_at_a_pin_inside_the_history():
    cache = evicted(pinned(make(8, "ABCDEF"), "AB"), 2)
    assert shown(cache, "ABCDEF") == "ABcdEF"


def test_the_walk_stops_below_a_missing_page():
    cache = evicted(pinned(make(12, "ABCDEF"), "ABC"), 1)
    receipt = radix_tree.Pin(0, cache.pins[0], 12)
    cache = evicted(histories.unpin(cache, receipt), 1)
    assert shown(cache, "ABCDEF") == "ABCdeF", "A to C are before the hole"


def test_a_claimed_path_without_pages_counts_as_a_live_child():
    cache, _ = histories.claim(make(12, "ABCD"), tokens_of("ABX"), 3, owner=1)
    cache = evicted(cache, 1)
    assert (shown(cache, "ABCD"), shown(cache, "ABX")) == ("ABcD", "AB1")


def test_dead_children_do_not_hide_the_private_start():
    """D01: turn by turn, what the client does not send again is a dead branch and must not stop the walk."""
    cache = make(16, "PQ", "PQTU", "PQABC")
    cache = evicted(cache, 2)
    assert (shown(cache, "PQTU"), shown(cache, "PQABC")) == ("PQ", "PQABC")
    cache = evicted(cache, 2)
    assert shown(cache, "PQABC") == "pqABC", "with its other branch dead, the prefix is private"


def test_a_shared_prefix_without_live_children_is_an_ordinary_history():
    """D03: only the shared part is left; it goes too, and then nothing is evictable."""
    cache = make(12, "STA", "STB")
    cache = evicted(cache, 2, "vllm")
    assert (shown(cache, "STA"), shown(cache, "STB")) == ("ST", "ST")
    cache = evicted(cache, 1)
    assert shown(cache, "ST") == "sT"
    cache, done = eviction.evict(cache, 5, PENELOPE)
    assert (done.num_pages, done.num_short, cache.num_resident) == (1, 4, 0)


def test_when_all_is_pinned_eviction_says_how_much_is_short():
    cache = pinned(make(6, "ABCD"), "ABCD")
    for policy in POLICIES.values():
        after, done = eviction.evict(cache, 3, policy)
        assert (done.spans, done.num_pages, done.num_short) == ((), 0, 3)
        assert after.num_resident == 4


def test_nothing_is_asked_and_nothing_is_freed():
    cache = make(6, "ABCD")
    for policy in POLICIES.values():
        assert eviction.evict(cache, 0, policy)[1] == ((), 0, 0)


def test_a_branch_makes_a_second_hole_possible():
    """D02: behind a pinned branch the front of the private part is inside the history."""
    cache = evicted(make(16, "ABCDEFGH"), 1)
    cache, claim = histories.claim(cache, tokens_of("ABCDX"), 5, owner=1)
    cache = evicted(cache, 1)
    assert shown(cache, "ABCDEFGH") == "1BCDeFGH"
    cache = histories.unpin(histories.pass_on(cache, claim.pin, 1, ()), claim.pin)
    assert shown(cache, "ABCDEFGH") == "aBCDeFGH"


# The other policies.


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("penelope", "STabC", "STXYZ"),
        ("vllm", "STA", "STXYZ"),
        ("leaf-head", "STabC", "STXYZ"),
    ],
)
def test_page_policies_free_exactly_what_is_needed(name: str, first: str, second: str):
    cache = evicted(make(16, "STABC", "STXYZ"), 2, name)
    assert (shown(cache, "STABC"), shown(cache, "STXYZ")) == (first, second)


@pytest.mark.parametrize("name", ["sglang", "leaf-head-node", "front-node"])
def test_whole_nodes_free_more_than_is_needed(name: str):
    cache, done = eviction.evict(make(16, "STABC", "STXYZ"), 2, POLICIES[name])
    assert (done.num_pages, done.num_short) == (3, 0)
    assert (shown(cache, "STABC"), shown(cache, "STXYZ")) == ("ST", "STXYZ")


CHUNKS = ("ABC", "ABCDEF", "ABCDEFGHI")  # a history inserted in three chunks: three nodes


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("penelope", "abCDEFGHI"),
        ("front-node", "abcDEFGHI"),
        ("leaf-head", "ABCDEFghI"),
        ("leaf-head-node", "ABCDEF"),
        ("sglang", "ABCDEF"),
        ("vllm", "ABCDEFG"),
    ],
)
def test_what_each_policy_frees_for_two_pages_of_a_history_of_three_nodes(name: str, expected: str):
    cache, _ = eviction.evict(make(9, *CHUNKS), 2, POLICIES[name])
    check_cache(cache)
    assert shown(cache, "ABCDEFGHI") == expected


def test_front_nodes_go_one_after_the_other_from_the_front():
    cache, done = eviction.evict(make(9, *CHUNKS), 4, FRONT_NODE)
    assert (shown(cache, "ABCDEFGHI"), done.num_pages) == ("abcdefGHI", 6)
    assert [(span.start, span.stop) for span in done.spans] == [(0, 12), (12, 24)]


def test_the_tail_order_is_lru_then_deepest_first():
    cache = make(16, "ABCD", "XYZ")
    for expected in (("ABC", "XYZ"), ("AB", "XYZ"), ("A", "XYZ"), ("", "XYZ"), ("", "XY"), ("", "X")):
        cache = evicted(cache, 1, "vllm")
        assert (shown(cache, "ABCD"), shown(cache, "XYZ")) == expected


@pytest.mark.parametrize("name", list(POLICIES))
def test_the_least_recently_used_history_goes_first(name: str):
    cache = make(16, "ABC", "XYZ", "UVW")
    cache = histories.touch(cache, lookup.match(cache, tokens_of("ABC")))
    cache = evicted(cache, 3, name)
    assert [shown(cache, text) for text in ("ABC", "XYZ", "UVW")] == ["ABC", "", "UVW"]
    cache = evicted(cache, 3, name)
    assert [shown(cache, text) for text in ("ABC", "XYZ", "UVW")] == ["ABC", "", ""]


def test_the_freed_ids_are_free_again_and_reused():
    cache = evicted(make(6, "ABCDEF"), 2)
    assert list(cache.device.free_ids()) == [0, 1]
    cache = stored(cache, "XY")
    assert lookup.match(cache, tokens_of("XY")).page_ids.tolist() == [0, 1]


# Properties.


histories_of_letters = st.lists(st.text("ABC", min_size=1, max_size=6), min_size=1, max_size=6)


def children_of(cache: CacheState, texts: list[str]) -> dict[str, set[str]]:
    """Returns each page's live children: pages on a path to a resident one."""
    alive: dict[str, set[str]] = {}
    for text in texts:
        resident = shown(cache, text)
        for stop in range(1, len(resident)):
            alive.setdefault(text[:stop], set()).add(text[: stop + 1])
    return alive


@given(
    texts=histories_of_letters, num_pages=st.integers(0, 12), pin=st.integers(0, 5), name=st.sampled_from([*POLICIES])
)
def test_pinned_pages_stay_and_counts_are_exact(texts: list[str], num_pages: int, pin: int, name: str):
    cache = make(40, *texts)
    held = texts[pin % len(texts)]
    cache = pinned(cache, held)
    evictable = cache.num_resident - len(held)
    after, done = eviction.evict(cache, num_pages, POLICIES[name])
    check_cache(after)
    assert shown(after, held).startswith(held)
    assert done.num_short == max(0, num_pages - evictable)
    assert done.num_pages == cache.num_resident - after.num_resident >= min(num_pages, evictable)
    assert done.num_pages == sum(span.stop - span.start for span in done.spans) // PAGE_SIZE
    if POLICIES[name].unit.value == "page":
        assert done.num_pages == min(num_pages, evictable)


@given(texts=histories_of_letters, num_pages=st.integers(0, 12), policy=st.sampled_from([PENELOPE, FRONT_NODE]))
def test_a_page_shared_by_two_live_histories_is_never_freed(texts: list[str], num_pages: int, policy: Policy):
    cache = make(40, *texts)
    for _ in range(3):
        cache, _ = eviction.evict(cache, num_pages, policy)
        for page, children in children_of(cache, texts).items():
            if len(children) >= 2:
                assert shown(cache, page) == page, f"{page} is shared by {children} and has a hole"
