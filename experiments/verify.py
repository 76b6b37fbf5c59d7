"""`penelope verify`: a small cache against one that never evicts, bit by bit.

The same sessions are replayed twice in deterministic mode, on a clock that counts steps, so the order of events is the
same on every machine. The first cache is small: it evicts, and refills holes. The second holds everything. Every
output token, log-probability and prompt log-probability must have the same bits, at recomputed and at reused
positions, and so must the K/V of every page that is resident in the small cache at the end, in either tier.

    penelope verify                                      # a synthetic trace on a tiny random model
    penelope verify --perturb                            # one bit of one refilled page changed: must find a difference
    penelope verify --host-tokens 960 --swap-tokens 64   # with a host tier, both tiers full, copies under way
    penelope verify --host-tokens 784 --swap-tokens 64 --device-tokens 784 --batch 1      # as little as one request needs
    penelope verify --host-tokens 960 --swap-tokens 64 --perturb-host      # one bit of one host page: must be found
    penelope verify TRACE --model DIR --dtype bfloat16

With a host tier it is the device that says when a copy has arrived, so the order of events may vary from run to run;
what is compared must not.
"""

import argparse
import dataclasses
import hashlib
import math
import sys
from collections.abc import Container, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import tqdm

from penelope_jax.config import EngineConfig
from penelope_jax.driver import Driver
from penelope_jax.errors import InputError, bad_input
from penelope_jax.events import Sampled, Scored, Update
from penelope_jax.experiments import engine_flags, engine_options
from penelope_jax.experiments.bit_comparison import Key, Reply, Report, compare, differing_bits
from penelope_jax.experiments.closed_loop import Call, ClosedLoop, StepClock, play
from penelope_jax.experiments.perturbers import HolePerturber, HostPerturber, Perturber
from penelope_jax.experiments.sessions import Session
from penelope_jax.experiments.synthesize import SynthesisOptions, synthesize
from penelope_jax.metrics import Recorder, write_json
from penelope_jax.pages import NO_PAGE, Tier
from penelope_jax.radix_tree import CacheState, Node
from penelope_jax.segments import SamplingParams
from penelope_jax.transfer_faults import TransferFaults

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

    def __init__(
        self,
        config: EngineConfig,
        executor: Any,
        sessions: Sequence[Session],
        num_live: int,
        *,
        share: float,
        cancel: bool,
    ):
        self.replies: dict[Key, Reply] = {}
        self._open: dict[int, Reply] = {}
        self._share = share
        clock = StepClock()
        self.driver = Driver(config, executor, clock=clock)
        recorder = Recorder(config.page_size, config.linear_cost)
        loop = ClosedLoop(sessions, num_live, config.vocab_size)
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
        self.driver.drain_moves()

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


def chosen(session_id: str, turn: int, share: float) -> bool:
    """Whether the prompt of a turn is scored; the same in every run."""
    digest = hashlib.blake2b(f"{session_id}/{turn}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") < share * 2**32


class Found(NamedTuple):
    """A page of the tree: hash of the history up to its end, and where its K/V is."""

    digest: bytes
    tier: Tier
    page_id: int


def resident_histories(cache: CacheState) -> Iterator[Found]:
    """Yields every resident page of the tree; one of which there is a copy on the host, twice."""
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
                    yield Found(digest.digest(), Tier(int(node.tiers[index])), int(node.page_ids[index]))
                if node.copies is not None and node.copies[index] != NO_PAGE:
                    yield Found(digest.digest(), Tier.HOST, int(node.copies[index]))
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
    num_live: int | None = None,
    score_share: float = 0.25,
    perturb: type[Perturber] | None = None,
    faults: TransferFaults | None = None,
    implementation: str | None = None,
) -> Report:
    """Replays `sessions` with the small cache of `config`, then with one that holds everything, and compares.

    Args:
        model: what to run.
        config: of the small cache; the large one has no host tier.
        sessions: what to replay. The large cache waits for requests that the trace cancels, so that it holds all that
            the small one may hold.
        num_live: sessions alive at once; by default `config.max_running`.
        score_share: share of the requests whose whole prompt is scored, which costs a forward pass over it.
        perturb: what changes one bit of a page of the small cache.
        faults: what goes wrong with moves of the small cache.
        implementation: of the attention kernel; None: the default.
    """
    num_pages = max(large_pool_pages(sessions, config), config.num_device_pages + 1)
    options = {"num_pages": num_pages, "deterministic": True, "scoring": True, "implementation": implementation}
    num_live = num_live or config.max_running
    executor = engine_options.make_executor(model, config, faults=faults, **options)
    engine_options.warm_up(executor)
    wrapped = executor if perturb is None else perturb(executor)
    small = _Run(config, wrapped, sessions, num_live, share=score_share, cancel=True)
    pages: dict[bytes, list[np.ndarray]] = {}
    num_pages_in = {Tier.DEVICE: 0, Tier.HOST: 0}
    for found, data in _contents(small.driver.state.cache, executor):
        pages.setdefault(found.digest, []).append(data)
        num_pages_in[found.tier] += 1
    failed_moves = executor.transfer_stats.failed_moves
    del executor

    large_config = dataclasses.replace(config, device_tokens=num_pages * config.page_size, host_tokens=0)
    executor = engine_options.make_executor(model, large_config, **options)
    large = _Run(large_config, executor, sessions, num_live, share=score_share, cancel=False)
    if large.driver.state.counters.evicted_pages:
        raise RuntimeError(f"the large cache of {num_pages} pages evicted; it must not.")
    page_bits, num_matched = 0, 0
    for found, data in _contents(large.driver.state.cache, executor, wanted=pages):
        page_bits += sum(differing_bits(mine, data) for mine in pages[found.digest])
        num_matched += len(pages[found.digest])
    counters = small.driver.state.counters
    return Report(
        **dataclasses.asdict(compare(small.replies, large.replies)),
        evicted_pages=counters.evicted_pages,
        demoted_pages=counters.demoted_pages,
        loaded_pages=counters.loaded_pages,
        prefetched_pages=counters.prefetched_pages,
        swapped_loads=counters.swapped_loads,
        lost_pages=counters.lost_pages,
        failed_moves=failed_moves,
        pages=sum(num_pages_in.values()),
        host_pages=num_pages_in[Tier.HOST],
        page_bytes=sum(data.nbytes for copies in pages.values() for data in copies),
        unmatched_pages=sum(num_pages_in.values()) - num_matched,
        page_bits=page_bits,
        perturbed=wrapped.done or wrapped.nothing if isinstance(wrapped, Perturber) else "",
    )


def _contents(
    cache: CacheState, executor: "JaxExecutor", wanted: Container[bytes] | None = None
) -> Iterator[tuple[Found, np.ndarray]]:
    found = [item for item in resident_histories(cache) if wanted is None or item.digest in wanted]
    for tier, read in ((Tier.DEVICE, executor.read_pages), (Tier.HOST, executor.read_host_pages)):
        here = [item for item in found if item.tier is tier]
        for first in range(0, len(here), _READ_PAGES):
            batch = here[first : first + _READ_PAGES]
            yield from zip(batch, read([item.page_id for item in batch]), strict=True)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the command."""
    engine_flags.add_trace_flags(parser, nargs="*")
    engine_flags.add_engine_flags(parser, model="random:tiny", page_size=16, sessions=6, load_units="0")
    parser.add_argument("--policy", default="penelope", metavar="NAME", help="of the small cache")
    parser.add_argument(
        "--score-share", type=float, default=0.25, metavar="X", help="share of the prompts scored (0.25)"
    )
    parser.add_argument("--batch", type=int, metavar="N", help="requests that run at once; default: --sessions")
    parser.add_argument("--perturb", action="store_true", help="flip one bit of a refilled page: must be found")
    group = parser.add_argument_group("with a host tier")
    group.add_argument("--perturb-host", action="store_true", help="flip one bit of a host page: must be found")
    group.add_argument(
        "--slow-moves", type=int, default=0, metavar="N", help="hold a copy back for up to N polls, by --seed (0)"
    )
    group.add_argument(
        "--fail-moves", type=float, default=0.0, metavar="P", help="share of the copies that fail, by --seed (0)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the report here")


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns 0 when all bits are equal, 1 when some differ."""
    policies = engine_options.policies(args, args.policy)
    if len(policies) != 1:
        raise InputError(f"--policy {args.policy}: verify takes one policy.")
    if not 0 <= args.score_share <= 1:
        raise InputError(f"--score-share {args.score_share} must be in [0, 1].")
    if not args.host_tokens:
        for flag in ("perturb_host", "slow_moves", "fail_moves"):
            if getattr(args, flag):
                raise InputError(f"--{flag.replace('_', '-')} needs a host tier: --host-tokens N.")
    if args.load_units == engine_options.AUTO:
        raise InputError("--load-units auto: a measured time differs from run to run; verify takes a number.")
    if args.perturb and args.perturb_host:
        raise InputError("--perturb and --perturb-host: one at a time.")
    if not 0 <= args.fail_moves <= 1:
        raise InputError(f"--fail-moves {args.fail_moves} must be in [0, 1].")
    if args.batch is not None and args.batch < 1:
        raise InputError(f"--batch {args.batch} must be at least 1.")
    with bad_input():
        faults = TransferFaults(
            seed=args.seed, fail_loads=args.fail_moves, fail_demotions=args.fail_moves, delay_polls=args.slow_moves
        )
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
    config = dataclasses.replace(config, max_running=args.batch or args.sessions)
    host = f" and {config.host_tokens:,} on the host" if config.host_tokens else ""
    print(
        f"{len(sessions)} sessions, {args.sessions} live; {model.name}, {model.config.dtype}; small cache "
        f"{config.device_tokens:,} tokens{host} in pages of {config.page_size}."
    )
    report = verify(
        model,
        config,
        sessions,
        num_live=args.sessions,
        score_share=args.score_share,
        perturb=HolePerturber if args.perturb else HostPerturber if args.perturb_host else None,
        faults=faults,
    )
    print(report.text())
    if args.json:
        settings = engine_options.config_document(config, model=model.name, dtype=model.config.dtype)
        run_info = {"seed": args.seed, **engine_options.environment()}
        write_json(args.json, {"config": settings, "run": run_info, "report": dataclasses.asdict(report)})
    return 0 if report.identical else DIFFERENT
