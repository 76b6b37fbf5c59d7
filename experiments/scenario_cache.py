"""Commands of a scenario that act on the cache alone, and on the state as a whole."""

import collections
import dataclasses

import numpy as np

from penelope_jax import demotion, eviction, histories, lookup, pages, tiers
from penelope_jax.config import policy_named
from penelope_jax.errors import InputError, bad_input
from penelope_jax.experiments.kv_model import history_hashes
from penelope_jax.experiments.render import page_numbers
from penelope_jax.experiments.scenario_language import Line, one_word, whole
from penelope_jax.experiments.scenario_world import Command, World
from penelope_jax.radix_tree import CacheState, Match
from penelope_jax.tiers import Load


def _set_cache(world: World, cache: CacheState) -> None:
    world.state = dataclasses.replace(world.state, cache=cache)


def _take(world: World, num_pages: int) -> tuple[CacheState, np.ndarray]:
    pool, ids = pages.take(world.state.cache.device, num_pages)
    return dataclasses.replace(world.state.cache, device=pool), ids


def _match(world: World, line: Line, history: str) -> Match:
    tokens = world.words.tokens(history, line.place)
    return lookup.match(world.state.cache, tokens, line.options.get("salt", ""))


def insert(world: World, line: Line) -> list[str]:
    """`insert HISTORY`: computes the whole pages of a history, from a position on, and gives them to the tree."""
    tokens, namespace, size = (
        world.words.tokens(line.text, line.place),
        line.options.get("salt", ""),
        world.words.page_size,
    )
    start = line.number("from", 0)
    cache, ids = _take(world, max(0, len(tokens) // size - start // size))
    cache, done = histories.insert(cache, tokens, ids, start, namespace)
    _set_cache(world, dataclasses.replace(cache, device=pages.give_back(cache.device, done.refused)))
    row = [pages.NO_PAGE] * (start // size) + ids.tolist()
    world.kv.write(row, start, len(row) * size, history_hashes(tokens.tolist(), namespace))
    world.outcome.adopted, world.outcome.returned = len(done.adopted), len(done.refused)
    adopted, returned = page_numbers(done.adopted.tolist()), page_numbers(done.refused.tolist())
    return [f"adopted {adopted or 'nothing'}, returned {returned or 'nothing'}"]


def match(world: World, line: Line) -> list[str]:
    """`match HISTORY`: looks a history up."""
    world.outcome.found = found = _match(world, line, line.text)
    return [f"matched {span_texts(found)}"]


def span_texts(found: Match) -> str:
    """Returns the spans of a match, as in `0-8 device, 8-12 missing`."""
    return ", ".join(f"{span.start}-{span.stop} {span.tier.name.lower()}" for span in found.spans) or "nothing"


def touch(world: World, line: Line) -> list[str]:
    """`touch HISTORY`: stamps what matches."""
    _set_cache(world, histories.touch(world.state.cache, _match(world, line, line.text)))
    return []


def pin(world: World, line: Line) -> list[str]:
    """`pin NAME HISTORY`: pins what matches."""
    name, _, history = line.text.partition(" ")
    if name in world.pins and world.pins[name].pin_id in world.state.cache.pins:
        raise InputError(f"{line.place}: pin {name!r} is out already.")
    found = _match(world, line, history)
    cache, world.pins[name] = histories.pin(world.state.cache, found, line.options.get("salt", ""))
    _set_cache(world, cache)
    return []


def unpin(world: World, line: Line) -> list[str]:
    """`unpin NAME`: gives a pin back."""
    if line.text not in world.pins:
        raise InputError(f"{line.place}: no pin was called {line.text!r}.")
    _set_cache(world, histories.unpin(world.state.cache, world.pins[line.text]))
    return []


def evict(world: World, line: Line) -> list[str]:
    """`evict NUMBER`: frees that many pages, by the policy of the cache or another one."""
    with bad_input(line.place):
        policy = policy_named(line.options.get("policy", world.config.policy.name))
    before = world.state.cache
    cache, done = eviction.evict(before, whole(line.text, f"{line.place}: pages"), policy)
    _set_cache(world, cache)
    world.outcome.short = done.num_short
    return [world.note_evicted(before, done.spans) + (f", {done.num_short} short" if done.num_short else "")]


def demote(world: World, line: Line) -> list[str]:
    """`demote NUMBER`: that many pages leave the device for the host, by the policy of the cache or another one."""
    with bad_input(line.place):
        policy = policy_named(line.options.get("policy", world.config.policy.name))
    number = whole(line.text, f"{line.place}: pages")
    cache, done = demotion.demote(world.state.cache, number, policy)
    cache, moves, _ = tiers.start(cache, dict(zip(done.host_ids.tolist(), done.device_ids.tolist())), ())
    _set_cache(world, cache)
    world.outcome.short = number - len(done.host_ids)
    said = world.start_moves(moves)
    return [*said, f"{world.outcome.short} short"] if world.outcome.short else said


def load(world: World, line: Line) -> list[str]:
    """`load HISTORY`: host pages of what matches begin to return to free device pages, `most` of them at most."""
    found = _match(world, line, line.text)
    before = world.state.cache
    number = tiers.loadable(before, found.node_ids, found.stop)
    number = min(number, line.number("most", number))
    if not number:
        return ["nothing to load"]
    cache, host_ids, device_ids = tiers.load(before, found.node_ids, found.stop, number)
    cache, moves, _ = tiers.start(cache, {}, (Load(-1, False, 0, host_ids, device_ids),))
    _set_cache(world, cache)
    return world.start_moves(moves)


def take(world: World, line: Line) -> list[str]:
    """`take NAME NUMBER`: takes free pages, as a caller outside the tree."""
    name, _, number = line.text.partition(" ")
    if name in world.hands:
        raise InputError(f"{line.place}: {name!r} holds pages already.")
    cache, ids = _take(world, whole(number, f"{line.place}: pages"))
    world.hands[name] = ids
    _set_cache(world, cache)
    return []


def free(world: World, line: Line) -> list[str]:
    """`free NAME ...`: gives taken pages back, all in one go."""
    names = line.text.split()
    for name in names:
        if name not in world.hands:
            raise InputError(f"{line.place}: nobody called {name!r} holds pages.")
    ids = np.concatenate([np.empty(0, np.int32), *(world.hands[name] for name in names)])
    cache = world.state.cache
    _set_cache(world, dataclasses.replace(cache, device=pages.give_back(cache.device, ids)))
    for name in names:
        world.hands.pop(name, None)
    return []


def save(world: World, line: Line) -> list[str]:
    """`save NAME`: remembers this state."""
    name = one_word(line)
    notes = [dict(part) for part in (world.pins, world.hands, world.metrics, world.scored)]
    world.saved[name] = (world.state, world.kv.copy(), collections.deque(world.pending), notes)
    return []


def restore(world: World, line: Line) -> list[str]:
    """`restore NAME`: goes back to a saved state."""
    if line.text not in world.saved:
        raise InputError(f"{line.place}: no state was saved as {line.text!r}.")
    world.state, kv, pending, notes = world.saved[line.text]
    world.kv, world.pending = kv.copy(), collections.deque(pending)
    world.pins, world.hands, world.metrics, world.scored = (dict(part) for part in notes)
    return []


COMMANDS: dict[str, tuple[Command, tuple[str, ...]]] = {
    "insert": (insert, ("from", "salt")),
    "match": (match, ("salt",)),
    "touch": (touch, ("salt",)),
    "pin": (pin, ("salt",)),
    "unpin": (unpin, ()),
    "evict": (evict, ("policy",)),
    "demote": (demote, ("policy",)),
    "load": (load, ("most", "salt")),
    "take": (take, ()),
    "free": (free, ()),
    "save": (save, ()),
    "restore": (restore, ()),
}
"""Command -> what it does, and the options it takes."""
