"""The tutorials: files of docs/tutorials, in jupytext's percent format, as pages."""

from __future__ import annotations

import re

from . import ROOT

_FOLDER = ROOT / "docs" / "tutorials"
_CELL = re.compile(r"^# %%(.*)$", re.MULTILINE)


NAMES = ("nan_to_repaired_list", "lists_of_your_own")  # in the order of the site; from_an_hmp_script is read in the repository


def pages() -> dict[str, str]:
    """Return a page for each tutorial of the site."""
    return {f"tutorials/{name}.md": _page((_FOLDER / f"{name}.py").read_text(encoding="utf-8")) for name in NAMES}


def _page(source: str) -> str:
    """Cells of text as they are, cells of code as blocks; the header with jupytext's metadata is left out."""
    source = re.sub(r"\A(# ---\n(#.*\n)*?# ---\n+)", "", source)
    before, *cells = _CELL.split(source)
    parts = [_code(before)] if before.strip() else []
    for kind, body in zip(cells[::2], cells[1::2], strict=True):
        parts.append(re.sub(r"^# ?", "", body.strip("\n"), flags=re.MULTILINE) + "\n" if "[markdown]" in kind else _code(body))
    return "\n".join(parts)


def _code(body: str) -> str:
    return f"```python\n{body.strip()}\n```\n" if body.strip() else ""
