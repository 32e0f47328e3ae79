"""Finds torch's Python functions by module and name, and replaces them."""

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Callable
from typing import Any

from .. import torch_private
from ..patching import patches


def find(module_name: str, name: str) -> types.FunctionType | None:
    """The Python function `name` of a module, "Class.method" for a method; None where this release of torch has none."""
    owner: Any = importlib.import_module(module_name)
    *owners, attribute = name.split(".")
    for each in owners:
        owner = inspect.getattr_static(owner, each, None)
    return python_function_at(torch_private.Place(owner, attribute))


def python_function_at(place: torch_private.Place) -> types.FunctionType | None:
    """The Python function at a place; None where something else or nothing is."""
    found: Any = inspect.getattr_static(*place, None)
    found = getattr(found, "__func__", found)
    return found if isinstance(found, types.FunctionType) else None


def replace(module_name: str, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Makes the function do what `make(function)` does, until patches.restore(); nothing where this release of torch has none."""
    swap(find(module_name, name), make)


def swap(function: types.FunctionType | None, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Makes `function` do what `make(function)` does, until patches.restore(); nothing for None."""
    if function is not None:
        patches.swap(function, make(patches.unpatched(function)))
