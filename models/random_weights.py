"""Random weights: models for benchmarks and tests that need no checkpoint.

Speed and memory do not depend on the values of the weights, and nor does anything the cache does. The scales are
those of a trained model's first moments: hidden state of order one, logits of order one, and attention sharp enough
(scores with a deviation near three) that a token far back in a long context still changes the result.
"""

import concurrent.futures
import functools
import itertools
import math

import jax
import numpy as np
from jax.sharding import Mesh

from penelope_jax.models.config import ModelConfig
from penelope_jax.models.layers import Params, parameter_shapes
from penelope_jax.models.placement import Index, Leaf, place_params
from penelope_jax.models.presets import PRESETS

__all__ = ["PRESETS", "random_params"]

_HEAD_NORM_MEAN = math.sqrt(3.0)


def random_params(config: ModelConfig, mesh: Mesh, seed: int = 0) -> Params:
    """Draws parameters of `config`'s shapes, placed on `mesh`. The same seed gives the same values on every machine.

    Host memory: one stacked leaf at a time; of experts, those of one device.
    """
    paths = [path for path, _ in jax.tree.leaves_with_path(parameter_shapes(config))]
    numbers = {path[-1].name: number for number, path in enumerate(paths)}
    num_stacked = {path[-1].name: len(path) - 1 + path[-1].name.startswith("expert_") for path in paths}

    with concurrent.futures.ThreadPoolExecutor() as threads:  # numpy draws without holding the interpreter's lock

        @functools.lru_cache(maxsize=1)
        def drawn(field: str, leaf: Leaf, stacked: Index) -> np.ndarray:
            """Draws a leaf matrix by matrix, so that those in `stacked` need no others."""
            mean, deviation = _moments(config, field, leaf.shape)
            out = np.empty([part.stop - part.start for part in stacked] + list(leaf.shape[len(stacked) :]), leaf.dtype)
            places = list(itertools.product(*(range(part.start, part.stop) for part in stacked)))
            draw = functools.partial(_draw, seed=(seed, numbers[field]), mean=mean, deviation=deviation)
            list(threads.map(draw, places, out.reshape(len(places), *leaf.shape[len(stacked) :])))
            return out

        def read(field: str, leaf: Leaf, index: Index) -> np.ndarray:
            stacked = num_stacked[field]
            return drawn(field, leaf, index[:stacked])[(slice(None),) * stacked + index[stacked:]]

        return place_params(config, mesh, read)


def _draw(place: tuple[int, ...], out: np.ndarray, *, seed: tuple[int, int], mean: float, deviation: float) -> None:
    generator = np.random.Generator(np.random.SFC64((*seed, *(place or (0,)))))
    out[...] = generator.standard_normal(out.shape, dtype=np.float32) * np.float32(deviation) + np.float32(mean)


def _moments(config: ModelConfig, name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    if name in ("q_norm", "k_norm"):
        return _HEAD_NORM_MEAN, 0.1
    if name.endswith("_norm"):
        return 1.0, 0.1
    if name.endswith("_bias"):
        return 0.0, 0.1
    if name == "embed":
        return 0.0, 1.0 / math.sqrt(config.hidden_size) if config.tied_embeddings else 1.0
    return 0.0, 1.0 / math.sqrt(shape[-2])
