"""Reads Hugging Face safetensors into parameters.

Every name and shape is checked against the configuration before a byte of weights is read. Then each parameter is
stacked over the layers on the host and placed on the mesh before the next one starts, so the host holds one stacked
parameter at a time.
"""

import contextlib
import dataclasses
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
import safetensors
from jax.sharding import Mesh

from penelope_jax.models import llama, qwen3
from penelope_jax.models.config import ModelConfig, read_json
from penelope_jax.models.layers import Params, parameter_shapes, parameter_shardings

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_LAYER_TENSORS = {module.MODEL_TYPE: module.HF_LAYER_TENSORS for module in (qwen3, llama)}
_TOP_TENSORS = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
}
_FLOATS = ("F32", "F16", "BF16")
_MOST_NAMED = 4  # tensors named in one error


@dataclasses.dataclass(frozen=True, slots=True)
class StoredTensor:
    """What a file says about one tensor before it is read."""

    shape: tuple[int, ...]
    file: pathlib.Path


def load_params(directory: pathlib.Path, config: ModelConfig, mesh: Mesh) -> Params:
    """Loads the weights in `directory`, a single file or shards with an index, in `config.dtype`.

    Raises:
        ValueError: weights are missing, truncated, unexpected, or not of the configuration's shapes.
    """
    names = tensor_names(config, _TOP_TENSORS, _LAYER_TENSORS[config.architecture], "model.layers.{}.")
    with contextlib.ExitStack() as stack:
        opened = {path: stack.enter_context(_open(path)) for path in _weight_files(directory)}
        stored = {}
        for path, file in opened.items():
            for name in file.keys():  # noqa: SIM118, the file is no mapping
                if name in stored:
                    raise ValueError(f"{path}: tensor {name} is also in {stored[name].file.name}.")
                stored[name] = _describe(path, file, name)
        ignored = [name for name in stored if _is_ignored(name, config)]
        check_tensors(str(directory), expected_shapes(config, names), stored, ignored)
        return stack_params(config, mesh, names, lambda name: opened[stored[name].file].get_tensor(name))


def tensor_names(
    config: ModelConfig, top: Mapping[str, str], layer: Mapping[str, str], layer_prefix: str
) -> dict[str, list[str]]:
    """Returns the stored names of each parameter of `config`: one, or one a layer.

    Args:
        config: the model.
        top: stored name by field of `Params`.
        layer: stored name below the prefix, by field of `LayerParams`.
        layer_prefix: prefix of a layer's tensors with `{}` for its number.
    """
    names = {}
    for path, _ in jax.tree.leaves_with_path(parameter_shapes(config)):
        field = path[-1].name
        if len(path) == 1:
            names[field] = [top[field]]
        else:
            names[field] = [layer_prefix.format(i) + layer[field] for i in range(config.num_layers)]
    return names


def expected_shapes(config: ModelConfig, names: Mapping[str, list[str]]) -> dict[str, tuple[int, ...]]:
    """Returns the shape every stored tensor must have. Files store projections `[out, in]`, parameters `[in, out]`."""
    expected = {}
    for path, leaf in jax.tree.leaves_with_path(parameter_shapes(config)):
        field = path[-1].name
        shape = leaf.shape if len(path) == 1 else leaf.shape[1:]
        for name in names[field]:
            expected[name] = shape[::-1] if _is_transposed(field) else shape
    return expected


def check_tensors(
    where: str,
    expected: Mapping[str, tuple[int, ...]],
    stored: Mapping[str, StoredTensor],
    ignored: Iterable[str] = (),
) -> None:
    """Raises one ValueError unless `stored` holds exactly the expected names, and of the expected shapes."""
    missing = [name for name in expected if name not in stored]
    if missing:
        raise ValueError(f"{where}: missing tensors ({len(missing)}): {_some(missing)}.")
    unexpected = sorted(set(stored) - set(expected) - set(ignored))
    if unexpected:
        raise ValueError(f"{where}: tensors that are not part of this model ({len(unexpected)}): {_some(unexpected)}.")
    for name, shape in expected.items():
        if stored[name].shape != shape:
            found = list(stored[name].shape)
            raise ValueError(f"{stored[name].file}: tensor {name} has shape {found}; the model needs {list(shape)}.")


def stack_params(
    config: ModelConfig, mesh: Mesh, names: Mapping[str, list[str]], read: Callable[[str], np.ndarray]
) -> Params:
    """Reads each parameter's tensors, stacks them over the layers and places them on the mesh, one after another.

    Args:
        config: the model; its dtype is that of the result.
        mesh: where the parameters go.
        names: stored names of each parameter, as `tensor_names` returns them.
        read: returns a stored tensor by name.
    """
    leaves, tree = jax.tree.flatten_with_path(parameter_shapes(config))
    shardings = jax.tree.leaves(parameter_shardings(config, mesh))
    placed = []
    for (path, leaf), sharding in zip(leaves, shardings, strict=True):
        field = path[-1].name
        host = np.empty(leaf.shape, leaf.dtype)
        parts: Iterable[Any] = [host] if len(path) == 1 else host  # views, one a layer
        for part, name in zip(parts, names[field], strict=True):
            tensor = read(name)
            part[...] = tensor.T if _is_transposed(field) else tensor
        placed.append(jax.block_until_ready(jax.device_put(host, sharding)))
    return jax.tree.unflatten(tree, placed)


def _is_transposed(field: str) -> bool:
    return field.endswith("_proj") or field == "lm_head"


def _is_ignored(name: str, config: ModelConfig) -> bool:
    """Two things that files hold beside the parameters: a buffer of old versions, and a copy of a tied embedding."""
    return bool(re.search(r"rotary_emb\.inv_freq$", name)) or (config.tied_embeddings and name == "lm_head.weight")


def _weight_files(directory: pathlib.Path) -> list[pathlib.Path]:
    index_path = directory / INDEX_FILE
    if not index_path.is_file():
        if not (directory / SINGLE_FILE).is_file():
            raise ValueError(f"{directory}: no weights: neither {SINGLE_FILE} nor {INDEX_FILE} is there.")
        return [directory / SINGLE_FILE]
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ValueError(f"{index_path}: field 'weight_map' must map tensor names to file names.")
    files = sorted(set(weight_map.values()))
    for file in files:
        if pathlib.PurePath(file).name != file:
            raise ValueError(f"{index_path}: {file!r} must be a file name without a folder.")
        if not (directory / file).is_file():
            num_tensors = sum(other == file for other in weight_map.values())
            raise ValueError(f"{directory / file}: missing; {INDEX_FILE} has {num_tensors} tensors in it.")
    return [directory / file for file in files]


def _open(path: pathlib.Path):
    try:
        return safetensors.safe_open(path, framework="numpy")
    except (safetensors.SafetensorError, OSError) as error:
        size = path.stat().st_size
        raise ValueError(f"{path}: broken or truncated safetensors file of {size} bytes: {error}.") from error


def _describe(path: pathlib.Path, file, name: str) -> StoredTensor:
    stored = file.get_slice(name)
    if stored.get_dtype() not in _FLOATS:
        supported = ", ".join(_FLOATS)
        raise ValueError(f"{path}: tensor {name} is stored as {stored.get_dtype()}; supported: {supported}.")
    return StoredTensor(tuple(stored.get_shape()), path)


def _some(names: list[str]) -> str:
    return ", ".join(names[:_MOST_NAMED]) + (", ..." if len(names) > _MOST_NAMED else "")
