"""What tells one search from another: the bytes of its tensors, the code of its functions, the parts of its model."""

from __future__ import annotations

import dis
import functools
import hashlib
import types
from collections.abc import Iterable, Mapping
from typing import Any

import torch

_VALUES = (bool, int, float, complex, str, bytes, type(None))


HASHED = ("model", "data", "loss", "metric", "optimizer", "choice of ops")


def of_search(hashed: Mapping[str, Any], shown: Mapping[str, Any]) -> dict[str, str]:
    """What tells a search from others, by name: twelve hexadecimal digits of each part of `hashed`, and the others as text."""
    return {name: key_of(part) for name, part in hashed.items()} | {name: str(part) for name, part in shown.items()}


def differences(key: Mapping[str, str], other: Mapping[str, str]) -> str:
    """The parts of a search in which it is not `other`, with what they are in both where that can be read."""
    names = [name for name in key if key[name] != other.get(name)]
    told = [name if name in HASHED else f"{name} ({other.get(name)} there, {key[name]} here)" for name in names]
    return " and ".join(filter(None, (", ".join(told[:-1]), *told[-1:])))


def key_of(*parts: Any) -> str:
    """Twelve hexadecimal digits: the same for the same parts, told by their text."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def of_tensors(tensors: Iterable[torch.Tensor]) -> str:
    """What tells these tensors from others. Of their bytes: a sum depends on the number of threads."""
    found = hashlib.sha256()
    for tensor in tensors:
        if tensor.layout is torch.strided and not tensor.is_nested:
            found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def of_model(model: torch.nn.Module) -> Any:
    """What tells a model from others: its parts with their code and settings, its parameters and its buffers."""
    parts = [(name, type(part).__qualname__, of_function(type(part).forward), _settings(part)) for name, part in model.named_modules()]
    parameters = [(name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in model.named_parameters()]
    return parts, parameters, of_tensors(model.parameters()), of_tensors(model.buffers())


def of_function(function: Any) -> Any:
    """What tells a function from others: its code, and the values and the functions of its file that it reads from around itself.

    Of an object that it reads only the type counts, and of a function of another file its name: who changes those gives another folder.
    """
    return _told(function, getattr(_innermost(function), "__module__", None), set())


def _innermost(function: Any) -> Any:
    """The function that partials and wrappers are around."""
    while isinstance(function, functools.partial) or hasattr(function, "__wrapped__"):
        function = function.func if isinstance(function, functools.partial) else function.__wrapped__
    return function


def _settings(part: torch.nn.Module) -> list[tuple[str, Any]]:
    return sorted((name, value) for name, value in vars(part).items() if _is_value(value) and not name.startswith("_"))


def _is_value(value: Any) -> bool:
    return all(map(_is_value, value)) if type(value) is tuple else isinstance(value, _VALUES)


def _told(value: Any, file: str | None, seen: set[int]) -> Any:
    if _is_value(value):
        return value
    if id(value) not in seen:
        seen.add(id(value))
        if isinstance(value, functools.partial):
            return [_told(each, file, seen) for each in (value.func, *value.args, *value.keywords, *value.keywords.values())]
        if isinstance(value, types.CodeType):
            return value.co_code, value.co_names, [_told(each, file, seen) for each in value.co_consts]
        if isinstance(value, types.MethodType):
            return _told(value.__func__, file, seen)
        if isinstance(value, types.FunctionType) and value.__module__ == file:
            return [_told(each, file, seen) for each in (value.__code__, *_read(value))]
        if hasattr(value, "__wrapped__"):
            return _told(value.__wrapped__, file, seen)
    return "module" if isinstance(value, types.ModuleType) else type(value).__name__  # hmp's own has a class until its names are read


def _read(function: types.FunctionType) -> Iterable[Any]:
    """The values of the names that a function reads and does not count on: its default arguments, and names of what is around it."""
    code = function.__code__
    names = [(each.opname, each.argval) for each in dis.get_instructions(code)]
    written = {name for does, name in names if does in ("STORE_GLOBAL", "STORE_DEREF")}
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield None if name in written else cell.cell_contents
        except ValueError:  # bound later, or never
            yield None
    for name in dict.fromkeys(name for does, name in names if does == "LOAD_GLOBAL"):  # co_names holds attributes, too
        yield None if name in written else function.__globals__.get(name)
