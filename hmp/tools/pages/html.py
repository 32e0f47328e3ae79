"""HTML pages that need no network: the environment of their templates, and how numbers and names look in them."""

from __future__ import annotations

import re
from typing import Any

from ..extras import needed

with needed("a report's page needs", "report", "jinja2"):
    import jinja2
    import markupsafe

from ...core.formatting import share, short_entry, size, two_digits, typeset_duration

_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64", "float8_e4m3fn": "fp8"}


def render(template: str, **values: Any) -> str:
    """The template with `values`; what they hold is text, and is escaped."""
    return _environment().get_template(template).render(**values)


def _environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.PackageLoader(__name__), autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    made.filters |= {
        "duration": lambda seconds: _kept(typeset_duration(seconds)),
        "size": lambda number: _kept(size(number)),
        "entry": short_entry,
        "share": lambda part, whole: _kept(share(part, whole)),
        "dotted": _breakable,
        "count": lambda number: f"{number:,}",
        "amount": _amount,
        "dtypes": lambda text: text.split(", ") if text else [],
        "place": _place,
        "short": lambda dtype: _SHORT.get(dtype, dtype),
        "error": _error,
        "sortable": lambda value: -1 if value is None else min(value, 1e300),  # JavaScript reads no "inf"
    }
    return made


def _kept(text: str) -> str:
    """A number and its unit on one line."""
    return text.replace(" ", "\u00a0")


def _amount(number: int) -> str:
    """A large number in short: "109.5 M"."""
    for unit, word in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= 10 * unit or number >= unit > 1e3:
            return _kept(f"{number / unit:,.1f} {word}")
    return f"{number:,}"


def _breakable(text: str) -> markupsafe.Markup:
    """A long name that may go on in the next line after a dot or an underscore, and between the words of a class's name."""
    return markupsafe.Markup(re.sub(r"(?<=[._])|(?<=[a-z])(?=[A-Z])", "<wbr>", str(markupsafe.escape(text))))


def _place(row: Any) -> str:
    """The file's name and the line; the page says the whole path when it is pointed at."""
    return f"{row.file.replace(chr(92), '/').rpartition('/')[2]}:{row.line}" if row.file else "-"


def _error(value: float | None) -> str:
    return two_digits(value).replace("e-0", "e-").replace("e+0", "e")
