"""The import finder of Habana's modules, after all other finders: each is filled with hmp's names as the table says."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

from ..import_finders import Made, forget, is_an_import, is_made_by
from .names import TREE, by_name
from .no_ops import no_op

_HERE = __package__
# the one that newer releases of Habana's own package lack
_REMOVED = "habana_frameworks.torch.hpex.hmp"


def is_real() -> bool:
    """Return True if Habana's own torch package can be imported. Called while the finder is not installed.

    Then only habana_frameworks.torch.hpex.hmp is hmp's, which release 1.12 of Habana's removed, and a device map has no effect.
    """
    if "habana_frameworks.torch" in sys.modules:
        return True
    try:
        return importlib.util.find_spec("habana_frameworks.torch") is not None
    except ModuleNotFoundError:
        return False  # there is no habana_frameworks either


def install(only_removed: bool = False) -> None:
    """Make Habana's modules importable, or with `only_removed` just `hpex.hmp`; Habana's own, where it has one, takes precedence."""
    _finder.names = frozenset({_REMOVED}) if only_removed else frozenset(TREE)
    if _finder not in sys.meta_path:
        sys.meta_path.append(_finder)


def uninstall() -> None:
    """Remove the finder and the modules that it made."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    for name in sorted(TREE, reverse=True):
        if is_made_by(_fill, name):
            forget(name)


def public_names(module: str) -> dict[str, Any]:
    """Return the names of one of Habana's modules, without those that wait for another package to be imported (torchvision)."""
    entry = TREE[module]
    found: dict[str, Any] = {}
    if entry.source:
        source = _source(entry.source)
        names = [name for name in entry.names.split() if name in vars(source)] if entry.names else source.__all__
        found = {name: getattr(source, name) for name in names}
    return found | {name: no_op(name, why) for name, why in by_name(entry.nothing).items() if name != "*"}


def refusal(module: str, name: str) -> str:
    """Return the message for a name that a module of Habana's does not have here."""
    instead = by_name(TREE[module].errors).get(name)
    if instead:
        return f"{module}.{name} needs a Gaudi, which this machine lacks; {instead}"
    has = [*(name for name in public_names(module) if not name.startswith("_")), *(child.rpartition(".")[2] for child in _children(module))]
    return (
        f"hmp's replacement for {module} has no {name!r}; it has {', '.join(sorted(has)) or 'no names'}. "
        "Please report the name, with the line that imports it"
    )


def _source(name: str) -> types.ModuleType:
    return importlib.import_module(name if name == "hmp" else f"{_HERE}.{name}")


def _children(module: str) -> list[str]:
    return [name for name in TREE if name.rpartition(".")[0] == module]


class _HabanaFinder(MetaPathFinder):
    names: frozenset[str] = frozenset()

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None) -> ModuleSpec | None:
        if fullname in self.names:
            return Made(_fill).spec(fullname)
        parent, _, name = fullname.rpartition(".")
        if parent in self.names and is_made_by(_fill, parent) and is_an_import():
            # without `name=`: the import system replaces the message of an error that has it
            raise ModuleNotFoundError(refusal(parent, name))
        return None


def _fill(module: types.ModuleType) -> None:
    """Fill a module with its names and submodules."""
    name = module.__name__
    entry = TREE[name]
    if entry.source:
        module.__doc__ = _source(entry.source).__doc__
    vars(module).update(public_names(name))
    vars(module)["__getattr__"] = _missing_name(name)
    if entry.on_import:
        source, _, function = entry.on_import.partition(".")
        getattr(_source(source), function)()
    for child in _children(name):
        if not TREE[child].on_import:
            setattr(module, child.rpartition(".")[2], importlib.import_module(child))


def _missing_name(module: str) -> Any:
    entry = TREE[module]
    why = by_name(entry.nothing).get("*")

    def __getattr__(name: str) -> Any:
        if name in entry.names.split():  # waits for another package
            return getattr(_source(entry.source), name)
        if name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        if why is not None:
            return no_op(name, why)
        raise AttributeError(refusal(module, name))

    return __getattr__


_finder = _HabanaFinder()
