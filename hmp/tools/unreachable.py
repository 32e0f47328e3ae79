"""Lists references to functions, taken before hmp patched torch, that hmp can't replace: it doesn't see calls through them."""

from __future__ import annotations

import functools
import gc
import linecache
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ..core import dispatching_ops
from ..core.patching.names import SKIPPED, instances


class Unreachable(NamedTuple):
    """A reference to an original function of torch. hmp doesn't see calls through it: an op is not cast.

    Attributes:
        module: The module of the reference.
        name: The name that refers to the function.
        line: The line of the module that made the reference, from 1; None if unknown.
        op: The function.

    Example:
        >>> print(hmp.types.Unreachable("train", "ACTIVATIONS", 7, "torch.relu"))
        train:7: ACTIVATIONS holds torch.relu from before hmp patched it
    """

    module: str
    name: str
    line: int | None
    op: str

    def __str__(self) -> str:
        where = self.module if self.line is None else f"{self.module}:{self.line}"
        return f"{where}: {self.name} holds {self.op} from before hmp patched it"


def unreachable() -> list[Unreachable]:
    """Find references to torch's original functions that were taken before the conversion.

    hmp doesn't see calls through them: an op is not cast, and what a function does that is never cast, such as `clip_grad_norm_`, is cast.
    The references are in dicts, lists, tuples, sets and partials of modules, and in default arguments and closures. Those in attributes of
    objects and classes, local variables of running functions, references in C code and torch's own are not found: the rows with the rule
    `bypassed` in a report of `hmp.record()` have the lines of all calls. The search looks at every object: a few tenths of a second, up to
    seconds in a large program.

    Returns:
        The references, sorted by module and line; [] while torch is not patched.

    Example:
        >>> activations = (torch.sigmoid,)
        >>> with hmp.convert():
        ...     len(hmp.unreachable()) >= 0
        True
    """
    originals = dispatching_ops.originals()
    if not originals:
        return []
    gc.collect()  # garbage makes no calls: it is not to be listed
    known: dict[tuple[int, int], set[str]] = {}
    found: set[Unreachable] = set()
    for module, name, value, line in _references():
        ops = _held_in(value, originals, known)
        if ops:
            number = line()
            found.update(Unreachable(module, name, number, op) for op in ops)
    return sorted(found, key=lambda each: (each.module, each.line or 0, each.name, each.op))


def _references() -> Iterator[tuple[str, str, Any, Callable[[], int | None]]]:
    """Yield what users' modules and functions refer to: module, name, value, and what finds the line."""
    for module, found in {id(m): (n, m) for n, m in reversed(sys.modules.items())}.values():  # a module with two names once
        if isinstance(found, types.ModuleType) and module.partition(".")[0] not in SKIPPED:
            for name, value in list(vars(found).items()):
                yield module, name, value, functools.partial(_line_of_global, module, name)
    for each in instances(types.FunctionType):
        module = each.__module__
        if isinstance(module, str) and module in sys.modules and module.partition(".")[0] not in SKIPPED:
            line = functools.partial(getattr, each.__code__, "co_firstlineno")
            yield module, f"{each.__qualname__}, a default argument", (each.__defaults__, each.__kwdefaults__), line
            yield module, f"{each.__qualname__}, a closure", each.__closure__, line


_LEVELS = 4  # of nested containers that are looked into
# Ids of classes: a set of classes would call the `__eq__` and `__hash__` of users' metaclasses.
_CONTAINERS = frozenset(map(id, (dict, list, tuple, set, frozenset, functools.partial, types.CellType)))


def _held_in(value: Any, originals: dict[int, Any], known: dict[tuple[int, int], set[str]], level: int = _LEVELS) -> set[str]:
    """Return the names of the original functions that `value` is or, as a container, contains. `known` caches the results."""
    if id(value) in originals:
        owner = getattr(value, "__module__", None) or "torch"
        return {f"{owner}.{value.__qualname__ if hasattr(value, '__objclass__') else value.__name__}"}
    if not level or id(type(value)) not in _CONTAINERS:
        return set()
    key = (id(value), level)
    if key not in known:
        known[key] = set().union(*(_held_in(each, originals, known, level - 1) for each in gc.get_referents(value)))
    return known[key]


def _line_of_global(module: str, name: str) -> int | None:
    """Return the first line of the module that begins with an assignment to `name`; None without its source or such a line."""
    assigns = re.compile(rf"{re.escape(name)}\s*(:[^=]*)?=[^=]")
    lines = linecache.getlines(getattr(sys.modules.get(module), "__file__", None) or "")
    return next((number for number, line in enumerate(lines, 1) if assigns.match(line)), None)
