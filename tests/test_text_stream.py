"""Text as it grows: stop strings across the borders of tokens and characters, and nothing let go too early."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tokenizer import FALLBACK, SMALL

from penelope_jax.text_stream import TextStream
from penelope_jax.tokenizer import Tokenizer

TOKENIZERS = pytest.mark.parametrize("tokenizer", [SMALL, FALLBACK], ids=["byte-level", "byte-fallback"])


def stream_of(tokenizer: Tokenizer, *stops: str, min_tokens: int = 0) -> TextStream:
    return TextStream(tokenizer.detokenizer(), stops, min_tokens=min_tokens)


def parts_until_stopped(stream: TextStream, tokens: list[int]) -> list[str]:
    parts = []
    for token in tokens:
        over = stream.push(token)
        parts.append(stream.take())
        if over:
            break
    stream.finish()
    return [*parts, stream.take()]


class OneByOne:
    """A detokenizer whose token i is the i-th of some texts."""

    def __init__(self, *texts: str):
        self.texts = texts

    def push(self, tokens) -> str:
        return "".join(self.texts[token] for token in tokens)

    def flush(self) -> str:
        return ""


def test_without_stop_strings_nothing_is_held_back():
    stream = TextStream(OneByOne("ab", "c"))
    assert parts_until_stopped(stream, [0, 1]) == ["ab", "c", ""]
    assert (stream.stopped_at, stream.num_tokens) == (None, 2)


def test_a_stop_string_across_tokens_is_held_back_and_not_told():
    stream = TextStream(OneByOne("one\n", "\nU", "ser", ": two"), ("\n\nUser:",))
    assert parts_until_stopped(stream, [0, 1, 2, 3]) == ["one", "", "", "", ""]
    assert (stream.stopped_at, stream.num_tokens) == ("\n\nUser:", 4)


def test_what_only_looked_like_a_stop_string_comes_out():
    stream = TextStream(OneByOne("a<", "/b", "<", "</", "c"), ("</c>",))
    assert parts_until_stopped(stream, [0, 1, 2, 3, 4]) == ["a", "</b", "", "<", "", "</c"]
    assert stream.stopped_at is None


def test_of_several_the_first_to_begin_counts():
    assert parts_until_stopped(TextStream(OneByOne("xabcy"), ("bc", "abc", "y")), [0]) == ["x", ""]
    stream = TextStream(OneByOne("xab", "c"), ("abc", "b"))
    assert parts_until_stopped(stream, [0, 1])[0] == "xa"
    assert stream.stopped_at == "b"


def test_nothing_comes_behind_a_stop():
    stream = TextStream(OneByOne("a.", "b"), (".",))
    assert stream.push(0) and stream.push(1)
    stream.finish()
    assert (stream.take(), stream.take(), stream.num_tokens) == ("a", "", 1)


def test_stop_strings_that_the_first_tokens_complete_are_text():
    texts = ("a.", "b", ".", "c.d")
    stream = TextStream(OneByOne(*texts), (".",), min_tokens=3)
    assert parts_until_stopped(stream, [0, 1, 2, 3]) == ["a.", "b", ".", "c", ""]
    # It may begin in them.
    stream = TextStream(OneByOne("a-", "-b"), ("--",), min_tokens=1)
    assert parts_until_stopped(stream, [0, 1]) == ["a", "", ""]


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError) as caught:
        TextStream(OneByOne(), ("a", ""))
    assert str(caught.value) == "stop string 1 of 2 is empty; at least 1 character is needed."


@TOKENIZERS
def test_a_stop_string_of_one_character_in_four_tokens(tokenizer):
    tokens = [token for token in tokenizer.encode("ab😀cd").tolist()]
    stream = stream_of(tokenizer, "😀c")
    parts = parts_until_stopped(stream, tokens)
    assert "".join(parts) == "ab" and stream.stopped_at == "😀c"
    assert stream.num_tokens < len(tokens)


@TOKENIZERS
def test_half_a_character_at_the_end_is_no_stop_string(tokenizer):
    tokens = tokenizer.encode("ab😀").tolist()[:-1]
    stream = stream_of(tokenizer, "😀")
    text = "".join(parts_until_stopped(stream, tokens))
    assert stream.stopped_at is None
    assert text.startswith("ab") and set(text[2:]) <= {"\ufffd"}


@settings(max_examples=150)
@given(
    texts=st.lists(st.text("ab\u00e9", max_size=4), max_size=12),
    stops=st.lists(st.text("ab\u00e9", min_size=1, max_size=4), min_size=1, max_size=3),
    min_tokens=st.integers(0, 4),
)
def test_cut_as_if_the_text_were_searched_whole_after_each_token(texts, stops, min_tokens):
    stream = TextStream(OneByOne(*texts), tuple(stops), min_tokens=min_tokens)
    told, text = "", ""
    for token, added in enumerate(texts):
        over = stream.push(token)
        told += stream.take()
        before, text = len(text), text + added
        ends = [
            place
            for stop in stops
            for place in range(len(text) - len(stop) + 1)
            if text.startswith(stop, place) and place + len(stop) > before
        ]
        assert over == (token >= min_tokens and bool(ends))
        if over:
            stream.finish()
            assert told + stream.take() == text[: min(ends)]
            return
        assert text.startswith(told)
    stream.finish()
    assert told + stream.take() == text
