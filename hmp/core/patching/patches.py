"""Puts functions in the places of others, of torch's as a rule, and the old ones back in reverse order.

A place is an attribute of a module or a class. Under what other names a function is known is found by `names`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

from ..log import caller
from .patched_op import INSIDE, is_outermost

# What is patched in an owner: name → what was there and what is. Those of a class are in this attribute of it: they refer to the class, and
# are to live as long as it does.
_Records = dict[str, tuple[Any, Any]]
_OF_CLASS = "__hmp_patches__"
_classes: dict[int, weakref.ref[type]] = {}  # by id: a metaclass may define no hash
_others: dict[int, tuple[Any, _Records]] = {}
_undo: list[Callable[[], None]] = []
# Those that are replaced for all who know them, each with what replaces it: by the id of the one, and of the other.
_replacements: dict[int, tuple[Any, Any]] = {}
_originals: dict[int, tuple[Any, Any]] = {}
_installation = object()
_MISSING: Any = object()


def installed() -> bool:
    """Return True if anything is patched."""
    return bool(_classes or _others or _undo)


def rebind(owner: Any, name: str, value: Any, over: Any = None) -> None:
    """Set `owner.name` to `value` until `restore()`.

    A second rebinding of the same name does nothing, unless other code has put `over` there since.
    """
    # the owner's own: restore() deletes a name that the owner inherited
    old, records = _read(owner, name), _records_of(owner)
    if name not in records or (over is not None and old is over):
        records[name] = old, value
        _write(owner, name, value)


def _records_of(owner: Any) -> _Records:
    number = id(owner)
    if not isinstance(owner, type):
        return _others.setdefault(number, (owner, {}))[1]
    if number not in _classes:
        setattr(owner, _OF_CLASS, {})
        _classes[number] = weakref.ref(owner, lambda _: _classes.pop(number, None))
    return vars(owner)[_OF_CLASS]  # type: ignore[no-any-return]


def rebound(owner: Any, name: str) -> bool:
    """Return True if `owner.name` is rebound."""
    if isinstance(owner, type):
        return name in vars(owner).get(_OF_CLASS, ())
    return id(owner) in _others and name in _others[id(owner)][1]


def _place(owner: Any, name: str) -> tuple[Any, str]:
    """Return where what `owner` has under that name is held: by the owner, or by an outermost function there, which calls it."""
    found = vars(owner).get(name)
    return (found, INSIDE) if is_outermost(found) else (owner, name)


def _read(owner: Any, name: str) -> Any:
    """Return what `owner` itself has under that name; _MISSING for nothing."""
    holder, key = _place(owner, name)
    return vars(holder).get(key, _MISSING)


def _write(owner: Any, name: str, value: Any) -> None:
    """Set `owner.name`; _MISSING deletes it."""
    holder, key = _place(owner, name)
    if value is _MISSING:
        delattr(holder, key)
    else:
        setattr(holder, key, value)


def wrap(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put `make(function)` instead of the Python function `owner.name`, until `restore()`.

    Of one that a class inherits, in the place where that has it. Does nothing where no Python function is there, or it is wrapped.

    After `restore()` what was put there calls the function alone: somebody may have kept it.
    """
    owner = next((each for each in getattr(owner, "__mro__", ()) if name in vars(each)), owner)
    found = _read(owner, name)
    function = getattr(found, "__func__", found)  # of a static or class method
    if type(function) is not types.FunctionType or rebound(owner, name):
        return
    wrapper = _inert_after_restore(function, make(function))
    if isinstance(owner, types.ModuleType):
        replaces(wrapper, function)
    rebind(owner, name, wrapper if function is found else type(found)(wrapper))


def wrap_by_name(module_name: str, path: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Do the same with the function `path` of a module, "Class.method" for a method; nothing where this release of torch has none."""
    owner: Any = importlib.import_module(module_name)
    *owners, name = path.split(".")
    for each in owners:
        owner = inspect.getattr_static(owner, each, None)
    if owner is not None:
        wrap(owner, name, make)


def _inert_after_restore(function: Callable[..., Any], target: Callable[..., Any]) -> Callable[..., Any]:
    installation = _installation

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (target if installation is _installation else function)(*args, **kwargs)

    return call


def replaces(new: Any, function: Any) -> None:
    """Note that `new` replaces `function`, in all places, until `restore()`."""
    _replacements[id(function)] = function, new
    _originals[id(new)] = new, function


def replacements() -> dict[int, Any]:
    """Return what replaces functions in all places, by the id of the function."""
    return {number: new for number, (_, new) in _replacements.items()}


def originals() -> dict[int, Any]:
    """Return the functions that are replaced in all places, by the id of what replaces them."""
    return {number: function for number, (_, function) in _originals.items()}


def original(function: Any) -> Any:
    """Return the function that `function` replaces in all places; any other object itself."""
    found = _originals.get(id(function))
    return function if found is None else found[1]


def on_restore(undo: Callable[[], None]) -> None:
    """Have `restore()` call `undo`, for a change other than a rebinding. It may be called again, after an interrupt."""
    _undo.append(undo)


def restore() -> None:
    """Undo everything above. What other code has patched since stays, with a warning.

    A record is dropped once its patch is undone: after an interrupt the next call goes on with it.
    """
    global _installation
    foreign: list[str] = []
    while _undo:
        undo = _undo[-1]
        undo()
        _undo.remove(undo)  # not the last: it may have imported a module of torch's, in which names were followed
    for cls in [found for reference in list(_classes.values()) if (found := reference()) is not None]:
        foreign += _restored(cls)
        del _classes[id(cls)]
        delattr(cls, _OF_CLASS)
    for owner, _ in list(_others.values()):
        foreign += _restored(owner)
    _others.clear()
    _replacements.clear()
    _originals.clear()
    _installation = object()
    for where in foreign:  # last: a warning may be an error
        _warn_foreign(where)


def _restored(owner: Any) -> list[str]:
    """Put back what was in the owner, and return the places where other code has put something else since."""
    foreign, records = [], _records_of(owner)
    for name, (old, value) in list(records.items()):
        found = _read(owner, name)
        if found is value:
            _write(owner, name, old)
        elif found is not old and not _taken_out(value, old, found):  # else other code has put it back
            foreign.append(f"{getattr(owner, '__name__', type(owner).__name__)}.{name}")
        del records[name]
    return foreign


def _taken_out(value: Any, old: Any, around: Any) -> bool:
    """Return True if `old` could be put instead of `value` inside of what torch itself has put around that.

    torch.compile does that to nn.Module.__init__, for good.
    """
    if type(around) is not types.FunctionType or not str(around.__module__).startswith("torch."):
        return False
    cells = [cell for cell in around.__closure__ or () if cell.cell_contents is value]
    for cell in cells:
        cell.cell_contents = old
    return bool(cells)


def _warn_foreign(where: str) -> None:
    file, line = caller()
    warnings.warn_explicit(
        f"{where} was patched by another library on top of hmp; that patch stays, and hmp's wrapper underneath is now inactive. "
        "Undo patches in reverse order",
        RuntimeWarning,
        file,
        line,
    )
