"""What a step computes: segments, and the plan that holds them.

A request's compute list is its missing spans in position order, then its new tokens. A step takes the front of it;
what is contiguous is a segment. Segments that refill holes are phantom (paper, part two): they sample nothing, and
only this file, the batch builder and the metrics know of them. A decode is a segment of one token.
"""

import dataclasses
import enum
from typing import NamedTuple

import numpy as np


class SegmentKind(enum.Enum):
    """Why a segment is computed."""

    PHANTOM = "phantom"  # recompute of a hole
    REAL = "real"  # new prompt tokens
    DECODE = "decode"  # one sampled token fed back
    SCORE = "score"  # resident positions queried again for their log-probability; writes no K/V


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How a request samples. `temperature` 0 is greedy.

    Attributes:
        temperature: softmax temperature, >= 0.
        top_p: nucleus mass in (0, 1].
        top_k: candidates kept; 0 keeps all.
        seed: with (choice, position) it keys every draw, so a draw does not depend on the batch.
        choice: index among the requests of one prompt.
        max_tokens: most output tokens; None: what context and pool leave.
        stop_token_ids: sampling one of these ends the request (the token is part of the output).
        prompt_logprobs_from: score the prompt from this position on; None: do not.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    choice: int = 0
    max_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    prompt_logprobs_from: int | None = None

    def __post_init__(self):
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature} must be finite and at least 0.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be in (0, 1].")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} must be at least 0 (0 keeps all).")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens} must be at least 1.")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed} must be in [0, 2**32).")
        if self.choice < 0:
            raise ValueError(f"choice={self.choice} must be at least 0.")
        if self.prompt_logprobs_from is not None and self.prompt_logprobs_from < 0:
            raise ValueError(f"prompt_logprobs_from={self.prompt_logprobs_from} must be at least 0.")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """A row of the ragged batch: positions `[start, stop)` of one request's history.

    Attributes:
        request_id: whose history.
        kind: why it is computed.
        start, stop: positions in the history, half open. Query i stands at position start + i.
        tokens: i32[stop - start], read-only; -1 where the token is still in flight (see `feed`).
        page_table: i32[>= ceil(stop / page_size)], read-only; the history's device pages, in order.
        write_from: positions >= write_from have their K/V written; `stop` (and above) writes nothing.
        sample: params if the last row is sampled, else None. The sample's position is `stop`.
        targets: i32[stop - start] or None; for scored rows the token whose log-probability is wanted, -1 for none.
        feed: index of this segment's only token among the samples of the step before, when it is in flight; else -1.
    """

    request_id: int
    kind: SegmentKind
    start: int
    stop: int
    tokens: np.ndarray
    page_table: np.ndarray
    write_from: int
    sample: SamplingParams | None = None
    targets: np.ndarray | None = None
    feed: int = -1


class EvictedSpan(NamedTuple):
    """Pages freed from one node: positions `[start, stop)` of the history that runs through `node_id`."""

    node_id: int
    start: int
    stop: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """What one step does. Samples are numbered in the order of the segments that sample.

    Attributes:
        step: number of this step, from 0.
        segments: rows of the batch.
        evicted: spans evicted to make room for this step, in order.
        retracted: ids of requests sent back to the queue by this plan.
    """

    step: int
    segments: tuple[Segment, ...]
    evicted: tuple[EvictedSpan, ...] = ()
    retracted: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(segment.stop - segment.start for segment in self.segments)

    @property
    def num_samples(self) -> int:
        return sum(segment.sample is not None for segment in self.segments)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepDone:
    """What a step produced (an event).

    Attributes:
        step: the plan's step.
        tokens: i32[num_samples], in the order of the segments that sample.
        logprobs: f32[num_samples], log-probability of each sampled token under the untempered model distribution.
        scores: one f32[stop - start] for each segment with targets, in order; NaN where the target is -1.
        time_s: when it was seen, on the driver's clock.
    """

    step: int
    tokens: np.ndarray
    logprobs: np.ndarray
    scores: tuple[np.ndarray, ...] = ()
    time_s: float = 0.0
