"""Numbers, tables and JSON as text, for reports, messages, notebooks and files."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..errors import HmpError
from ..version import __version__

_SCHEMA_VERSION = 1
T = TypeVar("T")
NOTHING = "-"  # fills a table's cell where there is no number


def duration(seconds: float, none: str = NOTHING) -> str:
    """Return `seconds` to three digits in s, ms or us: "1.5 ms"; `none` for 0."""
    if not seconds:
        return none
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * factor >= 1 or unit == "us":
            break
    return f"{seconds * factor:.3g} {unit}" if seconds * factor < 100 else f"{seconds * factor:.0f} {unit}"


def size(number: float, none: str = NOTHING) -> str:
    """Return a number of bytes in B, KiB, MiB, GiB or TiB: "1.5 KiB"; `none` for 0."""
    if not number:
        return none
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if number < 1024 or unit == "TiB":
            break
        number /= 1024
    return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"


def share(part: float, whole: float) -> str:
    """Return `part` of `whole` in percent: "12 %"; "-" where `whole` is 0."""
    if not whole:
        return NOTHING
    percent = 100 * part / whole
    return "0 %" if percent == 0 else "< 0.1 %" if percent < 0.1 else f"{percent:.1f} %" if percent < 10 else f"{percent:.0f} %"


def count(number: int, noun: str) -> str:
    """Return `number` with its noun: "1 call", "2 calls"."""
    return f"1 {noun}" if number == 1 else f"{number} {noun}s"


def two_digits(value: float | None) -> str:
    """Return an error or a gap to two digits, NOTHING where it is not known."""
    return NOTHING if value is None else "0" if value == 0 else f"{value:.2g}" if 0.001 <= value < 1000 else f"{value:.1e}"


def some(names: Sequence[str], most: int = 3) -> str:
    """Return the first `most` names, and how many there are more: "a, b, c and 2 more"."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def short_entry(source: str) -> str:
    """Return a list entry with the last two parts of its file: op_lists/habana/bf16.txt is known as habana/bf16.txt."""
    name, _, where = source.partition(" (")
    return f"{name} ({'/'.join(where.rstrip(')').split('/')[-2:])})" if where else name


# --- tables ---


def aligned(rows: Sequence[Sequence[str]], to_the_left: Collection[int] = (0,), *, ruled: bool = False) -> list[str]:
    """One line of text a row.

    Columns whose index is in `to_the_left` are aligned left, the others right; no line ends in spaces. `ruled` draws a line as long as the
    first row, a heading, below it.
    """
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


# --- files: JSON that any reader takes, and when and with what it was made ---


def json_values(value: Any) -> Any:
    """Return `value` with the strings "nan", "inf" and "-inf" for the floats that JSON lacks.

    Dicts are copied, lists and tuples become lists.
    """
    if isinstance(value, dict):
        return {key: json_values(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_values(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def of_json(kind: type[T], values: Mapping[str, Any]) -> T:
    """Return the dataclass of that kind whose fields `values` describes: lists become tuples, and strings the floats that JSON lacks."""
    found: dict[str, Any] = {}
    for each in dataclasses.fields(kind):  # type: ignore[arg-type]
        if each.name in values:
            value = values[each.name]
            is_number = isinstance(value, str) and "float" in str(each.type)
            found[each.name] = float(value) if is_number else tuple(value) if isinstance(value, list) else value
    return kind(**found)


def versioned(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` after the version of their form: every JSON that hmp writes says it first."""
    return {"schema_version": _SCHEMA_VERSION, **values}


def json_text(values: Mapping[str, Any]) -> str:
    """Return `values` as JSON, with their version."""
    return json.dumps(versioned(json_values(dict(values))), indent=1, allow_nan=False)


def written(path: str | Path, text: Callable[[], str]) -> Path:
    """Return the file `path`, into which the text that `text` makes was written.

    HmpError where it cannot be; where its folder is missing, before the text is made, for a page takes time.
    """
    target = Path(path)
    if not target.absolute().parent.is_dir():
        raise HmpError(f"{target}: there is no folder {target.parent} to write it into; make the folder first")
    made = text()
    try:
        target.write_text(made, encoding="utf-8")
    except OSError as error:
        raise HmpError(f"{target}: cannot be written ({error.strerror or error}); give a file in a folder that can be written to") from None
    return target


def json_written(path: str | Path, values: Callable[[], Mapping[str, Any]]) -> Path:
    """Return the file `path`, into which what `values` gives was written as JSON. HmpError as of `written`."""
    return written(path, lambda: json_text(values()) + "\n")


def provenance() -> dict[str, str]:
    """Return the date to the minute, in the time of this machine, and the versions of hmp and torch."""
    return {"date": f"{datetime.now():%Y-%m-%d %H:%M}", "hmp": __version__, "torch": torch.__version__}
