"""A name for a model's values: equal fingerprints mean equal K/V for equal tokens."""

import concurrent.futures
import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Iterator

import jax
import numpy as np

from penelope_jax.models.config import ModelConfig
from penelope_jax.models.layers import Params
from penelope_jax.models.placement import KV_FIELDS, stored_config

_HEX_DIGITS = 32
_AT_ONCE = 8  # slices hashed side by side
_TOP_SLICES = 16  # of a parameter that is not stacked


def fingerprint(config: ModelConfig, params: Params) -> str:
    """Hashes the configuration and every parameter. The mesh they lie on does not matter.

    Host memory: a few layers of one parameter at a time.
    """
    total = hashlib.sha256(json.dumps(dataclasses.asdict(stored_config(config)), sort_keys=True).encode())
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as threads:  # hashing releases the interpreter's lock
        for path, leaf in jax.tree.leaves_with_path(params):
            field = path[-1].name
            copies = config.kv_head_copies if field in KV_FIELDS else 1
            total.update(f"{field} {leaf.dtype} {leaf.ndim}".encode())
            axis = 1 if field == "embed" else 0  # one that lies over no axis of a mesh
            number = leaf.shape[0] if len(path) > 1 else _TOP_SLICES
            digest = functools.partial(_digest, copies=copies, head_dim=config.head_dim)
            for slices in itertools.batched(_slices(leaf, axis, number), _AT_ONCE):
                for part in threads.map(digest, slices):
                    total.update(part)
    return total.hexdigest()[:_HEX_DIGITS]


def _slices(leaf: jax.Array, axis: int, number: int) -> Iterator[np.ndarray]:
    """Brings a parameter to the host in slices.

    The array itself is not brought: jax would keep the copy as long as the array.
    """
    size = -(-leaf.shape[axis] // number)
    for start in range(0, leaf.shape[axis], size):
        start = min(start, leaf.shape[axis] - size)  # the last slice overlaps the one before
        yield np.asarray(_slice(leaf, np.int32(start), size, axis))


@functools.partial(jax.jit, static_argnums=(2, 3))
def _slice(leaf: jax.Array, start: jax.Array, size: int, axis: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(leaf, start, size, axis)


def _digest(values: np.ndarray, copies: int, head_dim: int) -> bytes:
    """Hashes a slice; of heads that are there several times, the first of each."""
    if copies > 1:
        values = values.reshape(*values.shape[:-1], -1, copies, head_dim)[..., 0, :]
    return hashlib.sha256(np.ascontiguousarray(values).reshape(-1).view(np.uint8)).digest()
