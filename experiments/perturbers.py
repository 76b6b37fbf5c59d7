"""Controls of `penelope verify`: executors that change one bit of one page, which the comparison must find."""

from typing import TYPE_CHECKING, Any

from penelope_jax.moves import Move, MoveKind
from penelope_jax.segments import SegmentKind, StepDone, StepPlan

if TYPE_CHECKING:
    from penelope_jax.executor import JaxExecutor


class Perturber:
    """An executor that changes nothing yet.

    Attributes:
        done: which bit was changed; "" while none was.
        nothing: why none was, if it stays so.
    """

    nothing = ""

    def __init__(self, executor: "JaxExecutor"):
        self.done = ""
        self._executor = executor

    def dispatch(self, plan: StepPlan) -> Any:
        """Starts a step."""
        return self._executor.dispatch(plan)

    def collect(self, pending: Any, time_s: float = 0.0) -> StepDone:
        """Waits for a step."""
        return self._executor.collect(pending, time_s)

    def start_moves(self, moves: tuple[Move, ...]) -> None:
        """Starts moves."""
        self._executor.start_moves(moves)

    def finish_moves(self, *, wait: bool = False) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ends moves."""
        return self._executor.finish_moves(wait=wait)


class HolePerturber(Perturber):
    """Flips one bit of the first refilled page that a running request will read again."""

    nothing = "nothing: no hole was refilled"

    def dispatch(self, plan: StepPlan) -> Any:
        """Starts a step, then flips the bit once."""
        pending = super().dispatch(plan)
        size = self._executor.page_size
        ends = {segment.request_id: segment for segment in plan.segments}
        for segment in plan.segments:
            sample = ends[segment.request_id].sample
            reads_on = sample is None or (sample.max_tokens or 2) > 1
            if segment.kind is SegmentKind.PHANTOM and reads_on and not self.done:
                page = segment.start // size
                self._executor.flip_bit(int(segment.page_table[page]))
                self.done = f"one bit of a key at position {page * size} of request {segment.request_id}, after step {plan.step}"
        return pending


class HostPerturber(Perturber):
    """Flips one bit of the first host page that is to be loaded, after it came to the host and before it leaves."""

    nothing = "nothing: no host page was loaded"

    def start_moves(self, moves: tuple[Move, ...]) -> None:
        """Flips the bit once, then starts moves."""
        for move in moves:
            if move.kind is MoveKind.LOAD and not self.done:
                host_id = int(move.host_ids[0])
                self._executor.flip_host_bit(host_id)
                self.done = f"one bit of a key in host page {host_id}, before move {move.move_id} loads it for request {move.request_id}"
        super().start_moves(moves)
