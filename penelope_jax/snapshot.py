"""The cache on disk: its tree and the bytes of its pages, saved at shutdown, restored at the next start.

    DIR/snapshot-N/cache.json    what this is, and size and checksum of every other file; written last
    DIR/snapshot-N/tree/         histories, in Orbax's format
    DIR/snapshot-N/pages-I/      bytes of pages, some hundred megabytes each, in Orbax's format

A snapshot is made aside and gets its name when it is whole, so one that was interrupted leaves the one before. K/V of
other weights, of another dtype, page size or shape is refused. A snapshot that is damaged is left alone with a warning:
it costs the cache, and no file is opened whose checksum is wrong.

Orbax takes a second to import and is imported here only, when a function needs it.
"""

import contextlib
import fcntl
import json
import os
import pathlib
import re
import shutil
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from absl import logging

from penelope_jax.cache_outline import Outline, Rebuilt, Sources, outline_of, rebuild
from penelope_jax.config import EngineConfig
from penelope_jax.errors import InputError
from penelope_jax.pages import Tier
from penelope_jax.radix_tree import CacheState
from penelope_jax.state import make_state

if TYPE_CHECKING:
    from penelope_jax.executor import JaxExecutor

HEADER_FILE = "cache.json"

_FORMAT = 1
_CHUNK_BYTES = 256 << 20  # of pages that are read or written together
_BLOCK_BYTES = 1 << 20  # of a file, read at once for its checksum
_WRITING = "writing"
_NAME = re.compile(r"snapshot-(\d+)")
_ARRAYS = ("roots", "parents", "sizes", "ages", "tokens", "rows")


class Saved(NamedTuple):
    """What was saved, and where."""

    path: pathlib.Path
    num_pages: int
    num_bytes: int


class Restored(NamedTuple):
    """A cache to start with.

    Attributes:
        cache: it; empty when there was nothing to restore.
        num_device, num_host: its pages.
        num_left_out: saved pages for which there was no room; those that would be evicted first.
        problem: what is wrong with the snapshot, when it is damaged.
    """

    cache: CacheState
    num_device: int = 0
    num_host: int = 0
    num_left_out: int = 0
    problem: str = ""


def save_snapshot(
    directory: str | os.PathLike[str], config: EngineConfig, cache: CacheState, executor: "JaxExecutor"
) -> Saved:
    """Writes a cache; the snapshot that was there before goes when this one is whole.

    Args:
        directory: made if need be.
        config: of the engine, with a fingerprint of the weights.
        cache: no pin is out and no move under way; see `Driver.drain_moves`.
        executor: has the bytes of its pages.

    Raises:
        ValueError: the cache is in use, or the configuration has no fingerprint.
        InputError: it cannot be written, or another process is saving there; what was there before stays.
    """
    if not config.weights_fingerprint:
        raise ValueError("a cache is saved with the fingerprint of its weights; weights_fingerprint is ''.")
    _check_processes()
    outline, sources = outline_of(cache)
    directory = pathlib.Path(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _alone(directory):
            path = _save(directory, config, outline, sources, executor)
    except (OSError, ValueError) as error:
        raise InputError(f"{directory}: the cache was not saved: {_reason(error)}") from error
    return Saved(path, outline.num_rows, outline.num_rows * executor.host_pages.page_bytes)


@contextlib.contextmanager
def _alone(directory: pathlib.Path) -> Iterator[None]:
    """Locks a directory, where its file system can: two processes that write at once would mix their pages.

    Raises:
        ValueError: another process has the lock.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError("another process is saving its cache there.") from error
        except OSError as error:
            logging.warning("%s: cannot be locked, %s; no other process may save there.", directory, error.strerror)
        yield
    finally:
        os.close(descriptor)


def _save(
    directory: pathlib.Path, config: EngineConfig, outline: Outline, sources: Sources, executor: "JaxExecutor"
) -> pathlib.Path:
    """Writes a snapshot aside, gives it its name and removes those before; returns its path."""
    writing = directory / _WRITING
    try:
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir()
        _write_pages(writing, sources, executor)
        _write(writing / "tree", {name: getattr(outline, name) for name in _ARRAYS})
        header: dict[str, Any] = {
            "format": _FORMAT,
            **_identity(config, executor),
            "namespaces": list(outline.namespaces),
            "num_pages": outline.num_rows,
            "chunk_pages": _chunk_pages(executor),
            "files": _files(writing),
        }
        header["checksum"] = _header_checksum(header)
        (writing / HEADER_FILE).write_text(json.dumps(header, indent=1) + "\n", encoding="utf-8")
        before = _snapshots(directory)
        path = directory / f"snapshot-{max(before, default=-1) + 1}"
        os.rename(writing, path)
    finally:
        shutil.rmtree(writing, ignore_errors=True)
    for old in before.values():
        shutil.rmtree(old, ignore_errors=True)
    return path


def check_snapshot(directory: str | os.PathLike[str], config: EngineConfig, executor: "JaxExecutor") -> None:
    """Raises InputError if `restore_snapshot` would: before anything that takes long. Damage is no reason."""
    found = _snapshots(pathlib.Path(directory))
    if found:
        path = found[max(found)]
        try:
            header = _read_header(path / HEADER_FILE)
        except (OSError, ValueError):
            return
        _check_identity(path, header, config, executor)


def restore_snapshot(directory: str | os.PathLike[str], config: EngineConfig, executor: "JaxExecutor") -> Restored:
    """Reads the snapshot of a directory, if there is one, and puts its pages into the executor's memory.

    Args:
        directory: what `save_snapshot` wrote to; it need not exist.
        config: of the engine, with a fingerprint of the weights.
        executor: no step has run yet.

    Raises:
        InputError: the snapshot is of other weights, or of pages of another dtype, size or shape.
    """
    if not config.weights_fingerprint:
        raise ValueError("a cache is restored for the fingerprint of its weights; weights_fingerprint is ''.")
    _check_processes()
    empty = make_state(config).cache
    found = _snapshots(pathlib.Path(directory))
    if not found:
        return Restored(empty)
    path = found[max(found)]
    try:
        header = _read_header(path / HEADER_FILE)
        _check_identity(path, header, config, executor)
        rebuilt = _read_tree(path, header, empty, config)
        _read_pages(path, header, rebuilt, executor)
    except InputError:
        raise
    except (OSError, ValueError) as error:
        reason = _reason(error)
        logging.warning("%s: the saved cache is damaged and is not used: %s", path, reason)
        return Restored(empty, problem=f"{path}: {reason}")
    if rebuilt.num_left_out:
        logging.warning(
            "%s: %d of %d saved pages have no room and are left out.", path, rebuilt.num_left_out, header["num_pages"]
        )
    return Restored(rebuilt.cache, len(rebuilt.device_ids), len(rebuilt.host_ids), rebuilt.num_left_out)


def _read_header(path: pathlib.Path) -> dict[str, Any]:
    header = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(header, dict):
        raise ValueError(f"{path.name} is no JSON object.")
    if header.get("format") != _FORMAT:
        raise ValueError(f"{path.name}: format {header.get('format')!r} is not supported; supported: {_FORMAT}.")
    if header.pop("checksum", None) != _header_checksum(header):
        raise ValueError(f"{path.name}: its checksum is wrong.")
    return header


def _header_checksum(header: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(header, sort_keys=True).encode())


def _identity(config: EngineConfig, executor: "JaxExecutor") -> dict[str, Any]:
    """Returns what must be the same for saved bytes to mean the same."""
    return {
        "weights_fingerprint": config.weights_fingerprint,
        "dtype": executor.kv_pool.dtype.name,
        "page_size": config.page_size,
        "page_shape": list(executor.kv_pool.shape[1:]),
    }


def _check_identity(path: pathlib.Path, header: dict[str, Any], config: EngineConfig, executor: "JaxExecutor") -> None:
    words = {
        "weights_fingerprint": "weights with fingerprint",
        "dtype": "K/V of dtype",
        "page_size": "pages whose size in tokens is",
        "page_shape": "pages of shape [layers, 2, kv heads, tokens, head dim]",
    }
    for name, value in _identity(config, executor).items():
        if header.get(name) != value:
            raise InputError(
                f"{path}: holds {words[name]} {header.get(name)}; this engine has {value}. Choose another directory, "
                "or remove it."
            )


def _chunk_pages(executor: "JaxExecutor") -> int:
    return max(1, _CHUNK_BYTES // executor.host_pages.page_bytes)


def _write_pages(writing: pathlib.Path, sources: Sources, executor: "JaxExecutor") -> None:
    """Writes the bytes of all rows."""
    size = _chunk_pages(executor)
    for index, start in enumerate(range(0, len(sources.page_ids), size)):
        ids, tiers = sources.page_ids[start : start + size], sources.tiers[start : start + size]
        data = np.empty((len(ids), *executor.kv_pool.shape[1:]), executor.kv_pool.dtype)
        for tier, read in ((Tier.DEVICE, executor.read_pages), (Tier.HOST, executor.read_host_pages)):
            if (tiers == tier).any():
                data[tiers == tier] = read(ids[tiers == tier])
        _write(writing / f"pages-{index}", {"pages": data.view(f"u{data.dtype.itemsize}")})


def _read_tree(path: pathlib.Path, header: dict[str, Any], empty: CacheState, config: EngineConfig) -> Rebuilt:
    tree = _read(path, "tree", header, _ARRAYS)
    outline = Outline(page_size=config.page_size, namespaces=tuple(header["namespaces"]), **tree)
    if outline.num_rows != header["num_pages"]:
        raise ValueError(f"{outline.num_rows} pages are in its tree, {header['num_pages']} were saved.")
    return rebuild(outline, empty, config.policy)


def _read_pages(path: pathlib.Path, header: dict[str, Any], rebuilt: Rebuilt, executor: "JaxExecutor") -> None:
    """Puts the bytes of restored rows where the cache expects them, chunk by chunk."""
    size, dtype = header["chunk_pages"], executor.kv_pool.dtype
    for index, start in enumerate(range(0, header["num_pages"], size)):
        parts = [
            (rows[wanted] - start, ids[wanted], write)
            for rows, ids, write in (
                (rebuilt.device_rows, rebuilt.device_ids, executor.write_pages),
                (rebuilt.host_rows, rebuilt.host_ids, executor.write_host_pages),
            )
            if (wanted := (rows >= start) & (rows < start + size)).any()
        ]
        if parts:
            data = _read(path, f"pages-{index}", header, ("pages",))["pages"]
            for rows, ids, write in parts:
                write(ids, data[rows].view(dtype))


def _files(directory: pathlib.Path, part: str = "") -> dict[str, list[int]]:
    """Returns [size, checksum] of every file of a directory, or of a part of it, by path."""
    found = {}
    for path in sorted((directory / part).rglob("*")):
        if path.is_file():
            crc = 0
            with open(path, "rb") as file:
                while block := file.read(_BLOCK_BYTES):
                    crc = zlib.crc32(block, crc)
            found[path.relative_to(directory).as_posix()] = [path.stat().st_size, crc]
    return found


def _write(directory: pathlib.Path, arrays: dict[str, np.ndarray]) -> None:
    import orbax.checkpoint as ocp

    # Orbax does not write arrays without elements.
    kept = {name: array for name, array in arrays.items() if array.size} | {"version": np.array(_FORMAT)}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_zarr3=True, use_compression=False)) as checkpointer:
        try:
            checkpointer.save(directory.resolve(), args=ocp.args.PyTreeSave(kept))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{directory}: {_reason(error)}") from error


def _read(path: pathlib.Path, part: str, header: dict[str, Any], names: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Returns arrays of a part of a snapshot, those without elements as i32[0].

    Raises:
        ValueError: a file of it is not as it was written, or cannot be understood.
    """
    import orbax.checkpoint as ocp

    saved = {name: entry for name, entry in header["files"].items() if name.startswith(f"{part}/")}
    found = _files(path, part)
    for name in sorted(saved.keys() | found.keys()):
        if name not in found:
            raise ValueError(f"{name} is missing.")
        if name not in saved:
            raise ValueError(f"{name} does not belong there.")
        if found[name] != saved[name]:
            what = "size" if found[name][0] != saved[name][0] else "checksum"
            raise ValueError(f"the {what} of {name} is wrong.")
    directory = (path / part).resolve()
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_zarr3=True, use_compression=False)) as checkpointer:
        try:
            stored = checkpointer.metadata(directory).item_metadata.tree
            wanted = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in stored}
            arrays = checkpointer.restore(directory, args=ocp.args.PyTreeRestore(restore_args=wanted))
        except Exception as error:  # the library raises bare Exception for a broken file
            raise ValueError(f"{part}: {_reason(error)}") from error
    return {name: np.asarray(arrays.get(name, np.empty(0, np.int32))) for name in names}


def _snapshots(directory: pathlib.Path) -> dict[int, pathlib.Path]:
    """Returns the snapshots of a directory by number."""
    if not directory.is_dir():
        return {}
    named = ((_NAME.fullmatch(path.name), path) for path in directory.iterdir())
    return {int(match[1]): path for match, path in named if match}


def _check_processes() -> None:
    if jax.process_count() > 1:
        raise ValueError(f"a cache over {jax.process_count()} processes cannot be saved or restored; supported: 1.")


def _reason(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
