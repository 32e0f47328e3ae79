"""torch's tables of its own functions are filled from its own functions: before anything is patched, and 25 ms once.

They are what `__torch_function__` can override, and what a device as a context or as the default applies to.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import overrides

from ..patching import patches
from ..torch_private import device_mode

_CACHED: Any = type(functools.lru_cache(lambda: None))


def fill() -> None:
    """Fills the tables that are empty. For before anything is patched."""
    for table in _tables():
        table()


def answer(own: Callable[[Any], Any]) -> None:
    """Has torch know a function by what stands in its place, too, until patches.restore(); `own` tells the function."""
    for asked in (overrides.resolve_name, overrides.is_tensor_method_or_property):
        patches.swap(asked, _of_own(patches.unpatched(asked), own))


def _tables() -> Iterator[Callable[[], Any]]:
    """What these modules of torch's keep once it is worked out, and work out from nothing."""
    for module in (overrides, device_mode):
        for value in list(vars(module).values()):
            function = getattr(value, "__wrapped__", None)
            if isinstance(value, _CACHED) and isinstance(function, types.FunctionType) and not inspect.signature(function).parameters:
                yield value


def _of_own(original: Callable[..., Any], own: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda function, *rest: original(own(function), *rest)
