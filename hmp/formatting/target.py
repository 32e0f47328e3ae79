"""The file that a result is written into."""

from __future__ import annotations

from pathlib import Path

from ..errors import HmpError


def target_file(path: str | Path) -> Path:
    """`path`, which is to be written next. HmpError where its folder is missing: better now than when a page is made."""
    target = Path(path)
    if not target.absolute().parent.is_dir():
        raise HmpError(f"{target}: there is no folder {target.parent} to write it into; make the folder first")
    return target
