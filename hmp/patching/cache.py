"""Caches for results that depend on what torch's functions are. hmp empties them when it patches or restores torch, because other code may
patch torch in between."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_cache_clears: list[Callable[[], None]] = []


def cached(function: F, most: int | None = None) -> F:
    """`function` with a cache of its results, at most `most` of them, which `forget()` empties."""
    with_cache = functools.lru_cache(most)(function)
    _cache_clears.append(with_cache.cache_clear)
    return with_cache  # type: ignore[return-value]


def forget() -> None:
    """Empties all these caches."""
    for clear in _cache_clears:
        clear()
