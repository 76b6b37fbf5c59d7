"""What the cache costs the host: match, insert, pin and evict on a tree of agent histories, and planning a step.

The workload is 24 sessions of 200 turns that grow to 118K tokens over a shared prefix of 15.6K, page 64: the one on
which other engines' trees were measured (SGLang 0.5.23: Rust core 0.48 + 0.62 ms, Python 2.6 + 3.0 ms for match and
insert, 2.9 ms and more for an eviction of 480 pages; another machine, so the order of magnitude is what compares).

    python -m penelope_jax.experiments.host_cost [--sessions 24] [--turns 200] [--tokens 118000] [--json FILE]

Planning with both tiers full and pages moving is timed with 64 running requests of --two-tier-tokens each, and with
garbage collected as seldom as in a replay (`garbage.py`).

With --leaves N each operation is timed once more on a tree of N leaves, each a private history of 16K tokens behind a
shared page, and the memory of the tree is measured. An operation must not cost more because there are more histories:

    python -m penelope_jax.experiments.host_cost --leaves 2000,50000
"""

import argparse
import dataclasses
import re
import resource
import time
from collections.abc import Iterator

import numpy as np

from penelope_jax import engine, histories, leaf_order, pages
from penelope_jax.config import POLICIES, EngineConfig
from penelope_jax.driver import HashExecutor
from penelope_jax.events import Finished, MoveDone, Submit
from penelope_jax.eviction import evict
from penelope_jax.garbage import seldom_collected
from penelope_jax.invariants import check_cache
from penelope_jax.lookup import match
from penelope_jax.metrics import write_json
from penelope_jax.radix_tree import CacheState, make_cache, path_nodes
from penelope_jax.segments import SamplingParams
from penelope_jax.state import make_state

_EVICTED_PAGES = 480
_SHARED_TOKENS = 15_600


def grow(num_sessions: int, num_turns: int, num_tokens: int, page_size: int, seed: int) -> tuple[CacheState, dict]:
    """Grows all histories turn by turn and times each lookup and insert.

    Returns:
        The full cache, and times in seconds: `match`, `insert`, each a list of num_sessions * num_turns.
    """
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, 150_000, _SHARED_TOKENS, dtype=np.int32)
    texts = [
        np.concatenate([shared, rng.integers(0, 150_000, num_tokens, dtype=np.int32)])[:num_tokens]
        for _ in range(num_sessions)
    ]
    cache = make_cache(page_size, num_sessions * (num_tokens // page_size + 1))
    stops = np.linspace(min(20_000, num_tokens), num_tokens, num_turns).astype(int).tolist()
    seconds: dict[str, list[float]] = {"match": [], "insert": []}
    for stop in stops:
        for text in texts:
            tokens = text[:stop]
            begin = time.perf_counter()
            found = match(cache, tokens)
            seconds["match"].append(time.perf_counter() - begin)
            pool, page_ids = pages.take(cache.device, stop // page_size - found.stop // page_size)
            cache = dataclasses.replace(cache, device=pool)
            begin = time.perf_counter()
            cache, inserted = histories.insert(cache, tokens, page_ids, found.stop)
            seconds["insert"].append(time.perf_counter() - begin)
            assert len(inserted.refused) == 0, "a page was inserted twice"
    return cache, seconds


def measure(num_sessions: int, num_turns: int, num_tokens: int, page_size: int = 64, seed: int = 0) -> dict:
    """Returns medians and 99th percentiles in milliseconds, by operation."""
    cache, seconds = grow(num_sessions, num_turns, num_tokens, page_size, seed)
    check_cache(cache)
    seconds["match + insert"] = [a + b for a, b in zip(seconds["match"], seconds["insert"], strict=True)]
    text = next(leaf_histories(cache))
    found = match(cache, text)
    pin_times = []
    for _ in range(200):
        begin = time.perf_counter()
        pinned, receipt = histories.pin(cache, found)
        histories.unpin(pinned, receipt)
        pin_times.append(time.perf_counter() - begin)
    seconds["pin + unpin"] = pin_times
    for policy in POLICIES.values():
        after, times = cache, []
        for _ in range(min(40, cache.num_resident // (2 * _EVICTED_PAGES))):
            begin = time.perf_counter()
            after, _ = evict(after, _EVICTED_PAGES, policy)
            times.append(time.perf_counter() - begin)
        check_cache(after)
        seconds[f"evict {_EVICTED_PAGES} pages, {policy.name}"] = times
    seconds |= measure_plan()
    return {
        "sessions": num_sessions,
        "turns": num_turns,
        "tokens": num_tokens,
        "page_size": page_size,
        "nodes": len(cache.nodes),
        "pages": cache.num_resident,
        "ms": milliseconds(seconds),
    }


def milliseconds(seconds: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Returns the percentiles 50, 90, 95 and 99 in milliseconds of what was timed at all."""
    return {
        name: {f"p{share}": float(np.percentile(times, share)) * 1e3 for share in (50, 90, 95, 99)}
        for name, times in seconds.items()
        if times
    }


@seldom_collected()
def measure_plan(num_requests: int = 64, num_tokens: int = 130_000, num_steps: int = 200) -> dict[str, list[float]]:
    """Returns seconds of `plan` and `apply` for steps in which `num_requests` long histories decode."""
    rng = np.random.default_rng(0)
    page_size = 64
    room = num_tokens + num_steps + page_size
    config = EngineConfig(
        device_tokens=(num_requests + 1) * -(-room // page_size) * page_size,
        page_size=page_size,
        max_context=room,
        max_running=num_requests,
        max_step_tokens=num_requests * -(-num_tokens // page_size) * page_size,
        max_step_segments=num_requests,
    )
    executor = HashExecutor()
    state = make_state(config)
    shared = rng.integers(0, 50_000, _SHARED_TOKENS)
    for number in range(num_requests):
        tokens = np.concatenate([shared, rng.integers(0, 50_000, num_tokens - _SHARED_TOKENS)]).astype(np.int32)
        submit = Submit(request_id=number, tokens=tokens, sampling=SamplingParams(max_tokens=num_steps + 8))
        state, _ = engine.apply(state, (submit,))
    seconds: dict[str, list[float]] = {"plan": [], "apply": []}
    for step in range(num_steps):
        begin = time.perf_counter()
        state, plan = engine.plan(state)
        planned = time.perf_counter()
        assert plan is not None, "all requests decode"
        done = executor.run(plan)
        ran = time.perf_counter()
        state, _ = engine.apply(state, (done,))
        if step >= 4:  # before, prompts are computed
            seconds["plan"].append(planned - begin)
            seconds["apply"].append(time.perf_counter() - ran)
    return {f"{name}, {num_requests} x {num_tokens:,} tokens": times for name, times in seconds.items()}


@seldom_collected()
def measure_tiers(
    num_requests: int = 64, num_host_pages: int = 4_000, num_tokens: int = 6_000, num_steps: int = 1_500
) -> dict[str, list[float]]:
    """Returns seconds of `plan` and `apply` with both tiers full and pages moving between them.

    Twice as many histories as there are requests take turns: whoever has its reply waits, and comes back with 100 new
    tokens. So in every fourth step somebody is admitted, pages are loaded for it, others leave the device for them, and
    moves of earlier steps are under way. Steps with fewer requests running are not counted.
    """
    rng = np.random.default_rng(0)
    page_size = 64
    num_histories = 2 * num_requests
    room = 2 * num_tokens
    config = EngineConfig(
        device_tokens=num_requests * 2_048 * -(-num_tokens // 1_500),
        host_tokens=num_host_pages * page_size,
        page_size=page_size,
        max_context=room,
        max_running=num_requests,
        max_step_tokens=8_192,
        max_step_segments=2 * num_requests,
        output_reserve=64,
    )
    executor = HashExecutor(move_delay=6)
    state = make_state(config)
    texts = [rng.integers(0, 50_000, num_tokens).astype(np.int32) for _ in range(num_histories)]
    owners: dict[int, int] = {}
    next_id = 0
    idle = list(range(num_histories))
    seconds: dict[str, list[float]] = {"plan": [], "apply": []}
    step = 0
    while step < num_steps:
        while len(owners) < num_requests + 8 and idle:
            history = idle.pop(int(rng.integers(len(idle))))
            sampling = SamplingParams(max_tokens=int(rng.integers(100, 400)))
            state, _ = engine.apply(state, (Submit(request_id=next_id, tokens=texts[history], sampling=sampling),))
            owners[next_id] = history
            next_id += 1
        done_moves, failed_moves = executor.finish_moves()
        begin = time.perf_counter()
        if done_moves:
            state, _ = engine.apply(state, (MoveDone(done=done_moves, failed=failed_moves),))
        heard = time.perf_counter()
        moving = len(state.cache.moves)
        state, plan = engine.plan(state)
        planned = time.perf_counter()
        if plan is not None:
            executor.start_moves(plan.moves)
        if plan is None or not plan.segments:
            continue
        done = executor.run(plan)
        ran = time.perf_counter()
        state, updates = engine.apply(state, (done,))
        took = time.perf_counter() - ran + heard - begin
        for update in updates:
            if isinstance(update, Finished):
                history = owners.pop(update.request_id)
                new = rng.integers(0, 50_000, 100).astype(np.int32)
                if len(texts[history]) + 256 < room:
                    texts[history] = np.concatenate([texts[history], new])
                idle.append(history)
        full = state.cache.num_host >= num_host_pages - config.num_swap_pages
        if full and (moving or plan.moves) and len(state.running) == num_requests:
            step += 1
            seconds["plan"].append(planned - heard)
            seconds["apply"].append(took)
    return {
        f"{name}, two tiers, {num_requests} x {num_tokens:,} tokens, {num_host_pages:,} host pages": times
        for name, times in seconds.items()
    }


def leaf_histories(cache: CacheState) -> Iterator[np.ndarray]:
    """Yields the tokens of every leaf's history, i32[n]."""
    for node in cache.nodes.values():
        if node.num_pages and not node.children:
            parts = [node.tokens]
            above = cache.nodes[node.parent_id]
            while above.num_pages:
                parts.append(above.tokens)
                above = cache.nodes[above.parent_id]
            yield np.frombuffer(b"".join(reversed(parts)), np.int32)


def plant(num_leaves: int, num_tokens: int, page_size: int, rng: np.random.Generator) -> CacheState:
    """Returns a full cache of `num_leaves` histories of `num_tokens` tokens that share their first page."""
    pages_each = num_tokens // page_size
    shared = rng.integers(0, 150_000, page_size, dtype=np.int32)
    cache = make_cache(page_size, num_leaves * (pages_each - 1) + 1)
    for _ in range(num_leaves):
        tokens = np.concatenate([shared, rng.integers(0, 150_000, num_tokens - page_size, dtype=np.int32)])
        start = match(cache, tokens, max_pages=1).stop
        pool, page_ids = pages.take(cache.device, pages_each - start // page_size)
        cache, _ = histories.insert(dataclasses.replace(cache, device=pool), tokens, page_ids, start)
    return cache


def measure_leaves(num_leaves: int, num_tokens: int = 16_384, page_size: int = 64, seed: int = 0) -> dict:
    """Returns the median of single operations, in milliseconds, and bytes a token, on a tree of many leaves."""
    rng = np.random.default_rng(seed)
    before = _resident_bytes()
    cache = plant(num_leaves, num_tokens, page_size, rng)
    num_bytes = _resident_bytes() - before
    node_ids = [node_id for _, node_id in leaf_order.in_order(cache.leaves)]
    chosen = rng.choice(node_ids, min(200, num_leaves), replace=False).tolist()
    seconds: dict[str, list[float]] = {}

    def timed(name: str, function, *args):
        begin = time.perf_counter()
        result = function(*args)
        seconds.setdefault(name, []).append(time.perf_counter() - begin)
        return result

    for node_id in chosen:
        text = np.frombuffer(b"".join(node.tokens for node in path_nodes(cache, node_id)), np.int32)
        found = timed("match", match, cache, text)
        timed("touch", histories.touch, cache, found)
        pinned, receipt = timed("pin", histories.pin, cache, found)
        timed("unpin", histories.unpin, pinned, receipt)
        after, _ = timed("evict 1 page", evict, cache, 1, POLICIES["penelope"])
        after, _ = timed(f"evict {_EVICTED_PAGES} pages", evict, cache, _EVICTED_PAGES, POLICIES["penelope"])
        longer = np.concatenate([text, rng.integers(0, 150_000, 512, dtype=np.int32)])
        pool, page_ids = pages.take(after.device, 512 // page_size)
        after = dataclasses.replace(after, device=pool)
        timed("insert", histories.insert, after, longer, page_ids, len(text))
    return {
        "leaves": num_leaves,
        "tokens": num_leaves * num_tokens,
        "bytes_per_token": num_bytes / (num_leaves * num_tokens),
        "ms": {name: float(np.median(times)) * 1e3 for name, times in seconds.items()},
    }


def _numbers(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[1-9]\d{0,8}(,[1-9]\d{0,8})*", text):
        raise argparse.ArgumentTypeError(f"{text!r} must be numbers of at least 1 with commas between.")
    return tuple(int(number) for number in text.split(","))


def _resident_bytes() -> int:
    """Returns the memory of this process (Linux)."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def main(argv: list[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description="Times the cache on the host.", allow_abbrev=False)
    parser.add_argument("--sessions", type=int, default=24)
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=118_000)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--leaves", type=_numbers, default=(), metavar="N,...", help="sizes of a second tree, in leaves"
    )
    parser.add_argument(
        "--two-tier-tokens",
        type=_numbers,
        default=(6_000,),
        metavar="N,...",
        help="lengths of the histories with which planning over two tiers is timed (6000)",
    )
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(argv)
    result = measure(args.sessions, args.turns, args.tokens, args.page_size, args.seed)
    for number in args.two_tier_tokens:
        result["ms"] |= milliseconds(measure_tiers(num_tokens=number))
    print(f"{result['nodes']} nodes, {result['pages']} pages of {args.page_size} tokens")
    for name, times in result["ms"].items():
        print(
            f"{name:60s} p50 {times['p50']:7.3f} ms   p90 {times['p90']:7.3f} ms   p95 {times['p95']:7.3f} ms   "
            f"p99 {times['p99']:7.3f} ms"
        )
    for number in args.leaves:
        tree = measure_leaves(number, page_size=args.page_size, seed=args.seed)
        result.setdefault("trees", []).append(tree)
        print(f"\n{tree['leaves']:,} leaves, {tree['tokens']:,} tokens, {tree['bytes_per_token']:.2f} bytes a token")
        for name, median in tree["ms"].items():
            print(f"{name:50s} p50 {median:7.3f} ms")
    if args.json:
        write_json(args.json, result)


if __name__ == "__main__":
    main()
