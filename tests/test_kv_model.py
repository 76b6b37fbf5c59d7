"""The stand-in for the K/V arrays finds what a device would get wrong."""

import re

import numpy as np
import pytest

from penelope_jax.experiments.kv_model import KVModel, Row, history_hashes
from penelope_jax.moves import Move, MoveKind
from penelope_jax.pages import Tier
from penelope_jax.segments import Segment, SegmentKind


def row(start: int, stop: int, page_table: list[int], tokens: list[int], name: str) -> Row:
    segment = Segment(
        request_id=0,
        kind=SegmentKind.REAL,
        start=start,
        stop=stop,
        tokens=np.array(tokens[start:stop], np.int32),
        page_table=np.array(page_table, np.int32),
        write_from=start,
    )
    return Row(segment, np.array(tokens, np.int32), "", name)


def test_kv_model_finds_what_a_device_would_get_wrong():
    kv = KVModel(2)
    kv.run([row(0, 4, [0, 1], [5, 6, 7, 8], "a")])
    kv.run([row(2, 4, [0, 2], [5, 6, 7, 9], "b"), row(4, 5, [0, 1, 3], [5, 6, 7, 8, 9], "a")])
    with pytest.raises(AssertionError, match="c reads position 2 from page 4, which holds nothing"):
        kv.run([row(4, 5, [0, 4, 5], [5, 6, 7, 8, 9], "c")])
    # The page has the same tokens, but behind another history.
    with pytest.raises(AssertionError, match="c reads position 0 from page 1, which holds the K/V of another history"):
        kv.run([row(2, 3, [1, 6], [7, 8, 9], "c")])
    with pytest.raises(AssertionError, match="a and b write page 7 in one step"):
        kv.run([row(0, 1, [7], [5], "a"), row(0, 1, [7], [5], "b")])
    with pytest.raises(AssertionError, match="position 2 is written, but has no page"):
        kv.run([row(2, 3, [0, -1], [5, 6, 7], "a")])
    kv.forget([0])
    with pytest.raises(AssertionError, match="a reads position 0 from page 0, which holds nothing"):
        kv.run([row(4, 5, [0, 1, 3], [5, 6, 7, 8, 9], "a")])
    assert history_hashes([1, 2], "x") != history_hashes([1, 2], "y")


def move(move_id: int, kind: MoveKind, device_ids: list[int], host_ids: list[int]) -> Move:
    device, host = np.array(device_ids, np.int32), np.array(host_ids, np.int32)
    return Move(move_id=move_id, kind=kind, device_ids=device, host_ids=host)


def test_kv_model_carries_what_moves_and_finds_what_a_slow_copy_would_get_wrong():
    kv = KVModel(2)
    hashes = history_hashes([5, 6, 7, 8], "")
    kv.write([0, 1], 0, 4, hashes)
    kv.start_move(move(0, MoveKind.DEMOTE, [0, 1], [7, 8]))
    kv.write([0], 0, 2, history_hashes([1, 2], ""))  # the device pages are free again
    kv.check_host(7, 0, hashes)  # it will hold that when it has arrived
    with pytest.raises(AssertionError, match="move 1 reads host page 7, which holds nothing"):
        kv.start_move(move(1, MoveKind.LOAD, [2], [7]))
    with pytest.raises(AssertionError, match=re.escape("move 1 goes to pages [8], and so does another one")):
        kv.start_move(move(1, MoveKind.DEMOTE, [0], [8]))
    kv.end_move(0)
    kv.start_move(move(1, MoveKind.LOAD, [2, 3], [7, 8]))
    with pytest.raises(AssertionError, match="a reads position 0 from page 2, which holds nothing"):
        kv.check([2], 0, 1, hashes, "a")
    with pytest.raises(AssertionError, match="position 1 is written to page 2, which is being loaded"):
        kv.write([2], 1, 2, hashes)
    other = kv.copy()
    kv.end_move(1)
    kv.check([2, 3], 0, 4, hashes, "a")
    other.forget([8], Tier.HOST)
    with pytest.raises(AssertionError, match="host page 8 changed while move 1 read it"):
        other.end_move(1)
    kv.start_move(move(2, MoveKind.DEMOTE, [2], [9]))
    kv.end_move(2, fails=True)
    with pytest.raises(AssertionError, match="the tree reads position 0 from host page 9, which holds nothing"):
        kv.check_host(9, 0, hashes)
    kv.forget([2])
    kv.start_move(move(3, MoveKind.LOAD, [2], [7]))
    kv.end_move(3, fails=True)
    with pytest.raises(AssertionError, match="a reads position 0 from page 2, which holds nothing"):
        kv.check([2], 0, 1, hashes, "a")
    with pytest.raises(AssertionError, match="move 4 reads page 2, which holds nothing"):
        kv.start_move(move(4, MoveKind.DEMOTE, [2], [9]))
