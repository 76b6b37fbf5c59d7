"""Configurations and samplers for tests of the pure engine."""

from collections.abc import Callable
from typing import Any

from penelope_jax.config import EngineConfig

Sampler = Callable[[int, int], int]  # (request id, position) -> token


def hashed_sampler(salt: int, vocab_size: int = 3, stop: int = -1, one_in: int = 8) -> Sampler:
    """Returns a sampler of a few tokens; one in `one_in` is `stop`."""

    def sample(request_id: int, position: int) -> int:
        value = hash((salt, request_id, position)) & 0x7FFFFFFF
        return stop if stop >= 0 and value // vocab_size % one_in == 0 else value % vocab_size

    return sample


def config_of(page_size: int, num_pages: int, **changes) -> EngineConfig:
    """Returns a config with a pool of `num_pages` and a step budget of four pages."""
    values: dict[str, Any] = {"max_step_tokens": 4 * page_size} | changes
    return EngineConfig(device_tokens=page_size * num_pages, page_size=page_size, **values)
