"""Moves pages between the device pool and host memory, while steps run.

A demotion is a gather, which reads the pool as the steps dispatched so far leave it, and a copy of each page to the
host. A load is a copy of each page into an array on the device; once all have arrived, one donating scatter puts them
into the pool, in order with the steps around it. Copies run by themselves: what starts or polls moves never waits for
one, unless the move says so (`Move.blocking`). A load of a page whose demotion is under way follows it by the flow of data.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import numpy as np
from absl import logging
from jax.sharding import NamedSharding

from penelope_jax.host_pages import HostPages
from penelope_jax.kernels.kv_write import DROP_PAGE
from penelope_jax.kernels.page_copy import PAGE_BUCKETS, gather_pages, padded_ids, padded_pages
from penelope_jax.moves import MAX_MOVE_PAGES, Move, MoveKind
from penelope_jax.transfer_faults import TransferFaults

_POLL_S = 5e-5  # between polls while nothing else can run
_ERRORS = (jax.errors.JaxRuntimeError, MemoryError)

# Puts pages on the device into the pool: takes i32[bucket] ids and as many pages.
PutPages = Callable[[np.ndarray, tuple[jax.Array, ...]], None]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TransferStats:
    """What moves did, and how long anybody stood still for them. Totals; none ever falls.

    Attributes:
        demoted_pages, loaded_pages: that arrived.
        demoted_bytes, loaded_bytes: of these.
        failed_moves: moves that did not happen.
        peak_moving_pages: most pages moving at once.
        starts: calls that started moves. start_s, longest_start_s: how long they took, in all and at most.
        polls: calls that asked for moves that ended, without waiting. poll_s, longest_poll_s: how long they took.
        waits: calls that waited, as nothing else could run. wait_s, longest_wait_s: how long they took.
    """

    demoted_pages: int = 0
    loaded_pages: int = 0
    demoted_bytes: int = 0
    loaded_bytes: int = 0
    failed_moves: int = 0
    peak_moving_pages: int = 0
    starts: int = 0
    start_s: float = 0.0
    longest_start_s: float = 0.0
    polls: int = 0
    poll_s: float = 0.0
    longest_poll_s: float = 0.0
    waits: int = 0
    wait_s: float = 0.0
    longest_wait_s: float = 0.0


@dataclasses.dataclass(kw_only=True, slots=True)
class _Moving:
    """A move that was started and is not reported.

    Attributes:
        move: it.
        arrays: its pages on their way, in host memory for a demotion, on the device for a load.
        sources: of a load: demotions under way that bring the pages it loads.
        problem: why it failed; "" while it did not.
        polls: polls for which it is still held back.
        not_before_s: time until which it is held back.
    """

    move: Move
    arrays: list[jax.Array] = dataclasses.field(default_factory=list)
    sources: tuple["_Moving", ...] = ()
    problem: str = ""
    polls: int = 0
    not_before_s: float = 0.0


class PageTransfer:
    """Starts moves and ends them.

    Attributes:
        host_pages: the pages in host memory.
        stats: what was moved so far.

    Args:
        host_pages: the pages in host memory.
        pool_sharding: of the pool, [P, L, 2, K, page_size, H].
        num_device_pages: P.
        max_moving_pages: most pages moving at once; None: any number.
        faults: what goes wrong, for tests.
    """

    def __init__(
        self,
        host_pages: HostPages,
        pool_sharding: NamedSharding,
        *,
        num_device_pages: int,
        max_moving_pages: int | None = None,
        faults: TransferFaults | None = None,
    ):
        self.host_pages = host_pages
        self.stats = TransferStats()
        self._pool_sharding = pool_sharding
        self._num_device_pages = num_device_pages
        self._max_moving_pages = max_moving_pages
        self._faults = faults
        self._moving: dict[int, _Moving] = {}  # by move id, in order of start
        self._ended: dict[int, bool] = {}  # move id -> whether it is done; those not reported yet

    @property
    def num_moving_pages(self) -> int:
        """Pages of moves that were started and have not ended."""
        return sum(len(moving.move.device_ids) for moving in self._moving.values())

    def warm_up(self, kv_pool: Callable[[], jax.Array], put_pages: PutPages) -> int:
        """Compiles the copies of every size.

        Args:
            kv_pool: returns the pool.
            put_pages: as in `finish`.

        Returns:
            How many programs there are.
        """
        if not self.host_pages.num_pages:
            return 0
        for bucket in PAGE_BUCKETS:
            ids = np.full(bucket, DROP_PAGE, np.int32)
            pages = gather_pages(kv_pool(), ids, sharding=self._pool_sharding)
            pages = jax.device_put(jax.device_put(list(pages), self.host_pages.host), self.host_pages.device)
            put_pages(ids, tuple(pages))
        return 2 * len(PAGE_BUCKETS)

    def start(self, kv_pool: jax.Array, moves: Sequence[Move]) -> None:
        """Starts moves, in order. One that cannot start, for want of memory, is reported failed by `finish`.

        Args:
            kv_pool: the pool after the steps dispatched so far; it stays as it is.
            moves: the moves.

        Raises:
            ValueError: a move is none that can be; the message names it. Nothing has started then.
        """
        began_s = time.perf_counter()
        self._check(moves)
        for move in moves:
            moving = self._moving[move.move_id] = _Moving(move=move, problem="it was interrupted")
            if self._faults is not None:
                moving.polls = self._faults.polls(move)
                moving.not_before_s = began_s + self._faults.seconds(move)
            try:
                moving.problem = self._start(kv_pool, moving)
            except _ERRORS as error:
                moving.problem = _reason(error)
            if moving.problem:
                self._fail(moving)
        took_s = time.perf_counter() - began_s
        self._count(
            peak_moving_pages=max(0, self.num_moving_pages - self.stats.peak_moving_pages),
            starts=1,
            start_s=took_s,
            longest_start_s=max(0.0, took_s - self.stats.longest_start_s),
        )

    def finish(self, put_pages: PutPages, *, wait: bool = False) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ends the moves whose pages have arrived; pages of loads are put into the pool.

        Args:
            put_pages: puts pages into the pool; called with what `scatter_pages` wants.
            wait: whether to wait until at least one move has ended, if any is under way.

        Returns:
            Ids of moves that are done, and of those that failed, each in order of start. None is ever told twice.
        """
        if not self._moving and not self._ended:
            return (), ()
        began_s = time.perf_counter()
        self._poll(put_pages)
        took_s = time.perf_counter() - began_s
        self._count(polls=1, poll_s=took_s, longest_poll_s=max(0.0, took_s - self.stats.longest_poll_s))
        if wait and not self._ended:
            began_s = time.perf_counter()
            while not self._ended:
                time.sleep(_POLL_S)
                self._poll(put_pages)
            took_s = time.perf_counter() - began_s
            self._count(waits=1, wait_s=took_s, longest_wait_s=max(0.0, took_s - self.stats.longest_wait_s))
        ended, self._ended = self._ended, {}
        done = tuple(move_id for move_id, is_done in ended.items() if is_done)
        return done, tuple(move_id for move_id, is_done in ended.items() if not is_done)

    def start_over(self) -> None:
        """Forgets the host pages and counts from zero: an engine begins with an empty cache.

        Raises:
            RuntimeError: moves of the one before have not been told.
        """
        if self._moving or self._ended:
            raise RuntimeError(f"{len(self._moving) + len(self._ended)} moves have not been told; drain them first.")
        self.host_pages.drop(range(self.host_pages.num_pages))
        self.stats = TransferStats()

    def _start(self, kv_pool: jax.Array, moving: _Moving) -> str:
        """Starts the copies of a move; returns why it cannot be, or ""."""
        move, store = moving.move, self.host_pages
        host_ids = move.host_ids.tolist()
        if move.kind is MoveKind.DEMOTE:
            store.drop(host_ids)
            pages = gather_pages(kv_pool, padded_ids(move.device_ids), sharding=self._pool_sharding)
            self._find_memory(move)
            moving.arrays = jax.device_put(list(pages[: len(host_ids)]), store.host)
            store.put(host_ids, moving.arrays)
            if move.blocking:
                jax.block_until_ready(moving.arrays)
            return ""
        coming: dict[int, _Moving] = {}
        for other in self._moving.values():
            if other.move.kind is MoveKind.DEMOTE:
                coming.update(dict.fromkeys(other.move.host_ids.tolist(), other))
        lost = next((host_id for host_id in host_ids if host_id not in store), None)
        if lost is not None:
            return f"move {coming[lost].move.move_id}, which was to bring host page {lost}, failed"
        self._find_memory(move)
        moving.sources = tuple({id(coming[id_]): coming[id_] for id_ in host_ids if id_ in coming}.values())
        moving.arrays = jax.device_put(store.get(host_ids), store.device)
        return ""

    def _find_memory(self, move: Move) -> None:
        if self._faults is not None and self._faults.start_fails(move):
            raise MemoryError("no memory for its pages (injected)")

    def _poll(self, put_pages: PutPages) -> None:
        now_s = time.perf_counter()
        for moving in list(self._moving.values()):
            if self._arrived(moving, now_s):
                self._end(moving, put_pages)
                self._ended[moving.move.move_id] = not moving.problem
                del self._moving[moving.move.move_id]

    def _arrived(self, moving: _Moving, now_s: float) -> bool:
        if moving.problem:
            return True
        if moving.polls or now_s < moving.not_before_s:
            moving.polls = max(0, moving.polls - 1)
            return False
        if any(source.move.move_id in self._moving for source in moving.sources):
            return False
        return all(cast(Any, array).is_ready() for array in moving.arrays)

    def _end(self, moving: _Moving, put_pages: PutPages) -> None:
        """Ends a move that arrived or failed. Doing it again, after an interrupt, does no harm."""
        move = moving.move
        lost = next((source for source in moving.sources if source.problem), None)
        if lost is not None and not moving.problem:
            moving.problem = f"move {lost.move.move_id}, which was to bring its pages, failed"
            self._fail(moving)
        if not moving.problem:
            try:
                if self._faults is not None and self._faults.copy_fails(move):
                    raise MemoryError("the copy failed (injected)")
                jax.block_until_ready(moving.arrays)  # they are; this raises what went wrong with them
                if move.kind is MoveKind.LOAD:
                    put_pages(padded_ids(move.device_ids), padded_pages(moving.arrays))
            except _ERRORS as error:
                moving.problem = _reason(error)
                self._fail(moving)
        num_pages = len(move.device_ids)
        if moving.problem:
            self._count(failed_moves=1)
        elif move.kind is MoveKind.LOAD:
            self._count(loaded_pages=num_pages, loaded_bytes=num_pages * self.host_pages.page_bytes)
        else:
            self._count(demoted_pages=num_pages, demoted_bytes=num_pages * self.host_pages.page_bytes)

    def _fail(self, moving: _Moving) -> None:
        """Says that a move failed, and drops what there is of it."""
        move = moving.move
        logging.warning(
            "Move %d (%s, %d pages) failed: %s.", move.move_id, move.kind.value, len(move.host_ids), moving.problem
        )
        if move.kind is MoveKind.DEMOTE and moving.arrays:
            self.host_pages.drop(move.host_ids.tolist(), only=moving.arrays)
        moving.arrays = []

    def _check(self, moves: Sequence[Move]) -> None:
        """Checks moves before any is started, each against those before it."""
        num_pages = self.num_moving_pages + sum(len(move.device_ids) for move in moves)
        if self._max_moving_pages is not None and num_pages > self._max_moving_pages:
            raise ValueError(
                f"{num_pages} pages would be moving at once, {self.num_moving_pages} of them already; at most "
                f"{self._max_moving_pages} may."
            )
        under_way = [moving.move for moving in self._moving.values()]
        loading = {id_ for move in under_way if move.kind is MoveKind.LOAD for id_ in move.device_ids.tolist()}
        coming = {id_ for move in under_way if move.kind is MoveKind.DEMOTE for id_ in move.host_ids.tolist()}
        move_ids = {move.move_id for move in under_way}
        for move in moves:
            place = f"move {move.move_id}"
            if move.move_id in move_ids:
                raise ValueError(f"{place} is under way already.")
            move_ids.add(move.move_id)
            device_ids, host_ids = move.device_ids.tolist(), move.host_ids.tolist()
            if len(device_ids) != len(host_ids) or not 1 <= len(device_ids) <= MAX_MOVE_PAGES:
                raise ValueError(
                    f"{place} has {len(device_ids)} device and {len(host_ids)} host pages; as many of each, from 1 to "
                    f"{MAX_MOVE_PAGES}."
                )
            for name, ids, limit in (
                ("device", device_ids, self._num_device_pages),
                ("host", host_ids, self.host_pages.num_pages),
            ):
                bad = next((id_ for id_ in ids if not 0 <= id_ < limit), None)
                if bad is not None:
                    raise ValueError(f"{place}: {name} page {bad} must be in [0, {limit}).")
                if len(set(ids)) < len(ids):
                    raise ValueError(f"{place} names a {name} page twice: {ids}.")
            taken = next((id_ for id_ in device_ids if id_ in loading), None)
            if taken is not None:
                raise ValueError(f"{place}: device page {taken} is still being loaded.")
            if move.kind is MoveKind.DEMOTE:
                coming.update(host_ids)
                continue
            loading.update(device_ids)
            empty = next((id_ for id_ in host_ids if id_ not in self.host_pages and id_ not in coming), None)
            if empty is not None:
                raise ValueError(f"{place} loads host page {empty}, which holds nothing.")

    def _count(self, **increments: float) -> None:
        stats = self.stats
        self.stats = dataclasses.replace(
            stats, **{name: getattr(stats, name) + number for name, number in increments.items()}
        )


def _reason(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__
