"""A result as text: what print() shows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ..formatting import NOTHING, aligned
from .page import Cell, Heading, Items, Page, Part, Table, Text

_BAR = 24


def text(page: Page) -> str:
    """Return the page as lines of text: the verdict, cards, and of each section that is not long its tables and texts."""
    told = [f"{page.title}: {page.verdict}" if page.verdict else page.title]
    told += [f"{name}: {said}" if said else name for name, said in page.policies]
    blocks = ["\n".join(_plain(line) for line in told)]
    blocks += ["\n".join(aligned(page.cards, {0, 2}))] if page.cards else []
    blocks += _blocks(page.opening)
    for section in page.sections:
        shown = [] if section.is_long else list(_blocks(section.parts))
        if shown and section.heading:
            shown[0] = f"{section.heading}\n{shown[0]}"
        blocks += shown
    return "\n\n".join(blocks).replace("µs", "us")


def _blocks(parts: Sequence[Part]) -> Iterator[str]:
    heading = ""
    for part in parts:
        if isinstance(part, Heading):
            heading = f"{part.text}\n"
            continue
        found = _block(part)
        if found:
            yield heading + found
            heading = ""


def _block(part: Part) -> str:
    if isinstance(part, Table):
        return table(part)
    if isinstance(part, Text):
        return "" if part.is_soft else _plain(part.text)
    if isinstance(part, Items):
        return "\n".join(map(_plain, part.items))
    return ""


def table(given: Table) -> str:
    """Return a table in aligned columns, but those without a name: its first rows, and how many more there are."""
    shown = [at for at, column in enumerate(given.columns) if column]
    rows = [[_cell(row[at]) for at in shown] for row in given.rows[: given.most]]
    columns = [given.columns[at] for at in shown]
    words = {at for at, column in enumerate(columns) if not column.startswith(">")}
    head, ruler, *found = aligned([[column.lstrip(">") for column in columns], *rows], words, ruled=True)
    lines = [head, ruler]
    for line, row in zip(found, given.rows, strict=False):
        lines += [line, *(f"  {'  '.join(cell.text for cell in below)}" for cell in row for below in cell.below)]
    if len(given.rows) > given.most:
        lines.append(f"{len(given.rows) - given.most} more{f': {given.where}' if given.where else ''}")
    return "\n".join(lines)


def _cell(cell: Cell) -> str:
    if cell.kind == "bar":
        return "▇" * math.ceil(_BAR * min(sum(part for _, part in cell.shares), 100) / 100)
    return cell.text or NOTHING


def _plain(text: str) -> str:
    return text.replace("`", "").replace("\u00a0", " ")
