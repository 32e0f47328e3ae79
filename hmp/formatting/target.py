"""The file that a result is written into."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..errors import HmpError


def written(path: str | Path, text: Callable[[], str]) -> Path:
    """The file `path`, into which the text that `text` makes was written. HmpError where its folder is missing: before the text is made,
    for a page takes time."""
    target = Path(path)
    if not target.absolute().parent.is_dir():
        raise HmpError(f"{target}: there is no folder {target.parent} to write it into; make the folder first")
    target.write_text(text(), encoding="utf-8")
    return target
