"""Random operations on a cache of two tiers, each compared with a naive model (naive_tiers.py).

After every operation: conservation of pages in both tiers and in flight, the invariants of the tree, and equality with
the model: what is resident and in which tier, what moves, the order of final eviction and the order of demotion.
"""

import dataclasses
import random
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from naive_cache import Key
from naive_tiers import NaiveTiers
from repeated_lookups import RepeatedLookups
from test_cache_machine import Held, content_of, tokens_of

from penelope_jax import demotion, eviction, histories, leaf_order, lookup, pages, radix_tree, tiers
from penelope_jax.config import POLICIES, Policy, Start
from penelope_jax.invariants import check_cache
from penelope_jax.pages import NO_PAGE, Tier
from penelope_jax.radix_tree import STILL, CacheState, Node
from penelope_jax.tiers import Load
from penelope_jax.tree_edit import TreeEdit

MIN_OPERATIONS = 20_000
RUN = 120  # operations from one seed

OPENINGS = ("A", "ABCA", "ABB", "BAC", "CCAB")


def tiers_of(cache: CacheState) -> tuple[set[Key], dict[Key, int], list[Key]]:
    """Returns the pages on the host, those that move, and the deepest device page of each device leaf in order."""
    ends: dict[int, Key] = {}
    on_host: set[Key] = set()
    moving: dict[Key, int] = {}
    deepest: dict[int, Key] = {}
    stack = [(root_id, (namespace, b"")) for namespace, root_id in cache.roots.items()]
    while stack:
        node_id, (namespace, data) = stack.pop()
        node = cache.nodes[node_id]
        marks = radix_tree.moving_of(node)
        for page in range(node.num_pages):
            key = (namespace, data + node.tokens[: (page + 1) * 4 * cache.page_size])
            if node.tiers[page] == Tier.HOST:
                on_host.add(key)
            elif node.tiers[page] == Tier.DEVICE:
                deepest[node_id] = key
            if marks[page] != STILL:
                moving[key] = int(marks[page])
        ends[node_id] = (namespace, data + node.tokens)
        stack.extend((child_id, ends[node_id]) for child_id in node.children.values())
    return on_host, moving, [deepest[node_id] for _, node_id in leaf_order.in_order(cache.device_leaves)]


class Run:
    """A cache, the model beside it, and what callers hold of both; all choices come from a seed."""

    def __init__(self, seed: int, policies: list[Policy]):
        self.random = random.Random(seed)
        self.policies = policies
        self.page_size = self.random.choice([1, 1, 4])
        num_pages, num_host, num_swap = (
            self.random.randint(4, 14),
            self.random.randint(1, 14),
            self.random.randint(1, 3),
        )
        self.cache = radix_tree.make_cache(self.page_size, num_pages, num_host, num_swap)
        self.model = NaiveTiers(self.page_size, num_pages, num_host + num_swap)
        self.held: list[Held] = []
        self.next_owner = 0
        self.lookups = RepeatedLookups()
        self.happened: Counter[str] = Counter()

    # Choices.

    @property
    def policy(self) -> Policy:
        return self.random.choice(self.policies)

    def text(self) -> str:
        more = self.random.randint(0, 4)
        return self.random.choice(OPENINGS) + "".join(self.random.choice("ABC") for _ in range(more))

    def tokens(self) -> tuple[np.ndarray, str]:
        return tokens_of(self.text(), self.page_size), self.random.choice(["", "", "", "salt"])

    def found(self) -> tuple[radix_tree.Match, str, Key]:
        tokens, namespace = self.tokens()
        found = lookup.match(self.cache, tokens, namespace)
        return found, namespace, self.model.key(tokens, found.stop // self.page_size, namespace)

    # Operations.

    def match(self) -> None:
        tokens, namespace = self.tokens()
        found = lookup.match(self.cache, tokens, namespace)
        self.lookups.check(self.cache, tokens, namespace)
        expected = self.model.match(tokens, namespace)
        assert found.page_ids.tolist() == [NO_PAGE if page_id is None else page_id for _, page_id, _ in expected]
        flat = [span.tier for span in found.spans for _ in range(span.start, span.stop, self.page_size)]
        places = [
            Tier.MISSING if page_id is None else Tier.HOST if key in self.model.on_host else Tier.DEVICE
            for key, page_id, _ in expected
        ]
        assert flat == places

    def insert(self) -> None:
        """Inserts a history, with room made for it as a step does: evictions first, then demotions."""
        tokens, namespace = self.tokens()
        num_pages = len(tokens) // self.page_size
        if self.random.random() < 0.8:
            self.make_room(num_pages - self.cache.device.num_free)
        num_pages = min(num_pages, self.cache.device.num_free)
        pool, page_ids = pages.take(self.cache.device, num_pages)
        self.model.free.difference_update(page_ids.tolist())
        tokens = tokens[: num_pages * self.page_size]
        cache = dataclasses.replace(self.cache, device=pool)
        cache, done = histories.insert(cache, tokens, page_ids, 0, namespace)
        adopted, refused = self.model.insert(self.model.key(tokens, num_pages, namespace), page_ids.tolist())
        assert (done.adopted.tolist(), done.refused.tolist()) == (adopted, refused)
        self.model.free.update(refused)
        self.cache = dataclasses.replace(cache, device=pages.give_back(cache.device, done.refused))

    def make_room(self, short: int) -> None:
        if short > 0:
            policy = self.policy
            room = self.cache.host_capacity - (self.cache.host.num_pages - self.cache.host.num_free)
            self.evicts(short - max(0, room), policy)
            self.start(self.demotes(min(short, self.cache.host.num_free), policy), [])

    def touch(self) -> None:
        found, _, key = self.found()
        self.model.touch(key)
        self.cache = histories.touch(self.cache, found)

    def pin(self) -> None:
        if len(self.held) < 3:
            found, namespace, key = self.found()
            self.cache, receipt = histories.pin(self.cache, found, namespace)
            self.model.pin(receipt.pin_id, key)
            self.held.append(Held(receipt, key, -1))

    def claim(self) -> None:
        if len(self.held) < 3:
            tokens, namespace = self.tokens()
            owner, self.next_owner = self.next_owner, self.next_owner + 1
            num_pages = len(tokens) // self.page_size
            self.cache, got = histories.claim(self.cache, tokens, num_pages, owner, namespace)
            key = self.model.key(tokens, num_pages, namespace)
            owned = [place for start, stop in got.owned for place in range(start, stop, self.page_size)]
            assert owned == [
                len(place[1]) // 4 - self.page_size for place in self.model.claim(got.pin.pin_id, key, owner)
            ]
            self.held.append(Held(got.pin, key, owner))

    def fill(self) -> None:
        """Fills the first pages that a claimant owns, as a step does."""
        mine = [
            (held, places)
            for held in self.held
            if (places := [key for key in self.model.path(held.key) if self.model.owners.get(key) == held.owner >= 0])
        ]
        if not mine or not self.cache.device.num_free:
            return
        held, places = self.random.choice(mine)
        run = places[:1]
        for key in places[1 : min(self.random.randint(1, 3), self.cache.device.num_free)]:
            if self.model.above(key) == run[-1]:
                run.append(key)
        pool, page_ids = pages.take(self.cache.device, len(run))
        self.model.free.difference_update(page_ids.tolist())
        start = len(run[0][1]) // 4 - self.page_size
        cache = dataclasses.replace(self.cache, device=pool)
        self.cache = histories.fill(cache, held.receipt, start, page_ids, held.owner)
        self.model.fill(run, page_ids.tolist(), held.owner)

    def leave(self) -> None:
        if not self.held:
            return
        held = self.held.pop(self.random.randrange(len(self.held)))
        if held.owner >= 0:
            heirs = [other for other in self.held if other.owner >= 0]
            receipts = tuple((other.owner, other.receipt) for other in heirs)
            self.cache = histories.pass_on(self.cache, held.receipt, held.owner, receipts)
            self.model.pass_on(held.owner, [(other.owner, other.key) for other in heirs])
        self.cache = histories.unpin(self.cache, held.receipt)
        self.model.unpin(held.receipt.pin_id)

    def evict(self) -> None:
        self.evicts(self.random.randint(1, 6), self.policy)

    def evicts(self, num_pages: int, policy: Policy) -> None:
        """Evicts; the same victims in the same order, whichever tier they are in."""
        if num_pages <= 0:
            return
        cache, done = eviction.evict(self.cache, num_pages, policy)
        on_host = set(self.model.on_host)
        freed = self.model.evict(num_pages, policy)
        assert (done.num_pages, done.num_short) == (len(freed.page_ids), freed.num_short)
        device_ids = [page_id for page_id in freed.page_ids if page_id >= 0]
        host_ids = [-1 - page_id for page_id in freed.page_ids if page_id < 0]
        # What leaf-tail frees page by page from the end in the model, the tree frees a run at once.
        order = sorted if policy.start is policy.start.LEAF_TAIL else list
        assert order(list(cache.device.free_ids())[: len(device_ids)]) == order(device_ids)
        assert order(list(cache.host.free_ids())[: len(host_ids)]) == order(host_ids)
        self.cache = cache
        self.happened["evicted"] += done.num_pages
        self.happened["evicted from the host"] += len(on_host - self.model.on_host)

    def demotes(self, num_pages: int, policy: Policy, *, spares: bool = False) -> dict[int, int]:
        """Plans demotions; the same pages in the same order. Evicts nothing. Returns host id -> device id.

        With `spares` only pages up to some age may go. The two clocks tick differently, but in the same order.
        """
        before = set(self.model.resident)
        newest, stamp = None, None
        if spares and (leaves := list(leaf_order.in_order(self.cache.device_leaves))):
            index = self.random.randrange(len(leaves))
            newest, stamp = leaves[index][0], self.model.stamps[self.model.device_leaves()[index]]
        cache, done = demotion.demote(self.cache, num_pages, policy, newest=newest)
        keys = self.model.demote(min(num_pages, self.cache.host.num_free), policy, stamp)
        sources = [self.model.resident[key] for key in keys]
        assert done.device_ids.tolist() == sources
        key_of = dict(zip(sources, keys))
        for device_id, host_id in zip(done.device_ids.tolist(), done.host_ids.tolist(), strict=True):
            assert self.model.put_on_host(key_of[device_id], host_id) == device_id
        self.cache = cache
        assert set(self.model.resident) == before == set(content_of(cache).resident)
        self.happened["demoted"] += len(keys)
        return dict(zip(done.host_ids.tolist(), done.device_ids.tolist()))

    def start(self, demoted: dict[int, int], loads: list[Load]) -> None:
        self.cache, moves, going = tiers.start(self.cache, demoted, loads)
        planned = {self.model.resident[key]: key for key in self.model.planned}
        assert sorted(going) == sorted(planned)
        on_host = {self.model.resident[key]: key for key in self.model.on_host}
        for move in moves:
            loading = move.kind is move.kind.LOAD
            keys = [on_host[host_id] for host_id in move.host_ids.tolist()]
            assert loading or all(self.model.planned[key] == demoted[self.model.resident[key]] for key in keys)
            self.model.begin(move.move_id, loading, keys, move.device_ids.tolist())
        assert not self.model.planned

    def demote(self) -> None:
        self.start(self.demotes(self.random.randint(1, 5), self.policy, spares=self.random.random() < 0.4), [])

    def load(self) -> None:
        self.start({}, self.loads())

    def loads(self) -> list[Load]:
        """Begins to load the first host pages of a path. Evicts nothing."""
        found, _, key = self.found()
        if waiting := sorted(self.model.on_host - set(self.model.moving)):
            namespace, data = self.random.choice(waiting)
            found = lookup.match(self.cache, np.frombuffer(data, np.int32), namespace)
            key = self.model.key(np.frombuffer(data, np.int32), found.stop // self.page_size, namespace)
        wanted = self.model.loadable(key)
        assert tiers.loadable(self.cache, found.node_ids, found.stop) == len(wanted)
        number = min(len(wanted), self.cache.device.num_free, self.random.randint(1, 6))
        if not number:
            return []
        before = set(self.model.resident)
        self.cache, host_ids, device_ids = tiers.load(self.cache, found.node_ids, found.stop, number)
        assert host_ids.tolist() == [self.model.resident[place] for place in wanted[:number]]
        self.model.free.difference_update(device_ids.tolist())
        assert set(content_of(self.cache).resident) == before
        self.happened["loaded"] += number
        return [Load(-1, False, 0, host_ids, device_ids)]

    def plan(self) -> None:
        """What one plan may do before its moves begin: demotions that are evicted again, and an exchange."""
        demoted = self.demotes(self.random.randint(1, 4), self.policy)
        if self.random.random() < 0.5:
            self.evicts(self.random.randint(1, 3), self.policy)
            demoted |= self.demotes(self.random.randint(1, 3), self.policy)
        self.start(demoted, self.loads())

    def end(self) -> None:
        """A move ends, well or not."""
        if not self.model.flights:
            return
        move_id = self.random.choice(sorted(self.model.flights))
        heirs = [other for other in self.held if other.owner >= 0]
        if self.random.random() < 0.75:
            self.cache = tiers.arrive(self.cache, move_id)
            self.model.end(move_id, False, [])
        else:
            receipts = tuple((other.owner, other.receipt) for other in heirs)
            self.cache, lost = tiers.fail(self.cache, move_id, receipts)
            assert lost == self.model.end(move_id, True, [(other.owner, other.key) for other in heirs])
            self.happened["lost"] += lost
        with pytest.raises(ValueError, match="is not under way"):
            tiers.arrive(self.cache, move_id)

    def flush(self) -> None:
        """Lets go of what moves, then evicts all that is not pinned."""
        if self.random.random() < 0.15:
            self.cache = tiers.let_go(self.cache)
            self.model.let_go()
            self.evicts(self.cache.num_resident, self.policy)
            assert set(self.model.resident) <= self.model.pinned()
            self.happened["flushes"] += 1

    def check(self) -> None:
        check_cache(self.cache)
        content, model = content_of(self.cache), self.model
        on_host, moving, device_leaves = tiers_of(self.cache)
        assert (content.resident, content.owners, content.pins) == (model.resident, model.owners, model.pins)
        assert (on_host, moving) == (model.on_host, model.moving)
        assert content.leaves == model.leaves(), "the order of final eviction"
        assert device_leaves == model.device_leaves(), "the order of demotion"
        assert set(self.cache.device.free_ids()) == model.free
        assert set(self.cache.host.free_ids()) == model.host_free

    def go(self, num_operations: int) -> None:
        operations: list[Callable[[], None]] = [
            *(self.match, self.touch, self.pin, self.claim, self.fill, self.fill, self.leave, self.evict, self.flush),
            *(self.insert, self.insert, self.insert, self.demote, self.demote, self.load, self.load, self.load),
            *(self.plan, self.end, self.end, self.end),
        ]
        for _ in range(num_operations):
            operation = self.random.choice(operations)
            operation()
            self.check()
        while self.held:
            self.leave()
        while self.model.flights:
            self.end()
        self.check()
        self.evicts(self.cache.num_resident, self.policies[0])
        assert (len(self.cache.nodes), self.cache.num_resident) == (0, 0)
        assert self.cache.host.num_free == self.cache.host.num_pages


ALL = [policy for policy in POLICIES.values() if not policy.inclusive]


def run(seeds: range) -> Counter[str]:
    """Runs each policy alone in turn, and every fourth seed all of them mixed."""
    totals: Counter[str] = Counter()
    for seed in seeds:
        policies = [ALL[seed % len(ALL)]] if seed % 4 else ALL
        one = Run(seed, policies)
        try:
            one.go(RUN)
        except BaseException as error:
            error.add_note(f"{seed=}, {one.random.getstate()[1][-1]} draws")
            raise
        totals += one.happened
    return totals


def test_both_tiers_agree_with_the_naive_model():
    totals = run(range(MIN_OPERATIONS // RUN + 1))
    happened = ("evicted", "evicted from the host", "demoted", "loaded", "lost", "flushes")
    assert all(totals[name] > 100 for name in happened), totals


@pytest.mark.slow
@pytest.mark.parametrize("first", range(10_000, 18_000, 2_000))
def test_both_tiers_agree_with_the_naive_model_at_length(first):
    run(range(first, first + 5 * MIN_OPERATIONS // (2 * RUN) + 1))


# Controls: a fault must be noticed.


def stamp_where_the_touch_ended(edit: TreeEdit, node: Node) -> Node:
    return edit.put(node._replace(stamp=edit.tick()))


def keep_both_places(cache: CacheState, move_id: int) -> CacheState:
    """Lets a load arrive and forgets to give its host pages back."""
    after = ARRIVE(cache, move_id)
    return dataclasses.replace(after, host=cache.host)


ARRIVE = tiers.arrive


@pytest.mark.parametrize(
    ("target", "name", "fault"),
    [
        (demotion._CHOOSERS, Start.LEAF_TAIL, demotion._leaf_head),
        (demotion._CHOOSERS, Start.PRIVATE_FRONT, demotion._leaf_tail),
        (eviction, "held", lambda node: None),
        (tiers, "arrive", keep_both_places),
        (TreeEdit, "stamp", stamp_where_the_touch_ended),
    ],
    ids=["head for tail", "tail for front", "what moves is evicted", "host pages leak", "a stamp does not go up"],
)
def test_a_fault_is_noticed(monkeypatch: pytest.MonkeyPatch, target, name, fault):
    if isinstance(target, dict):
        monkeypatch.setitem(target, name, fault)
    else:
        monkeypatch.setattr(target, name, fault)
    with pytest.raises((AssertionError, ValueError, KeyError)):
        run(range(40))
