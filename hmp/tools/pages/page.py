"""One description of a result: what it found, in cards, tables, figures and text. `html()` makes a page of it that needs no network."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..extras import needed

with needed("a report's page needs", "report", "jinja2"):
    import jinja2
    import markupsafe

from ...core.formatting import share, short_entry, size, two_digits, typeset_duration

_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64", "float8_e4m3fn": "fp8"}
_COLOURED = ("bfloat16", "float16", "float32", "float8_e4m3fn")


# --- cells ---


@dataclass(frozen=True)
class Cell:
    """A cell of a table: its text, and how it looks.

    `kind` is "text", "code", "op", "module", "place", "number", "chips", "flow", "bar" or "why"; `value` is what a number sorts by;
    `dtypes` are those of chips, of a flow three of them; `shares` are a bar's colours, each with the percentage of the cell's width.
    """

    text: str = ""
    kind: str = "text"
    value: float = 0.0
    title: str = ""
    dtypes: tuple[str, ...] = ()
    shares: tuple[tuple[str, float], ...] = ()


def number(value: float | None, text: str) -> Cell:
    """Return a number that sorts by its value; None comes last."""
    return Cell(text, "number", -1 if value is None else max(min(value, 1e300), -1e300))  # JavaScript reads no "inf"


def whole(value: float) -> Cell:
    """Return a whole number with commas."""
    return number(value, f"{value:,}")


def duration(seconds: float) -> Cell:
    """Return seconds with their unit."""
    return number(seconds, typeset_duration(seconds))


def nbytes(value: float) -> Cell:
    """Return bytes with their unit."""
    return number(value, size(value))


def part(value: float, whole: float) -> Cell:
    """Return what `value` is of `whole`, in percent."""
    return number(value, share(value, whole))


def error(value: float | None) -> Cell:
    """Return an error to two digits."""
    return number(value, error_text(value))


def op(name: str) -> Cell:
    """Return the name of an op, or of what a row is about."""
    return Cell(name, "op")


def code(text: str, title: str = "") -> Cell:
    """Return code that is not broken into lines."""
    return Cell(text, "code", title=title)


def module(path: str, none: str = "-") -> Cell:
    """Return the path of a module."""
    return Cell(path or none, "module")


def chips(dtypes: str) -> Cell:
    """Return dtypes, which are given with commas between them."""
    return Cell(dtypes, "chips", dtypes=tuple(dtypes.split(", ")) if dtypes else ())


def flow(*dtypes: str) -> Cell:
    """Return what dtypes a value goes through."""
    return Cell(" → ".join(dtypes), "flow", dtypes=dtypes)


def place(row: Any) -> Cell:
    """Return the file's name and the line; the page says the whole path when it is pointed at."""
    return Cell(place_text(row), "place", title=row.file)


def bar(whole: float, *parts: tuple[str, float]) -> Cell:
    """Return a bar of parts, a colour and a value each, as long as they are of `whole`."""
    return Cell("", "bar", shares=tuple((colour, round(100 * max(value, 0.0) / whole, 1) if whole else 0.0) for colour, value in parts))


def colour_class(name: str) -> str:
    """Return the colour of a dtype, of casts, or of anything else."""
    return name if name in (*_COLOURED, "casts", "ops") else "other"


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

    One with a `filter` has a field that filters its rows, and a choice among `choices`, which `groups` gives for each row.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    label: str = ""
    note: str = ""
    filter: str = ""
    choice: str = ""
    choices: Sequence[str] = ()
    groups: Sequence[str] = ()
    chosen: int = -1

    kind = "table"


@dataclass(frozen=True)
class Text:
    """Return a paragraph; text between backquotes is code."""

    text: str
    is_soft: bool = False

    kind = "text"


@dataclass(frozen=True)
class Heading:
    """A heading within a section."""

    text: str
    id: str = ""

    kind = "heading"


@dataclass(frozen=True)
class Items:
    """Return a list of texts; as notes it is highlighted."""

    items: Sequence[str]
    is_notes: bool = False

    kind = "items"


@dataclass(frozen=True)
class Names:
    """Names under a title, folded where they are many."""

    title: str
    names: Sequence[str]

    kind = "names"


@dataclass(frozen=True)
class Figure:
    """A chart: the base64 of an SVG image, and what it shows."""

    data: str
    described: str

    kind = "figure"


@dataclass(frozen=True)
class Legend:
    """What colours mean: a colour and its text each."""

    entries: Sequence[tuple[str, str]]

    kind = "legend"


@dataclass(frozen=True)
class Split:
    """Parts of a whole, as one bar: colour, text and size each."""

    parts: Sequence[tuple[str, str, float]]

    kind = "split"


@dataclass(frozen=True)
class Code:
    """Code to copy."""

    text: str

    kind = "copy"


@dataclass(frozen=True)
class Tree:
    """Modules, each with those inside it."""

    root: Any

    kind = "tree"


Part = Table | Text | Heading | Items | Names | Figure | Legend | Split | Code | Tree


@dataclass(frozen=True)
class Section:
    """A section; `nav` is what the page's head calls it."""

    id: str
    nav: str
    heading: str
    parts: Sequence[Part]


@dataclass(frozen=True)
class Page:
    """What a tool says of its result.

    `made` says how it came about; `policies` are names, each with what is said of it; `cards` are a name, a value and what that is of;
    `closing` has words and what they mean.
    """

    title: str
    verdict: str
    made: Sequence[str] = ()
    policies: Sequence[tuple[str, str]] = ()
    cards: Sequence[tuple[str, str, str]] = ()
    opening: Sequence[Part] = ()
    sections: Sequence[Section] = ()
    closing: Mapping[str, Sequence[str]] = field(default_factory=dict)
    closing_text: str = ""

    def html(self) -> str:
        """Return the page; what its values hold is text, and is escaped."""

        def breakable(text: str) -> Any:
            """Let a long name go on in the next line after a dot or an underscore, and between the words of a class's name."""
            return markupsafe.Markup(re.sub(r"(?<=[._])|(?<=[a-z])(?=[A-Z])", "<wbr>", str(markupsafe.escape(text))))

        def coded(text: str) -> Any:
            """Backquotes become code, and a number stays on the line of its unit."""
            escaped = str(markupsafe.escape(kept(text)))
            return markupsafe.Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", escaped))

        def kept(text: str) -> str:
            return re.sub(r"(?<=\d) (?=(?:%|[KMGT]?i?B|[mµu]?s|[KMB])\b|%)", "\u00a0", text)

        made = jinja2.Environment(
            loader=jinja2.PackageLoader(__name__), autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
        )
        made.filters |= {
            "breakable": breakable,
            "coded": coded,
            "kept": kept,
            "short": lambda dtype: _SHORT.get(dtype, dtype),
            "colour": colour_class,
            "place": place_text,
            "entry": short_entry,
            "count": lambda number: f"{number:,}",
            "size": size,
            "duration": typeset_duration,
            "dtypes": lambda text: text.split(", ") if text else [],
            "share": share,
        }
        return made.get_template("page.html.j2").render(page=self)


def made_of(about: Mapping[str, Any], *others: str) -> list[str]:
    """Return how a result came about: its model, date, versions and device, and the others."""
    names = [("model", "model "), ("date", ""), ("hmp", "hmp "), ("torch", "torch "), ("device", "")]
    return [*(f"{word}{about[name]}" for name, word in names if about.get(name)), *others]


def left_out(shown: Sequence[object], every: int, what: str, where: str) -> str:
    """Return a sentence that says how many rows a table leaves out, "" for none."""
    return f"The {len(shown):,} of {every:,} {what}; {where} has them all." if every > len(shown) else ""


def parts_of(*parts: Part | Iterable[Part] | None) -> list[Part]:
    """Return the parts of a section, without those that are None."""
    found: list[Part] = []
    for each in parts:
        if each is not None:
            found += [each] if hasattr(each, "kind") else each  # type: ignore[list-item]
    return found
