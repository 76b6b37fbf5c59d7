"""Draws one token from each row of logits.

Greedy and sampled rows run in the same code, and what a row draws depends on its logits, its options and its key
alone: the key comes from (seed, choice, position), never from the row's place or the step. Top-k and top-p are
thresholds found by bisection over the bits of float32, so nothing is sorted. Values equal to the threshold are all
kept, so ties can leave more than k candidates.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from penelope_jax.segments import MAX_TOP_LOGPROBS

Array = np.ndarray | jax.Array


@struct.dataclass
class SamplingRows:
    """How each row samples; see `segments.SamplingParams`. R rows."""

    temperature: Array  # f32[R]; 0 is greedy
    top_p: Array  # f32[R]; 1 keeps all
    top_k: Array  # i32[R]; 0 keeps all
    min_p: Array  # f32[R]; 0 keeps all
    seed: Array  # u32[R]
    choice: Array  # i32[R]
    position: Array  # i32[R], the position the drawn token will stand at
    slot: Array  # i32[R], see `sampling_slots.py`; -1: none
    num_top: Array  # i32[R], how many of the most probable tokens are wanted


def sample(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    """Draws a token for every row.

    Greedy rows take the first largest logit. Other rows divide by the temperature, keep what is at least `min_p` times
    as probable as the most probable, of that the `top_k` largest, of those the smallest set of largest ones whose mass
    reaches `top_p`, and draw from what is left.

    Args:
        logits: f32[R, V].
        rows: options of the R rows.

    Returns:
        i32[R], token ids.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    is_greedy = rows.temperature <= 0
    drawn = jax.lax.cond(jnp.all(is_greedy), lambda: greedy, lambda: _draw(logits, rows))
    return jnp.where(is_greedy, greedy, drawn)


def row_keys(rows: SamplingRows) -> jax.Array:
    """Returns key[R]: each row's random key, from (seed, choice, position)."""

    def one(seed, choice, position):
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), choice), position)

    return jax.vmap(one)(rows.seed, rows.choice, rows.position)


def top_tokens(logits: jax.Array, rows: SamplingRows) -> tuple[jax.Array, jax.Array]:
    """Returns the largest logits of every row, largest first, equal ones by token id.

    Args:
        logits: f32[R, V].
        rows: options of the R rows; if none wants any, nothing is looked for and all is zero.

    Returns:
        i32[R, K] token ids and f32[R, K] logits; K is MAX_TOP_LOGPROBS, or V if that is less.
    """
    num_rows, number = logits.shape[0], min(MAX_TOP_LOGPROBS, logits.shape[1])

    def find():
        values, tokens = jax.lax.top_k(logits, number)
        return tokens.astype(jnp.int32), values

    def nothing():
        return jnp.zeros((num_rows, number), jnp.int32), jnp.zeros((num_rows, number), logits.dtype)

    return jax.lax.cond(jnp.any(jnp.asarray(rows.num_top) > 0), find, nothing)


def keep_candidates(scaled: jax.Array, top_k: Array, top_p: Array) -> jax.Array:
    """Replaces by -inf what top-k, and then top-p of the rest, exclude.

    Args:
        scaled: f32[R, V], logits divided by the temperature.
        top_k: i32[R]; 0 keeps all.
        top_p: f32[R]; 1 keeps all.

    Returns:
        f32[R, V].
    """
    ordered = _ordered_bits(scaled)
    kept = _at_least(ordered, jnp.ones_like(scaled), top_k.astype(jnp.float32))
    kept = kept | (top_k == 0)[:, None]
    mass = jnp.where(kept, jnp.exp(scaled - scaled.max(axis=-1, keepdims=True)), 0.0)
    nucleus = _at_least(ordered, mass, top_p * mass.sum(axis=-1))
    return jnp.where(kept & (nucleus | (top_p >= 1)[:, None]), scaled, -jnp.inf)


def keep_probable(scaled: jax.Array, min_p: Array) -> jax.Array:
    """Replaces by -inf what is less than `min_p` times as probable as the most probable; f32[R, V], f32[R]."""
    least = scaled.max(axis=-1) + jnp.log(min_p)  # log 0 is -inf
    return jnp.where(scaled >= least[:, None], scaled, -jnp.inf)


def _draw(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    scaled = logits / jnp.where(rows.temperature > 0, rows.temperature, 1.0)[:, None]
    scaled = jax.lax.cond(jnp.any(rows.min_p > 0), lambda: keep_probable(scaled, rows.min_p), lambda: scaled)
    unrestricted = jnp.all((rows.top_k == 0) & (rows.top_p >= 1))
    scaled = jax.lax.cond(unrestricted, lambda: scaled, lambda: keep_candidates(scaled, rows.top_k, rows.top_p))
    # argmax(logits + Gumbel noise) is a draw from softmax(logits).
    noise = jax.vmap(lambda key: jax.random.gumbel(key, scaled.shape[1:]))(row_keys(rows))
    return jnp.argmax(scaled + noise, axis=-1).astype(jnp.int32)


def _at_least(ordered: jax.Array, weight: jax.Array, need: Array) -> jax.Array:
    """Marks in each row the smallest set of largest values whose weight reaches `need`; bool[R, V].

    Args:
        ordered: u32[R, V], keys in the order of the values.
        weight: f32[R, V], not negative.
        need: f32[R]; if the whole row does not reach it, all is marked.
    """

    def bisect(step, threshold):
        bit = jnp.uint32(1) << (jnp.uint32(31) - step.astype(jnp.uint32))
        candidate = threshold | bit
        reached = jnp.where(ordered >= candidate[:, None], weight, 0.0).sum(axis=-1) >= need
        return jnp.where(reached, candidate, threshold)

    threshold = jax.lax.fori_loop(0, 32, bisect, jnp.zeros(ordered.shape[:1], jnp.uint32))
    return ordered >= threshold[:, None]


def _ordered_bits(x: jax.Array) -> jax.Array:
    """Maps float32 to uint32 keys that compare as the numbers do."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits & sign, ~bits, bits | sign)
