"""What goes into the engine and what comes out of it.

Time, randomness and ids come in with events, so a run is its list of events, and the same list gives the same run.
"""

import dataclasses

import numpy as np

from penelope_jax.segments import SamplingParams, StepDone


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Submit:
    """A request arrives.

    Attributes:
        request_id: chosen by the caller, >= 0, never used twice.
        tokens: i32[n], the prompt.
        sampling: how it samples.
        session_id: whose turn it is; for reports only.
        cache_salt: requests with different salts share nothing (rule 12).
        time_s: when it arrived, on the driver's clock.
    """

    request_id: int
    tokens: np.ndarray
    sampling: SamplingParams = SamplingParams()
    session_id: str = ""
    cache_salt: str = ""
    time_s: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Abort:
    """The client left. An id that is unknown or already finished is ignored: the two may cross."""

    request_id: int
    time_s: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """A request is over because of its text: a stop string, which only its reader can see.

    An id that is unknown or already finished is ignored: the two may cross.

    Attributes:
        request_id: the request.
        num_tokens: outputs that count, from 1 to those sampled; what came behind them is dropped.
        time_s: when.
    """

    request_id: int
    num_tokens: int
    time_s: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Flush:
    """Drop all K/V that no request holds."""

    time_s: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MoveDone:
    """Moves between the tiers ended.

    Attributes:
        done: ids of moves whose pages are where they were to go.
        failed: ids of moves that did not happen: nothing was put into their targets. What a failed demotion was to
            save is lost, as its device pages have been used again; what a failed load was to bring is given up, so that
            nobody tries for ever. Whoever needs these pages computes them.
        time_s: when.
    """

    done: tuple[int, ...]
    failed: tuple[int, ...] = ()
    time_s: float = 0.0


Event = Submit | Abort | Stop | Flush | StepDone | MoveDone


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RequestMetrics:
    """What a request's prompt cost, fixed at its first admission; a retraction does not change it.

    `device_hit + host_hit + refilled + new == prompt_len`. Tokens that another admitted request was already computing
    count as device hits: this request does not compute them.

    Attributes:
        prompt_len: tokens of the prompt.
        device_hit, host_hit: tokens not recomputed, by tier.
        refilled: tokens of holes that this request recomputes.
        new: tokens behind the end of the match.
        compute_spans: spans `[start, stop)` that it computes, in order.
        refilled_units: units of the refilled tokens.
        compute_units: units of all tokens that it computes.
        scoring_units: units of rows queried only for their log-probability.
    """

    prompt_len: int
    device_hit: int
    host_hit: int
    refilled: int
    new: int
    compute_spans: tuple[tuple[int, int], ...]
    refilled_units: float
    compute_units: float
    scoring_units: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Admitted:
    """The request runs; given once, at its first admission."""

    request_id: int
    metrics: RequestMetrics


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """An output token.

    Attributes:
        request_id: the request.
        token: its id.
        logprob: under the untempered distribution.
        position: its place in the history.
        top: the `top_logprobs` most probable tokens and their log-probabilities, best first.
    """

    request_id: int
    token: int
    logprob: float
    position: int
    top: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """Log-probabilities of prompt tokens `[start + 1, start + 1 + n)`, each given all tokens before it.

    Attributes:
        request_id: the request.
        start: position of the first query row.
        logprobs: f32[n].
        reused: whether the rows attended to K/V that was already resident, rather than computed in the same step.
    """

    request_id: int
    start: int
    logprobs: np.ndarray
    reused: bool


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """The request is over.

    Attributes:
        request_id: the request.
        reason: `stop` (an ending token or a stop string), `length` (max_tokens) or `abort`.
        metrics: None when it was aborted before it ran.
        output_len: tokens sampled.
        num_retractions: how often it was sent back to the queue.
    """

    request_id: int
    reason: str
    metrics: RequestMetrics | None
    output_len: int
    num_retractions: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """The request can never run; `message` says why, with the numbers."""

    request_id: int
    message: str


Update = Admitted | Sampled | Scored | Finished | Refused
