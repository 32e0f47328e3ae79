"""Small pieces of HTML for notebooks, without scripts or style sheets. All text in them is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_COLOURS = {
    "bfloat16": "#1f7a8c;color:#fff",
    "float16": "#7d5ba6;color:#fff",
    "float32": "#e8b84a;color:#2b2000",
    "float8_e4m3fn": "#b0428f;color:#fff",
}
_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64", "float8_e4m3fn": "fp8"}
_CELL = "text-align:left;vertical-align:top;padding:1px 10px 1px 0"
_NUMBER = "text-align:right;vertical-align:top;padding:1px 10px 1px 0;white-space:nowrap"


class Html(str):
    """A string of HTML, which is not escaped again."""


def text(value: object) -> Html:
    """`value` as HTML: its str() escaped, or itself where it is Html."""
    return value if isinstance(value, Html) else Html(escape(str(value)))


def code(value: object) -> Html:
    """`value` in the font of code."""
    return Html(f"<code>{text(value)}</code>")


def short(dtype: str) -> str:
    """The short name of a dtype: "bf16" for "bfloat16"; its own name where there is no short one."""
    return _SHORT.get(dtype, dtype)


def chip(dtype: str) -> Html:
    """The short name of a dtype on that dtype's colour."""
    colours = _COLOURS.get(dtype, "#66707a;color:#fff")
    style = f"background:{colours};border-radius:4px;padding:0 5px;font:600 85% monospace"
    return Html(f'<span style="{style}">{text(short(dtype))}</span>')


def flow(*dtypes: str) -> Html:
    """Chips with arrows between them. Each argument is a dtype, several as "bfloat16, float32", or "" for none."""
    parts = ["".join(chip(each) for each in part.split(", ")) if part else "-" for part in dtypes]
    return Html(f'<span style="white-space:nowrap">{" → ".join(parts)}</span>')


def table(heads: Sequence[str], rows: Iterable[Sequence[object]], numbers: int = 0) -> Html:
    """An HTML table; its last `numbers` columns are aligned to the right."""
    left = len(heads) - numbers

    def cells(tag: str, values: Sequence[object]) -> str:
        scope = ' scope="col"' if tag == "th" else ""
        return "".join(f'<{tag}{scope} style="{_CELL if at < left else _NUMBER}">{text(v)}</{tag}>' for at, v in enumerate(values))

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return Html(f'<table style="border-collapse:collapse"><thead><tr>{cells("th", heads)}</tr></thead><tbody>{body}</tbody></table>')


def box(*parts: object) -> Html:
    """The parts below each other, with a bar on the left, in the text colour of the page around."""
    style = "border-left:3px solid #1f7a8c;padding:2px 0 2px 10px;line-height:1.5;color:inherit"
    return Html(f'<div style="{style}">' + "".join(f"<div>{text(part)}</div>" for part in parts) + "</div>")
