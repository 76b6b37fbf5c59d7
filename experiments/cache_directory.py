"""`--cache-dir DIR`: a run begins with the cache that the last one left there, and leaves its own."""

import argparse
import dataclasses
import pathlib
import tempfile
from typing import TYPE_CHECKING

from penelope_jax.config import EngineConfig
from penelope_jax.errors import InputError
from penelope_jax.radix_tree import CacheState

if TYPE_CHECKING:
    from penelope_jax.executor import JaxExecutor
    from penelope_jax.models.registry import LoadedModel


def check_flags(args: argparse.Namespace, num_policies: int) -> None:
    """Raises InputError if `--cache-dir` does not go with other flags, or a cache could not be saved there later."""
    if args.cache_dir is None:
        return
    if not args.cache_dir:
        raise InputError("--cache-dir '': no directory is named; '.' would be this one.")
    if num_policies > 1:
        raise InputError(f"--cache-dir {args.cache_dir}: takes one policy; {num_policies} are to be compared.")
    if args.event_log is not None:
        raise InputError(
            f"--cache-dir {args.cache_dir}: does not go with --event-log, since a log begins with an empty cache."
        )
    directory = pathlib.Path(args.cache_dir)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise InputError(f"--cache-dir {args.cache_dir}: {error.strerror}.") from error


def named_config(config: EngineConfig, model: "LoadedModel") -> EngineConfig:
    """Returns a configuration that names the weights, so that their K/V is never taken for that of others."""
    from penelope_jax.models.fingerprint import fingerprint

    return dataclasses.replace(config, weights_fingerprint=model.fingerprint or fingerprint(model.config, model.params))


def check(directory: str, config: EngineConfig, executor: "JaxExecutor") -> None:
    """Raises InputError if `restore` would, before anything that takes long."""
    from penelope_jax.snapshot import check_snapshot

    check_snapshot(directory, config, executor)


def restore(directory: str, config: EngineConfig, executor: "JaxExecutor") -> CacheState:
    """Returns the cache that was saved there, or an empty one; prints which.

    Raises:
        InputError: it is of other weights, or of pages of another dtype, size or shape.
    """
    from penelope_jax.snapshot import restore_snapshot

    restored = restore_snapshot(directory, config, executor)
    if restored.problem:
        print(f"Restored nothing: what was saved is damaged: {restored.problem}")
    elif not restored.num_device:
        print(f"Restored nothing: {directory} holds no pages.")
    else:
        left_out = f", {restored.num_left_out:,} left out for want of room" if restored.num_left_out else ""
        print(
            f"Restored from {directory}: {restored.num_device:,} pages to the device, {restored.num_host:,} to the "
            f"host{left_out}."
        )
    return restored.cache


def save(directory: str, config: EngineConfig, cache: CacheState, executor: "JaxExecutor") -> None:
    """Saves a cache; prints what and where.

    Raises:
        InputError: it cannot be written; what was there before stays.
    """
    from penelope_jax.snapshot import save_snapshot

    try:
        saved = save_snapshot(directory, config, cache, executor)
    except KeyboardInterrupt:
        print(f"The cache was not saved: {directory} keeps what it held.")
        raise
    print(
        f"Saved to {saved.path}: {cache.num_device:,} pages from the device, {cache.num_host:,} from the host, "
        f"{saved.num_bytes / 1e6:,.1f} MB."
    )
