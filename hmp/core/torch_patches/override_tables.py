"""Makes torch fill its caches of functions before hmp patches any, so that they hold torch's own functions (R19). Takes 25 ms, once.

They say which functions `__torch_function__` can override, and to which a device as a context or as the default applies.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import overrides

from ..torch_private import device_mode

_CACHED: Any = type(functools.lru_cache(lambda: None))


def fill() -> None:
    """Fills the tables that are empty. To be called before anything is patched."""
    for table in _tables():
        table()


def _tables() -> Iterator[Callable[[], Any]]:
    """The functions of these modules of torch's that take no argument and cache their result."""
    for module in (overrides, device_mode):
        for value in list(vars(module).values()):
            function = getattr(value, "__wrapped__", None)
            if isinstance(value, _CACHED) and isinstance(function, types.FunctionType) and not inspect.signature(function).parameters:
                yield value
