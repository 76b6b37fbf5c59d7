"""A cache of the same pages that never evicts: what each request could have reused.

It sees the requests of a run in the order of their admission and stores no K/V, so it can stand beside any policy. What
a request computes below its ideal hit is recomputed work; what it computes above is new work that no cache saves.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from penelope_jax.lookup import common_pages
from penelope_jax.radix_tree import TOKEN_BYTES


class IdealHit(NamedTuple):
    """What a cache that never evicts would hold for a request, in tokens from position 0.

    Attributes:
        hit: tokens of whole pages; at least one token of the prompt is left to compute.
        shared: of these, tokens on pages that another session has used too.
    """

    hit: int
    shared: int


class IdealCache:
    """A trie of pages. Pages are told apart by all tokens before them, and namespaces share nothing.

    A session's list begins with most of its list before, so lookups start from where the two part.
    """

    def __init__(self, page_size: int):
        self._page_size = page_size
        self._children: dict[tuple[int | str, bytes], int] = {}
        self._users: dict[str, int] = {}
        self._first_user = np.empty(1024, np.int32)  # of each page, the user that stored it
        self._shared = np.zeros(1024, bool)
        self._last: dict[tuple[str, str], tuple[bytes, np.ndarray]] = {}  # of a session: its last list, and its pages
        self.num_pages = 0

    def look(self, tokens: np.ndarray, session_id: str, namespace: str = "") -> IdealHit:
        """Returns what a request for `tokens`, i32[prompt_len], would find. Writes nothing."""
        data, found = self._known(tokens, session_id, namespace, (len(tokens) - 1) // self._page_size)
        parent: int | str = int(found[-1]) if len(found) else namespace
        more: list[int] = []
        for key in self._pages(data, len(found), (len(tokens) - 1) // self._page_size):
            page = self._children.get((parent, key), -1)
            if page < 0:
                break
            more.append(page)
            parent = page
        path = np.concatenate([found, np.array(more, np.int32)])
        others = np.flatnonzero(self._shared[path] | (self._first_user[path] != self._users.get(session_id, -1)))
        num_shared = int(others[-1]) + 1 if len(others) else 0
        return IdealHit(len(path) * self._page_size, num_shared * self._page_size)

    def add(self, tokens: np.ndarray, session_id: str, namespace: str = "") -> None:
        """Stores the whole pages of `tokens`, i32[n], as used by `session_id`."""
        num_pages = len(tokens) // self._page_size
        data, found = self._known(tokens, session_id, namespace, num_pages)
        user = self._users.setdefault(session_id, len(self._users))
        parent: int | str = int(found[-1]) if len(found) else namespace
        more: list[int] = []
        for key in self._pages(data, len(found), num_pages):
            page = self._children.get((parent, key), -1)
            if page < 0:
                page = self._children[parent, key] = self._new_page(user)
            elif self._first_user[page] != user:
                self._shared[page] = True
            more.append(page)
            parent = page
        self._last[namespace, session_id] = data, np.concatenate([found, np.array(more, np.int32)])

    def _new_page(self, user: int) -> int:
        page = self.num_pages
        if page == len(self._shared):
            self._first_user = np.concatenate([self._first_user, np.empty(page, np.int32)])
            self._shared = np.concatenate([self._shared, np.zeros(page, bool)])
        self._first_user[page] = user
        self.num_pages += 1
        return page

    def _known(self, tokens: np.ndarray, session_id: str, namespace: str, num_pages: int) -> tuple[bytes, np.ndarray]:
        """Returns the tokens as bytes, and i32[p]: the pages in front that the session's last list has too."""
        data = np.ascontiguousarray(tokens, np.int32).tobytes()
        last, path = self._last.get((namespace, session_id), (b"", np.empty(0, np.int32)))
        return data, path[: min(num_pages, common_pages(last, data, self._page_size))]

    def _pages(self, data: bytes, start: int, stop: int) -> Iterator[bytes]:
        stride = TOKEN_BYTES * self._page_size
        return (data[i * stride : (i + 1) * stride] for i in range(start, stop))
