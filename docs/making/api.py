"""The docstrings of the public names, below each table of the API page."""

from __future__ import annotations

from collections.abc import Iterable

import hmp


def inserted(names: Iterable[str]) -> str:
    """Return mkdocstrings' directive for each name: of hmp's, or with its module."""
    return "\n".join(f"::: {name if '.' in name else _place(name)}\n" for name in names)


def _place(name: str) -> str:
    """Return where the name is defined: mkdocstrings reads the source there."""
    found = getattr(hmp, name)
    module = found.__module__
    if module == f"hmp.{name}":  # hmp.tune and hmp.benchmark are functions and packages of one name
        return f"{module}.{name}"
    return f"{module}.{found.__qualname__}"
