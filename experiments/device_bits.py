"""Part `bit-identity` of `device_check.py`: what deterministic mode rests on, on this device.

Matrix products: at one number of rows, the bits of a row must not depend on its place or on the rows beside it; whether
they depend on the number of rows is told, not judged. The step in deterministic mode: pages that are refilled beside
another request, or computed row by row, must equal those of the first computation bit for bit. How many values of
the default mode differ is told too. The controls change one bit of every input row, or one token.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from penelope_jax.experiments.device_host import Host, Program
from penelope_jax.experiments.device_model import StepSizes, StepWorld, few_layers, step_program
from penelope_jax.experiments.device_report import Result
from penelope_jax.experiments.device_steps import sizes_of as steps_of
from penelope_jax.models.linear import project

_ROWS = (32, 64, 512, 2048)
_PRODUCTS = ((4096, 12_288), (12_288, 4096), (4096, 6144))  # inner, columns: of Qwen3-8B
_DRY_ROWS, _DRY_PRODUCTS = (32, 64), ((64, 128),)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refill:
    """What is refilled.

    Attributes:
        prompt: tokens of the history. hole: span of it. other: tokens of the request beside it.
        decodes: positions that are also computed one by one, by steps of the smallest number of rows.
    """

    prompt: int
    hole: tuple[int, int]
    other: int
    decodes: tuple[int, ...]


def refill_of(host: Host) -> Refill:
    """Returns what is refilled here."""
    if host.dry:
        return Refill(prompt=48, hole=(16, 32), other=21, decodes=(47,))
    return Refill(prompt=1500, hole=(256, 896), other=700, decodes=(1497, 1498, 1499))


def step_sizes(host: Host, *, deterministic: bool) -> StepSizes:
    """Returns the steps: one that holds a prompt, and a small one."""
    if host.dry:
        return dataclasses.replace(steps_of(host).layers, deterministic=deterministic)
    return StepSizes(
        name="2 layers",
        config=few_layers(2),
        num_pages=80,
        page_size=64,
        max_context=2048,
        max_segments=4,
        rows=(128, 2048) if deterministic else (2048,),
        deterministic=deterministic,
    )


def product_program(host: Host, rows: int, inner: int, columns: int) -> Program:
    """Returns a projection as layers have it: (x, weight) -> [rows, columns]."""
    return Program(
        name=f"project {rows} x {inner} x {columns}",
        function=lambda x, weight: project(x, weight, None),
        arguments=[host.like((rows, inner), "bfloat16"), host.like((inner, columns), "bfloat16")],
    )


def programs(host: Host) -> Iterator[Program]:
    """Yields what the part compiles."""
    for inner, columns in _DRY_PRODUCTS if host.dry else _PRODUCTS:
        for rows in _DRY_ROWS if host.dry else _ROWS:
            yield product_program(host, rows, inner, columns)
    for deterministic in (True, False):
        sizes = step_sizes(host, deterministic=deterministic)
        for rows in sizes.rows:
            yield step_program(host, sizes, rows)


def run(host: Host, result: Result) -> None:
    """Compares bits."""
    for inner, columns in _DRY_PRODUCTS if host.dry else _PRODUCTS:
        with result.case(f"products {inner} x {columns}"):
            _products(host, result, inner, columns)
    for deterministic in (True, False):
        name = "step, deterministic" if deterministic else "step, default mode"
        if host.wants(name):
            with result.case(name):
                _refill(host, result, name, step_sizes(host, deterministic=deterministic))


def _products(host: Host, result: Result, inner: int, columns: int) -> None:
    numbers = _DRY_ROWS if host.dry else _ROWS
    weight = host.normal((inner, columns), "bfloat16", seed=1)
    x = host.normal((numbers[-1], inner), "bfloat16", seed=2)
    outs = {}
    for rows in numbers:
        product = host.compile(product_program(host, rows, inner, columns))
        outs[rows] = product(x[:rows], weight)
        # The second half of the rows, in another order, in front of rows that are new.
        order = np.random.default_rng(3).permutation(rows)[: rows // 2]
        moved = jnp.concatenate([x[order], host.normal((rows - rows // 2, inner), "bfloat16", seed=4)])
        again = product(moved, weight)[: rows // 2]
        flipped = jax.lax.bitcast_convert_type(_bits(x[:rows]) ^ jnp.uint16(1 << 6), jnp.bfloat16)
        name = f"{rows} x {inner} x {columns}"
        differ = int(_rows_that_differ(outs[rows][order], again))
        control = int(_rows_that_differ(outs[rows], product(flipped, weight)))
        result.row(name, **{"rows that differ": differ, "of": rows // 2, "control": control})
        result.bar(f"product {name}: rows that differ", differ, 0, at_least=False, speed=False)
        result.bar(f"product {name}: control, rows that differ", control, rows, at_least=True, speed=False)
    for rows in numbers[:-1]:
        key = f"rows that differ of {rows} x {inner} x {columns} from those of {numbers[-1]} rows"
        result.figures[key] = int(_rows_that_differ(outs[rows], outs[numbers[-1]][:rows]))


def _refill(host: Host, result: Result, name: str, sizes: StepSizes) -> None:
    what, world = refill_of(host), StepWorld(host, sizes)
    size, judged = sizes.page_size, sizes.deterministic
    pages = world.histories[0][: -(-what.prompt // size)]
    hole = world.histories[0][what.hole[0] // size : what.hole[1] // size]
    prompt = world.batch([world.segment(0, 0, what.prompt, sample=True)])
    before = world.run([prompt])
    whole = _read(world, pages)

    world.pool = _poison(world.pool, hole)
    # Another history stands in front, so the hole's rows are at other places.
    beside = [world.segment(1, 0, what.other), world.segment(0, *what.hole)]
    world.run([world.batch(beside)])
    refilled = _differing(whole, _read(world, pages), what.prompt, size)
    result.row(name, compared="refilled hole", values=refilled, of=whole.size)
    if not judged:
        return
    result.bar("refilled hole: values that differ", refilled, 0, at_least=False, speed=False)

    after = world.run(
        [world.batch([world.segment(0, position, position + 1, sample=True)]) for position in what.decodes]
    )
    rows = _differing(whole, _read(world, pages), what.prompt, size)
    result.row(name, compared="rows computed one by one", values=rows, of=whole.size)
    result.bar("rows computed one by one: values that differ", rows, 0, at_least=False, speed=False)
    same = bool(before.tokens[0] == after.tokens[0]) and bool(before.logprobs[0] == after.logprobs[0])
    result.row(name, compared="next token and its log-probability", values=int(not same), of=1)
    result.bar("next token or log-probability differs", int(not same), 0, at_least=False, speed=False)

    other = world.segment(0, *what.hole)
    changed = dataclasses.replace(other, tokens=np.concatenate([(other.tokens[:1] + 1) % 256, other.tokens[1:]]))
    world.run([world.batch([changed])])
    control = _differing(whole, _read(world, pages), what.prompt, size)
    result.row(name, compared="control: one token is another", values=control, of=whole.size)
    result.bar("control, one token: values that differ", control, 1, at_least=True, speed=False)


def _read(world: StepWorld, pages: Sequence[int] | np.ndarray) -> np.ndarray:
    """Returns the bits of pages, [pages, L, 2, K, page_size, H]."""
    values = np.asarray(world.pool[np.asarray(pages)])
    return values.view(f"u{values.dtype.itemsize}")


def _differing(first: np.ndarray, second: np.ndarray, num_tokens: int, page_size: int) -> int:
    """Returns how many values differ in the slots of tokens."""
    held = np.arange(first.shape[0] * page_size).reshape(-1, page_size) < num_tokens
    return int(((first != second) & held[:, None, None, None, :, None]).sum())


@functools.partial(jax.jit, donate_argnums=0)
def _poison(pool: jax.Array, pages: jax.Array) -> jax.Array:
    return pool.at[pages].set(jnp.nan)


def _bits(array: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(array, jnp.uint16)


def _rows_that_differ(first: jax.Array, second: jax.Array) -> jax.Array:
    return (_bits(first) != _bits(second)).any(axis=1).sum()
