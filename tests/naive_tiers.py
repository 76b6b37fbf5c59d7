"""The naive cache (naive_cache.py) with a host tier: still one flat list of pages, each with a place and a stamp.

A page on the host is one whose key is in `on_host`; a page that moves is one whose key is in `moving`. What is evicted
is chosen from both tiers together, what is demoted from the device alone, both by the stamps of pages.
"""

from typing import NamedTuple

from naive_cache import Freed, Key, NaiveCache

from penelope_jax.config import Policy, Start, Unit

LEAVING = -2


class Flight(NamedTuple):
    """A move under way: what it moves, None where the cache has let go of a page, and the ids at both ends."""

    loads: bool
    keys: list[Key | None]
    device_ids: list[int]
    host_ids: list[int]


class NaiveTiers(NaiveCache):
    """Attributes, besides those of `NaiveCache`, whose `resident` has the page id in the tier of the page:

    on_host: keys of pages on the host.
    moving: key -> `LEAVING`, or the device page that it is loaded into; planned demotions are not in it.
    flights: move id -> Flight.
    host_free: host page ids in no one's hands.
    """

    def __init__(self, page_size: int, num_pages: int, num_host_pages: int):
        super().__init__(page_size, num_pages)
        self.on_host: set[Key] = set()
        self.moving: dict[Key, int] = {}
        self.planned: dict[Key, int] = {}  # demotions that have not begun -> the device page that they leave
        self.flights: dict[int, Flight] = {}
        self.host_free = set(range(num_host_pages))

    # Who stays and who may go.

    def leaves(self) -> list[Key]:
        return [key for key in super().leaves() if key not in self.moving]

    def device_leaves(self) -> list[Key]:
        """Returns the device pages with neither device pages nor pins at or below them, oldest first."""
        busy = {place for key in self.resident if key not in self.on_host for place in self.path(key)[:-1]}
        pinned = self.pinned()
        leaves = [key for key in self.resident if not (key in self.on_host or key in busy or key in pinned)]
        return sorted(leaves, key=lambda key: self.stamps[key])

    def node_around(self, key: Key) -> list[Key]:
        """Returns the known pages of the node that a page is in, in order."""
        known, end = self.known(), key
        while end not in self.cuts and (below := self.below(end, known)):
            (end,) = below
        return self.node_of(end)

    def closed(self, place: Key, known: set[Key], pinned: set[Key]) -> bool:
        """Whether the private part of a history ends below this page: it is missing, pinned or shared."""
        return place not in self.resident or place in pinned or len(self.below(place, known)) >= 2

    # Eviction from both tiers.

    def victims(self, leaf: Key, num_pages: int, policy: Policy) -> list[Key]:
        free_to_go = [place for place in self.node_of(leaf) if place in self.resident and place not in self.moving]
        if policy.start is Start.LEAF_HEAD:
            return free_to_go if policy.unit is Unit.NODE else free_to_go[:num_pages]
        if policy.start is Start.LEAF_TAIL:
            run = [leaf]
            while (place := self.above(run[0])) in free_to_go:
                run.insert(0, place)
            return run if policy.unit is Unit.NODE else [leaf]
        return super().victims(leaf, num_pages, policy)

    def private_run(self, leaf: Key) -> list[Key]:
        known, pinned, run = self.known(), self.pinned(), [leaf]
        while True:
            place = self.above(run[0])
            if place is None or place in self.moving or self.closed(place, known, pinned):
                return run
            run.insert(0, place)

    def evict(self, num_pages: int, policy: Policy) -> Freed:
        """Returns what was freed; device ids as they are, host ids as -1 - id."""
        freed: list[int] = []
        while len(freed) < num_pages and (leaves := self.leaves()):
            for place in self.victims(leaves[0], num_pages - len(freed), policy):
                freed.append(self.drop(place))
            self.forget()
        return Freed(freed, max(0, num_pages - len(freed)))

    def drop(self, place: Key) -> int:
        page_id = self.resident.pop(place)
        self.planned.pop(place, None)
        if place not in self.on_host:
            self.free.add(page_id)
            return page_id
        self.on_host.remove(place)
        self.host_free.add(page_id)
        return -1 - page_id

    # What leaves the device.

    def demoted_of(self, leaf: Key, num_pages: int, policy: Policy) -> list[Key]:
        """Returns what leaves of one history before the order is looked at again."""
        node = self.node_around(leaf)
        on_device = [place for place in node if place in self.resident and place not in self.on_host]
        if policy.start is Start.LEAF_HEAD:
            return on_device[:num_pages]
        if policy.start is Start.LEAF_TAIL:
            return self.from_the_end(on_device, num_pages)
        known, pinned, chain = self.known(), self.pinned(), list(node)
        while all(place in self.resident for place in chain):
            above = self.above(chain[0])
            if above is None or self.closed(above, known, pinned):
                break
            chain = self.node_of(above) + chain
        missing = [index for index, place in enumerate(chain) if place not in self.resident]
        behind = chain[missing[-1] + 1 :] if missing else chain
        chosen = [place for place in behind if place not in self.on_host and place in self.resident]
        return chosen[:num_pages] if chosen else self.from_the_end(on_device, num_pages)

    def from_the_end(self, places: list[Key], num_pages: int) -> list[Key]:
        """Returns the last places of a history, adjacent ones in the order of positions, later runs first."""
        runs: list[list[Key]] = []
        for place in reversed(places[-num_pages:]):
            if runs and self.above(runs[-1][0]) == place:
                runs[-1].insert(0, place)
            else:
                runs.append([place])
        return [place for run in runs for place in run]

    def demote(self, num_pages: int, policy: Policy, newest: int | None = None) -> list[Key]:
        """Returns up to `num_pages` pages in the order in which they leave; `put_on_host` moves them."""
        chosen: list[Key] = []
        elsewhere = self.on_host
        self.on_host = set(elsewhere)
        while len(chosen) < num_pages and (leaves := self.device_leaves()):
            if newest is not None and self.stamps[leaves[0]] > newest:
                break
            places = self.demoted_of(leaves[0], num_pages - len(chosen), policy)
            self.on_host.update(places)
            chosen.extend(places)
        self.on_host = elsewhere
        return chosen

    def put_on_host(self, key: Key, host_id: int) -> int:
        """Plans a demotion; returns the device page that is free from now on."""
        self.host_free.remove(host_id)
        device_id, self.resident[key] = self.resident[key], host_id
        self.on_host.add(key)
        self.planned[key] = device_id
        self.free.add(device_id)
        return device_id

    # Moves.

    def loadable(self, key: Key) -> list[Key]:
        still = self.on_host - set(self.moving) - set(self.planned)
        return [place for place in self.path(key) if place in still]

    def begin(self, move_id: int, loads: bool, keys: list[Key], device_ids: list[int]) -> None:
        """A move begins."""
        self.flights[move_id] = Flight(loads, list(keys), device_ids, [self.resident[key] for key in keys])
        for key, device_id in zip(keys, device_ids, strict=True):
            self.moving[key] = device_id if loads else LEAVING
            self.planned.pop(key, None)

    def end(self, move_id: int, fails: bool, heirs: list[tuple[int, Key]]) -> int:
        """A move ends; returns how many pages were lost."""
        flight, lost = self.flights.pop(move_id), 0
        for key, device_id, host_id in zip(flight.keys, flight.device_ids, flight.host_ids, strict=True):
            if key is None:
                self.host_free.add(host_id)
                self.free.update([device_id] if flight.loads else [])
                continue
            del self.moving[key]
            if fails:
                self.free.update([device_id] if flight.loads else [])
                self.drop(key)
                lost += 1
                for heir, end in heirs:
                    if key in self.path(end):
                        self.owners[key] = heir
                        break
            elif flight.loads:
                self.on_host.remove(key)
                self.host_free.add(host_id)
                self.resident[key] = device_id
        self.forget()
        return lost

    def let_go(self) -> None:
        """Forgets the moving pages that no pin protects; their ids are free when the moves end."""
        pinned = self.pinned()
        for flight in self.flights.values():
            for index, key in enumerate(flight.keys):
                if key is not None and key not in pinned:
                    flight.keys[index] = None
                    del self.moving[key], self.resident[key]
                    self.on_host.remove(key)
        self.forget()
