"""Histories, plans and models for tests of the jitted step, written by hand: no engine, no cache."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from penelope_jax.executor import JaxExecutor
from penelope_jax.models import layers, random_weights
from penelope_jax.models.config import ModelConfig
from penelope_jax.models.layers import Params
from penelope_jax.segments import SamplingParams, Segment, SegmentKind, StepPlan

GREEDY = SamplingParams()
DRAWN = SamplingParams(temperature=0.8, top_p=0.9, top_k=40, seed=7, choice=1)


def geometry(num_heads: int, num_kv_heads: int, head_dim: int, hidden_size: int, dtype: str = "float32") -> ModelConfig:
    return dataclasses.replace(
        random_weights.PRESETS["tiny"],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        hidden_size=hidden_size,
        mlp_size=2 * hidden_size,
        dtype=dtype,
    )


@functools.partial(jax.jit, static_argnames="config")
def dense_logits(config: ModelConfig, params: Params, tokens: jax.Array) -> jax.Array:
    """Returns f32[T, V], what the model says of the next token at every position, attending to everything at once."""
    positions = jnp.arange(len(tokens), dtype=jnp.int32)
    x = layers.embed(config, params, tokens)
    for index in range(config.num_layers):
        layer = jax.tree.map(lambda leaf: leaf[index], params.layers)  # noqa: B023
        q, k, v = layers.qkv(config, layer, x, positions)
        k, v = (jnp.repeat(heads, config.num_heads // config.num_kv_heads, axis=1) for heads in (k, v))
        scores = jnp.einsum("qnh,knh->nqk", q, k) * config.head_dim**-0.5
        scores = jnp.where((positions[:, None] >= positions[None, :])[None], scores, -jnp.inf)
        x = layers.mix(config, layer, x, jnp.einsum("nqk,knh->qnh", jax.nn.softmax(scores, axis=-1), v))
    return layers.logits(config, params, x)


class History:
    """A token path and the pages it lies on.

    Attributes:
        tokens: i32[n].
        pages: i32[ceil(n / page_size)].
        scored: whether segments have targets; a batch with and one without are two programs.
    """

    def __init__(self, tokens: np.ndarray, pages: np.ndarray, request_id: int = 0, *, scored: bool = False):
        self.scored = scored
        self.tokens = tokens.astype(np.int32)
        self.pages = pages.astype(np.int32)
        self.request_id = request_id

    def segment(
        self,
        start: int,
        stop: int,
        kind: SegmentKind = SegmentKind.REAL,
        *,
        sample: SamplingParams | None = None,
        write_from: int | None = None,
        feed: int = -1,
    ) -> Segment:
        """Returns positions [start, stop); a scored row's target is the next token of the history."""
        targets = None
        if self.scored:
            targets = np.append(self.tokens, -1)[start + 1 : stop + 1].astype(np.int32)
        if write_from is None:
            write_from = stop if kind is SegmentKind.SCORE else start
        return Segment(
            request_id=self.request_id,
            kind=kind,
            start=start,
            stop=stop,
            tokens=np.array([-1], np.int32) if feed >= 0 else self.tokens[start:stop],
            page_table=self.pages,
            write_from=write_from,
            sample=sample,
            targets=targets,
            feed=feed,
        )


def plan(*segments: Segment, step: int = 0) -> StepPlan:
    return StepPlan(step=step, segments=segments)


def poison(executor: JaxExecutor, pages) -> None:
    """Fills pages with NaN, as if they had never been written or held something else."""
    pages = np.asarray(pages, np.int32)
    poisoned = executor.kv_pool.at[pages].set(jnp.nan)
    executor.kv_pool = jax.device_put(poisoned, executor.kv_pool.sharding)


def bits(array: np.ndarray) -> np.ndarray:
    """Returns the bytes of an array as integers, so that NaN equals NaN and -0.0 differs from 0.0."""
    array = np.ascontiguousarray(array)
    return array.view(f"u{array.dtype.itemsize}")
