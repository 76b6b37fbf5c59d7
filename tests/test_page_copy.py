"""Pages copied out of the pool and back: bytes, padding, meshes, what is consumed and what compiles. `test_aot_programs.py` has memory."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from penelope_jax.forward import POOL_SPEC
from penelope_jax.kernels.kv_write import DROP_PAGE
from penelope_jax.kernels.page_copy import (
    PAGE_BUCKETS,
    gather_pages,
    padded_ids,
    padded_pages,
    page_bucket,
    page_sharding,
    scatter_pages,
)
from penelope_jax.models.layers import device_mesh

SHAPE = (7, 2, 2, 4, 8, 16)  # [P, L, 2, K, page_size, H]
DTYPES = ("float32", "bfloat16", "float16")


def bytes_of(array) -> bytes:
    return np.asarray(array).tobytes()


def random_bits(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    """Returns numbers of every kind: NaNs of all payloads, infinities and subnormal ones too."""
    kind = jnp.dtype(dtype)
    words = np.random.default_rng(seed).integers(0, 256, (*shape, kind.itemsize), np.uint8)
    return words.view(kind)[..., 0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_survive_both_ways(dtype):
    pool = random_bits(SHAPE, dtype)
    device_pool = jnp.array(pool)
    pages = gather_pages(device_pool, np.array([5, 0, 6], np.int32))
    assert [bytes_of(page) for page in pages] == [pool[i].tobytes() for i in (5, 0, 6)]
    assert bytes_of(device_pool) == pool.tobytes()

    written = scatter_pages(jnp.zeros(SHAPE, dtype), np.array([1, 6, 0], np.int32), pages)
    expected = np.zeros_like(pool)
    expected[[1, 6, 0]] = pool[[5, 0, 6]]
    assert bytes_of(written) == expected.tobytes()


def test_ids_outside_the_pool_read_zeros_and_write_nothing():
    pool = random_bits(SHAPE, "float32")
    outside = np.array([-1, SHAPE[0], DROP_PAGE, -(2**31)], np.int32)
    assert {bytes_of(page) for page in gather_pages(jnp.array(pool), outside)} == {bytes(pool[0].nbytes)}
    pages = tuple(jnp.array(page) for page in random_bits((4, *SHAPE[1:]), "float32", seed=1))
    assert bytes_of(scatter_pages(jnp.array(pool), outside, pages)) == pool.tobytes()


def test_equal_ids_read_the_same_and_the_last_write_wins():
    pool = random_bits(SHAPE, "float32")
    ids = np.array([3, 3], np.int32)
    first, second = gather_pages(jnp.array(pool), ids)
    assert bytes_of(first) == bytes_of(second) == pool[3].tobytes()
    assert first.unsafe_buffer_pointer() != second.unsafe_buffer_pointer()
    new = random_bits((2, *SHAPE[1:]), "float32", seed=1)
    written = scatter_pages(jnp.array(pool), ids, (jnp.array(new[0]), jnp.array(new[1])))
    pool[3] = new[1]
    assert bytes_of(written) == pool.tobytes()


def test_padding_fills_a_bucket():
    assert [page_bucket(n) for n in (1, 2, 3, 5, 9, 16)] == [1, 2, 4, 8, 16, 16]
    assert padded_ids([4, 2, 9]).tolist() == [4, 2, 9, DROP_PAGE]
    assert padded_ids([4]).tolist() == [4]
    pages = [jnp.zeros(1), jnp.ones(1), jnp.ones(1)]
    assert [any(page is given for given in pages) for page in padded_pages(pages)] == [True] * 4
    assert padded_pages(pages)[:3] == tuple(pages)
    for number in (0, 17):
        with pytest.raises(ValueError, match=rf"num_pages={number} of a copy must be in \[1, 16\]"):
            page_bucket(number)


def test_the_pool_is_consumed_by_writes_alone():
    pool = jnp.zeros(SHAPE)
    pages = gather_pages(pool, np.array([0], np.int32))
    assert not pool.is_deleted()
    written = scatter_pages(pool, np.array([2], np.int32), pages)
    assert pool.is_deleted() and not written.is_deleted() and not pages[0].is_deleted()


@pytest.mark.parametrize("mesh_shape", [(1, 4), (2, 2)])
def test_on_a_mesh_each_device_keeps_its_heads(mesh_shape):
    mesh = device_mesh(*mesh_shape)
    sharding = NamedSharding(mesh, POOL_SPEC)
    pool = random_bits(SHAPE, "bfloat16")
    pages = gather_pages(jax.device_put(pool, sharding), padded_ids([6, 1, 2]), sharding=sharding)
    part = (*SHAPE[1:3], SHAPE[3] // mesh_shape[1], *SHAPE[4:])
    on_host = page_sharding(sharding, "pinned_host")
    host_pages = [jax.device_put(page, on_host) for page in pages[:3]]
    for page, number in zip(host_pages, (6, 1, 2), strict=True):
        assert page.sharding == on_host and page.sharding.memory_kind == "pinned_host"
        assert {shard.data.shape for shard in page.addressable_shards} == {part}
        assert bytes_of(page) == pool[number].tobytes()

    back = padded_pages([jax.device_put(page, page_sharding(sharding)) for page in host_pages])
    zeros = jax.device_put(np.zeros_like(pool), sharding)
    written = scatter_pages(zeros, padded_ids([0, 3, 5]), back, sharding=sharding)
    expected = np.zeros_like(pool)
    expected[[0, 3, 5]] = pool[[6, 1, 2]]
    assert written.sharding == sharding and written.sharding.spec == POOL_SPEC
    assert bytes_of(written) == expected.tobytes()


def test_nothing_compiles_once_every_bucket_has_run():
    sharding = NamedSharding(device_mesh(1, 2), POOL_SPEC)
    pool = jax.device_put(random_bits(SHAPE, "float16"), sharding)

    def move(pool, ids, places):
        pages = gather_pages(pool, padded_ids(ids), sharding=sharding)[: len(ids)]
        hosts = [jax.device_put(page, page_sharding(sharding, "pinned_host")) for page in pages]
        back = [jax.device_put(page, page_sharding(sharding)) for page in hosts]
        return scatter_pages(pool, padded_ids(places), padded_pages(back), sharding=sharding)

    for number in PAGE_BUCKETS:
        pool = move(pool, [0] * number, [DROP_PAGE] * number)
    compiled = gather_pages._cache_size(), scatter_pages._cache_size()
    for number in range(1, PAGE_BUCKETS[-1] + 1):
        pool = move(pool, [1] * number, [2] * number)
    assert (gather_pages._cache_size(), scatter_pages._cache_size()) == compiled


def test_control_a_shifted_page_is_seen():
    pool = random_bits(SHAPE, "bfloat16")
    shifted = gather_pages(jnp.array(pool), np.array([1, 2], np.int32))
    assert [bytes_of(page) for page in shifted] != [pool[i].tobytes() for i in (0, 1)]
    flipped = pool.copy()
    flipped.view(np.uint16)[1, 1, 0, 0, 0, 0] ^= 1
    assert bytes_of(shifted[0]) != flipped[1].tobytes()


@pytest.mark.parametrize(
    ("pool", "ids", "message"),
    [
        (np.zeros((2, 2, 4, 8, 16), np.float32), np.zeros(1, np.int32), "kv_pool has shape (2, 2, 4, 8, 16)"),
        (np.zeros((2, 1, 3, 1, 1, 1), np.float32), np.zeros(1, np.int32), "kv_pool has shape (2, 1, 3, 1, 1, 1)"),
        (np.zeros(SHAPE, np.int8), np.zeros(1, np.int32), "kv_pool has dtype int8; supported: float32,"),
        (np.zeros(SHAPE, np.float32), np.zeros(1, np.int16), "page_ids is int16[1]; supported: int32[n]"),
        (np.zeros(SHAPE, np.float32), np.zeros((1, 1), np.int32), "page_ids is int32[1, 1]; supported: int32[n]"),
        (np.zeros(SHAPE, np.float32), np.zeros(0, np.int32), "page_ids is int32[0]; supported: int32[n]"),
    ],
)
def test_bad_arguments_are_refused(pool, ids, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        gather_pages(pool, ids)
    with pytest.raises(ValueError, match=re.escape(message)):
        scatter_pages(jnp.array(pool), ids, (pool[0],))


def test_bad_pages_are_refused():
    ids = np.zeros(1, np.int32)
    page = np.zeros(SHAPE[1:], np.float32)
    with pytest.raises(ValueError, match="2 pages for 1 page_ids"):
        scatter_pages(jnp.zeros(SHAPE), ids, (page, page))
    with pytest.raises(ValueError, match=re.escape("pages[0] is float16[2, 2, 4, 8, 16]; this kv_pool has pages of")):
        scatter_pages(jnp.zeros(SHAPE), ids, (page.astype(np.float16),))
    with pytest.raises(ValueError, match=re.escape("pages[0] is float32[2, 2, 4, 8]")):
        scatter_pages(jnp.zeros(SHAPE), ids, (page[..., 0],))
    spec = NamedSharding(device_mesh(1, 2), jax.sharding.PartitionSpec("tensor"))
    with pytest.raises(ValueError, match="splits the pages of the pool"):
        page_sharding(spec)
