"""Torch as it is found: what was worked out from it holds until somebody else patches it."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

# What is torch's, and nobody's whom a reference would keep alive.
_TORCHS = frozenset(
    {types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.GetSetDescriptorType}
)  # they cannot be subclassed: to look at the type is enough, and quicker
# Where the functions come from that torch holds itself.
_ROOTS = frozenset({"torch", "typing", "typing_extensions", "contextlib", "copy", "builtins"})

_forgets: list[Callable[[], None]] = []
_seen: tuple[list[str], list[Any]] | None = None
_foreign = False


def cached(function: F, most: int | None = None) -> F:
    """`function`, whose results, the latest `most` of them, are kept for as long as torch is as it was found."""
    kept = functools.lru_cache(most)(function)
    _forgets.append(kept.cache_clear)
    return kept  # type: ignore[return-value]


def on_change(forget: Callable[[], None]) -> None:
    """Has `forget` called when torch is no longer as it was found."""
    _forgets.append(forget)


def look(owners: Iterable[Any]) -> None:
    """Looks at what the owners hold that can be called, and forgets everything where that has changed since the last look.

    For while hmp has nothing patched.
    """
    global _seen, _foreign
    names, values = _held_by(owners)
    if _seen is not None and names == _seen[0] and len(values) == len(_seen[1]) and all(map(_is, _seen[1], values)):
        return
    if _seen is not None:
        forget()
    _seen = names, [value if type(value) in _TORCHS else _weakly(value) for value in values]
    _foreign = any(map(_is_foreign, values))


def foreign() -> bool:
    """Whether somebody else's function stood among torch's at the last look."""
    return _foreign


def forget_foreign() -> None:
    """Keeps nothing of what hmp worked out with somebody else's function in torch's place: that would keep the function alive."""
    if foreign():
        forget()


def forget() -> None:
    """Everything that is kept is worked out anew."""
    global _seen
    _seen = None
    for each in _forgets:
        each()


def _held_by(owners: Iterable[Any]) -> tuple[list[str], list[Any]]:
    names: list[str] = []
    values: list[Any] = []
    for owner in owners:
        for name, value in vars(owner).items():
            if callable(value) and name != "compile":  # no op, and Lightning wraps it for good
                names.append(name)
                values.append(value)
                if isinstance(value, types.FunctionType):
                    values.append(value.__code__)
    return names, values


def _is_foreign(value: Any) -> bool:
    if type(value) in _TORCHS or isinstance(value, (type, types.CodeType, staticmethod)):
        return False
    # functools.wraps gives a function another's __module__, and not its globals
    module = value.__globals__.get("__name__") if isinstance(value, types.FunctionType) else getattr(value, "__module__", None)
    return str(module).partition(".")[0] not in _ROOTS


def _weakly(value: Any) -> Any:
    try:
        return weakref.ref(value)
    except TypeError:
        return value


def _is(seen: Any, value: Any) -> bool:
    return seen is value or (type(seen) is weakref.ref and seen() is value)
