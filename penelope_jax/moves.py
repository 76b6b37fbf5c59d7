"""Moves of pages between device and host memory, as data: what a plan tells the executor, and what it hears back.

Moves of a plan are started in their order, before the plan's segments. A demotion is gathered from the pool as the
steps dispatched so far leave it, so its device ids may be used again at once, also by a load or a segment of the same
plan; its host ids are taken until the host pages are dropped. A load is put into its device ids when it has arrived,
which `MoveDone` tells; its host pages stay as they are until then, and nothing reads the device ids before.
"""

import dataclasses
import enum

import numpy as np

MAX_MOVE_PAGES = 16
"""Most pages of one move: what is moved together is reported together, and executors compile for sizes up to this."""


class MoveKind(enum.Enum):
    """Which way pages move."""

    DEMOTE = "demote"  # device to host
    LOAD = "load"  # host to device


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """Pages that move together.

    Attributes:
        move_id: its number, from 0; never used twice.
        kind: which way.
        device_ids: i32[n], read-only; sources of a demotion, targets of a load. 1 <= n <= `MAX_MOVE_PAGES`.
        host_ids: i32[n], read-only; targets of a demotion, sources of a load.
        request_id: whom a load is for; -1 for demotions.
        prefetch: whether that request still waits for admission.
        num_swapped: loaded pages whose place on the device was made through the swap buffer, both tiers being full.
        blocking: whether nothing else starts on the device before the move has ended; only in what we compare with.
    """

    move_id: int
    kind: MoveKind
    device_ids: np.ndarray
    host_ids: np.ndarray
    request_id: int = -1
    prefetch: bool = False
    num_swapped: int = 0
    blocking: bool = False
