"""One description of a result: what it found, in cards, tables, figures and text. print(), pages and notebooks show it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from ...core.policy.policy import in_notebook
from ..formatting import NOTHING, aligned, json_values, json_written, share, size, two_digits, versioned, written
from ..formatting import duration as in_seconds

T = TypeVar("T")
COLOURED = ("bfloat16", "float16", "float32", "float8_e4m3fn")


# --- cells ---


@dataclass(frozen=True)
class Cell:
    """A cell of a table: its text, and how it looks.

    `kind` is "text", "code", "op", "module", "place", "number", "chips", "flow", "bar", "why" or "rule"; `value` is what a number sorts by;
    `title` is the path of a place, and of a rule the sentence that it unfolds to; `dtypes` are those of chips, of a flow three of them;
    `shares` are a bar's colours, each with the percentage of the cell's width. `below` has lines of cells to show under the text.
    """

    text: str = ""
    kind: str = "text"
    value: float = 0.0
    title: str = ""
    dtypes: tuple[str, ...] = ()
    shares: tuple[tuple[str, float], ...] = ()
    below: tuple[tuple[Cell, ...], ...] = ()


def number(value: float | None, text: str) -> Cell:
    """Return a number that sorts by its value; None comes last."""
    return Cell(text, "number", -1 if value is None else max(min(value, 1e300), -1e300))  # JavaScript reads no "inf"


def whole(value: float) -> Cell:
    """Return a whole number with commas."""
    return number(value, f"{value:,}")


def duration(seconds: float) -> Cell:
    """Return seconds with their unit."""
    return number(seconds, in_seconds(seconds))


def nbytes(value: float) -> Cell:
    """Return bytes with their unit."""
    return number(value, size(value))


def part(value: float, whole: float) -> Cell:
    """Return what `value` is of `whole`, in percent."""
    return number(value, share(value, whole))


def error(value: float | None) -> Cell:
    """Return an error to two digits."""
    return number(value, error_text(value))


def op(name: str, *below: tuple[Cell, ...]) -> Cell:
    """Return the name of an op, or of what a row is about, with lines below it."""
    return Cell(name, "op", below=below)


def code(text: str) -> Cell:
    """Return code."""
    return Cell(text, "code")


def module(path: str, none: str = "-") -> Cell:
    """Return the path of a module."""
    return Cell(path or none, "module")


def chips(dtypes: str) -> Cell:
    """Return dtypes, which are given with commas between them."""
    return Cell(dtypes, "chips", dtypes=tuple(dtypes.split(", ")) if dtypes else ())


def flow(*dtypes: str) -> Cell:
    """Return what dtypes a value goes through."""
    return Cell(" → ".join(each or "-" for each in dtypes), "flow", dtypes=dtypes)


def place(row: Any) -> Cell:
    """Return the file's name and the line; the page says the whole path when it is pointed at."""
    return Cell(place_text(row), "place", title=row.file)


def bar(whole: float, *parts: tuple[str, float]) -> Cell:
    """Return a bar of parts, a colour and a value each, as long as they are of `whole`."""
    return Cell("", "bar", shares=tuple((colour, round(100 * max(value, 0.0) / whole, 1) if whole else 0.0) for colour, value in parts))


def colour_class(name: str) -> str:
    """Return the colour of a dtype, of casts, or of anything else."""
    return name if name in (*COLOURED, "casts", "ops") else "other"


def place_text(row: Any) -> str:
    """Return the file's name and the line of a row, "-" if it has none."""
    return f"{row.file.replace(chr(92), '/').rpartition('/')[2]}:{row.line}" if row.file else "-"


def error_text(value: float | None) -> str:
    """Return an error to two digits, without zeros in its exponent."""
    return two_digits(value).replace("e-0", "e-").replace("e+0", "e")


def amount(value: int) -> str:
    """Return a large number in short: "109.5 M"."""
    for unit, word in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if value >= 10 * unit or value >= unit > 1e3:
            return f"{value / unit:,.1f} {word}"
    return f"{value:,}"


# --- what a section has ---


@dataclass(frozen=True)
class Table:
    """A table. `columns` are names, those of numbers with a `>` before them.

    One with a `filter` has a field that filters its rows, and a choice among `choices`, which `groups` gives for each row. Text shows the
    first rows, and says of the others where they are, as `note` does in a page of those that it lacks.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    label: str = ""
    note: str = ""
    where: str = ""
    most: int = 25  # rows that text shows
    filter: str = ""
    choice: str = ""
    choices: Sequence[str] = ()
    groups: Sequence[str] = ()
    chosen: int = -1

    kind = "table"


@dataclass(frozen=True)
class Text:
    """A paragraph; text between backquotes is code. What explains, `is_soft`, is for pages alone."""

    text: str
    is_soft: bool = False

    kind = "text"


@dataclass(frozen=True)
class Items:
    """A list of texts; notes are set apart."""

    items: Sequence[str]
    is_notes: bool = False

    kind = "items"


@dataclass(frozen=True)
class Line:
    """A line of a chart: its name, its colour, (x, y) pairs, and the size of its points, where 0 joins them by a line."""

    name: str
    colour: str
    points: Sequence[tuple[int, float]]
    size: float = 0.0


@dataclass(frozen=True)
class Depth:
    """A chart of relative errors against the order of the calls, on a logarithmic scale.

    There is a dashed line at `mark`, which is called `marked`; `named` is a point with its name; `across` says what is drawn side by side.
    """

    lines: Sequence[Line]
    mark: float | None
    marked: str
    named: tuple[int, float, str] | None
    across: str = "ops, in the order of their first calls"

    kind = "figure"

    @property
    def described(self) -> str:
        """Return what the chart shows."""
        return f"Relative error of every call, in their order: {', '.join(line.name for line in self.lines)}"


@dataclass(frozen=True)
class Point:
    """A trial in the trade-off: its cost as a ratio to float32's, how much worse it is, and its name in the legend, "" for none."""

    cost: float
    worse: float
    fits: bool
    name: str = ""
    is_chosen: bool = False


@dataclass(frozen=True)
class TradeOff:
    """A chart of how much worse each trial is against what it costs, with lines where the tolerance ends."""

    points: Sequence[Point]
    cost: str
    worse: str
    allowed: Sequence[float]

    kind = "figure"

    @property
    def described(self) -> str:
        """Return what the chart shows."""
        named = "; ".join(f"{point.name} {point.cost:.2f}, {point.worse:+.2%}" for point in self.points if point.name)
        return f"{self.worse} against {self.cost}: {named}"


@dataclass(frozen=True)
class Code:
    """Code to copy from a page."""

    text: str

    kind = "copy"


@dataclass(frozen=True)
class Tree:
    """Modules, each with those inside it; `why` makes the cell that says which rule a call followed."""

    root: Any
    why: Any

    kind = "tree"


Part = Table | Text | Items | Depth | TradeOff | Code | Tree


@dataclass(frozen=True)
class Section:
    """A section; `nav` is what the page's head calls it, "" for one that text alone shows. What `is_long` pages alone show."""

    id: str
    nav: str
    heading: str
    parts: Sequence[Part]
    is_long: bool = False


@dataclass(frozen=True)
class Page:
    """What a tool says of its result.

    `made` says how it came about; `policies` are names, each with what is said of it; `cards` are a name, a value and what that is of;
    `closing` says how to read it.
    """

    title: str
    verdict: str
    made: Sequence[str] = ()
    policies: Sequence[tuple[str, str]] = ()
    cards: Sequence[tuple[str, str, str]] = ()
    opening: Sequence[Part] = ()
    sections: Sequence[Section] = ()
    closing: str = ""


# --- as text: what print() shows ---

_BAR = 24


def text(page: Page) -> str:
    """Return the page as lines of text: the verdict, cards, and of each section that is not long its tables and texts."""
    told = [f"{page.title}: {page.verdict}" if page.verdict else page.title]
    told += [f"{name}: {said}" if said else name for name, said in page.policies]
    blocks = ["\n".join(_plain(line) for line in told)]
    blocks += ["\n".join(aligned(page.cards, {0, 2}))] if page.cards else []
    blocks += filter(None, map(_block, page.opening))
    for section in page.sections:
        shown = [] if section.is_long else list(filter(None, map(_block, section.parts)))
        if shown and section.heading:
            shown[0] = f"{section.heading}\n{shown[0]}"
        blocks += shown
    return "\n\n".join(blocks)


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


# --- results ---


class Result:
    """Base class of results that print, notebooks and files show: dataclasses, as a rule. `_totals` are what their JSON has besides."""

    _totals: ClassVar[tuple[str, ...]] = ()

    def _page(self) -> Page:
        """Return what the result says."""
        raise NotImplementedError

    def _named(self, rows: Iterable[T], name: str, what: str, by: str = "name") -> T:
        """Return the row that has that name. Raise KeyError, which lists all names, if no row has it."""
        found = {getattr(row, by): row for row in rows}
        if name not in found:
            raise KeyError(f"expected {what}, got {name!r}; there are {', '.join(map(repr, found))}")
        return found[name]

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain JSON values.

        Returns:
            The fields, seconds and bytes, and totals; a number that is not finite is the string "nan", "inf" or "-inf".
        """
        totals = {name: getattr(self, name) for name in self._totals}
        values: dict[str, Any] = json_values(versioned(totals | asdict(self)))  # type: ignore[call-overload]
        return values

    def to_json(self, path: str | Path) -> Path:
        """Write `to_dict()` into a file; a number that is not finite is the string "nan", "inf" or "-inf".

        Args:
            path: The file.

        Returns:
            The path.
        """
        return json_written(path, self.to_dict)

    def to_html(self, path: str | Path) -> Path:
        """Write the result as a page: one file that needs no network and is smaller than 2 MB. Needs the extra `report`.

        Args:
            path: The file.

        Returns:
            The path.
        """
        from .html import html  # which needs the extra

        return written(path, lambda: html(self._page()))

    def __str__(self) -> str:
        return text(self._page())

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return in_notebook(str(self))


def made_of(about: Mapping[str, Any], *others: str) -> list[str]:
    """Return how a result came about: its model, date, versions and device, and the others."""
    names = [("model", "model "), ("date", ""), ("hmp", "hmp "), ("torch", "torch "), ("device", "")]
    return [*(f"{word}{about[name]}" for name, word in names if about.get(name)), *others]


def left_out(shown: Sequence[object], every: int, what: str, where: str) -> str:
    """Return a sentence that says how many rows a table leaves out, "" for none."""
    return f"The {len(shown):,} of {every:,} {what}; {where} has them all." if every > len(shown) else ""
