"""The ops and modules whose Infs are meant: `detect_nonfinite(ignore=...)`."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable

from ..errors import OpListError
from ..lists import ListEntry, resolve
from .finding import Finding


class Meant:
    """Names of ops, with their synonyms, and globs over module paths."""

    def __init__(self, names: Iterable[str]) -> None:
        self._globs = frozenset(names)
        self._ops = frozenset(op for name in self._globs for op in (name, *_ops_of(name)))

    def names(self, finding: Finding) -> bool:
        """Return True if what the finding is about is meant."""
        if not self._globs:
            return False
        parts = finding.module.split(".")
        paths = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
        return not self._ops.isdisjoint((finding.op, finding.aten)) or any(
            fnmatch.fnmatchcase(path, glob) for path in paths if path for glob in self._globs
        )


def _ops_of(name: str) -> tuple[str, ...]:
    try:
        return resolve(ListEntry(name, "fp32"))
    except OpListError:  # a module
        return ()
