"""What is true of one request, whatever the engine says of it."""

import functools
import zlib

import numpy as np

from penelope_jax.events import Finished, RequestMetrics, Sampled, Scored
from penelope_jax.segments import SamplingParams, SegmentKind

Row = tuple[SegmentKind, int, int]  # kind, start, stop


def seed_of(namespace: str) -> int:
    return zlib.crc32(namespace.encode()) + 1


def extend_chain(chain: list[int], tokens, namespace: str) -> None:
    """Appends to `chain` the hash of all tokens up to each of `tokens`."""
    last = chain[-1] if chain else seed_of(namespace)
    for token in tokens:
        last = hash((last, int(token))) & 0x7FFFFFFFFFFFFFFF
        chain.append(last)


@functools.lru_cache(maxsize=4096)
def chain_behind(last: int, tokens: bytes) -> np.ndarray:
    """Returns i64[n]: the hashes of `tokens`, i32[n] as bytes, behind a history whose hash is `last`."""
    chain = [last]
    extend_chain(chain, np.frombuffer(tokens, np.int32).tolist(), "")
    return np.array(chain[1:], np.int64)


class History:
    """The tokens of a request, and what the engine has reported of them.

    Attributes:
        tokens: prompt and every token sampled so far, whether the engine has heard of it or not.
        chain: hash of all tokens up to each one.
        num_heard: tokens that the engine has reported.
        scores: positions of the rows whose log-probability was reported.
        computed: rows of every step.
        as_admitted: whether no other request that left changed what this one has to compute.
        reason: why it ended; "" while it lives.
    """

    def __init__(self, request_id: int, prompt: np.ndarray, sampling: SamplingParams, max_tokens: int, namespace: str):
        self.request_id = request_id
        self.namespace = namespace
        self.sampling = sampling
        self.max_tokens = max_tokens
        self.prompt_len = self.num_heard = len(prompt)
        self.tokens = prompt.tolist()
        self.chain: list[int] = []
        extend_chain(self.chain, self.tokens, namespace)
        self.scores: list[int] = []
        self.metrics: RequestMetrics | None = None
        self.computed: list[Row] = []
        self.as_admitted = True
        self.num_retractions = 0
        self.abort_asked = self.stop_asked = False
        self.reason = ""

    @property
    def heard(self) -> list[int]:
        return self.tokens[: self.num_heard]

    @property
    def outputs(self) -> list[int]:
        return self.tokens[self.prompt_len : self.num_heard]

    @property
    def stopped(self) -> bool:
        ended = len(self.outputs) > self.sampling.min_tokens and self.outputs[-1] in self.sampling.end_token_ids
        return self.stop_asked or ended

    @property
    def ended(self) -> bool:
        return self.stopped or len(self.outputs) >= self.max_tokens

    def append(self, token: int) -> None:
        self.tokens.append(token)
        extend_chain(self.chain, [token], self.namespace)

    def stop(self, num_tokens: int) -> None:
        """Its reader saw its end after `num_tokens` outputs."""
        self.stop_asked = True
        self.num_heard = self.prompt_len + num_tokens

    def top(self, token: int, number: int) -> list[tuple[int, float]]:
        """Returns what is said to be most probable where `token` was sampled."""
        return [(token + rank, -1.0 - rank) for rank in range(number)]

    def hear_token(self, update: Sampled) -> None:
        assert not self.abort_asked and not self.ended, f"{update} after the end"
        assert update.position == self.num_heard, f"{update}: {self.num_heard} tokens known"
        assert update.token == self.tokens[update.position], f"{update} was not sampled"
        assert update.logprob == -update.position
        assert list(update.top) == self.top(update.token, self.sampling.top_logprobs)
        self.num_heard += 1

    def hear_scores(self, update: Scored) -> None:
        """A score is the position of its row (see EngineWorld.scores)."""
        positions = list(range(update.start, update.start + len(update.logprobs)))
        assert update.logprobs.tolist() == positions
        self.scores.extend(positions)

    def hear_end(self, update: Finished, linear_cost: float) -> None:
        assert update.output_len == len(self.outputs)
        assert update.num_retractions == self.num_retractions
        assert update.metrics == self.metrics
        expected = "abort" if self.abort_asked else "stop" if self.stopped else "length"
        assert update.reason == expected, f"{update}, not {expected}"
        assert expected == "abort" or self.ended, f"{update} after {len(self.outputs)} of {self.max_tokens} tokens"
        start = self.sampling.prompt_logprobs_from
        wanted = [] if start is None else list(range(start, self.prompt_len - 1))
        assert self.scores == (wanted[: len(self.scores)] if expected == "abort" else wanted)
        if self.as_admitted and not self.num_retractions and expected != "abort":
            self.check_metrics(linear_cost)
        self.reason = update.reason

    def check_metrics(self, linear_cost: float) -> None:
        """What was computed is what the metrics said at admission."""
        assert self.metrics is not None
        spans: list[tuple[int, int]] = []
        for kind, start, stop in self.computed:
            if kind in (SegmentKind.DECODE, SegmentKind.SCORE):
                continue
            if spans and spans[-1][1] == start:
                spans[-1] = (spans[-1][0], stop)
            else:
                spans.append((start, stop))
        assert tuple(spans) == self.metrics.compute_spans
        phantoms = [(start, stop) for kind, start, stop in self.computed if kind is SegmentKind.PHANTOM]
        scored = [(start, stop) for kind, start, stop in self.computed if kind is SegmentKind.SCORE]

        def units(rows: list[tuple[int, int]]) -> float:
            return sum(linear_cost + position for start, stop in rows for position in range(start, stop))

        assert sum(stop - start for start, stop in phantoms) == self.metrics.refilled
        assert units(phantoms) == self.metrics.refilled_units
        assert units(spans) == self.metrics.compute_units
        assert units(scored) == self.metrics.scoring_units
