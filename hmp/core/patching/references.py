"""Follows names of torch's builtins that other code took: `from torch import matmul`, a dict {"tanh": torch.tanh}, a class attribute, a
default argument, a module's `self.activation`, a partial (transformers' FNet has `partial(torch.fft.fftn, dim=(1, 2))`).

A function of torch that is written in Python stays the same object (see patches). A builtin does not: who holds it from before it was
patched calls torch without hmp.
"""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from . import heap, patches
from .holders import CELL, CLASS, DICT, FUNCTION, LIST, Kind, Slot, unwrapped
from .patched_op import PatchedOp

# Packages whose names are left alone: torch's code looks its functions up at each call, and the standard library has none of them.
SKIPPED = sys.stdlib_module_names | {"torch", "torchgen", "functorch", "hmp"}


def patch_names(ops: Mapping[int, PatchedOp]) -> None:
    """Put PatchedOps where names hold the builtins that they replace, until patches.restore(), which leaves alone what others wrote since.

    Searched are the globals of modules that are not torch's, and the lists, dicts, classes and functions among them; the attributes of
    every nn.Module, and the lists and dicts among them; and partials.

    Args:
        ops: The PatchedOps, by the id of their builtin.
    """
    patched: list[tuple[Callable[[], Any], Any, Any, Any]] = []

    def undo() -> None:
        for reference, key, new, before in patched:
            holder = reference()
            if holder is not None and unwrapped(Slot(holder, key).value()) is unwrapped(new):
                Slot(holder, key).put(before)

    patches.on_restore(undo)  # first, so that what is replaced when something fails is put back too
    for slot in _slots(ops):
        before = slot.value()
        new = _like(before, ops[id(unwrapped(before))])
        patched.append((_reference(slot.holder), slot.key, new, before))  # first, as what is put may be interrupted
        slot.put(new)


def restore_names(ops: Sequence[PatchedOp]) -> None:
    """Put torch's builtins back where names, taken while torch was patched, hold one of these PatchedOps. Call it after patches.restore().

    A PatchedOp that is held elsewhere does what torch's function does, and equals it.
    """
    counts = list(map(sys.getrefcount, ops))
    held = {id(op): op.original for op, count in zip(ops, counts, strict=True) if count > _UNREFERENCED}
    for slot in _slots(held) if held else ():
        value = slot.value()
        slot.put(_like(value, held[id(unwrapped(value))]))


def _like(value: Any, function: Any) -> Any:
    return staticmethod(function) if isinstance(value, staticmethod) else function


_UNREFERENCED = next(map(sys.getrefcount, [PatchedOp(len, len, "", "len")]))


def _slots(replaced: Mapping[int, Any]) -> Iterator[Slot]:
    alive = heap.partials_and_modules()
    yield from (Slot(partial, None) for partial in alive.partials if id(partial.func) in replaced)
    yield from _in_python_modules(replaced)
    for cls in heap.subclasses(torch.nn.Module):
        if str(cls.__module__).partition(".")[0] not in SKIPPED:
            for name, attribute in CLASS.items(cls):
                yield from _in_attribute(Slot(cls, name), attribute, replaced)
    for module in alive.modules:
        yield from _in_attributes(module, replaced)


def _reference(holder: Any) -> Callable[[], Any]:
    """A function that returns the holder, or None once it is gone. It keeps only a list, a dict or a cell alive."""
    try:
        return weakref.ref(holder)
    except TypeError:
        return lambda: holder


def _in_python_modules(replaced: Mapping[int, Any]) -> Iterator[Slot]:
    seen: set[int] = set()
    marks_of_torch = replaced.keys() | _TORCHS
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in SKIPPED or not isinstance(module, types.ModuleType):
            continue
        names = vars(module)
        values = list(names.values())
        if marks_of_torch.isdisjoint(map(id, values)):
            continue  # a module that writes torch.tanh has imported torch
        yield from _in(DICT, names, replaced)
        for value in values:
            if id(value) not in seen:
                seen.add(id(value))
                yield from _inside(value, name, replaced)


# A module with none of these among its globals, nor a builtin that is patched, is not searched further.
_TORCHS = frozenset(map(id, (torch, torch.nn, torch.nn.functional, torch.special, torch.linalg, torch.fft)))


def _inside(value: Any, module: str, replaced: Mapping[int, Any]) -> Iterator[Slot]:
    """The slots inside the value of a module's global."""
    kind = type(value)
    if kind is dict or kind is list:
        yield from _in(DICT if kind is dict else LIST, value, replaced)
    elif kind is types.FunctionType:
        if value.__module__ == module:
            yield from _in_function(value, replaced)
    elif issubclass(kind, type) and value.__module__ == module:
        for name, attribute in CLASS.items(value):
            yield from _in_attribute(Slot(value, name), attribute, replaced)
    elif isinstance(value, dict):
        yield from _in(DICT, value, replaced)


def _in_attribute(slot: Slot, attribute: Any, replaced: Mapping[int, Any]) -> Iterator[Slot]:
    """The slot of a class's attribute, or those inside what is there."""
    kind = type(attribute)
    if kind is dict or kind is list:
        yield from _in(DICT if kind is dict else LIST, attribute, replaced)
        return
    function = unwrapped(attribute)
    if id(function) in replaced:
        yield slot
        return
    # what a class method, a decorator or hmp's own InitWithoutCasts calls, too: it has the default arguments
    for each in (function, getattr(attribute, "__dict__", {}).get("__wrapped__")):
        if type(each) is types.FunctionType:
            yield from _in_function(each, replaced)


def _in_function(function: types.FunctionType, replaced: Mapping[int, Any]) -> Iterator[Slot]:
    if str(function.__globals__.get("__name__")).partition(".")[0] == "hmp":
        return  # hmp's own functions are to call torch's builtins
    if function.__defaults__:
        yield from _in(FUNCTION, function, replaced)
    if function.__kwdefaults__:
        yield from _in(DICT, function.__kwdefaults__, replaced)
    for cell in function.__closure__ or ():
        yield from _in(CELL, cell, replaced)


def _in(kind: Kind, holder: Any, replaced: Mapping[int, Any]) -> Iterator[Slot]:
    for key, value in kind.items(holder):
        if id(value) in replaced:
            yield Slot(holder, key)


def _in_attributes(module: torch.nn.Module, replaced: Mapping[int, Any]) -> Iterator[Slot]:
    attributes = vars(module)
    if not replaced.keys().isdisjoint(map(id, attributes.values())):
        yield from (Slot(module, slot.key) for slot in _in(DICT, attributes, replaced))
    for value in list(attributes.values()):
        if (type(value) is dict or type(value) is list) and value:
            yield from _in(DICT if type(value) is dict else LIST, value, replaced)
