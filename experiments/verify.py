"""`penelope verify`: a small cache against one that never evicts, bit by bit.

The same sessions are replayed twice in deterministic mode, on a clock that counts steps, so the order of events is the
same on every machine. The first cache is small: it evicts, and refills holes. The second holds everything. Every
output token, log-probability and prompt log-probability must have the same bits, at recomputed and at reused
positions, and so must the K/V of every page that is resident in the small cache at the end.

    penelope verify                                      # a synthetic trace on a tiny random model
    penelope verify --perturb                            # one bit of one refilled page changed: must find a difference
    penelope verify TRACE --model DIR --dtype bfloat16
"""

import argparse
import dataclasses
import hashlib
import math
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tqdm

from penelope_jax.config import EngineConfig
from penelope_jax.driver import Driver
from penelope_jax.errors import InputError
from penelope_jax.events import Sampled, Scored, Update
from penelope_jax.experiments import engine_flags, engine_options
from penelope_jax.experiments.bit_comparison import Key, Reply, Report, compare, differing_bits
from penelope_jax.experiments.closed_loop import Call, ClosedLoop, StepClock, play
from penelope_jax.experiments.sessions import Session
from penelope_jax.experiments.synthesize import SynthesisOptions, synthesize
from penelope_jax.metrics import Recorder, write_json
from penelope_jax.pages import NO_PAGE
from penelope_jax.radix_tree import CacheState, Node
from penelope_jax.segments import SamplingParams, SegmentKind, StepDone, StepPlan

if TYPE_CHECKING:
    from penelope_jax.executor import JaxExecutor
    from penelope_jax.models.registry import LoadedModel

DIFFERENT = 1  # exit code
# Without a trace: sessions with side requests that are cancelled while they refill a hole, which is how one history
# comes to have several. Small steps make a refill take more than one.
BUILT_IN = SynthesisOptions(
    sessions=10, turns=40, context=768, scale=64, shared_prefix=3200, side_rate=0.7, side_cancel_s=2.0
)
BUILT_IN_DEVICE_TOKENS = 960
BUILT_IN_STEP_TOKENS = 32
_READ_PAGES = 256  # pages read from the device at once


class _Run:
    """One replay, with everything it produced. Requests that may be cancelled are run, but not compared."""

    def __init__(self, config: EngineConfig, executor: Any, sessions: Sequence[Session], *, share: float, cancel: bool):
        self.replies: dict[Key, Reply] = {}
        self._open: dict[int, Reply] = {}
        self._share = share
        clock = StepClock()
        self.driver = Driver(config, executor, clock=clock)
        recorder = Recorder(config.page_size, config.linear_cost)
        loop = ClosedLoop(sessions, config.max_running, config.vocab_size)
        total = sum(len(session.turns) for session in sessions)
        with tqdm.tqdm(
            total=total, desc=f"cache of {config.device_tokens:,} tokens", unit="req", disable=not sys.stderr.isatty()
        ) as bar:
            play(
                self.driver,
                loop,
                recorder,
                clock,
                sampling=self._sampling,
                on_submit=self._submitted,
                on_update=self._update,
                on_finish=lambda _call, _reply: bar.update(),
                cancel=cancel,
            )

    def _sampling(self, call: Call) -> SamplingParams:
        scored = chosen(call.session_id, call.turn, self._share)
        return SamplingParams(max_tokens=call.output_len, prompt_logprobs_from=0 if scored else None)

    def _submitted(self, request_id: int, call: Call) -> None:
        if math.isfinite(call.cancel_s):
            return
        reply = self.replies[call.session_id, call.turn] = self._open[request_id] = Reply()
        if chosen(call.session_id, call.turn, self._share):
            reply.scores = np.full(len(call.tokens), np.nan, np.float32)
            reply.reused = np.zeros(len(call.tokens), bool)

    def _update(self, update: Update) -> None:
        reply = self._open.get(update.request_id)
        if reply is None:
            return
        if isinstance(update, Sampled):
            reply.tokens.append(update.token)
            reply.logprobs.append(update.logprob)
        elif isinstance(update, Scored) and reply.scores is not None and reply.reused is not None:
            rows = slice(update.start + 1, update.start + 1 + len(update.logprobs))
            reply.scores[rows] = update.logprobs
            reply.reused[rows] = update.reused
        elif (metrics := getattr(update, "metrics", None)) is not None:
            reply.metrics = metrics


class Perturber:
    """An executor that flips one bit of the first refilled page that a running request will read again."""

    def __init__(self, executor: "JaxExecutor"):
        self._executor = executor
        self.done = ""

    def dispatch(self, plan: StepPlan) -> Any:
        """Starts a step, then flips the bit once."""
        pending = self._executor.dispatch(plan)
        size = self._executor.page_size
        ends = {segment.request_id: segment for segment in plan.segments}
        for segment in plan.segments:
            sample = ends[segment.request_id].sample
            reads_on = sample is None or (sample.max_tokens or 2) > 1
            if segment.kind is SegmentKind.PHANTOM and reads_on and not self.done:
                page = segment.start // size
                self._executor.flip_bit(int(segment.page_table[page]))
                self.done = f"one bit of a key at position {page * size} of request {segment.request_id}, after step {plan.step}"
        return pending

    def collect(self, pending: Any, time_s: float = 0.0) -> StepDone:
        """Waits for a step."""
        return self._executor.collect(pending, time_s)


def chosen(session_id: str, turn: int, share: float) -> bool:
    """Whether the prompt of a turn is scored; the same in every run."""
    digest = hashlib.blake2b(f"{session_id}/{turn}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") < share * 2**32


def resident_histories(cache: CacheState) -> Iterator[tuple[bytes, int]]:
    """Yields (hash of the history up to the page's end, device page id) for every resident page of the tree."""
    for namespace, root in cache.roots.items():
        start = hashlib.blake2b(namespace.encode(), digest_size=16)
        stack: list[tuple[Node, Any]] = [(cache.nodes[root], start)]
        while stack:
            node, before = stack.pop()
            digest = before.copy()
            stride = len(node.tokens) // node.num_pages if node.num_pages else 0
            for index in range(node.num_pages):
                digest.update(node.tokens[index * stride : (index + 1) * stride])
                if node.page_ids[index] != NO_PAGE:
                    yield digest.digest(), int(node.page_ids[index])
            stack.extend((cache.nodes[child], digest) for child in node.children.values())


def large_pool_pages(sessions: Sequence[Session], config: EngineConfig) -> int:
    """Returns enough pages to hold every history of `sessions` and what running requests may need on top."""
    size = config.page_size
    total = sum(-(-turn.history_len // size) - turn.keep // size for session in sessions for turn in session.turns)
    return total + config.max_running * (2 + -(-config.output_reserve // size))


def verify(
    model: "LoadedModel",
    config: EngineConfig,
    sessions: Sequence[Session],
    *,
    score_share: float = 0.25,
    perturb: bool = False,
    implementation: str | None = None,
) -> Report:
    """Replays `sessions` with the small cache of `config`, then with one that holds everything, and compares.

    Args:
        model: what to run.
        config: of the small cache.
        sessions: what to replay; `config.max_running` of them are live at once. The large cache waits for requests
            that the trace cancels, so that it holds all that the small one may hold.
        score_share: share of the requests whose whole prompt is scored, which costs a forward pass over it.
        perturb: change one bit of a refilled page in the small cache.
        implementation: of the attention kernel; None: the default.
    """
    num_pages = max(large_pool_pages(sessions, config), config.num_device_pages + 1)
    options = {"num_pages": num_pages, "deterministic": True, "scoring": True, "implementation": implementation}
    executor = engine_options.make_executor(model, config, **options)
    engine_options.warm_up(executor)
    wrapped = Perturber(executor) if perturb else executor
    small = _Run(config, wrapped, sessions, share=score_share, cancel=True)
    cache = small.driver.state.cache
    pages = dict(_contents(cache, executor))
    del executor

    executor = engine_options.make_executor(model, config, **options)
    large_config = dataclasses.replace(config, device_tokens=num_pages * config.page_size)
    large = _Run(large_config, executor, sessions, share=score_share, cancel=False)
    if large.driver.state.counters.evicted_pages:
        raise RuntimeError(f"the large cache of {num_pages} pages evicted; it must not.")
    page_bits, num_matched = 0, 0
    for digest, data in _contents(large.driver.state.cache, executor, wanted=pages):
        page_bits += differing_bits(pages[digest], data)
        num_matched += 1
    return Report(
        **dataclasses.asdict(compare(small.replies, large.replies)),
        evicted_pages=small.driver.state.counters.evicted_pages,
        pages=len(pages),
        page_bytes=sum(data.nbytes for data in pages.values()),
        unmatched_pages=len(pages) - num_matched,
        page_bits=page_bits,
        perturbed=wrapped.done or "nothing: no hole was refilled" if isinstance(wrapped, Perturber) else "",
    )


def _contents(
    cache: CacheState, executor: "JaxExecutor", wanted: dict[bytes, np.ndarray] | None = None
) -> Iterator[tuple[bytes, np.ndarray]]:
    found = [item for item in resident_histories(cache) if wanted is None or item[0] in wanted]
    for first in range(0, len(found), _READ_PAGES):
        batch = found[first : first + _READ_PAGES]
        data = executor.read_pages(np.array([page_id for _, page_id in batch], np.int32))
        yield from ((digest, data[index]) for index, (digest, _) in enumerate(batch))


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the command."""
    engine_flags.add_trace_flags(parser, nargs="*")
    engine_flags.add_engine_flags(parser, model="random:tiny", page_size=16, sessions=6)
    parser.add_argument("--policy", default="penelope", metavar="NAME", help="of the small cache")
    parser.add_argument(
        "--score-share", type=float, default=0.25, metavar="X", help="share of the prompts scored (0.25)"
    )
    parser.add_argument("--perturb", action="store_true", help="flip one bit of a refilled page: must be found")
    parser.add_argument("--json", metavar="FILE", help="write the report here")


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns 0 when all bits are equal, 1 when some differ."""
    policies = engine_options.policies(args, args.policy)
    if len(policies) != 1:
        raise InputError(f"--policy {args.policy}: verify takes one policy.")
    if not 0 <= args.score_share <= 1:
        raise InputError(f"--score-share {args.score_share} must be in [0, 1].")
    engine_options.check_output("--json", args.json)
    model = engine_options.load_model(args)
    max_context = engine_options.context_limit(args, model)
    if args.trace:
        sessions = engine_options.load_trace(args, max_context).sessions
    else:
        sessions = synthesize(dataclasses.replace(BUILT_IN, context=min(BUILT_IN.context, max_context)))
        args.device_tokens = args.device_tokens or engine_options.whole_pages(BUILT_IN_DEVICE_TOKENS, args.page_size)
        args.max_step_tokens = args.max_step_tokens or engine_options.whole_pages(BUILT_IN_STEP_TOKENS, args.page_size)
    config = engine_options.engine_config(args, model, sessions, policies[0], max_context)
    print(
        f"{len(sessions)} sessions, {args.sessions} live; {model.name}, {model.config.dtype}; small cache "
        f"{config.device_tokens:,} tokens in pages of {config.page_size}."
    )
    report = verify(model, config, sessions, score_share=args.score_share, perturb=args.perturb)
    print(report.text())
    if args.json:
        settings = engine_options.config_document(config, model=model.name, dtype=model.config.dtype)
        run_info = {"seed": args.seed, **engine_options.environment()}
        write_json(args.json, {"config": settings, "run": run_info, "report": dataclasses.asdict(report)})
    return 0 if report.identical else DIFFERENT
