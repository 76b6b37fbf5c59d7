"""What a run measured: one record a request, and the summary that `penelope` writes as JSON.

Times are seconds on the driver's clock. Cache figures are those of a request's first admission. `recomputed` counts the
tokens that a cache which never evicts would have held (`ideal_cache.py`), whether the engine saw them as a hole that it
refilled or as new tokens behind a shorter match; so policies that keep holes and those that do not are compared alike.
"""

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from penelope_jax.cost import units_of
from penelope_jax.events import Admitted, Finished, RequestMetrics, Sampled, Update
from penelope_jax.ideal_cache import IdealCache, IdealHit
from penelope_jax.whole_file import write_whole

LOST_SHARE = 0.9  # of its private history: a request that recomputes this much counts as having lost it


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RequestRecord:
    """One finished request.

    Attributes:
        session_id, turn, request_id: which one.
        arrival_s: when it was due. first_token_s, finished_s: its first token, and its end.
        prompt_len, device_hit, host_hit, refilled, new: tokens; the last four sum to the first.
        ideal_hit: tokens that a cache which never evicts would have held; shared_prefix: those of them that another
            session has used too.
        recomputed: tokens computed below `ideal_hit`; recompute_units: their units.
        recomputed_private: those of `recomputed` behind the shared prefix.
        compute_units, scoring_units: units of all computed tokens, and of rows queried only for log-probabilities.
        output_len: tokens sampled. num_retractions: how often it was sent back. reason: stop, length or abort.
    """

    session_id: str
    turn: int
    request_id: int
    arrival_s: float
    first_token_s: float
    finished_s: float
    prompt_len: int
    device_hit: int
    host_hit: int
    refilled: int
    new: int
    ideal_hit: int
    shared_prefix: int
    recomputed: int
    recomputed_private: int
    recompute_units: float
    compute_units: float
    scoring_units: float
    output_len: int
    num_retractions: int
    reason: str

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.arrival_s

    @property
    def lost_private(self) -> bool:
        """Whether it recomputed nearly all of the history that is its session's own."""
        private = self.ideal_hit - self.shared_prefix
        return private > 0 and self.recomputed_private >= LOST_SHARE * private


@dataclasses.dataclass(slots=True)
class _Open:
    session_id: str
    turn: int
    tokens: np.ndarray
    arrival_s: float
    metrics: RequestMetrics | None = None
    ideal: IdealHit = IdealHit(0, 0)
    first_token_s: float = float("nan")
    outputs: list[int] = dataclasses.field(default_factory=list)


class Recorder:
    """Turns the engine's updates into records.

    Args:
        page_size: of the cache.
        linear_cost: c of the cost formula, in units.
    """

    def __init__(self, page_size: int, linear_cost: float):
        self.records: list[RequestRecord] = []
        self._page_size = page_size
        self._linear_cost = linear_cost
        self._ideal = IdealCache(page_size)
        self._open: dict[int, _Open] = {}

    def submitted(self, request_id: int, session_id: str, turn: int, tokens: np.ndarray, arrival_s: float) -> None:
        """Notes that turn `turn` of a session, with prompt `tokens` i32[prompt_len], was due at `arrival_s`."""
        self._open[request_id] = _Open(session_id, turn, tokens, arrival_s)

    def cancelled(self, request_id: int) -> None:
        """Forgets a request whose client left: it gets no record."""
        del self._open[request_id]

    def update(self, update: Update, now_s: float) -> np.ndarray | None:
        """Takes one update, seen at `now_s`.

        Returns:
            The sampled tokens, i32[output_len], when the update ends a request; else None.
        """
        request = self._open.get(update.request_id)
        if request is None:
            return None
        if isinstance(update, Admitted):
            request.metrics = update.metrics
            request.ideal = self._ideal.look(request.tokens, request.session_id)
            self._ideal.add(request.tokens, request.session_id)
        elif isinstance(update, Sampled):
            if not request.outputs:
                request.first_token_s = now_s
            request.outputs.append(update.token)
        elif isinstance(update, Finished):
            del self._open[update.request_id]
            outputs = np.array(request.outputs, np.int32)
            self._ideal.add(np.concatenate([request.tokens, outputs[:-1]]), request.session_id)
            if request.metrics is not None and request.outputs:
                self.records.append(self._record(request, request.metrics, update, now_s))
            return outputs
        return None

    def _record(self, request: _Open, metrics: RequestMetrics, update: Finished, now_s: float) -> RequestRecord:
        hit, shared = request.ideal
        lost = [(start, min(stop, hit)) for start, stop in metrics.compute_spans if start < hit]
        private = [(max(start, shared), stop) for start, stop in lost if stop > shared]
        return RequestRecord(
            session_id=request.session_id,
            turn=request.turn,
            request_id=update.request_id,
            arrival_s=request.arrival_s,
            first_token_s=request.first_token_s,
            finished_s=now_s,
            prompt_len=metrics.prompt_len,
            device_hit=metrics.device_hit,
            host_hit=metrics.host_hit,
            refilled=metrics.refilled,
            new=metrics.new,
            ideal_hit=hit,
            shared_prefix=shared,
            recomputed=sum(stop - start for start, stop in lost),
            recomputed_private=sum(stop - start for start, stop in private),
            recompute_units=units_of(lost, self._linear_cost),
            compute_units=metrics.compute_units,
            scoring_units=metrics.scoring_units,
            output_len=update.output_len,
            num_retractions=update.num_retractions,
            reason=update.reason,
        )


def distribution(values: Sequence[float]) -> dict[str, float | None]:
    """Returns mean, p50, p90 and p99 of `values`; None each when there are none."""
    if not values:
        return dict.fromkeys(("mean", "p50", "p90", "p99"))
    p50, p90, p99 = np.percentile(values, (50, 90, 99))
    return {"mean": float(np.mean(values)), "p50": float(p50), "p90": float(p90), "p99": float(p99)}


def job_times(records: Iterable[RequestRecord], last_turns: Mapping[str, int]) -> list[float]:
    """Returns, for each session whose last turn is recorded, its time from first arrival to last end."""
    sessions: dict[str, list[RequestRecord]] = {}
    for record in records:
        sessions.setdefault(record.session_id, []).append(record)
    return [
        max(record.finished_s for record in turns) - min(record.arrival_s for record in turns)
        for session_id, turns in sessions.items()
        if any(record.turn == last_turns.get(session_id) for record in turns)
    ]


def summarize(
    records: Sequence[RequestRecord],
    *,
    last_turns: Mapping[str, int],
    evicted_pages: int,
    moved_pages: int = 0,
    swapped_loads: int = 0,
    config: Mapping[str, Any],
    run: Mapping[str, Any],
    per_request: str | None = None,
) -> dict[str, Any]:
    """Returns the summary of a run, ready for JSON.

    Args:
        records: of the requests that ended.
        last_turns: the last turn of each session, to know which are complete.
        evicted_pages, moved_pages, swapped_loads: the engine's counts.
        config: what was run, with what settings.
        run: how it went and where: seed, commit, jax version, device, and what else the caller measured.
        per_request: the file that holds the records.
    """
    tokens = {
        "prompt": sum(record.prompt_len for record in records),
        "device_hit": sum(record.device_hit for record in records),
        "host_hit": sum(record.host_hit for record in records),
        "refilled": sum(record.refilled for record in records),
        "new": sum(record.new for record in records),
    }
    total_units = sum(record.recompute_units for record in records)
    lost = [record for record in records if record.lost_private]
    lost_units = sum(record.recompute_units for record in lost)
    hits = tokens["device_hit"] + tokens["host_hit"]
    return {
        "config": dict(config),
        "requests": len(records),
        "ttft_s": distribution([record.ttft_s for record in records]),
        "jct_s": distribution(job_times(records, last_turns)),
        "hit_rate": hits / tokens["prompt"] if tokens["prompt"] else None,
        "tokens": tokens,
        "recompute_units": total_units,
        "evicted_pages": evicted_pages,
        "moved_pages": moved_pages,
        "swapped_loads": swapped_loads,
        "lost_90": {"requests": len(lost), "recompute_share": lost_units / total_units if total_units else 0.0},
        "per_request": per_request,
        "run": {**run, "recomputed_tokens": sum(record.recomputed for record in records)},
    }


def write_json(path: str | os.PathLike[str], document: Any) -> None:
    """Writes `document`; the file appears whole or not at all."""
    write_whole(path, (json.dumps(document, indent=2, allow_nan=False) + "\n").encode())


def write_records(path: str | os.PathLike[str], records: Iterable[RequestRecord]) -> None:
    """Writes one JSON line a request; the file appears whole or not at all."""
    lines = (json.dumps(dataclasses.asdict(record) | {"ttft_s": record.ttft_s}) for record in records)
    write_whole(path, "".join(line + "\n" for line in lines).encode())
