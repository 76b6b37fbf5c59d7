"""The words of a scenario: lines, options, and histories written in letters.

A history is written as in `S A B x y`. A word that starts with a capital letter is one full page, whose tokens occur
nowhere else; any other word is one token. `|`, `[` and `]` are for the reader and mean nothing. `#` starts a comment.
"""

import re
from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from penelope_jax.errors import InputError

_PAGE = re.compile(r"[A-Z][A-Za-z0-9]*")
_TOKEN = re.compile(r"[a-z0-9][a-z0-9.]*")
_FOR_THE_READER = str.maketrans("|[]", "   ")


class Line(NamedTuple):
    """A line that is not empty: `place` is `FILE:LINE`, `text` what follows the command, options removed."""

    place: str
    command: str
    text: str
    options: dict[str, str]

    def only(self, allowed: Collection[str]) -> None:
        """Raises InputError when an option is given that is not among `allowed`."""
        for name in self.options:
            if name not in allowed:
                known = f"; known: {', '.join(sorted(allowed))}" if allowed else "; it takes none"
                raise InputError(f"{self.place}: unknown option {name!r} of {self.command}{known}.")

    def number(self, name: str, default: int) -> int:
        """Returns an option that is a whole number of at least 0, or `default` when it is not given."""
        return default if name not in self.options else whole(self.options[name], f"{self.place}: {name}")


def read_line(source: str, place: str) -> Line | None:
    """Returns the command of a source line, or None when there is none.

    Raises:
        InputError: an option is given twice.
    """
    words = source.partition("#")[0].split()
    if not words:
        return None
    options: dict[str, str] = {}
    rest = []
    for word in words[1:]:
        name, equals, value = word.partition("=")
        if not equals:
            rest.append(word)
        elif name in options:
            raise InputError(f"{place}: option {name!r} is given twice.")
        else:
            options[name] = value
    return Line(place, words[0], " ".join(rest), options)


def whole(text: str, what: str) -> int:
    """Returns `text` as a whole number of at least 0, or raises InputError, which calls it `what`."""
    if not text.isascii() or not text.isdigit():
        raise InputError(f"{what} must be a whole number of at least 0, got {text!r}.")
    return int(text)


def one_word(line: Line) -> str:
    """Returns the one word that follows a command, or raises InputError."""
    if len(line.text.split()) != 1:
        raise InputError(f"{line.place}: {line.command} needs one name, got {line.text!r}.")
    return line.text


def no_words(line: Line) -> None:
    """Raises InputError when anything follows a command that stands alone."""
    if line.text:
        raise InputError(f"{line.place}: {line.command} takes no words, got {line.text!r}.")


def is_token(word: str) -> bool:
    """Whether a word is the name of one token; requests are named like that too."""
    return bool(_TOKEN.fullmatch(word))


def plain(text: str) -> str:
    """Returns a history's text without what is only for the reader."""
    return " ".join(text.translate(_FOR_THE_READER).split())


def parts(text: str) -> list[str]:
    """Returns what stands between commas, as plain text, without empty parts."""
    return [part for part in (plain(part) for part in text.split(",")) if part]


class Vocabulary:
    """Numbers tokens as they come up, and gives their names back."""

    def __init__(self, page_size: int):
        self.page_size = page_size
        self._ids: dict[str, int] = {}
        self._names: list[str] = []

    def __len__(self) -> int:
        return len(self._names)

    def token(self, name: str) -> int:
        """Returns the id of a token, a new one if it has not come up."""
        if name not in self._ids:
            self._ids[name] = len(self._names)
            self._names.append(name)
        return self._ids[name]

    def tokens(self, text: str, place: str) -> np.ndarray:
        """Returns i32[n], the tokens of a history.

        Raises:
            InputError: a word is neither a page nor a token, or a page starts off a page border.
        """
        ids: list[int] = []
        for word in plain(text).split():
            if _PAGE.fullmatch(word):
                if len(ids) % self.page_size:
                    raise InputError(
                        f"{place}: page {word} starts at position {len(ids)}, which is not a multiple of "
                        f"page_size={self.page_size}."
                    )
                ids.extend(self.token(f"{word}.{offset}") for offset in range(self.page_size))
            elif _TOKEN.fullmatch(word):
                ids.append(self.token(word))
            else:
                raise InputError(f"{place}: {word!r} is neither a page (A, B2) nor a token (x, y2).")
        return np.array(ids, np.int32)

    def name(self, token: int) -> str:
        """Returns the name of a token."""
        return self._names[token]

    def page(self, tokens: np.ndarray) -> str:
        """Returns the name of a page: its letter, or its tokens in brackets."""
        names = [self._names[token] for token in tokens.tolist()]
        letter = names[0].partition(".")[0]
        if _PAGE.fullmatch(letter) and names == [f"{letter}.{offset}" for offset in range(self.page_size)]:
            return letter
        return names[0] if len(names) == 1 else f"[{' '.join(names)}]"
