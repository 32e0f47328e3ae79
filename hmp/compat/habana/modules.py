"""Habana's module names, answered by hmp's modules as the table of names says: an import finder that stands behind all others."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

from ..import_finders import Made, can_do_without, forget, is_an_import, is_made_by
from .names import MEDIA, TREE
from .nothing import ERROR, does_nothing, what_is_said_of

_HERE = __package__
# what is answered now: the table's, and while lightning_habana is imported the media engine's
_tree = dict(TREE)
# the one that newer releases of Habana's own package lack
_REMOVED = "habana_frameworks.torch.hpex.hmp"


# on Gaudi: the bridge is found as habana_frameworks.torch. Then nothing of compat.habana stands in for it but
# habana_frameworks.torch.hpex.hmp, which release 1.12 removed, and a device map does nothing.
def is_real() -> bool:
    """Whether Habana's own torch package can be imported here. Asked while the finder is not in place."""
    if "habana_frameworks.torch" in sys.modules:
        return True
    try:
        return importlib.util.find_spec("habana_frameworks.torch") is not None
    except ModuleNotFoundError:
        return False  # there is no habana_frameworks either


def install(only_removed: bool = False) -> None:
    """Makes the names importable; with `only_removed` hmp's own alone, and where Habana's package still has it, that one wins."""
    _finder.names = frozenset({_REMOVED}) if only_removed else frozenset(TREE)
    if _finder not in sys.meta_path:
        sys.meta_path.append(_finder)


def uninstall() -> None:
    """Makes them unimportable again, and forgets those that were imported."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    _forget(TREE)


@contextlib.contextmanager
def with_media() -> Iterator[None]:
    """A stretch in which the names of Habana's media engine can be imported too."""
    _tree.update(MEDIA)
    _finder.names |= MEDIA.keys()
    try:
        yield
    finally:
        _forget(MEDIA)
        _finder.names -= MEDIA.keys()
        for name in MEDIA:
            del _tree[name]


def public_names(module: str) -> dict[str, Any]:
    """The names that a module of Habana's has here; one that waits for another package, torchvision, is not among them."""
    entry = _tree[module]
    found: dict[str, Any] = {}
    for source in map(_source, entry.source.split()):
        wanted = entry.names.split() or source.__all__
        found |= {name: getattr(source, name) for name in wanted if name in source.__all__}
    return found | {name: does_nothing(name, why) for name, why in entry.why_nothing().items() if name != "*"}


def refusal(module: str, name: str) -> str:
    """What is said of a name that a module of Habana's does not have here."""
    refused = _refused_when_called(module)
    instead = what_is_said_of(refused[name])[1] if name in refused else _tree[module].instead().get(name)
    if instead:
        return f"{module}.{name} is Gaudi's alone, and there is none here; {instead}"
    has = [*(name for name in public_names(module) if not name.startswith("_")), *(child.rpartition(".")[2] for child in _children(module))]
    return (
        f"{module} has no {name!r} in hmp's stand-in for it, which has what Habana's programs were seen to use: "
        f"{', '.join(sorted(has)) or 'nothing'}. Please report it, with the line that asks for it"
    )


def _refused_when_called(module: str) -> dict[str, Any]:
    """The names that can be imported by a program that cannot do without them, and are errors when they are called."""
    return {name: value for name, value in public_names(module).items() if what_is_said_of(value)[0] == ERROR}


def _source(name: str) -> types.ModuleType:
    return importlib.import_module(name if name == "hmp" else f"{_HERE}.{name}")


def _children(module: str) -> list[str]:
    return [name for name in _tree if name.rpartition(".")[0] == module]


def _forget(names: Iterable[str]) -> None:
    for name in sorted(names, reverse=True):
        if is_made_by(_fill, name):
            forget(name)


class _Finder(MetaPathFinder):
    names: frozenset[str] = frozenset()

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None) -> ModuleSpec | None:
        if fullname in self.names:
            return Made(_fill).spec(fullname)
        parent, _, name = fullname.rpartition(".")
        if parent in self.names and is_made_by(_fill, parent) and is_an_import():
            # without `name`, by which the import system takes the error for its own, and puts it into other words
            raise ModuleNotFoundError(refusal(parent, name))
        return None


def _fill(module: types.ModuleType) -> None:
    """Fills a module with its names, and with the modules in it."""
    name = module.__name__
    entry = _tree[name]
    sources = [_source(each) for each in entry.source.split()]
    if len(sources) == 1:
        module.__doc__ = sources[0].__doc__
    refused = _refused_when_called(name)
    vars(module).update({each: value for each, value in public_names(name).items() if each not in refused})
    vars(module)["__getattr__"] = _asked_for(name, sources, refused)
    for source in sources:
        if entry.on_request and "on_import" in vars(source):
            source.on_import()
    for child in _children(name):
        if not _tree[child].on_request:
            setattr(module, child.rpartition(".")[2], importlib.import_module(child))


def _asked_for(module: str, sources: list[types.ModuleType], refused: Mapping[str, Any]) -> Any:
    entry = _tree[module]
    why = entry.why_nothing().get("*")

    def __getattr__(name: str) -> Any:
        if name in refused:
            if can_do_without():
                raise AttributeError(refusal(module, name))
            return refused[name]
        if name in entry.names.split():  # and not in __all__: it waits for another package
            return getattr(sources[0], name)
        if name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        if why is not None:
            return does_nothing(name, why)
        raise AttributeError(refusal(module, name))

    return __getattr__


_finder = _Finder()
