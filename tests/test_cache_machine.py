"""Random operations on the cache, each compared with a naive model; no old value may change.

After every operation: conservation of pages and the invariants of the tree, equality with the model (what is resident,
owned and pinned, where nodes end, the order of leaves), and at the end every cache value ever seen is what it was.
"""

import dataclasses
from typing import ClassVar, NamedTuple

import numpy as np
import pytest
import seeded_machines
from deep_copies import rendered
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from naive_cache import Key, NaiveCache
from repeated_lookups import RepeatedLookups

from penelope_jax import eviction, histories, leaf_order, lookup, pages, radix_tree
from penelope_jax.config import POLICIES, Policy, Start, Unit
from penelope_jax.invariants import check_cache
from penelope_jax.pages import NO_PAGE, Tier
from penelope_jax.radix_tree import NO_OWNER, CacheState, Node, Pin
from penelope_jax.tree_edit import TreeEdit

MIN_OPERATIONS = 12_000

# A history is a string of letters, one a page: few letters give many shared prefixes and forks.
texts = st.builds(
    lambda opening, rest: opening + rest,
    st.sampled_from(["A", "ABCA", "ABB", "BAC", "CCAB"]),
    st.text("ABC", max_size=4),
)
namespaces = st.sampled_from(["", "", "", "salt"])
policies = st.sampled_from(list(POLICIES.values()))


def tokens_of(text: str, page_size: int, tail: int = 0) -> np.ndarray:
    """Returns i32 tokens: each letter is a page whose tokens differ; `tail` tokens of one more page."""
    letters = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    whole = (letters[:, None] * 1000 + np.arange(page_size, dtype=np.int32)).reshape(-1)
    return np.concatenate([whole, np.arange(tail, dtype=np.int32)])


class Held(NamedTuple):
    """A pin that is out; `owner` is the claimant, or -1 for a plain pin."""

    receipt: Pin
    key: Key
    owner: int


class Content(NamedTuple):
    """What a cache holds, page by page."""

    resident: dict[Key, int]
    owners: dict[Key, int]
    pins: dict[int, Key]
    node_ends: set[Key]
    leaves: list[Key]


def content_of(cache: CacheState) -> Content:
    """Reads a tree into the terms of the naive model."""
    content = Content({}, {}, {}, set(), [])
    ends: dict[int, Key] = {}
    stack = [(root_id, (namespace, b"")) for namespace, root_id in cache.roots.items()]
    while stack:
        node_id, (namespace, data) = stack.pop()
        node = cache.nodes[node_id]
        owners = radix_tree.owners_of(node)
        for page in range(node.num_pages):
            key = (namespace, data + node.tokens[: (page + 1) * 4 * cache.page_size])
            if node.page_ids[page] != NO_PAGE:
                content.resident[key] = int(node.page_ids[page])
            if owners[page] != NO_OWNER:
                content.owners[key] = int(owners[page])
        ends[node_id] = (namespace, data + node.tokens)
        if node.tokens and node.children:
            content.node_ends.add(ends[node_id])
        stack.extend((child_id, ends[node_id]) for child_id in node.children.values())
    content.pins.update({pin_id: ends[node_id] for pin_id, node_id in cache.pins.items()})
    content.leaves.extend(ends[node_id] for _, node_id in leaf_order.in_order(cache.leaves))
    return content


class CacheMachine(RuleBasedStateMachine):
    """A cache, the naive model beside it, and what callers hold of both."""

    operations: ClassVar[int] = 0

    def __init__(self):
        super().__init__()
        self.seen: list[tuple[CacheState, object]] = []
        self.num_operations = 0
        self.lookups = RepeatedLookups()

    @initialize(
        page_size=st.sampled_from([1, 4, 64]),
        num_pages=st.integers(8, 32),
        first=st.lists(texts, min_size=2, max_size=6),
        policy=policies,
    )
    def start(self, page_size: int, num_pages: int, first: list[str], policy: Policy):
        self.page_size = page_size
        self.cache = radix_tree.make_cache(page_size, num_pages)
        self.model = NaiveCache(page_size, num_pages)
        self.private: list[int] = []
        self.held: list[Held] = []
        self.next_owner = 0
        for text in first:
            self.insert_pages(text, "", 0, False, policy)

    def done(self, cache: CacheState) -> None:
        """Takes the next cache value; some old ones are kept to be looked at later."""
        CacheMachine.operations += 1
        self.num_operations += 1
        if self.num_operations % 7 == 0:
            self.seen.append((self.cache, rendered(self.cache)))
        self.cache = cache

    def take(self, num_pages: int) -> np.ndarray:
        """Takes as many of `num_pages` pages as are free."""
        pool, page_ids = pages.take(self.cache.device, min(num_pages, self.cache.device.num_free))
        self.cache = dataclasses.replace(self.cache, device=pool)
        self.model.free.difference_update(page_ids.tolist())
        return page_ids

    def give_back(self, page_ids: list[int]) -> None:
        pool = pages.give_back(self.cache.device, np.array(page_ids, np.int32))
        self.cache = dataclasses.replace(self.cache, device=pool)
        self.model.free.update(page_ids)

    @rule(text=texts, namespace=namespaces, tail=st.integers(0, 3), limit=st.none() | st.integers(0, 8))
    def match(self, text: str, namespace: str, tail: int, limit: int | None):
        tokens = tokens_of(text, self.page_size, min(tail, self.page_size - 1))
        before = rendered(self.cache)
        found = lookup.match(self.cache, tokens, namespace, limit)
        self.lookups.check(self.cache, tokens, namespace, limit)
        assert rendered(self.cache) == before
        expected = self.model.match(tokens, namespace, limit)
        assert found.stop == len(expected) * self.page_size
        assert found.page_ids.tolist() == [NO_PAGE if page_id is None else page_id for _, page_id, _ in expected]
        flat: list[tuple[Tier, int]] = []
        for span, after in zip(found.spans, (*found.spans[1:], None)):
            assert span.stop > span.start == len(flat) * self.page_size
            assert after is None or (span.tier, span.owner) != (after.tier, after.owner)
            flat.extend([(span.tier, span.owner)] * ((span.stop - span.start) // self.page_size))
        assert flat == [(Tier.MISSING if page_id is None else Tier.DEVICE, owner) for _, page_id, owner in expected]
        self.done(self.cache)

    @rule(text=texts, namespace=namespaces, first=st.integers(0, 6), keep=st.booleans(), policy=policies)
    def insert(self, text: str, namespace: str, first: int, keep: bool, policy: Policy):
        """Inserts the pages of `text` from `first` on."""
        self.insert_pages(text, namespace, min(first, len(text) - 1), keep, policy)

    @rule(text=texts, policy=policies)
    def insert_all(self, text: str, policy: Policy):
        self.insert_pages(text, "", 0, False, policy)

    def insert_pages(self, text: str, namespace: str, first: int, keep: bool, policy: Policy) -> None:
        """Inserts as much as there is room for, evicting what must go for it."""
        short = len(text) - first - self.cache.device.num_free
        if short > 0:
            self.compare_eviction(short, policy)
        page_ids = self.take(len(text) - first)
        num_pages = first + len(page_ids)
        tokens = tokens_of(text[:num_pages], self.page_size)
        cache, done = histories.insert(self.cache, tokens, page_ids, first * self.page_size, namespace)
        adopted, refused = self.model.insert(self.model.key(tokens, num_pages, namespace), page_ids.tolist())
        assert (done.adopted.tolist(), done.refused.tolist()) == (adopted, refused)
        self.done(cache)
        if keep:
            self.private.extend(refused)
        else:
            self.give_back(refused)

    @rule(text=texts, namespace=namespaces)
    def touch(self, text: str, namespace: str):
        tokens = tokens_of(text, self.page_size)
        found = lookup.match(self.cache, tokens, namespace)
        self.model.touch(self.model.key(tokens, found.stop // self.page_size, namespace))
        self.done(histories.touch(self.cache, found))

    @precondition(lambda self: len(self.held) < 4)
    @rule(text=texts, namespace=namespaces)
    def pin(self, text: str, namespace: str):
        tokens = tokens_of(text, self.page_size)
        found = lookup.match(self.cache, tokens, namespace)
        cache, receipt = histories.pin(self.cache, found, namespace)
        assert receipt.stop == found.stop
        key = self.model.key(tokens, found.stop // self.page_size, namespace)
        self.model.pin(receipt.pin_id, key)
        self.held.append(Held(receipt, key, -1))
        self.done(cache)

    @precondition(lambda self: len(self.held) < 4)
    @rule(text=texts, namespace=namespaces)
    def claim(self, text: str, namespace: str):
        tokens = tokens_of(text, self.page_size)
        owner, self.next_owner = self.next_owner, self.next_owner + 1
        cache, got = histories.claim(self.cache, tokens, len(text), owner, namespace)
        key = self.model.key(tokens, len(text), namespace)
        owned = [place for start, stop in got.owned for place in range(start, stop, self.page_size)]
        expected = self.model.claim(got.pin.pin_id, key, owner)
        assert owned == [len(place[1]) // 4 - self.page_size for place in expected]
        assert all(left[1] < right[0] for left, right in zip(got.owned, got.owned[1:]))
        assert got.pin.stop == len(tokens)
        self.held.append(Held(got.pin, key, owner))
        self.done(cache)

    @precondition(lambda self: any(held.owner >= 0 for held in self.held))
    @rule(data=st.data(), num_pages=st.integers(1, 4))
    def fill(self, data: st.DataObject, num_pages: int):
        """Fills the front of the first owned span of a claimant, as an engine step does."""
        held = data.draw(st.sampled_from([held for held in self.held if held.owner >= 0]))
        mine = [key for key in self.model.path(held.key) if self.model.owners.get(key) == held.owner]
        if not mine:
            return
        run = mine[:1]
        for key in mine[1:]:
            if self.model.above(key) != run[-1]:
                break
            run.append(key)
        page_ids = self.take(min(num_pages, len(run)))
        if not len(page_ids):
            return
        run = run[: len(page_ids)]
        start = len(run[0][1]) // 4 - self.page_size
        cache = histories.fill(self.cache, held.receipt, start, page_ids, held.owner)
        self.model.fill(run, page_ids.tolist(), held.owner)
        self.done(cache)

    @precondition(lambda self: any(held.receipt.stop for held in self.held))
    @rule(data=st.data(), page=st.integers(0, 7))
    def split_at(self, data: st.DataObject, page: int):
        held = data.draw(st.sampled_from([held for held in self.held if held.receipt.stop]))
        page = min(page, held.receipt.stop // self.page_size)
        if page:
            self.model.cuts.add(self.model.path(held.key)[page - 1])
        self.done(histories.split_at(self.cache, held.receipt, page * self.page_size))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def leave(self, data: st.DataObject):
        """Gives a pin back; a claimant's unfilled pages pass to the oldest other claimant on their path."""
        held = data.draw(st.sampled_from(self.held))
        self.held.remove(held)
        cache = self.cache
        if held.owner >= 0:
            heirs = [other for other in self.held if other.owner >= 0]
            receipts = tuple((other.owner, other.receipt) for other in heirs)
            cache = histories.pass_on(cache, held.receipt, held.owner, receipts)
            self.model.pass_on(held.owner, [(other.owner, other.key) for other in heirs])
        cache = histories.unpin(cache, held.receipt)
        self.model.unpin(held.receipt.pin_id)
        with pytest.raises(ValueError, match="is not out"):
            histories.unpin(cache, held.receipt)
        self.done(cache)

    @rule(num_pages=st.integers(1, 9), policy=policies)
    def evict(self, num_pages: int, policy: Policy):
        self.compare_eviction(num_pages, policy)

    @precondition(lambda self: self.next_owner % 5 == 4)  # seldom: an empty cache is dull
    @rule(policy=policies)
    def evict_all(self, policy: Policy):
        self.compare_eviction(self.cache.num_resident, policy)
        assert set(content_of(self.cache).resident) <= self.model.pinned()

    def compare_eviction(self, num_pages: int, policy: Policy) -> None:
        pinned = {key: self.model.resident[key] for key in self.model.pinned() & set(self.model.resident)}
        evictable = len(self.model.resident) - len(pinned)
        cache, done = eviction.evict(self.cache, num_pages, policy)
        freed = self.model.evict(num_pages, policy)
        assert sum(span.stop - span.start for span in done.spans) == done.num_pages * self.page_size
        newly_free = list(cache.device.free_ids())[: done.num_pages]
        if policy.start is Start.LEAF_TAIL:  # the model frees page by page from the end, the tree a run at once
            assert sorted(newly_free) == sorted(freed.page_ids)
        else:
            assert newly_free == freed.page_ids
        assert done.num_short == freed.num_short == max(0, num_pages - evictable)
        if policy.unit is Unit.PAGE:
            assert done.num_pages == min(num_pages, evictable)
        assert pinned.items() <= content_of(cache).resident.items()
        self.done(cache)

    @precondition(lambda self: self.private)
    @rule(data=st.data())
    def give_private_back(self, data: st.DataObject):
        page_id = data.draw(st.sampled_from(self.private))
        self.private.remove(page_id)
        self.give_back([page_id])
        self.done(self.cache)

    @invariant()
    def agrees_with_the_model(self):
        check_cache(self.cache, tuple(self.private))
        content = content_of(self.cache)
        model = self.model
        assert content.resident == model.resident
        assert content.owners == model.owners
        assert content.pins == model.pins
        known = model.known()
        assert content.node_ends == {key for key in model.cuts if model.below(key, known)}
        assert content.leaves == model.leaves()
        assert set(self.cache.device.free_ids()) == model.free

    def teardown(self):
        for cache, print_ in self.seen:
            assert rendered(cache) == print_, "an old cache value changed"
        if not hasattr(self, "cache"):
            return
        for held in self.held:
            self.cache = histories.unpin(self.cache, held.receipt)
        check_cache(self.cache, tuple(self.private))
        self.cache, _ = eviction.evict(self.cache, self.cache.num_resident, POLICIES["penelope"])
        assert (len(self.cache.nodes), len(self.cache.roots), self.cache.num_resident) == (0, 0, 0)


def run(seeds: range, **options: bool) -> int:
    """Returns how many operations there were."""
    before = CacheMachine.operations
    seeded_machines.run(CacheMachine, seeds, **options)
    return CacheMachine.operations - before


def test_cache_agrees_with_the_naive_model():
    num_operations = run(range(40))
    # What a seed draws depends on the modules that are loaded, so seeds go on until enough has happened.
    for seed in range(40, 120):
        if num_operations >= MIN_OPERATIONS:
            return
        num_operations += run(range(seed, seed + 1))
    raise AssertionError(num_operations)


@pytest.mark.slow
def test_cache_agrees_with_the_naive_model_at_length():
    num_operations = run(range(1_000, 1_480))
    for seed in range(1_480, 2_400):
        if num_operations >= 10 * MIN_OPERATIONS:
            return
        num_operations += run(range(seed, seed + 1))
    raise AssertionError(num_operations)


# Controls: a fault in the cache must be noticed.


def greedy_front(edit: TreeEdit, leaf: Node, num_pages: int, unit: Unit) -> list[tuple[Node, int, int]]:
    """Frees from the root on, whoever shares or pins it."""
    node = leaf
    while edit.nodes[node.parent_id].num_resident:
        node = edit.nodes[node.parent_id]
    first = int(np.flatnonzero(node.page_ids != NO_PAGE)[0])
    return [(node, first, first + 1)]


def set_pages_in_place(edit: TreeEdit, node: Node, first: int, page_ids: np.ndarray, tier: Tier) -> Node:
    """Writes into the arrays of the old value."""
    stop = first + len(page_ids)
    change = int((page_ids != NO_PAGE).sum()) - int((node.page_ids[first:stop] != NO_PAGE).sum())
    owners = None if node.owners is None else node.owners.copy()
    for array, values in ((node.page_ids, page_ids), (node.tiers, tier), (owners, NO_OWNER)):
        if array is not None:
            array.flags.writeable = True
            array[first:stop] = values
    return edit.put(node._replace(num_resident=node.num_resident + change, owners=owners))


def pass_nothing_on(cache: CacheState, *_) -> CacheState:
    return cache


@pytest.mark.parametrize(
    ("target", "name", "fault"),
    [
        (eviction._CHOOSERS, Start.PRIVATE_FRONT, greedy_front),
        (eviction._CHOOSERS, Start.LEAF_TAIL, eviction._leaf_head),
        (TreeEdit, "set_pages", set_pages_in_place),
        (histories, "pass_on", pass_nothing_on),
    ],
    ids=["greedy front", "head for tail", "in place", "no heir"],
)
def test_a_fault_is_noticed(monkeypatch: pytest.MonkeyPatch, target, name, fault):
    if isinstance(target, dict):
        monkeypatch.setitem(target, name, fault)
    else:
        monkeypatch.setattr(target, name, fault)
    with pytest.raises((AssertionError, ValueError)):
        run(range(16), shrink=False)
