"""Copies of values, made to notice whether a value that must not change did."""

import dataclasses
import enum
from collections.abc import Mapping

import numpy as np

from penelope_jax.pages import PagePool


def rendered(value) -> object:
    """Returns plain tuples with all that `value` holds; two values are the same exactly if these are equal."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, PagePool):
        return value.num_pages, value.num_free, tuple(value.free_ids())
    if isinstance(value, enum.Enum) or value is None or isinstance(value, (str, bytes, int, float)):
        return value
    if dataclasses.is_dataclass(value):
        return tuple(rendered(getattr(value, field.name)) for field in dataclasses.fields(value))
    if isinstance(value, Mapping):
        return tuple(sorted((rendered(key), rendered(item)) for key, item in value.items()))
    if isinstance(value, tuple):
        return tuple(rendered(item) for item in value)
    raise TypeError(f"{type(value)} is not a value.")
