"""Device and host memory as one cache against two caches: tables over samples, a sweep of the host's size, a timeline.

    python -m penelope_jax.experiments.two_tier TRACE... --model qwen3-8b --shared-prefix 15600 \
        --sample 24 --samples 5 --jobs 2 --json FILE

Everything is simulated (`simulate.py` says how, and takes the same flags). Parts:

    tables    --live sessions at once, the policies compared, means over the samples, and what moved
    sweep     the host tier as --sweep times the device tier, under --sweep-schedulers and --sweep-live sessions
    timeline  one sample under the last policy: pages demoted, loaded and swapped over time, as text, and as a picture
              with --plot FILE (needs matplotlib, the extra `report`)

Paper, part three: two tiers against SGLang whose scheduler counts host hits, TTFT -46 % to -76 %; FCFS, 8 sessions, host
equal to device -10 %, four times the device no difference; 602 of 763 loads through the swap buffer at batch 1.
"""

import argparse
import concurrent.futures
import contextlib
import copy
import dataclasses
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import tqdm

from penelope_jax.config import SCHEDULERS
from penelope_jax.errors import InputError, bad_input
from penelope_jax.experiments import engine_options, move_timeline, simulate, simulation_tables
from penelope_jax.experiments.command import signals_wait, start_module
from penelope_jax.experiments.simulation import Simulation
from penelope_jax.experiments.text_table import text_table
from penelope_jax.experiments.traces import Trace
from penelope_jax.metrics import write_json
from penelope_jax.moves import MoveKind

PARTS = ("tables", "sweep", "timeline")
POLICIES = "sglang,sglang-reclaim,sglang-device-lpm,penelope"

Keep = Callable[[list[dict[str, Any]]], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """One simulation: what differs from the flags."""

    seed: int
    policy: str
    num_live: int
    scheduler: str
    host_tokens: int

    @property
    def text(self) -> str:
        return f"{self.policy}, {self.scheduler}, {self.num_live} live, host {self.host_tokens:,} tokens, seed {self.seed}."


def simulated(args: argparse.Namespace, trace: Trace, task: Task) -> tuple[dict[str, Any], Simulation]:
    """Runs a task; returns its document, in which `run` also has what moved, and the simulation.

    Part of a simulation tells nothing here, so signals are left alone: in a process of its own SIGTERM ends it.
    """
    args = copy.copy(args)
    args.seed, args.policy, args.sessions = task.seed, task.policy, task.num_live
    args.scheduler, args.host_tokens = task.scheduler, task.host_tokens
    setting = simulate.make_setting(args)
    with bad_input():
        sessions = trace.sessions
        if args.sample is not None:
            sessions = simulate.sample_sessions(trace.sessions, args.sample, task.seed)
    (policy,) = engine_options.policies(args, task.policy)
    config = setting.engine_config(sessions, policy)
    document, simulation = simulate.simulated(
        setting, trace, sessions, config, task.num_live, seed=task.seed, label=task.policy, interruptible=False
    )
    counters = simulation.counters
    link_s = {kind: sum(m.end_s - m.start_s for m in simulation.moves if m.kind is kind) for kind in MoveKind}
    document["run"] |= {
        "demoted_pages": counters.demoted_pages,
        "loaded_pages": counters.loaded_pages,
        "prefetched_pages": counters.prefetched_pages,
        "loads": sum(move.kind is MoveKind.LOAD for move in simulation.moves),
        "swapped_moves": sum(move.num_swapped > 0 for move in simulation.moves),
        "demoting_s": link_s[MoveKind.DEMOTE],
        "loading_s": link_s[MoveKind.LOAD],
    }
    return document, simulation


def _document(args: argparse.Namespace, trace: Trace, task: Task) -> dict[str, Any]:
    return simulated(args, trace, task)[0]


def run_tasks(args: argparse.Namespace, trace: Trace, tasks: Sequence[Task], keep: Keep) -> list[dict[str, Any]]:
    """Runs tasks, `--jobs` at a time, with a progress bar, or a line for each in a log; returns their documents in order.

    After each one `keep` is called with all that have ended.
    """
    documents: dict[int, dict[str, Any]] = {}
    with (
        contextlib.closing(_ended(args, trace, tasks)) as ended,
        tqdm.tqdm(total=len(tasks), desc="simulations", unit="run", disable=not sys.stderr.isatty()) as bar,
    ):
        for index, document in ended:
            with signals_wait():  # what counts as ended is kept and told, in a whole line
                documents[index] = document
                keep([documents[number] for number in sorted(documents)])
                bar.update()
                if bar.disable:
                    print(f"{len(documents)} of {len(tasks)} simulations: {tasks[index].text}", file=sys.stderr)
    return [documents[number] for number in range(len(tasks))]


def _ended(
    args: argparse.Namespace, trace: Trace, tasks: Sequence[Task]
) -> Generator[tuple[int, dict[str, Any]], None, None]:
    """Yields (number of the task, its document) as they end."""
    if args.jobs == 1:
        for number, task in enumerate(tasks):
            yield number, _document(args, trace, task)
        return
    pool = None
    try:
        with signals_wait():
            context = multiprocessing.get_context("spawn")
            pool = concurrent.futures.ProcessPoolExecutor(args.jobs, context, _begin_work)
            with _workers_without_ctrl_c():
                futures = {pool.submit(_document, args, trace, task): number for number, task in enumerate(tasks)}
        for future in concurrent.futures.as_completed(futures):
            yield futures[future], future.result()
        pool.shutdown()
    except BaseException:
        try:
            _end_workers()
        finally:  # again, since another Ctrl-C can come before the first try makes it wait
            _end_workers()
        if pool is not None:
            pool.shutdown(cancel_futures=True)
        raise


@contextlib.contextmanager
def _workers_without_ctrl_c() -> Iterator[None]:
    """Processes that start inside do not get the terminal's Ctrl-C, not even while they start: it is the parent's.

    The pool starts its workers as tasks are submitted. They inherit which signals are blocked; the process that
    multiprocessing starts with the pool's first lock would unblock them here, so the pool is made before.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_workers() -> None:
    """Left alone, a worker goes on with its simulation, and then takes the tasks that are queued already."""
    with signals_wait():
        workers = multiprocessing.active_children()
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.join()


def _begin_work() -> None:
    """Makes a worker end when its parent does, however that ends, and leave nothing behind when it is ended itself."""
    tqdm.tqdm.set_lock(threading.RLock())  # the default is a semaphore of the system

    def watch() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def tables(args: argparse.Namespace, trace: Trace, keep: Keep) -> list[dict[str, Any]]:
    """Compares the policies at each number of live sessions; prints the tables."""
    tasks = [
        Task(
            seed=seed,
            policy=policy,
            num_live=num_live,
            scheduler=args.scheduler,
            host_tokens=args.host_tokens,
        )
        for num_live in args.live
        for policy in args.policy
        for seed in _seeds(args)
    ]
    documents = run_tasks(args, trace, tasks, keep)
    for num_live in args.live:
        found = [document for task, document in zip(tasks, documents, strict=True) if task.num_live == num_live]
        print(f"\n{num_live} sessions live, {args.scheduler}; changes against {args.policy[0]}:")
        print(simulation_tables.comparison(found))
        print(moves_table(found))
    return documents


def moves_table(documents: Sequence[dict[str, Any]]) -> str:
    """Returns what moved, by policy, as means over samples."""
    head = ["policy", "pages demoted", "loaded", "ahead", "through the buffer", "moves that load", "of them swapped"]
    head += ["link busy out s", "in s", "nothing but moves s"]
    rows = [head]
    for name, found in simulation_tables.by_policy(documents).items():

        def mean(value: Callable[[dict[str, Any]], float], found: Sequence[dict[str, Any]] = found) -> float:
            return simulation_tables.mean(found, value) or 0.0

        loaded, loads = mean(lambda d: d["run"]["loaded_pages"]), mean(lambda d: d["run"]["loads"])
        swapped, swapped_moves = mean(lambda d: d["swapped_loads"]), mean(lambda d: d["run"]["swapped_moves"])
        rows.append(
            [
                name,
                f"{mean(lambda d: d['run']['demoted_pages']):,.0f}",
                f"{loaded:,.0f}",
                f"{mean(lambda d: d['run']['prefetched_pages']):,.0f}",
                f"{swapped:,.0f}" + (f" ({swapped / loaded:.0%})" if loaded else ""),
                f"{loads:,.0f}",
                f"{swapped_moves:,.0f}" + (f" ({swapped_moves / loads:.0%})" if loads else ""),
                f"{mean(lambda d: d['run']['demoting_s']):,.0f}",
                f"{mean(lambda d: d['run']['loading_s']):,.0f}",
                f"{mean(lambda d: d['run']['move_wait_s']):,.0f}",
            ]
        )
    return text_table(rows, ["<", *[">"] * (len(head) - 1)])


def sweep(args: argparse.Namespace, trace: Trace, keep: Keep) -> list[dict[str, Any]]:
    """Varies the size of the host tier; prints a line for each size, scheduler and number of sessions."""
    first, last = args.policy[0], args.policy[-1]
    cases = [
        (scheduler, num_live, factor)
        for scheduler in args.sweep_schedulers
        for num_live in args.sweep_live
        for factor in args.sweep
    ]
    tasks = [
        Task(
            seed=seed,
            policy=policy,
            num_live=num_live,
            scheduler=scheduler,
            host_tokens=factor * args.device_tokens,
        )
        for scheduler, num_live, factor in cases
        for policy in dict.fromkeys((first, last))
        for seed in _seeds(args)
    ]
    documents = run_tasks(args, trace, tasks, keep)
    rows = [["scheduler", "sessions", "host / device", f"TTFT s {first}", last, "change", f"hit rate {first}", last]]
    for scheduler, num_live, factor in cases:
        wanted = (scheduler, num_live, factor * args.device_tokens)
        base, other = (
            [
                document
                for task, document in zip(tasks, documents, strict=True)
                if (task.scheduler, task.num_live, task.host_tokens) == wanted and task.policy == policy
            ]
            for policy in (first, last)
        )
        ttft, hits = simulation_tables.ttft, lambda document: document["hit_rate"]
        mean = simulation_tables.mean
        rows.append(
            [
                scheduler,
                str(num_live),
                f"{factor}",
                f"{mean(base, ttft) or 0:.3f}",
                f"{mean(other, ttft) or 0:.3f}",
                simulation_tables.changes_text(simulation_tables.changes(other, base, ttft)),
                f"{mean(base, hits) or 0:.1%}",
                f"{mean(other, hits) or 0:.1%}",
            ]
        )
    print("\nHost tier:")
    print(text_table(rows, ["<", *[">"] * (len(rows[0]) - 1)]))
    return documents


def timeline(args: argparse.Namespace, trace: Trace, keep: Keep) -> list[dict[str, Any]]:
    """Shows what moved when, in the first sample under the last policy."""
    task = Task(
        seed=args.seed,
        policy=args.policy[-1],
        num_live=args.live[-1],
        scheduler=args.scheduler,
        host_tokens=args.host_tokens,
    )
    document, simulation = simulated(args, trace, task)
    with signals_wait():
        keep([document])
    print(f"\nMoves under {task.policy}, {task.num_live} sessions live:")
    print(move_timeline.text(simulation.moves))
    if args.plot is not None:
        title = f"{args.model}, {task.policy}, {task.num_live} sessions, {args.device_tokens:,} + {args.host_tokens:,} tokens"
        move_timeline.plot(simulation.moves, args.plot, title)
    return [document]


_RUN = {"tables": tables, "sweep": sweep, "timeline": timeline}


def _seeds(args: argparse.Namespace) -> range:
    return range(args.seed, args.seed + args.samples)


def _numbers(args: argparse.Namespace, name: str) -> list[int]:
    return engine_options.numbers(f"--{name.replace('_', '-')}", getattr(args, name))


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the command: those of `simulate`, and how much to run."""
    simulate.add_flags(parser)
    parser.set_defaults(policy=POLICIES, device_tokens=131_200, host_tokens=131_200, sessions=None)
    group = parser.add_argument_group("parts")
    group.add_argument("--part", action="append", choices=PARTS, help="what to run; by default everything")
    group.add_argument("--live", default="4,8", metavar="N,...", help="tables: sessions live at once (4,8)")
    group.add_argument("--sweep", default="1,2,4", metavar="N,...", help="host tier, times the device tier (1,2,4)")
    group.add_argument("--sweep-live", default="8", metavar="N,...", help="sweep: sessions live at once (8)")
    group.add_argument("--sweep-schedulers", default="fcfs,lpm", metavar="NAME,...", help="of the sweep (fcfs,lpm)")
    group.add_argument("--plot", metavar="FILE", help="timeline: a picture, by the ending of its name")
    group.add_argument("--jobs", type=int, default=1, metavar="N", help="simulations at once, each in a process (1)")


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    for name in ("live", "sweep", "sweep_live"):
        setattr(args, name, _numbers(args, name))
    if not 1 <= args.jobs <= 64:
        raise InputError(f"--jobs {args.jobs} must be from 1 to 64.")
    if args.samples < 1 or (args.samples > 1 and args.sample is None):
        raise InputError(f"--samples {args.samples}: must be at least 1, and more than 1 needs --sample.")
    args.policy = [policy.name for policy in engine_options.policies(args, args.policy)]
    args.sweep_schedulers = args.sweep_schedulers.split(",")
    for scheduler in args.sweep_schedulers:
        if scheduler not in SCHEDULERS:
            raise InputError(f"--sweep-schedulers: unknown scheduler {scheduler!r}; known: {', '.join(SCHEDULERS)}.")
    for flag, value in (("--device-tokens", args.device_tokens), ("--host-tokens", args.host_tokens)):
        if not value:
            raise InputError(f"{flag} {value}: must be above 0.")
    if args.sessions is not None:
        raise InputError(f"--sessions {args.sessions}: --live and --sweep-live say how many sessions are live here.")
    args.sessions = args.live[0]
    engine_options.check_output("--json", args.json)
    engine_options.check_plot("--plot", args.plot)
    setting = simulate.make_setting(args)
    trace = engine_options.load_trace(setting.args, setting.max_context)
    results: dict[str, list[dict[str, Any]]] = {}

    def keep(documents: list[dict[str, Any]]) -> None:
        """A run takes hours in full size; what has ended is written at once, and counts only together with that."""
        if args.json:
            write_json(args.json, results | {part: documents})
        results[part] = documents

    try:
        for part in args.part or PARTS:
            _RUN[part](args, trace, keep)
    except KeyboardInterrupt:
        number = sum(len(documents) for documents in results.values())
        place = f"in {args.json}" if args.json else "nowhere, for want of --json"
        print(f"{args.prog}: simulations that had ended: {number}, kept {place}.", file=sys.stderr)
        raise
    return 0


if __name__ == "__main__":
    start_module(
        "two_tier",
        f"Compares one cache over two tiers with two caches; by default 131,200 tokens a tier, --policy {POLICIES}.",
        add_flags,
        run,
    )
