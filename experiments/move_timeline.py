"""What moved between the tiers over time: as lines of text, and as a picture where matplotlib is installed."""

from collections.abc import Sequence

import numpy as np

from penelope_jax.cost_executor import MoveRecord
from penelope_jax.errors import InputError
from penelope_jax.experiments.text_table import text_table
from penelope_jax.moves import MoveKind

_LINES = 24
_BAR = 40  # characters of the longest bar

SERIES = ("demoted", "loaded", "swapped", "ahead")


def binned(moves: Sequence[MoveRecord], num_bins: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Returns the borders of equal parts of the time, in s, and the pages whose move ended in each, by series.

    Args:
        moves: at least one.
        num_bins: how many parts.

    Returns:
        f64[num_bins + 1], and i64[num_bins] for each of `SERIES`: `swapped` and `ahead` are among `loaded`.
    """
    edges = np.linspace(0.0, max(move.end_s for move in moves), num_bins + 1)
    ends = np.array([move.end_s for move in moves])
    bins = np.clip(np.searchsorted(edges, ends, side="left") - 1, 0, num_bins - 1)
    values = {
        "demoted": [move.num_pages * (move.kind is MoveKind.DEMOTE) for move in moves],
        "loaded": [move.num_pages * (move.kind is MoveKind.LOAD) for move in moves],
        "swapped": [move.num_swapped for move in moves],
        "ahead": [move.num_pages * move.prefetch for move in moves],
    }
    return edges, {name: np.bincount(bins, np.array(values[name]), num_bins).astype(np.int64) for name in SERIES}


def text(moves: Sequence[MoveRecord]) -> str:
    """Returns the timeline as a table, a line for each part of the time."""
    if not moves:
        return "Nothing moved."
    edges, series = binned(moves, _LINES)
    most = max(1, int(series["loaded"].max()))
    rows = [["from s", "to s", "pages demoted", "loaded", "swapped", "ahead", "loaded"]]
    for index in range(_LINES):
        numbers = [f"{series[name][index]:,}" for name in SERIES]
        bar = "#" * round(_BAR * int(series["loaded"][index]) / most)
        rows.append([f"{edges[index]:,.0f}", f"{edges[index + 1]:,.0f}", *numbers, bar])
    return text_table(rows, [">"] * (len(rows[0]) - 1) + ["<"])


def plot(moves: Sequence[MoveRecord], path: str, title: str) -> None:
    """Draws the timeline into a file.

    Raises:
        InputError: nothing moved, or the file cannot be written; `engine_options.check_plot` finds out before.
    """
    if not moves:
        raise InputError(f"--plot {path}: nothing moved.")
    from matplotlib.figure import Figure

    edges, series = binned(moves, 200)
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.stairs(series["loaded"], edges, label="loaded")
    axes.stairs(series["swapped"], edges, label="of these through the swap buffer", fill=True, alpha=0.4)
    axes.stairs(-series["demoted"], edges, label="demoted")
    axes.set_xlabel("simulated time, s")
    axes.set_ylabel("pages")
    axes.set_title(title)
    axes.legend()
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise InputError(f"--plot {path}: {error}") from error
