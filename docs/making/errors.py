"""The page of all errors: what the code raises, read from its source."""

from __future__ import annotations

import ast
import functools
import html
from collections.abc import Iterator, Mapping

from . import ROOT

_CLASSES = """HmpError OpListError NonFiniteError NothingCalled TypeError ValueError ImportError AttributeError
    RuntimeError""".split()


@functools.cache
def page() -> str:
    """A table of the messages, by part of hmp; what a call puts into a message stands in braces."""
    rows = "\n".join(f"| {_cell(message)} | `{kind}` | `{place}` |" for place, message, kind in sorted(_all()))
    return f"""# Errors

Every error says where the problem is, what it is, and what to do about it. These are their words, as the code has them; what a call fills
in stands in braces. `OpListError` and `NonFiniteError` are `HmpError`s.

<div class="filtered" markdown>

| message | raised as | in |
|---|---|---|
{rows}

</div>
"""


def _all() -> set[tuple[str, str, str]]:
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in (ROOT / "hmp").rglob("*.py")}
    functions = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    said = {function.name: list(_returned(function)) for function in functions}
    found = set()
    for file, tree in trees.items():
        parts = file.relative_to(ROOT).with_suffix("").parts
        place = ".".join(parts[:3] if parts[1] == "compat" else parts[:2]).removesuffix(".__init__")
        found |= {(place, message, kind) for message, kind in _messages(tree, said)}
    return found


def _returned(function: ast.FunctionDef) -> Iterator[str]:
    """The texts that a function gives back: some errors are put into words by one."""
    for node in ast.walk(function):
        if isinstance(node, ast.Return) and node.value is not None and (text := _text(node.value)):
            yield text


def _messages(tree: ast.Module, said: Mapping[str, list[str]]) -> Iterator[tuple[str, str]]:
    assigned: dict[str, list[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and (text := _text(node.value)):
            assigned.setdefault(node.targets[0].id, []).append(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and (kind := _name(node.func)) in _CLASSES:
            first = node.args[0]
            text = _text(first)
            texts = [text] if text else assigned.get(_name(first), []) if isinstance(first, ast.Name) else []
            if isinstance(first, ast.Call):
                texts = said.get(_name(first.func), [])
            yield from ((message, kind) for message in texts if " " in message)


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


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
    for mark in "`*_[]{}\\":
        escaped = escaped.replace(mark, f"&#{ord(mark)};")
    return escaped
