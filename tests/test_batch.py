"""A plan as arrays, compared with literal values; and what a plan may not be."""

import dataclasses

import numpy as np
import pytest
from step_world import DRAWN, GREEDY, History, plan

from penelope_jax.batch import Buckets, build_batch, padding_batch
from penelope_jax.kernels.kv_write import DROP_PAGE
from penelope_jax.segments import SegmentKind

BUCKETS = Buckets(page_size=4, max_pages=5, max_segments=4, token_buckets=(4, 16), q_tile=4, decode_q_tile=2)
NUM_PAGES = 20
FIRST = History(np.arange(100, 120), np.array([7, 3, 9, 1, 0]), scored=False)
SECOND = History(np.arange(200, 220), np.array([7, 8, 2, 4]), request_id=1)


def test_ragged_step():
    """A hole, new tokens that end inside a page, a decode whose token is on the device, and scored resident rows."""
    scored = History(SECOND.tokens, SECOND.pages, request_id=2, scored=True)
    batch = build_batch(
        plan(
            FIRST.segment(4, 8, SegmentKind.PHANTOM),
            FIRST.segment(12, 17, sample=DRAWN),
            SECOND.segment(9, 10, SegmentKind.DECODE, sample=GREEDY, feed=2),
            scored.segment(2, 5, SegmentKind.SCORE),
        ),
        BUCKETS,
        NUM_PAGES,
    )
    pad = [0] * 3
    assert batch.tokens.tolist() == [104, 105, 106, 107, 112, 113, 114, 115, 116, -1, 202, 203, 204, *pad]
    assert batch.feed.tolist() == [-1] * 9 + [2] + [-1] * 6
    assert batch.positions.tolist() == [4, 5, 6, 7, 12, 13, 14, 15, 16, 9, 2, 3, 4, *pad]
    assert batch.page_table.tolist() == [
        [7, 3, DROP_PAGE, DROP_PAGE, DROP_PAGE],
        [7, 3, 9, 1, 0],
        [7, 8, 2, DROP_PAGE, DROP_PAGE],
        [7, 8, DROP_PAGE, DROP_PAGE, DROP_PAGE],
    ]
    assert batch.tiles.tolist() == [[0, 0, 4, 4], [1, 4, 12, 4], [3, 10, 2, 3]] + [[0] * 4] * 5
    assert batch.decode_tiles.tolist() == [[1, 8, 16, 1], [2, 9, 9, 1], [0] * 4, [0] * 4]
    assert batch.write_pages.tolist() == [3, 1, 0, 2] + [DROP_PAGE] * 4
    assert (
        batch.write_source.tolist()
        == [
            [0, 1, 2, 3],
            [4, 5, 6, 7],
            [8, -1, -1, -1],
            [-1, 9, -1, -1],
        ]
        + [[-1] * 4] * 4
    )
    assert batch.sample_rows.tolist() == [8, 9, 0, 0]
    assert batch.sampling.temperature.tolist() == np.float32([0.8, 0, 0, 0]).tolist()
    assert batch.sampling.top_p.tolist() == np.float32([0.9, 1, 1, 1]).tolist()
    assert batch.sampling.top_k.tolist() == [40, 0, 0, 0]
    assert batch.sampling.seed.tolist() == [7, 0, 0, 0]
    assert batch.sampling.choice.tolist() == [1, 0, 0, 0]
    assert batch.sampling.position.tolist() == [17, 10, 0, 0]
    assert batch.targets.tolist() == [-1] * 10 + [203, 204, 205] + [-1] * 3
    assert (batch.num_tokens, batch.num_samples) == (13, 2)


def test_a_step_of_decodes_takes_the_smallest_bucket():
    rows = [SECOND.segment(9, 10, SegmentKind.DECODE), FIRST.segment(12, 13, SegmentKind.DECODE, sample=GREEDY)]
    batch = build_batch(plan(*rows), BUCKETS, NUM_PAGES)
    assert batch.tokens.shape == (4,) and batch.targets.shape == (0,)
    assert not batch.tiles.any()
    assert batch.decode_tiles.tolist() == [[0, 0, 9, 1], [1, 1, 12, 1], [0] * 4, [0] * 4]
    assert batch.write_pages.tolist() == [2, 1, DROP_PAGE, DROP_PAGE]


def test_one_tile_size():
    """With equal sizes all tiles are of one list; that is how a machine runs whose tiles differ in bits."""
    buckets = dataclasses.replace(BUCKETS, decode_q_tile=4)
    batch = build_batch(plan(FIRST.segment(8, 9), SECOND.segment(0, 5)), buckets, NUM_PAGES)
    assert batch.decode_tiles.shape == (0, 4)
    assert batch.tiles.tolist() == [[0, 0, 8, 1], [1, 1, 0, 4], [1, 5, 4, 1]] + [[0] * 4] * 5


def test_write_from_inside_a_page():
    batch = build_batch(plan(FIRST.segment(0, 8, write_from=6)), BUCKETS, NUM_PAGES)
    assert batch.write_pages.tolist()[:2] == [3, DROP_PAGE]
    assert batch.write_source.tolist()[0] == [-1, -1, 6, 7]


def test_fresh_arrays():
    """jax may still read the arrays of the step before."""
    step = plan(FIRST.segment(0, 4))
    one, two = build_batch(step, BUCKETS, NUM_PAGES), build_batch(step, BUCKETS, NUM_PAGES)
    assert not np.shares_memory(one.tokens, two.tokens)
    assert not np.shares_memory(one.tokens, FIRST.tokens)
    assert not np.shares_memory(one.page_table, two.page_table)


def test_padding_has_the_shapes_of_its_bucket():
    step = build_batch(plan(FIRST.segment(0, 4)), BUCKETS, NUM_PAGES)
    padding = padding_batch(BUCKETS, 4, scoring=False)
    for name in ("tokens", "tiles", "decode_tiles", "page_table", "write_pages", "write_source", "targets"):
        one, two = getattr(step, name), getattr(padding, name)
        assert (one.shape, one.dtype) == (two.shape, two.dtype), name
    assert (padding.write_pages == DROP_PAGE).all() and not padding.tiles.any() and padding.num_tokens == 0


TEN_PAGES = History(np.arange(40), np.arange(10))
BAD_PLANS = {
    "tokens": ([FIRST.segment(0, 17)], "step 5 has 17 tokens; the largest bucket has 16 rows"),
    "segments": ([FIRST.segment(i, i + 1) for i in range(5)], "step 5 has 5 segments; the buckets hold 4"),
    "table": ([TEN_PAGES.segment(20, 24)], r"segment 0 of step 5: stop=24 needs 6 pages; the page table holds 5"),
    "short": ([SECOND.segment(16, 17)], "segment 0 of step 5: stop=17 needs 5 pages; it has 4"),
    "empty": ([FIRST.segment(3, 3)], r"segment 0 of step 5: span \[3, 3\) is empty"),
    "feed": ([FIRST.segment(0, 1), FIRST.segment(8, 9, feed=4)], "segment 1 of step 5: feed=4 must be below 4"),
    "unfed": (
        [dataclasses.replace(FIRST.segment(8, 9), tokens=np.array([-1], np.int32))],
        "segment 0 of step 5: token -1 is negative and no sample is fed",
    ),
    "long feed": ([dataclasses.replace(FIRST.segment(8, 10), feed=1)], "segment 0 of step 5: feed=1 needs one token"),
    "length": (
        [dataclasses.replace(FIRST.segment(0, 4), tokens=FIRST.tokens[:3])],
        r"segment 0 of step 5: 3 tokens for span \[0, 4\)",
    ),
    "targets": (
        [dataclasses.replace(FIRST.segment(0, 4), targets=FIRST.tokens[:3])],
        r"segment 0 of step 5: 3 targets for span \[0, 4\)",
    ),
    "page": (
        [dataclasses.replace(FIRST.segment(0, 8), page_table=np.array([7, 20], np.int32))],
        r"segment 0 of step 5: page id 20 must be in \[0, 20\)",
    ),
    "two writers": ([FIRST.segment(0, 4), SECOND.segment(0, 2)], "step 5: two segments write page 7"),
    "pages": (
        [TEN_PAGES.segment(3, stop) for stop in (5, 5, 5, 13)],
        "step 5 writes at least 10 pages; its bucket of 16 rows holds 8",
    ),
}


@pytest.mark.parametrize(("segments", "message"), BAD_PLANS.values(), ids=BAD_PLANS.keys())
def test_bad_plans(segments, message):
    if message.endswith("holds 8"):  # distinct pages for each, or two of them would write one
        pages = [np.arange(5 * i, 5 * i + 5, dtype=np.int32) for i in range(4)]
        segments = [dataclasses.replace(segment, page_table=ids) for segment, ids in zip(segments, pages, strict=True)]
    with pytest.raises(ValueError, match=message):
        build_batch(plan(*segments, step=5), BUCKETS, NUM_PAGES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_size": 3}, "page_size=3 must be a power of two"),
        ({"max_segments": 0}, "max_segments=0 must be at least 1"),
        ({"decode_q_tile": 8}, "decode_q_tile=8 must be at most q_tile=4"),
        ({"token_buckets": (16, 4)}, r"token_buckets=\(16, 4\) must be ascending"),
        ({"token_buckets": ()}, r"token_buckets=\(\) must be ascending"),
    ],
)
def test_bad_buckets(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(BUCKETS, **change)
