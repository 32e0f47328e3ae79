"""What torch hands to `__torch_function__` equals torch's own function, and is what the user finds under that name.

torch's C code looks a function up by its name, at the moment that it hands it out: a method on torch.Tensor, any other builtin in the
module of torch._C that defines it. These places are answered here, with counterparts (counterparts.py).

A method's counterpart is what `torch.Tensor.mul` gives; `x.mul(y)` and `x * y` call the switch as before. The places where users call
other builtins (`torch.matmul`) hold switches, which are quicker; the first time that one is handed out, its counterpart takes the switch's
place, and that of the switch in whatever took it meanwhile. So nothing is paid for by who does not use the protocol.
"""

from __future__ import annotations

import gc
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import torch

from . import names_taken, patches
from .counterparts import ComparisonCounterpart, Counterpart, MethodCounterpart, compares
from .sites import Site

_FUNCTIONS: type = type(torch._C._VariableFunctions)
_METACLASS: type = type(torch.Tensor)

_lock = threading.RLock()
# By torch's function: torch.mm and torch._VF.mm are two objects that are equal, and one is handed out.
_counterparts: dict[Any, Counterpart] = {}
_places: dict[Any, list[tuple[Any, str, Any]]] = {}  # where users find it in modules, and the switch there
_alone: list[Any] = []  # those that only a module of torch._C has
_asked: list[types.ModuleType] = []  # modules of torch._C that are answered for
_in_types: list[tuple[dict[str, Any], str, Any]] = []  # dict of a type, name, what was there
_tables: list[Callable[[], list[Any]]] = []  # give tables of hmp's that hold switches
_MISSING = object()
_BUILTINS = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)


def install(sites: list[tuple[Site, Any]], tables: Callable[[], list[Any]]) -> None:
    """Answers for the functions of `sites`, each with its switch, until patches.restore(). `tables` gives what of hmp's holds switches."""
    if not _tables:
        _tables.append(tables)
        patches.on_restore(_restore)
    builtins: dict[int, Any] = {}
    for site, switch in sites:
        original: Any = site.original
        if type(original) not in _BUILTINS:
            continue  # somebody else's, in torch's place
        if original not in _counterparts:
            _counterparts[original] = _counterpart(site, switch)
        if isinstance(site.owner, type):
            if type(original) is not types.BuiltinFunctionType:
                _put(_METACLASS, site.attribute, _Method(site.attribute, switch, _counterparts[original]))
        else:
            _places.setdefault(original, []).append((site.owner, site.attribute, switch))
            builtins[id(original)] = original
    for original in builtins.values():
        name, home = original.__name__, getattr(original, "__self__", None)
        defined: Any = vars(_FUNCTIONS).get(name)
        if isinstance(defined, staticmethod) and defined.__func__ == original:
            _put(_FUNCTIONS, name, _Function(original))
        elif isinstance(home, types.ModuleType) and home.__name__.startswith("torch._C."):
            if any(owner is not home for owner, _, _ in _places.get(original, ())):
                _ask(home, name, original)
            else:
                _alone.append(original)
    _forget_types()


def standing(original: Any, switch: Any) -> Any:
    """What a name that took torch's function is to be bound to."""
    counterpart = _counterparts.get(original) if type(original) in _BUILTINS else None
    return counterpart if isinstance(counterpart, MethodCounterpart) else switch


def counterparts() -> list[Any]:
    """All counterparts there are."""
    return list(_counterparts.values())


def _counterpart(site: Site, switch: Callable[..., Any]) -> Counterpart:
    if not isinstance(site.owner, type):
        return Counterpart(switch, site.original)
    return (ComparisonCounterpart if compares(site.attribute) else MethodCounterpart)(switch, site.original)


def _hand_out(original: Any) -> Counterpart:
    """The counterpart of a builtin, which stands wherever users find it from now on."""
    if original in _places:
        with _lock:
            # nobody tells when one is handed out that stands in a module of torch._C alone: now that there are takers, it might be
            while _alone:
                _take_over(_alone.pop())
            _take_over(original)
    return _counterparts[original]


def _take_over(original: Any) -> None:
    counterpart, places = _counterparts[original], _places.pop(original, [])
    for owner, name, _ in places:
        patches.replace(owner, name, counterpart)
    switches = list({id(switch): switch for _, _, switch in places}.values())
    places.clear()
    names_taken.replace(switches, counterpart, [table for give in _tables for table in give()])


def _is_handed_out() -> bool:
    """Whether C code asks that a switch or a wrapper has called: not somebody who looks torch's modules through, nor for a mode of hmp's."""
    if not _is_ours(sys._getframe(2).f_globals.get("__name__")):
        return False
    modes = torch._C._len_torch_function_stack()
    return not modes or not _is_ours(type(torch._C._get_function_stack_at(modes - 1)).__module__)


def _is_ours(module: Any) -> bool:
    return str(module).partition(".")[0] == __package__


class _Function:
    """Stands in the type that has the functions of `torch`: C code asks there."""

    def __init__(self, original: Any) -> None:
        self.original = original

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return _hand_out(self.original) if _is_handed_out() else self.original


class _Defined:
    """Stands for a function that a module of torch._C defines."""

    def __init__(self, name: str, original: Any) -> None:
        self.name, self.original = name, original

    def __get__(self, module: Any, owner: type | None = None) -> Any:
        if module is None:
            return self
        try:
            found = vars(module)[self.name]
        except KeyError:
            raise AttributeError(f"module {module.__name__!r} has no attribute {self.name!r}") from None
        ours = getattr(found, "__wrapped__", found) is self.original
        return _hand_out(self.original) if ours and _is_handed_out() else found

    def __set__(self, module: Any, value: Any) -> None:
        vars(module)[self.name] = value

    def __delete__(self, module: Any) -> None:
        del vars(module)[self.name]


class _Method:
    """Stands in the metaclass of torch.Tensor: `torch.Tensor.mul` asks there first, `x.mul` does not."""

    def __init__(self, name: str, switch: Any, counterpart: Counterpart) -> None:
        self.name, self.switch, self.counterpart = name, switch, counterpart

    def __get__(self, cls: Any, metaclass: type | None = None) -> Any:
        if cls is None:
            return self
        for each in cls.__mro__:
            found = vars(each).get(self.name, _MISSING)
            if found is self.switch:
                return self.counterpart
            if found is not _MISSING:
                return found.__get__(None, cls) if hasattr(type(found), "__get__") else found
        raise AttributeError(f"type object {cls.__name__!r} has no attribute {self.name!r}")

    def __set__(self, cls: type, value: Any) -> None:
        value = self.switch if value is self.counterpart and cls is torch.Tensor else value
        self._past(lambda: type.__setattr__(cls, self.name, value))

    def __delete__(self, cls: type) -> None:
        self._past(lambda: type.__delattr__(cls, self.name))

    def _past(self, change: Callable[[], None]) -> None:
        """Changes a class as if nothing stood here."""
        with _lock:
            names = _dict_of(_METACLASS)
            del names[self.name]
            _forget_types()
            try:
                change()
            finally:
                names[self.name] = self
                _forget_types()


def _dict_of(cls: type) -> dict[str, Any]:
    """The dict of a type that is written in C, which Python shows without letting anybody change it."""
    found: dict[str, Any] = next(each for each in gc.get_referents(vars(cls)) if type(each) is dict)
    return found


def _forget_types() -> None:
    """Has Python look types up anew: it remembers what it has found in them."""
    clear: Callable[[], None] = getattr(sys, "_clear_type_cache")
    clear()


def _put(cls: type, name: str, value: Any) -> None:
    names = _dict_of(cls)
    if not isinstance(names.get(name), (_Method, _Function)):
        _in_types.append((names, name, names.get(name, _MISSING)))
        names[name] = value


def _ask(module: types.ModuleType, name: str, original: Any) -> None:
    if module not in _asked:
        _asked.append(module)
        module.__class__ = type("module", (type(module),), {"__slots__": ()})
    setattr(type(module), name, _Defined(name, original))


def _restore() -> None:
    with _lock:
        while _in_types:
            names, name, was = _in_types.pop()
            if was is _MISSING:
                del names[name]
            else:
                names[name] = was
        _forget_types()
        while _asked:
            module = _asked.pop()
            module.__class__ = type(module).__bases__[0]
        for each in (_places, _alone, _counterparts, _tables):
            each.clear()  # type: ignore[attr-defined]
