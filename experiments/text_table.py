"""Tables as plain text."""

from collections.abc import Sequence


def text_table(rows: Sequence[Sequence[str]], alignments: Sequence[str]) -> str:
    """Returns rows as lines with aligned columns.

    Args:
        rows: the cells; the first row is the head.
        alignments: `<` or `>` for each column.
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(alignments))]
    lines = (
        "  ".join(f"{cell:{align}{width}}" for cell, align, width in zip(row, alignments, widths, strict=True))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)
