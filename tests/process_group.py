"""A Python program in a process group of its own, as a shell starts it: a signal to the group reaches its children too."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def started(code: str, *args: str) -> Iterator[subprocess.Popen[str]]:
    """Starts `code` with `args`, its output in pipes; at the end of the block nobody of the group is left."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
