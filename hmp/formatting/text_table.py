"""Rows of cells as lines of text, one column below the other."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def aligned(rows: Sequence[Sequence[str]], to_the_left: Collection[int] = (0,)) -> list[str]:
    """A line a row; the columns whose numbers are in `to_the_left` begin below each other, all others end so. No line ends in spaces."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if at in to_the_left else cell.rjust(width) for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
