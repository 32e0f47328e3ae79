"""The page of what is assumed of Gaudi has every place where the code looks for the device or for its bridge."""

from __future__ import annotations

import ast
from pathlib import Path

import doc_blocks
from making import gaudi

# What runs where Habana's software is not, and so depends on nothing of it, and the texts of a command.
STAND_INS = ("hmp/compat", "hmp/cli")
NAMES = ("hpu", "habana_frameworks")


def _looks(file: Path) -> list[ast.stmt]:
    """The statements, not whole functions and classes, in which one of the names is a string by itself."""
    found: list[ast.stmt] = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.stmt) and not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            test = node.test if isinstance(node, ast.If) else node
            if any(isinstance(each, ast.Constant) and each.value in NAMES for each in ast.walk(test)):
                found.append(node)
    return found


def test_whatever_looks_for_gaudi_says_what_it_assumes() -> None:
    page = gaudi.page()
    for file in sorted((doc_blocks.ROOT / "hmp").rglob("*.py")):
        place = str(file.relative_to(doc_blocks.ROOT))
        if place.startswith(STAND_INS):
            continue
        lines = file.read_text(encoding="utf-8").splitlines()
        for statement in _looks(file):
            above = "\n".join(lines[max(statement.lineno - 4, 0) : statement.lineno - 1])
            assert gaudi.MARK in above, f"{place}:{statement.lineno} looks for Gaudi; say above it, after {gaudi.MARK!r}, what it assumes"
            assert f"| `{place}` |" in page
    assert page.count(gaudi.MARK) == 0 and page.count("\n| `") > 12
