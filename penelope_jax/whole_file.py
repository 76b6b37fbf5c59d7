"""Results are written whole or not at all: whoever reads a file never sees half of one, whatever ended its writer."""

import os
import pathlib


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes a file under another name beside it, which then takes its place.

    Raises:
        OSError: it cannot be written. Then, and when a signal ends the write, what was there before stays and nothing
            is left beside it.
    """
    part = pathlib.Path(f"{os.fspath(path)}.part")
    try:
        part.write_bytes(data)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
