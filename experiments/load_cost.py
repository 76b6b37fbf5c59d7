"""What loading a page from the host costs on this machine, in units of the cost formula: `--load-units auto`.

Measured at start-up: the time of a move of 16 pages, and of two prefills from position 0, which give the time of a unit
and c, as on any device (`cost.calibrate_linear_cost`). Decisions are made with the model's c, so the difference is
counted with the load: a page is then computed exactly where that is predicted to take less time.
"""

import dataclasses
import time
from typing import TYPE_CHECKING

import numpy as np

from penelope_jax.config import EngineConfig
from penelope_jax.cost import calibrate_linear_cost, units
from penelope_jax.moves import MAX_MOVE_PAGES, Move, MoveKind
from penelope_jax.segments import SamplingParams, Segment, SegmentKind, StepPlan

if TYPE_CHECKING:
    from penelope_jax.executor import JaxExecutor

_REPEATS = 3


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoadCost:
    """The measurement.

    Attributes:
        page_bytes: of a page. page_s: seconds of a page in a long move.
        prefill_tokens, prefill_s: lengths of the prefills, and how long they took.
        unit_s: seconds of a unit.
        linear_cost: c of the two prefills; the model's where no c explains them.
        load_units: what loading a page costs, to be compared with units of the model's c; 0: less than any page.
        recomputed_below: host pages that start below this position are computed.
    """

    page_bytes: int
    page_s: float
    prefill_tokens: tuple[int, int]
    prefill_s: tuple[float, float]
    unit_s: float
    linear_cost: float
    load_units: float
    recomputed_below: int

    def text(self) -> str:
        """Returns the measurement, one line."""
        speed = self.page_bytes / self.page_s / 1e9
        below = (
            f"host pages below position {self.recomputed_below:,} are" if self.recomputed_below else "no host page is"
        )
        return (
            f"Measured: a page of {self.page_bytes:,} bytes is loaded at {speed:.2f} GB/s, a unit takes "
            f"{self.unit_s * 1e9:.3g} ns with c = {self.linear_cost:,.0f}: load_units={self.load_units:,.0f}; "
            f"{below} recomputed instead."
        )


def measure_load_cost(executor: "JaxExecutor", config: EngineConfig) -> LoadCost:
    """Times moves and prefills.

    Args:
        executor: warmed up; its pages, in both tiers, are overwritten.
        config: of an engine with a host tier.
    """
    page_s = _page_seconds(executor, config)
    lengths = prefill_lengths(executor, config)
    short_s, long_s = (_prefill_seconds(executor, length) for length in lengths)
    try:
        linear_cost = calibrate_linear_cost(lengths[0], short_s, lengths[1], long_s)
    except ValueError:
        linear_cost = config.linear_cost
    executor.start_over()
    unit_s = long_s / units(0, lengths[1], linear_cost)
    size = config.page_size
    load_units = max(0.0, page_s / unit_s + size * (config.linear_cost - linear_cost))
    return LoadCost(
        page_bytes=executor.host_pages.page_bytes,
        page_s=page_s,
        prefill_tokens=lengths,
        prefill_s=(short_s, long_s),
        unit_s=unit_s,
        linear_cost=linear_cost,
        load_units=load_units,
        recomputed_below=first_loaded(load_units, config.linear_cost, size),
    )


def first_loaded(load_units: float, linear_cost: float, page_size: int) -> int:
    """Returns the start of the first page that costs as much to compute as to load."""
    number = (load_units - units(0, page_size, linear_cost)) / page_size**2
    return max(0, int(np.ceil(number))) * page_size


def prefill_lengths(executor: "JaxExecutor", config: EngineConfig) -> tuple[int, int]:
    """Returns two lengths that a step can have, of those that are compiled for if possible: nothing is padded then."""
    longest = min(config.max_step_tokens, config.max_context, config.device_tokens)
    fitting = [number for number in executor.buckets.token_buckets if 1 < number <= longest]
    if len(fitting) < 2:
        return max(1, longest // 2), longest
    return fitting[-2], fitting[-1]


def _prefill_seconds(executor: "JaxExecutor", length: int) -> float:
    segment = Segment(
        request_id=0,
        kind=SegmentKind.REAL,
        start=0,
        stop=length,
        tokens=np.arange(length, dtype=np.int32) % executor.config.vocab_size,
        page_table=np.arange(-(-length // executor.page_size), dtype=np.int32),
        write_from=0,
        sample=SamplingParams(max_tokens=1),
    )
    plan = StepPlan(step=0, segments=(segment,))
    seconds = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        executor.run(plan)
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def _page_seconds(executor: "JaxExecutor", config: EngineConfig) -> float:
    number = min(MAX_MOVE_PAGES, config.num_device_pages, executor.host_pages.num_pages, config.max_moving_pages)
    ids = np.arange(number, dtype=np.int32)
    _moved_seconds(executor, Move(move_id=0, kind=MoveKind.DEMOTE, device_ids=ids, host_ids=ids))
    load = Move(move_id=1, kind=MoveKind.LOAD, device_ids=ids, host_ids=ids)
    return min(_moved_seconds(executor, load) for _ in range(_REPEATS)) / number


def _moved_seconds(executor: "JaxExecutor", move: Move) -> float:
    begin = time.perf_counter()
    executor.start_moves((move,))
    _, failed = executor.finish_moves(wait=True)
    if failed:
        raise ValueError(f"a move of {len(move.host_ids)} pages, which was to be timed, failed.")
    return time.perf_counter() - begin
