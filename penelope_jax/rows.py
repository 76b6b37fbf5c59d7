"""The rows of a step: segments made of what a request holds."""

from collections.abc import Iterable

import numpy as np

from penelope_jax.changed import changed
from penelope_jax.pages import frozen
from penelope_jax.segments import Segment, SegmentKind, SlotStart, StepPlan
from penelope_jax.state import InFlight, Request

_NOTHING = frozen(np.empty(0, np.int32))
_DECODE = Segment(
    request_id=-1, kind=SegmentKind.DECODE, start=0, stop=1, tokens=_NOTHING, page_table=_NOTHING, write_from=0
)


def fed_back(requests: Iterable[Request]) -> list[np.ndarray]:
    """Returns the token at each request's next position, i32[1]: known, or sampled by the step before (-1).

    There is one for each running request in every step, so they are parts of one array.
    """
    known = [(request.outputs, request.next_pos - len(request.prompt)) for request in requests]
    tokens = frozen(np.array([outputs[at] if at < len(outputs) else -1 for outputs, at in known], np.int32))
    return [tokens[row : row + 1] for row in range(len(known))]


def decode_row(request: Request, page_size: int, tokens: np.ndarray) -> Segment:
    """Returns the row that feeds back a request's last token, `fed_back`; made by changing another."""
    position = request.next_pos
    in_flight = tokens.item() < 0
    table, num_pages = request.page_table, position // page_size + 1
    return changed(
        _DECODE,
        request_id=request.request_id,
        start=position,
        stop=position + 1,
        tokens=tokens,
        page_table=table if len(table) == num_pages else table[:num_pages],
        write_from=position,
        sample=request.sampling,
        feed=request.feed if in_flight else -1,
        slot=request.slot,
    )


def prompt_row(request: Request, page_size: int, kind: SegmentKind, start: int, stop: int, *, sample: bool) -> Segment:
    """Returns the row that computes or scores positions `[start, stop)` of the prompt.

    Args:
        request: its page table covers them.
        page_size: tokens a page.
        kind: any but a decode.
        start, stop: positions.
        sample: whether the last one is sampled.
    """
    targets = None
    first, last = max(start, request.score_pos), min(stop, request.original_len - 1)
    if first < last:
        targets = np.full(stop - start, -1, np.int32)
        targets[first - start : last - start] = request.prompt[first + 1 : last + 1]
        targets = frozen(targets)
    slot = request.slot if sample else -1
    return Segment(
        request_id=request.request_id,
        kind=kind,
        start=start,
        stop=stop,
        tokens=request.prompt[start:stop],
        page_table=request.page_table[: -(-stop // page_size)],
        write_from=stop if kind is SegmentKind.SCORE else start,
        sample=request.sampling if sample else None,
        targets=targets,
        slot=slot,
        slot_start=SlotStart(request.prompt[:-1], request.original_len) if slot >= 0 else None,
    )


def expected(plan: StepPlan) -> InFlight:
    """Returns what is to come back of a step: its samples and log-probabilities."""
    scored = []
    for segment in plan.segments:
        if segment.targets is not None:
            wanted = np.flatnonzero(segment.targets >= 0)
            first = int(wanted[0])
            reused = segment.kind is SegmentKind.SCORE
            scored.append((segment.request_id, segment.start + first, len(wanted), first, reused))
    sampled = tuple(segment.request_id for segment in plan.segments if segment.sample is not None)
    return InFlight(step=plan.step, sampled=sampled, scored=tuple(scored))
