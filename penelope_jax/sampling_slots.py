"""What the device remembers of requests whose logits are changed before sampling: penalties, bias, masked endings.

Such a request has a slot, a row of a few dense arrays over the vocabulary. The slot is filled once, when the request
samples first, from tokens that the host knows. From then on each step counts the token that it feeds, the sample of
the step before, so a token in flight counts although the host has not heard of it. Requests without a slot cost
nothing but the slots' memory.

Letters: R rows, S slots, V vocabulary.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import NamedSharding

from penelope_jax.sampling import Array, SamplingRows
from penelope_jax.segments import SamplingParams, SlotStart

IN_PROMPT, ENDS, ONE_OUTPUT = 1, 2, 4  # the parts of a mark


@struct.dataclass
class Slots:
    """The memory of S requests.

    The leading axis of one is for jax, which gives results of rank 2 the sharding of the first parameter, where that
    means the same, and compiles the step again when it gets back what is spelt otherwise.
    """

    marks: Array  # i32[1, S, V]: IN_PROMPT | ENDS | ONE_OUTPUT * times that the output holds the token
    bias: Array  # f32[1, S, V], added to the logits
    penalties: Array  # f32[1, S, 3]: repetition, presence, frequency
    limits: Array  # i32[1, S, 2]: first position of the output, first position where ending tokens are allowed


def slots_like(num_slots: int, vocab_size: int) -> Slots:
    """Returns shapes and dtypes of `num_slots` slots."""
    first = (1, num_slots)

    def empty() -> Slots:
        return Slots(
            marks=jnp.zeros((*first, vocab_size), jnp.int32),
            bias=jnp.zeros((*first, vocab_size), jnp.float32),
            penalties=jnp.zeros((*first, 3), jnp.float32),
            limits=jnp.zeros((*first, 2), jnp.int32),
        )

    return jax.eval_shape(empty)


def slot_of(sampling: SamplingParams, start: SlotStart, vocab_size: int) -> Slots:
    """Returns what to put into a slot, without the first two axes.

    Args:
        sampling: how the request samples. Ending tokens that are not in the vocabulary are never sampled.
        start: its history.
        vocab_size: V; tokens of the history and of the bias are below it.
    """
    outputs = start.tokens[start.prompt_len :]
    marks = (np.bincount(outputs, minlength=vocab_size) * ONE_OUTPUT).astype(np.int32)
    marks[start.tokens[: start.prompt_len]] |= IN_PROMPT
    marks[[token for token in sampling.end_token_ids if 0 <= token < vocab_size]] |= ENDS
    bias = np.zeros(vocab_size, np.float32)
    for token, value in sampling.logit_bias:
        bias[token] = value
    penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    return Slots(
        marks=marks,
        bias=bias,
        penalties=np.array(penalties, np.float32),
        limits=np.array([start.prompt_len, start.prompt_len + sampling.min_tokens], np.int32),
    )


@functools.partial(jax.jit, static_argnames=("sharding",), donate_argnames=("slots",))
def put_slot(slots: Slots, index: Array, slot: Slots, *, sharding: NamedSharding) -> Slots:
    """Returns the slots with one of them replaced; `slots` is consumed."""
    slots = jax.tree.map(lambda whole, one: whole.at[0, index].set(one), slots, slot)
    return jax.lax.with_sharding_constraint(slots, sharding)


def count_tokens(slots: Slots, rows: SamplingRows, tokens: jax.Array) -> Slots:
    """Marks in each row's slot the token that the row's sample follows; rows without a slot mark nothing.

    Args:
        slots: before the step.
        rows: the R rows; no two have the same slot.
        tokens: i32[R].
    """
    index = jnp.maximum(rows.slot, 0)
    mark = slots.marks[0, index, tokens]
    is_output = rows.position - 1 >= slots.limits[0, index, 0]
    mark = jnp.where(is_output, mark + ONE_OUTPUT, mark | IN_PROMPT)
    nowhere = slots.marks.shape[1]
    marks = jnp.asarray(slots.marks).at[0, jnp.where(rows.slot >= 0, index, nowhere), tokens].set(mark, mode="drop")
    return dataclasses.replace(slots, marks=marks)


def adjusted(logits: jax.Array, rows: SamplingRows, slots: Slots) -> jax.Array:
    """Changes the logits of rows that have a slot: adds the bias, then penalises, then masks ending tokens.

    Args:
        logits: f32[R, V].
        rows: the R rows.
        slots: with all tokens up to the samples counted.
    """

    def change() -> jax.Array:
        index = jnp.maximum(rows.slot, 0)
        marks = slots.marks[0, index]
        repetition, presence, frequency = (slots.penalties[0, index, i][:, None] for i in range(3))
        num_outputs = marks // ONE_OUTPUT
        x = logits + slots.bias[0, index]
        seen = (num_outputs > 0) | (marks & IN_PROMPT != 0)
        x = jnp.where(seen, jnp.where(x > 0, x / repetition, x * repetition), x)
        x = x - frequency * num_outputs - jnp.where(num_outputs > 0, presence, 0.0)
        too_early = (rows.position < slots.limits[0, index, 1])[:, None] & (marks & ENDS != 0)
        return jnp.where((rows.slot >= 0)[:, None], jnp.where(too_early, -jnp.inf, x), logits)

    return jax.lax.cond(jnp.any(rows.slot >= 0), change, lambda: logits)
