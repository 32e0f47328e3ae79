"""Rows of cells as lines of text with aligned columns."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def aligned(rows: Sequence[Sequence[str]], to_the_left: Collection[int] = (0,)) -> list[str]:
    """One line of text a row. Columns whose index is in `to_the_left` are aligned left, the others right; no line ends in spaces."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if at in to_the_left else cell.rjust(width) for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
