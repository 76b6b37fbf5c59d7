"""Parts `figure1`, `batching` and `step` of `device_check.py`: times of whole steps of Qwen3-8B with random weights.

Figure 1 of the paper: of a cached history about 30 % is freed, from position 2K on or from its end, 512 tokens are
appended, and the request is timed. A few layers are enough, as all are alike; the head is left out. The hole is chosen
so that the tokens fill their steps, and no padding is computed. Batching: a hole and the new tokens behind it in one
step against a step of the same two lengths from two histories that have nothing to do with each other. Step: all
layers, the head too.
"""

import dataclasses
from collections.abc import Iterator

from penelope_jax.cost import calibrate_linear_cost, units, units_of
from penelope_jax.experiments.device_host import Host, Program
from penelope_jax.experiments.device_model import QWEN3_8B, TINY, StepSizes, StepWorld, few_layers, step_program
from penelope_jax.experiments.device_report import Result

FORMULA_BAR = 0.04
BATCHING_BAR = 0.01
K = 1024
_NUM_LAYERS = 4  # of 36


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the parts time.

    Attributes:
        layers: the steps of `figure1` and `batching`; the pool holds two histories.
        contexts: of `figure1`, with the tokens of the hole.
        front_start: where the hole in front starts.
        append: new tokens.
        prefills: lengths of two prompts that calibrate c.
        batching: contexts of `batching`.
        hole: tokens of its hole.
    """

    layers: StepSizes
    contexts: tuple[tuple[int, int], ...]
    front_start: int
    append: int
    prefills: tuple[int, int]
    batching: tuple[int, ...]
    hole: int


REAL = Sizes(
    layers=StepSizes(
        name=f"{_NUM_LAYERS} layers",
        config=few_layers(_NUM_LAYERS),
        num_pages=2 * 129 * 16,
        page_size=64,
        max_context=129 * K,
        max_segments=4,
        rows=(1024, 4096),
    ),
    # 31, 28, 30, 30 and 30 %; with the 512 new tokens whole steps of 1,024 and 4,096 rows.
    contexts=((8 * K, 2560), (16 * K, 4608), (32 * K, 9728), (64 * K, 19_968), (128 * K, 39_424)),
    front_start=2 * K,
    append=512,
    prefills=(8 * K, 64 * K),
    batching=(32 * K, 64 * K, 128 * K),
    hole=3584,
)
DRY = Sizes(
    layers=StepSizes(
        name="tiny", config=TINY, num_pages=2 * 17 + 2, page_size=16, max_context=272, max_segments=4, rows=(64,)
    ),
    contexts=((256, 48),),
    front_start=32,
    append=16,
    prefills=(64, 256),
    batching=(256,),
    hole=48,
)


def sizes_of(host: Host) -> Sizes:
    """Returns what `figure1` and `batching` time here."""
    return DRY if host.dry else REAL


def layer_programs(host: Host) -> Iterator[Program]:
    """Yields what `figure1` compiles."""
    sizes = sizes_of(host).layers
    for rows in sizes.rows:
        yield step_program(host, sizes, rows)


def batching_programs(host: Host) -> Iterator[Program]:
    """Yields what `batching` compiles."""
    sizes = _one_step(host)
    yield step_program(host, sizes, sizes.rows[-1])


def _one_step(host: Host) -> StepSizes:
    sizes = sizes_of(host).layers
    return dataclasses.replace(sizes, rows=sizes.rows[-1:])


def run_figure1(host: Host, result: Result) -> None:
    """Times a hole in front against one at the end."""
    sizes = sizes_of(host)
    config = sizes.layers.config
    result.figures["layers"] = f"{config.num_layers} (of {QWEN3_8B.num_layers}), no head" if not host.dry else "tiny"
    world = StepWorld(host, sizes.layers)
    short, long = sizes.prefills
    with result.case("c of this device"):
        calls = {str(stop): world.batches(0, [(0, stop)]) for stop in sizes.prefills}
        times = host.time({name: _runner(world, steps) for name, steps in calls.items()}, num_runs=3)
        seconds = [times[str(stop)].seconds for stop in sizes.prefills]
        result.figures |= {f"prefill {stop}, s": second for stop, second in zip(sizes.prefills, seconds, strict=True)}
        result.figures["c calibrated"] = _calibrated(short, seconds[0], long, seconds[1])
    for context, hole in sizes.contexts:
        name = str(context)
        if not host.wants(name):
            continue
        if host.out_of_time():
            result.skipped.append(name)
            continue
        with result.case(name):
            end = context + sizes.append
            spans = {
                "front": ((sizes.front_start, sizes.front_start + hole), (context, end)),
                "tail": ((context - hole, end),),
            }
            calls = {where: _runner(world, world.batches(0, parts)) for where, parts in spans.items()}
            times = host.time(calls)
            measured = times["tail"].seconds / times["front"].seconds

            def ratio(c: float, spans=spans) -> float:
                return units_of(spans["tail"], c) / units_of(spans["front"], c)

            calibrated = result.figures.get("c calibrated")
            result.row(
                name,
                **{"front ms": 1e3 * times["front"].seconds, "tail ms": 1e3 * times["tail"].seconds},
                **{"tail/front": measured, "formula": ratio(config.linear_cost)},
                **{"formula, c calibrated": None if calibrated is None else ratio(calibrated)},
                hole=hole,
                spread=max(timing.spread for timing in times.values()),
            )
            off = abs(measured / ratio(config.linear_cost) - 1)
            result.bar(f"{name}, tail/front off the formula", off, FORMULA_BAR, at_least=False)


def run_batching(host: Host, result: Result) -> None:
    """Times a hole and new tokens of one history against the same of two."""
    sizes = sizes_of(host)
    world = StepWorld(host, _one_step(host))
    for context in sizes.batching:
        name = str(context)
        if not host.wants(name):
            continue
        if host.out_of_time():
            result.skipped.append(name)
            continue
        with result.case(name):
            hole = (sizes.front_start, sizes.front_start + sizes.hole)
            new = (context, context + sizes.append)
            calls = {}
            for kind, history in (("one", 0), ("two", 1)):
                step = world.batch([world.segment(0, *hole), world.segment(history, *new, sample=True)])
                calls[kind] = _runner(world, [step])
            times = host.time(calls, num_runs=9, least_s=0.15)
            cost = times["one"].seconds / times["two"].seconds - 1
            result.row(
                name,
                **{"hole and new ms": 1e3 * times["one"].seconds, "two requests ms": 1e3 * times["two"].seconds},
                cost=cost,
                spread=max(timing.spread for timing in times.values()),
            )
            result.bar(f"{name}, cost of batching", cost, BATCHING_BAR, at_least=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WholeStep:
    """What `step` times: prompts of two lengths, and `decodes` decodes at position `context` - 1."""

    sizes: StepSizes
    prefills: tuple[int, int]
    decodes: int
    context: int


def whole_step(host: Host) -> WholeStep:
    """Returns the sizes that fit the device's memory: as many histories as that, 16 at most."""
    if host.dry:
        return WholeStep(sizes=DRY.layers, prefills=(64, 128), decodes=2, context=DRY.layers.max_context)
    context, decodes, page_size = 32 * K, 64, 64
    page_bytes = QWEN3_8B.num_layers * 2 * QWEN3_8B.num_kv_heads * page_size * QWEN3_8B.head_dim * 2
    weights = 17 * 10**9
    free = host.usable_bytes - weights - 8 * 10**9  # what a step needs besides
    histories = min(16, (free // page_bytes - decodes) * page_size // context)
    if histories < 1:
        raise ValueError(f"{host.usable_bytes} bytes of device memory; Qwen3-8B with one history needs more.")
    sizes = StepSizes(
        name="Qwen3-8B",
        config=QWEN3_8B,
        num_pages=histories * context // page_size + decodes,
        page_size=page_size,
        max_context=context,
        max_segments=decodes,
        rows=(decodes, 8192),
    )
    return WholeStep(sizes=sizes, prefills=(8192, context), decodes=decodes, context=context)


def step_programs(host: Host) -> Iterator[Program]:
    """Yields what `step` compiles."""
    sizes = whole_step(host).sizes
    for rows in sizes.rows:
        yield step_program(host, sizes, rows)


def run_step(host: Host, result: Result) -> None:
    """Times whole steps."""
    whole = whole_step(host)
    sizes, config = whole.sizes, whole.sizes.config
    with result.case("compile, weights, pool"):
        world = StepWorld(host, sizes)
    if result.errors:
        return
    with result.case("prefill"):
        calls = {stop: world.batches(0, [(0, stop)]) for stop in whole.prefills}
        times = host.time({str(stop): _runner(world, steps) for stop, steps in calls.items()})
        for stop in whole.prefills:
            seconds = times[str(stop)].seconds
            flops = 4 * config.num_heads * config.head_dim * config.num_layers * units(0, stop, config.linear_cost)
            columns = {"tokens/s": stop / seconds, "TFLOP/s": flops / seconds / 1e12}
            result.row(
                f"prefill {stop} from 0",
                **{"ms": 1e3 * seconds, **columns, "of matmul": flops / seconds / host.ceiling("matmul")},
                spread=times[str(stop)].spread,
            )
        (short, long), (quick, slow) = whole.prefills, (times[str(stop)].seconds for stop in whole.prefills)
        result.figures["c of the model"] = config.linear_cost
        result.figures["c calibrated"] = _calibrated(short, quick, long, slow)
    with result.case("decode"):
        # Rows of one history stand far apart, so that the cache does not help; each writes a page of its own.
        segments = []
        for row in range(whole.decodes):
            history = row % len(world.histories)
            pages = world.histories[history].copy()
            pages[-1] = world.spare_pages[row]
            segments.append(world.segment(history, whole.context - 1, whole.context, sample=True, pages=pages))
        timing = host.time({"": _runner(world, [world.batch(segments)])})[""]
        read = whole.decodes * whole.context * config.num_layers * 2 * config.num_kv_heads * config.head_dim * 2
        result.figures["histories that the decodes share"] = len(world.histories)
        result.row(
            f"decode {whole.decodes} x {whole.context}",
            **{"ms": 1e3 * timing.seconds, "tokens/s": whole.decodes / timing.seconds},
            **{"GB/s of K and V": read / timing.seconds / 1e9},
            **{"of copy": read / timing.seconds / host.ceiling("copy")},
            spread=timing.spread,
        )


def _calibrated(short: int, quick: float, long: int, slow: float) -> float | None:
    try:
        return calibrate_linear_cost(short, quick, long, slow)
    except ValueError:  # no c explains the times
        return None


def _runner(world: StepWorld, steps):
    return lambda: world.run(steps)
