"""The jitted step: one function for prompts, refilled holes, decodes and scored rows.

In each layer all K/V of the batch are written first and attention reads nothing but pages, so a real segment finds
the phantom rows of the same step in its pages like any other token.

In deterministic mode a row's result does not depend on what else is in the batch, on the bucket or on the row's place.
XLA picks code by shape, so everything row-wise runs over tiles of fixed shape, in loops whose number of turns is data
(a loop of one turn would otherwise be inlined and fused with its surroundings); sampling runs row by row.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from penelope_jax.batch import ForwardBatch
from penelope_jax.kernels.kv_write import write_kv
from penelope_jax.kernels.paged_attention import ragged_paged_attention
from penelope_jax.models import layers
from penelope_jax.models.config import ModelConfig
from penelope_jax.models.layers import Params
from penelope_jax.sampling import Array, SamplingRows, sample, top_tokens
from penelope_jax.sampling_slots import Slots, adjusted, count_tokens

POOL_SPEC = PartitionSpec(None, None, None, "tensor", None, None)  # of [P, L, 2, K, page_size, H]
HEADS_SPEC = PartitionSpec(None, "tensor", None)  # of [T, N or K, H]

# Rows of a tile in deterministic mode. Any fixed number is exact: on CPU a row's bits depend on the shape alone, not on
# its place or its neighbours (tiles of 16 to 128 rows, widths 64 to 4,096, float32 and bfloat16). Measured 2026-11-29
# on 2 cores of a busy AMD EPYC (AVX512), jax 0.12.0.1, shortest times of interleaved runs, tiles of 16 / 32 / 64 / 128:
#   SmolLM2-135M  prefill of 512   225 / 251 / 201 / 156 tok/s   a decode  166 / 224 / 337 / 533 ms
#   model B       prefill to 16K  5.5K / 5.3K / 4.9K / 5.0K      a decode at 16K  11 / 11 / 11 / 10 ms
ROW_TILE = 32
HEAD_TILE = 32  # of the logits


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepSettings:
    """What is fixed for every step of an executor; a static argument of `forward_step`.

    Attributes:
        mesh: devices, with axes `data` and `tensor`.
        implementation: of attention.
        deterministic: see the module's text.
    """

    mesh: Mesh
    implementation: str
    deterministic: bool


@struct.dataclass
class StepOutputs:
    """What a step returns besides the pool."""

    tokens: jax.Array  # i32[S], samples in the order of the segments that sample
    logprobs: jax.Array  # f32[S], of those tokens under the untempered distribution
    top_tokens: jax.Array  # i32[S, K], the most probable tokens, best first; zeros when no sample asks for any
    top_logprobs: jax.Array  # f32[S, K], of these
    scores: jax.Array  # f32[T], log-probabilities of the targets, NaN where there is none; f32[0] without targets


@functools.partial(jax.jit, static_argnames=("config", "settings"), donate_argnames=("kv_pool", "slots"))
def forward_step(
    config: ModelConfig,
    settings: StepSettings,
    params: Params,
    kv_pool: jax.Array,
    batch: ForwardBatch,
    last_samples: jax.Array,
    slots: Slots,
) -> tuple[jax.Array, Slots, StepOutputs]:
    """Computes one step.

    Args:
        config: the model.
        settings: what all steps share.
        params: the model's parameters.
        kv_pool: [P, L, 2, K, page_size, H]. Consumed: the array passed in is deleted.
        batch: the step.
        last_samples: i32[S], `StepOutputs.tokens` of the step before.
        slots: what sampling remembers of requests. Consumed, like the pool.

    Returns:
        The pool with the K/V of the batch, the slots with its tokens counted, and the outputs.
    """
    by_tiles = settings.deterministic

    def row_wise(function, *rows):
        return map_row_tiles(function, batch.num_tokens, ROW_TILE, *rows) if by_tiles else function(*rows)

    def layer_step(carry, layer_and_index):
        x, kv_pool = carry
        layer, index = layer_and_index
        with jax.named_scope("qkv"):
            q, k, v = row_wise(functools.partial(layers.qkv, config, layer), x, batch.positions)
        kv_pool, attended = write_and_attend(config, settings, kv_pool, index, q, k, v, batch)
        with jax.named_scope("mix"):
            x = row_wise(functools.partial(layers.mix, config, layer), x, attended)
        return (x, kv_pool), None

    fed = jnp.asarray(batch.feed) >= 0
    tokens = jnp.where(fed, last_samples[jnp.maximum(batch.feed, 0)], batch.tokens)
    x = layers.embed(config, params, tokens)
    steps = (params.layers, jnp.arange(config.num_layers, dtype=jnp.int32))
    (x, kv_pool), _ = jax.lax.scan(layer_step, (x, kv_pool), steps)

    slots = count_tokens(slots, batch.sampling, tokens[batch.sample_rows])
    outputs = StepOutputs(
        *draw_samples(config, params, x[batch.sample_rows], batch.sampling, slots, batch.num_samples, by_tiles),
        scores=score_rows(config, params, x, batch.targets, batch.num_tokens),
    )
    replicated = NamedSharding(settings.mesh, PartitionSpec())
    kv_pool = jax.lax.with_sharding_constraint(kv_pool, NamedSharding(settings.mesh, POOL_SPEC))
    slots, outputs = jax.lax.with_sharding_constraint((slots, outputs), replicated)
    return kv_pool, slots, outputs


def map_row_tiles(function: Callable[..., Any], num_rows: Array, tile: int, *rows: Any) -> Any:
    """Applies a row-wise function to tiles of `tile` rows, up to the tile that holds row `num_rows` - 1.

    Args:
        function: takes and returns pytrees of arrays with a leading axis of `tile` rows.
        num_rows: i32[], rows in use.
        tile: rows of a tile.
        *rows: pytrees of arrays with a leading axis of T rows.

    Returns:
        What `function` returns, with a leading axis of T rows. Rows of tiles not in use are zero.
    """
    total = jax.tree.leaves(rows)[0].shape[0]
    padded = -(-total // tile) * tile
    rows = jax.tree.map(lambda a: jnp.pad(a, [(0, padded - total)] + [(0, 0)] * (a.ndim - 1)), rows)

    def apply_tile(index, out):
        taken = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, index * tile, tile), rows)
        return jax.tree.map(
            lambda whole, part: jax.lax.dynamic_update_slice_in_dim(whole, part, index * tile, axis=0),
            out,
            function(*taken),
        )

    one = jax.eval_shape(function, *jax.tree.map(lambda a: jax.ShapeDtypeStruct((tile, *a.shape[1:]), a.dtype), rows))
    out = jax.tree.map(lambda a: jnp.zeros((padded, *a.shape[1:]), a.dtype), one)
    out = jax.lax.fori_loop(0, (num_rows + tile - 1) // tile, apply_tile, out)
    return jax.tree.map(lambda a: a[:total], out)


def write_and_attend(
    config: ModelConfig,
    settings: StepSettings,
    kv_pool: jax.Array,
    layer: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    batch: ForwardBatch,
) -> tuple[jax.Array, jax.Array]:
    """Writes the batch's K/V of one layer, then attends from pages alone. Each device does so for its own heads.

    Args:
        config: the model.
        settings: what all steps share.
        kv_pool: [P, L, 2, K, page_size, H].
        layer: i32[].
        q: [T, N, H].
        k: [T, K, H].
        v: [T, K, H].
        batch: the step.

    Returns:
        The pool, and [T, N, H].
    """

    def on_device(kv_pool, layer, q, k, v, batch):
        with jax.named_scope("write_kv"):
            kv_pool = write_kv(kv_pool, layer, k, v, batch.write_pages, batch.write_source)
        attend = functools.partial(
            ragged_paged_attention,
            q,
            kv_pool,
            layer,
            page_table=batch.page_table,
            scale=config.head_dim**-0.5,
            implementation=settings.implementation,
            deterministic=settings.deterministic,
        )
        with jax.named_scope("attention"):
            attended = attend(tiles=batch.tiles, q_tile=batch.q_tile)
            if batch.decode_tiles.shape[0]:
                # Each row is in one of the two calls and zero in the other.
                attended = attended + attend(tiles=batch.decode_tiles, q_tile=batch.decode_q_tile)
        return kv_pool, attended

    everywhere = PartitionSpec()
    return jax.shard_map(
        on_device,
        mesh=settings.mesh,
        in_specs=(POOL_SPEC, everywhere, HEADS_SPEC, HEADS_SPEC, HEADS_SPEC, everywhere),
        out_specs=(POOL_SPEC, HEADS_SPEC),
        check_vma=False,
    )(kv_pool, layer, q, k, v, batch)


def draw_samples(
    config: ModelConfig,
    params: Params,
    x: jax.Array,
    sampling: SamplingRows,
    slots: Slots,
    num_samples: Array,
    by_tiles: bool,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Samples the rows x [S, D] that left the last layer; returns the first four fields of `StepOutputs`."""

    def head(x):
        logits = layers.logits(config, params, x)
        return logits, jax.nn.logsumexp(logits, axis=-1)

    def draw(logits, log_total, sampling):
        tokens = sample(adjusted(logits, sampling, slots), sampling)
        logprobs = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0] - log_total
        best, best_logits = top_tokens(logits, sampling)
        return tokens, logprobs, best, best_logits - log_total[:, None]

    with jax.named_scope("sample"):
        if not by_tiles:
            return draw(*head(x), sampling)
        logits, log_total = map_row_tiles(head, num_samples, HEAD_TILE, x)
        return map_row_tiles(draw, num_samples, 1, logits, log_total, sampling)


def score_rows(config: ModelConfig, params: Params, x: jax.Array, targets: Array, num_tokens: Array) -> jax.Array:
    """Returns f32[T], the log-probability of each row's target, NaN where `targets` is -1; f32[0] if there are none.

    Goes by tiles in every mode: the logits of all rows at once would not fit where vocabularies are large.
    """
    if not targets.shape[0]:
        return jnp.zeros(0, jnp.float32)

    def score(x, targets):
        logits = layers.logits(config, params, x)
        target_logits = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[:, None], axis=-1)[:, 0]
        return jnp.where(targets >= 0, target_logits - jax.nn.logsumexp(logits, axis=-1), jnp.nan)

    def score_if_wanted(x, targets):
        none = jnp.full(targets.shape, jnp.nan, jnp.float32)
        return jax.lax.cond(jnp.any(targets >= 0), score, lambda x, targets: none, x, targets)

    with jax.named_scope("score"):
        return map_row_tiles(score_if_wanted, num_tokens, HEAD_TILE, x, targets)
