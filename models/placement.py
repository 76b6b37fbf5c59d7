"""Puts parameters on a mesh, one after another, each device's shard read by itself.

Layers and experts are stacked on leading axes; what holds a parameter stores them one by one, or some in one.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from penelope_jax.models.config import ModelConfig
from penelope_jax.models.layers import Params, parameter_shapes, parameter_shardings

Index = tuple[slice, ...]  # half-open, both ends set, one slice an axis
Leaf = jax.ShapeDtypeStruct

KV_FIELDS = ("k_proj", "v_proj", "k_bias", "v_bias")  # [..., K * H]


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """Where a stored tensor, or a part of one, goes.

    Attributes:
        name: of the tensor.
        shape: the tensor must have.
        place: on the leading axes of the parameter: nothing, (layer,) or (layer, expert).
        transposed: whether its last two axes are the other way round than the parameter's.
        start: where on the parameter's last axis the part begins, in a tensor that holds two parameters.
    """

    name: str
    shape: tuple[int, ...]
    place: tuple[int, ...] = ()
    transposed: bool = False
    start: int = 0


Sources = dict[str, dict[tuple[int, ...], Source]]  # by field and place


def stored_config(config: ModelConfig) -> ModelConfig:
    """Returns the configuration of the parameters as they are stored, without copies of kv heads."""
    return dataclasses.replace(config, num_kv_heads=config.num_kv_heads // config.kv_head_copies, kv_head_copies=1)


def place_params(config: ModelConfig, mesh: Mesh, read: Callable[[str, Leaf, Index], np.ndarray]) -> Params:
    """Builds parameters on a mesh. Host memory: this process's shards of one parameter at a time.

    Args:
        config: the model, with the copies of kv heads that the mesh needs.
        mesh: where the parameters go.
        read: returns a part of a parameter, in its dtype: by field, shape and dtype of the whole without copies, and
            index of the part.
    """
    leaves, tree = jax.tree.flatten_with_path(parameter_shapes(config))
    stored = jax.tree.leaves(parameter_shapes(stored_config(config)))
    shardings = jax.tree.leaves(parameter_shardings(config, mesh))
    placed = []
    for (path, leaf), stored_leaf, sharding in zip(leaves, stored, shardings, strict=True):
        field = path[-1].name
        if field == "has_experts":
            read_part = functools.partial(_read_flags, config)
        elif field in KV_FIELDS and config.kv_head_copies > 1:
            read_part = functools.partial(_read_copied_heads, config, functools.partial(read, field, stored_leaf))
        else:
            read_part = functools.partial(read, field, stored_leaf)
        placed.append(_place(leaf, sharding, read_part))
    return jax.tree.unflatten(tree, placed)


def _place(leaf: Leaf, sharding: NamedSharding, read: Callable[[Index], np.ndarray]) -> jax.Array:
    read_once = functools.cache(read)  # devices may have equal shards

    def shard(index: Index | None) -> np.ndarray:
        assert index is not None, "a shard is a part of the array"
        return read_once(_both_ends(index, leaf.shape))

    return jax.block_until_ready(jax.make_array_from_callback(leaf.shape, sharding, shard))


def stack_sources(
    leaf: Leaf, index: Index, sources: Mapping[tuple[int, ...], Source], read: Callable[[str, Index], np.ndarray]
) -> np.ndarray:
    """Returns the part `index` of a parameter, put together from stored tensors. Where there is no source it is zero.

    Args:
        leaf: shape and dtype of the parameter.
        index: the part.
        sources: by place; at least one, and of all the same number of leading axes.
        read: returns a part of a stored tensor by name.
    """
    num_places = len(next(iter(sources)))
    out = np.zeros([part.stop - part.start for part in index], leaf.dtype)
    for offset in np.ndindex(*out.shape[:num_places]):
        place = tuple(part.start + i for part, i in zip(index[:num_places], offset, strict=True))
        if (source := sources.get(place)) is not None:
            out[offset] = _read_source(source, index[num_places:], read)
    return out


def _read_source(source: Source, index: Index, read: Callable[[str, Index], np.ndarray]) -> np.ndarray:
    *rest, last = index
    index = (*rest, slice(last.start + source.start, last.stop + source.start))
    if not source.transposed:
        return read(source.name, index)
    return read(source.name, (*index[:-2], index[-1], index[-2])).swapaxes(-1, -2)


def _both_ends(index: Index, shape: tuple[int, ...]) -> Index:
    return tuple(slice(*part.indices(size)[:2]) for part, size in zip(index, shape, strict=True))


def _read_flags(config: ModelConfig, index: Index) -> np.ndarray:
    return np.array([config.has_experts(layer) for layer in range(config.num_layers)])[index]


def _read_copied_heads(config: ModelConfig, read: Callable[[Index], np.ndarray], index: Index) -> np.ndarray:
    """Reads the heads behind a part of the copied ones, [..., heads * H]."""
    size, copied = config.head_dim, index[-1]
    heads = np.arange(copied.start // size, copied.stop // size) // config.kv_head_copies
    part = read((*index[:-1], slice(int(heads[0]) * size, (int(heads[-1]) + 1) * size)))
    by_head = part.reshape(*part.shape[:-1], -1, size)
    return by_head[..., heads - heads[0], :].reshape(*part.shape[:-1], -1)
