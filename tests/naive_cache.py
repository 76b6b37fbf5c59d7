"""The cache's rules once more, as plainly as they can be said, to hold the real one against.

There is no tree, no node and no persistent value here: one dict from a prefix of tokens to the page that holds its last
page of K/V, pins as a list of prefixes, and stamps on every page of a touched path, as SGLang keeps them. Everything
else (what is known, what is a leaf, what is shared, where a node would end) is derived anew whenever it is asked for.
"""

from typing import NamedTuple

import numpy as np

from penelope_jax.config import Policy, Start, Unit

Key = tuple[str, bytes]  # namespace, i32 tokens of whole pages from position 0 as bytes


class Freed(NamedTuple):
    page_ids: list[int]  # in the order in which they were freed
    num_short: int


class NaiveCache:
    """All that a cache holds. Keys name pages: a page is known by all tokens up to its end.

    Attributes:
        resident: key -> page id.
        owners: key of a missing page -> the request that fills it.
        pins: pin id -> key where the pinned path ends (no tokens: the root).
        stamps: key -> logical time of the last touch of a path through it.
        cuts: keys behind which a node ends, because something ended or forked there.
        free: page ids in no one's hands.
    """

    def __init__(self, page_size: int, num_pages: int):
        self.page_bytes = 4 * page_size
        self.resident: dict[Key, int] = {}
        self.owners: dict[Key, int] = {}
        self.pins: dict[int, Key] = {}
        self.stamps: dict[Key, int] = {}
        self.cuts: set[Key] = set()
        self.clock = 0
        self.free = set(range(num_pages))

    # Paths.

    def path(self, key: Key) -> list[Key]:
        """Returns the keys from the first page to this one."""
        namespace, data = key
        return [(namespace, data[:stop]) for stop in range(self.page_bytes, len(data) + 1, self.page_bytes)]

    def key(self, tokens, num_pages: int, namespace: str) -> Key:
        data = np.asarray(tokens, np.int32).tobytes()[: num_pages * self.page_bytes]
        assert len(data) == num_pages * self.page_bytes
        return namespace, data

    def above(self, key: Key) -> Key | None:
        namespace, data = key
        return (namespace, data[: -self.page_bytes]) if len(data) > self.page_bytes else None

    def pinned(self) -> set[Key]:
        return {key for end in self.pins.values() for key in self.path(end)}

    def known(self) -> set[Key]:
        """Returns every page with K/V or a pin at it or below it; all others are forgotten (rule 8)."""
        return {key for end in (*self.resident, *self.pins.values()) for key in self.path(end)}

    def below(self, key: Key, known: set[Key]) -> list[Key]:
        """Returns the known pages right behind this one."""
        return [other for other in known if self.above(other) == key]

    def forget(self) -> None:
        known = self.known()
        self.stamps = {key: stamp for key, stamp in self.stamps.items() if key in known}
        self.owners = {key: owner for key, owner in self.owners.items() if key in known}
        self.cuts &= known

    def stamp(self, key: Key) -> None:
        self.clock += 1
        self.stamps.update(dict.fromkeys(self.path(key), self.clock))

    def make_path(self, key: Key) -> None:
        """Ends a node where the known part of the path ends, and where the path ends."""
        known = self.known()
        inside = [other for other in self.path(key) if other in known]
        self.cuts.update(inside[-1:])
        self.cuts.update(self.path(key)[-1:])

    # Operations.

    def match(self, tokens, namespace: str, max_pages: int | None = None) -> list[tuple[Key, int | None, int]]:
        """Returns (key, page id or None, owner or -1) of each page of the match."""
        limit = len(tokens) // (self.page_bytes // 4)
        limit = limit if max_pages is None else min(limit, max_pages)
        known = self.known()
        found: list[tuple[Key, int | None, int]] = []
        for key in self.path(self.key(tokens, limit, namespace)):
            if key not in known:
                break
            found.append((key, self.resident.get(key), self.owners.get(key, -1)))
        while found and found[-1][1] is None and found[-1][2] == -1:
            found.pop()
        return found

    def touch(self, key: Key) -> None:
        if key[1]:
            self.cuts.add(key)
            self.stamp(key)

    def insert(self, key: Key, page_ids: list[int]) -> tuple[list[int], list[int]]:
        """Returns (adopted, refused) of the pages given for the end of the path."""
        self.make_path(key)
        path = self.path(key)
        adopted, refused = [], []
        for place, page_id in zip(path[len(path) - len(page_ids) :], page_ids):
            if place in self.resident:
                refused.append(page_id)
            else:
                adopted.append(page_id)
                self.resident[place] = page_id
                self.owners.pop(place, None)
        self.stamp(key)
        self.forget()
        return adopted, refused

    def pin(self, pin_id: int, key: Key) -> None:
        if key[1]:
            self.cuts.add(key)
        self.pins[pin_id] = key

    def unpin(self, pin_id: int) -> None:
        del self.pins[pin_id]
        self.forget()

    def claim(self, pin_id: int, key: Key, owner: int) -> list[Key]:
        """Returns the pages that `owner` must fill now."""
        self.make_path(key)
        self.pins[pin_id] = key
        owned = [place for place in self.path(key) if place not in self.resident and place not in self.owners]
        self.owners.update(dict.fromkeys(owned, owner))
        self.stamp(key)
        return owned

    def fill(self, keys: list[Key], page_ids: list[int], owner: int) -> None:
        for key, page_id in zip(keys, page_ids, strict=True):
            assert self.owners.pop(key) == owner
            self.resident[key] = page_id

    def pass_on(self, owner: int, heirs: list[tuple[int, Key]]) -> None:
        for key in [key for key, other in self.owners.items() if other == owner]:
            del self.owners[key]
            for heir, end in heirs:
                if key in self.path(end):
                    self.owners[key] = heir
                    break

    # Eviction.

    def leaves(self) -> list[Key]:
        """Returns the pages where eviction may start, oldest first: resident, nothing known below, not pinned."""
        known = self.known()
        inner = {self.above(key) for key in known}
        pinned = self.pinned()
        leaves = [key for key in self.resident if key not in inner and key not in pinned]
        return sorted(leaves, key=lambda key: self.stamps[key])

    def node_of(self, key: Key) -> list[Key]:
        """Returns the known pages of the node that ends at `key`, in order."""
        node = [key]
        place = self.above(key)
        while place is not None and place not in self.cuts:
            node.insert(0, place)
            place = self.above(place)
        return node

    def private_run(self, leaf: Key) -> list[Key]:
        """Returns the pages from the earliest evictable one of the leaf's history to the leaf."""
        known, pinned = self.known(), self.pinned()
        run = [leaf]
        while True:
            place = self.above(run[0])
            if place is None:  # (a) the root
                return run
            if len(self.below(place, known)) >= 2:  # (b) shared
                return run
            if place in pinned:  # (c)
                return run
            if place not in self.resident:  # (d) missing
                return run
            run.insert(0, place)

    def victims(self, leaf: Key, num_pages: int, policy: Policy) -> list[Key]:
        """Returns what is freed of one history before the order is looked at again."""
        if policy.start is Start.PRIVATE_FRONT:
            run = self.private_run(leaf)
            if policy.unit is Unit.PAGE:
                return run[:num_pages]
            chosen: list[Key] = []
            for place in run:
                chosen.append(place)
                if (place in self.cuts or place == leaf) and len(chosen) >= num_pages:
                    break
            return chosen
        node = [place for place in self.node_of(leaf) if place in self.resident]
        if policy.unit is Unit.NODE:
            return node
        return node[:num_pages] if policy.start is Start.LEAF_HEAD else [leaf]

    def evict(self, num_pages: int, policy: Policy) -> Freed:
        freed: list[int] = []
        while len(freed) < num_pages and (leaves := self.leaves()):
            for place in self.victims(leaves[0], num_pages - len(freed), policy):
                freed.append(self.resident.pop(place))
            self.forget()
        self.free.update(freed)
        return Freed(freed, max(0, num_pages - len(freed)))
