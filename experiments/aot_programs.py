"""Programs that are compiled for accelerators that are not there, and what must hold for the memory of each.

A program that changes the KV pool must do so in place: the compiler aliases the whole pool, keeps less temporary memory
than a copy would need, and has no instruction that copies the pool or a layer of it.
"""

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any, Protocol

import jax

_ITEM_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4}
_LARGE = 2**20  # bytes
# `copy-start` returns the destination first; `async` computations have a name of their own kind.
_COPY = re.compile(r"= \(?(\w+)\[([\d,]*)\][^=]*? copy(?:-start)?\(")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A function to compile.

    Attributes:
        name: of the program.
        function: to jit.
        arguments: trees of `jax.ShapeDtypeStruct`s with shardings over a mesh of absent devices.
        donated: numbers of the arguments that are consumed.
        pool: the argument that is the KV pool, [P, L, 2, K, page_size, H].
        writes: whether the program changes the pool; else it must leave it alone.
        most_temporary_bytes: bar of the temporary memory of a device.
    """

    name: str
    function: Callable
    arguments: tuple[Any, ...]
    donated: tuple[int, ...]
    pool: jax.ShapeDtypeStruct
    writes: bool
    most_temporary_bytes: int


class Memory(Protocol):
    """What the reports of both compilers have: bytes of a device, and what is copied."""

    argument_bytes: int
    output_bytes: int
    aliased_bytes: int
    temporary_bytes: int
    large_copies: tuple[str, ...]


def shard_shape(array: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    """Returns the shape of one device's part."""
    return array.shape if array.sharding is None else array.sharding.shard_shape(array.shape)


def shard_bytes(array: jax.ShapeDtypeStruct) -> int:
    """Returns the bytes of one device's part, without padding."""
    return math.prod(shard_shape(array)) * array.dtype.itemsize


def total_bytes(report: Memory) -> int:
    """Returns what a program needs of a device's memory while it runs."""
    return report.argument_bytes + report.output_bytes - report.aliased_bytes + report.temporary_bytes


def large_copies(hlo: str) -> tuple[str, ...]:
    """Returns type and shape of what a compiled program copies from one place to another, from 1 MiB on, each once."""
    found = set()
    for dtype, sizes in _COPY.findall(hlo):
        shape = [int(size) for size in sizes.split(",") if size]
        if math.prod(shape) * _ITEM_BYTES.get(dtype, 8) >= _LARGE:
            found.add(f"{dtype}[{sizes}]")
    return tuple(sorted(found))


def memory_missed(program: Program, report: Memory) -> list[str]:
    """Returns what a program does with the pool that it must not do."""
    pool_bytes, missed = shard_bytes(program.pool), []
    if program.writes and report.aliased_bytes < pool_bytes:
        missed.append(f"aliases {report.aliased_bytes} bytes; the pool has {pool_bytes}")
    if not program.writes and report.aliased_bytes:
        missed.append(f"aliases {report.aliased_bytes} bytes of a pool that must stay valid")
    if report.temporary_bytes > program.most_temporary_bytes:
        missed.append(f"has {report.temporary_bytes} temporary bytes; at most {program.most_temporary_bytes}")
    copies = [text for text in report.large_copies if _holds_a_layer(text, shard_shape(program.pool))]
    if copies:
        missed.append(f"copies {', '.join(copies)}; a device's pool is {list(shard_shape(program.pool))}")
    return missed


def _holds_a_layer(copied: str, pool_shape: tuple[int, ...]) -> bool:
    """Tells whether a shape is that of as many whole pages of K and V as a layer of the pool has, or more."""
    sizes = [int(size) for size in re.findall(r"\d+", copied.partition("[")[2])]
    return sizes[-2:] == list(pool_shape[-2:]) and math.prod(sizes) * pool_shape[1] >= math.prod(pool_shape)
