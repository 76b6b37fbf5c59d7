"""What a part of `device_check.py` found: rows of a table, bars, and what failed."""

import contextlib
import dataclasses
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from penelope_jax.whole_file import write_whole

_LONGEST_MESSAGE = 600  # characters


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bar:
    """A figure that must reach a limit.

    Attributes:
        name: what it is.
        value: NaN counts as missed.
        limit: what it must reach, or not exceed.
        at_least: which of the two.
        judged: False: measured in a dry run, where it means nothing.
    """

    name: str
    value: float
    limit: float
    at_least: bool
    judged: bool = True

    @property
    def met(self) -> bool | None:
        if not self.judged:
            return None
        return self.value >= self.limit if self.at_least else self.value <= self.limit


class Result:
    """What a part found so far. It is saved after every case, so nothing is lost where a case ends the process.

    Attributes:
        rows: of the table, name of the column: value.
        figures: single values, by name.
        bars: what must be reached.
        errors: one line for each case that failed. skipped: cases that were not started.
        running: the case that runs now.
        save: called when a case begins and when it ends.
    """

    def __init__(self, *, dry: bool):
        self.rows: list[dict[str, Any]] = []
        self.figures: dict[str, Any] = {}
        self.bars: list[Bar] = []
        self.errors: list[str] = []
        self.skipped: list[str] = []
        self.running: str | None = None
        self._dry = dry
        self.save: Callable[[], None] = lambda: None

    def row(self, case: str, **columns: Any) -> None:
        self.rows.append({"case": case, **columns})

    def bar(self, name: str, value: float, limit: float, *, at_least: bool, speed: bool = True) -> None:
        """Adds a bar. One on `speed` is not judged in a dry run."""
        judged = not (speed and self._dry)
        self.bars.append(Bar(name=name, value=float(value), limit=limit, at_least=at_least, judged=judged))

    @contextlib.contextmanager
    def case(self, name: str) -> Iterator[None]:
        """Runs the code inside; an exception is an error of the part, and the next case runs."""
        begin = time.monotonic()
        self.running = name
        print(f"  {name} ...", file=sys.stderr, end="", flush=True)
        self.save()
        try:
            yield
            ending = ""
        except Exception as error:  # noqa: BLE001  # whatever fails is reported, and the next case runs
            self.errors.append(f"{name}: {describe(error)}")
            ending = f" FAILED: {describe(error)}"
        print(f" {time.monotonic() - begin:.1f} s{ending}", file=sys.stderr, flush=True)
        self.running = None
        self.save()

    def document(self) -> dict[str, Any]:
        """Returns what JSON can hold: infinities and NaN become None."""
        return {
            "rows": _plain(self.rows),
            "figures": _plain(self.figures),
            "bars": [_plain(dataclasses.asdict(bar)) | {"met": bar.met} for bar in self.bars],
            "errors": self.errors,
            "skipped": self.skipped,
            "running": self.running,
        }


def write_document(path: str | os.PathLike[str], document: dict[str, Any]) -> None:
    """Writes JSON; the file appears whole or not at all."""
    write_whole(path, (json.dumps(document, indent=1, allow_nan=False) + "\n").encode())


def describe(error: BaseException) -> str:
    """Returns an exception in one line, with the place in our code that it came from."""
    text = " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST_MESSAGE]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "site-packages" not in frame.filename]
    return f"{text} ({frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno})" if frames else text


def table(rows: list[dict[str, Any]]) -> str:
    """Returns rows as text, a column for every name."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, *([_text(row.get(name)) for name in columns] for row in rows)]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    return "\n".join(
        "  ".join(
            text.ljust(width) if not index else text.rjust(width)
            for index, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    if not math.isfinite(value):
        return str(value)
    if value and abs(value) < 1e-3:
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
