"""What a notebook shows of a result."""

from __future__ import annotations

from html import escape


def in_notebook(text: str) -> str:
    """The text, as print() shows it, as HTML: wide tables scroll."""
    return f'<pre style="white-space:pre;overflow-x:auto">{escape(text)}</pre>'
