"""Habana's module names, answered by hmp's modules: an import finder that stands behind all others."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec

_HERE = __package__
# Habana's name → the module whose public names it holds; "" for a package that holds modules alone
_TREE = {
    "habana_frameworks": "",
    "habana_frameworks.torch": "",
    "habana_frameworks.torch.core": f"{_HERE}.core",
    "habana_frameworks.torch.core.hccl": f"{_HERE}.hccl",
    "habana_frameworks.torch.distributed": "",
    "habana_frameworks.torch.distributed.hccl": f"{_HERE}.hccl",
    "habana_frameworks.torch.hpex": "",
    "habana_frameworks.torch.hpex.hmp": "hmp",
    "habana_frameworks.torch.hpex.movingavrg": f"{_HERE}.movingavrg",
    "habana_frameworks.torch.hpex.normalization": f"{_HERE}.normalization",
    "habana_frameworks.torch.hpex.optimizers": f"{_HERE}.optimizers",
    "habana_frameworks.torch.hpu": f"{_HERE}.hpu",
    "habana_frameworks.torch.hpu.hpu": f"{_HERE}.memory",
    "habana_frameworks.torch.hpu.graphs": f"{_HERE}.graphs",
    "habana_frameworks.torch.hpu.random": f"{_HERE}.random",
    "habana_frameworks.torch.utils": "",
    "habana_frameworks.torch.utils.debug": f"{_HERE}.debug",
    "habana_frameworks.torch.utils.library_loader": f"{_HERE}.library_loader",
}
# What lightning_habana itself cannot be imported without, and cannot use here. A script that looks whether it is there is to find nothing.
_MEDIA = {
    "habana_dataloader": f"{_HERE}.dataloader",
    "habana_frameworks.mediapipe": f"{_HERE}.mediapipe",
    "habana_frameworks.mediapipe.media_types": f"{_HERE}.mediapipe",
    "habana_frameworks.mediapipe.mediapipe": f"{_HERE}.mediapipe",
    "habana_frameworks.mediapipe.operators": "",
    "habana_frameworks.mediapipe.operators.cpu_nodes": "",
    "habana_frameworks.mediapipe.operators.cpu_nodes.cpu_nodes": f"{_HERE}.mediapipe",
    "habana_frameworks.mediapipe.plugins": "",
    "habana_frameworks.mediapipe.plugins.iterator_pytorch": f"{_HERE}.mediapipe",
}
# the one that newer releases of Habana's own package lack
_REMOVED = "habana_frameworks.torch.hpex.hmp"
# they register a backend when they are imported, so they wait until a program imports them
_ON_REQUEST = ("habana_frameworks.torch.distributed.hccl", "habana_frameworks.torch.core.hccl")


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
    _finder.names = frozenset({_REMOVED}) if only_removed else frozenset(_TREE)
    if _finder not in sys.meta_path:
        sys.meta_path.append(_finder)


def uninstall() -> None:
    """Makes them unimportable again, and forgets those that were imported."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    _forget(_TREE)


@contextlib.contextmanager
def with_media() -> Iterator[None]:
    """A stretch in which the names of Habana's data loaders can be imported too."""
    _TREE.update(_MEDIA)
    _finder.names |= _MEDIA.keys()
    try:
        yield
    finally:
        _forget(_MEDIA)
        _finder.names -= _MEDIA.keys()
        for name in _MEDIA:
            del _TREE[name]


def _forget(names: Iterable[str]) -> None:
    for name in sorted(names, reverse=True):
        module = sys.modules.get(name)
        if module is None or not isinstance(getattr(module, "__loader__", None), _Filler):
            continue
        del sys.modules[name]
        parent, _, child = name.rpartition(".")
        if vars(sys.modules.get(parent, module)).get(child) is module:
            delattr(sys.modules[parent], child)


class _Finder(MetaPathFinder):
    names: frozenset[str] = frozenset()

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in self.names:
            return None
        is_package = any(name.startswith(f"{fullname}.") for name in _TREE)
        return ModuleSpec(fullname, _Filler(), origin=_TREE[fullname] or _HERE, is_package=is_package)


class _Filler(Loader):
    """Fills a module with another one's public names, and a package with the modules in it."""

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        name = module.__name__
        if _TREE[name]:
            source = importlib.import_module(_TREE[name])
            module.__doc__ = source.__doc__
            public = {each: getattr(source, each) for each in source.__all__}
            if "__getattr__" in vars(source):
                public["__getattr__"] = source.__getattr__
            vars(module).update(public)
            if "on_import" in vars(source):
                source.on_import()
        for child in _TREE:
            if child.rpartition(".")[0] == name and child not in _ON_REQUEST:
                setattr(module, child.rpartition(".")[2], importlib.import_module(child))


_finder = _Finder()
