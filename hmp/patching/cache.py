"""What is worked out from torch as it is found is kept until torch is patched or restored: somebody else may patch it in between."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_forgets: list[Callable[[], None]] = []


def cached(function: F, most: int | None = None) -> F:
    """`function`, whose results, the latest `most` of them, are kept until `forget()`."""
    kept = functools.lru_cache(most)(function)
    _forgets.append(kept.cache_clear)
    return kept  # type: ignore[return-value]


def forget() -> None:
    """Everything that is kept is worked out anew."""
    for each in _forgets:
        each()
