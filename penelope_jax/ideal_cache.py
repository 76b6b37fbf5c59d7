"""A cache of the same pages that never evicts: what each request could have reused.

It sees the requests of a run in the order of their admission and stores no K/V, so it can stand beside any policy. What
a request computes below its ideal hit is recomputed work; what it computes above is new work that no cache saves.
"""

from typing import NamedTuple

import numpy as np


class IdealHit(NamedTuple):
    """What a cache that never evicts would hold for a request, in tokens from position 0.

    Attributes:
        hit: tokens of whole pages; at least one token of the prompt is left to compute.
        shared: of these, tokens on pages that another session has used too.
    """

    hit: int
    shared: int


class IdealCache:
    """A trie of pages. Pages are told apart by all tokens before them, and namespaces share nothing."""

    def __init__(self, page_size: int):
        self._page_size = page_size
        self._children: dict[tuple[int | str, bytes], int] = {}
        self._first_user: list[str] = []
        self._shared = bytearray()

    @property
    def num_pages(self) -> int:
        return len(self._first_user)

    def look(self, tokens: np.ndarray, session_id: str, namespace: str = "") -> IdealHit:
        """Returns what a request for `tokens`, i32[prompt_len], would find. Writes nothing."""
        num_pages = num_shared = 0
        parent: int | str = namespace
        for data in self._pages(tokens, (len(tokens) - 1) // self._page_size):
            page = self._children.get((parent, data), -1)
            if page < 0:
                break
            num_pages += 1
            if self._shared[page] or self._first_user[page] != session_id:
                num_shared = num_pages
            parent = page
        return IdealHit(num_pages * self._page_size, num_shared * self._page_size)

    def add(self, tokens: np.ndarray, session_id: str, namespace: str = "") -> None:
        """Stores the whole pages of `tokens`, i32[n], as used by `session_id`."""
        parent: int | str = namespace
        for data in self._pages(tokens, len(tokens) // self._page_size):
            page = self._children.get((parent, data), -1)
            if page < 0:
                page = self._children[parent, data] = len(self._first_user)
                self._first_user.append(session_id)
                self._shared.append(0)
            elif self._first_user[page] != session_id:
                self._shared[page] = 1
            parent = page

    def _pages(self, tokens: np.ndarray, num_pages: int):
        data = np.ascontiguousarray(tokens, np.int32).tobytes()
        stride = 4 * self._page_size
        return (data[i * stride : (i + 1) * stride] for i in range(num_pages))
