"""Settings of every test: CPU with four devices, no silent rank promotion, repeatable Hypothesis runs.

They are environment variables, set before the first test imports jax, so that child processes get them too and tests
of the policy files never load jax. Warnings are errors; pyproject.toml names the exceptions.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4".strip()

import pytest
from hypothesis import settings

settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
settings.register_profile("random", deadline=None, print_blob=True)
settings.load_profile("repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked `gpu` where jax finds no GPU."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu or os.environ["JAX_PLATFORMS"] == "cpu":
        reason = "JAX_PLATFORMS=cpu"
    else:
        import jax

        if jax.default_backend() == "gpu":
            return
        reason = f"jax runs on {jax.default_backend()!r}"
    for item in on_gpu:
        item.add_marker(pytest.mark.skip(reason=f"needs an NVIDIA GPU; {reason}"))
