"""The docstrings of the public names, below each table of the API page."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterable

import hmp
import hmp.tools


def inserted(names: Iterable[str]) -> str:
    """Return mkdocstrings' directive for each name: of hmp's, or with its module."""
    return "\n".join(f"::: {name if '.' in name else _place(name)}\n" for name in names)


def _place(name: str) -> str:
    """Return where the name is defined: mkdocstrings reads the source there."""
    if name not in hmp.__all__:
        return f"{_module_of_result(name)}.{name}"
    found = getattr(hmp, name)
    module = found.__module__
    if module == f"hmp.{name}":  # hmp.tune and hmp.benchmark are functions and packages of one name
        return f"{module}.{name}"
    return f"{module}.{found.__qualname__}"


def _module_of_result(name: str) -> str:
    """Return the module of the one class of that name, which public functions return."""
    for each in pkgutil.walk_packages(hmp.tools.__path__, "hmp.tools."):
        importlib.import_module(each.name)
    places = [place for place, module in list(sys.modules.items()) if place.startswith("hmp.") and inspect.isclass(vars(module).get(name))]
    (found,) = {vars(sys.modules[place])[name].__module__ for place in places}
    return str(found)
