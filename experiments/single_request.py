"""Figure 1 of the paper on this machine: what a hole costs in front and at the end of one history.

A history is cached whole. 30 % of it is freed, from position 1K on or from its end; 512 tokens are appended, and the
request is timed. Both recompute the same number of tokens; the formula says that the end costs more, by a factor that
grows with the context. c of the formula is calibrated from two prefill times, as on any device: matrix products and
attention are not equally fast per operation. One of the two is short, where c weighs most. The two requests are run
step by step in turns; a time is the sum of the steps' medians over the runs.

    python -m penelope_jax.experiments.single_request --json single_request.json --plot single_request.png
"""

import argparse
import contextlib
import dataclasses
import math
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from penelope_jax.cost import calibrate_linear_cost, units_of
from penelope_jax.errors import InputError, bad_input
from penelope_jax.experiments import command, engine_options
from penelope_jax.experiments.sessions import Piece, draw_tokens
from penelope_jax.metrics import write_json
from penelope_jax.segments import SamplingParams, Segment, SegmentKind, StepPlan

if TYPE_CHECKING:
    from penelope_jax.executor import JaxExecutor
    from penelope_jax.models.registry import LoadedModel

OUT_OF_TOLERANCE = 1  # exit code
Spans = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What is measured: `free` of the history, from `front_start` or from the end; then `append` tokens."""

    context: int
    free: float = 0.3
    front_start: int = 1024
    append: int = 512

    def spans(self, page_size: int) -> dict[str, Spans]:
        """Returns what is computed when the hole is in front, and when it is at the end; the hole is whole pages."""
        hole = round(self.context * self.free / page_size) * page_size
        if hole < page_size or self.front_start + hole >= self.context or self.context % page_size:
            raise ValueError(
                f"context={self.context} must be whole pages of {page_size} tokens, with room for a hole of {hole} "
                f"tokens from {self.front_start}."
            )
        stop = self.context + self.append
        front = ((self.front_start, self.front_start + hole), (self.context, stop))
        return {"front": front, "tail": ((self.context - hole, stop),)}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """One context.

    Attributes:
        setting: what was measured.
        front_s, tail_s: times of the request. ratio: tail / front.
        short, short_s, prefill_s: tokens of a short prefill, and times of it and of the whole history.
        linear_cost: c, calibrated from the two prefill times; None where none explains them.
        formula: the ratio that the formula predicts with this c; formula_model: with the model's own c.
    """

    setting: Setting
    front_s: float
    tail_s: float
    ratio: float
    short: int
    short_s: float
    prefill_s: float
    linear_cost: float | None
    formula: float | None
    formula_model: float

    @property
    def error(self) -> float | None:
        """Relative difference of the measured ratio from the formula."""
        return None if self.formula is None else self.ratio / self.formula - 1


class _Timer:
    """Runs spans of one history, whose page table is 0, 1, 2, ..., and times them."""

    def __init__(self, executor: "JaxExecutor", tokens: np.ndarray):
        self._executor = executor
        self._tokens = tokens  # i32[context + append]
        num_pages = -(-len(tokens) // executor.page_size)
        self._page_table = np.arange(num_pages, dtype=np.int32)
        self._step = 0

    def run(self, *sequences: Spans) -> list[np.ndarray]:
        """Computes each sequence of spans in order, in full steps, and samples after its last.

        Args:
            *sequences: run in turns, a step of each, so that what else the machine does hits them alike.

        Returns:
            Seconds of each step, f64[steps], for each sequence.
        """
        plans = [list(self._plans(spans)) for spans in sequences]
        times: list[list[float]] = [[] for _ in sequences]
        for index in range(max(map(len, plans))):
            for own, seconds in zip(plans, times, strict=True):
                if index < len(own):
                    start_s = time.perf_counter()
                    self._executor.run(own[index])
                    seconds.append(time.perf_counter() - start_s)
        return [np.array(seconds) for seconds in times]

    def _plans(self, spans: Spans) -> Iterator[StepPlan]:
        budget, segments = self._executor.max_step_tokens, []
        left = budget
        for index, (start, stop) in enumerate(spans):
            last = index == len(spans) - 1
            kind = SegmentKind.REAL if last else SegmentKind.PHANTOM
            while start < stop:
                end = min(stop, start + left)
                params = SamplingParams(max_tokens=1) if last and end == stop else None
                segments.append(self._segment(kind, start, end, params))
                left -= end - start
                start = end
                if not left:
                    yield self._plan(segments)
                    left, segments = budget, []
        if segments:
            yield self._plan(segments)

    def _plan(self, segments: list[Segment]) -> StepPlan:
        self._step += 1
        return StepPlan(step=self._step, segments=tuple(segments))

    def _segment(self, kind: SegmentKind, start: int, stop: int, sample: SamplingParams | None) -> Segment:
        return Segment(
            request_id=0,
            kind=kind,
            start=start,
            stop=stop,
            tokens=self._tokens[start:stop],
            page_table=self._page_table,
            write_from=start,
            sample=sample,
        )


def measure(model: "LoadedModel", setting: Setting, executor: "JaxExecutor", num_runs: int) -> Measurement:
    """Measures one context with `num_runs` interleaved runs, after one that is not counted."""
    spans = setting.spans(executor.page_size)
    tokens = draw_tokens([Piece("single request", 0, setting.context + setting.append)], model.config.vocab_size)
    timer = _Timer(executor, tokens)
    short = min(2 * executor.max_step_tokens, setting.context // 2)
    times: dict[str, list[np.ndarray]] = {"short": [], "prefill": [], "front": [], "tail": []}
    timer.run(((0, short),))
    for _ in range(num_runs):
        for _ in range(3):
            times["short"] += timer.run(((0, short),))
        times["prefill"] += timer.run(((0, setting.context),))
        front, tail = timer.run(spans["front"], spans["tail"])
        times["front"].append(front)
        times["tail"].append(tail)
    median = {name: float(np.median(runs, axis=0).sum()) for name, runs in times.items()}
    linear_cost = None
    with contextlib.suppress(ValueError):  # times that no c explains; the ratio was measured all the same
        linear_cost = calibrate_linear_cost(short, median["short"], setting.context, median["prefill"])

    def ratio(c: float) -> float:
        return units_of(spans["tail"], c) / units_of(spans["front"], c)

    return Measurement(
        setting=setting,
        front_s=median["front"],
        tail_s=median["tail"],
        ratio=median["tail"] / median["front"],
        short=short,
        short_s=median["short"],
        prefill_s=median["prefill"],
        linear_cost=linear_cost,
        formula=None if linear_cost is None else ratio(linear_cost),
        formula_model=ratio(model.config.linear_cost),
    )


def table(measurements: list[Measurement]) -> str:
    """Returns the measurements as text."""
    lines = ["context  prefill s  front s   tail s  tail/front  formula  error  c calibrated  formula, c of the model"]
    lines += [
        f"{m.setting.context:>7,}  {m.prefill_s:>9.2f}  {m.front_s:>7.3f}  {m.tail_s:>7.3f}  {m.ratio:>10.2f}  "
        f"{_text(m.formula, '.2f'):>7}  {_text(m.error, '+.0%'):>5}  {_text(m.linear_cost, '.0f'):>12}  {m.formula_model:>23.2f}"
        for m in measurements
    ]
    return "\n".join(lines)


def _text(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def plot(measurements: list[Measurement], path: str, title: str) -> None:
    """Draws times and ratios over the context. Needs matplotlib."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    contexts = [m.setting.context / 1024 for m in measurements]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    left.plot(contexts, [m.tail_s for m in measurements], "o-", label="freed at the end")
    left.plot(contexts, [m.front_s for m in measurements], "o-", label="freed in front")
    left.set(xlabel="context, K tokens", ylabel="next request, s", ylim=(0, None), title=title)
    right.plot(contexts, [m.ratio for m in measurements], "o-", label="measured")
    right.plot(contexts, [m.formula or math.nan for m in measurements], "s--", label="formula, c calibrated")
    right.set(xlabel="context, K tokens", ylabel="end / front", ylim=(0, None))
    for axes in (left, right):
        axes.legend(frameon=False)
        axes.set_xticks(contexts)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the command."""
    parser.add_argument("--model", default="random:b", metavar="M", help="as for penelope replay (random:b)")
    parser.add_argument("--dtype", metavar="float32|bfloat16")
    parser.add_argument("--contexts", default="16384,32768", metavar="N,...", help="history lengths")
    parser.add_argument("--free", type=float, default=0.3, metavar="X", help="share of the history that is freed (0.3)")
    parser.add_argument("--front-start", type=int, default=1024, metavar="N", help="where the front hole starts (1024)")
    parser.add_argument("--append", type=int, default=512, metavar="N", help="new tokens (512)")
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="interleaved runs (3)")
    parser.add_argument("--page-size", type=int, default=64, metavar="N")
    parser.add_argument("--step-tokens", type=int, default=1024, metavar="N", help="token budget of a step (1024)")
    parser.add_argument("--tolerance", type=float, default=0.15, metavar="X", help="largest error of the ratio (0.15)")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE", help="a .png, .svg or .pdf; needs matplotlib")


def run(args: argparse.Namespace) -> int:
    """Runs the experiment; returns 1 when a ratio is off the formula by more than the tolerance, or no c fits."""
    engine_options.check_output("--json", args.json)
    engine_options.check_plot("--plot", args.plot)
    if not 0 < args.free < 1:
        raise InputError(f"--free {args.free} must be above 0 and below 1.")
    for name, least in (("runs", 1), ("step_tokens", 1), ("append", 1), ("front_start", 0)):
        if getattr(args, name) < least:
            raise InputError(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least {least}.")
    contexts = engine_options.numbers("--contexts", args.contexts)
    with bad_input():
        settings = [
            Setting(context=context, free=args.free, front_start=args.front_start, append=args.append)
            for context in contexts
        ]
        for setting in settings:
            setting.spans(args.page_size)
    from penelope_jax.executor import JaxExecutor
    from penelope_jax.models import registry

    with bad_input():
        model = registry.load_model(args.model, dtype=args.dtype)
        longest = engine_options.whole_pages(max(s.context + s.append for s in settings), args.page_size)
        executor = JaxExecutor(
            model.config,
            model.params,
            num_pages=longest // args.page_size,
            page_size=args.page_size,
            max_context=longest,
            max_segments=4,
            max_step_tokens=args.step_tokens,
            token_buckets=(args.step_tokens,),
        )
    engine_options.warm_up(executor)
    measurements = []
    for setting in settings:
        print(f"context {setting.context:,} of {model.name} ...", file=sys.stderr)
        measurements.append(measure(model, setting, executor, args.runs))
    print(table(measurements))
    if args.json:
        write_json(args.json, _document(args, model, measurements))
    if args.plot:
        plot(measurements, args.plot, f"{model.name}, {engine_options.environment()['device']}")
    for m in measurements:
        if m.error is None:
            print(
                f"Context {m.setting.context:,}: no c of the formula explains {m.short_s:.3f} s for {m.short:,} tokens and "
                f"{m.prefill_s:.3f} s for {m.setting.context:,}; times vary too much for so short a history: more --runs, or longer."
            )
            return OUT_OF_TOLERANCE
    worst = max(abs(m.error or 0.0) for m in measurements)
    print(f"Largest error of the formula {worst:.0%}, tolerance {args.tolerance:.0%}.")
    return 0 if worst <= args.tolerance else OUT_OF_TOLERANCE


def _document(args: argparse.Namespace, model: "LoadedModel", measurements: list[Measurement]) -> dict[str, Any]:
    flags = ("free", "front_start", "append", "runs", "page_size", "step_tokens")
    config = {"model": model.name, "dtype": model.config.dtype} | {name: getattr(args, name) for name in flags}
    rows = [dataclasses.asdict(m) | {"error": m.error} for m in measurements]
    return {"config": config, "run": {"seed": 0, **engine_options.environment()}, "measurements": rows}


if __name__ == "__main__":
    command.start_module("single_request", "Time a hole in front against one at the end.", add_flags, run)
