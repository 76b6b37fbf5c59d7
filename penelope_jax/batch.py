"""Turns a step's plan into the arrays of one jitted call.

Segments are packed densely, one row a token, and padded to the smallest bucket of rows that holds them; everything
that says what a row is (position, page, tile, sample) is data, so a step of any mixture runs the program of its
bucket. Phantom segments differ in nothing that is visible here but `SegmentKind`, which this file does not read.

Letters: T rows of the bucket, S segments of the bucket, W pages written.
"""

import dataclasses

import numpy as np
from flax import struct

from penelope_jax.config import check_page_size
from penelope_jax.kernels.kv_write import DROP_PAGE
from penelope_jax.sampling import Array, SamplingRows
from penelope_jax.segments import Segment, StepPlan


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Buckets:
    """The shapes a step can have.

    Attributes:
        page_size: tokens a page.
        max_pages: width of the page table: pages of the longest history.
        max_segments: rows of the page table, and most samples of a step.
        token_buckets: numbers of rows, ascending; a step takes the smallest that fits.
        q_tile: rows of an attention tile.
        decode_q_tile: rows of the smaller tiles that take decodes and short ends of segments; equal to `q_tile`: none.
    """

    page_size: int
    max_pages: int
    max_segments: int
    token_buckets: tuple[int, ...]
    q_tile: int
    decode_q_tile: int

    def __post_init__(self):
        check_page_size(self.page_size)
        for name in ("max_pages", "max_segments", "q_tile", "decode_q_tile"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
        if self.decode_q_tile > self.q_tile:
            raise ValueError(f"decode_q_tile={self.decode_q_tile} must be at most q_tile={self.q_tile}.")
        buckets = self.token_buckets
        if not buckets or buckets[0] < 1 or list(buckets) != sorted(set(buckets)):
            raise ValueError(f"token_buckets={buckets} must be ascending numbers of rows, at least one.")

    def rows_for(self, num_tokens: int) -> int | None:
        """Returns the smallest bucket of at least `num_tokens` rows, or None."""
        return next((rows for rows in self.token_buckets if rows >= num_tokens), None)

    def num_tiles(self, num_rows: int) -> int:
        return min(num_rows, num_rows // self.q_tile + self.max_segments)

    def num_decode_tiles(self) -> int:
        return 0 if self.decode_q_tile == self.q_tile else self.max_segments

    def num_write_pages(self, num_rows: int) -> int:
        """Returns W. Segments start on page boundaries, except decodes, so each has at most one partial page."""
        return min(num_rows, num_rows // self.page_size + self.max_segments)


@struct.dataclass
class ForwardBatch:
    """One step. Rows behind `num_tokens` and samples behind `num_samples` are padding."""

    tokens: Array  # i32[T]
    feed: Array  # i32[T]; >= 0: the token is this sample of the step before, still on the device; else -1
    positions: Array  # i32[T]
    page_table: Array  # i32[S, max_pages], DROP_PAGE behind a segment's last position
    tiles: Array  # i32[num_tiles, 4]: segment, first row, position of that row, valid rows
    decode_tiles: Array  # i32[num_decode_tiles, 4], the same with tiles of decode_q_tile rows
    write_pages: Array  # i32[W], DROP_PAGE: none
    write_source: Array  # i32[W, page_size], row for each slot, -1: keep
    sample_rows: Array  # i32[S]
    sampling: SamplingRows  # S rows
    targets: Array  # i32[T], or i32[0] when no row is scored; -1: this row is not
    num_tokens: Array  # i32[]
    num_samples: Array  # i32[]
    q_tile: int = struct.field(pytree_node=False)
    decode_q_tile: int = struct.field(pytree_node=False)


def padding_batch(buckets: Buckets, num_rows: int, *, scoring: bool) -> ForwardBatch:
    """Returns a batch of `num_rows` rows that computes and writes nothing, in arrays of its own."""
    num_writes, num_samples = buckets.num_write_pages(num_rows), buckets.max_segments
    return ForwardBatch(
        tokens=np.zeros(num_rows, np.int32),
        feed=np.full(num_rows, -1, np.int32),
        positions=np.zeros(num_rows, np.int32),
        page_table=np.full((buckets.max_segments, buckets.max_pages), DROP_PAGE, np.int32),
        tiles=np.zeros((buckets.num_tiles(num_rows), 4), np.int32),
        decode_tiles=np.zeros((buckets.num_decode_tiles(), 4), np.int32),
        write_pages=np.full(num_writes, DROP_PAGE, np.int32),
        write_source=np.full((num_writes, buckets.page_size), -1, np.int32),
        sample_rows=np.zeros(num_samples, np.int32),
        sampling=SamplingRows(
            temperature=np.zeros(num_samples, np.float32),
            top_p=np.ones(num_samples, np.float32),
            top_k=np.zeros(num_samples, np.int32),
            min_p=np.zeros(num_samples, np.float32),
            seed=np.zeros(num_samples, np.uint32),
            choice=np.zeros(num_samples, np.int32),
            position=np.zeros(num_samples, np.int32),
            slot=np.full(num_samples, -1, np.int32),
            num_top=np.zeros(num_samples, np.int32),
        ),
        targets=np.full(num_rows if scoring else 0, -1, np.int32),
        num_tokens=np.zeros((), np.int32),
        num_samples=np.zeros((), np.int32),
        q_tile=buckets.q_tile,
        decode_q_tile=buckets.decode_q_tile,
    )


def build_batch(plan: StepPlan, buckets: Buckets, num_pages: int) -> ForwardBatch:
    """Packs a plan's segments into a batch.

    The arrays are new ones at every call: jax may read a numpy array after the call that received it returned.

    Args:
        plan: what to compute.
        buckets: the shapes there are.
        num_pages: pages of the pool.

    Raises:
        ValueError: the plan does not fit the buckets or the pool, or contradicts itself.
    """
    segments = plan.segments
    _check_sizes(plan, buckets)
    for index, segment in enumerate(segments):
        _check_segment(segment, f"segment {index} of step {plan.step}", buckets, num_pages)
    lengths = np.array([segment.stop - segment.start for segment in segments], np.int32)
    first_rows = np.cumsum(lengths) - lengths  # i64[num_segments]
    num_rows = buckets.rows_for(int(lengths.sum()))
    assert num_rows is not None, "checked above"
    batch = padding_batch(buckets, num_rows, scoring=any(segment.targets is not None for segment in segments))

    num_samples = 0
    for index, (segment, row) in enumerate(zip(segments, first_rows, strict=True)):
        rows = slice(row, row + lengths[index])
        batch.tokens[rows] = segment.tokens
        batch.feed[row] = segment.feed
        batch.positions[rows] = np.arange(segment.start, segment.stop)
        num_used = -(-segment.stop // buckets.page_size)
        batch.page_table[index, :num_used] = segment.page_table[:num_used]
        if segment.targets is not None:
            batch.targets[rows] = segment.targets
        if segment.sample is not None:
            batch.sample_rows[num_samples] = rows.stop - 1
            for name in ("temperature", "top_p", "top_k", "min_p", "seed", "choice"):
                getattr(batch.sampling, name)[num_samples] = getattr(segment.sample, name)
            batch.sampling.position[num_samples] = segment.stop
            batch.sampling.slot[num_samples] = segment.slot
            batch.sampling.num_top[num_samples] = segment.sample.top_logprobs
            num_samples += 1
    _cut_tiles(batch, segments, first_rows, lengths)
    _place_writes(batch, plan, first_rows, buckets)
    batch.num_tokens[...], batch.num_samples[...] = lengths.sum(), num_samples
    return batch


def _cut_tiles(batch: ForwardBatch, segments: tuple[Segment, ...], first_rows: np.ndarray, lengths: np.ndarray) -> None:
    """Cuts each segment into tiles from its first row on; a short end goes to the smaller tiles."""
    small = batch.decode_q_tile if len(batch.decode_tiles) else 0
    num_tiles = num_decode_tiles = 0
    for index, segment in enumerate(segments):
        offsets = np.arange(0, lengths[index], batch.q_tile)
        table = np.empty((len(offsets), 4), np.int32)
        table[:, 0] = index
        table[:, 1] = first_rows[index] + offsets
        table[:, 2] = segment.start + offsets
        table[:, 3] = np.minimum(batch.q_tile, lengths[index] - offsets)
        if table[-1, 3] <= small:
            batch.decode_tiles[num_decode_tiles] = table[-1]
            num_decode_tiles += 1
            table = table[:-1]
        batch.tiles[num_tiles : num_tiles + len(table)] = table
        num_tiles += len(table)


def _place_writes(batch: ForwardBatch, plan: StepPlan, first_rows: np.ndarray, buckets: Buckets) -> None:
    """Names the pages that get K/V, and for each of their slots the row it comes from."""
    size = buckets.page_size
    num_writes = 0
    for index, segment in enumerate(plan.segments):
        start = max(segment.start, segment.write_from)
        if start >= segment.stop:
            continue
        numbers = np.arange(start // size, -(-segment.stop // size))  # which pages of the history
        stop = num_writes + len(numbers)
        if stop > len(batch.write_pages):
            raise ValueError(
                f"step {plan.step} writes at least {stop} pages; its bucket of {len(batch.tokens)} rows holds "
                f"{len(batch.write_pages)} (segments start on page boundaries, except decodes)."
            )
        slots = numbers[:, None] * size + np.arange(size)  # positions, [pages, page_size]
        rows = np.where((slots >= start) & (slots < segment.stop), slots - segment.start + first_rows[index], -1)
        batch.write_pages[num_writes:stop] = segment.page_table[numbers]
        batch.write_source[num_writes:stop] = rows
        num_writes = stop
    pages, counts = np.unique(batch.write_pages[:num_writes], return_counts=True)
    if (counts > 1).any():
        raise ValueError(f"step {plan.step}: two segments write page {pages[counts > 1][0]}.")


def _check_sizes(plan: StepPlan, buckets: Buckets) -> None:
    if len(plan.segments) > buckets.max_segments:
        raise ValueError(
            f"step {plan.step} has {len(plan.segments)} segments; the buckets hold {buckets.max_segments}."
        )
    if buckets.rows_for(plan.num_tokens) is None:
        largest = buckets.token_buckets[-1]
        raise ValueError(f"step {plan.step} has {plan.num_tokens} tokens; the largest bucket has {largest} rows.")


def _check_segment(segment: Segment, where: str, buckets: Buckets, num_pages: int) -> None:
    length = segment.stop - segment.start
    if segment.start < 0 or length < 1:
        raise ValueError(f"{where}: span [{segment.start}, {segment.stop}) is empty or negative.")
    if len(segment.tokens) != length:
        raise ValueError(f"{where}: {len(segment.tokens)} tokens for span [{segment.start}, {segment.stop}).")
    if segment.targets is not None and len(segment.targets) != length:
        raise ValueError(f"{where}: {len(segment.targets)} targets for span [{segment.start}, {segment.stop}).")
    if segment.feed >= 0 and length != 1:
        raise ValueError(f"{where}: feed={segment.feed} needs one token, not {length}.")
    if segment.feed >= buckets.max_segments:
        raise ValueError(f"{where}: feed={segment.feed} must be below {buckets.max_segments}, the samples of a step.")
    if segment.feed < 0 and segment.tokens.min() < 0:
        raise ValueError(f"{where}: token {segment.tokens.min()} is negative and no sample is fed.")
    _check_slot(segment, where, buckets)
    num_used = -(-segment.stop // buckets.page_size)
    if num_used > buckets.max_pages:
        raise ValueError(
            f"{where}: stop={segment.stop} needs {num_used} pages; the page table holds {buckets.max_pages}."
        )
    if num_used > len(segment.page_table):
        raise ValueError(f"{where}: stop={segment.stop} needs {num_used} pages; it has {len(segment.page_table)}.")
    used = segment.page_table[:num_used]
    if used.min() < 0 or used.max() >= num_pages:
        bad = used[(used < 0) | (used >= num_pages)][0]
        raise ValueError(f"{where}: page id {bad} must be in [0, {num_pages}).")


def _check_slot(segment: Segment, where: str, buckets: Buckets) -> None:
    if segment.sample is not None and segment.sample.needs_slot and segment.slot < 0:
        raise ValueError(f"{where}: slot={segment.slot}, but its sampling needs one in [0, {buckets.max_segments}).")
    if segment.slot >= buckets.max_segments:
        raise ValueError(f"{where}: slot={segment.slot} must be below {buckets.max_segments}, the slots there are.")
    if segment.slot >= 0 and segment.sample is None:
        raise ValueError(f"{where}: slot={segment.slot} of a segment that samples nothing.")
    start = segment.slot_start
    if start is not None and (segment.slot < 0 or len(start.tokens) != segment.stop - 1):
        raise ValueError(
            f"{where}: slot={segment.slot} starts with {len(start.tokens)} tokens; it needs a slot, and the "
            f"{segment.stop - 1} tokens before its last one."
        )
