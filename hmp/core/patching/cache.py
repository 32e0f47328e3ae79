"""Caches for results that depend on what torch's functions are, without hmp's patches.

They are left from one conversion to the next where torch stands as it stood: other code may patch torch in between, or may have had it
patched while hmp looked at it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_clears: list[Callable[[], None]] = []
_stood: list[Any] = []  # what torch consisted of when the caches were empty last


def cached(function: F, most: int | None = None) -> F:
    """`function` with a cache of its results, at most `most` of them."""
    with_cache = functools.lru_cache(most)(function)
    emptied_by(with_cache.cache_clear)
    return with_cache  # type: ignore[return-value]


def emptied_by(clear: Callable[[], None]) -> None:
    """Has `clear` called where the caches are emptied."""
    _clears.append(clear)


def forget_unless(still_stands: bool, stands: list[Any]) -> None:
    """Empties the caches, before hmp patches torch, unless what they hold `still_stands` and torch consists of `stands`, as it did."""
    global _stood
    if not still_stands or len(stands) != len(_stood) or not all(map(operator.is_, stands, _stood)):
        forget()
        _stood = stands


def forget() -> None:
    """Empties the caches."""
    global _stood
    for clear in _clears:
        clear()
    _stood = []
