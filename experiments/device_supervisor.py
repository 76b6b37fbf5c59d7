"""Runs parts in a process of its own, which may hang, crash, or lose its device.

A kernel that waits for a barrier for ever, or one that reads where there is nothing, takes its process with it. So the
parent never touches the device: it forks a child that runs the parts one after another and saves the document after
every case, ends it where a part takes too long, and forks another for the parts that are left. It must not have
imported jax, whose threads do not survive a fork.
"""

import json
import multiprocessing
import pathlib
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from penelope_jax.experiments.command import signals_wait
from penelope_jax.experiments.device_report import write_document

AGAIN = 75  # exit code of a child that wants a new one for the parts that are left
_POLL_S = 0.1

# Takes the parts to run, the document to fill, and what saves it; returns the exit code.
Child = Callable[[list[str], dict[str, Any], Callable[[], None]], int]


def supervise(child: Child, names: list[str], document: dict[str, Any], path: pathlib.Path, limit_s: float) -> int:
    """Runs parts until each has run or failed.

    Args:
        child: runs parts in the forked process.
        names: of the parts.
        document: has `parts`, by name, each with its `status`. Filled.
        path: where it is saved.
        limit_s: what ends a case that takes longer.

    Returns:
        0, or the exit code of a child that ended before its first part began.
    """
    left = names
    while left:
        write_document(path, document)
        code, reason = _watch(child, left, document, path, limit_s)
        document.update(json.loads(path.read_text(encoding="utf-8")))
        parts = document["parts"]
        if not set(left) & set(parts):
            if code and code > 0 and not parts:
                return code
            reason = f"before the first part: {reason}"
            parts[left[0]] = {"status": "running"}
        for name in left:
            entry = parts.get(name)
            if entry is not None and entry["status"] == "running":
                entry["status"] = f"failed: {reason}"
                where = f"{name}, {entry['running']}" if entry.get("running") else name
                print(f"\nFAILED {where}: {reason}", file=sys.stderr, flush=True)
        left = [name for name in left if name not in parts]
    return 0


def _watch(
    child: Child, names: list[str], document: dict[str, Any], path: pathlib.Path, limit_s: float
) -> tuple[int | None, str]:
    """Runs one child to its end; returns its exit code, None where it was killed, and how it ended in words."""

    def main() -> None:
        # Ctrl-C reaches both; an exception that comes up inside a callback of JAX would be a failed case there.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        sys.exit(child(names, document, lambda: write_document(path, document)))

    process = multiprocessing.get_context("fork").Process(target=main, daemon=True)
    begin = time.time()
    sys.stdout.flush()
    try:
        with signals_wait():
            process.start()
        while process.is_alive():
            process.join(_POLL_S)
            if time.time() - max(begin, _last_sign(path)) > limit_s:
                return None, f"no case ended within {limit_s:g} s; the process was killed"
    finally:
        with signals_wait():
            if process.pid is not None:
                process.kill()
                process.join()
    return process.exitcode, f"the process ended with {process.exitcode}"


def _last_sign(path: pathlib.Path) -> float:
    """Returns when the document was saved last."""
    return path.stat().st_mtime
