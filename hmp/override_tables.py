"""torch's tables of what `__torch_function__` can override hold torch's own functions, also where they are filled while torch is patched.

They are keyed by function and filled when they are first asked for, in a time that a conversion need not take.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from torch import overrides

from . import patches


def keep() -> None:
    """Has torch's tables be as torch alone fills them, now or when they are asked for, until patches.restore()."""
    overrides.get_default_nowrap_functions()
    overrides.get_ignored_functions()
    for name, translated in (("get_testing_overrides", _by_function), ("_get_overridable_functions", _by_namespace)):
        cached: Any = getattr(overrides, name, None)
        fill = getattr(cached, "__wrapped__", None)
        if isinstance(fill, types.FunctionType) and hasattr(cached, "cache_info") and not cached.cache_info().currsize:
            patches.swap(fill, _filling(patches.plain(fill), translated))


def _filling(fill: Callable[[], Any], translated: Callable[[Any, Callable[[Any], Any]], Any]) -> Callable[[], Any]:
    def filled() -> Any:
        originals = patches.originals()

        def original(found: Any) -> Any:
            if type(found) is types.MethodWrapperType and id(found.__self__) in originals:  # a property's __get__
                return getattr(originals[id(found.__self__)], found.__name__)
            return originals.get(id(getattr(found, "__func__", found)), found)

        return translated(fill(), original)

    return filled


def _by_function(table: dict[Any, Any], original: Callable[[Any], Any]) -> dict[Any, Any]:
    """The table {function: what stands for it}; torch tells what it ignores by identity."""
    ignored = overrides.get_ignored_functions()
    found: dict[Any, Any] = {}
    for function, dummy in table.items():
        own = original(function)
        if own is function or own not in ignored:
            found.setdefault(own, dummy)
    return found


def _by_namespace(tables: tuple[Any, Any], original: Callable[[Any], Any]) -> tuple[Any, Any]:
    """The tables {namespace or property: its functions} and {function: its name}."""
    overridable, index = tables
    ignored = overrides.get_ignored_functions()
    found = type(overridable)(getattr(overridable, "default_factory", None))
    for namespace, functions in overridable.items():
        own = [(function, original(function)) for function in functions]
        kept = [each for function, each in own if each is function or each not in ignored]
        if kept:
            found[original(namespace)] = kept
    return found, {original(function): name for function, name in index.items()}
