"""Modules whose calls put a policy in force: a mark on the module, and a `_call_impl` on its class that looks for it.

The mark is in the module's `__dict__`, so that replicas and deep copies carry it. A pickle does not: it loads where hmp is
not installed, and takes no policy along.
"""

from __future__ import annotations

import functools
import itertools
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..context import CompiledPolicy, Off, state
from ..errors import HmpError
from ..patching import patches

_KEY = "_hmp_applied"


class Mark:
    """Says what calls of a module put in force: `casts`, the policy of `apply()`, wherever the module is called.

    Where that is None, `inside` holds the policies that scoped lines give the module, by scope id: one of them is put in force where the
    policy with that scope id is in force around the call.
    """

    __slots__ = ("__weakref__", "casts", "inside", "module")

    def __init__(self, module: torch.nn.Module, casts: CompiledPolicy | None, inside: dict[int, CompiledPolicy]) -> None:
        self.casts = casts
        self.inside = inside
        self.module = weakref.ref(module)
        _marks.add(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Mark | None:
        # copy.deepcopy notes the new module before it copies the module's __dict__
        copied = memo.get(id(self.module()))
        return None if copied is None else Mark(copied, self.casts, self.inside)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


_marks: weakref.WeakSet[Mark] = weakref.WeakSet()
_changes = 0
# Gives a scope id for each resolution of a policy's scoped lines for a model.
new_scope_id = functools.partial(next, itertools.count(1))


def _count_change() -> None:
    global _changes
    _changes += 1


def mark(module: torch.nn.Module, casts: CompiledPolicy) -> None:
    """Marks `module`: `casts` are in force during every call of it and of its deep copies."""
    _follow_marks(type(module))
    found: Mark | None = vars(module).get(_KEY)
    _put(module, casts, {} if found is None else found.inside)


def mark_inside(module: torch.nn.Module, casts: CompiledPolicy) -> None:
    """Marks `module`: `casts` are in force during those calls of it that are made where a policy of the same scope id is in force."""
    _follow_marks(type(module))
    found: Mark | None = vars(module).get(_KEY)
    inside = {} if found is None else found.inside
    _put(module, None if found is None else found.casts, {**inside, casts.scope_id: casts})


def _put(module: torch.nn.Module, casts: CompiledPolicy | None, inside: dict[int, CompiledPolicy]) -> None:
    # a new mark: a replica may share the one that is there
    if casts is None and not inside:
        vars(module).pop(_KEY, None)
    else:
        vars(module)[_KEY] = Mark(module, casts, inside)
    _count_change()


def _follow_marks(cls: type[torch.nn.Module]) -> None:
    """Patches the class, so that calls of its modules look for marks."""
    # a lazy module's class changes at its first call
    for each in (cls, getattr(cls, "cls_to_become", None) or cls):
        patches.rebind(each, "_call_impl", _following_marks(each._call_impl))
        patches.rebind(each, "extra_repr", _telling_mark(each.extra_repr))
        owner = next(base for base in each.__mro__ if "__call__" in vars(base))
        own_call = vars(owner)["__call__"]
        if getattr(own_call, "__module__", "").startswith("torch."):
            continue  # torch's own ways of being called end in _call_impl
        if not isinstance(own_call, types.FunctionType):
            raise HmpError(f"apply() cannot follow {owner.__name__}.__call__, a {type(own_call).__name__}; make it a plain method")
        patches.rebind(owner, "__call__", _following_marks(own_call))
    set_state = torch.nn.Module.__setstate__
    patches.swap(set_state, _without_loaded_mark(patches.plain(set_state)))


def given_to(module: torch.nn.Module) -> Any:
    """The policy that `apply()` put on `module`, as the user gave it; None without one."""
    found = module.__dict__.get(_KEY)
    return None if found is None or found.casts is None else found.casts.given


def unmark(model: torch.nn.Module) -> None:
    """Undoes `mark` for `model`, and `mark_inside` for its submodules of the same scope id; does nothing where there is no mark."""
    found: Mark | None = vars(model).get(_KEY)
    if found is None or found.casts is None:
        return
    _put(model, None, found.inside)
    if found.casts.scope_id:
        kept = _held_by_others(found.casts.scope_id)
        for module in model.modules():
            if module not in kept:
                _take_off(module, found.casts.scope_id)


def _held_by_others(scope_id: int) -> set[torch.nn.Module]:
    """The modules of models that are still marked with this scope id: a shallow copy of a model shares its submodules."""
    marks = [each for each in list(_marks) if each.casts is not None and each.casts.scope_id == scope_id]
    models = [model for each in marks if (model := each.module()) is not None and vars(model).get(_KEY) is each]
    return {module for model in models for module in model.modules()}


def unmark_scope(scope_id: int) -> None:
    """Undoes `mark_inside` for all modules with this scope id, deep copies included."""
    for each in list(_marks):
        module = each.module()
        if module is not None:
            _take_off(module, scope_id)


def _take_off(module: torch.nn.Module, scope_id: int) -> None:
    found: Mark | None = vars(module).get(_KEY)
    if found is not None and scope_id in found.inside:
        _put(module, found.casts, {number: casts for number, casts in found.inside.items() if number != scope_id})


def unmark_all() -> None:
    """Takes every mark off that is left, those of deep copies included."""
    for each in list(_marks):
        module = each.module()
        if module is not None:
            vars(module).pop(_KEY, None)
    _marks.clear()
    _count_change()


def any_marked() -> bool:
    """Whether a policy is applied to any module that is still there."""
    return any(each.casts is not None and each.module() is not None for each in _marks)


def casts_here(module: torch.nn.Module) -> CompiledPolicy | None:
    """The policy that a call of `module` puts in force here; None where it changes nothing."""
    return casts_for(module, state.here()) if _KEY in module.__dict__ else None


def casts_for(module: torch.nn.Module, here: CompiledPolicy | Off) -> CompiledPolicy | None:
    """The policy that a call of `module` puts in force where the state is `here`; None where it changes nothing."""
    found: Mark | None = module.__dict__.get(_KEY)
    if found is None or here.disabled:  # disable_casts() around the call wins: inside it torch is exactly torch
        return None
    casts = found.casts or found.inside.get(here.scope_id)
    if casts is None or casts is here or casts.policy is None:  # revert() puts casts out of force
        return None
    return casts


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


def _telling_mark(extra_repr: Callable[[torch.nn.Module], str]) -> Callable[[torch.nn.Module], str]:
    """What `print(model)` shows of a module, and the policy that is applied to it."""
    if getattr(extra_repr, "hmp_tells_mark", False):
        return extra_repr  # a base class's

    @functools.wraps(extra_repr)
    def telling(self: torch.nn.Module) -> str:
        said = extra_repr(self)
        found: Mark | None = self.__dict__.get(_KEY)
        if found is None:
            return said
        if found.casts is not None:
            policies = [f"policy {found.casts.given.name!r}"] if found.casts.given is not None else []
        else:
            policies = [f"scoped lines of policy {casts.given.name!r}" for casts in found.inside.values() if casts.given is not None]
        return ", ".join(filter(None, (said, *policies)))

    telling.hmp_tells_mark = True  # type: ignore[attr-defined]
    return telling


def _without_loaded_mark(set_state: Callable[..., None]) -> Callable[..., None]:
    def __setstate__(self: torch.nn.Module, values: dict[str, Any]) -> None:
        set_state(self, values)
        found = self.__dict__.get(_KEY, self)
        if found is None:  # what a mark becomes in a pickle
            del self.__dict__[_KEY]
        elif isinstance(found, Mark) and found.module() is not self:  # a shallow copy brings the mark of another module
            self.__dict__[_KEY] = Mark(self, found.casts, found.inside)

    return __setstate__
