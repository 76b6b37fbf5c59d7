"""What a step computes: segments, and the plan that holds them.

A request's compute list is its missing spans in position order, then its new tokens. A step takes the front of it;
what is contiguous is a segment. Segments that refill holes are phantom (paper, part two): they sample nothing, and
only this file, the batch builder and the metrics know of them. A decode is a segment of one token.
"""

import dataclasses
import enum
from typing import NamedTuple

import numpy as np

from penelope_jax.moves import Move
from penelope_jax.value_bytes import ADDED

MAX_TOP_LOGPROBS = 20


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
        min_p: keeps what is at least this share as probable as the most probable token; 0 keeps all.
        repetition_penalty: > 0; divides the positive logits of tokens of prompt and output, multiplies the negative.
        presence_penalty: subtracted from the logits of tokens of the output.
        frequency_penalty: subtracted once for each time that the output holds the token.
        logit_bias: (token id, what is added to its logit); each id once.
        seed: with (choice, position) it keys every draw, so a draw does not depend on the batch.
        choice: index among the requests of one prompt.
        min_tokens: the first `min_tokens` outputs are not ending tokens: these are masked.
        max_tokens: most output tokens; None: what context and pool leave.
        stop_token_ids: sampling one of these ends the request (the token is part of the output).
        eos_token_ids: the same, unless `ignore_eos`: the model's own, which the caller puts here.
        ignore_eos: whether `eos_token_ids` are tokens like any other; `stop_token_ids` end the request all the same.
        top_logprobs: how many of the most probable tokens are told with each sample.
        prompt_logprobs_from: score the prompt from this position on; None: do not.

    Bias, penalties and the mask change the logits, in this order, before the temperature; then min-p, top-k and top-p
    apply, each to what the one before left. Log-probabilities are of the logits as the model gave them.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = dataclasses.field(default=0.0, metadata=ADDED)
    repetition_penalty: float = dataclasses.field(default=1.0, metadata=ADDED)
    presence_penalty: float = dataclasses.field(default=0.0, metadata=ADDED)
    frequency_penalty: float = dataclasses.field(default=0.0, metadata=ADDED)
    logit_bias: tuple[tuple[int, float], ...] = dataclasses.field(default=(), metadata=ADDED)
    seed: int = 0
    choice: int = 0
    min_tokens: int = dataclasses.field(default=0, metadata=ADDED)
    max_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = dataclasses.field(default=(), metadata=ADDED)
    ignore_eos: bool = dataclasses.field(default=False, metadata=ADDED)
    top_logprobs: int = dataclasses.field(default=0, metadata=ADDED)
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
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p} must be in [0, 1].")
        if not 0 < self.repetition_penalty < float("inf"):
            raise ValueError(f"repetition_penalty={self.repetition_penalty} must be finite and above 0.")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise ValueError(f"{name}={getattr(self, name)} must be in [-2, 2].")
        for token, bias in self.logit_bias:
            if token < 0:
                raise ValueError(f"logit_bias: token id {token} must be at least 0.")
            if not -100 <= bias <= 100:
                raise ValueError(f"logit_bias: {bias} of token id {token} must be in [-100, 100].")
        if len(dict(self.logit_bias)) < len(self.logit_bias):
            raise ValueError(
                f"logit_bias has {len(self.logit_bias)} entries for {len(dict(self.logit_bias))} token ids; "
                "each id once."
            )
        if self.min_tokens < 0:
            raise ValueError(f"min_tokens={self.min_tokens} must be at least 0.")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} must be at most max_tokens={self.max_tokens}.")
        if not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
            raise ValueError(f"top_logprobs={self.top_logprobs} must be in [0, {MAX_TOP_LOGPROBS}].")

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """The tokens that end the request."""
        return self.stop_token_ids if self.ignore_eos else self.stop_token_ids + self.eos_token_ids

    @property
    def needs_slot(self) -> bool:
        """Whether its logits depend on what it sampled before, or are biased: see `SlotStart`."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        masked = self.min_tokens > 0 and bool(self.end_token_ids)
        return penalties != (1, 0, 0) or bool(self.logit_bias) or masked


class SlotStart(NamedTuple):
    """A request begins to use its slot, the device's memory of which tokens it holds and how its logits change.

    Attributes:
        tokens: i32[n], read-only; its history up to the segment's last token, which the step counts itself.
        prompt_len: tokens from this position on are outputs, also those sampled before a retraction.
    """

    tokens: np.ndarray
    prompt_len: int


@dataclasses.dataclass(frozen=True, kw_only=True)
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
        slot: of a segment that samples and whose params need one: where the device remembers the request; else -1.
        slot_start: what to put there first; None: what is there goes on, and this segment's last token is counted.
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
    slot: int = -1
    slot_start: SlotStart | None = None


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
        moves: to be started before the segments, in order. A plan without segments has only these: it is no step, and
            the next plan has the same number.
    """

    step: int
    segments: tuple[Segment, ...]
    evicted: tuple[EvictedSpan, ...] = ()
    retracted: tuple[int, ...] = ()
    moves: tuple[Move, ...] = dataclasses.field(default=(), metadata=ADDED)

    @property
    def num_tokens(self) -> int:
        return sum(segment.stop - segment.start for segment in self.segments)

    @property
    def num_samples(self) -> int:
        return sum(segment.sample is not None for segment in self.segments)

    @property
    def top_logprobs(self) -> int:
        """The most that a sample of it asks for."""
        return max((segment.sample.top_logprobs for segment in self.segments if segment.sample), default=0)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepDone:
    """What a step produced (an event).

    Attributes:
        step: the plan's step.
        tokens: i32[num_samples], in the order of the segments that sample.
        logprobs: f32[num_samples], log-probability of each sampled token under the untempered model distribution.
        scores: one f32[stop - start] for each segment with targets, in order; NaN where the target is -1.
        time_s: when it was seen, on the driver's clock.
        top_tokens: i32[num_samples, k], the k most probable tokens of each sample, best first, where k is the most
            that a sample asks for; None when no sample does.
        top_logprobs: f32[num_samples, k], of these.
    """

    step: int
    tokens: np.ndarray
    logprobs: np.ndarray
    scores: tuple[np.ndarray, ...] = ()
    time_s: float = 0.0
    top_tokens: np.ndarray | None = dataclasses.field(default=None, metadata=ADDED)
    top_logprobs: np.ndarray | None = dataclasses.field(default=None, metadata=ADDED)
