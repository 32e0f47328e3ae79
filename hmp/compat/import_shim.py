"""An import shim: hmp's names replace a package that is not installed, or does not import."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

from .habana.no_ops import warn_once
from .import_finders import Made, forget, found_by_others, is_an_import, is_made_by


class ImportShim(MetaPathFinder):
    """An import finder for a package and its modules. The package itself takes precedence if it imports.

    Args:
        tree: For each module, the package first: its names, each with the module of hmp that has it.
        remedy: What to do about a name that is missing: the end of the error's message.
    """

    def __init__(self, tree: Mapping[str, Mapping[str, str]], remedy: str) -> None:
        self.root = next(iter(tree))
        self._parents = [self.root[:at] for at, letter in enumerate(self.root) if letter == "."]
        self._tree = tree
        self._remedy = remedy

    def install(self) -> None:
        """Make the names importable."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)  # before the finders of a package that does not import

    def uninstall(self) -> None:
        """Remove the finder and the modules that it made."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        if self._serves():
            self._forget()
            forget(self.root)
        for name in reversed(self._parents):
            if is_made_by(_leave_empty, name):
                forget(name)

    def is_used(self) -> bool:
        """Import the package and return True if it is hmp's. Raise ModuleNotFoundError if neither can be imported."""
        importlib.import_module(self.root)
        return self._serves()

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec of a module of the package, None for all others."""
        if fullname == self.root:
            real = found_by_others(self, fullname, path, target)
            if real is None or real.origin is None:  # no origin: a folder of that name
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
            # without `name=`: the import system replaces the message of an error that has it
            raise ModuleNotFoundError(self._refusal(parent, name))
        return None

    def fill(self, module: types.ModuleType) -> None:
        """Set the names of a module, and the submodules of a package."""
        name = module.__name__
        names = self._tree[name]
        # import all of hmp's modules before any name is set: a package that they need may be missing
        sources = {source: importlib.import_module(source) for source in names.values()}
        vars(module).update({public: getattr(sources[source], public) for public, source in names.items()})
        module.__doc__ = f"hmp's replacement for {name}."
        vars(module)["__all__"] = [*names]

        def __getattr__(asked: str) -> Any:
            if asked.startswith("__"):
                raise AttributeError(f"module {name!r} has no attribute {asked!r}")
            raise AttributeError(self._refusal(name, asked))

        vars(module)["__getattr__"] = __getattr__
        for child in self._tree:
            if child.rpartition(".")[0] == name:
                importlib.import_module(child)

    def _refusal(self, module: str, asked: str) -> str:
        """Return the message for a missing name or submodule."""
        known = [*self._tree[module], *(child.rpartition(".")[2] for child in self._tree if child.rpartition(".")[0] == module)]
        return (
            f"hmp's replacement for {module} has no {asked!r}; it has what Habana's guides use: {', '.join(known) or 'no names'}. "
            f"{self._remedy}"
        )

    def give_up(self, module: types.ModuleType, error: Exception) -> None:
        """Turn the module of the package, whose import raised the error, into hmp's."""
        warn_once(
            self.root,
            f"{self.root} is installed but does not import ({type(error).__name__}: {error}), so hmp replaces it; to "
            "use the package, install what its import needs. This is logged once",
        )
        self._forget()
        for name in [name for name in vars(module) if name not in {"__name__", "__spec__", "__loader__", "__package__"}]:
            delattr(module, name)
        module.__path__ = []
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = Made(self.fill)
        module.__spec__.submodule_search_locations = []
        self.fill(module)

    def _serves(self) -> bool:
        return is_made_by(self.fill, self.root)

    def _forget(self) -> None:
        for name in [name for name in sys.modules if name.startswith(f"{self.root}.")]:
            del sys.modules[name]


class _Trying(Loader):
    """Imports the package itself, and replaces it if that raises."""

    def __init__(self, shim: ImportShim, real: Loader) -> None:
        self._shim = shim
        self._real = real

    def create_module(self, spec: ModuleSpec) -> types.ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._real
        try:
            self._real.exec_module(module)
        except Exception as error:  # any error: releases of Lightning lack different things
            self._shim.give_up(module, error)


def _leave_empty(module: types.ModuleType) -> None:
    """Fill a parent package that is not installed either."""
