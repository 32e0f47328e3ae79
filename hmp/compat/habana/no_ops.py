"""Functions that mean something on Gaudi only: no-ops, which log a warning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...core.log import log, should_log
from .device_map import named

WORKS, DOES_NOTHING, ERROR = "works", "does nothing", "error"
_warned: set[str] = set()


def no_op(name: str, why: str = "there is no Gaudi here", returns: Callable[..., Any] = lambda *args, **kwargs: None) -> Any:
    """Return a function that takes any arguments, warns once that it has no effect, and returns `returns(...)` of them."""

    def function(*args: Any, **kwargs: Any) -> Any:
        warn_once(name, f"{name}() does nothing without Habana's software: {why}. This is logged once")
        return returns(*args, **kwargs)

    made = named(function, name, f"Does nothing: {why}.")
    made.here = DOES_NOTHING, why  # for the page that lists all names
    return made


def status(value: Any) -> tuple[str, str]:
    """Return whether a name works or does nothing, and why; ("works", "") for all but no-ops."""
    found: tuple[str, str] = getattr(value, "__dict__", {}).get("here", (WORKS, ""))
    return found


def warn_once(key: str, message: str) -> None:
    """Log a warning, once for each key and only in rank 0 of a distributed run."""
    if key not in _warned:
        _warned.add(key)
        if should_log():
            log.warning("%s", message)


def forget_warnings() -> None:
    """Have every warning logged again."""
    _warned.clear()
