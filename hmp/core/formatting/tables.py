"""Rows of cells as lines of text with aligned columns, and such text in a notebook."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from html import escape


def aligned(rows: Sequence[Sequence[str]], to_the_left: Collection[int] = (0,), *, ruled: bool = False) -> list[str]:
    """One line of text a row. Columns whose index is in `to_the_left` are aligned left, the others right; no line ends in spaces. `ruled`
    draws a line as long as the first row, a heading, below it."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if at in to_the_left else cell.rjust(width) for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    if ruled:
        lines.insert(1, "-" * len(lines[0]))
    return lines


def in_notebook(text: str) -> str:
    """The text, as print() shows it, as HTML: wide tables scroll."""
    return f'<pre style="white-space:pre;overflow-x:auto">{escape(text)}</pre>'
