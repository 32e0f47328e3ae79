"""A page of a result, as one HTML file."""

from __future__ import annotations

import re
from typing import Any

from ..extras import needed

with needed("a report's page needs", "report", "jinja2"):
    import jinja2
    import markupsafe

from ..formatting import size, typeset_duration
from . import charts
from .page import Page, colour_class, place_text

_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64", "float8_e4m3fn": "fp8"}


def html(page: Page) -> str:
    """Return the page; what its values hold is text, and is escaped."""
    made = jinja2.Environment(
        loader=jinja2.PackageLoader(__name__), autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    made.filters |= {
        "breakable": _breakable,
        "coded": _coded,
        "kept": _kept,
        "short": lambda dtype: _SHORT.get(dtype, dtype),
        "colour": colour_class,
        "count": lambda number: f"{number:,}",
        "dtypes": lambda text: text.split(", ") if text else [],
        "place": place_text,
        "size": size,
        "duration": typeset_duration,
        "drawn": charts.drawn,
    }
    return made.get_template("page.html.j2").render(page=page)


def _breakable(text: str) -> Any:
    """Let a long name go on in the next line after a dot or an underscore, and between the words of a class's name."""
    return markupsafe.Markup(re.sub(r"(?<=[._])(?=\D)|(?<=[a-z])(?=[A-Z])", "<wbr>", str(markupsafe.escape(text))))


def _coded(text: str) -> Any:
    """Backquotes become code, and a number stays on the line of its unit."""
    return markupsafe.Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(markupsafe.escape(_kept(text)))))


def _kept(text: str) -> str:
    return re.sub(r"(?<=\d) (?=(?:%|[KMGT]?i?B|[mµu]?s|[KMB])\b|%)", "\u00a0", text)
