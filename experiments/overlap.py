"""How much of the host's work hides behind the device.

A null model answers after a delay, as a device would, while the host is free. The delay is made as long as the host's
own work for a step (plan and apply, measured first), where overlap can win most: twice the steps a second.

    python -m penelope_jax.experiments.overlap [--requests 64] [--steps 400] [--json FILE]
"""

import argparse
import dataclasses
import time
from typing import NamedTuple

import numpy as np

from penelope_jax.config import EngineConfig
from penelope_jax.driver import Driver, HashExecutor
from penelope_jax.events import Sampled
from penelope_jax.metrics import write_json
from penelope_jax.moves import Move
from penelope_jax.segments import SamplingParams, StepDone, StepPlan


class Pending(NamedTuple):
    """A step of the null device: what it will return, and when it is ready (seconds on the performance counter)."""

    done: StepDone
    ready_s: float


class DelayedExecutor:
    """A device that runs steps one after another, each for `delay_s` seconds, and computes nothing."""

    def __init__(self, delay_s: float, vocab_size: int):
        self.delay_s = delay_s
        self._samples = HashExecutor(vocab_size)
        self._free_s = 0.0

    def dispatch(self, plan: StepPlan) -> Pending:
        """Queues a step behind those before it."""
        done = self._samples.dispatch(plan)
        self._free_s = max(self._free_s, time.perf_counter()) + self.delay_s
        return Pending(done, self._free_s)

    def collect(self, pending: Pending, time_s: float = 0.0) -> StepDone:
        """Sleeps until the step is ready."""
        wait_s = pending.ready_s - time.perf_counter()
        if wait_s > 0:
            time.sleep(wait_s)
        return dataclasses.replace(pending.done, time_s=time_s)

    def start_moves(self, moves: tuple[Move, ...]) -> None:
        """Starts moves that take no time."""
        self._samples.start_moves(moves)

    def finish_moves(self, *, wait: bool = False) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ends them."""
        return self._samples.finish_moves(wait=wait)


class Outcome(NamedTuple):
    """Steps a second once all requests decode, and every token by (request, position)."""

    steps_per_s: float
    tokens: dict[tuple[int, int], int]


def decode(num_requests: int, num_steps: int, delay_s: float, *, overlap: bool, prompt_len: int = 1000) -> Outcome:
    """Decodes on the null device.

    Args:
        num_requests: requests decoding at once.
        num_steps: steps to time.
        delay_s: how long the device takes for a step.
        overlap: whether the host plans ahead.
        prompt_len: tokens of each prompt.
    """
    rng = np.random.default_rng(0)
    vocab_size = 50_000
    config = EngineConfig(
        device_tokens=(num_requests + 1) * 64 * -(-(prompt_len + num_steps + 64) // 64),
        max_context=prompt_len + num_steps + 64,
        max_running=num_requests,
        max_step_tokens=64 * num_requests * -(-prompt_len // 64),
        max_step_segments=num_requests,
        vocab_size=vocab_size,
    )
    driver = Driver(config, DelayedExecutor(delay_s, vocab_size), overlap=overlap)
    for _ in range(num_requests):
        driver.submit(rng.integers(0, vocab_size, prompt_len), SamplingParams(max_tokens=num_steps + 16))
    tokens: dict[tuple[int, int], int] = {}

    def step() -> None:
        for update in driver.step():
            if isinstance(update, Sampled):
                tokens[update.request_id, update.position] = update.token

    while not all(request.prefilled for request in driver.state.running) or driver.state.waiting:
        step()
    start_s = time.perf_counter()
    for _ in range(num_steps):
        step()
    steps_per_s = num_steps / (time.perf_counter() - start_s)
    while not driver.idle:
        step()
    return Outcome(steps_per_s, tokens)


def compare(num_requests: int, num_steps: int) -> dict:
    """Returns steps a second with and without overlap, on a device as slow as the host, and whether outputs agree."""
    host_s = 1 / decode(num_requests, num_steps, 0.0, overlap=False).steps_per_s
    without = decode(num_requests, num_steps, host_s, overlap=False)
    ahead = decode(num_requests, num_steps, host_s, overlap=True)
    return {
        "requests": num_requests,
        "steps": num_steps,
        "host_ms": host_s * 1e3,
        "steps_per_s": {"no_overlap": without.steps_per_s, "overlap": ahead.steps_per_s},
        "speedup": ahead.steps_per_s / without.steps_per_s,
        "identical": ahead.tokens == without.tokens,
    }


def main(argv: list[str] | None = None) -> None:
    """Prints the comparison."""
    parser = argparse.ArgumentParser(description="Times overlap of host and device.", allow_abbrev=False)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(argv)
    result = compare(args.requests, args.steps)
    print(f"{args.requests} requests decode; the host needs {result['host_ms']:.2f} ms a step, and so does the device")
    print(f"without overlap {result['steps_per_s']['no_overlap']:8.1f} steps/s")
    print(f"with overlap    {result['steps_per_s']['overlap']:8.1f} steps/s   x {result['speedup']:.2f}")
    print(f"outputs identical: {'yes' if result['identical'] else 'NO'}")
    if args.json:
        write_json(args.json, result)


if __name__ == "__main__":
    main()
