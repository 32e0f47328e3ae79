"""The page of all errors: what the code raises, read from its source."""

from __future__ import annotations

import ast
import html
from collections.abc import Iterator
from pathlib import Path

from . import ROOT

_CLASSES = ("HmpError", "OpListError", "NonFiniteError", "TypeError", "ValueError", "ImportError", "AttributeError", "RuntimeError")


def page() -> str:
    """A table of the messages by part of hmp; what a call puts into a message stands in braces."""
    parts = []
    for place, found in _by_package().items():
        rows = "\n".join(f"| {_cell(message)} | `{kind}` |" for message, kind in sorted(found))
        parts.append(f"## {place}\n\n<div class='filtered' markdown>\n\n| message | raised as |\n|---|---|\n{rows}\n\n</div>\n")
    return (
        "# Errors\n\nEvery error says where the problem is, what it is, and what to do about it. These are their words, as the code has "
        "them; what a call fills in stands in braces. `OpListError` and `NonFiniteError` are `HmpError`s.\n\n" + "\n".join(parts)
    )


def _by_package() -> dict[str, set[tuple[str, str]]]:
    found: dict[str, set[tuple[str, str]]] = {}
    for file in sorted((ROOT / "hmp").rglob("*.py")):
        messages = set(_messages(file))
        if messages:
            parts = file.relative_to(ROOT / "hmp").with_suffix("").parts
            place = "hmp." + ".".join(parts[:2] if parts[0] == "compat" else parts[:1])
            found.setdefault(place, set()).update(messages)
    return found


def _messages(file: Path) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute)) and node.args:
            kind = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            message = _text(node.args[0])
            if kind in _CLASSES and message is not None and " " in message:
                yield message, kind


def _text(node: ast.expr) -> str | None:
    """The text of a literal, with what is filled in between braces; None for what is no text."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else "{" + ast.unparse(part.value) + "}"
            for part in node.values
            if isinstance(part, (ast.Constant, ast.FormattedValue))
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _text(node.left), _text(node.right)
        return (
            None
            if left is None and right is None
            else (left or f"{{{ast.unparse(node.left)}}}") + (right or f"{{{ast.unparse(node.right)}}}")
        )
    return None


def _cell(message: str) -> str:
    escaped = html.escape(message, quote=False).replace("|", "&#124;").replace("\n", "<br>")
    for mark in "`*_[]\\":
        escaped = escaped.replace(mark, f"&#{ord(mark)};")
    return escaped
