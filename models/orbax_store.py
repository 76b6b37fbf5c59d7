"""Model directories with Orbax parameters: written once, restored onto any mesh, each device reading its part.

    DIR/penelope.json    what this is; written last, so a directory that has it is whole
    DIR/params/          parameters, stacked over layers and experts
    DIR/config.json, tokenizer.json, ...    copied from the Hugging Face directory

Orbax takes a second to import and is imported here only, when a function needs it.
"""

import dataclasses
import functools
import json
import pathlib
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from penelope_jax.models.config import DTYPES, ModelConfig, read_json
from penelope_jax.models.fingerprint import fingerprint
from penelope_jax.models.layers import Params, parameter_shapes, parameter_shardings
from penelope_jax.models.placement import KV_FIELDS, stored_config

MARKER_FILE = "penelope.json"
PARAMS_FOLDER = "params"
COPIED_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
COPIED_FOLDER = "additional_chat_templates"

_FORMAT = 1
_CHUNK_BYTES = 64 << 20  # most that is read at once; a chunk has one layer, of what one device wrote
_NOT_STACKED = ("embed", "final_norm", "lm_head")
_IN_FLIGHT_GB = 2  # of copies while reading and writing, beside the largest parameter


@dataclasses.dataclass(frozen=True, slots=True)
class Marker:
    """What `penelope.json` says.

    Attributes:
        dtype: of the stored parameters.
        fingerprint: of the model in that dtype.
    """

    dtype: str
    fingerprint: str


def is_model(directory: pathlib.Path) -> bool:
    """Whether a directory was written by `save_model`."""
    return (directory / MARKER_FILE).is_file()


def read_marker(directory: pathlib.Path) -> Marker:
    """Reads `penelope.json`.

    Raises:
        ValueError: it is broken, or of another version.
    """
    path = directory / MARKER_FILE
    marker = read_json(path)
    if marker.get("format") != _FORMAT:
        raise ValueError(f"{path}: format {marker.get('format')!r} is not supported; supported: {_FORMAT}.")
    if marker.get("dtype") not in DTYPES or not isinstance(marker.get("fingerprint"), str):
        raise ValueError(f"{path}: dtype must be one of {', '.join(DTYPES)} and fingerprint a text.")
    return Marker(marker["dtype"], marker["fingerprint"])


def save_model(out: pathlib.Path, source: pathlib.Path, config: ModelConfig, params: Params) -> Marker:
    """Writes a model directory.

    Args:
        out: must not exist, or be empty.
        source: the Hugging Face directory that `params` were read from.
        config: the model.
        params: its parameters, on any mesh.

    Raises:
        ValueError: `out` is something already.
    """
    check_free(out)
    out.mkdir(parents=True, exist_ok=True)
    save_params(out / PARAMS_FOLDER, config, params)
    for name in COPIED_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, out / name)
    if (source / COPIED_FOLDER).is_dir():
        shutil.copytree(source / COPIED_FOLDER, out / COPIED_FOLDER)
    marker = Marker(config.dtype, fingerprint(config, params))
    text = json.dumps({"format": _FORMAT, **dataclasses.asdict(marker)}, indent=1)
    (out / MARKER_FILE).write_text(text + "\n", encoding="utf-8")
    return marker


def check_free(out: pathlib.Path) -> None:
    """Raises ValueError unless `out` is an empty directory or nothing."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out}: is a file; must be a new directory.")
    if out.is_dir() and any(out.iterdir()):
        raise ValueError(f"{out}: is not empty; must be a new directory.")


def save_params(directory: pathlib.Path, config: ModelConfig, params: Params) -> None:
    """Writes parameters, each process those it has; copies of kv heads are left out."""
    import orbax.checkpoint as ocp

    fields = _by_field(params)
    for field in KV_FIELDS:
        if field in fields and config.kv_head_copies > 1:
            everywhere = NamedSharding(fields[field].sharding.mesh, PartitionSpec())
            fields[field] = jax.jit(functools.partial(_one_of_each, config), out_shardings=everywhere)(fields[field])
    save_args = {
        field: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES, shard_axes=() if field in _NOT_STACKED else (0,))
        for field in fields
    }
    with _checkpointer(fields) as checkpointer:
        checkpointer.save(directory.resolve(), args=ocp.args.PyTreeSave(fields, save_args=save_args))


def restore_params(directory: pathlib.Path, config: ModelConfig, mesh: Mesh) -> Params:
    """Reads parameters onto a mesh, in `config.dtype`.

    Args:
        directory: what `save_params` wrote.
        config: the model, with the copies of kv heads that the mesh needs.
        mesh: where the parameters go.

    Raises:
        ValueError: the checkpoint is broken or of another model, or the mesh does not fit.
    """
    import orbax.checkpoint as ocp

    shardings = _by_field(parameter_shardings(config, mesh))
    wanted = _by_field(parameter_shapes(stored_config(config)))
    spread = [field for field in KV_FIELDS if field in wanted and config.kv_head_copies > 1]
    everywhere = NamedSharding(mesh, PartitionSpec())
    restore_args = {
        field: ocp.ArrayRestoreArgs(
            sharding=everywhere if field in spread else shardings[field], global_shape=leaf.shape, dtype=leaf.dtype
        )
        for field, leaf in wanted.items()
    }
    with _checkpointer(wanted) as checkpointer:
        _check_metadata(directory, wanted, checkpointer)
        try:
            fields = checkpointer.restore(
                directory.resolve(), args=ocp.args.PyTreeRestore(wanted, restore_args=restore_args)
            )
        except Exception as error:  # the library raises bare Exception for a broken file
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ValueError(f"{directory}: broken Orbax checkpoint: {reason}") from error
    for field in spread:
        copy = jax.jit(functools.partial(_copies_of_each, config), out_shardings=shardings[field])
        fields[field] = copy(fields[field])
    leaves, tree = jax.tree.flatten_with_path(parameter_shapes(config))
    return jax.tree.unflatten(tree, [fields[path[-1].name] for path, _ in leaves])


def _checkpointer(fields: dict[str, Any]):
    import orbax.checkpoint as ocp

    # Orbax refuses a parameter that is larger than its limit of bytes in flight.
    limit = _IN_FLIGHT_GB + max(4 * leaf.size for leaf in fields.values()) // 10**9
    return ocp.Checkpointer(
        ocp.PyTreeCheckpointHandler(
            use_zarr3=True,
            use_compression=False,
            save_concurrent_gb=limit,
            restore_concurrent_gb=limit,
        )
    )


def _check_metadata(directory: pathlib.Path, wanted: dict[str, jax.ShapeDtypeStruct], checkpointer) -> None:
    try:
        found = checkpointer.metadata(directory.resolve()).item_metadata.tree
    except (AttributeError, OSError, ValueError) as error:
        raise ValueError(f"{directory}: no Orbax checkpoint, or a broken one.") from error
    missing, unexpected = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    if missing or unexpected:
        raise ValueError(
            f"{directory}: parameters of another model: missing ({len(missing)}): {', '.join(missing) or 'none'}; "
            f"not part of this model ({len(unexpected)}): {', '.join(unexpected) or 'none'}."
        )
    for field, leaf in wanted.items():
        stored = found[field]
        if tuple(stored.shape) != leaf.shape:
            raise ValueError(
                f"{directory}: parameter {field} has shape {list(stored.shape)}; the model needs {list(leaf.shape)}."
            )
        kinds = ("bool",) if leaf.dtype == np.bool_ else DTYPES
        if str(stored.dtype) not in kinds:
            raise ValueError(
                f"{directory}: parameter {field} is stored as {stored.dtype}; supported: {', '.join(kinds)}."
            )


def _by_field(params: Any) -> dict[str, Any]:
    return {path[-1].name: leaf for path, leaf in jax.tree.leaves_with_path(params)}


def _one_of_each(config: ModelConfig, leaf: jax.Array) -> jax.Array:
    """Leaves out the copies of kv heads: [..., K * H] to [..., K / copies * H]."""
    heads = leaf.reshape(*leaf.shape[:-1], config.num_kv_heads, config.head_dim)
    return heads[..., :: config.kv_head_copies, :].reshape(*leaf.shape[:-1], -1)


def _copies_of_each(config: ModelConfig, leaf: jax.Array) -> jax.Array:
    heads = leaf.reshape(*leaf.shape[:-1], -1, config.head_dim)
    return jnp.repeat(heads, config.kv_head_copies, axis=-2).reshape(*leaf.shape[:-1], -1)
