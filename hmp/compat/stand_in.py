"""A package of somebody else's is answered by hmp's own names where it is not installed, or does not import."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

from .habana.nothing import say_once
from .import_finders import Made, forget, found_by_others, is_an_import, is_made_by


class StandIn(MetaPathFinder):
    """An import finder for a package and its modules; the package itself wins where it imports.

    `tree` says of every module, the package first, which names it holds and which module of hmp's has them. `remedy` ends what is said
    of a name that is not there. The package itself is imported in a `trying()`.
    """

    def __init__(
        self,
        tree: Mapping[str, Mapping[str, str]],
        remedy: str,
        trying: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self.root = next(iter(tree))
        self._parents = [self.root[:at] for at, letter in enumerate(self.root) if letter == "."]
        self._tree = tree
        self._remedy = remedy
        self.trying = trying
        self._then: Callable[[], None] = lambda: None

    def install(self, then: Callable[[], None] = lambda: None) -> None:
        """Makes the names importable; `then()` is called when a program has imported the stand-in."""
        self._then = then
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)  # before those that would find a package that does not import

    def uninstall(self) -> None:
        """Makes them unimportable again, and forgets those that were imported."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        if self._serves():
            self._forget()
            forget(self.root)
        for name in reversed(self._parents):
            if is_made_by(_leave_empty, name):
                forget(name)

    def is_used(self) -> bool:
        """Whether hmp answers for the package, which is imported for that; ModuleNotFoundError where neither can be."""
        importlib.import_module(self.root)
        return self._serves()

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None) -> ModuleSpec | None:
        """The spec of a module that hmp answers for; None for all others."""
        if fullname == self.root:
            real = self._real(fullname, path, target)
            if real is None:
                return Made(self.fill).spec(fullname)
            assert real.loader is not None
            real.loader = _Trying(self, real.loader)
            return real
        if fullname in self._parents and found_by_others(self, fullname, path, target) is None:
            return Made(_leave_empty).spec(fullname)
        if not fullname.startswith(f"{self.root}.") or not self._serves():
            return None
        if fullname in self._tree:
            return Made(self.fill).spec(fullname)
        parent, _, name = fullname.rpartition(".")
        if parent in self._tree and is_an_import():
            # without `name`, by which the import system takes the error for its own, and puts it into other words
            raise ModuleNotFoundError(self._refusal(parent, name))
        return None

    def fill(self, module: types.ModuleType) -> None:
        """Gives a module its names, and a package the modules in it."""
        name = module.__name__
        names = self._tree[name]
        # hmp's modules are all imported before one of them is looked into: a package that they need may be missing
        sources = {source: importlib.import_module(source) for source in names.values()}
        vars(module).update({public: getattr(sources[source], public) for public, source in names.items()})
        module.__doc__ = f"hmp's stand-in for {name}."
        vars(module)["__all__"] = [*names]

        def __getattr__(asked: str) -> Any:
            if asked.startswith("__"):
                raise AttributeError(f"module {name!r} has no attribute {asked!r}")
            raise AttributeError(self._refusal(name, asked))

        vars(module)["__getattr__"] = __getattr__
        for child in self._tree:
            if child.rpartition(".")[0] == name:
                importlib.import_module(child)
        if name == self.root:
            self._then()

    def _refusal(self, module: str, asked: str) -> str:
        """What is said of a name, or of a module inside, that is not there."""
        known = [*self._tree[module], *(child.rpartition(".")[2] for child in self._tree if child.rpartition(".")[0] == module)]
        return (
            f"{module} has no {asked!r} in hmp's stand-in for it, which has what Habana's guides use: {', '.join(known) or 'nothing'}. "
            f"{self._remedy}"
        )

    def give_up(self, module: types.ModuleType, error: Exception) -> None:
        """Puts the stand-in in the place of the package, which raised that when it was imported."""
        say_once(
            self.root,
            f"{self.root} {_version(self.root)}is installed, and does not import here ({type(error).__name__}: {error}); hmp's stand-in "
            "takes its place. Said once",
        )
        self._forget()
        for name in [name for name in vars(module) if name not in {"__name__", "__spec__", "__loader__", "__package__"}]:
            delattr(module, name)
        module.__path__ = []
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = Made(self.fill)
        module.__spec__.submodule_search_locations = []
        self.fill(module)

    def _real(self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None) -> ModuleSpec | None:
        """The spec of the package itself; None where it is not installed."""
        found = found_by_others(self, fullname, path, target)
        return None if found is None or found.origin is None else found  # a folder of that name is no package

    def _serves(self) -> bool:
        return is_made_by(self.fill, self.root)

    def _forget(self) -> None:
        for name in [name for name in sys.modules if name.startswith(f"{self.root}.")]:
            del sys.modules[name]


class _Trying(Loader):
    """Imports the package itself; where that raises, its place is the stand-in's."""

    def __init__(self, stand_in: StandIn, real: Loader) -> None:
        self._stand_in = stand_in
        self._real = real

    def create_module(self, spec: ModuleSpec) -> types.ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._real
        try:
            with self._stand_in.trying():
                self._real.exec_module(module)
        except Exception as error:  # whatever a release of Lightning's lacks, it is not imported
            self._stand_in.give_up(module, error)


def _leave_empty(module: types.ModuleType) -> None:
    """Of a package above the stand-in's, which is not installed either."""


def _version(package: str) -> str:
    try:
        return f"{importlib.metadata.version(package.replace('.', '-'))} "
    except importlib.metadata.PackageNotFoundError:
        return ""
