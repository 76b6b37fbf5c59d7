"""Values as bytes: they come back, equal ones have equal bytes, and anything else is refused clearly."""

import dataclasses

import numpy as np
import pytest
from deep_copies import rendered
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from penelope_jax.config import Start
from penelope_jax.events import Submit
from penelope_jax.prompt_store import Place, PromptStore
from penelope_jax.segments import EvictedSpan, SamplingParams, StepDone
from penelope_jax.value_bytes import ByteReader, brief_bytes, put, put_fields

CLASSES = {cls.__name__: cls for cls in (SamplingParams, StepDone, Submit, Start)}

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.sampled_from(Start)
)
dtypes = st.sampled_from(["<i4", "<i8", "<f4", "<f8", "|b1", "|u1", "<U3"])
some_arrays = arrays.arrays(dtypes, arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
values = st.recursive(scalars | some_arrays, lambda items: st.lists(items, max_size=3).map(tuple))


def written(value):
    out = bytearray()
    put(out, value)
    return bytes(out)


@settings(max_examples=60)
@given(values)
def test_values_come_back(value):
    data = ByteReader(written(value), CLASSES)
    assert rendered(data.value()) == rendered(value)
    assert data.done


def test_dataclasses_come_back_with_all_their_fields():
    event = StepDone(
        step=3,
        tokens=np.array([4, 5], np.int32),
        logprobs=np.array([-1.5, np.nan], np.float32),
        scores=(np.array([np.nan, -2], np.float32), np.empty(0, np.float32)),
        time_s=1.25,
    )
    assert rendered(ByteReader(written(event), CLASSES).value()) == rendered(event)
    event = dataclasses.replace(event, top_tokens=np.ones((2, 3), np.int32), top_logprobs=np.ones((2, 3), np.float32))
    assert rendered(ByteReader(written(event), CLASSES).value()) == rendered(event)
    sampling = SamplingParams(
        temperature=0.5,
        seed=2**32 - 1,
        stop_token_ids=(1, 2),
        max_tokens=None,
        min_p=0.25,
        logit_bias=((7, -100), (9, 0.5)),
        ignore_eos=True,
    )
    assert ByteReader(written(sampling), CLASSES).value() == sampling


def test_numpy_scalars_and_named_tuples_are_plain_values():
    assert written(np.int64(-5)) == written(-5)
    assert written(np.float32(0.5)) == written(0.5)
    assert written(np.bool_(True)) == written(True)
    assert written(np.str_("a")) == written("a")
    assert written(EvictedSpan(1, 2, 3)) == written((1, 2, 3))
    assert written(np.array([1, 2], ">i4")) == written(np.array([1, 2], "<i4"))
    assert written(np.arange(6, dtype=np.int32)[::2]) == written(np.array([0, 2, 4], np.int32))


def test_different_values_have_different_bytes():
    different = [0, False, None, 0.0, "", (), (0,), ((),), ("",), np.zeros(0, np.int32), np.zeros(0, np.int64)]
    different += [np.zeros((0, 1), np.int32), np.zeros(1, np.int32), Start.LEAF_HEAD, "LEAF_HEAD", SamplingParams()]
    assert len({written(value) for value in different}) == len(different)


def test_brief_bytes_do_not_change_when_a_field_is_added_and_not_used():
    @dataclasses.dataclass(frozen=True)
    class Params:
        seed: int = 0

    before = brief_bytes((Params(), Params(7)))

    @dataclasses.dataclass(frozen=True)
    class Params:
        seed: int = 0
        min_p: float = 0.0
        bias: tuple = ()

    assert brief_bytes((Params(), Params(7))) == before
    assert brief_bytes((Params(), Params(7, 0.5))) != before
    assert brief_bytes(SamplingParams(temperature=0.0)) != brief_bytes(SamplingParams(temperature=1.0))


@pytest.mark.parametrize("value", [{}, [1], b"x", {1}, object(), np.array([None])])
def test_other_values_are_refused(value):
    with pytest.raises(TypeError, match="cannot be written as bytes"):
        put(bytearray(), value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "1 bytes wanted, 0 left."),
        (b"s\x05abc", "5 bytes wanted, 3 left."),
        (b"q", "unknown tag b'q'."),
        (b"r\x03Foo", "unknown class 'Foo'."),
        (b"e\x05Start\x01x", "Start has no 'x'."),
        (b"r\x0eSamplingParams\x01qn\0", "SamplingParams has no field 'q' in this version."),
        (b"a\x02zz\0", "unknown dtype 'zz'."),
        (b"a\x03<i4\x01\x02abc", "8 bytes wanted, 3 left."),
        (b"i\xff", "1 bytes wanted, 0 left."),
    ],
)
def test_bytes_that_are_no_value(data, message):
    with pytest.raises(ValueError) as caught:
        ByteReader(data, CLASSES).value()
    assert str(caught.value) == message


@given(st.binary(max_size=60))
def test_any_bytes_give_a_value_or_a_value_error(data):
    try:
        ByteReader(data, CLASSES).value()
    except (ValueError, TypeError, RecursionError):
        pass


def test_fields_can_be_left_out():
    out = bytearray()
    put_fields(out, Submit(request_id=7, tokens=np.zeros(9, np.int32)), without=("tokens",))
    fields = ByteReader(bytes(out), CLASSES).fields(Submit)
    assert fields == {"request_id": 7, "sampling": SamplingParams(), "session_id": "", "cache_salt": "", "time_s": 0.0}


lists = st.lists(st.lists(st.integers(0, 3), max_size=12).map(lambda items: np.array(items, np.int32)), max_size=12)


@settings(max_examples=60)
@given(lists)
def test_lists_share_the_longest_prefix_there_is(sequence):
    store, seen = PromptStore(), []
    for tokens in sequence:
        place = store.find(tokens)
        common = [
            next((i for i, (a, b) in enumerate(zip(tokens, other)) if a != b), min(len(tokens), len(other)))
            for other in seen
        ]
        assert place.start == max(common, default=0)
        assert store.prefix(place).tolist() == tokens[: place.start].tolist()
        store.add(place, tokens[place.start :])
        assert store.find(tokens).start == len(tokens)
        seen.append(tokens)
    assert store.num_tokens <= sum(map(len, seen))


def test_places_that_do_not_exist():
    store = PromptStore()
    store.add(Place(0, 0), np.array([5, 6], np.int32))
    with pytest.raises(ValueError, match="^tail 2 is not among the 2 known.$"):
        store.add(Place(2, 0), np.array([1], np.int32))
    with pytest.raises(ValueError, match="^tail 1 does not reach position 3.$"):
        store.add(Place(1, 3), np.array([1], np.int32))


def test_fields_that_were_added_are_left_out_while_nobody_uses_them():
    plain = written(SamplingParams(temperature=0.5))
    assert b"temperature" in plain and b"min_p" not in plain and b"top_k" in plain
    assert b"min_p" in written(SamplingParams(min_p=0.5)) and b"ignore_eos" in written(SamplingParams(ignore_eos=True))
    assert ByteReader(plain, CLASSES).value() == SamplingParams(temperature=0.5)
