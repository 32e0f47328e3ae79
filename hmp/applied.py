"""Models that a policy is applied to: a mark on the module, and a `_call_impl` on its class that follows the mark.

The mark is in the module's `__dict__`, so that replicas and deep copies carry it. A pickle does not: it loads where hmp is
not installed, and takes no policy along.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from . import patches, state
from .errors import HmpError
from .state import Casts, Off

_KEY = "_hmp_applied"


class Mark:
    """What `apply()` leaves on a module: the casts in force during its calls."""

    __slots__ = ("__weakref__", "casts", "module")

    def __init__(self, casts: Casts, module: torch.nn.Module) -> None:
        self.casts = casts
        self.module = weakref.ref(module)
        _marks.add(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Mark | None:
        # copy.deepcopy notes the new module before it copies the module's __dict__
        copied = memo.get(id(self.module()))
        return None if copied is None else Mark(self.casts, copied)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


_marks: weakref.WeakSet[Mark] = weakref.WeakSet()
_changes = 0


def _count_change() -> None:
    global _changes
    _changes += 1


def mark(module: torch.nn.Module, casts: Casts) -> None:
    """Has `casts` in force during every call of `module` and of its deep copies."""
    cls = type(module)
    # a lazy module's class changes at its first call
    for each in (cls, getattr(cls, "cls_to_become", None) or cls):
        patches.rebind(each, "_call_impl", _following_marks(each._call_impl))
        owner = next(base for base in each.__mro__ if "__call__" in vars(base))
        own_call = vars(owner)["__call__"]
        if getattr(own_call, "__module__", "").startswith("torch."):
            continue  # torch's own ways of being called end in _call_impl
        if not isinstance(own_call, types.FunctionType):
            raise HmpError(f"apply() cannot follow {owner.__name__}.__call__, a {type(own_call).__name__}; make it a plain method")
        patches.rebind(owner, "__call__", _following_marks(own_call))
    set_state = torch.nn.Module.__setstate__
    patches.swap(set_state, _without_loaded_mark(patches.plain(set_state)))
    vars(module)[_KEY] = Mark(casts, module)
    _count_change()


def policy_of(module: torch.nn.Module) -> Any:
    """The policy that is applied to `module`, None for none."""
    found = module.__dict__.get(_KEY)
    return None if found is None else found.casts.policy


def unmark(module: torch.nn.Module) -> None:
    """Undoes `mark` for `module`; nothing where there is no mark."""
    vars(module).pop(_KEY, None)
    _count_change()


def unmark_all() -> None:
    """Undoes `mark` for every module that is left, deep copies included."""
    for each in list(_marks):
        module = each.module()
        if module is not None:
            unmark(module)
    _marks.clear()


def any_marked() -> bool:
    """Whether a policy is applied to any module that is still there."""
    return any(each.module() is not None for each in _marks)


def casts_here(module: torch.nn.Module) -> Casts | None:
    """What a call of `module` puts in force here, None for nothing."""
    return casts_for(module, state.here()) if _KEY in module.__dict__ else None


def casts_for(module: torch.nn.Module, here: Casts | Off) -> Casts | None:
    """What a call of `module` puts in force where `here` is, None for nothing."""
    found: Mark | None = module.__dict__.get(_KEY)
    if found is None or found.casts.policy is None:  # no mark, or one that revert() has put out of force
        return None
    return None if here.disabled else found.casts  # disable_casts() around the call wins: inside it torch is exactly torch


def changes() -> int:
    """How often a model was applied to, or no longer: compiled code is guarded on it."""
    return _changes


def _following_marks(call_impl: Callable[..., Any]) -> Callable[..., Any]:
    if getattr(call_impl, "hmp_follows_marks", False):
        return call_impl  # a base class's

    @functools.wraps(call_impl)
    def _call_impl(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        casts = casts_here(self)
        if casts is None:
            return call_impl(self, *args, **kwargs)
        return state.call_under(casts, call_impl, self, *args, **kwargs)

    _call_impl.hmp_follows_marks = True  # type: ignore[attr-defined]
    return _call_impl


def _without_loaded_mark(set_state: Callable[..., None]) -> Callable[..., None]:
    def __setstate__(self: torch.nn.Module, values: dict[str, Any]) -> None:
        set_state(self, values)
        if self.__dict__.get(_KEY, self) is None:  # what a mark becomes in a pickle
            del self.__dict__[_KEY]

    return __setstate__
