"""Penalties, bias and masked endings against plain numpy; slots filled by the host and counted on the device agree."""

import collections
import dataclasses

import jax
import numpy as np
import pytest
from step_world import DRAWN, GREEDY, History, bits, geometry, plan
from test_sampling import rows

from penelope_jax.executor import JaxExecutor
from penelope_jax.models import random_weights
from penelope_jax.models.layers import single_device_mesh
from penelope_jax.sampling_slots import Slots, adjusted, count_tokens, put_slot, slot_of
from penelope_jax.segments import SamplingParams, SegmentKind, SlotStart

VOCAB, NUM_SLOTS = 60, 12
ADJUST = jax.jit(adjusted)
COUNT = jax.jit(count_tokens)


def penalised(logits: np.ndarray, tokens: list[int], prompt_len: int, sampling: SamplingParams) -> np.ndarray:
    """Returns one row's logits, changed as written in `SamplingParams`, one token at a time."""
    x = logits.astype(np.float64)
    for token, bias in sampling.logit_bias:
        x[token] += bias
    for token in set(tokens):
        x[token] *= sampling.repetition_penalty if x[token] <= 0 else 1 / sampling.repetition_penalty
    for token, number in collections.Counter(tokens[prompt_len:]).items():
        x[token] -= sampling.frequency_penalty * number + sampling.presence_penalty
    if len(tokens) - prompt_len < sampling.min_tokens:
        x[[token for token in sampling.end_token_ids if token < len(x)]] = -np.inf
    return x


def random_sampling(random: np.random.Generator) -> SamplingParams:
    """Draws each option half of the time."""

    def maybe(value, default):
        return value if random.random() < 0.5 else default

    biased = random.choice(VOCAB, 5, replace=False)
    return SamplingParams(
        repetition_penalty=maybe(float(random.uniform(0.5, 2)), 1.0),
        presence_penalty=maybe(float(random.uniform(-2, 2)), 0.0),
        frequency_penalty=maybe(float(random.uniform(-2, 2)), 0.0),
        logit_bias=maybe(tuple((int(token), float(random.uniform(-9, 9))) for token in biased), ()),
        min_tokens=maybe(int(random.integers(1, 9)), 0),
        stop_token_ids=maybe((3, 7, VOCAB + 5), ()),
        eos_token_ids=maybe((9,), ()),
        ignore_eos=bool(random.random() < 0.3),
    )


@dataclasses.dataclass
class Case:
    slots: Slots
    samplings: list[SamplingParams]
    histories: list[list[int]]
    prompt_lens: list[int]

    def rows(self, order) -> object:
        made = rows(len(order), position=[len(self.histories[index]) for index in order])
        return made.replace(slot=np.array(order, np.int32))


@pytest.fixture(scope="module")
def case() -> Case:
    random = np.random.default_rng(0)
    samplings = [random_sampling(random) for _ in range(NUM_SLOTS)]
    histories = [random.integers(0, VOCAB, int(random.integers(4, 60))).tolist() for _ in samplings]
    prompt_lens = [int(random.integers(1, len(history) + 1)) for history in histories]
    parts = [
        slot_of(sampling, SlotStart(np.array(history, np.int32), prompt_len), VOCAB)
        for sampling, history, prompt_len in zip(samplings, histories, prompt_lens)
    ]
    return Case(jax.tree.map(lambda *leaves: np.stack(leaves)[None], *parts), samplings, histories, prompt_lens)


def test_changed_logits_against_numpy(case):
    logits = (3 * np.random.default_rng(1).standard_normal((NUM_SLOTS, VOCAB))).astype(np.float32)
    found = np.asarray(ADJUST(logits, case.rows(range(NUM_SLOTS)), case.slots))
    for row in range(NUM_SLOTS):
        expected = penalised(logits[row], case.histories[row], case.prompt_lens[row], case.samplings[row])
        np.testing.assert_allclose(found[row], expected, rtol=1e-5, atol=1e-5, err_msg=str(case.samplings[row]))


def test_a_row_depends_on_its_slot_alone_and_without_one_on_nothing(case):
    random = np.random.default_rng(2)
    logits = random.standard_normal((NUM_SLOTS, VOCAB)).astype(np.float32)
    found = np.asarray(ADJUST(logits, case.rows(range(NUM_SLOTS)), case.slots))
    order = random.permutation(NUM_SLOTS)
    moved = np.asarray(ADJUST(logits[order], case.rows(order), case.slots))
    np.testing.assert_array_equal(bits(moved), bits(found[order]))
    some = case.rows(range(NUM_SLOTS))
    some.slot[::2] = -1
    half = np.asarray(ADJUST(logits, some, case.slots))
    np.testing.assert_array_equal(bits(half[::2]), bits(logits[::2]))
    np.testing.assert_array_equal(bits(half[1::2]), bits(found[1::2]))
    before = ADJUST._cache_size()
    ADJUST(logits, rows(NUM_SLOTS), case.slots)
    assert ADJUST._cache_size() == before


def test_tokens_counted_one_by_one_are_those_of_the_whole_history(case):
    """Rows in any place, some without a slot; the last tokens of prompts are no outputs."""
    random = np.random.default_rng(3)
    starts = [
        slot_of(sampling, SlotStart(np.array(history[: prompt_len - 1], np.int32), prompt_len), VOCAB)
        for sampling, history, prompt_len in zip(case.samplings, case.histories, case.prompt_lens)
    ]
    slots = jax.tree.map(lambda *leaves: np.stack(leaves)[None], *starts)
    places = [prompt_len - 1 for prompt_len in case.prompt_lens]
    while any(place < len(history) for place, history in zip(places, case.histories)):
        order = random.permutation(NUM_SLOTS)
        done = [places[index] >= len(case.histories[index]) or random.random() < 0.3 for index in order]
        tokens = [0 if skip else case.histories[index][places[index]] for index, skip in zip(order, done)]
        made = rows(NUM_SLOTS, position=[places[index] + 1 for index in order])
        slots = COUNT(slots, made.replace(slot=np.where(done, -1, order).astype(np.int32)), np.array(tokens, np.int32))
        for index, skip in zip(order, done):
            places[index] += not skip
    jax.tree.map(np.testing.assert_array_equal, slots, case.slots)


# On an executor.

CONFIG = geometry(4, 2, 16, 64)
STRICT = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.4, logit_bias=((5, 3.0),))


@pytest.fixture(scope="module")
def executor() -> JaxExecutor:
    executor = JaxExecutor(
        CONFIG,
        random_weights.random_params(CONFIG, single_device_mesh()),
        num_pages=40,
        page_size=8,
        max_context=128,
        max_segments=4,
        max_step_tokens=64,
        token_buckets=(64,),
        deterministic=True,
    )
    executor.warm_up()
    return executor


def test_no_option_compiles_anything(executor):
    history = History(np.random.default_rng(0).integers(0, 256, 64), np.arange(8))
    before = executor.num_compilations
    slots_before = put_slot._cache_size()
    options = [
        GREEDY,
        STRICT,
        DRAWN,
        dataclasses.replace(DRAWN, min_p=0.1, top_logprobs=20),
        dataclasses.replace(STRICT, temperature=1.0, min_tokens=4, stop_token_ids=(1, 2), top_logprobs=1),
    ]
    for step, sampling in enumerate(options):
        segment = history.segment(0, 20, sample=sampling)
        if sampling.needs_slot:
            start = SlotStart(history.tokens[:19], 20)
            segment = dataclasses.replace(segment, slot=3 - step % 4, slot_start=start)
        done = executor.run(plan(segment, step=step))
        assert (done.top_tokens is None) == (sampling.top_logprobs == 0)
        if sampling.top_logprobs:
            assert done.top_tokens is not None and done.top_logprobs is not None
            assert done.top_tokens.shape == done.top_logprobs.shape == (1, sampling.top_logprobs)
    assert (executor.num_compilations, put_slot._cache_size()) == (before, slots_before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slot": -1}, "slot=-1, but its sampling needs one in [0, 4)."),
        ({"slot": 4}, "slot=4 must be below 4, the slots there are."),
        ({"sample": None}, "slot=1 of a segment that samples nothing."),
        (
            {"slot_start": SlotStart(np.zeros(20, np.int32), 20)},
            "slot=1 starts with 20 tokens; it needs a slot, and the 19 tokens before its last one.",
        ),
        (
            {"slot_start": SlotStart(np.full(19, 256, np.int32), 20)},
            "token id 256 of its history of request 0 is outside [0, 256).",
        ),
        (
            {"sample": SamplingParams(logit_bias=((300, 1.0),))},
            "token id 300 of logit_bias of request 0 is outside [0, 256).",
        ),
    ],
)
def test_plans_that_contradict_themselves(executor, change, message):
    history = History(np.random.default_rng(0).integers(0, 256, 64), np.arange(8))
    good = dataclasses.replace(
        history.segment(0, 20, sample=STRICT), slot=1, slot_start=SlotStart(history.tokens[:19], 20)
    )
    executor.run(plan(good))
    with pytest.raises(ValueError) as caught:
        executor.run(plan(dataclasses.replace(good, **change)))
    assert str(caught.value).endswith(message)


def test_a_token_in_flight_counts(executor):
    """Steps dispatched ahead, each fed by the one before on the device, sample what steps one by one do."""
    random = np.random.default_rng(5)
    history = History(random.integers(0, 256, 128), random.permutation(40)[:16])
    outputs = []
    for ahead in (False, True):
        start = SlotStart(history.tokens[:29], 30)
        steps = [
            plan(dataclasses.replace(history.segment(0, 30, sample=STRICT), slot=2, slot_start=start)),
            *(
                plan(
                    dataclasses.replace(
                        history.segment(30 + step, 31 + step, SegmentKind.DECODE, sample=STRICT, feed=0), slot=2
                    ),
                    step=step + 1,
                )
                for step in range(12)
            ),
        ]
        if ahead:
            done = [executor.collect(pending) for pending in [executor.dispatch(step) for step in steps]]
        else:
            done = [executor.run(step) for step in steps]
        outputs.append([int(step.tokens[0]) for step in done])
    assert outputs[0] == outputs[1]
    greedy = [executor.run(plan(history.segment(0, 30, sample=GREEDY)))]
    for step in range(12):
        row = history.segment(30 + step, 31 + step, SegmentKind.DECODE, sample=GREEDY, feed=0)
        greedy.append(executor.run(plan(row, step=step + 1)))
    assert [int(step.tokens[0]) for step in greedy] != outputs[0], "the penalties change nothing here"
