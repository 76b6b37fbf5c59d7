"""Reads Hugging Face safetensors into parameters.

Every name and shape is checked against the configuration before a byte of weights is read. Then each parameter is
placed on the mesh before the next one starts, and of each tensor only what a device of this process needs is read.
"""

import contextlib
import dataclasses
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping

import jax
import numpy as np
import safetensors
from jax.sharding import Mesh

from penelope_jax.models import llama, qwen3, qwen3_moe
from penelope_jax.models.config import ModelConfig, read_json
from penelope_jax.models.expert_tensors import expert_sources
from penelope_jax.models.layers import Params, parameter_shapes
from penelope_jax.models.placement import Index, Leaf, Source, Sources, place_params, stack_sources, stored_config

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_LAYER_TENSORS = {module.MODEL_TYPE: module.HF_LAYER_TENSORS for module in (qwen3, llama, qwen3_moe)}
_TOP_TENSORS = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
}
_LAYER_PREFIX = "model.layers.{}."
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
    with contextlib.ExitStack() as stack:
        opened = {path: stack.enter_context(_open(path)) for path in _weight_files(directory)}
        stored = {}
        for path, file in opened.items():
            for name in file.keys():  # noqa: SIM118, the file is no mapping
                if name in stored:
                    raise ValueError(f"{path}: tensor {name} is also in {stored[name].file.name}.")
                stored[name] = _describe(path, file, name)
        sources = tensor_sources(config, _TOP_TENSORS, _LAYER_TENSORS[config.architecture], _LAYER_PREFIX)
        if config.num_experts:
            shapes = {name: tensor.shape for name, tensor in stored.items()}
            sources |= expert_sources(config, shapes, _LAYER_PREFIX, str(directory))
        ignored = [name for name in stored if _is_ignored(name, config)]
        check_tensors(str(directory), sources, stored, ignored)

        def read(name: str, index: Index) -> np.ndarray:
            return opened[stored[name].file].get_slice(name)[index]

        return load_sources(config, mesh, sources, read)


def load_sources(config: ModelConfig, mesh: Mesh, sources: Sources, read: Callable[[str, Index], np.ndarray]) -> Params:
    """Reads each parameter from its sources onto the mesh; `read` returns a part of a stored tensor by name."""

    def read_part(field: str, leaf: Leaf, index: Index) -> np.ndarray:
        return stack_sources(leaf, index, sources[field], read)

    return place_params(config, mesh, read_part)


def tensor_sources(config: ModelConfig, top: Mapping[str, str], layer: Mapping[str, str], layer_prefix: str) -> Sources:
    """Returns where the parameters of `config` are stored, those of single experts left out.

    Args:
        config: the model.
        top: stored name by field of `Params`.
        layer: stored name below the prefix, by field of `LayerParams`.
        layer_prefix: prefix of a layer's tensors with `{}` for its number.
    """
    sources = {}
    for path, leaf in jax.tree.leaves_with_path(parameter_shapes(stored_config(config))):
        field = path[-1].name
        transposed = field.endswith("_proj") or field in ("lm_head", "router")  # files store projections [out, in]
        shape = leaf.shape if len(path) == 1 else leaf.shape[1:]
        shape = shape[::-1] if transposed else shape
        if len(path) == 1:
            sources[field] = {(): Source(top[field], shape, (), transposed)}
        elif field in layer:
            sources[field] = {
                (i,): Source(layer_prefix.format(i) + layer[field], shape, (i,), transposed)
                for i in range(config.num_layers)
                if _has(config, i, field)
            }
    return sources


def _has(config: ModelConfig, layer: int, field: str) -> bool:
    if field in ("gate_proj", "up_proj", "down_proj"):
        return not config.has_experts(layer)
    return field != "router" or config.has_experts(layer)


def check_tensors(
    where: str, sources: Sources, stored: Mapping[str, StoredTensor], ignored: Iterable[str] = ()
) -> None:
    """Raises one ValueError unless `stored` holds exactly the sources, and of their shapes."""
    expected = {source.name: source.shape for field in sources.values() for source in field.values()}
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
