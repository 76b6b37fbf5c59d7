"""The jitted step of a model with random weights on one device: what parts of `device_check.py` that run steps share."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from penelope_jax.batch import Buckets, ForwardBatch, build_batch, padding_batch
from penelope_jax.experiments.device_host import Host, Program
from penelope_jax.forward import POOL_SPEC, StepOutputs, StepSettings, forward_step
from penelope_jax.kernels.q_tiles import decode_q_tile, prefill_q_tile
from penelope_jax.models.config import ModelConfig
from penelope_jax.models.layers import Params, parameter_shapes
from penelope_jax.models.random_weights import PRESETS
from penelope_jax.sampling_slots import slots_like
from penelope_jax.segments import SamplingParams, Segment, SegmentKind, StepPlan

QWEN3_8B = PRESETS["qwen3-8b"]
TINY = PRESETS["tiny"]


def few_layers(num_layers: int) -> ModelConfig:
    """Returns layers of Qwen3-8B with a vocabulary so small that the head costs nothing beside them."""
    return dataclasses.replace(QWEN3_8B, num_layers=num_layers, vocab_size=1024)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSizes:
    """Shapes of the steps of a model.

    Attributes:
        name: of the model, for programs' names.
        config: the model.
        num_pages: of the pool.
        page_size: tokens.
        max_context: of a history, tokens.
        max_segments: of a step.
        rows: numbers of rows of a step, ascending.
        deterministic: see `forward.py`.
    """

    name: str
    config: ModelConfig
    num_pages: int
    page_size: int
    max_context: int
    max_segments: int
    rows: tuple[int, ...]
    deterministic: bool = False

    @property
    def pool_shape(self) -> tuple[int, ...]:
        config = self.config
        return (self.num_pages, config.num_layers, 2, config.num_kv_heads, self.page_size, config.head_dim)

    @property
    def pages_per_history(self) -> int:
        return self.max_context // self.page_size

    def buckets(self) -> Buckets:
        heads = (self.config.num_heads, self.config.num_kv_heads)
        return Buckets(
            page_size=self.page_size,
            max_pages=self.pages_per_history,
            max_segments=self.max_segments,
            token_buckets=self.rows,
            q_tile=prefill_q_tile(*heads),
            decode_q_tile=decode_q_tile(*heads),
        )


def step_program(host: Host, sizes: StepSizes, num_rows: int) -> Program:
    """Returns the step for one number of rows: (params, pool, batch, last samples, slots), pool and slots consumed."""
    settings = StepSettings(mesh=host.mesh, implementation=host.implementation, deterministic=sizes.deterministic)
    batch = padding_batch(sizes.buckets(), num_rows, scoring=False)

    def abstract(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: host.like(leaf.shape, leaf.dtype), tree)

    return Program(
        name=f"step of {sizes.name}, {num_rows} rows{', deterministic' if sizes.deterministic else ''}",
        function=functools.partial(forward_step, sizes.config, settings),
        arguments=[
            abstract(parameter_shapes(sizes.config)),
            host.like(sizes.pool_shape, sizes.config.dtype, POOL_SPEC),
            abstract(batch),
            host.like((sizes.max_segments,), "int32"),
            abstract(slots_like(sizes.max_segments, sizes.config.vocab_size)),
        ],
        donate=(1, 4),
    )


class StepWorld:
    """A model on the device, with a pool of random K/V.

    Attributes:
        pool: [P, L, 2, K, page_size, H]; consumed by every step.
    """

    def __init__(self, host: Host, sizes: StepSizes, seed: int = 0):
        self.sizes = sizes
        self._host = host
        self._steps = {rows: host.compile(step_program(host, sizes, rows)) for rows in sizes.rows}
        self._params = random_params(host, sizes.config, seed)
        self.pool = host.normal(sizes.pool_shape, sizes.config.dtype, seed + 1)
        shapes = slots_like(sizes.max_segments, sizes.config.vocab_size)
        self._slots = host.put(jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), shapes))
        self._last = host.put(jnp.zeros(sizes.max_segments, jnp.int32))
        order = np.random.default_rng(seed).permutation(sizes.num_pages).astype(np.int32)
        whole = sizes.num_pages // sizes.pages_per_history
        self.histories = order[: whole * sizes.pages_per_history].reshape(whole, -1)
        self.spare_pages = order[self.histories.size :]
        self._tokens = np.random.default_rng(seed).integers(
            0, sizes.config.vocab_size, (max(whole, 1), sizes.max_context), dtype=np.int32
        )

    def segment(
        self, history: int, start: int, stop: int, *, sample: bool = False, pages: np.ndarray | None = None
    ) -> Segment:
        """Returns positions [start, stop) of a history, on its own pages or on others."""
        return Segment(
            request_id=history,
            kind=SegmentKind.REAL if sample else SegmentKind.PHANTOM,
            start=start,
            stop=stop,
            tokens=self._tokens[history, start:stop],
            page_table=self.histories[history] if pages is None else pages,
            write_from=start,
            sample=SamplingParams() if sample else None,
        )

    def batch(self, segments: Sequence[Segment]) -> ForwardBatch:
        """Returns a step, on the device."""
        plan = StepPlan(step=0, segments=tuple(segments))
        return self._host.put(build_batch(plan, self.sizes.buckets(), self.sizes.num_pages))

    def batches(self, history: int, spans: Sequence[tuple[int, int]]) -> list[ForwardBatch]:
        """Returns the steps that compute spans in order; the last one samples. See `fill_steps`."""
        steps = fill_steps(spans, self.sizes.rows)
        return [
            self.batch([self.segment(history, *span, sample=step is steps[-1] and span is step[-1]) for span in step])
            for step in steps
        ]

    def run(self, batches: Sequence[ForwardBatch]) -> StepOutputs:
        """Starts steps one behind the other; returns the outputs of the last."""
        outputs = None
        for batch in batches:
            step = self._steps[batch.tokens.shape[0]]
            self.pool, self._slots, outputs = step(self._params, self.pool, batch, self._last, self._slots)
        assert outputs is not None, "at least one step"
        return outputs


def fill_steps(spans: Sequence[tuple[int, int]], rows: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Cuts spans into steps without padding, the largest that are full first.

    Args:
        spans: half open, in order.
        rows: numbers of rows of a step, ascending.

    Raises:
        ValueError: the spans do not fill steps.
    """
    left = sum(stop - start for start, stop in spans)
    pending, steps = list(spans), []
    while left:
        size = next((size for size in reversed(rows) if size <= left), None)
        if size is None:
            raise ValueError(f"{left} tokens of {spans} are left over; steps have {tuple(rows)} rows.")
        left -= size
        step = []
        while size:
            start, stop = pending.pop(0)
            end = min(stop, start + size)
            step.append((start, end))
            size -= end - start
            if end < stop:
                pending.insert(0, (end, stop))
        steps.append(step)
    return steps


def random_params(host: Host, config: ModelConfig, seed: int) -> Params:
    """Draws weights on the device, which is faster than `random_weights` and not the same on every machine."""
    paths, tree = jax.tree.flatten_with_path(parameter_shapes(config))
    leaves = []
    for number, (path, like) in enumerate(paths):
        name = path[-1].name
        if name.endswith("_norm"):
            leaves.append(host.put(jnp.ones(like.shape, like.dtype)))
        else:
            scale = 1.0 if name == "embed" else like.shape[-2] ** -0.5
            leaves.append(_weights(like.shape, like.dtype.name, scale, seed * len(paths) + number, host.sharding()))
    return jax.tree.unflatten(tree, leaves)


@functools.partial(jax.jit, static_argnums=(0, 1, 4))
def _weights(shape: tuple[int, ...], dtype: str, scale: float, seed: int, sharding: Any) -> jax.Array:
    """Draws matrix by matrix, so that float32 values of all layers are never there at once."""
    keys = jax.random.split(jax.random.key(seed, impl="unsafe_rbg"), shape[0] if len(shape) == 3 else 1)

    def draw(key):
        return (jax.random.normal(key, shape[-2:], jnp.float32) * scale).astype(dtype)

    return jax.lax.with_sharding_constraint(jax.lax.map(draw, keys).reshape(shape), sharding)
