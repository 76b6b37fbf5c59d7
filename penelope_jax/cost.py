"""The cost model (paper, section 2.2): recomputing a token at position p costs c + p units.

One unit is one query-key pair, in every head of one layer. c is the linear work of one token in the same unit.
"""

from collections.abc import Iterable


def units(start: int, stop: int, linear_cost: float) -> float:
    """Returns the units of computing positions `[start, stop)`: the sum of c + p."""
    num_tokens = stop - start
    return num_tokens * linear_cost + (start + stop - 1) * num_tokens / 2


def units_of(spans: Iterable[tuple[int, int]], linear_cost: float) -> float:
    """Returns the units of several spans."""
    return sum((units(start, stop, linear_cost) for start, stop in spans), 0.0)


def calibrate_linear_cost(num_tokens_a: int, seconds_a: float, num_tokens_b: int, seconds_b: float) -> float:
    """Returns the c that explains two prefill times from position 0 on one device.

    A prefill of n tokens costs n c + n (n - 1) / 2 units; two times give c and the time of a unit. A device whose
    matrix products are cheaper than its attention has a smaller c than the model's dimensions say.

    Raises:
        ValueError: the lengths do not differ, or the times do not grow faster than the lengths, so that no c fits.
    """
    if num_tokens_a == num_tokens_b or min(num_tokens_a, num_tokens_b) < 1:
        raise ValueError(f"two different lengths of at least 1 are needed, got {num_tokens_a} and {num_tokens_b}.")
    if min(seconds_a, seconds_b) <= 0:
        raise ValueError(f"times must be positive, got {seconds_a} and {seconds_b} s.")
    pairs_a, pairs_b = units(0, num_tokens_a, 0.0), units(0, num_tokens_b, 0.0)
    divisor = seconds_a * num_tokens_b - seconds_b * num_tokens_a
    linear_cost = (seconds_b * pairs_a - seconds_a * pairs_b) / divisor if divisor else float("inf")
    if not 0 <= linear_cost < float("inf"):
        raise ValueError(
            f"no linear cost explains {seconds_a} s for {num_tokens_a} and {seconds_b} s for {num_tokens_b} tokens; "
            "measure longer prompts."
        )
    return linear_cost
