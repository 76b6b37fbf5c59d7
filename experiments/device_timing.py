"""Times of calls that start work on a device and return before it is done.

A time is that of many calls one behind the other, so that what the host does for a call hides behind the device's work,
over their number. What is compared is run in turns, and the median of the turns is taken. The first calls are not
counted.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

_MOST_CALLS = 1000  # of a run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of one call.

    Attributes:
        seconds: median over the runs. fastest, slowest: of them.
        num_calls: of a run. num_runs: runs.
    """

    seconds: float
    fastest: float
    slowest: float
    num_calls: int
    num_runs: int

    @property
    def spread(self) -> float:
        """By how much the slowest run took longer than the fastest."""
        return self.slowest / self.fastest - 1


def time_calls(
    calls: Mapping[str, Callable[[], Any]], *, num_runs: int = 5, least_s: float = 0.06
) -> dict[str, Timing]:
    """Times several calls in turns.

    Args:
        calls: by name; each starts work and returns arrays that are ready when it is done.
        num_runs: of each.
        least_s: a run repeats a call until it takes about as long.
    """
    numbers = {}
    for name, call in calls.items():
        run_seconds(call, 1)
        once = run_seconds(call, 1)
        numbers[name] = max(1, min(_MOST_CALLS, math.ceil(least_s / once)))
        if numbers[name] > 1:
            run_seconds(call, numbers[name])  # takes the memory that so many calls in flight need
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(num_runs):
        for name, call in calls.items():
            seconds[name].append(run_seconds(call, numbers[name]) / numbers[name])
    return {
        name: Timing(
            seconds=statistics.median(times),
            fastest=min(times),
            slowest=max(times),
            num_calls=numbers[name],
            num_runs=num_runs,
        )
        for name, times in seconds.items()
    }


def run_seconds(call: Callable[[], Any], num_calls: int) -> float:
    """Returns the seconds from the first call to the end of the last one's work."""
    begin = time.perf_counter()
    out = None
    for _ in range(num_calls):
        out = call()
    jax.block_until_ready(out)
    return time.perf_counter() - begin
