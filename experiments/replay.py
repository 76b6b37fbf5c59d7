"""`penelope replay`: a trace on the real engine in real time, in a closed loop, under one policy or several."""

import argparse
import contextlib
import dataclasses
import hashlib
import math
import pathlib
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import tqdm

from penelope_jax.config import EngineConfig
from penelope_jax.driver import Driver, Executor
from penelope_jax.errors import InputError, bad_input
from penelope_jax.event_log import EventLogWriter
from penelope_jax.experiments import cache_directory, engine_flags, engine_options, load_cost
from penelope_jax.experiments.closed_loop import Call, ClosedLoop, RealClock, play
from penelope_jax.experiments.command import INTERRUPTED
from penelope_jax.experiments.sessions import Session
from penelope_jax.experiments.text_table import text_table
from penelope_jax.metrics import Recorder, RequestRecord, summarize, write_json, write_records
from penelope_jax.radix_tree import CacheState
from penelope_jax.state import EngineCounters


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """What one replay measured.

    Attributes:
        records: one for each request that ended.
        counters: the engine's totals.
        transfers: what the executor's moves did until the last request ended, and who waited for them; None of an
            executor that does not tell.
        cache: what is left, no pin and no move in it.
        fingerprint: hash of all sampled tokens by session and turn; equal fingerprints are equal outputs.
        wall_s: duration.
        partial: whether it was stopped before the end.
    """

    records: tuple[RequestRecord, ...]
    counters: EngineCounters
    transfers: dict[str, float] | None
    cache: CacheState
    fingerprint: str
    wall_s: float
    partial: bool


class Fingerprint:
    """A hash of outputs that does not depend on the order in which requests ended."""

    def __init__(self):
        self._digests: dict[tuple[str, int], bytes] = {}

    def add(self, session_id: str, turn: int, tokens: np.ndarray) -> None:
        """Notes the reply, i32[output_len], to one turn."""
        self._digests[session_id, turn] = hashlib.sha256(np.ascontiguousarray(tokens, np.int32).tobytes()).digest()

    def hexdigest(self) -> str:
        """Returns the hash of all replies noted so far."""
        total = hashlib.sha256()
        for (session_id, turn), digest in sorted(self._digests.items()):
            total.update(f"{session_id}\0{turn}\0".encode() + digest)
        return total.hexdigest()


class Stoppable(Protocol):
    """A clock whose wait can be ended."""

    def stop(self) -> None: ...


@contextlib.contextmanager
def stop_on_interrupt(clock: Stoppable) -> Iterator[threading.Event]:
    """Yields an event that the first Ctrl-C or SIGTERM sets, ending a wait of `clock`; the second does as always."""
    stopped = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def handle(_signal: int, _frame: object) -> None:
        stopped.set()
        clock.stop()
        restore()

    for number in before:
        signal.signal(number, handle)
    try:
        yield stopped
    finally:
        restore()


def run_replay(
    config: EngineConfig,
    executor: Executor,
    sessions: Sequence[Session],
    num_live: int,
    *,
    label: str = "replay",
    overlap: bool = False,
    log: EventLogWriter | None = None,
    cache: CacheState | None = None,
) -> Replay:
    """Replays sessions in real time; Ctrl-C ends it early, and requests that are open then are aborted.

    Args:
        config: of the engine.
        executor: warmed up, with at least the configuration's pages; it has started over.
        sessions: what to replay.
        num_live: sessions alive at once.
        label: of the progress bar, which shows on a terminal only.
        overlap: whether the host plans a step while the device runs the one before.
        log: where events and plans are written.
        cache: what to begin with; by default nothing.
    """
    clock = RealClock()
    driver = Driver(config, executor, clock=clock, overlap=overlap, log=log, cache=cache)
    recorder = Recorder(config.page_size, config.linear_cost)
    loop = ClosedLoop(sessions, num_live, config.vocab_size)
    fingerprint = Fingerprint()
    num_requests = sum(len(session.turns) for session in sessions)
    with (
        stop_on_interrupt(clock) as stopped,
        tqdm.tqdm(total=num_requests, desc=label, unit="req", disable=not sys.stderr.isatty()) as bar,
    ):

        def finished(call: Call, reply: np.ndarray) -> None:
            if math.isinf(call.cancel_s):
                fingerprint.add(call.session_id, call.turn, reply)
            bar.update()

        complete = play(driver, loop, recorder, clock, on_finish=finished, stop=stopped.is_set)
    wall_s, counters = clock(), driver.state.counters
    stats = getattr(executor, "transfer_stats", None)
    if log is None:  # a log ends where the run was interrupted
        leave(driver)
    driver.drain_moves()
    return Replay(
        records=tuple(recorder.records),
        counters=counters,
        transfers=None if stats is None else dataclasses.asdict(stats),
        cache=driver.state.cache,
        fingerprint=fingerprint.hexdigest(),
        wall_s=wall_s,
        partial=not complete,
    )


def leave(driver: Driver) -> None:
    """Aborts what is open and runs until nothing is: then no pin is out."""
    for request in (*driver.state.waiting, *driver.state.running):
        driver.abort(request.request_id)
    while not driver.idle:
        driver.step()


def summary(
    replay: Replay, sessions: Sequence[Session], config: dict[str, Any], run: dict[str, Any], per_request: str | None
) -> dict[str, Any]:
    """Returns the JSON document of a replay."""
    return summarize(
        replay.records,
        last_turns={session.session_id: session.last_turn for session in sessions},
        evicted_pages=replay.counters.evicted_pages,
        moved_pages=replay.counters.moved_pages,
        swapped_loads=replay.counters.swapped_loads,
        config=config,
        run={
            **run,
            "partial": replay.partial,
            "wall_s": replay.wall_s,
            "fingerprint": replay.fingerprint,
            "steps": replay.counters.steps,
            "phantom_segments": replay.counters.phantom_segments,
            "retractions": replay.counters.retractions,
            **{name: getattr(replay.counters, name) for name in _MOVE_COUNTERS},
            "transfers": replay.transfers,
        },
        per_request=per_request,
    )


_MOVE_COUNTERS = ("demoted_pages", "loaded_pages", "prefetched_pages", "lost_pages")
_COLUMNS = (
    ("policy", "<", lambda d: d["config"]["policy"]),
    ("requests", ">", lambda d: f"{d['requests']:,}"),
    ("TTFT mean s", ">", lambda d: _seconds(d["ttft_s"]["mean"])),
    ("p50 s", ">", lambda d: _seconds(d["ttft_s"]["p50"])),
    ("p90 s", ">", lambda d: _seconds(d["ttft_s"]["p90"])),
    ("JCT mean s", ">", lambda d: _seconds(d["jct_s"]["mean"])),
    ("hit rate", ">", lambda d: "-" if d["hit_rate"] is None else f"{d['hit_rate']:.1%}"),
    ("recomputed tokens", ">", lambda d: f"{d['run']['recomputed_tokens']:,}"),
    ("recomputed units", ">", lambda d: f"{d['recompute_units']:.3e}"),
    ("evicted pages", ">", lambda d: f"{d['evicted_pages']:,}"),
    ("outputs", "<", lambda d: d["run"]["fingerprint"][:10]),
)
_HOST_COLUMNS = (
    ("host hit", ">", lambda d: _share(d["tokens"]["host_hit"], d["tokens"]["prompt"])),
    ("demoted", ">", lambda d: f"{d['run']['demoted_pages']:,}"),
    ("loaded", ">", lambda d: f"{d['run']['loaded_pages']:,}"),
    ("ahead", ">", lambda d: f"{d['run']['prefetched_pages']:,}"),
    ("swapped", ">", lambda d: f"{d['swapped_loads']:,}"),
    ("waited s", ">", lambda d: "-" if d["run"]["transfers"] is None else f"{d['run']['transfers']['wait_s']:.2f}"),
)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _share(number: int, total: int) -> str:
    return f"{number / total:.1%}" if total else "-"


def table(documents: Sequence[dict[str, Any]]) -> str:
    """Returns the comparison of several replays as text, one line each."""
    columns = _COLUMNS
    if any(document["config"]["host_tokens"] for document in documents):
        columns = (*_COLUMNS[:-1], *_HOST_COLUMNS, _COLUMNS[-1])
    rows = [[name for name, _, _ in columns]]
    for document in documents:
        rows.append([text(document) for _, _, text in columns])
        if document["run"]["partial"]:
            rows[-1][0] += " (partial)"
    return text_table(rows, [align for _, align, _ in columns])


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the command."""
    engine_flags.add_trace_flags(parser)
    engine_flags.add_engine_flags(parser)
    parser.add_argument("--policy", default="penelope", metavar="NAME,...", help="one or several, compared in a table")
    parser.add_argument("--deterministic", action="store_true", help="results do not depend on what else runs")
    parser.add_argument(
        "--no-overlap", action="store_true", help="do not plan a step while the device runs the one before"
    )
    parser.add_argument("--json", metavar="FILE", help="write the summary here, and one line a request beside it")
    parser.add_argument("--event-log", metavar="FILE", help="write every event here, a new file, for penelope inspect")
    parser.add_argument(
        "--cache-dir", metavar="DIR", help="begin with the cache that was saved here, and save it again at the end"
    )


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    policies = engine_options.policies(args, args.policy)
    engine_options.check_output("--json", args.json)
    log_files = [_log_file(args.event_log, policy.name, len(policies)) for policy in policies]
    for log_file in log_files:
        engine_options.check_output("--event-log", log_file)
        if log_file is not None and pathlib.Path(log_file).exists():
            raise InputError(f"--event-log {log_file}: exists; a log is never written over.")
    engine_options.check_flags(args)
    cache_directory.check_flags(args, len(policies))
    model = engine_options.load_model(args)
    max_context = engine_options.context_limit(args, model)
    trace = engine_options.load_trace(args, max_context)
    configs = [engine_options.engine_config(args, model, trace.sessions, policy, max_context) for policy in policies]
    if args.cache_dir is not None:
        configs = [cache_directory.named_config(config, model) for config in configs]
    # One executor serves all; where one policy moves whole nodes, it must not bound moves.
    like = next((config for config in configs if config.policy.inclusive), configs[0])
    executor = engine_options.make_executor(model, like, deterministic=args.deterministic)
    if args.cache_dir is not None:
        cache_directory.check(args.cache_dir, like, executor)
    host = f", host {like.host_tokens:,}" if like.host_tokens else ""
    print(
        f"{len(trace.sessions)} sessions, {trace.num_requests} requests; {model.name}; device pool "
        f"{like.device_tokens:,}{host} tokens; {args.sessions} sessions live."
    )
    num_programs = engine_options.warm_up(executor)
    environment = engine_options.environment()
    measured = None
    if like.host_tokens and args.load_units == engine_options.AUTO:
        with bad_input():
            measured = load_cost.measure_load_cost(executor, like)
        print(measured.text())
        configs = [dataclasses.replace(config, load_units=measured.load_units) for config in configs]

    documents = []
    for config, log_file in zip(configs, log_files, strict=True):
        if config.host_tokens:
            executor.start_over()
        cache = None if args.cache_dir is None else cache_directory.restore(args.cache_dir, config, executor)
        compiled = executor.num_compilations
        with contextlib.ExitStack() as stack:
            log = None
            if log_file is not None:
                notes = {"seed": args.seed, "model": model.name, "dtype": model.config.dtype, **environment}
                log = stack.enter_context(EventLogWriter(log_file, config, notes))
            replay = run_replay(
                config,
                executor,
                trace.sessions,
                args.sessions,
                label=config.policy.name,
                overlap=not args.no_overlap,
                log=log,
                cache=cache,
            )
            if log is not None and replay.partial:
                log.close("an interruption")
        settings = engine_options.config_document(
            config,
            model=model.name,
            dtype=model.config.dtype,
            deterministic=args.deterministic,
            overlap=not args.no_overlap,
            mesh=args.mesh,
            sessions=args.sessions,
            trace=[str(path) for path in args.trace],
            **dataclasses.asdict(engine_options.read_options(args, max_context)),
        )
        settings["max_delay_s"] = None if settings["max_delay_s"] == float("inf") else settings["max_delay_s"]
        run_info = {
            "seed": args.seed,
            **environment,
            "trace_sha256": trace.sha256,
            "skipped_entries": len(trace.problems),
            "programs": num_programs,
            "compiled_in_run": executor.num_compilations - compiled,
            "load_cost": None if measured is None else dataclasses.asdict(measured),
        }
        per_request = _records_file(args.json, config.policy.name, len(configs))
        documents.append(summary(replay, trace.sessions, settings, run_info, per_request))
        if per_request is not None:
            write_records(per_request, replay.records)
        if replay.partial:
            print("Interrupted: what was measured so far follows.")
            break
    print(table(documents))
    if not any(document["evicted_pages"] for document in documents):
        print(
            "Nothing was evicted: the pool held every history. A smaller --device-tokens, or more --sessions, compares."
        )
    if len(documents) > 1 and not documents[-1]["run"]["partial"]:
        same = len({document["run"]["fingerprint"] for document in documents}) == 1
        print(f"Outputs are {'identical' if same else 'different'} under these policies.")
    if args.json:
        write_json(args.json, documents[0] if len(configs) == 1 else documents)
    if args.cache_dir is not None:
        cache_directory.save(args.cache_dir, configs[0], replay.cache, executor)
    return INTERRUPTED if documents[-1]["run"]["partial"] else 0


def _log_file(log_file: str | None, policy: str, num_policies: int) -> str | None:
    if log_file is None or num_policies == 1:
        return log_file
    path = pathlib.Path(log_file)
    return str(path.with_name(f"{path.stem}.{policy}{path.suffix}"))


def _records_file(json_file: str | None, policy: str, num_policies: int) -> str | None:
    if json_file is None:
        return None
    path = pathlib.Path(json_file)
    middle = f".{policy}" if num_policies > 1 else ""
    return str(path.with_name(f"{path.name.removesuffix('.json')}{middle}.requests.jsonl"))
