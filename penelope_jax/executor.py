"""Runs step plans on a device.

The executor owns the one handle to the KV pool. `dispatch` hands a step to the device and returns at once; the pool it
was given is consumed, so there is always exactly one valid handle. What a step sampled stays on the device as input of
the next, and reaches the host in `collect`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from penelope_jax import pool_bytes
from penelope_jax.batch import Buckets, ForwardBatch, build_batch, padding_batch
from penelope_jax.config import EngineConfig, check_page_size
from penelope_jax.forward import POOL_SPEC, StepOutputs, StepSettings, forward_step
from penelope_jax.host_pages import HostPages, check_pages
from penelope_jax.kernels.page_copy import PAGE_BUCKETS, gather_pages, padded_ids, padded_pages, scatter_pages
from penelope_jax.kernels.paged_attention import fitting_implementation
from penelope_jax.kernels.q_tiles import decode_q_tile, prefill_q_tile, tiles_agree
from penelope_jax.models.config import ModelConfig
from penelope_jax.models.layers import Params
from penelope_jax.moves import Move
from penelope_jax.sampling_slots import put_slot, slot_of, slots_like
from penelope_jax.segments import SamplingParams, Segment, SlotStart, StepDone, StepPlan
from penelope_jax.transfer import PageTransfer, TransferStats
from penelope_jax.transfer_faults import TransferFaults


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PendingStep:
    """A step on its way.

    Attributes:
        step: the plan's number.
        num_samples: samples of it.
        top_logprobs: how many of the most probable tokens are wanted with each.
        score_rows: half-open spans of rows, one for each segment with targets.
        outputs: arrays on the device, perhaps not computed yet.
    """

    step: int
    num_samples: int
    top_logprobs: int
    score_rows: tuple[tuple[int, int], ...]
    outputs: StepOutputs


class JaxExecutor:
    """Holds the parameters and the KV pool, and runs plans.

    Attributes:
        buckets: the shapes it compiles.
        kv_pool: the current handle of the pool, [P, L, 2, K, page_size, H]; consumed by every dispatch.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        *,
        num_pages: int,
        page_size: int = 64,
        max_context: int,
        max_segments: int,
        max_step_tokens: int,
        token_buckets: tuple[int, ...] | None = None,
        deterministic: bool = False,
        scoring: bool = False,
        implementation: str | None = None,
        mesh: Mesh | None = None,
        num_host_pages: int = 0,
        max_moving_pages: int | None = None,
        faults: TransferFaults | None = None,
    ):
        """Allocates the pool, filled with zeros.

        Args:
            config: the model.
            params: its parameters, placed on a mesh.
            num_pages: pages of the pool.
            page_size: tokens a page.
            max_context: longest history, in tokens.
            max_segments: most segments of a step.
            max_step_tokens: most tokens of a step.
            token_buckets: numbers of rows to compile for; by default chosen from the limits.
            deterministic: results do not depend on the batch; see `forward.py`.
            scoring: whether plans may ask for log-probabilities of given tokens.
            implementation: of attention; by default the platform's, as far as it takes the model.
            mesh: by default the one the parameters lie on.
            num_host_pages: host page ids of moves are below it.
            max_moving_pages: most pages moving at once; None: any number.
            faults: what goes wrong with moves, for tests.
        """
        check_page_size(page_size)
        for name, value in (
            ("num_pages", num_pages),
            ("max_context", max_context),
            ("max_segments", max_segments),
            ("max_step_tokens", max_step_tokens),
        ):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1.")
        implementation = fitting_implementation(
            implementation, head_dim=config.head_dim, page_size=page_size, dtype=config.dtype
        )
        if token_buckets is None:
            token_buckets = default_token_buckets(max_segments, max_step_tokens, deterministic=deterministic)
        if token_buckets[-1] < max_step_tokens:
            raise ValueError(f"{max_step_tokens=} needs a bucket as large; {token_buckets=}.")
        if mesh is None:
            sharding = params.embed.sharding
            if not isinstance(sharding, NamedSharding):
                raise ValueError(f"params lie on {sharding}; they need a NamedSharding, or pass a mesh.")
            mesh = cast(Mesh, sharding.mesh)
        self.config = config
        self.params = params
        self.num_pages = num_pages
        self.page_size = page_size
        self.max_segments = max_segments
        self.max_step_tokens = max_step_tokens
        self.scoring = scoring
        self.settings = StepSettings(mesh=mesh, implementation=implementation, deterministic=deterministic)
        self.buckets = Buckets(
            page_size=page_size,
            max_pages=-(-max_context // page_size),
            max_segments=max_segments,
            token_buckets=token_buckets,
            **q_tiles(config, page_size, implementation, deterministic=deterministic),
        )
        shape = (num_pages, config.num_layers, 2, config.num_kv_heads, page_size, config.head_dim)
        self._sharding = NamedSharding(mesh, POOL_SPEC)
        self._transfer = PageTransfer(
            HostPages(shape[1:], jnp.dtype(config.dtype), self._sharding, num_host_pages),
            self._sharding,
            num_device_pages=num_pages,
            max_moving_pages=max_moving_pages,
            faults=faults,
        )
        self.kv_pool = _zeros(shape, config.dtype, self._sharding)
        replicated = NamedSharding(mesh, PartitionSpec())
        self._last_samples = _zeros((max_segments,), "int32", replicated)
        shapes = slots_like(max_segments, config.vocab_size)
        self._slots = jax.tree.map(lambda like: _zeros(like.shape, like.dtype.name, replicated), shapes)

    @classmethod
    def for_engine(cls, engine: EngineConfig, config: ModelConfig, params: Params, **options: Any) -> "JaxExecutor":
        """Returns an executor with room for all that an engine of this configuration plans; `options` add or override."""
        sizes: dict[str, Any] = {
            "num_pages": engine.num_device_pages,
            "page_size": engine.page_size,
            "max_context": engine.max_context,
            "max_segments": engine.max_step_segments,
            "max_step_tokens": engine.max_step_tokens,
            "num_host_pages": engine.num_host_pages + engine.num_swap_pages,
        }
        return cls(config, params, **(sizes | options))

    @property
    def num_compilations(self) -> int:
        """Programs of the step, and of copies of pages, compiled in this process."""
        return sum(cast(Any, function)._cache_size() for function in (forward_step, gather_pages, scatter_pages))

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> int:
        """Compiles the step for every bucket, and what reads and copies pages.

        Args:
            progress: called with (programs done, programs in all), first with (0, all).

        Returns:
            How many programs of the step there are.
        """
        shapes = [(rows, False) for rows in self.buckets.token_buckets]
        if self.scoring:
            shapes += [(rows, True) for rows in self.buckets.token_buckets]
        for index, (num_rows, scoring) in enumerate(shapes):
            if progress is not None:
                progress(index, len(shapes))
            outputs = self._start(padding_batch(self.buckets, num_rows, scoring=scoring))
            jax.block_until_ready(outputs)
        self.read_pages([0])
        self._start_slot(0, SamplingParams(), SlotStart(np.zeros(0, np.int32), 0))
        self._transfer.warm_up(lambda: self.kv_pool, self._put_pages)
        if progress is not None:
            progress(len(shapes), len(shapes))
        return len(shapes)

    def dispatch(self, plan: StepPlan) -> PendingStep:
        """Starts a step and does not wait for it.

        Raises:
            ValueError: the plan does not fit the buckets, the pool or the vocabulary; nothing has started then.
        """
        scored = tuple(segment.targets is not None for segment in plan.segments)
        if any(scored) and not self.scoring:
            raise ValueError(f"step {plan.step} scores tokens; this executor was made with scoring=False.")
        batch = build_batch(plan, self.buckets, self.num_pages)
        starts = [segment for segment in plan.segments if segment.slot_start is not None]
        for segment in starts:
            self._check_slot_start(plan.step, segment)
        for segment in starts:
            assert segment.sample is not None and segment.slot_start is not None, "checked when the batch was built"
            self._start_slot(segment.slot, segment.sample, segment.slot_start)
        stops = np.cumsum([segment.stop - segment.start for segment in plan.segments]).tolist()
        spans = zip([0, *stops[:-1]], stops, strict=True) if stops else ()
        return PendingStep(
            step=plan.step,
            num_samples=plan.num_samples,
            top_logprobs=plan.top_logprobs,
            score_rows=tuple(span for span, wanted in zip(spans, scored, strict=True) if wanted),
            outputs=self._start(batch),
        )

    def collect(self, pending: PendingStep, time_s: float = 0.0) -> StepDone:
        """Waits for a step and brings what it produced to the host.

        Args:
            pending: what `dispatch` returned.
            time_s: put into the event as it is.
        """
        outputs, number = pending.outputs, pending.top_logprobs
        best = (outputs.top_tokens, outputs.top_logprobs) if number else ()  # else they stay where they are
        tokens, logprobs, scores, *best = jax.device_get((outputs.tokens, outputs.logprobs, outputs.scores, *best))
        samples = slice(pending.num_samples)
        top_tokens, top_logprobs = (np.array(part[samples, :number]) for part in best) if best else (None, None)
        return StepDone(
            step=pending.step,
            tokens=np.array(tokens[samples]),
            logprobs=np.array(logprobs[samples]),
            scores=tuple(np.array(scores[start:stop]) for start, stop in pending.score_rows),
            time_s=time_s,
            top_tokens=top_tokens,
            top_logprobs=top_logprobs,
        )

    def run(self, plan: StepPlan, time_s: float = 0.0) -> StepDone:
        """Runs a step and waits for it."""
        return self.collect(self.dispatch(plan), time_s)

    def start_moves(self, moves: Sequence[Move]) -> None:
        """Starts moves between the tiers, in order, behind the steps dispatched so far; waits for none.

        Raises:
            ValueError: a move cannot be, or too many pages would be moving; nothing has started then.
        """
        self._check_pool()
        self._transfer.start(self.kv_pool, moves)

    def finish_moves(self, *, wait: bool = False) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ends the moves that have arrived; steps dispatched from now on find the loaded pages in the pool.

        Args:
            wait: whether to wait until at least one move has ended. Without any under way it returns at once.

        Returns:
            Ids of moves that are done, and of those that failed, each in order of start; each is told once.
        """
        self._check_pool()
        return self._transfer.finish(self._put_pages, wait=wait)

    def start_over(self) -> None:
        """Forgets host pages and what was counted of moves, for another engine; none may be under way."""
        self._transfer.start_over()

    @property
    def num_moving_pages(self) -> int:
        """Pages of moves that have not ended."""
        return self._transfer.num_moving_pages

    @property
    def transfer_stats(self) -> TransferStats:
        """What was moved, and who stood still for it, since `start_over`."""
        return self._transfer.stats

    @property
    def host_pages(self) -> HostPages:
        """The pages in host memory."""
        return self._transfer.host_pages

    def read_pages(self, page_ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Returns the stored bytes of pages, [n, L, 2, K, page_size, H], after all steps dispatched so far.

        Raises:
            ValueError: an id is not a page of the pool.
        """
        self._check_pool()
        return pool_bytes.read_pages(self.kv_pool, page_ids)

    def read_host_pages(self, host_ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Returns the bytes of host pages, [n, L, 2, K, page_size, H], after all moves started so far.

        Raises:
            ValueError: an id is out of range or holds nothing.
        """
        return self.host_pages.read(host_ids)

    def write_pages(self, page_ids: Sequence[int] | np.ndarray, pages: np.ndarray) -> None:
        """Puts bytes [n, L, 2, K, page_size, H], of the pool's dtype, into pages of the pool.

        Raises:
            ValueError: an id is not a page of the pool, or the pages are of another shape or dtype.
        """
        ids = np.asarray(page_ids, np.int32).reshape(-1)
        for page_id in ids.tolist():
            pool_bytes.check_page(self.kv_pool, page_id)
        check_pages(pages, len(ids), self.kv_pool.shape[1:], self.kv_pool.dtype)
        self._check_pool()
        for start in range(0, len(ids), PAGE_BUCKETS[-1]):
            part = slice(start, start + PAGE_BUCKETS[-1])
            self._put_pages(padded_ids(ids[part]), padded_pages(self.host_pages.to_device(pages[part])))

    def write_host_pages(self, host_ids: Sequence[int] | np.ndarray, pages: np.ndarray) -> None:
        """Puts bytes into host pages; see `HostPages.write`."""
        self.host_pages.write(host_ids, pages)

    def flip_bit(self, page_id: int, *, layer: int = 0, token: int = 0) -> None:
        """Flips one bit of a page, the control of a comparison of bits; see `pool_bytes.flip_bit`."""
        self._check_pool()
        self.kv_pool = pool_bytes.flip_bit(self.kv_pool, page_id, layer, token, sharding=self._sharding)

    def flip_host_bit(self, host_id: int, *, layer: int = 0, token: int = 0) -> None:
        """Flips the same bit of a host page; see `HostPages.flip_bit`."""
        self.host_pages.flip_bit(host_id, layer=layer, token=token)

    def _put_pages(self, page_ids: np.ndarray, pages: tuple[jax.Array, ...]) -> None:
        self.kv_pool = scatter_pages(self.kv_pool, page_ids, pages, sharding=self._sharding)

    def _start(self, batch: ForwardBatch) -> StepOutputs:
        self._check_pool()
        # An interrupt between the call and the assignment loses the pool; `_check_pool` then says so.
        self.kv_pool, self._slots, outputs = forward_step(
            self.config, self.settings, self.params, self.kv_pool, batch, self._last_samples, self._slots
        )
        self._last_samples = outputs.tokens
        return outputs

    def _start_slot(self, index: int, sampling: SamplingParams, start: SlotStart) -> None:
        slot = slot_of(sampling, start, self.config.vocab_size)
        replicated = NamedSharding(self.settings.mesh, PartitionSpec())
        self._slots = put_slot(self._slots, np.int32(index), slot, sharding=replicated)

    def _check_slot_start(self, step: int, segment: Segment) -> None:
        assert segment.sample is not None and segment.slot_start is not None, "checked when the batch was built"
        biased = np.array([token for token, _ in segment.sample.logit_bias], np.int64)
        for name, tokens in (("its history", segment.slot_start.tokens), ("logit_bias", biased)):
            bad = tokens[(tokens < 0) | (tokens >= self.config.vocab_size)]
            if len(bad):
                raise ValueError(
                    f"step {step}: token id {bad[0]} of {name} of request {segment.request_id} is outside "
                    f"[0, {self.config.vocab_size})."
                )

    def _check_pool(self) -> None:
        if self.kv_pool.is_deleted() or self._slots.marks.is_deleted():
            raise RuntimeError("the KV pool was lost when a step or a load was interrupted; make a new executor.")


def default_token_buckets(max_segments: int, max_step_tokens: int, *, deterministic: bool) -> tuple[int, ...]:
    """Returns numbers of rows to compile for, from a step of decodes up to the largest step.

    In deterministic mode loops end with the last row in use, so padding costs next to nothing and few buckets do.
    """
    smallest, factor = (max(128, max_segments), 16) if deterministic else (max_segments, 4)
    buckets = [min(smallest, max_step_tokens)]
    while buckets[-1] < max_step_tokens:
        buckets.append(min(max(128, buckets[-1] * factor), max_step_tokens))
    return tuple(buckets)


def q_tiles(config: ModelConfig, page_size: int, implementation: str, *, deterministic: bool) -> dict[str, int]:
    """Returns the two tile sizes of `Buckets`; in deterministic mode they are equal where their bits are not."""
    heads = (config.num_heads, config.num_kv_heads)
    large, small = prefill_q_tile(*heads), decode_q_tile(*heads)
    if deterministic and not tiles_agree(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        page_size=page_size,
        dtype=config.dtype,
        implementation=implementation,
    ):
        logging.warning(
            "On this machine tiles of %d and %d rows differ in bits: decoding uses %d.", small, large, large
        )
        small = large
    return {"q_tile": large, "decode_q_tile": small}


@functools.partial(jax.jit, static_argnames=("shape", "dtype", "sharding"))
def _zeros(shape: tuple[int, ...], dtype: str, sharding: NamedSharding) -> jax.Array:
    # Jitted, so that the first step sees the sharding in the spelling in which steps return it and compiles once.
    return jax.lax.with_sharding_constraint(jnp.zeros(shape, dtype), sharding)
