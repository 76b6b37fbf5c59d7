"""Draws: their distribution, the options against plain numpy, and that a draw depends on its key and row alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penelope_jax.sampling import SamplingRows, keep_candidates, keep_probable, row_keys, sample, top_tokens
from penelope_jax.segments import MAX_TOP_LOGPROBS

VOCAB = 50
DRAW = jax.jit(sample)
KEEP = jax.jit(keep_candidates)
PROBABLE = jax.jit(keep_probable)
TOP = jax.jit(top_tokens)


def rows(
    count: int, *, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, seed=0, choice=0, position=0, num_top=0
) -> SamplingRows:
    def column(value, dtype):
        return np.broadcast_to(np.asarray(value, dtype), (count,)).copy()

    return SamplingRows(
        temperature=column(temperature, np.float32),
        top_p=column(top_p, np.float32),
        top_k=column(top_k, np.int32),
        min_p=column(min_p, np.float32),
        seed=column(seed, np.uint32),
        choice=column(choice, np.int32),
        position=column(position, np.int32),
        slot=column(-1, np.int32),
        num_top=column(num_top, np.int32),
    )


def logits_of(count: int, seed: int = 0, scale: float = 2.0) -> np.ndarray:
    return (scale * np.random.default_rng(seed).standard_normal((count, VOCAB))).astype(np.float32)


def softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x.astype(np.float64) - x.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def allowed(scaled: np.ndarray, top_k: int, top_p: float, min_p: float = 0.0) -> np.ndarray:
    """Marks by sorting what min-p, then top-k and then top-p leave of one row."""
    shares = softmax(scaled)
    order = np.argsort(-scaled, kind="stable")
    order = order[shares[order] >= min_p * shares.max()]
    kept = order[:top_k] if top_k else order
    mass = np.cumsum(softmax(scaled[kept]))
    num_kept = len(kept) if top_p >= 1 else int(np.searchsorted(mass, top_p)) + 1
    mask = np.zeros(len(scaled), bool)
    mask[kept[:num_kept]] = True
    return mask


def test_greedy_is_the_first_largest_logit():
    logits = logits_of(8)
    logits[3, [10, 20]] = 99.0
    # Options of greedy rows do not matter, nor do drawn rows beside them.
    options = rows(
        8, temperature=[0, 1, 0, 0, 0, 1, 0, 0], top_k=[0, 0, 5, 0, 0, 0, 0, 0], top_p=0.5, position=range(8)
    )
    tokens = np.asarray(DRAW(logits, options))
    greedy = [0, 2, 3, 4, 6, 7]
    assert tokens[greedy].tolist() == logits.argmax(-1)[greedy].tolist()
    assert tokens[3] == 10


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(1.0, 0, 1.0, 0), (0.6, 0, 1.0, 0), (1.0, 7, 1.0, 0), (1.3, 12, 0.8, 0), (1.0, 0, 1.0, 0.2), (1.3, 9, 0.9, 0.1)],
)
def test_distribution(temperature, top_k, top_p, min_p):
    count = 16384
    logits = logits_of(1, seed=5)
    scaled = logits[0] / np.float32(temperature)
    expected = np.where(allowed(scaled, top_k, top_p, min_p), softmax(scaled), 0)
    expected /= expected.sum()
    options = rows(count, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=3)
    options = options.replace(position=np.arange(count, dtype=np.int32))
    tokens = np.asarray(DRAW(np.repeat(logits, count, axis=0), options))
    found = np.bincount(tokens, minlength=VOCAB) / count
    assert not found[expected == 0].any()
    # Five standard deviations of a share.
    np.testing.assert_array_less(np.abs(found - expected), 5 * np.sqrt(expected * (1 - expected) / count) + 1e-9)


def test_candidates_against_sorting():
    count = 200
    random = np.random.default_rng(1)
    scaled = logits_of(count, seed=2, scale=3.0)
    top_k = random.integers(0, VOCAB + 5, count).astype(np.int32)
    top_p = np.where(random.random(count) < 0.2, 1.0, random.uniform(0.01, 1, count)).astype(np.float32)
    min_p = np.where(random.random(count) < 0.3, 0.0, random.uniform(0, 1, count) ** 3).astype(np.float32)
    kept = np.isfinite(np.asarray(KEEP(PROBABLE(scaled, min_p), top_k, top_p)))
    for row in range(count):
        expected = allowed(scaled[row], int(top_k[row]), float(top_p[row]), float(min_p[row]))
        np.testing.assert_array_equal(kept[row], expected, err_msg=f"{top_k[row]=} {top_p[row]=}")


def test_ties_at_the_threshold_are_all_kept():
    scaled = jnp.array([[3.0, 1.0, 1.0, 1.0, -jnp.inf, -1.0]])
    for top_k, top_p, expected in [(2, 1.0, 4), (1, 1.0, 1), (0, 0.8, 4), (0, 1e-6, 1), (5, 1.0, 5), (0, 1.0, 5)]:
        kept = KEEP(scaled, jnp.array([top_k]), jnp.array([top_p], jnp.float32))
        assert int(jnp.isfinite(kept).sum()) == expected, (top_k, top_p)


def test_min_p_of_one_keeps_the_most_probable_and_of_zero_all():
    scaled = jnp.array([[1.0, 3.0, 3.0, 2.9999]] * 2)
    kept = np.isfinite(np.asarray(PROBABLE(scaled, np.array([1, 0], np.float32))))
    assert kept.tolist() == [[False, True, True, False], [True] * 4]


def test_most_probable_tokens_are_sorted_and_cost_nothing_when_nobody_asks():
    logits = logits_of(6)
    logits[2, [10, 20, 30]] = 99.0
    tokens, values = (np.asarray(part) for part in TOP(logits, rows(6, num_top=[0, 3, 0, 0, 20, 0])))
    order = np.argsort(-logits, axis=-1, kind="stable")[:, :MAX_TOP_LOGPROBS]
    np.testing.assert_array_equal(tokens, order)
    np.testing.assert_array_equal(values, np.take_along_axis(logits, order, axis=-1))
    assert tokens[2, :3].tolist() == [10, 20, 30]
    tokens, values = TOP(logits, rows(6))
    assert not np.asarray(tokens).any() and not np.asarray(values).any()
    tokens, _ = jax.jit(top_tokens)(logits[:, :7], rows(6, num_top=1))
    assert tokens.shape == (6, 7)


def test_a_draw_depends_on_its_key_and_row_alone():
    count = 64
    random = np.random.default_rng(4)
    options = {
        "temperature": random.choice([0.0, 0.7, 1.5], count),
        "top_k": random.choice([0, 3, 20], count),
        "top_p": random.choice([1.0, 0.9, 0.3], count),
        "min_p": random.choice([0.0, 0.05, 0.5], count),
        "seed": random.integers(0, 2**32, count),
        "choice": random.integers(0, 3, count),
        "position": random.integers(0, 30000, count),
    }
    logits = logits_of(count)
    tokens = np.asarray(DRAW(logits, rows(count, **options)))
    order = random.permutation(count)
    moved = np.asarray(DRAW(logits[order], rows(count, **{name: value[order] for name, value in options.items()})))
    np.testing.assert_array_equal(moved, tokens[order])
    alone = [DRAW(logits[i : i + 1], rows(1, **{n: v[i] for n, v in options.items()}))[0] for i in range(0, count, 8)]
    assert [int(token) for token in alone] == tokens[::8].tolist()


def test_keys_differ_by_seed_choice_and_position():
    seeds, choices, positions = (grid.ravel() for grid in np.meshgrid([0, 1, 2**32 - 1], [0, 1, 2], [0, 1, 2]))
    keys = row_keys(rows(27, seed=seeds, choice=choices, position=positions))
    assert len({tuple(key) for key in np.asarray(jax.random.key_data(keys)).tolist()}) == 27


def test_no_option_recompiles():
    logits = logits_of(5)
    DRAW(logits, rows(5))
    before = DRAW._cache_size()
    for options in (
        {"temperature": 0.0},
        {"top_k": 3},
        {"top_p": 0.5},
        {"seed": 9, "choice": 2},
        {"position": 7},
        {"min_p": 0.1},
    ):
        DRAW(logits, rows(5, **options))
    assert DRAW._cache_size() == before
