"""Calls that mean something on Gaudi alone: they do nothing and say so once, or are errors where a program would use what they give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ... import HmpError
from ...core.observing import log, speaks
from .device_map import named

WORKS, DOES_NOTHING, ERROR = "works", "does nothing", "error"
_said: set[str] = set()


def does_nothing(name: str, why: str = "there is no Gaudi here", returns: Callable[..., Any] = lambda *args, **kwargs: None) -> Any:
    """A function of that name that takes anything, says once that it does nothing, and returns `returns(...)` of its arguments."""

    def function(*args: Any, **kwargs: Any) -> Any:
        say_once(name, f"{name}() does nothing without Habana's software: {why}. Said once")
        return returns(*args, **kwargs)

    return _named(function, name, DOES_NOTHING, why)


def refuses(name: str, instead: str) -> Any:
    """A function of that name that can be imported, and that is an HmpError which says what to use `instead` when it is called."""

    def function(*args: Any, **kwargs: Any) -> Any:
        raise HmpError(f"{name}() needs Habana's software, and there is none here; {instead}")

    return _named(function, name, ERROR, instead)


def _named(function: Any, name: str, state: str, words: str) -> Any:
    function.here = state, words  # for the page that lists all names
    return named(function, name, f"{state.capitalize()}: {words}.")


def what_is_said_of(value: Any) -> tuple[str, str]:
    """Whether a name works, does nothing or is an error, and why not; "works" and "" for what says nothing of itself."""
    found: tuple[str, str] = getattr(value, "__dict__", {}).get("here", (WORKS, ""))
    return found


def say_once(key: str, message: str) -> None:
    """Logs a warning, unless one was logged under that key before; of a distributed run's processes only rank 0 speaks."""
    if key not in _said:
        _said.add(key)
        if speaks():
            log.warning("%s", message)


def forget_said() -> None:
    """Everything may be said again."""
    _said.clear()
