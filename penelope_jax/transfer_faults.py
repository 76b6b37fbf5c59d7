"""Faults and delays of moves, drawn by seed: how tests and `penelope verify` see what a slow or broken link does."""

import dataclasses
import hashlib

from penelope_jax.moves import Move, MoveKind


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TransferFaults:
    """What goes wrong with which move. What befalls a move depends on the seed and its id only.

    Attributes:
        seed: of all draws.
        fail_starts: share of moves of either kind that find no memory to go to.
        fail_demotions: share of demotions whose copy fails.
        fail_loads: share of loads whose copy fails.
        delay_polls: most polls for which a move that arrived is said not to have.
        delay_s: most seconds for which it is.
    """

    seed: int = 0
    fail_starts: float = 0.0
    fail_demotions: float = 0.0
    fail_loads: float = 0.0
    delay_polls: int = 0
    delay_s: float = 0.0

    def __post_init__(self):
        for name in ("fail_starts", "fail_demotions", "fail_loads"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} must be in [0, 1].")
        for name in ("delay_polls", "delay_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name}={getattr(self, name)} must be finite and at least 0.")

    def start_fails(self, move: Move) -> bool:
        """Whether there is no memory for the move's targets."""
        return self._draw(move, "start") < self.fail_starts

    def copy_fails(self, move: Move) -> bool:
        """Whether its copy does not arrive."""
        share = self.fail_demotions if move.kind is MoveKind.DEMOTE else self.fail_loads
        return self._draw(move, "copy") < share

    def polls(self, move: Move) -> int:
        """Returns how many polls it is held back for."""
        return int(self._draw(move, "polls") * (self.delay_polls + 1))

    def seconds(self, move: Move) -> float:
        """Returns how long it is held back for."""
        return self._draw(move, "seconds") * self.delay_s

    def _draw(self, move: Move, what: str) -> float:
        """Returns a number in [0, 1)."""
        digest = hashlib.blake2b(f"{self.seed}:{move.move_id}:{what}".encode(), digest_size=6).digest()
        return int.from_bytes(digest, "little") / 2**48
