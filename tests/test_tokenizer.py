"""Encoding, chat templates and incremental text, on a small byte-level tokenizer made here."""

import itertools
import json
import pathlib
import re
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from penelope_jax.chat_template import ChatTemplate
from penelope_jax.models.gguf_weights import GgufFile, smollm2_path
from penelope_jax.tokenizer import Tokenizer, byte_level_bpe

# Uses what templates of the field use: macros, namespaces, loop controls, tojson, filters, tests, whitespace control.
TEMPLATE = """\
{%- macro call_of(call) %}<call>{{ call.name }}({{ call.arguments | tojson }})</call>{% endmacro %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == "user" %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{{- bos_token -}}
{% if tools %}
<|start|>system
Tools:
    {% for tool in tools %}
{{ tool | tojson }}
    {% endfor %}
<|end|>
{% endif %}
{% for message in messages %}
    {% if message.role == "skip" %}{% continue %}{% endif %}
<|start|>{{ message.role }}
    {% if message.role == "assistant" %}
        {% if message.reasoning_content is defined and loop.index0 > ns.last %}
<think>{{ message.reasoning_content | trim }}</think>
        {% endif %}
        {% generation %}
{{ message.content or "" }}{% for call in message.tool_calls or [] %}{{ call_of(call.function) }}{% endfor +%}
        {% endgeneration %}
<|end|>
    {% else %}
{{ message.content }}<|end|>
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}
<|start|>assistant
{% if enable_thinking is defined and not enable_thinking %}
<think></think>
{% endif %}
{% endif %}
"""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "list_files",
            "description": "Lists <files> & folders, café too",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
        },
    }
]
CALL = {"type": "function", "function": {"name": "list_files", "arguments": {"path": "/tmp/é", "all": True, "n": None}}}
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What's in <tmp>? ½ 😀"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "  look first\n"},
    {"role": "tool", "content": '["a.txt", "b"]'},
    {"role": "assistant", "content": "Two files:\n\n- a.txt\n- b", "reasoning_content": "count"},
]
EXPECTED = """\
<s><|start|>system
Tools:
{"type": "function", "function": {"name": "list_files", "description": "Lists <files> & folders, café too", \
"parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}}}
<|end|>
<|start|>system
Be brief.<|end|>
<|start|>user
What's in <tmp>? ½ 😀<|end|>
<|start|>assistant
<think>look first</think>
<call>list_files({"path": "/tmp/é", "all": true, "n": null})</call>
<|end|>
<|start|>tool
["a.txt", "b"]<|end|>
<|start|>assistant
<think>count</think>
Two files:

- a.txt
- b
<|end|>
"""

WORDS = ["<s>", "<|start|>", "<|end|>", "<think>", "</think>"]
MERGES = ["t h", "th e", "Ġ the", "Ġ a", "l l", "a n", "an d", "Ġ and", "ð Ł", "ðŁ ĺ", "e r", "1 2"]


def make_tokenizer(pre_tokenizer: str = "qwen2") -> tokenizers.Tokenizer:
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES), *WORDS]
    special = [tokens.index(word) for word in WORDS[:3]]
    added = [tokens.index(word) for word in WORDS[3:]]
    return byte_level_bpe(
        tokens,
        MERGES,
        pre_tokenizer=pre_tokenizer,
        special_ids=special,
        added_ids=added,
        bos_id=special[0],
        where="test",
    )


def make_byte_fallback_tokenizer() -> tokenizers.Tokenizer:
    """The other kind: words with their leading space, bytes for what has no token (as Llama 2 has it)."""
    pieces = ["▁", *"abcdefghijklmnopqrstuvwxyz.,", "th", "the", "▁the"]
    vocab = {token: i for i, token in enumerate([*(f"<0x{byte:02X}>" for byte in range(256)), *pieces])}
    merges = [("t", "h"), ("th", "e"), ("▁", "the")]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


SMALL = Tokenizer(make_tokenizer(), special_tokens={"bos_token": "<s>", "eos_token": "<|end|>"})


def write_directory(directory: pathlib.Path, **config) -> pathlib.Path:
    make_tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def test_encode_and_decode():
    tokens = SMALL.encode("<|start|>the café and all 😀<|end|>")
    assert tokens.dtype == np.int32
    assert SMALL.decode(tokens) == "the café and all 😀"
    assert SMALL.decode(tokens, skip_special_tokens=False) == "<|start|>the café and all 😀<|end|>"
    assert tokens[0] == SMALL.token_id("<|start|>")
    assert tokens[1] == SMALL.token_id("the")
    assert SMALL.token_id("no such token") is None
    assert SMALL.encode("").shape == (0,)
    assert SMALL.encode("the", add_special_tokens=True).tolist() == [SMALL.token_id("<s>"), SMALL.token_id("the")]
    assert SMALL.vocab_size == 256 + len(MERGES) + len(WORDS)


@given(st.text())
def test_decode_inverts_encode(text):
    normal = tokenizers.normalizers.NFC().normalize_str(text)
    assert SMALL.decode(SMALL.encode(text), skip_special_tokens=False) == normal


@pytest.mark.parametrize(
    ("pre_tokenizer", "expected"),
    [
        ("qwen2", ["I", "'LL", " pay", " ", "1", "2", "3", "4", "€\n\n", " ", " (", "now", ")"]),
        ("llama-bpe", ["I", "'LL", " pay", " ", "123", "4", "€\n\n", " ", " (", "now", ")"]),
        ("gpt-2", ["I", "'", "LL", " pay", " 1234", "€", "\n\n ", " (", "now", ")"]),
        ("smollm", ["I", "'", "LL", " pay", " ", "1", "2", "3", "4", "€", "\n\n ", " (", "now", ")"]),
    ],
)
def test_pre_tokenizers_split_as_the_models_do(pre_tokenizer, expected):
    text = "I'LL pay 1234€\n\n  (now)"
    splitter = make_tokenizer(pre_tokenizer).pre_tokenizer
    assert [text[slice(*span)] for _, span in splitter.pre_tokenize_str(text)] == expected


def parts_of(tokenizer: Tokenizer, tokens: list[int], cuts: list[int], *, skip: bool) -> list[str]:
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip)
    bounds = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    pairs = itertools.pairwise(bounds)
    return [*(detokenizer.push(tokens[start:stop]) for start, stop in pairs), detokenizer.flush()]


@given(
    st.lists(st.integers(0, SMALL.vocab_size - 1), max_size=40),
    st.lists(st.integers(0, 40), max_size=40),
    st.booleans(),
)
def test_parts_of_any_tokens_equal_the_whole(tokens, cuts, skip):
    assert "".join(parts_of(SMALL, tokens, cuts, skip=skip)) == SMALL.decode(tokens, skip_special_tokens=skip)


FALLBACK = Tokenizer(make_byte_fallback_tokenizer())


@given(st.text(alphabet="the a.é€😀\u00a0x"), st.lists(st.integers(0, 60), max_size=60))
def test_parts_of_text_equal_the_whole_with_byte_fallback(text, cuts):
    tokens = FALLBACK.encode(text).tolist()
    assert "".join(parts_of(FALLBACK, tokens, cuts, skip=True)) == FALLBACK.decode(tokens)


@pytest.mark.parametrize("tokenizer", [SMALL, FALLBACK], ids=["byte-level", "byte-fallback"])
def test_half_a_character_is_held_back(tokenizer):
    tokens = tokenizer.encode("a😀b").tolist()
    detokenizer = tokenizer.detokenizer()
    parts = [detokenizer.push([token]) for token in tokens]
    assert [part for part in parts if part] == ["a", "😀", "b"]
    assert parts[0] == "a" or tokenizer is FALLBACK
    assert detokenizer.flush() == ""
    cut_off = tokenizer.detokenizer()
    assert "".join(cut_off.push([token]) for token in tokens[:-2]) == "a"
    assert re.fullmatch("\ufffd+", cut_off.flush())


def test_tool_conversation_is_rendered_as_written(tmp_path):
    tokenizer = Tokenizer.from_directory(write_directory(tmp_path, chat_template=TEMPLATE, bos_token="<s>"))
    render = tokenizer.chat_template.render
    assert render(MESSAGES, tools=TOOLS, add_generation_prompt=False) == EXPECTED
    opened = render(MESSAGES, tools=TOOLS, enable_thinking=False)
    assert opened == EXPECTED + "<|start|>assistant\n<think></think>\n"
    np.testing.assert_array_equal(
        tokenizer.encode_chat(MESSAGES, tools=TOOLS, enable_thinking=False), tokenizer.encode(opened)
    )


def test_appended_turns_keep_the_tokens_before_them(tmp_path):
    tokenizer = Tokenizer.from_directory(write_directory(tmp_path, chat_template=TEMPLATE, bos_token="<s>"))
    plain = [message for message in MESSAGES if message["role"] != "assistant"]
    whole = tokenizer.encode_chat(plain, add_generation_prompt=False)
    for count in range(len(plain)):
        part = tokenizer.encode_chat(plain[:count], add_generation_prompt=False)
        np.testing.assert_array_equal(whole[: len(part)], part)
    text = tokenizer.chat_template.render(plain, add_generation_prompt=False)
    pieces = [piece for piece in re.split(r"(?=<\|start\|>)", text) if piece]
    np.testing.assert_array_equal(np.concatenate([tokenizer.encode(piece) for piece in pieces]), whole)


def test_where_templates_come_from(tmp_path):
    def names_and_text():
        template = Tokenizer.from_directory(tmp_path).chat_template
        return template.names, template.render([]) if template.names else None

    write_directory(tmp_path)
    assert names_and_text() == ((), None)
    listed = [{"name": "default", "template": "listed"}, {"name": "tool_use", "template": "tools"}]
    write_directory(tmp_path, chat_template=listed)
    assert names_and_text() == (("default", "tool_use"), "listed")
    assert Tokenizer.from_directory(tmp_path).chat_template.render([], tools=[]) == "tools"
    (tmp_path / "chat_template.jinja").write_text("file, {{ eos_token }}{{ pad_token is defined }}")
    assert names_and_text() == (("default",), "file, False")
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "</s>", "lstrip": false}}')
    assert names_and_text() == (("default",), "file, </s>False")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("{{ documents[0].text }}")
    template = Tokenizer.from_directory(tmp_path).chat_template
    assert template.render([], name="rag", documents=[{"text": "found"}]) == "found"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "dir: chat template 'default': roles must alternate"),
        (
            "{{ messages.append(1) }}",
            "dir: chat template 'default': access to attribute 'append' of 'list' object is unsafe",
        ),
        ("{{ messages[0].content + 1 }}", "dir: chat template 'default': "),
        (
            "{{ ''.__class__ }}x{{ ''.__class__.mro() }}",
            "dir: chat template 'default': access to attribute '__class__'",
        ),
    ],
)
def test_templates_that_refuse_or_misbehave(source, message):
    template = ChatTemplate({"default": source}, {}, "dir")
    with pytest.raises(ValueError) as raised:
        template.render([{"role": "user", "content": "hi"}])
    assert message in str(raised.value)


def test_template_errors_name_the_place():
    with pytest.raises(ValueError, match=r"dir: chat template 'default', line 2: "):
        ChatTemplate({"default": "a\n{% if %}"}, {}, "dir")
    with pytest.raises(ValueError, match="dir: no chat template 'default'; known: none"):
        ChatTemplate({}, {}, "dir").render([])


def test_strftime_now_is_there():
    text = ChatTemplate({"default": "{{ strftime_now('%Y-%m-%d') }}"}, {}, "dir").render([])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", text)


def test_missing_and_broken_tokenizer_files(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer\.json: missing; slow tokenizers"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json: cannot be read: "):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.oracle
@pytest.mark.filterwarnings("default")
def test_smollm2_template_and_ids_equal_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("gguf", reason="needs the extra [demo]")
    try:
        file = GgufFile(smollm2_path())
    except ValueError as error:
        pytest.skip(str(error))
    ours, source = file.tokenizer(), file.field("tokenizer.chat_template")
    ours.save(tmp_path / "tokenizer.json")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    chat = [
        {"role": role, "content": f"{role}: It's 12 o'clock, <|im_end|> né?"}
        for role in ("system", "user", "assistant")
    ]
    for messages in (chat, chat[1:]):
        text = ours.chat_template.render(messages)
        expected = theirs.apply_chat_template(
            messages, chat_template=source, tokenize=False, add_generation_prompt=True
        )
        assert text == expected
        assert ours.encode(text).tolist() == theirs(text)["input_ids"]


@pytest.mark.oracle
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("place", ["file", "config", "list"])
def test_chat_template_and_ids_equal_transformers(tmp_path, place):
    transformers = pytest.importorskip("transformers")
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<|end|>"}
    if place == "config":
        config["chat_template"] = TEMPLATE
    elif place == "list":
        config["chat_template"] = [{"name": name, "template": name + TEMPLATE} for name in ("default", "tool_use")]
    write_directory(tmp_path, **config)
    if place == "file":
        (tmp_path / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer.from_directory(tmp_path)
    for tools in (None, TOOLS):
        for count in range(1, len(MESSAGES) + 1):
            for opened in (True, False):
                options: dict[str, Any] = {"add_generation_prompt": opened, "enable_thinking": not opened}
                expected = theirs.apply_chat_template(MESSAGES[:count], tools=tools, tokenize=False, **options)
                text = ours.chat_template.render(MESSAGES[:count], tools=tools, **options)
                assert text.encode() == expected.encode()
                assert ours.encode(text).tolist() == theirs(text, add_special_tokens=False)["input_ids"]
    assert ours.decode(ours.encode(text)) == theirs.decode(theirs(text)["input_ids"], skip_special_tokens=True)
