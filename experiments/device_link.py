"""Part `host` of `device_check.py`: the link between the device and pinned host memory, in pages of Qwen3-8B (9 MiB).

Bandwidth each way, an array a page as the engine holds them, beside one large array; what a prefill loses while pages
move; and swaps with both tiers full, where pages that leave are gathered and copied out through a buffer of a few
pages before those that come take their places. A swap's rate counts one direction, as the link is full duplex: its
share is of the slower direction's bandwidth alone.
"""

import dataclasses
import functools
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from penelope_jax.experiments.device_host import Host, Program
from penelope_jax.experiments.device_model import QWEN3_8B, TINY, StepSizes, StepWorld, step_program
from penelope_jax.experiments.device_report import Result
from penelope_jax.experiments.device_steps import sizes_of as step_sizes_of
from penelope_jax.forward import POOL_SPEC
from penelope_jax.kernels.page_copy import gather_pages, page_sharding, scatter_pages

OVERLAP_BAR = 0.03
SWAP_PAGES = 16  # 1,024 tokens
_STEPS = 10  # of the prefill that runs beside copies


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Pages of the pool; of those, how many are moved at once, and swapped in all."""

    pool_shape: tuple[int, ...]
    dtype: str
    moved: int
    swapped: int


def sizes_of(host: Host) -> Sizes:
    """Returns the sizes here."""
    config, num_pages, page_size = (TINY, 12, 16) if host.dry else (QWEN3_8B, 256, 64)
    return Sizes(
        pool_shape=(num_pages, config.num_layers, 2, config.num_kv_heads, page_size, config.head_dim),
        dtype=config.dtype,
        moved=4 if host.dry else 64,
        swapped=4 if host.dry else 160,
    )


def _swap_pages(host: Host) -> int:
    return 2 if host.dry else SWAP_PAGES


def _prefill_sizes(host: Host) -> StepSizes:
    sizes = step_sizes_of(host).layers
    return dataclasses.replace(sizes, rows=sizes.rows[-1:])


def copy_programs(host: Host, number: int) -> tuple[Program, Program]:
    """Returns the gather, (pool, ids) -> pages, and the scatter, (pool, ids, pages) -> pool."""
    sizes, sharding = sizes_of(host), host.sharding(POOL_SPEC)
    pool, ids = host.like(sizes.pool_shape, sizes.dtype, POOL_SPEC), host.like((number,), "int32")
    page = jax.ShapeDtypeStruct(sizes.pool_shape[1:], jnp.dtype(sizes.dtype), sharding=page_sharding(sharding))
    gather = Program(
        name=f"gather {number} pages",
        function=functools.partial(gather_pages, sharding=sharding),
        arguments=[pool, ids],
    )
    scatter = Program(
        name=f"scatter {number} pages",
        function=functools.partial(scatter_pages, sharding=sharding),
        arguments=[pool, ids, (page,) * number],
        donate=(0,),
    )
    return gather, scatter


def programs(host: Host) -> Iterator[Program]:
    """Yields what the part compiles."""
    yield from copy_programs(host, _swap_pages(host))
    prefill = _prefill_sizes(host)
    yield step_program(host, prefill, prefill.rows[-1])


class Tiers:
    """A pool on the device, and pages in pinned host memory."""

    def __init__(self, host: Host):
        sizes = sizes_of(host)
        pool = host.normal(sizes.pool_shape, sizes.dtype, seed=1)
        self.pool = jax.device_put(pool, host.sharding(POOL_SPEC))
        self.on_device = page_sharding(host.sharding(POOL_SPEC), "device")
        self.on_host = page_sharding(host.sharding(POOL_SPEC), "pinned_host")
        self.number = _swap_pages(host)
        self.gather, self.scatter = (host.compile(program) for program in copy_programs(host, self.number))
        self.page_bytes = pool.nbytes // pool.shape[0]

    def gathered(self, num_pages: int) -> list[jax.Array]:
        """Returns copies of the first pages of the pool, on the device."""
        pages: list[jax.Array] = []
        for start in range(0, num_pages, self.number):
            pages += self.gather(self.pool, np.arange(start, start + self.number, dtype=np.int32))
        return pages[:num_pages]

    def to_host(self, pages: Any) -> Any:
        return jax.device_put(pages, self.on_host)

    def to_device(self, pages: Any) -> Any:
        return jax.device_put(pages, self.on_device)

    def swap(self, ids: np.ndarray, held: list[jax.Array], in_flight: int) -> list[jax.Array]:
        """Exchanges pages of the pool with pages of the host.

        Args:
            ids: i32[n], pages of the pool, a multiple of the buffer's.
            held: the n pages of the host that take their places.
            in_flight: buffers that may be under way; a host page is given up when its copy has arrived.

        Returns:
            The n pages that left, on the host.
        """
        left: list[jax.Array] = []
        for start in range(0, len(ids), self.number):
            part = slice(start, start + self.number)
            done = start - in_flight * self.number
            if done >= 0:
                jax.block_until_ready(left[done : done + self.number])
            out = self.gather(self.pool, ids[part])
            left += self.to_host(out)
            self.pool = self.scatter(self.pool, ids[part], tuple(self.to_device(held[part])))
        return left


def run(host: Host, result: Result) -> None:
    """Measures the link."""
    tiers, sizes = Tiers(host), sizes_of(host)
    result.figures["page, MiB"] = tiers.page_bytes / 2**20
    with result.case("bandwidth"):
        _bandwidth(host, result, tiers, sizes.moved)
    with result.case("bytes survive"):
        _round_trip(result, tiers)
    with result.case("swap with both tiers full"):
        _swap(host, result, tiers, sizes.swapped)
    if host.out_of_time():
        result.skipped.append("overlap with a prefill")
        return
    with result.case("overlap with a prefill"):
        _overlap(host, result, tiers, sizes.moved)


def _bandwidth(host: Host, result: Result, tiers: Tiers, number: int) -> None:
    there = tiers.gathered(number)
    here = tiers.to_host(there)
    whole = host.normal((number * math.prod(there[0].shape),), there[0].dtype, seed=2)
    whole_here = jax.device_put(whole, host.sharding(memory_kind="pinned_host"))
    calls: dict[str, Callable[[], Any]] = {
        "pages to the host": lambda: tiers.to_host(there),
        "pages to the device": lambda: tiers.to_device(here),
        "one array to the host": lambda: jax.device_put(whole, host.sharding(memory_kind="pinned_host")),
        "one array to the device": lambda: jax.device_put(whole_here, host.sharding(memory_kind="device")),
        "pages both ways": lambda: (tiers.to_host(there), tiers.to_device(here)),
    }
    for name, timing in host.time(calls).items():
        rate = number * tiers.page_bytes / timing.seconds / 1e9
        result.figures[f"{name}, GB/s"] = rate
        result.row(name, **{"ms": 1e3 * timing.seconds, "GB/s": rate}, spread=timing.spread)


def _round_trip(result: Result, tiers: Tiers) -> None:
    """Swaps the first pages for others and back; a byte that differs is an error, and a control must differ."""
    ids = np.arange(tiers.number, dtype=np.int32)
    before = np.asarray(tiers.pool[ids])
    others = tiers.to_host(tiers.gather(tiers.pool, ids + tiers.number))
    left = tiers.swap(ids, list(others), in_flight=1)
    between = np.asarray(tiers.pool[ids])
    tiers.swap(ids, left, in_flight=1)
    after = np.asarray(tiers.pool[ids])
    differ = int((before.view(np.uint8) != after.view(np.uint8)).sum())
    control = int((before.view(np.uint8) != between.view(np.uint8)).sum())
    result.bar("bytes that differ after a swap and back", differ, 0, at_least=False, speed=False)
    result.bar("control, bytes that differ after one swap", control, 1, at_least=True, speed=False)


def _swap(host: Host, result: Result, tiers: Tiers, number: int) -> None:
    number -= number % tiers.number
    ids = np.random.default_rng(3).permutation(tiers.pool.shape[0])[:number].astype(np.int32)
    # Gathered in parts, so that the device does not hold all of them twice.
    held: list[jax.Array] = []
    for start in range(0, number, tiers.number):
        held += jax.block_until_ready(tiers.to_host(tiers.gather(tiers.pool, ids[start : start + tiers.number])))
    ways = ("pages to the host, GB/s", "pages to the device, GB/s")
    link = min(result.figures.get(name, math.nan) for name in ways)
    for in_flight in (1, 2):
        state = {"held": held}

        def swap(in_flight=in_flight, state=state):
            state["held"] = tiers.swap(ids, state["held"], in_flight)
            return tiers.pool, state["held"]

        timing = host.time({"": swap}, least_s=0)[""]
        held = state["held"]
        rate = number * tiers.page_bytes / timing.seconds / 1e9
        name = f"swap, {in_flight} x {tiers.number} pages in flight"
        result.row(name, **{"ms": 1e3 * timing.seconds, "GB/s": rate, "of the link": rate / link})
        result.figures[f"{name}, share of the link"] = rate / link


def _overlap(host: Host, result: Result, tiers: Tiers, number: int) -> None:
    sizes = _prefill_sizes(host)
    world = StepWorld(host, sizes)
    rows = sizes.rows[-1]
    start = (sizes.max_context - rows) // sizes.page_size * sizes.page_size
    steps = [world.batch([world.segment(0, start, start + rows, sample=True)])] * _STEPS
    there = tiers.gathered(number)
    here = jax.block_until_ready(tiers.to_host(there))
    moves: dict[str, Callable[[], Any] | None] = {
        "alone": None,
        "pages to the host": lambda: tiers.to_host(there),
        "pages to the device": lambda: tiers.to_device(here),
        "pages both ways": lambda: (tiers.to_host(there), tiers.to_device(here)),
    }
    for move in (lambda: world.run(steps), *filter(None, moves.values())):
        host.time({"": move}, num_runs=1)
    prefill: dict[str, list[float]] = {name: [] for name in moves}
    rates: dict[str, list[float]] = {name: [] for name in moves}
    for _ in range(1 if host.dry else 7):
        for name, move in moves.items():
            seconds, num_moves, all_seconds = _beside(lambda: world.run(steps), move)
            prefill[name].append(seconds)
            directions = 2 if name == "pages both ways" else 1
            rates[name].append(directions * num_moves * number * tiers.page_bytes / all_seconds / 1e9)
    median = {name: statistics.median(times) for name, times in prefill.items()}
    for name, move in moves.items():
        slower = median[name] / median["alone"] - 1
        columns: dict[str, Any] = {"ms": 1e3 * median[name]}
        if move is not None:
            columns |= {"slower": slower, "GB/s": statistics.median(rates[name])}
            result.bar(f"prefill beside {name}, slower", slower, OVERLAP_BAR, at_least=False)
        result.row(f"prefill, {name}", **columns, spread=max(prefill[name]) / min(prefill[name]) - 1)


def _beside(call: Callable[[], Any], move: Callable[[], Any] | None) -> tuple[float, int, float]:
    """Starts a call, and moves one behind the other while it runs, two of them under way.

    Returns:
        Seconds of the call, how many moves there were, and seconds until the last of them ended.
    """
    ended: list[float] = []
    begin = time.perf_counter()
    outputs = call()
    waiter = threading.Thread(target=lambda: ended.append(_ready_at(outputs)))
    waiter.start()
    moved: list[Any] = []
    num_moves = 0
    while move is not None and waiter.is_alive():
        moved.append(move())
        num_moves += 1
        if len(moved) == 2:
            jax.block_until_ready(moved.pop(0))
    jax.block_until_ready(moved)
    moves_ended = time.perf_counter()
    waiter.join()
    return ended[0] - begin, num_moves, moves_ended - begin


def _ready_at(outputs: Any) -> float:
    jax.block_until_ready(outputs)
    return time.perf_counter()
