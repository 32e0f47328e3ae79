"""`func` in `__torch_function__` is the same object that the user finds as `torch.mul`, and equals torch's own function.

torch's C code looks `func` up by name when it calls a `__torch_function__`: a method on torch.Tensor, any other builtin in the module of
torch._C that defines it. Descriptors of this module answer these look-ups with counterparts (patching.stand_ins): objects that call the
dispatcher, and compare and hash as torch's function does (R19).

For a method, `torch.Tensor.mul` is the counterpart, while `x.mul(y)` and `x * y` call the dispatcher directly. Another builtin's name
(`torch.matmul`) is bound to the dispatcher, which costs less to call, until a `__torch_function__` of the user's is called for the first
time: then counterparts replace the dispatchers, in names of the user's too. A program without a `__torch_function__` pays nothing.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from .. import fork_safe, torch_private
from ..ops import Site
from ..patching import ComparisonCounterpart, Counterpart, MethodCounterpart, compares, patches, references

_FUNCTIONS: type = type(torch_private.variable_functions)
_METACLASS: type = type(torch.Tensor)
_TENSOR, _OF_TENSOR = torch.Tensor, vars(torch.Tensor)

_lock = fork_safe.RLock()
# torch's function → its counterpart. torch.mm and torch._VF.mm are two objects that are equal, and have one.
_counterparts: dict[Any, Counterpart] = {}
_places: dict[Any, list[tuple[Any, str, Any]]] = {}  # torch's function → (module, name, dispatcher) where users find it
_asked: dict[types.ModuleType, type] = {}  # modules of torch._C whose class has `_Defined` descriptors → their class before
_in_types: list[tuple[type, str, Any]] = []  # type, name, the attribute before `_put`
_tables: list[Callable[[], list[Any]]] = []  # each returns the containers of hmp's that hold dispatchers
_MISSING = object()
_modes, _mode_at, _device_mode = torch_private.function_modes, torch_private.function_mode_at, torch_private.device_mode.__name__
_BUILTINS = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)


def install(sites: list[tuple[Site, Any]], tables: Callable[[], list[Any]]) -> None:
    """Answers these look-ups for the functions of `sites`, each with its dispatcher, until patches.restore(). `tables` returns containers
    of hmp's in which dispatchers are not to be replaced."""
    with _lock:  # torch may call a `__torch_function__` in another thread meanwhile
        if not _tables:
            _tables.append(tables)
            patches.on_restore(_restore)
        builtins: dict[int, Any] = {}
        for site, dispatcher in sites:
            original: Any = site.original
            if type(original) not in _BUILTINS:
                continue  # another library's patch
            if original not in _counterparts:
                _counterparts[original] = _counterpart(site, dispatcher)
            if isinstance(site.owner, type):
                if type(original) is not types.BuiltinFunctionType:
                    _put(_METACLASS, site.attribute, _Method(site.attribute, dispatcher, _counterparts[original]))
            else:
                _places.setdefault(original, []).append((site.owner, site.attribute, dispatcher))
                builtins[id(original)] = original
        for original in builtins.values():
            name, home = original.__name__, getattr(original, "__self__", None)
            defined: Any = vars(_FUNCTIONS).get(name)
            if isinstance(defined, staticmethod) and defined.__func__ == original:
                _put(_FUNCTIONS, name, _Function(original))
            elif torch_private.is_in_c(home) and _is_elsewhere(original, home):
                _ask(home, name, original)
        _type_modified(_TENSOR)  # Python's caches hold what it found on the class while the metaclass had no such attribute


def _is_elsewhere(original: Any, home: types.ModuleType) -> bool:
    """Whether users find a function in another module than the one of torch._C that defines it."""
    return any(owner is not home for owner, _, _ in _places[original])


def for_users_names(original: Any, dispatcher: Any) -> Any:
    """What replaces torch's function where a name of the user's is bound to it: a method's counterpart, else the dispatcher."""
    counterpart = _counterparts.get(original) if type(original) in _BUILTINS else None
    return counterpart if isinstance(counterpart, MethodCounterpart) else dispatcher


def counterparts() -> list[Any]:
    """All counterparts there are."""
    return list(_counterparts.values())


def _counterpart(site: Site, dispatcher: Callable[..., Any]) -> Counterpart:
    if not isinstance(site.owner, type):
        return Counterpart(dispatcher, site.original)
    return (ComparisonCounterpart if compares(site.attribute) else MethodCounterpart)(dispatcher, site.original)


def _look_up(original: Any, attribute: Any) -> Any:
    """The counterpart of `original` for C code that is about to call a `__torch_function__`; `attribute` for any other look-up."""
    frame = sys._getframe(2)
    if not _is_ours(frame.f_globals.get("__name__")):  # such C code was called by a dispatcher or a wrapper
        return attribute
    if _places:
        if not _is_users_handler(frame):
            return original
        _put_counterparts_everywhere()
    return _counterparts.get(original, attribute)  # none while another thread reverts


def _is_users_handler(call: types.FrameType) -> bool:
    """Whether the `__torch_function__` that torch is about to call is the user's, not hmp's or that of torch.device as a context."""
    modes = _modes()
    if modes:
        return not _is_ours(type(_mode_at(modes - 1)).__module__)
    return any(map(_has_handler, call.f_locals.values()))


def _has_handler(value: Any) -> bool:
    kind = type(value)
    if kind is list or kind is tuple:
        return any(map(_has_handler, value))
    if kind is dict:
        return any(map(_has_handler, value.values()))
    handler = getattr(kind, "__torch_function__", None)
    return handler is not None and getattr(handler, "__func__", handler) not in _DEFAULT_HANDLERS and not _is_ours(kind.__module__)


# The `__torch_function__` that subclasses of Tensor inherit, and the disabled one.
_DEFAULT_HANDLERS = (torch.Tensor.__torch_function__.__func__, torch_private.no_torch_function)  # type: ignore[attr-defined]


def _is_ours(module: Any) -> bool:
    """Whether a module is hmp's, or torch's module of the mode for devices, which looks `func` up in a table of torch's own functions."""
    return module == _device_mode or str(module).partition(".")[0] == "hmp"


def _put_counterparts_everywhere() -> None:
    """Replaces dispatchers by counterparts in torch's modules and in users' references."""
    with _lock:
        references.use_counterparts(_put_counterparts(), [table for give in _tables for table in give()])


def _put_counterparts() -> dict[Any, Counterpart]:
    """Puts counterparts where users find builtins in torch's modules. Returns them by the dispatchers that they replace."""
    dispatchers: dict[Any, Counterpart] = {}
    while _places:
        original, places = _places.popitem()
        for owner, name, dispatcher in places:
            patches.rebind_again(owner, name, _counterparts[original])
            dispatchers[dispatcher] = _counterparts[original]
    return dispatchers


class _Function:
    """A descriptor on the type of torch._C._VariableFunctions, where C code looks the functions of `torch` up."""

    def __init__(self, original: Any) -> None:
        self.original = original

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return _look_up(self.original, self.original)


class _Defined:
    """A descriptor on the class of a module of torch._C, for one function that the module defines."""

    def __init__(self, name: str, original: Any) -> None:
        self.name, self.original = name, original

    def __get__(self, module: Any, owner: type | None = None) -> Any:
        if module is None:
            return self
        try:
            found = vars(module)[self.name]
        except KeyError:
            raise AttributeError(f"module {module.__name__!r} has no attribute {self.name!r}") from None
        if getattr(found, "__wrapped__", found) is not self.original:
            return found  # another library's patch
        return _look_up(self.original, found)

    def __set__(self, module: Any, value: Any) -> None:
        vars(module)[self.name] = value

    def __delete__(self, module: Any) -> None:
        del vars(module)[self.name]


class _Method:
    """A descriptor on the metaclass of torch.Tensor: `torch.Tensor.mul` looks there first, `x.mul` does not."""

    __slots__ = ("counterpart", "dispatcher", "name")

    def __init__(self, name: str, dispatcher: Any, counterpart: Counterpart) -> None:
        self.name, self.dispatcher, self.counterpart = name, dispatcher, counterpart

    def __get__(self, cls: Any, metaclass: type | None = None) -> Any:
        if cls is _TENSOR and _OF_TENSOR.get(self.name) is self.dispatcher:
            return self.counterpart
        if cls is None:
            return self
        for each in cls.__mro__:
            found = vars(each).get(self.name, _MISSING)
            if found is self.dispatcher:
                return self.counterpart
            if found is not _MISSING:
                return found.__get__(None, cls) if hasattr(type(found), "__get__") else found
        raise AttributeError(f"type object {cls.__name__!r} has no attribute {self.name!r}")

    def __set__(self, cls: type, value: Any) -> None:
        value = self.dispatcher if value is self.counterpart and cls is torch.Tensor else value
        if self._is_operator():
            self._while_removed(lambda: type.__setattr__(cls, self.name, value))
        else:
            _change_type(cls, self.name, value)

    def __delete__(self, cls: type) -> None:
        if self._is_operator() or self.name not in vars(cls):  # which is an error
            self._while_removed(lambda: type.__delattr__(cls, self.name))
        else:
            _change_type(cls, self.name, _MISSING)

    def _is_operator(self) -> bool:
        """Whether the name has a slot in C too, which Python sets with the attribute: `__add__` has one, which `+` calls."""
        return self.name.startswith("__")

    def _while_removed(self, change: Callable[[], None]) -> None:
        """Calls `change` while this descriptor is not on the metaclass, so that it changes the class itself."""
        with _lock:
            _change_type(_METACLASS, self.name, _MISSING)
            try:
                change()
            finally:
                _change_type(_METACLASS, self.name, self)


def _change_type(cls: type, name: str, value: Any) -> None:
    """Sets an attribute of a type in its dict, or deletes it for `_MISSING`: without its metaclass, and of types written in C too, whose
    dict Python code can otherwise only read."""
    names: dict[str, Any] = next(each for each in gc.get_referents(vars(cls)) if type(each) is dict)
    was = names.get(name)
    if value is _MISSING:
        names.pop(name, None)
    else:
        names[name] = value
    # the caches of bytecode hold attributes of types, without a reference, until the type is declared modified: `was` must live until then
    _type_modified(cls)
    del was


_type_modified: Callable[[type], None] = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("PyType_Modified", ctypes.pythonapi))


def _put(cls: type, name: str, value: Any) -> None:
    was = vars(cls).get(name, _MISSING)
    if not isinstance(was, (_Method, _Function)):
        _in_types.append((cls, name, was))
        _change_type(cls, name, value)


def _ask(module: types.ModuleType, name: str, original: Any) -> None:
    if module not in _asked:
        _asked[module] = type(module)
        module.__class__ = type("module", (type(module),), {"__slots__": ()})
    setattr(type(module), name, _Defined(name, original))


def _restore() -> None:
    with _lock:
        while _in_types:  # each is dropped once it is undone, as in patches.restore()
            _change_type(*_in_types[-1])
            _in_types.pop()
        while _asked:
            module, before = next(reversed(_asked.items()))
            module.__class__ = before
            _asked.popitem()
        for each in (_places, _counterparts, _tables):
            each.clear()
