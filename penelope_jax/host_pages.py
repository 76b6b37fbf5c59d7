"""Pages in host memory: each an immutable array of its own, on a mesh each device's part beside that device.

Pages are never written in place: an id gets another array. Whoever still reads the old one keeps it alive, so a page
may be dropped, or its id used again, while a copy of it is under way. A page stays in memory until another takes its
id, also when the cache has forgotten it: memory grows up to one page for each id.
"""

import os
from collections.abc import Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from penelope_jax.kernels.page_copy import page_sharding

HOST_MEMORY = "pinned_host"

# On GPUs jax takes no more pinned memory than this, in GiB; it reads the variable when it starts.
LIMIT_VARIABLE, DEFAULT_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", 64


class HostPages:
    """The host pages by id.

    Attributes:
        num_pages: ids are in `[0, num_pages)`.
        page_shape: [L, 2, K, page_size, H].
        dtype: of the pages.
        device: how a page lies in device memory. host: in host memory, where there are host pages.

    Args:
        page_shape: [L, 2, K, page_size, H].
        dtype: of the pages.
        pool_sharding: of [P, L, 2, K, page_size, H].
        num_pages: 0: there is no host memory for pages.

    Raises:
        ValueError: there is no pinned host memory, or on a GPU not as much as jax may take.
    """

    def __init__(self, page_shape: tuple[int, ...], dtype: np.dtype, pool_sharding: NamedSharding, num_pages: int):
        if num_pages < 0:
            raise ValueError(f"num_host_pages={num_pages} must not be negative.")
        self.num_pages = num_pages
        self.page_shape, self.dtype = page_shape, np.dtype(dtype)
        self._pages: dict[int, jax.Array] = {}
        self.device = page_sharding(pool_sharding)
        if not num_pages:
            return
        device = next(iter(pool_sharding.addressable_devices))
        kinds = [memory.kind for memory in device.addressable_memories()]
        if HOST_MEMORY not in kinds:
            raise ValueError(
                f"num_host_pages={num_pages} need memory of kind {HOST_MEMORY}; {device.platform} has "
                f"{', '.join(kinds)}."
            )
        if device.platform == "gpu":
            check_limit(num_pages, self.page_bytes, os.environ)
        self.host = page_sharding(pool_sharding, HOST_MEMORY)

    def __contains__(self, host_id: int) -> bool:
        return host_id in self._pages

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, on all devices together."""
        return int(np.prod(self.page_shape)) * self.dtype.itemsize

    def get(self, host_ids: Iterable[int]) -> list[jax.Array]:
        """Returns the arrays of pages, perhaps still on their way."""
        return [self._pages[host_id] for host_id in host_ids]

    def put(self, host_ids: Iterable[int], pages: Iterable[jax.Array]) -> None:
        """Gives ids their arrays, which lie in host memory."""
        self._pages.update(zip(host_ids, pages, strict=True))

    def drop(self, host_ids: Iterable[int], only: Sequence[jax.Array] | None = None) -> None:
        """Forgets pages; those that are not there are ignored.

        Args:
            host_ids: which.
            only: an array for each: a page that is another by now stays.
        """
        for index, host_id in enumerate(host_ids):
            if only is None or self._pages.get(host_id) is only[index]:
                self._pages.pop(host_id, None)

    def read(self, host_ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Returns the bytes of pages, [n, L, 2, K, page_size, H]; waits for those on their way.

        Raises:
            ValueError: an id is out of range or holds nothing; the message names it.
        """
        ids = self._checked(host_ids)
        out = np.empty((len(ids), *self.page_shape), self.dtype)
        for index, host_id in enumerate(ids):
            if host_id not in self._pages:
                raise ValueError(f"host page {host_id} holds nothing.")
            out[index] = np.asarray(self._pages[host_id])
        return out

    def write(self, host_ids: Sequence[int] | np.ndarray, pages: np.ndarray) -> None:
        """Puts bytes into pages that no move reads or writes.

        Args:
            host_ids: i32[n].
            pages: [n, L, 2, K, page_size, H], of the same dtype; copied.

        Raises:
            ValueError: an id is out of range, or the pages are of another shape or dtype.
        """
        ids = self._checked(host_ids)
        check_pages(pages, len(ids), self.page_shape, self.dtype)
        for host_id, page in zip(ids, pages, strict=True):
            self._pages.pop(host_id, None)
            self._pages[host_id] = jax.device_put(np.array(page), self.host)

    def to_device(self, pages: np.ndarray) -> list[jax.Array]:
        """Copies pages [n, L, 2, K, page_size, H] into arrays of device memory, one for each."""
        return jax.device_put([np.array(page) for page in pages], self.device)

    def flip_bit(self, host_id: int, *, layer: int = 0, token: int = 0) -> None:
        """Flips the highest bit of the mantissa of one stored K value: the control of a comparison of bits.

        Args:
            host_id: the page.
            layer: the layer.
            token: the slot in the page; its first kv head and dimension are hit.

        Raises:
            ValueError: an index is out of range, or the id holds nothing.
        """
        for name, value, limit in (("layer", layer, self.page_shape[0]), ("token", token, self.page_shape[3])):
            if not 0 <= value < limit:
                raise ValueError(f"{name}={value} must be in [0, {limit}).")
        pages = self.read([host_id])
        unsigned = np.dtype(f"u{self.dtype.itemsize}")
        pages.view(unsigned)[0, layer, 0, 0, token, 0] ^= unsigned.type(1 << (jnp.finfo(self.dtype).nmant - 1))
        self.write([host_id], pages)

    def _checked(self, host_ids: Sequence[int] | np.ndarray) -> list[int]:
        ids = np.asarray(host_ids, np.int64).reshape(-1).tolist()
        for host_id in ids:
            if not 0 <= host_id < self.num_pages:
                raise ValueError(f"host page {host_id} must be in [0, {self.num_pages}).")
        return ids


def check_limit(num_pages: int, page_bytes: int, environ: Mapping[str, str]) -> None:
    """Raises ValueError if pages need more pinned memory than jax takes on GPUs."""
    text = environ.get(LIMIT_VARIABLE, "") or str(DEFAULT_LIMIT)
    limit = int(text) if text.isdecimal() else DEFAULT_LIMIT
    wanted = num_pages * page_bytes / 2**30
    if wanted > limit:
        raise ValueError(
            f"num_host_pages={num_pages} of {page_bytes:,} bytes are {wanted:.1f} GiB; jax takes at most {limit} GiB of "
            f"pinned memory. Set {LIMIT_VARIABLE} to a larger number before it starts, or take fewer."
        )


def check_pages(pages: np.ndarray, number: int, page_shape: tuple[int, ...], dtype: np.dtype) -> None:
    """Raises ValueError unless `pages` are `number` pages of this shape and dtype."""
    if pages.shape != (number, *page_shape) or pages.dtype != dtype:
        raise ValueError(f"pages are {pages.dtype}{list(pages.shape)}; must be {dtype}{[number, *page_shape]}.")
