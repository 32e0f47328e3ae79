"""Threads of a test's own, which end before the test goes on; what they raise is raised in the test."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any


def in_threads(function: Callable[..., Any], each: Iterable[Any]) -> None:
    """Calls `function` with each of the values, in threads of their own that run at once."""
    errors: list[BaseException] = []

    def run(value: Any) -> None:
        try:
            function(value)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(value,)) for value in each]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def in_thread(function: Callable[..., Any], *args: Any) -> None:
    """Calls `function` in another thread."""
    in_threads(lambda _: function(*args), [None])
