"""Packages that stand in for one that is made for Gaudi and is not here, or does not import with the versions that are.

The real one wins where it imports. Otherwise its names are answered by a package of hmp's, imported when a program asks for it.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

from .elsewhere import find_elsewhere
from .said import say_once


class StandIn(MetaPathFinder):
    """The finder of one such package: `tree` maps its modules' names to those of hmp's, `remedy` is what to do about a name it lacks."""

    def __init__(self, tree: Mapping[str, str], remedy: str) -> None:
        self.tree = tree
        self.remedy = remedy
        self.root = min(tree, key=len)
        self.is_ours = False

    def install(self) -> None:
        """Makes the names importable."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def uninstall(self) -> None:
        """Makes them unimportable again, and forgets those of hmp's that were imported; a real package stays."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        for name in sorted([*self.tree, *self._parents()], reverse=True):
            module = sys.modules.get(name)
            if module is None or getattr(vars(module).get("__spec__"), "loader_state", None) is not self:
                continue
            del sys.modules[name]
            parent, _, child = name.rpartition(".")
            if vars(sys.modules.get(parent, module)).get(child) is module:
                delattr(sys.modules[parent], child)
        self.is_ours = False

    def _parents(self) -> list[str]:
        return [self.root[:position] for position, letter in enumerate(self.root) if letter == "."]

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None) -> ModuleSpec | None:
        if fullname == self.root:
            real = find_elsewhere(self, fullname, path, target)
            if real is None or real.loader is None or real.origin is None:  # a folder without a module in it is nobody's package
                return self._spec(fullname, _Ours(self))
            real.loader = _RealOrOurs(self, real.loader)
            return real
        if fullname in self._parents():
            return None if find_elsewhere(self, fullname, path, target) else self._spec(fullname, _Empty())
        if not self.is_ours or not fullname.startswith(f"{self.root}."):
            return None
        if fullname not in self.tree:
            raise ModuleNotFoundError(self.missing(fullname), name=fullname)
        return self._spec(fullname, _Ours(self))

    def _spec(self, name: str, loader: Loader) -> ModuleSpec:
        spec = ModuleSpec(name, loader, is_package=any(each.startswith(f"{name}.") for each in self.tree))
        spec.loader_state = self
        return spec

    def fill(self, module: types.ModuleType) -> None:
        """Gives a module the public names of the one that answers for it, and an error that names them for any other."""
        name = module.__name__
        if name == self.root:
            self.is_ours = True
        source = importlib.import_module(self.tree[name])
        module.__doc__ = source.__doc__
        vars(module).update({each: getattr(source, each) for each in source.__all__}, __all__=list(source.__all__))

        def missing(wanted: str) -> Any:
            if f"{name}.{wanted}" in self.tree:
                return importlib.import_module(f"{name}.{wanted}")
            if wanted.startswith("_"):
                raise AttributeError(f"module {name!r} has no attribute {wanted!r}")
            raise ImportError(self.missing(f"{name}.{wanted}", source.__all__), name=name)

        vars(module)["__getattr__"] = missing

    def missing(self, wanted: str, names: Sequence[str] | None = None) -> str:
        """What to say of a name that hmp's stand-in lacks."""
        module, _, name = wanted.rpartition(".")
        there = ", ".join(sorted(self.tree if names is None else names))
        return f"{module} has no {name!r} here: it is hmp's stand-in, which has {there}; {self.remedy}"


class _Empty(Loader):
    """For a package above the stand-in's that is not here either."""

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _Ours(Loader):
    def __init__(self, finder: StandIn) -> None:
        self._finder = finder

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        self._finder.fill(module)


class _RealOrOurs(Loader):
    """Runs the real package, and where that fails fills the module with hmp's names."""

    def __init__(self, finder: StandIn, real: Loader) -> None:
        self._finder = finder
        self._real = real

    def create_module(self, spec: ModuleSpec) -> types.ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        spec = module.__spec__
        assert spec is not None
        before = set(sys.modules)
        try:
            self._real.exec_module(module)
        except Exception as error:  # whatever it is, it is told, and the import goes on with the stand-in
            for name in [each for each in sys.modules if each.startswith(f"{spec.name}.") and each not in before]:
                del sys.modules[name]
            for name in [each for each in vars(module) if not each.startswith("__")]:
                delattr(module, name)
            say_once(
                spec.name,
                f"{spec.name} is installed ({spec.origin}) and does not import here ({type(error).__name__}: {error}); hmp's stand-in is "
                f"used in its place. Install the versions that it was made for to have it instead",
            )
            spec.loader_state = self._finder
            spec.loader = module.__loader__ = _Ours(self._finder)
            spec.submodule_search_locations = module.__path__ = []
            self._finder.fill(module)
        else:
            spec.loader = module.__loader__ = self._real


# The stand-ins, by what they stand in for. Their sources are named and not imported: each imports when a program does.
STAND_INS = (
    StandIn(
        {
            "optimum.habana": "hmp.compat.optimum_habana",
            "optimum.habana.transformers": "hmp.compat.optimum_habana",
            "optimum.habana.transformers.gaudi_configuration": "hmp.compat.optimum_habana.configuration",
            "optimum.habana.transformers.trainer": "hmp.compat.optimum_habana.trainer",
            "optimum.habana.transformers.trainer_seq2seq": "hmp.compat.optimum_habana.trainer",
            "optimum.habana.transformers.training_args": "hmp.compat.optimum_habana.arguments",
            "optimum.habana.transformers.training_args_seq2seq": "hmp.compat.optimum_habana.arguments",
            "optimum.habana.utils": "hmp.compat.optimum_habana.statistics",
        },
        "use transformers' own, or install optimum-habana and the transformers that it was made for",
    ),
)
