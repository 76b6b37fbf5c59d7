"""Parts `prefill` and `decode` of `device_check.py`: times of paged attention with the heads of Qwen3-8B, one layer.

A prefill's figure is TFLOP/s of the query-key pairs that causal attention has; a decode's is GB/s of the keys and values
that it must read, over calls one after another inside one program, as a call of few rows takes less time than its
start. Beside a prefill stands cuDNN's dense flash attention on contiguous K and V of the same lengths: each
query against all keys (`rectangle`), and the whole prompt up to the hole's end under the causal mask (`causal`); the
faster of the two, in TFLOP/s, is what is compared with. cuDNN has no mask for a hole, so neither is the same work.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from penelope_jax.experiments.device_host import Host, Program
from penelope_jax.experiments.device_report import Result
from penelope_jax.experiments.device_timing import Timing
from penelope_jax.kernels.paged_attention import ragged_paged_attention
from penelope_jax.kernels.q_tiles import decode_q_tile, prefill_q_tile

PREFILL_BAR = 0.6  # of the matrix products' ceiling, on the 32K holes
CUDNN_BAR = 0.9  # of cuDNN's TFLOP/s, on the same
DECODE_BAR = 0.8  # of the copies' ceiling, 64 rows at 32K

K = 1024
Span = tuple[int, int, int]  # history, start, stop


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heads:
    """Sizes of attention."""

    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 64

    def pool_shape(self, num_pages: int) -> tuple[int, ...]:
        return (num_pages, 1, 2, self.num_kv_heads, self.page_size, self.head_dim)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prefill:
    """A call that computes spans of histories, and single rows of others."""

    name: str
    spans: tuple[Span, ...]
    decodes: int = 0
    decode_at: int = 0
    judged: bool = False
    causal: bool = True  # whether cuDNN also computes the whole prompt
    plain: bool = False  # whether XLA attention is timed too


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """What both parts time; histories have `context` tokens each."""

    heads: Heads
    context: int
    prefills: tuple[Prefill, ...]
    decodes: tuple[tuple[int, int], ...]  # rows, context
    judged: tuple[int, int]
    repeats: int  # calls of a decode inside its program


REAL = Sizes(
    heads=Heads(),
    context=129 * K,
    prefills=(
        Prefill(name="32K from 0", spans=((0, 0, 32 * K),), judged=True),
        Prefill(name="hole of 32K from 16K", spans=((0, 16 * K, 48 * K),), judged=True),
        Prefill(name="hole of 30K, 16K to 46K", spans=((0, 16 * K, 46 * K),)),
        Prefill(name="hole of 8K at 16K", spans=((0, 16 * K, 24 * K),), plain=True),
        Prefill(name="512 appended at 128K", spans=((0, 128 * K, 128 * K + 512),), causal=False, plain=True),
        Prefill(
            name="mixed: 2 holes, 2 appended, 32 decodes at 32K",
            spans=((0, 16 * K, 20 * K), (0, 64 * K, 64 * K + 512), (1, 20 * K, 22 * K), (1, 96 * K, 96 * K + 512)),
            decodes=32,
            decode_at=32 * K - 1,
        ),
    ),
    decodes=tuple((rows, context) for context in (32 * K, 128 * K) for rows in (1, 16, 64)),
    judged=(64, 32 * K),
    repeats=16,
)
DRY = Sizes(
    heads=Heads(num_heads=4, num_kv_heads=1, head_dim=64, page_size=16),
    context=192,
    prefills=(
        Prefill(name="hole", spans=((0, 64, 128),), judged=True, plain=True),
        Prefill(name="mixed", spans=((0, 16, 32), (1, 64, 80)), decodes=2, decode_at=63),
    ),
    decodes=((2, 64),),
    judged=(2, 64),
    repeats=2,
)


def sizes_of(host: Host) -> Sizes:
    """Returns the sizes here."""
    return DRY if host.dry else REAL


def prefill_program(host: Host, prefill: Prefill, implementation: str) -> Program:
    """Returns the attention of a step as the model's step calls it: (q, pool, tiles, decode tiles, table)."""
    sizes = sizes_of(host)
    heads = sizes.heads
    large = prefill_q_tile(heads.num_heads, heads.num_kv_heads)
    small = decode_q_tile(heads.num_heads, heads.num_kv_heads)

    def step(q, pool, tiles, decode_tiles, table):
        attend = functools.partial(
            ragged_paged_attention,
            q,
            pool,
            0,
            page_table=table,
            scale=heads.head_dim**-0.5,
            implementation=implementation,
        )
        out = attend(tiles=tiles, q_tile=large)
        return out + attend(tiles=decode_tiles, q_tile=small) if decode_tiles.shape[0] else out

    num_rows, tiles, decode_tiles, table = batch(sizes, prefill)
    return Program(
        name=f"prefill {prefill.name}, {implementation}",
        function=step,
        arguments=[
            host.like((num_rows, heads.num_heads, heads.head_dim), "bfloat16"),
            host.like(heads.pool_shape(num_pages(sizes)), "bfloat16"),
            *(host.like(part.shape, "int32") for part in (tiles, decode_tiles, table)),
        ],
    )


def num_pages(sizes: Sizes) -> int:
    """Returns the pages of the pool of `prefill`: two long histories, and those of the decodes."""
    decodes = max(p.decodes * -(-(p.decode_at + 1) // sizes.heads.page_size) for p in sizes.prefills)
    return 2 * sizes.context // sizes.heads.page_size + decodes


def batch(sizes: Sizes, prefill: Prefill) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
    """Returns the number of rows, tiles, tiles of decodes, and the table: histories 0 and 1, then the decodes'."""
    size, per_history = sizes.heads.page_size, sizes.context // sizes.heads.page_size
    tile = prefill_q_tile(sizes.heads.num_heads, sizes.heads.num_kv_heads)
    order = np.random.default_rng(0).permutation(num_pages(sizes)).astype(np.int32)
    table = np.zeros((2 + prefill.decodes, per_history), np.int32)
    table[:2] = order[: 2 * per_history].reshape(2, per_history)
    used = -(-(prefill.decode_at + 1) // size)
    table[2:, :used] = order[2 * per_history :][: prefill.decodes * used].reshape(prefill.decodes, used)
    tiles, num_rows = [], 0
    for history, start, stop in prefill.spans:
        for first in range(start, stop, tile):
            tiles.append((history, num_rows + first - start, first, min(tile, stop - first)))
        num_rows += stop - start
    decode_tiles = [(2 + index, num_rows + index, prefill.decode_at, 1) for index in range(prefill.decodes)]
    decode_tiles = np.array(decode_tiles, np.int32).reshape(-1, 4)
    return num_rows + prefill.decodes, np.array(tiles, np.int32), decode_tiles, table


def cudnn_program(host: Host, num_queries: int, num_keys: int, causal: bool, rows: int = 1) -> Program:
    """Returns dense flash attention on contiguous K and V."""
    heads = sizes_of(host).heads
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=causal, implementation="cudnn")
    keys = host.like((rows, num_keys, heads.num_kv_heads, heads.head_dim), "bfloat16")
    return Program(
        name=f"cudnn {rows} x {num_queries} x {num_keys}{', causal' if causal else ''}",
        function=lambda q, k, v: attend(q, k, v),
        arguments=[host.like((rows, num_queries, heads.num_heads, heads.head_dim), "bfloat16"), keys, keys],
        needs_cudnn=True,
    )


def decode_program(host: Host, rows: int, context: int) -> Program:
    """Returns the attention of steps of decodes, each on what the one before gave: (q, pool, tiles, table)."""
    sizes = sizes_of(host)
    heads = sizes.heads
    attend = functools.partial(
        ragged_paged_attention,
        q_tile=decode_q_tile(heads.num_heads, heads.num_kv_heads),
        scale=heads.head_dim**-0.5,
        implementation=host.implementation,
    )
    return Program(
        name=f"decode {rows} x {context}",
        function=lambda q, pool, tiles, table: jax.lax.fori_loop(
            0, sizes.repeats, lambda _, q: attend(q, pool, 0, tiles, table), q
        ),
        arguments=[
            host.like((rows, heads.num_heads, heads.head_dim), "bfloat16"),
            host.like(heads.pool_shape(_decode_pages(sizes)), "bfloat16"),
            host.like((rows, 4), "int32"),
            host.like((rows, context // heads.page_size), "int32"),
        ],
    )


def _decode_pages(sizes: Sizes) -> int:
    return max(rows * context for rows, context in sizes.decodes) // sizes.heads.page_size


def _cudnn_of(host: Host, prefill: Prefill) -> dict[str, Program]:
    if len(prefill.spans) != 1:
        return {}
    ((_, start, stop),) = prefill.spans
    found = {"rectangle": cudnn_program(host, stop - start, stop, causal=False)}
    return found | ({"causal": cudnn_program(host, stop, stop, causal=True)} if prefill.causal else {})


def prefill_programs(host: Host) -> Iterator[Program]:
    """Yields what `prefill` compiles."""
    for prefill in sizes_of(host).prefills:
        yield prefill_program(host, prefill, host.implementation)
        yield from _cudnn_of(host, prefill).values()
        if prefill.plain:
            yield prefill_program(host, prefill, "cpu")


def decode_programs(host: Host) -> Iterator[Program]:
    """Yields what `decode` compiles."""
    for rows, context in sizes_of(host).decodes:
        yield decode_program(host, rows, context)
    rows, context = sizes_of(host).judged
    yield cudnn_program(host, 1, context, causal=False, rows=rows)


def run_prefill(host: Host, result: Result) -> None:
    """Times the prefills."""
    sizes = sizes_of(host)
    pool = host.normal(sizes.heads.pool_shape(num_pages(sizes)), "bfloat16", seed=1)
    for prefill in sizes.prefills:
        if not host.wants(prefill.name):
            continue
        if host.out_of_time():
            result.skipped.append(prefill.name)
            continue
        with result.case(prefill.name):
            _time_prefill(host, result, prefill, pool)
        if prefill.plain and not host.out_of_time():
            with result.case(f"{prefill.name}, XLA"):
                _time_plain(host, result, prefill, pool)


def _time_prefill(host: Host, result: Result, prefill: Prefill, pool: jax.Array) -> None:
    sizes = sizes_of(host)
    num_rows, *tables = batch(sizes, prefill)
    q = host.normal((num_rows, sizes.heads.num_heads, sizes.heads.head_dim), "bfloat16", seed=2)
    tables = host.put(tables)
    ours = host.compile(prefill_program(host, prefill, host.implementation))
    calls: dict[str, Callable[[], Any]] = {"": lambda: ours(q, pool, *tables)}
    pairs = {"": sum(_causal(start, stop) for _, start, stop in prefill.spans)}
    pairs[""] += prefill.decodes * (prefill.decode_at + 1)
    programs = _cudnn_of(host, prefill)
    for name in _add_cudnn(host, result, calls, prefill.name, programs):
        _, start, stop = prefill.spans[0]
        pairs[name] = _causal(0, stop) if name == "causal" else (stop - start) * stop
    timings = host.time(calls)
    rates = {name: _rate(sizes, pairs[name], timing) for name, timing in timings.items()}
    ceiling, cudnn = host.ceiling("matmul"), max((rates[name] for name in rates if name), default=None)
    columns: dict[str, Any] = {
        "ms": 1e3 * timings[""].seconds,
        "TFLOP/s": rates[""] / 1e12,
        "of matmul": rates[""] / ceiling,
        **{f"cuDNN {name}": rates[name] / 1e12 for name in rates if name},
        "of cuDNN": None if cudnn is None else rates[""] / cudnn,
    }
    result.row(prefill.name, **columns, spread=timings[""].spread)
    if prefill.judged:
        result.bar(f"{prefill.name}, of the matmul ceiling", rates[""] / ceiling, PREFILL_BAR, at_least=True)
        if cudnn is not None:
            result.bar(f"{prefill.name}, of cuDNN", rates[""] / cudnn, CUDNN_BAR, at_least=True)


def _time_plain(host: Host, result: Result, prefill: Prefill, pool: jax.Array) -> None:
    """Times attention in XLA on the same arrays. It is slow, so once is enough."""
    sizes = sizes_of(host)
    num_rows, *tables = batch(sizes, prefill)
    q = host.normal((num_rows, sizes.heads.num_heads, sizes.heads.head_dim), "bfloat16", seed=2)
    tables = host.put(tables)
    compiled = host.compile(prefill_program(host, prefill, "cpu"))
    timing = host.time({"": lambda: compiled(q, pool, *tables)}, num_runs=1, least_s=0)[""]
    rate = _rate(sizes, sum(_causal(start, stop) for _, start, stop in prefill.spans), timing)
    result.row(f"{prefill.name}, XLA", **{"ms": 1e3 * timing.seconds, "TFLOP/s": rate / 1e12})


def _add_cudnn(host: Host, result: Result, calls: dict[str, Callable[[], Any]], case: str, programs) -> list[str]:
    """Adds calls of cuDNN and returns their names. Its absence is a finding, not a failure of what is measured here."""
    added = []
    for name, program in programs.items():
        try:
            compiled = host.compile(program)
            arrays = [host.normal(like.shape, like.dtype, seed) for seed, like in enumerate(program.arguments)]
            jax.block_until_ready(compiled(*arrays))
        except (RuntimeError, ValueError, NotImplementedError) as error:
            result.figures[f"cuDNN, {case}, {name}"] = f"absent: {' '.join(str(error).split())[:200]}"
            continue
        calls[name] = functools.partial(compiled, *arrays)
        added.append(name)
    return added


def _causal(start: int, stop: int) -> float:
    """Returns the query-key pairs of positions [start, stop)."""
    return (start + 1 + stop) * (stop - start) / 2


def _rate(sizes: Sizes, pairs: float, timing: Timing) -> float:
    return 4 * sizes.heads.num_heads * sizes.heads.head_dim * pairs / timing.seconds


def run_decode(host: Host, result: Result) -> None:
    """Times the decodes."""
    sizes = sizes_of(host)
    pool = host.normal(sizes.heads.pool_shape(_decode_pages(sizes)), "bfloat16", seed=1)
    for rows, context in sizes.decodes:
        name = f"{rows} at {context}" if host.dry else f"{rows} at {context // K}K"
        if not host.wants(name):
            continue
        if host.out_of_time():
            result.skipped.append(name)
            continue
        with result.case(name):
            _time_decode(host, result, name, rows, context, pool)


def _time_decode(host: Host, result: Result, name: str, rows: int, context: int, pool: jax.Array) -> None:
    sizes = sizes_of(host)
    heads = sizes.heads
    order = np.random.default_rng(0).permutation(_decode_pages(sizes)).astype(np.int32)
    table = order[: rows * context // heads.page_size].reshape(rows, -1)
    tables = host.put((np.array([(row, row, context - 1, 1) for row in range(rows)], np.int32), table))
    q = host.normal((rows, heads.num_heads, heads.head_dim), "bfloat16", seed=2)
    compiled = host.compile(decode_program(host, rows, context))
    calls: dict[str, Callable[[], Any]] = {"": lambda: compiled(q, pool, *tables)}
    judged = (rows, context) == sizes.judged
    if judged:
        _add_cudnn(host, result, calls, name, {"cuDNN": cudnn_program(host, 1, context, causal=False, rows=rows)})
    timings = host.time(calls)
    seconds, read = timings[""].seconds / sizes.repeats, rows * context * 2 * heads.num_kv_heads * heads.head_dim * 2
    fraction = read / seconds / host.ceiling("copy")
    others = {f"{key} GB/s": read / timings[key].seconds / 1e9 for key in timings if key}
    columns = {"ms": 1e3 * seconds, "GB/s": read / seconds / 1e9, "of copy": fraction, **others}
    result.row(name, **columns, spread=timings[""].spread)
    if judged:
        result.bar(f"{name}, of the copy ceiling", fraction, DECODE_BAR, at_least=True)
