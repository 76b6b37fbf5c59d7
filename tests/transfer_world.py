"""A pool, host pages and a model of both in numpy, for tests of moves: no engine, no language model."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from penelope_jax.forward import POOL_SPEC
from penelope_jax.host_pages import HostPages
from penelope_jax.kernels.page_copy import scatter_pages
from penelope_jax.models.layers import device_mesh
from penelope_jax.moves import Move, MoveKind
from penelope_jax.transfer import PageTransfer
from penelope_jax.transfer_faults import TransferFaults

PAGE_SHAPE = (2, 2, 4, 4, 8)  # [L, 2, K, page_size, H]


class Layout(NamedTuple):
    """Where a pool lies, and what is in it."""

    dtype: str
    mesh_shape: tuple[int, int]


PLAIN = Layout("float32", (1, 1))
LAYOUTS = {
    "float32": PLAIN,
    "bfloat16": Layout("bfloat16", (1, 1)),
    "float16": Layout("float16", (1, 1)),
    "bfloat16, 4 devices": Layout("bfloat16", (1, 4)),
}


def random_pages(random: np.random.Generator, number: int, dtype: str = "float32") -> np.ndarray:
    """Returns [number, *PAGE_SHAPE] of all bit patterns: NaNs, infinities and subnormal numbers too."""
    kind = jnp.dtype(dtype)
    words = random.integers(0, 256, (number, *PAGE_SHAPE, kind.itemsize), np.uint8)
    return words.view(kind)[..., 0]


@functools.partial(jax.jit, static_argnames=("sharding", "slow"), donate_argnames=("pool",))
def write(pool: jax.Array, ids: jax.Array, pages: jax.Array, *, sharding: NamedSharding, slow: bool) -> jax.Array:
    """A step: writes pages; a slow one computes a while before."""
    if slow:
        seed = pages[0, 0, 0, 0].astype(jnp.float32)
        busy = jnp.tile(jnp.where(jnp.isfinite(seed), 0.0, 0.0), (100, 50))
        busy = jax.lax.fori_loop(0, 150, lambda _, x: x @ x.T @ x, busy)
        pages = jnp.where(busy.sum() == 0, pages, jnp.zeros((), pages.dtype))
    return jax.lax.with_sharding_constraint(pool.at[ids].set(pages), sharding)


def demote(move_id: int, device_ids: Sequence[int], host_ids: Sequence[int]) -> Move:
    return _move(move_id, MoveKind.DEMOTE, device_ids, host_ids)


def load(move_id: int, host_ids: Sequence[int], device_ids: Sequence[int]) -> Move:
    return _move(move_id, MoveKind.LOAD, device_ids, host_ids)


def _move(move_id: int, kind: MoveKind, device_ids: Sequence[int], host_ids: Sequence[int]) -> Move:
    ids = [np.array(part, np.int32) for part in (device_ids, host_ids)]
    return Move(move_id=move_id, kind=kind, device_ids=ids[0], host_ids=ids[1])


class World:
    """Pages by id in both memories, and what they should hold.

    Attributes:
        pool: the pool.
        transfer: what is tested.
        device: [P, *PAGE_SHAPE], what the pool should hold once the moves that ended and the steps have run.
        host: what each host page should hold once its demotion has arrived.
        demoted_by: the last move to each host page.
        moving: id -> what its targets will hold, of moves under way.
    """

    def __init__(
        self,
        layout: Layout = PLAIN,
        *,
        num_pages: int = 10,
        num_host_pages: int = 8,
        max_moving_pages: int | None = None,
        faults: TransferFaults | None = None,
        seed: int = 0,
    ):
        self.random = np.random.default_rng(seed)
        self.dtype = layout.dtype
        self.sharding = NamedSharding(device_mesh(*layout.mesh_shape), POOL_SPEC)
        self.device = random_pages(self.random, num_pages, self.dtype)
        self.pool = jax.device_put(self.device.copy(), self.sharding)
        self.host: dict[int, np.ndarray] = {}
        self.demoted_by: dict[int, int] = {}
        self.moving: dict[int, tuple[Move, np.ndarray]] = {}
        self.transfer = PageTransfer(
            HostPages(PAGE_SHAPE, jnp.dtype(self.dtype), self.sharding, num_host_pages),
            self.sharding,
            num_device_pages=num_pages,
            max_moving_pages=max_moving_pages,
            faults=faults,
        )

    def put(self, page_ids: np.ndarray, pages: tuple[jax.Array, ...]) -> None:
        self.pool = scatter_pages(self.pool, page_ids, pages, sharding=self.sharding)

    def step(self, page_ids: Sequence[int], *, slow: bool = False) -> None:
        """Writes new bytes to pages."""
        pages = random_pages(self.random, len(page_ids), self.dtype)
        ids = np.array(page_ids, np.int32)
        self.pool = write(self.pool, ids, pages, sharding=self.sharding, slow=slow)
        self.device[ids] = pages

    def start(self, *moves: Move) -> None:
        self.transfer.start(self.pool, moves)
        for move in moves:
            if move.kind is MoveKind.DEMOTE:
                pages = self.device[move.device_ids].copy()
                self.host.update(zip(move.host_ids.tolist(), pages))
                self.demoted_by.update(dict.fromkeys(move.host_ids.tolist(), move.move_id))
            else:
                pages = np.stack([self.host[host_id] for host_id in move.host_ids.tolist()])
            self.moving[move.move_id] = (move, pages)

    def finish(self, *, wait: bool = False) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ends moves in the model too; what a failed demotion was to bring is forgotten."""
        done, failed = self.transfer.finish(self.put, wait=wait)
        for move_id in done:
            move, pages = self.moving.pop(move_id)
            if move.kind is MoveKind.LOAD:
                self.device[move.device_ids] = pages
        for move_id in failed:
            move, pages = self.moving.pop(move_id)
            if move.kind is MoveKind.DEMOTE:
                for host_id in move.host_ids.tolist():
                    if self.demoted_by[host_id] == move_id:
                        del self.host[host_id]
        return done, failed

    def drain(self) -> tuple[list[int], list[int]]:
        done: list[int] = []
        failed: list[int] = []
        while self.moving:
            more_done, more_failed = self.finish(wait=True)
            done += more_done
            failed += more_failed
        return done, failed

    def check(self) -> None:
        """Compares every bit of the pool, but for targets of loads under way, and of every host page."""
        assert np.asarray(self.pool).tobytes() == self.device.tobytes()
        host_ids = sorted(self.host)
        found = self.transfer.host_pages.read(host_ids)
        for host_id, page in zip(host_ids, found):
            assert page.tobytes() == self.host[host_id].tobytes(), f"host page {host_id}"
