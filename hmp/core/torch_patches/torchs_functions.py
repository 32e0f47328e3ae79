"""Finds torch's Python functions by module and name, and wraps them."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from ..patching import patches


def wrap(module_name: str, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Has the function `name` of a module, "Class.method" for a method, do what `make(function)` does, until patches.restore(); nothing
    where this release of torch has no such Python function."""
    owner: Any = importlib.import_module(module_name)
    *owners, attribute = name.split(".")
    for each in owners:
        owner = inspect.getattr_static(owner, each, None)
    if owner is not None:
        patches.wrap(owner, attribute, make)
