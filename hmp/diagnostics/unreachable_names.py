"""What holds a builtin of torch that it took before the patches, and cannot be made to hold what stands in its place."""

from __future__ import annotations

import ast
import collections
import contextlib
import functools
import gc
import inspect
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..dispatch import placement
from ..observing import log
from ..patching import SKIPPED, unfrozen


class Unreachable(NamedTuple):
    """One reference that calls torch past hmp: where it is, under which name, the line of its module that made it, and the op."""

    module: str
    name: str
    line: int | None
    op: str

    def __str__(self) -> str:
        where = self.module if self.line is None else f"{self.module}:{self.line}"
        return f"{where}: {self.name} holds {self.op} as it was before it was patched"


def unreachable() -> list[Unreachable]:  # noqa: C901, PLR0912
    """The references taken before convert() that the patches cannot reach; none while nothing is patched.

    Tuples, sets and keys of dicts are such references, and attributes of objects that are no nn.Module, and closures of functions that
    are inside other functions. Goes through every object that is alive: a few tenths of a second. What a running function has in a local
    variable, and what another library's C code holds, is not listed; nor are torch's own references.
    """
    originals = placement.originals()
    if not originals:
        return []
    with unfrozen():
        gc.collect()  # what is garbage calls nothing
        objects = gc.get_objects()
    users = {key for key, kind in {id(kind): kind for kind in map(type, objects)}.items() if _is_users(kind)}
    found: set[Unreachable] = set()
    known: dict[tuple[int, int], frozenset[str]] = {}
    line_of_global = functools.cache(_line_of_global)  # parses a source
    lines: dict[int, int | None] = {}
    for name, module in {id(m): (n, m) for n, m in reversed(sys.modules.items())}.values():  # once where it has two names
        if isinstance(module, types.ModuleType) and name.partition(".")[0] not in SKIPPED:
            for key, value in list(vars(module).items()):
                for op in _held_in(value, originals, known):
                    found.add(Unreachable(name, key, line_of_global(name, key), op))
    for each in objects:
        if type(each) is types.FunctionType:
            held = (each.__defaults__, each.__kwdefaults__, each.__closure__)
            if held != _NOTHING and _is_users(each):
                for what, value in zip(("a default argument", "a default argument", "a closure"), held, strict=True):
                    for op in _held_in(value, originals, known):
                        found.add(Unreachable(each.__module__, f"{each.__qualname__}, {what}", each.__code__.co_firstlineno, op))
        elif id(type(each)) in users or (issubclass(type(each), type) and _is_users(each)):  # isinstance() asks the object itself
            cls = each if issubclass(type(each), type) else type(each)
            for key, value in _attributes(each):
                for op in _held_in(value, originals, known):
                    if id(cls) not in lines:
                        lines[id(cls)] = _line_of_class(cls)
                    found.add(Unreachable(cls.__module__, f"{cls.__qualname__}.{key}", lines[id(cls)], op))
    return sorted(found, key=lambda each: (each.module, each.line or 0, each.name, each.op))


def tell_unreachable() -> None:
    """Logs what `unreachable()` lists, the first of it where that is long."""
    found = unreachable()
    for each in found[:_TOLD]:
        log.warning("%s; it is not cast", each)
    if found[_TOLD:]:
        log.warning("... and %d more such references; hmp.unreachable() lists them", len(found) - _TOLD)


_TOLD = 20
_NOTHING = (None, None, None)
_LEVELS = 3  # containers inside one another


def _is_users(owner: Any) -> bool:
    """Whether a class or a function comes from a module that is neither torch's nor Python's."""
    module = getattr(owner, "__module__", None)
    return isinstance(module, str) and module in sys.modules and module.partition(".")[0] not in SKIPPED


def _held_in(value: Any, originals: dict[int, Any], known: dict[tuple[int, int], frozenset[str]], level: int = _LEVELS) -> frozenset[str]:
    """The names of the originals that `value` is or, where it is a container, holds; `known` is what was found before."""
    if id(value) in originals:
        owner = getattr(value, "__module__", None) or "torch"
        name = value.__qualname__ if hasattr(value, "__objclass__") else value.__name__
        return frozenset({f"{owner}.{name}"})
    if not level or id(type(value)) not in _CONTAINERS:
        return _NO_NAMES
    key = (id(value), level)
    if key not in known:
        known[key] = _NO_NAMES  # for what holds itself
        referents = [each for each in gc.get_referents(value) if id(each) in originals or id(type(each)) in _CONTAINERS]
        known[key] = _NO_NAMES.union(*(_held_in(each, originals, known, level - 1) for each in referents))
    return known[key]


_NO_NAMES: frozenset[str] = frozenset()
# Classes by id: what a class of somebody's says of its equality and hash is not asked.
_CONTAINERS = frozenset(
    map(
        id,
        (
            dict, list, tuple, set, frozenset, staticmethod, collections.OrderedDict, collections.defaultdict, collections.deque,
            types.CellType, types.MappingProxyType, types.SimpleNamespace,
        ),
    )
)  # fmt: skip


def _attributes(owner: Any) -> Iterator[tuple[str, Any]]:
    """What an object or a class holds under a name, in slots too."""
    yield from list(getattr(owner, "__dict__", {}).items())
    if isinstance(owner, type):
        return
    for cls in type(owner).__mro__:
        for slot in vars(cls).values():
            if type(slot) is types.MemberDescriptorType:
                with contextlib.suppress(AttributeError):  # an empty slot
                    yield slot.__name__, slot.__get__(owner)


def _line_of_class(cls: type) -> int | None:
    try:
        return inspect.getsourcelines(cls)[1]
    except (OSError, TypeError):  # made without a source
        return None


def _line_of_global(module: str, name: str) -> int | None:
    """The line that binds `name` last at the top of the module; None where its source does not say."""
    path = getattr(sys.modules.get(module), "__file__", None)
    if path is None or not Path(path).is_file():
        return None
    line = None
    for node in ast.parse(Path(path).read_bytes()).body:
        for each in ast.walk(node):
            bound = each.id if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store) else None
            if isinstance(each, ast.alias):
                bound = each.asname or each.name
            if bound == name:
                line = node.lineno
    return line
