"""Token lists as what they have in common with earlier ones, and the rest.

A session sends its whole history again every turn. Here each list is a prefix of an earlier list and a tail, so what
is stored and written is only what nobody sent before. Lists form a tree of tails; a tail is never cut, since lists may
branch off at any token of it. Writer and reader of a log hold the same tree and forget it at the same moment.
"""

from typing import NamedTuple

import numpy as np

from penelope_jax.pages import frozen

ROOT = 0


class _Tail(NamedTuple):
    parent: int
    start: int  # position of its first token in every list that goes through it
    tokens: np.ndarray  # i32[n], read-only


class Place(NamedTuple):
    """Where a list is in the tree: the first `start` tokens of the path to `parent`, then a tail of its own."""

    parent: int
    start: int


class PromptStore:
    """The tree of tails. Numbers of tails count from 1 in the order of `add`; 0 is the empty list."""

    def __init__(self):
        self._tails = [_Tail(ROOT, 0, frozen(np.empty(0, np.int32)))]
        self._next: dict[tuple[int, int, int], int] = {}  # (tail, position, token there) -> tail that goes on with it
        self.num_tokens = 0

    def find(self, tokens: np.ndarray) -> Place:
        """Returns the place with the longest prefix of `tokens`, i32[n]."""
        number, position = ROOT, 0
        while position < len(tokens):
            child = self._next.get((number, position, int(tokens[position])))
            if child is None:
                break
            tail = self._tails[child].tokens
            there = tokens[position : position + len(tail)]
            differs = tail[: len(there)] != there
            number, position = child, position + (int(differs.argmax()) if differs.any() else len(there))
        return Place(number, position)

    def add(self, place: Place, tail: np.ndarray) -> None:
        """Adds the list at `place` with the tail i32[n], which is copied; an empty one changes nothing.

        Raises:
            ValueError: there is no such place.
        """
        if place.parent >= len(self._tails):
            raise ValueError(f"tail {place.parent} is not among the {len(self._tails)} known.")
        parent = self._tails[place.parent]
        if not parent.start <= place.start <= parent.start + len(parent.tokens):
            raise ValueError(f"tail {place.parent} does not reach position {place.start}.")
        if len(tail):
            self._next[place.parent, place.start, int(tail[0])] = len(self._tails)
            self._tails.append(_Tail(place.parent, place.start, frozen(np.array(tail, np.int32))))
            self.num_tokens += len(tail)

    def prefix(self, place: Place) -> np.ndarray:
        """Returns i32[place.start]: what a list at this place begins with."""
        parts = []
        number, stop = place
        while number != ROOT:
            tail = self._tails[number]
            parts.append(tail.tokens[: stop - tail.start])
            number, stop = tail.parent, tail.start
        return np.concatenate(parts[::-1]) if parts else np.empty(0, np.int32)
