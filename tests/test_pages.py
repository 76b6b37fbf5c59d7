"""Page pools: what is taken and given back, and that old pools stay what they were."""

import numpy as np
import pytest

from penelope_jax import pages
from penelope_jax.pages import OutOfPages


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_ids_are_handed_out_from_zero_up():
    pool, first = pages.take(pages.make_pool(5), 2)
    pool, rest = pages.take(pool, 3)
    assert (first.tolist(), rest.tolist(), pool.num_free) == ([0, 1], [2, 3, 4], 0)


def test_what_came_back_last_is_handed_out_first_across_runs():
    pool, _ = pages.take(pages.make_pool(6), 6)
    pool = pages.give_back(pages.give_back(pool, ids(3, 1)), ids(5))
    pool, taken = pages.take(pool, 2)
    assert taken.tolist() == [5, 3]
    assert list(pool.free_ids()) == [1]


def test_old_pools_stay_valid():
    pool = pages.make_pool(4)
    after, taken = pages.take(pool, 3)
    back = pages.give_back(after, taken)
    assert (pool.num_free, after.num_free, back.num_free) == (4, 1, 4)
    assert list(pool.free_ids()) == [0, 1, 2, 3]
    assert list(after.free_ids()) == [3]
    assert sorted(back.free_ids()) == [0, 1, 2, 3]


def test_taking_and_returning_nothing_changes_nothing():
    pool = pages.make_pool(3)
    same, none = pages.take(pool, 0)
    assert (same, none.shape, none.dtype) == (pool, (0,), np.int32)
    assert pages.give_back(pool, ids()) is pool


def test_ids_are_read_only_and_returned_ones_are_copied():
    pool, taken = pages.take(pages.make_pool(4), 3)
    with pytest.raises(ValueError, match="read-only"):
        taken[0] = 7
    mine = taken.copy()
    pool = pages.give_back(pool, mine)
    mine[:] = 9
    assert sorted(pool.free_ids()) == [0, 1, 2, 3]


def test_out_of_pages_carries_the_numbers():
    with pytest.raises(OutOfPages) as caught:
        pages.take(pages.make_pool(3), 5)
    assert str(caught.value) == "5 pages needed, 3 available."
    assert (caught.value.needed, caught.value.available) == (5, 3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (ids(0, 0), "page ids given back twice: [0, 0]."),
        (ids(-1), "page id -1..-1 is outside [0, 4)."),
        (ids(1, 4), "page id 1..4 is outside [0, 4)."),
        (ids(0, 1, 2), "3 pages given back, but only 2 are out."),
    ],
)
def test_ids_that_are_not_out_cannot_be_given_back(given: np.ndarray, message: str):
    pool, _ = pages.take(pages.make_pool(4), 2)
    with pytest.raises(ValueError) as caught:
        pages.give_back(pool, given)
    assert str(caught.value) == message


def test_the_same_ids_given_back_twice_are_noticed_when_nothing_is_out():
    pool, taken = pages.take(pages.make_pool(4), 2)
    pool = pages.give_back(pool, taken)
    with pytest.raises(ValueError, match=r"^2 pages given back, but only 0 are out\.$"):
        pages.give_back(pool, taken)


def test_a_pool_has_no_negative_size():
    with pytest.raises(ValueError, match=r"^num_pages=-1 must not be negative\.$"):
        pages.make_pool(-1)
    assert list(pages.make_pool(0).free_ids()) == []


def test_random_takes_and_returns_conserve_pages():
    rng = np.random.default_rng(0)
    pool, out = pages.make_pool(50), []
    for _ in range(2_000):
        if out and rng.random() < 0.5:
            number = int(rng.integers(1, len(out) + 1))
            rng.shuffle(out)
            pool, out = pages.give_back(pool, np.array(out[:number], np.int32)), out[number:]
        else:
            pool, taken = pages.take(pool, int(rng.integers(0, pool.num_free + 1)))
            out.extend(taken.tolist())
        assert sorted([*out, *pool.free_ids()]) == list(range(50))
        assert pool.num_free == 50 - len(out)
