"""Room on the device for a step: first what is finally evicted, then what changes its tier (design rule 11).

New pages need room in both tiers together: what lacks is evicted, in one order over both. Then the device must have the
place: what lacks leaves it for the host, in the same order, which evicts nothing. A load changes places with what makes
room for it, so with both tiers full it goes through the swap buffer: host pages are free again when loads have ended.
For comparison, `inclusive.py` makes room as two caches do.

`Room` collects changes to one cache value while a plan is made, and never escapes it.
"""

from collections.abc import Sequence

import numpy as np

from penelope_jax import demotion, eviction, histories, inclusive, pages, radix_tree, tiers
from penelope_jax.admission import look_up, surely_evictable
from penelope_jax.changed import changed
from penelope_jax.config import EngineConfig
from penelope_jax.moves import MAX_MOVE_PAGES, Move, MoveKind
from penelope_jax.pages import Tier
from penelope_jax.path_view import PathView
from penelope_jax.radix_tree import CacheState
from penelope_jax.segments import EvictedSpan
from penelope_jax.state import Request
from penelope_jax.tiers import Load


class Room:
    """The part of planning that finds pages.

    Attributes:
        config: limits and choices.
        cache: as changed so far.
        evicted: spans evicted, in order.
        tally: what the plan adds to the counters.
        is_short: whether somebody did not get the pages he asked for.
        moving_left: how many more pages may begin to move.
    """

    def __init__(self, config: EngineConfig, cache: CacheState):
        self.config = config
        self.cache = cache
        self.evicted: list[EvictedSpan] = []
        self.tally: dict[str, int] = {}
        self.is_short = False
        self._demoted: dict[int, int] = {}  # host id -> device id, of demotions of this plan
        self._loads: list[Load] = []
        # Pages that come free one by one are waited for, else moves and pieces of prompts would be ever smaller. Half
        # of the swap buffer at a time keeps both ways of the link busy.
        self._worthwhile = min(MAX_MOVE_PAGES, max(1, config.num_swap_pages // 2))
        self._inclusive = config.policy.inclusive and config.num_host_pages > 0
        self._num_loading = tiers.num_loading(cache)
        self.moving_left = config.max_moving_pages - tiers.num_moving(cache)

    def tell(self, counter: str, number: int) -> None:
        self.tally[counter] = self.tally.get(counter, 0) + number

    @property
    def moving(self) -> bool:
        """Whether pages are under way, so that there may be more room when they have arrived."""
        # What was to be demoted may have been evicted since.
        demoting = any(host_id in self.cache.moving for host_id in self._demoted)
        return bool(self.cache.moves) or bool(self._loads) or demoting

    def take(self, num_pages: int) -> np.ndarray | None:
        """Takes device pages: free ones, then those that eviction and demotion give.

        Returns:
            i32[num_pages], or None if there are not that many to be had now.
        """
        self.free_up(num_pages)
        if num_pages > self.cache.device.num_free:
            self.is_short = True
            return None
        pool, page_ids = pages.take(self.cache.device, num_pages)
        self.cache = changed(self.cache, device=pool)
        return page_ids

    def free_up(self, num_pages: int) -> None:
        """Evicts and demotes until `num_pages` device pages are free.

        First it evicts what both tiers together lack, also where the device then cannot give that many pages now.
        """
        short = num_pages - self.cache.device.num_free
        if short <= 0:
            return
        if self._inclusive:
            self._write_back(short)
        else:
            self._evict(short - max(0, self._host_room()))
            self._demote(min(num_pages - self.cache.device.num_free, self._host_room()))

    def free_up_at_once(self, num_pages: int, running: Sequence[Request]) -> None:
        """Frees pages for all decodes, since one by one each looks for the oldest history.

        Only where so many are sure to be had: else pages might be evicted, and even then not all be free.
        """
        short = num_pages - self.cache.device.num_free
        if 0 < short <= min(surely_evictable(self.cache, self.config, running), self.moving_left):
            self.free_up(num_pages)

    def too_few(self, num_pages: int, wanted: int) -> bool:
        """Whether to wait for more than `num_pages` free pages, of `wanted`: pages that are moving will make room."""
        return self.moving and num_pages < min(wanted, self._worthwhile)

    def load(
        self, request_id: int, node_ids: Sequence[int], stop: int, wanted: int, *, newest: int | None = None
    ) -> int:
        """Begins to load the first host pages of a path, as many as can find a place.

        Evicts nothing, unless the tiers are two caches.

        Args:
            request_id: for whom.
            node_ids: the path, root first.
            stop: its end, in tokens.
            wanted: how many; at most `tiers.loadable`.
            newest: make room only with what was not touched after this logical time: a prefetch.

        Returns:
            How many pages.
        """
        enough = min(wanted, self._worthwhile)
        free = self.cache.device.num_free
        wanted = min(wanted, self.moving_left)
        if wanted > free:
            # For each page more than are free another one must move the other way.
            wanted = min(wanted, free + (self.moving_left - free) // 2)
            if not self._inclusive:
                wanted = min(wanted, free + self.cache.host.num_free)
        if wanted <= 0 or self.too_few(wanted, enough):
            return 0
        room = max(0, self._host_room())
        num_demoted = 0
        if self._inclusive:
            self._write_back(wanted - free)
        else:
            num_demoted = self._demote(wanted - free, newest=newest)
        number = min(wanted, self.cache.device.num_free, self.moving_left)
        if number <= 0:
            return 0
        num_swapped = min(number, max(0, num_demoted - room))
        self.cache, host_ids, device_ids = tiers.load(self.cache, node_ids, stop, number)
        prefetch = newest is not None
        self._loads.append(Load(request_id, prefetch, num_swapped, host_ids, device_ids))
        self._num_loading += number
        self.moving_left -= number
        self.tell("loaded_pages", number)
        self.tell("prefetched_pages", number if prefetch else 0)
        self.tell("swapped_loads", num_swapped)
        return number

    def load_path(self, request: Request, view: PathView) -> int:
        """Begins to load the host pages of a running request's path; returns how many are still to be loaded."""
        number = 0
        if view.num_loadable and self.moving_left > 0:
            number = self.load(request.request_id, view.host_node_ids, request.path_stop, view.num_loadable)
        return view.num_to_load - number

    def prefetch(self, waiting: tuple[Request, ...], before: int) -> None:
        """Loads host pages of the requests that are next, within a bound, and only in the place of older histories.

        Args:
            waiting: next one first.
            before: what was touched after this logical time keeps its place.
        """
        left = self.config.max_prefetch_pages - self._num_prefetching()
        pins = []
        for request in waiting:
            if left <= 0 or self.moving_left <= 0:
                break
            found = look_up(self.cache, request).found
            if not any(span.tier is Tier.HOST for span in found.spans):
                continue
            # Neither its own pages nor those of whoever is before it make room for it, nor are they the next to leave.
            self.cache = histories.touch(self.cache, found)
            found = look_up(self.cache, request).found
            self.cache, pin = histories.pin(self.cache, found, request.namespace)
            pins.append(pin)
            path = [node.node_id for node in radix_tree.path_nodes(self.cache, pin.node_id)]
            wanted = min(left, tiers.loadable(self.cache, path, found.stop))
            got = self.load(request.request_id, path, found.stop, wanted, newest=before)
            left -= got
            if got < wanted:
                break  # nor would those behind it get any
        for pin in pins:
            self.cache = histories.unpin(self.cache, pin)

    def _num_prefetching(self) -> int:
        """Returns how many pages are being loaded for requests that wait."""
        moves = (move for move in self.cache.moves.values() if move.kind is MoveKind.LOAD and move.prefetch)
        planned = (len(item.host_ids) for item in self._loads if item.prefetch)
        return sum(len(move.host_ids) for move in moves) + sum(planned)

    def start_moves(self) -> tuple[Move, ...]:
        """Returns the moves of the plan; from here on they are under way."""
        if not self._demoted and not self._loads:
            return ()
        self.cache, moves, going = tiers.start(self.cache, self._demoted, self._loads, blocking=self._inclusive)
        self.tell("demoted_pages", len(going))
        return moves

    def _host_room(self) -> int:
        """Returns how many pages the host may take for good."""
        host = self.cache.host
        return self.cache.host_capacity - (host.num_pages - host.num_free) + self._num_loading

    def _evict(self, num_pages: int) -> None:
        if num_pages <= 0:
            return
        self.cache, done = eviction.evict(self.cache, num_pages, self.config.policy)
        self.evicted.extend(done.spans)
        self.tell("evicted_pages", done.num_pages)

    def _write_back(self, num_pages: int) -> None:
        if num_pages <= 0:
            return
        reclaim = self.config.policy.reclaim_copies
        self.cache, done = inclusive.make_room(self.cache, num_pages, self.moving_left, reclaim_copies=reclaim)
        self.evicted.extend(done.spans)
        self.tell("evicted_pages", done.num_evicted)
        self._demoted.update(zip(done.host_ids.tolist(), done.device_ids.tolist(), strict=True))
        self.moving_left -= len(done.host_ids)

    def _demote(self, num_pages: int, *, newest: int | None = None) -> int:
        num_pages = min(num_pages, self.moving_left)
        if num_pages <= 0 or not self.cache.host.num_free:
            return 0
        self.cache, moved = demotion.demote(self.cache, num_pages, self.config.policy, newest=newest)
        self._demoted.update(zip(moved.host_ids.tolist(), moved.device_ids.tolist(), strict=True))
        self.moving_left -= len(moved.host_ids)
        return len(moved.host_ids)
