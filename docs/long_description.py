"""Writes package-index.md, the README as a package index shows it: `python docs/long_description.py`.

An index shows one text, without the files around it. Links to files become absolute where pyproject.toml knows the project's URL
([project.urls], Source), and else they are their words alone; a picture that nothing can be asked for is left out.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs" / "package-index.md"
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)]+)\)")


def text() -> str:
    """The README with links that work anywhere."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[project.urls]")[2].partition("\n[")[0]
    source = re.search(r'^Source = "([^"]+?)/?"', project, re.MULTILINE)
    return anywhere((ROOT / "README.md").read_text(encoding="utf-8"), source and source[1])


def anywhere(readme: str, source: str | None) -> str:
    def replaced(link: re.Match[str]) -> str:
        is_picture, words, target = link.groups()
        if target.startswith("https://"):
            return link[0]
        if source is not None:
            return f"{is_picture}[{words}]({source}/{'raw' if is_picture else 'blob'}/HEAD/{target})"
        return "" if is_picture else words if words == target else f"{words}, `{target}`"

    return re.sub(r"\n{3,}", "\n\n", _LINK.sub(replaced, readme))


if __name__ == "__main__":
    TARGET.write_text(text(), encoding="utf-8")
