"""Calls that mean something on Gaudi alone: they do nothing and say so once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .said import say_once


def does_nothing(name: str, why: str = "there is no Gaudi here", returns: Callable[..., Any] = lambda *args, **kwargs: None) -> Any:
    """A function of that name that takes anything, says once that it does nothing, and returns `returns(...)` of its arguments."""

    def function(*args: Any, **kwargs: Any) -> Any:
        say_once(name, f"{name}() does nothing without Habana's software: {why}. Said once")
        return returns(*args, **kwargs)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = "Does nothing, and says so once."
    return function
