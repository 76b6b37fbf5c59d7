"""Part `ceilings` of `device_check.py`: what the device does at most, measured, for the fractions of the other parts.

Matrix products of bfloat16, as large as those of a prefill or larger, and copies of an array much larger than the cache
(bytes read and written are counted). The largest figure of each is the ceiling.
"""

from collections.abc import Iterator

import jax.numpy as jnp

from penelope_jax.experiments.device_host import Host, Program
from penelope_jax.experiments.device_report import Result

_PRODUCTS = ((8192, 8192, 8192), (8192, 4096, 24_576), (16_384, 8192, 16_384))  # rows, inner, columns
_DRY_PRODUCTS = ((64, 64, 64),)
_COPIED, _DRY_COPIED = 1 << 31, 1 << 16  # values of bfloat16


def programs(host: Host) -> Iterator[Program]:
    """Yields what the part compiles."""
    for rows, inner, columns in _DRY_PRODUCTS if host.dry else _PRODUCTS:
        yield Program(
            name=f"matmul {rows} x {inner} x {columns}",
            function=jnp.matmul,
            arguments=[host.like((rows, inner), "bfloat16"), host.like((inner, columns), "bfloat16")],
        )
    copied = host.like((_DRY_COPIED if host.dry else _COPIED,), "bfloat16")
    yield Program(name="copy", function=jnp.copy, arguments=[copied])
    yield Program(name="negate", function=jnp.negative, arguments=[copied])


def run(host: Host, result: Result) -> None:
    """Measures the ceilings and keeps them for the other parts."""
    for program in programs(host):
        with result.case(program.name):
            _measure(host, result, program)
    result.figures |= {f"{name} ceiling": value for name, value in host.ceilings.items()}


def _measure(host: Host, result: Result, program: Program) -> None:
    arrays = [host.normal(like.shape, like.dtype, seed) for seed, like in enumerate(program.arguments)]
    compiled = host.compile(program)
    timing = host.time({"": lambda: compiled(*arrays)})[""]
    if len(arrays) == 2:
        work = 2 * arrays[0].shape[0] * arrays[0].shape[1] * arrays[1].shape[1]
        name, columns = "matmul", {"TFLOP/s": work / timing.seconds / 1e12}
    else:
        work = 2 * arrays[0].nbytes
        name, columns = "copy", {"GB/s": work / timing.seconds / 1e9}
    host.ceilings[name] = max(host.ceilings.get(name, 0.0), work / timing.seconds)
    result.row(program.name, ms=1e3 * timing.seconds, **columns, spread=timing.spread)
