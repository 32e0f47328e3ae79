"""The tutorials: docs/tutorials/*.py, in jupytext's percent format, as pages."""

from __future__ import annotations

import re

from . import ROOT

_FOLDER = ROOT / "docs" / "tutorials"
_CELL = re.compile(r"^# %%(.*)$", re.MULTILINE)


def pages() -> dict[str, str]:
    """A page for each tutorial, and one that lists them."""
    found = {f"tutorials/{file.stem}.md": _page(file.read_text(encoding="utf-8")) for file in sorted(_FOLDER.glob("*.py"))}
    titles = {target: re.search(r"^# (.+)$", text, re.MULTILINE) for target, text in found.items()}
    lines = [f"- [{title[1] if title else target}]({target.partition('/')[2]})" for target, title in titles.items()]
    said = (
        "Each is a notebook that runs as it stands: open its file in `docs/tutorials/` with jupytext, or run it with python.\n\n"
        if found
        else "There are none yet; [first steps](../start/first-steps.md) is where to begin.\n"
    )
    return found | {"tutorials/index.md": "# Tutorials\n\n" + said + "\n".join(lines)}


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
