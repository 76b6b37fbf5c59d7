"""A name for a model's values: equal fingerprints mean equal K/V for equal tokens."""

import concurrent.futures
import dataclasses
import hashlib
import json

import jax
import numpy as np

from penelope_jax.models.config import ModelConfig
from penelope_jax.models.layers import Params
from penelope_jax.models.placement import KV_FIELDS, stored_config

_HEX_DIGITS = 32


def fingerprint(config: ModelConfig, params: Params) -> str:
    """Hashes the configuration and every parameter. The mesh they lie on does not matter.

    Host memory: one stacked parameter at a time.
    """
    total = hashlib.sha256(json.dumps(dataclasses.asdict(stored_config(config)), sort_keys=True).encode())
    with concurrent.futures.ThreadPoolExecutor() as threads:  # hashing releases the interpreter's lock
        for path, leaf in jax.tree.leaves_with_path(params):
            field = path[-1].name
            values = np.asarray(leaf)
            if field in KV_FIELDS and config.kv_head_copies > 1:
                heads = values.reshape(*values.shape[:-1], config.num_kv_heads, config.head_dim)
                values = heads[..., :: config.kv_head_copies, :].reshape(*values.shape[:-1], -1)
            parts = values if len(path) > 1 else [values]
            total.update(f"{field} {values.dtype} {values.shape}".encode())
            for digest in threads.map(_digest, parts):
                total.update(digest)
    return total.hexdigest()[:_HEX_DIGITS]


def _digest(values: np.ndarray) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(values).reshape(-1).view(np.uint8)).digest()
