"""The state of the engine: a persistent value that a run moves from step to step."""

import dataclasses

import numpy as np

from penelope_jax.changed import changed
from penelope_jax.config import EngineConfig
from penelope_jax.events import RequestMetrics
from penelope_jax.pages import frozen
from penelope_jax.path_view import PathView
from penelope_jax.radix_tree import CacheState, LookUp, Pin, make_cache
from penelope_jax.segments import SamplingParams

NO_PIN = Pin(-1, -1, 0)
_NO_PAGES = frozen(np.empty(0, np.int32))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A request, waiting or running.

    The row of a running request is `page_table`. Who owns which part of a history of `prompt` and `outputs`:

        [0, path_stop)          the tree; `pin` protects it, NO_PAGE where the fill is not planned yet
        [path_stop, next_pos)   the request; its private pages go to the tree when it leaves
        [next_pos, ...)         not planned yet

    Attributes:
        request_id, session_id, namespace: as submitted.
        arrival: order of arrival. arrival_s: time of arrival.
        prompt: i32[n], read-only; after a retraction it ends with the tokens sampled before.
        original_len: tokens of the prompt as submitted.
        sampling: as submitted, with `max_tokens` resolved.
        metrics: of the first admission, once there was one.
        score_pos: next position to be scored; at or above `original_len - 1` when there is none.
        num_retractions: how often it was sent back.
        lookup: while it waits, what the cache held of the prompt when it was last looked up.
        pin: receipt of its path.
        path_stop: tokens of the path that are the tree's.
        match_stop: end of the match at admission; missing spans below it are holes.
        page_table: i32[pages], read-only; NO_PAGE for pages of the path that are not on the device.
        view: while pages of the path are not on the device, the path as it was when `page_table` was brought up to
            date.
        num_owned: pages of the path that are still to be taken for it: those that it must fill, and those on the host
            whose load has not begun.
        target_pages: once it was admitted, the pages that its prompt and its output reserve fill.
        next_pos: every position below it is resident, or planned by this request.
        outputs: tokens sampled since the last admission.
        num_cut: tokens at the end of the prompt, sampled before a retraction, that do not count: it stopped earlier.
        num_in_flight: samples planned and not back.
        feed: index of the last planned sample among the samples of its step.
        slot: of a running request whose sampling needs one, else -1; no two running requests have the same.
        last_step: last step this request has a row in; -1: none.
        leaving: why it goes once its last step is back; "" while it stays.
    """

    request_id: int
    session_id: str
    namespace: str
    arrival: int
    arrival_s: float
    prompt: np.ndarray
    original_len: int
    sampling: SamplingParams
    metrics: RequestMetrics | None = None
    score_pos: int = 0
    num_retractions: int = 0
    lookup: LookUp | None = None
    pin: Pin = NO_PIN
    path_stop: int = 0
    match_stop: int = 0
    page_table: np.ndarray = dataclasses.field(default_factory=lambda: _NO_PAGES)
    view: PathView | None = None
    num_owned: int = 0
    target_pages: int = 0
    next_pos: int = 0
    outputs: tuple[int, ...] = ()
    num_cut: int = 0
    num_in_flight: int = 0
    feed: int = -1
    slot: int = -1
    last_step: int = -1
    leaving: str = ""

    @property
    def prefilled(self) -> bool:
        return self.next_pos >= len(self.prompt)

    @property
    def decodes(self) -> bool:
        """Whether its prompt is done and there are tokens to sample."""
        if self.next_pos < len(self.prompt):
            return False
        return self.output_len + self.num_in_flight < self.max_tokens

    @property
    def output_len(self) -> int:
        """Tokens sampled over all attempts."""
        return len(self.prompt) - self.original_len + len(self.outputs) - self.num_cut

    @property
    def max_tokens(self) -> int:
        assert self.sampling.max_tokens is not None, "max_tokens is resolved at arrival"
        return self.sampling.max_tokens

    def tokens(self, stop: int) -> np.ndarray:
        """Returns i32[stop]: the first `stop` known tokens of the history."""
        if stop <= len(self.prompt):
            return self.prompt[:stop]
        outputs = np.asarray(self.outputs[: stop - len(self.prompt)], np.int32)
        return np.concatenate([self.prompt, outputs])


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class InFlight:
    """A step that was planned and is not back.

    Attributes:
        step: its number.
        sampled: request ids of its samples, in order.
        scored: (request id, position of the first scored row, rows, first scored row in the segment, reused), in the
            order of the segments with targets.
    """

    step: int
    sampled: tuple[int, ...]
    scored: tuple[tuple[int, int, int, int, bool], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineCounters:
    """Totals since the start; none ever falls. Units are those of the paper's cost model.

    Attributes:
        evicted_pages: pages whose last copy was dropped to make room, in whichever tier.
        demoted_pages, loaded_pages: pages whose move to the host, and back, began; `moved_pages` is their sum.
        prefetched_pages: loaded pages whose request was waiting.
        swapped_loads: loaded pages whose place was made through the swap buffer.
        lost_pages: pages lost with moves that failed.
    """

    steps: int = 0
    admitted: int = 0
    finished: int = 0
    refused: int = 0
    retractions: int = 0
    evicted_pages: int = 0
    phantom_segments: int = 0
    phantom_tokens: int = 0
    real_tokens: int = 0
    decode_tokens: int = 0
    score_tokens: int = 0
    demoted_pages: int = 0
    loaded_pages: int = 0
    prefetched_pages: int = 0
    swapped_loads: int = 0
    lost_pages: int = 0

    @property
    def moved_pages(self) -> int:
        return self.demoted_pages + self.loaded_pages


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineState:
    """Everything the engine knows.

    Attributes:
        config: limits and choices.
        cache: tree and pools.
        waiting: retracted requests first, then by arrival.
        running: in the order of admission.
        in_flight: steps that are not back, oldest first.
        next_step, next_arrival: counters.
        now_s: the latest time an event carried.
        counters: totals.
    """

    config: EngineConfig
    cache: CacheState
    waiting: tuple[Request, ...] = ()
    running: tuple[Request, ...] = ()
    in_flight: tuple[InFlight, ...] = ()
    next_step: int = 0
    next_arrival: int = 0
    now_s: float = 0.0
    counters: EngineCounters = EngineCounters()

    @property
    def idle(self) -> bool:
        """Whether no request is waiting or running."""
        return not self.waiting and not self.running


def make_state(config: EngineConfig) -> EngineState:
    """Returns the state of an engine that has seen nothing."""
    return EngineState(
        config=config,
        cache=make_cache(config.page_size, config.num_device_pages, config.num_host_pages, config.num_swap_pages),
    )


def private_page_ids(state: EngineState) -> np.ndarray:
    """Returns i32[n]: device pages held by requests, outside the tree."""
    size = state.config.page_size
    parts = [request.page_table[request.path_stop // size :] for request in state.running]
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


def count(counters: EngineCounters, **increments: int) -> EngineCounters:
    """Returns the counters with some raised."""
    return changed(counters, **{name: getattr(counters, name) + number for name, number in increments.items()})
