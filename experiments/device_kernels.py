"""Part `kernels` of `device_check.py`: paged attention against a float32 oracle, at real sizes.

Histories share pages; other layers, pages that nobody owns and slots behind the last token are full of NaN; unused
table entries are out of range. Rows around borders and some others are compared with the oracle, all are checked to be
finite. Deterministic programs must also give the bits of a whole prompt's rows when a hole is computed in tiles that
start elsewhere, or a row by itself. Controls with swapped K and V, shifted pages and masks that are off by one must
fail.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from penelope_jax.experiments.device_host import Host, Program
from penelope_jax.experiments.device_report import Result
from penelope_jax.kernels.paged_attention import ragged_paged_attention
from penelope_jax.kernels.paged_attention_reference import paged_attention_reference
from penelope_jax.kernels.q_tiles import decode_q_tile, prefill_q_tile

TOLERANCE = {"bfloat16": 1e-2, "float16": 2e-3}  # of a row and head, relative to its norm
CONTROL = 4  # a wrong kernel's error is this many times the tolerance at least
NO_PAGE = 2**31 - 1
NUM_LAYERS, LAYER = 2, 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A kernel's sizes.

    Attributes:
        kind: `prefill`; `decode`, whose histories are split where the kernel does so; `decode, not split`.
    """

    kind: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        heads = f"{self.num_heads}/{self.num_kv_heads} x {self.head_dim}"
        return f"{self.kind} {heads}, pages of {self.page_size}, {self.dtype}"

    @property
    def q_tile(self) -> int:
        tile = prefill_q_tile if self.kind == "prefill" else decode_q_tile
        return tile(self.num_heads, self.num_kv_heads)

    @property
    def deterministic(self) -> bool:
        return self.kind != "decode"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is computed.

    Attributes:
        spans: positions of each history that a prefill computes; its end is that of the last one.
        shared_pages: first pages of history 1 that are those of history 0.
        decodes: (history, position) of each row of a decode.
        prompt: tokens of the prompt whose rows are compared bit by bit; history 0 is as long.
        hole: span of the prompt.
        rows: of a prefill's batch.
        sampled: rows that are compared with the oracle, besides those at borders.
    """

    spans: tuple[tuple[tuple[int, int], ...], ...]
    shared_pages: int
    decodes: tuple[tuple[int, int], ...]
    prompt: int
    hole: tuple[int, int]
    rows: int
    sampled: int

    def lengths(self) -> list[int]:
        ends = [max(stop for _, stop in spans) for spans in self.spans]
        return [max([end] + [p + 1 for h, p in self.decodes if h == index]) for index, end in enumerate(ends)]


_DECODES = [0, 1, 15, 16, 63, 64, 65, 127, 128, 1023, 1024, 2047, 2048, 2049, 4095, 4096, 8191]
REAL = Sizes(
    spans=(
        ((1024, 2048), (4096, 4608), (8000, 8200)),
        ((16_384, 17_408), (32_768, 32_900)),
        ((0, 65),),
        ((0, 1),),
        ((63_990, 64_000),),
    ),
    shared_pages=8,
    decodes=tuple([(0, p) for p in _DECODES] + [(1, 4 * p + 3) for p in _DECODES[:-1]] + [(2, 64), (3, 0)])
    + tuple((4, p) for p in range(2000, 64_000, 2137)),
    prompt=3072,
    hole=(1000, 2024),
    rows=3072,
    sampled=24,
)
DRY = Sizes(
    spans=(((64, 100), (128, 130)), ((64, 65),)),
    shared_pages=1,
    decodes=((0, 0), (0, 127), (1, 519)),
    prompt=48,
    hole=(13, 40),
    rows=48,
    sampled=4,
)


def cases(dry: bool) -> tuple[Case, ...]:
    """Returns the cases; decodes come last, as a kernel that breaks the device ends the part."""
    if dry:
        geometries = [(4, 1, 64, 64, "bfloat16")]
        kinds = [("prefill", geometries), ("decode", geometries)]
    else:
        geometries = [
            (32, 8, 128, 64, "bfloat16"),
            (64, 4, 128, 64, "bfloat16"),
            (32, 8, 64, 64, "bfloat16"),
            (32, 8, 128, 16, "bfloat16"),
            (32, 8, 128, 128, "bfloat16"),
            (32, 8, 128, 64, "float16"),
        ]
        kinds = [("prefill", geometries), ("decode, not split", geometries[:2]), ("decode", geometries)]
    return tuple(
        Case(kind=kind, num_heads=n, num_kv_heads=k, head_dim=h, page_size=size, dtype=dtype)
        for kind, chosen in kinds
        for n, k, h, size, dtype in chosen
    )


class World:
    """The arrays of a case.

    Attributes:
        num_rows: T of the batch. num_tiles: of the tile table.
        batches: (tiles, history and position of each row in use) by name.
    """

    def __init__(self, case: Case, sizes: Sizes):
        self.case, self.sizes = case, sizes
        self.lengths = sizes.lengths()
        self._num_used = [-(-length // case.page_size) for length in self.lengths]
        self.num_pages = sum(self._num_used) + 2
        self.max_pages = max(self._num_used) + 1
        tile = case.q_tile
        if case.kind == "prefill":
            self.num_rows = sizes.rows
            self.batches = {
                "step": _cut([(h, start, stop) for h, spans in enumerate(sizes.spans) for start, stop in spans], tile),
                "prompt": _cut([(0, 0, sizes.prompt)], tile),
                "hole": _cut([(0, *sizes.hole)], tile, first_row=sizes.hole[0]),
            }
        else:
            self.num_rows = len(sizes.decodes)
            self.batches = {"step": _cut([(h, p, p + 1) for h, p in sizes.decodes], tile)}
        # Room for the rows of a decode too, which are computed again in a prefill's tiles.
        self.num_tiles = max(len(sizes.decodes), *(len(tiles) for tiles, _ in self.batches.values())) + 1

    def tables(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the page table, and how many slots of each page hold tokens, 0 where nobody owns it."""
        case, random = self.case, np.random.default_rng(1)
        free = random.permutation(self.num_pages).tolist()
        table = np.full((len(self.lengths), self.max_pages), NO_PAGE, np.int32)
        table[:, 1::2] = -7
        for history, used in enumerate(self._num_used):
            table[history, :used] = [free.pop() for _ in range(used)]
        table[1, : self.sizes.shared_pages] = table[0, : self.sizes.shared_pages]
        valid = np.zeros(self.num_pages, np.int32)
        for history, used in enumerate(self._num_used):
            slots = np.minimum(case.page_size, self.lengths[history] - case.page_size * np.arange(used))
            np.maximum.at(valid, table[history, :used], slots.astype(np.int32))
        return table, valid

    def padded(self, batch: str) -> np.ndarray:
        tiles = np.zeros((self.num_tiles, 4), np.int32)
        tiles[: len(self.batches[batch][0])] = self.batches[batch][0]
        return tiles

    def sampled(self) -> np.ndarray:
        """Returns rows of the step to compare: first and last of every segment and tile border, and some others."""
        where = self.batches["step"][1]
        if self.case.kind != "prefill":
            return np.arange(len(where))
        jumps = np.flatnonzero((np.diff(where[:, 0]) != 0) | (np.diff(where[:, 1]) != 1))
        borders = np.concatenate([[0, len(where) - 1], jumps, jumps + 1, [self.case.q_tile - 1, self.case.q_tile]])
        others = np.random.default_rng(2).integers(0, len(where), self.sizes.sampled)
        return np.unique(np.minimum(np.concatenate([borders, others]), len(where) - 1))


def _cut(spans: list[tuple[int, int, int]], tile: int, first_row: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns tiles i32[n, 4] of dense rows, and i32[rows, 2] (history, position) of each."""
    tiles, where = [], []
    for history, start, stop in spans:
        for first in range(start, stop, tile):
            tiles.append((history, first_row + len(where) + first - start, first, min(tile, stop - first)))
        where += [(history, position) for position in range(start, stop)]
    return np.array(tiles, np.int32), np.array(where, np.int32)


def attend_program(host: Host, world: World) -> Program:
    """Returns the case's kernel: (q, pool, tiles, table) -> [T, N, H]."""
    case = world.case
    attend = functools.partial(
        ragged_paged_attention,
        q_tile=case.q_tile,
        scale=case.head_dim**-0.5,
        implementation="gpu",
        deterministic=case.deterministic,
        interpret=host.dry,
    )
    return Program(
        name=f"kernel, {case.name}",
        function=lambda q, pool, tiles, table: attend(q, pool, LAYER, tiles, table),
        arguments=[
            host.like((world.num_rows, case.num_heads, case.head_dim), case.dtype),
            host.like(_pool_shape(world), case.dtype),
            host.like((world.num_tiles, 4), "int32"),
            host.like((len(world.lengths), world.max_pages), "int32"),
        ],
    )


def oracle_program(host: Host, world: World) -> Program:
    """Returns the oracle for single rows: (q f32[n, N, H], pool, where i32[n, 2], table) -> f32[n, N, H]."""
    case, num_rows = world.case, len(world.sampled())

    def oracle(q, pool, where, table):
        def one(row_and_place):
            row, (history, position) = row_and_place
            tile = jnp.stack([history, jnp.int32(0), position, jnp.int32(1)])[None]
            attended = paged_attention_reference(
                row[None], pool, jnp.int32(LAYER), tile, table, q_tile=1, scale=case.head_dim**-0.5
            )
            return attended[0]

        return jax.lax.map(one, (q, where))

    return Program(
        name=f"oracle, {case.name}",
        function=oracle,
        arguments=[
            host.like((num_rows, case.num_heads, case.head_dim), "float32"),
            host.like(_pool_shape(world), case.dtype),
            host.like((num_rows, 2), "int32"),
            host.like((len(world.lengths), world.max_pages), "int32"),
        ],
    )


def programs(host: Host) -> Iterator[Program]:
    """Yields what the part compiles."""
    for case in cases(host.dry):
        world = World(case, DRY if host.dry else REAL)
        yield attend_program(host, world)
        yield oracle_program(host, world)


def run(host: Host, result: Result) -> None:
    """Checks every case."""
    prompts: dict[Any, Any] = {}
    for case in cases(host.dry):
        if not host.wants(case.name):
            continue
        if host.out_of_time():
            result.skipped.append(case.name)
            continue
        with result.case(case.name):
            _check(host, result, World(case, DRY if host.dry else REAL), prompts)


def _check(host: Host, result: Result, world: World, prompts: dict[Any, Any]) -> None:
    case = world.case
    table, valid = world.tables()
    pool = _fill(_pool_shape(world), case.dtype, host.put(valid))
    q = host.normal((world.num_rows, case.num_heads, case.head_dim), case.dtype, seed=5)
    sampled = world.sampled()
    where = world.batches["step"][1][sampled]
    attend, tiles = host.compile(attend_program(host, world)), world.padded("step")
    expected = np.asarray(host.compile(oracle_program(host, world))(q[sampled].astype(jnp.float32), pool, where, table))

    def errors(out: jax.Array) -> np.ndarray:
        rows = np.asarray(out[sampled].astype(jnp.float32))
        return np.linalg.norm(rows - expected, axis=-1) / np.linalg.norm(expected, axis=-1)

    def control(pool=pool, tiles=tiles, table=table) -> float:
        """Returns the largest error that is a number: NaN would be too easy to see."""
        found = errors(attend(q, pool, tiles, table))
        return float(found[np.isfinite(found)].max(initial=0.0))

    out, tolerance = attend(q, pool, tiles, table), TOLERANCE[case.dtype]
    in_use = len(world.batches["step"][1])
    strays = int((~jnp.isfinite(out[:in_use])).sum() + (out[in_use:] != 0).sum())
    worst = float(np.nan_to_num(errors(out), nan=np.inf).max())
    one = np.array([0, 0, 1, 0], np.int32)
    controls = {"mask one less": control(tiles=tiles - one)}
    if not host.dry:
        other_page = table.copy()
        other_page[:, 0] = table[0, 1]
        controls["K and V swapped"] = control(pool=pool[:, :, ::-1])
        controls["another first page"] = control(table=other_page)
        controls["mask one more"] = control(tiles=tiles + one)
    columns: dict[str, Any] = {"worst error": worst, "tolerance": tolerance, "not finite": strays}
    if case.deterministic:
        columns["bits of a hole or row"] = _differing(world, attend, q, pool, table, out, prompts)
    result.row(case.name, **columns, least_control=min(controls.values()), rows_compared=len(sampled))
    result.bar(f"{case.name}: worst error", worst, tolerance, at_least=False, speed=False)
    result.bar(f"{case.name}: not finite or not zero", strays, 0, at_least=False, speed=False)
    for name, value in controls.items():
        result.bar(f"{case.name}: control, {name}", value, CONTROL * tolerance, at_least=True, speed=False)
    if case.deterministic:
        result.bar(f"{case.name}: bits that differ", columns["bits of a hole or row"], 0, at_least=False, speed=False)


def _differing(world: World, attend, q, pool, table, out, prompts: dict[Any, Any]) -> int:
    """Returns how many values differ from the same rows computed otherwise.

    A prefill: a hole in tiles that start elsewhere than the prompt's. A decode: rows by themselves; what it returns is
    compared with the tiles of a prefill, whose queries are other ones, so the rows are computed there again.
    """
    if world.case.kind == "prefill":
        whole = attend(q, pool, world.padded("prompt"), table)
        hole = attend(q, pool, world.padded("hole"), table)
        rows = slice(*world.sizes.hole)
        prompts[_geometry(world.case)] = attend
        return int((_bits(whole[rows]) != _bits(hole[rows])).sum())
    together = prompts.get(_geometry(world.case))
    if together is None:
        raise ValueError(f"{world.case.name} needs the prefill of the same heads before it.")
    prefill = World(dataclasses.replace(world.case, kind="prefill"), world.sizes)
    queries = jnp.zeros((prefill.num_rows, *q.shape[1:]), q.dtype).at[: len(q)].set(q)
    tiles = np.zeros((prefill.num_tiles, 4), np.int32)
    tiles[: len(world.batches["step"][0])] = world.batches["step"][0]
    again = together(queries, pool, tiles, table)[: len(q)]
    return int((_bits(again) != _bits(out)).sum())


def _geometry(case: Case) -> tuple[Any, ...]:
    return dataclasses.astuple(dataclasses.replace(case, kind=""))


def _pool_shape(world: World) -> tuple[int, ...]:
    case = world.case
    return (world.num_pages, NUM_LAYERS, 2, case.num_kv_heads, case.page_size, case.head_dim)


def _bits(array: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(array, jnp.uint16)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _fill(shape: tuple[int, ...], dtype: str, valid: jax.Array) -> jax.Array:
    """Returns a pool with NaN in all layers but one, and behind each page's valid slots."""
    drawn = jax.random.normal(jax.random.key(3, impl="unsafe_rbg"), shape, jnp.float32).astype(dtype)
    held = jnp.arange(shape[4])[None, :] < valid[:, None]  # bool[P, page_size]
    layer = jnp.arange(shape[1]) == LAYER
    kept = held[:, None, None, None, :, None] & layer[None, :, None, None, None, None]
    return jnp.where(kept, drawn, jnp.asarray(jnp.nan, drawn.dtype))
