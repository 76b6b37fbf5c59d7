"""Deterministic mode: a row's bits do not depend on what else is in the batch, on the bucket, or on what the row is.

Each geometry computes one history at once in a large bucket. Everything else must reproduce its K/V bytes, samples and
log-probabilities bit for bit: other buckets, chunks, one-token steps, and holes refilled over NaN-filled pages beside
another sequence. Exact on CPU; on other platforms it is not established.
"""

import dataclasses

import numpy as np
import pytest
from step_world import DRAWN, GREEDY, History, bits, geometry, plan, poison

from penelope_jax.executor import JaxExecutor
from penelope_jax.models import random_weights
from penelope_jax.models.layers import single_device_mesh
from penelope_jax.segments import SegmentKind

PAGE_SIZE = 16
NUM_PAGES = 120
PROMPT_LEN = 701  # more than one group of keys, not a multiple of the page or of any tile
NUM_OUTPUTS = 6

GEOMETRIES = {
    "4-2x32-f32": geometry(4, 2, 32, 64),
    "4-2x32-bf16": geometry(4, 2, 32, 128, "bfloat16"),
    "4-1x64-f32": geometry(4, 1, 64, 128),
    "8-4x16-bf16": geometry(8, 4, 16, 256, "bfloat16"),
}


@dataclasses.dataclass
class Truth:
    """What a computation of the whole prompt at once gives."""

    executor: JaxExecutor  # small buckets; every test starts from a pool full of NaN
    history: History
    other: History
    tokens: list[int]  # NUM_OUTPUTS samples, greedy and drawn in turn
    logprobs: np.ndarray
    scores: np.ndarray  # of the prompt
    pages: np.ndarray  # stored bytes


def sampling_of(output: int):
    return (GREEDY, DRAWN)[output % 2]


def decode(executor: JaxExecutor, history: History, start: int, first: tuple[int, float], beside=()):
    """Decodes from position `start` on, where `first` was sampled; returns tokens and log-probabilities."""
    tokens, logprobs = [first[0]], [first[1]]
    for output in range(1, NUM_OUTPUTS):
        position = start + output - 1
        history.tokens[position] = tokens[-1]
        # With another sequence in the batch this row's sample is not the first.
        row = history.segment(position, position + 1, SegmentKind.DECODE, sample=sampling_of(output), feed=len(beside))
        done = executor.run(plan(*beside, row, step=output))
        tokens.append(int(done.tokens[-1]))
        logprobs.append(done.logprobs[-1])
    return tokens, np.array(logprobs)


@pytest.fixture(scope="module", params=list(GEOMETRIES))
def truth(request) -> Truth:
    config = GEOMETRIES[request.param]
    params = random_weights.random_params(config, single_device_mesh())
    options = {"page_size": PAGE_SIZE, "max_context": 1024, "deterministic": True, "scoring": True}
    whole = JaxExecutor(config, params, num_pages=NUM_PAGES, max_segments=3, max_step_tokens=1024,
                        token_buckets=(1024,), **options)  # fmt: skip
    random = np.random.default_rng(1)
    ids = random.permutation(NUM_PAGES)
    history = History(random.integers(0, 256, PROMPT_LEN + NUM_OUTPUTS), ids[:50], scored=True)
    other = History(random.integers(0, 256, 500), ids[50:90], request_id=1, scored=True)
    poison(whole, np.arange(NUM_PAGES))
    done = whole.run(plan(history.segment(0, PROMPT_LEN, sample=sampling_of(0))))
    tokens, logprobs = decode(whole, history, PROMPT_LEN, (int(done.tokens[0]), done.logprobs[0]))
    split = JaxExecutor(config, params, num_pages=NUM_PAGES, max_segments=7, max_step_tokens=384,
                        token_buckets=(64, 384), **options)  # fmt: skip
    pages = whole.read_pages(history.pages)
    assert np.isfinite(logprobs).all() and np.isfinite(done.scores[0][: PROMPT_LEN - 1]).all()
    return Truth(split, history, other, tokens, logprobs, done.scores[0], pages)


def check_pages(truth: Truth, stop: int = PROMPT_LEN) -> None:
    """Compares every stored K/V value of positions below `stop`."""
    found = truth.executor.read_pages(truth.history.pages)
    positions = np.arange(len(truth.history.pages) * PAGE_SIZE).reshape(-1, PAGE_SIZE)
    known = np.broadcast_to((positions < stop)[:, None, None, None, :, None], found.shape)
    np.testing.assert_array_equal(bits(found)[known], bits(truth.pages)[known])


def check_scores(truth: Truth, start: int, scores: np.ndarray) -> None:
    expected = truth.scores[start : start + len(scores)]
    known = np.arange(start, start + len(scores)) < PROMPT_LEN - 1  # the next token of the last one is sampled
    np.testing.assert_array_equal(bits(scores)[known], bits(expected)[known])


def check_outputs(truth: Truth, tokens, logprobs) -> None:
    assert list(tokens) == truth.tokens
    np.testing.assert_array_equal(bits(np.asarray(logprobs)), bits(truth.logprobs))


@pytest.fixture(autouse=True)
def poisoned(truth):
    poison(truth.executor, np.arange(NUM_PAGES))


def test_chunks_and_buckets(truth):
    """Chunks end on page boundaries but not on tiles; the other sequence shares some of the steps, before or behind."""
    run, history, other = truth.executor.run, truth.history, truth.other
    check_scores(truth, 0, run(plan(history.segment(0, 48))).scores[0])
    done = run(plan(other.segment(0, 80), history.segment(48, 336)))
    check_scores(truth, 48, done.scores[1])
    done = run(plan(history.segment(336, 352), other.segment(80, 96, sample=DRAWN)))
    check_scores(truth, 336, done.scores[0])
    last = history.segment(352, PROMPT_LEN, sample=sampling_of(0))
    done = run(plan(other.segment(96, 97, SegmentKind.DECODE, sample=GREEDY), last, other.segment(96 + 16, 128)))
    check_scores(truth, 352, done.scores[1])
    check_pages(truth)
    beside = (other.segment(160, 161, SegmentKind.DECODE, sample=GREEDY),)
    outputs = decode(truth.executor, history, PROMPT_LEN, (int(done.tokens[1]), done.logprobs[1]), beside)
    check_outputs(truth, *outputs)
    check_pages(truth, PROMPT_LEN + NUM_OUTPUTS - 1)


def test_one_token_steps(truth):
    """A token computed alone, as a decode, equals the same token inside a prompt."""
    run, history = truth.executor.run, truth.history
    run(plan(history.segment(0, 384)))
    run(plan(history.segment(384, 672)))
    scores = []
    for position in range(672, PROMPT_LEN):
        row = history.segment(position, position + 1, SegmentKind.DECODE, sample=sampling_of(0))
        done = run(plan(row))
        scores.append(done.scores[0][0])
    check_scores(truth, 672, np.array(scores))
    check_pages(truth)
    check_outputs(truth, *decode(truth.executor, history, PROMPT_LEN, (int(done.tokens[0]), done.logprobs[0])))


def refill(truth: Truth, *, flip: int | None = None):
    """Computes the prompt, loses three holes, and refills them with the last tokens beside another sequence.

    Returns:
        The step that did it, and which of its scores begins where.
    """
    executor, history, other = truth.executor, truth.history, truth.other
    executor.run(plan(history.segment(0, 384)))
    executor.run(plan(history.segment(384, 656)))
    holes = ((16, 64), (128, 144), (512, 656))
    lost = np.concatenate([history.pages[start // PAGE_SIZE : stop // PAGE_SIZE] for start, stop in holes])
    free = np.setdiff1d(np.arange(NUM_PAGES), np.concatenate([history.pages[: 656 // PAGE_SIZE], other.pages]))
    poison(executor, np.concatenate([lost, free]))
    if flip is not None:
        executor.flip_bit(int(history.pages[flip // PAGE_SIZE]), layer=0, token=flip % PAGE_SIZE)
    new = history.segment(656, PROMPT_LEN, sample=sampling_of(0))
    phantoms = [history.segment(start, stop, SegmentKind.PHANTOM) for start, stop in holes]
    order = (phantoms[2], other.segment(0, 30), phantoms[0], new, phantoms[1])
    return executor.run(plan(*order)), {512: 0, 16: 2, 656: 3, 128: 4}


def test_refilled_holes(truth):
    done, starts = refill(truth)
    for start, index in starts.items():
        check_scores(truth, start, done.scores[index])
    check_pages(truth)
    check_outputs(truth, *decode(truth.executor, truth.history, PROMPT_LEN, (int(done.tokens[0]), done.logprobs[0])))


def test_control_one_flipped_bit_shows(truth):
    """One bit of one key that the holes and the new tokens read: the same comparisons must see it."""
    done, starts = refill(truth, flip=300)
    with pytest.raises(AssertionError):
        check_pages(truth)
    with pytest.raises(AssertionError):
        check_scores(truth, 656, done.scores[starts[656]])


def test_scores_of_resident_positions(truth):
    """Rows that write nothing and attend to what is cached score as the rows that computed it."""
    run, history, other = truth.executor.run, truth.history, truth.other
    run(plan(history.segment(0, 384)))
    run(plan(history.segment(384, PROMPT_LEN)))
    before = truth.executor.read_pages(np.arange(NUM_PAGES))
    for start, stop in ((0, 300), (300, 600), (600, PROMPT_LEN)):
        check_scores(truth, start, run(plan(history.segment(start, stop, SegmentKind.SCORE))).scores[0])
    np.testing.assert_array_equal(bits(truth.executor.read_pages(np.arange(NUM_PAGES))), bits(before))
    # A segment whose front is resident and whose end is new: only the end is written.
    mixed = history.segment(640, PROMPT_LEN, write_from=672)
    poison(truth.executor, history.pages[672 // PAGE_SIZE : -(-PROMPT_LEN // PAGE_SIZE)])
    check_scores(truth, 640, run(plan(other.segment(0, 16), mixed)).scores[1])
    check_pages(truth)
