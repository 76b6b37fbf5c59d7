"""The persistent order of leaves, against a plain dict."""

import numpy as np
import pytest

from penelope_jax import leaf_order
from penelope_jax.leaf_order import LeafOrder


def order_of(*stamps: int) -> LeafOrder:
    order = LeafOrder()
    for stamp in stamps:
        order = leaf_order.add(order, stamp, 1000 + stamp)
    return order


def test_the_oldest_comes_first_whatever_the_order_of_adding():
    order = order_of(40, 3, 1024, 0, 31, 32, 99_999)
    assert leaf_order.oldest(order) == 1000
    assert [stamp for stamp, _ in leaf_order.in_order(order)] == [0, 3, 31, 32, 40, 1024, 99_999]
    assert order.num_leaves == 7


def test_an_empty_order_has_no_oldest():
    assert leaf_order.oldest(LeafOrder()) is None
    order = leaf_order.remove(order_of(70_000), 70_000, 71_000)
    assert order == LeafOrder()
    assert list(leaf_order.in_order(order)) == []


def test_old_orders_stay_valid():
    old = order_of(5, 6)
    new = leaf_order.add(leaf_order.remove(old, 5, 1005), 1_000_000, 7)
    assert list(leaf_order.in_order(old)) == [(5, 1005), (6, 1006)]
    assert list(leaf_order.in_order(new)) == [(6, 1006), (1_000_000, 7)]


def test_two_leaves_never_share_a_stamp():
    with pytest.raises(AssertionError, match=r"^stamp=5 is taken by node 1005$"):
        leaf_order.add(order_of(5), 5, 8)


def test_what_is_not_there_cannot_be_removed():
    with pytest.raises(AssertionError, match=r"^no leaf at stamp=9$"):
        leaf_order.remove(LeafOrder(), 9, 1)
    with pytest.raises(AssertionError, match=r"^stamp=5 holds node 1005, not 6$"):
        leaf_order.remove(order_of(5), 5, 6)


def test_random_changes_agree_with_a_dict():
    rng = np.random.default_rng(1)
    order, naive = LeafOrder(), {}
    for clock in range(4_000):
        if naive and rng.random() < 0.45:
            stamp = list(naive)[int(rng.integers(len(naive)))] if rng.random() < 0.5 else min(naive)
            order = leaf_order.remove(order, stamp, naive.pop(stamp))
        else:
            stamp = clock * int(rng.integers(1, 4)) + 10**6 * int(rng.random() < 0.05)
            if stamp in naive:
                continue
            naive[stamp] = clock
            order = leaf_order.add(order, stamp, clock)
        assert leaf_order.oldest(order) == (naive[min(naive)] if naive else None)
        assert order.num_leaves == len(naive)
    assert list(leaf_order.in_order(order)) == sorted(naive.items())
