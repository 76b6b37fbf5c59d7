"""Outlines: a cache made of one holds the same histories in the same order of eviction, or what fits of them."""

import dataclasses

import numpy as np
import pytest
from test_driver import CONFIG, conversations, driver_of, prompt_of

from penelope_jax.cache_outline import NO_ROW, Outline, check_outline, outline_of, rebuild
from penelope_jax.config import POLICIES, EngineConfig
from penelope_jax.driver import Driver, HashExecutor
from penelope_jax.eviction import evict
from penelope_jax.invariants import check_cache, check_idle
from penelope_jax.pages import NO_PAGE, Tier
from penelope_jax.radix_tree import CacheState, make_cache, path_nodes
from penelope_jax.segments import SamplingParams

ONE_TIER = dataclasses.replace(CONFIG, device_tokens=160)
TWO_TIERS = dataclasses.replace(CONFIG, device_tokens=120, host_tokens=80, swap_tokens=4)


def used_cache(config: EngineConfig) -> CacheState:
    """Returns what conversations of two tenants leave: shared prefixes, holes, evicted and demoted pages."""
    driver = Driver(config, HashExecutor(90))
    conversations(driver, 4, 9)
    driver.submit(prompt_of(30), SamplingParams(max_tokens=3), cache_salt="tenant")
    while not driver.idle:
        driver.step()
    driver.drain_moves()
    return driver.state.cache


def empty_cache(config: EngineConfig) -> CacheState:
    return make_cache(config.page_size, config.num_device_pages, config.num_host_pages, config.num_swap_pages)


def eviction_order(cache: CacheState, config: EngineConfig) -> list[tuple[str, bytes]]:
    """Returns (namespace, history up to the page) of every page, in the order in which it would be evicted."""
    namespace_of = {root: namespace for namespace, root in cache.roots.items()}
    order = []
    for node_id, start, stop in evict(cache, cache.num_resident, config.policy)[1].spans:
        path = path_nodes(cache, node_id)
        namespace = namespace_of[path[0].parent_id]
        history = b"".join(node.tokens for node in path)
        order += [(namespace, history[: 4 * end]) for end in range(start + 4, stop + 4, 4)]
    return order


@pytest.mark.parametrize("name", list(POLICIES))
def test_a_cache_made_again_evicts_the_same_pages_in_the_same_order(name):
    config = dataclasses.replace(ONE_TIER, policy=POLICIES[name])
    cache = used_cache(config)
    outline, sources = outline_of(cache)
    assert outline.num_rows == cache.num_resident == len(sources.page_ids)
    rebuilt = rebuild(outline, empty_cache(config), config.policy)
    assert (rebuilt.num_left_out, len(rebuilt.host_rows)) == (0, 0)
    check_cache(rebuilt.cache)
    check_idle(rebuilt.cache)
    assert eviction_order(rebuilt.cache, config) == eviction_order(cache, config)
    assert len(rebuilt.cache.nodes) == len(cache.nodes) and len(cache.roots) == 2


def test_two_tiers_keep_every_page_and_its_order():
    cache = used_cache(TWO_TIERS)
    assert cache.num_host > 5 and any((node.page_ids == NO_PAGE).any() for node in cache.nodes.values())
    outline, sources = outline_of(cache)
    assert (sources.tiers == Tier.HOST).sum() == cache.num_host
    rebuilt = rebuild(outline, empty_cache(TWO_TIERS), TWO_TIERS.policy)
    check_cache(rebuilt.cache)
    check_idle(rebuilt.cache)
    before = eviction_order(cache, TWO_TIERS)
    assert eviction_order(rebuilt.cache, TWO_TIERS) == before
    # Rows are the pages of the new cache: each row once, and where its page is.
    rows = np.concatenate([rebuilt.device_rows, rebuilt.host_rows])
    assert sorted(rows.tolist()) == list(range(outline.num_rows))
    again, where = outline_of(rebuilt.cache)
    for tier, tier_rows, ids in (
        (Tier.DEVICE, rebuilt.device_rows, rebuilt.device_ids),
        (Tier.HOST, rebuilt.host_rows, rebuilt.host_ids),
    ):
        assert histories_of(outline, tier_rows) == histories_of(again, [row_at(where, tier, id_) for id_ in ids])


def histories_of(outline: Outline, rows) -> list[tuple[int, bytes]]:
    """Returns (namespace, history up to the row's page) of rows."""
    size, found, histories = outline.page_size, {}, []
    position = 0
    for root, parent, number in zip(outline.roots.tolist(), outline.parents.tolist(), outline.sizes.tolist()):
        history = histories[parent] if parent >= 0 else b""
        for page in range(position, position + number):
            history += outline.tokens[page * size : (page + 1) * size].tobytes()
            found[int(outline.rows[page])] = (root, history)
        histories.append(history)
        position += number
    return [found[int(row)] for row in rows]


def row_at(sources, tier: Tier, page_id: int) -> int:
    (row,) = np.flatnonzero((sources.tiers == tier) & (sources.page_ids == page_id))
    return int(row)


@pytest.mark.parametrize(("num_device", "num_host"), [(20, 10), (10, 0), (1, 1), (200, 0), (0, 0)])
@pytest.mark.parametrize("name", ["penelope", "vllm", "leaf-head-node"])
def test_what_does_not_fit_is_what_would_be_evicted_first(name, num_device, num_host):
    config = dataclasses.replace(ONE_TIER, policy=POLICIES[name])
    cache = used_cache(config)
    order = eviction_order(cache, config)
    empty = make_cache(4, max(1, num_device), num_host, 1)
    if not num_device:
        empty = dataclasses.replace(empty, device=empty.device._replace(num_free=0, runs=None))
    rebuilt = rebuild(outline_of(cache)[0], empty, config.policy)
    kept = min(len(order), num_device + num_host)
    assert rebuilt.num_left_out == len(order) - kept and rebuilt.cache.num_resident == kept
    if num_device:
        check_cache(rebuilt.cache)
    assert sorted(eviction_order(rebuilt.cache, config)) == sorted(order[len(order) - kept :])
    outline, _ = outline_of(cache)
    namespaces = outline.namespaces
    on_device = [(namespaces[root], history) for root, history in histories_of(outline, rebuilt.device_rows)]
    assert on_device == order[len(order) - min(len(order), num_device) :]


def test_an_empty_cache():
    outline, sources = outline_of(make_cache(4, 5))
    assert (outline.num_rows, len(outline.sizes), len(sources.tiers)) == (0, 0, 0)
    rebuilt = rebuild(outline, make_cache(4, 5), POLICIES["penelope"])
    assert not rebuilt.cache.nodes and rebuilt.cache.device.num_free == 5 and len(rebuilt.device_ids) == 0


def test_a_cache_in_use_has_no_outline():
    driver = driver_of()
    driver.submit(prompt_of(9), SamplingParams(max_tokens=9))
    driver.step()
    with pytest.raises(ValueError, match="^1 pins are out and 0 moves under way; both must be 0.$"):
        outline_of(driver.state.cache)


GOOD = {
    "page_size": 2,
    "namespaces": ("", "x"),
    "roots": [0, 0, 1],
    "parents": [-1, 0, -1],
    "sizes": [1, 2, 1],
    "ages": [3, 1, 2],
    "tokens": [1, 2, 3, 4, 5, 6, 1, 2],
    "rows": [0, NO_ROW, 1, 2],
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"roots": [0, 0]}, "3 nodes have 2 roots."),
        ({"sizes": [1, 3, 0]}, "a node has 0 pages; at least 1."),
        ({"rows": [0, 1, 2]}, "4 pages have 3 rows and 8 tokens."),
        ({"tokens": [1, 2]}, "4 pages have 4 rows and 2 tokens."),
        ({"parents": [-1, 1, -1]}, "a node stands before its parent."),
        ({"parents": [-2, 0, -1]}, "a node stands before its parent."),
        ({"roots": [0, 0, 2]}, "a node is of none of the 2 namespaces."),
        ({"roots": [0, 1, 1]}, "a node and its parent are of two namespaces."),
        ({"ages": [3, 1, 1]}, "two nodes have one age."),
        ({"rows": [1, NO_ROW, 0, 2]}, "rows are not numbered in order."),
        ({"parents": [-1, -1, -1], "tokens": [1, 2, 1, 2, 5, 6, 1, 2]}, "two nodes below one begin alike."),
    ],
)
def test_outlines_that_contradict_themselves(changes, message):
    def made(values) -> Outline:
        return Outline(**{name: np.array(v, np.int32) if isinstance(v, list) else v for name, v in values.items()})

    check_outline(made(GOOD))
    check_cache(rebuild(made(GOOD), make_cache(2, 3), POLICIES["penelope"]).cache)
    with pytest.raises(ValueError) as caught:
        rebuild(made(GOOD | changes), make_cache(2, 3), POLICIES["penelope"])
    assert str(caught.value) == message
