"""Two runs side by side: what each reply holds, and in how many bits they differ."""

import collections
import dataclasses

import numpy as np

from penelope_jax.events import RequestMetrics

Key = tuple[str, int]  # session id, turn


@dataclasses.dataclass(slots=True)
class Reply:
    """What one request produced."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    scores: np.ndarray | None = None  # f32[prompt_len]: of each prompt token given those before; NaN where not scored
    reused: np.ndarray | None = None  # bool[prompt_len]: its query row attended to K/V that was already resident
    metrics: RequestMetrics | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """What the replies of two runs have in common.

    Attributes:
        requests: requests compared.
        requests_with_holes, most_holes, holes, refilled_tokens: holes that the small cache refilled.
        reused_tokens: prompt tokens that the small cache did not recompute.
        output_positions: sampled tokens, each with its log-probability.
        scored_requests, scored_recomputed, scored_reused, scored_new: prompt log-probabilities, by whether the small
            cache recomputed, reused or first computed the query's position.
        output_bits, score_bits: differing bits.
    """

    requests: int
    requests_with_holes: int
    most_holes: int
    holes: int
    refilled_tokens: int
    reused_tokens: int
    output_positions: int
    scored_requests: int
    scored_recomputed: int
    scored_reused: int
    scored_new: int
    output_bits: int
    score_bits: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Report(Compared):
    """The whole comparison.

    Attributes:
        evicted_pages: by the small cache.
        demoted_pages, loaded_pages, prefetched_pages, swapped_loads, lost_pages: of its engine, see `EngineCounters`.
        failed_moves: its moves that did not happen.
        pages, page_bytes: resident pages of the small cache at the end, copies too, and their size.
        host_pages: those of them on the host.
        unmatched_pages: of these, pages whose history the large cache does not hold.
        page_bits: differing bits.
        perturbed: "" or which page was changed on purpose.
    """

    evicted_pages: int
    demoted_pages: int
    loaded_pages: int
    prefetched_pages: int
    swapped_loads: int
    lost_pages: int
    failed_moves: int
    pages: int
    host_pages: int
    page_bytes: int
    unmatched_pages: int
    page_bits: int
    perturbed: str = ""

    @property
    def identical(self) -> bool:
        return not (self.output_bits or self.score_bits or self.page_bits or self.unmatched_pages)

    def text(self) -> str:
        """Returns the report, a few lines."""
        host = f", {self.host_pages:,} of them on the host" if self.host_pages else ""
        scored = self.scored_recomputed + self.scored_reused + self.scored_new
        rows = [
            ("requests", self.requests, f"{self.evicted_pages:,} pages evicted, {self.reused_tokens:,} tokens reused"),
            (
                "with holes",
                self.requests_with_holes,
                (
                    f"{self.holes:,} holes of {self.refilled_tokens:,} tokens refilled, at most {self.most_holes} in one "
                    "request"
                ),
            ),
            ("outputs", self.output_positions, f"tokens and log-probabilities: {self.output_bits:,} differing bits"),
            (
                "prompt scores",
                scored,
                (
                    f"log-probabilities of {self.scored_requests:,} requests ({self.scored_recomputed:,} recomputed, "
                    f"{self.scored_reused:,} reused, {self.scored_new:,} new): {self.score_bits:,} differing bits"
                ),
            ),
            (
                "pages",
                self.pages,
                (
                    f"resident at the end{host}, {self.page_bytes:,} bytes: {self.page_bits:,} differing bits, "
                    f"{self.unmatched_pages:,} unmatched"
                ),
            ),
        ]
        if self.demoted_pages or self.loaded_pages:
            rows.insert(
                2,
                (
                    "moved pages",
                    self.demoted_pages + self.loaded_pages,
                    (
                        f"{self.demoted_pages:,} demoted, {self.loaded_pages:,} loaded ({self.prefetched_pages:,} ahead, "
                        f"{self.swapped_loads:,} through the swap buffer); {self.failed_moves:,} moves failed, "
                        f"{self.lost_pages:,} pages lost"
                    ),
                ),
            )
        lines = [f"{name:<14} {number:>9,}  {text}" for name, number, text in rows]
        if self.perturbed:
            lines.append(f"perturbed      {self.perturbed}")
        lines.append("IDENTICAL" if self.identical else "DIFFERENT")
        return "\n".join(lines)


def compare(small: dict[Key, Reply], large: dict[Key, Reply]) -> Compared:
    """Compares the replies of the small cache with those of the large one, bit by bit.

    Raises:
        RuntimeError: a request ran in one of them only, or positions that should be scored are not.
    """
    counts = collections.Counter({field.name: 0 for field in dataclasses.fields(Compared)})
    if small.keys() != large.keys():
        raise RuntimeError(f"{len(small.keys() ^ large.keys())} requests ran in one cache only.")
    for key, mine in small.items():
        other = large[key]
        assert mine.metrics is not None, "a request that ended was admitted"
        match_stop = mine.metrics.prompt_len - mine.metrics.new
        holes = [(start, min(stop, match_stop)) for start, stop in mine.metrics.compute_spans if start < match_stop]
        counts["requests"] += 1
        counts["requests_with_holes"] += bool(holes)
        counts["most_holes"] = max(counts["most_holes"], len(holes))
        counts["holes"] += len(holes)
        counts["refilled_tokens"] += mine.metrics.refilled
        counts["reused_tokens"] += mine.metrics.device_hit + mine.metrics.host_hit
        counts["output_positions"] += len(mine.tokens)
        counts["output_bits"] += differing_bits(np.array(mine.tokens, np.int32), np.array(other.tokens, np.int32))
        counts["output_bits"] += differing_bits(
            np.array(mine.logprobs, np.float32), np.array(other.logprobs, np.float32)
        )
        if mine.scores is not None and mine.reused is not None and other.scores is not None:
            missing = int(np.isnan(mine.scores[1:]).sum() + np.isnan(other.scores[1:]).sum())
            if missing:
                raise RuntimeError(f"session {key[0]!r}, turn {key[1]}: {missing} prompt positions were not scored.")
            recomputed = np.zeros(len(mine.scores), bool)
            for start, stop in holes:
                recomputed[start + 1 : stop + 1] = True
            counts["scored_requests"] += 1
            counts["scored_reused"] += int(mine.reused[1:].sum())
            counts["scored_recomputed"] += int((recomputed & ~mine.reused)[1:].sum())
            counts["scored_new"] += int((~recomputed & ~mine.reused)[1:].sum())
            counts["score_bits"] += differing_bits(mine.scores[1:], other.scores[1:])
    return Compared(**counts)


def differing_bits(left: np.ndarray, right: np.ndarray) -> int:
    """Returns in how many bits two arrays of one shape and dtype differ."""
    left, right = np.ascontiguousarray(left), np.ascontiguousarray(right)
    if left.shape != right.shape or left.dtype != right.dtype:
        raise ValueError(f"{left.dtype}{list(left.shape)} cannot be compared with {right.dtype}{list(right.shape)}.")
    return int(np.bitwise_count(left.view(np.uint8) ^ right.view(np.uint8)).sum())
