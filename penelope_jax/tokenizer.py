"""Text to token ids and back.

A `Tokenizer` is a `tokenizers.Tokenizer`, the special tokens it names, and the chat template. It is read from a
Hugging Face directory, or built from the vocabulary and merges that a GGUF file carries. Text that goes out token by
token passes through a `Detokenizer`, which holds back what is not a whole character yet.
"""

import codecs
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from penelope_jax.chat_template import ChatTemplate
from penelope_jax.models.config import read_json

_REPLACEMENT = "\ufffd"
_SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

# GGUF names the pre-tokenizer; these split text as the model's own tokenizer.json does.
_LETTERS_AND_DIGITS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Tokenizer:
    """A tokenizer with its special tokens and chat template.

    Args:
        tokenizer: the `tokenizers` object. Truncation and padding are switched off.
        special_tokens: text by name: `bos_token`, `eos_token`, ...
        chat_templates: template source by name; empty when the model has none.
        where: what to name in errors.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
        where: str = "tokenizer",
    ):
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = ChatTemplate(chat_templates or {}, self.special_tokens, where)

    @classmethod
    def from_directory(cls, directory: str | pathlib.Path) -> "Tokenizer":
        """Reads `tokenizer.json`, and what stands beside it, of a Hugging Face directory.

        The chat template is `chat_template.jinja`, else the one in `tokenizer_config.json`.

        Raises:
            ValueError: a file is missing or broken.
        """
        directory = pathlib.Path(directory)
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{path}: missing; slow tokenizers (vocab.txt, *.model) are not supported.")
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{path}: cannot be read: {error}.") from error
        config_path = directory / "tokenizer_config.json"
        config = read_json(config_path) if config_path.is_file() else {}
        return cls(
            tokenizer,
            special_tokens=_special_tokens(directory, config),
            chat_templates=_template_sources(directory, config),
            where=str(directory),
        )

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included. A model's embedding may be larger."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def token_id(self, token: str) -> int | None:
        """Returns the id of one token's text, or None."""
        return self._tokenizer.token_to_id(token)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> np.ndarray:
        """Returns i32[T]. Special tokens written out in `text` become their ids.

        Args:
            text: what to encode.
            add_special_tokens: whether to add what the tokenizer puts around a text (a BOS, for some). A rendered
                chat template already holds it.
        """
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids, dtype=np.int32)

    def decode(self, tokens: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of `tokens`; bytes that are no UTF-8 become U+FFFD."""
        return self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=skip_special_tokens)

    def save(self, path: str | pathlib.Path) -> None:
        """Writes a `tokenizer.json`; the chat template is not in it."""
        self._tokenizer.save(str(path))

    def detokenizer(self, *, skip_special_tokens: bool = True) -> "Detokenizer":
        """Returns a new stream of text for tokens that come a few at a time."""
        if isinstance(self._tokenizer.decoder, decoders.ByteLevel):
            return ByteLevelDetokenizer(self._tokenizer, skip_special_tokens)
        return WindowDetokenizer(self, skip_special_tokens)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> np.ndarray:
        """Returns i32[T] of a rendered conversation; `options` as in `ChatTemplate.render`."""
        return self.encode(self.chat_template.render(messages, **options))


class Detokenizer(Protocol):
    """Text of a growing token sequence. The parts, put together, equal the text of the whole."""

    def push(self, tokens: Iterable[int]) -> str:
        """Takes the next tokens; returns the text that is final now."""
        ...

    def flush(self) -> str:
        """Ends the sequence; returns what was held back."""
        ...


class ByteLevelDetokenizer:
    """For byte-level BPE (Llama 3, Qwen, SmolLM): each token is some bytes, so the work per token is constant."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, skip_special_tokens: bool):
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._skipped = {i for i, token in added.items() if token.special} if skip_special_tokens else set()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, tokens: Iterable[int]) -> str:
        return self._utf8.decode(b"".join(self._bytes(int(token)) for token in tokens))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)

    def _bytes(self, token_id: int) -> bytes:
        token = None if token_id in self._skipped else self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if all(character in _BYTE_OF_CHARACTER for character in token):
            return bytes(_BYTE_OF_CHARACTER[character] for character in token)
        return token.encode()  # an added token, written out


class WindowDetokenizer:
    """For other decoders, whose text of a token depends on its neighbours.

    Decodes a short window twice, with and without the new tokens, and gives out the difference once it does not end
    in U+FFFD. A decoder that falls back to bytes replaces a whole run of them when one is wrong, which no stream can
    take back; for text that is valid UTF-8 the parts equal the whole.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        self._num_given = 0  # of the window's tokens, those whose text is out

    def push(self, tokens: Iterable[int]) -> str:
        self._window.extend(int(token) for token in tokens)
        return self._give(final=False)

    def flush(self) -> str:
        return self._give(final=True)

    def _give(self, final: bool) -> str:
        before = self._decode(self._window[: self._num_given])
        text = self._decode(self._window)
        if len(text) <= len(before) or (text.endswith(_REPLACEMENT) and not final):
            return ""
        self._window = self._window[self._num_given :]
        self._num_given = len(self._window)
        return text[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=self._skip_special_tokens)


def byte_level_bpe(
    tokens: Sequence[str],
    merges: Sequence[str],
    *,
    pre_tokenizer: str,
    special_ids: Iterable[int],
    added_ids: Iterable[int] = (),
    bos_id: int | None = None,
    where: str,
) -> tokenizers.Tokenizer:
    """Builds the tokenizer of a byte-level BPE vocabulary.

    Args:
        tokens: token texts in the byte-level alphabet, by id.
        merges: "left right", best first.
        pre_tokenizer: how text is split first, by GGUF's name.
        special_ids: tokens matched whole in the text, and left out of decoded text.
        added_ids: tokens matched whole in the text and kept.
        bos_id: the token that `add_special_tokens` puts before a text; None for none.
        where: what to name in errors.

    Raises:
        ValueError: no such pre-tokenizer, or a merge that is not two tokens.
    """
    if pre_tokenizer not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise ValueError(f"{where}: pre-tokenizer {pre_tokenizer!r} is not supported; known: {known}.")
    pairs: list[Any] = [tuple(merge.split(" ")) for merge in merges]
    broken = next((i for i, pair in enumerate(pairs) if len(pair) != 2), None)
    if broken is not None:
        raise ValueError(f"{where}: merge {broken} is {merges[broken]!r}; must be two parts with a space between.")
    splitter, normalizer, ignore_merges = _PRE_TOKENIZERS[pre_tokenizer]
    vocab = {token: i for i, token in enumerate(tokens)}
    try:
        tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=ignore_merges))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{where}: vocabulary and merges do not fit: {error}.") from error
    tokenizer.pre_tokenizer = splitter()
    if normalizer is not None:
        tokenizer.normalizer = normalizer()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [tokenizers.AddedToken(tokens[i], special=True, normalized=False) for i in sorted(special_ids)]
    )
    tokenizer.add_tokens([tokenizers.AddedToken(tokens[i], special=False, normalized=False) for i in sorted(added_ids)])
    if bos_id is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[tokens[bos_id], "$A"], special_tokens=[(tokens[bos_id], bos_id)]
        )
    return tokenizer


def _digits_one_by_one() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def _split_by(digits: str) -> pre_tokenizers.PreTokenizer:
    pattern = tokenizers.Regex(_LETTERS_AND_DIGITS % digits)
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


# GGUF name -> (splitter, normalizer, whether a word that is a token needs no merges).
_PRE_TOKENIZERS = {
    "gpt-2": (lambda: pre_tokenizers.ByteLevel(add_prefix_space=False), None, False),
    "smollm": (_digits_one_by_one, None, False),
    "qwen2": (lambda: _split_by(""), normalizers.NFC, False),
    "llama-bpe": (lambda: _split_by("{1,3}"), None, True),
}


def _byte_alphabet() -> dict[str, int]:
    """Inverts GPT-2's byte alphabet: printable Latin-1 stands for itself, other bytes for characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_alphabet()


def _token_text(value: Any) -> str | None:
    """A token in tokenizer_config.json is its text, or an object whose `content` is."""
    return value.get("content") if isinstance(value, dict) else value


def _special_tokens(directory: pathlib.Path, config: Mapping[str, Any]) -> dict[str, str]:
    path = directory / "special_tokens_map.json"
    named = {**(read_json(path) if path.is_file() else {}), **config}
    return {name: text for name in _SPECIAL_TOKEN_NAMES if (text := _token_text(named.get(name)))}


def _template_sources(directory: pathlib.Path, config: Mapping[str, Any]) -> dict[str, str]:
    stored = config.get("chat_template")
    if isinstance(stored, list):
        sources = {entry["name"]: entry["template"] for entry in stored}
    else:
        sources = {} if stored is None else {"default": stored}
    path = directory / "chat_template.jinja"
    if path.is_file():
        sources = {"default": path.read_text(encoding="utf-8")}
    for extra in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        sources[extra.stem] = extra.read_text(encoding="utf-8")
    return sources
