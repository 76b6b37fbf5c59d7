"""Loads a model by its name on the command line."""

import dataclasses
from typing import Any

from jax.sharding import Mesh

from penelope_jax.models import random_weights
from penelope_jax.models.config import ModelConfig
from penelope_jax.models.layers import Params, single_device_mesh


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """A model ready to run.

    Attributes:
        config: its shape.
        params: its parameters, placed on the mesh.
        tokenizer: None for random weights.
        eos_token_ids: tokens that end a reply.
        name: what to show and to answer for.
    """

    config: ModelConfig
    params: Params
    tokenizer: Any | None
    eos_token_ids: tuple[int, ...]
    name: str


def load_model(spec: str, *, dtype: str | None = None, mesh: Mesh | None = None, seed: int = 0) -> LoadedModel:
    """Loads `random:NAME`."""
    mesh = mesh or single_device_mesh()
    kind, _, preset = spec.partition(":")
    if kind != "random" or preset not in random_weights.PRESETS:
        known = ", ".join(f"random:{name}" for name in random_weights.PRESETS)
        raise ValueError(f"unknown model {spec!r}; known: {known}.")
    config = random_weights.PRESETS[preset]
    if dtype is not None:
        config = dataclasses.replace(config, dtype=dtype)
    params = random_weights.random_params(config, mesh, seed)
    return LoadedModel(config=config, params=params, tokenizer=None, eos_token_ids=(), name=spec)
