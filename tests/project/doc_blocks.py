"""The texts for readers, their blocks of code, and what these print."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "pages"
# What a user reads, and what a maintainer reads.
FILES = [ROOT / "README.md", *sorted(PAGES.rglob("*.md"))]
DEV_FILES = [ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs" / "dev").glob("*.md"))]


def blocks(text: str, language: str = "python") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def prose(text: str) -> str:
    """Return a text without blocks of code."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def with_outputs(text: str) -> list[tuple[str, str | None]]:
    """Return each block of Python, with the block of text right after it: what it prints."""
    found = re.finditer(r"^```python\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", text, re.MULTILINE | re.DOTALL)
    return [(block[1], block[2]) for block in found]


def comparable(printed: str) -> str:
    """Return a printed text without paths, releases of torch and times, which differ between two runs that do the same."""
    printed = re.sub(r"[\w/.-]*/(?=op_lists/|train\.py|[\w-]+\.py:)", "", printed)
    printed = re.sub(r"[\w.-]+\.py:", "train.py:", printed)
    printed = re.sub(r"@[\d.]+\d", "@N", printed)
    return re.sub(r" *[\d.]+ (ns|[uµ]s|ms|s)\b", " N", printed)


def words(printed: str) -> str:
    """Return the words of a printed text: its numbers depend on the processor."""
    without_rules = re.sub(r"-{3,}", "", comparable(printed))  # as long as the table is wide, which its numbers are
    return " ".join(re.sub(r"[+-]?\d[\d.,]*(e[+-]?\d+)?%?", "N", without_rules).replace("▇", "").split())
