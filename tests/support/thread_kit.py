"""Threads of a test's own, which end before the test goes on; what they raise is raised in the test."""

from __future__ import annotations

import os
import threading
import traceback
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


def without_other_threads(function: Callable[[], Any]) -> None:
    """Calls `function` in a forked process, which has none of the threads of this one (pytest-xdist's among them)."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            function()
        except BaseException:
            os.write(writing, traceback.format_exc()[-60_000:].encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8") as raised:
        told = raised.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not told, told
