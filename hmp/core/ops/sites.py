"""The sites of an op: the attributes of torch under which it can be called, such as torch.mul, Tensor.mul and Tensor.__mul__ for mul.

An op's id is its public name: `mul`, `linalg.solve`. Reflected and in-place forms have ids of their own (`rmul`, `imul`, `mul_`). They
follow the op: where a list does not name them, they have the op's decision.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F

from .. import torch_private
from ..patching.patched_op import unpatched_op
from ..torch_private import BUILTIN_NAMESPACES, TensorBase
from . import table

# (name, namespace, prefix of the ids of its ops)
NAMESPACES: tuple[tuple[str, Any, str], ...] = (
    ("torch", torch, ""),
    ("torch.nn.functional", F, ""),
    ("torch.Tensor", torch.Tensor, ""),
    *((where, owner, "") for where, owner in torch_private.OP_NAMESPACES),
    ("torch.special", torch.special, "special."),
    ("torch.linalg", torch.linalg, "linalg."),
    ("torch.fft", torch.fft, "fft."),
    ("torch.sparse", torch.sparse, "sparse."),
    ("torch.masked", torch.masked, "masked."),
    ("torch.signal.windows", torch.signal.windows, "signal.windows."),
    *((module.__name__, module, "") for module in torch_private.OF_ONE_OP),
)
# The modules of torch whose public Python functions are ops.
PYTHON_OPS = frozenset(
    {"torch.nn.functional", "torch.functional", "torch.signal.windows.windows", *torch_private.OP_MODULES}
    | {module.__name__ for module in torch_private.OF_ONE_OP}
)


# --- caches, which are emptied when torch is patched and restored -------------------------------------------------------------------

F_ = TypeVar("F_", bound=Callable[..., Any])
_clears: list[Callable[[], None]] = []


def cached(function: F_, most: int | None = None) -> F_:
    """Return `function` with a cache of its results, at most `most` of them, until `forget()`."""
    with_cache = functools.lru_cache(most)(function)
    _clears.append(with_cache.cache_clear)
    return with_cache  # type: ignore[return-value]


def forget() -> None:
    """Empty the caches: before hmp patches torch, and once torch is as it was."""
    for clear in _clears:
        clear()


# --- sites ------------------------------------------------------------------------------------------------------------------------


@dataclass(eq=False, repr=False)  # `import hmp` pays for every method that a dataclass gets
class Site:
    """One place where an op can be called: `owner.attribute`, written `where.attribute`; torch's function there; the op's id."""

    owner: Any
    attribute: str
    original: Callable[..., Any]
    where: str
    op: str

    @property
    def is_private(self) -> bool:
        """Return True if only torch's own code, and code that torch.fx made, calls the op by this name: `torch._C._linalg.linalg_inv`.

        Not what torch.nn.functional has too: attention's biases ask if they are handed just that, and torch hands out what is here.
        """
        if self.owner is torch_private.nn_builtins:
            return self.original != vars(F).get(self.attribute)
        return any(self.owner is owner for _, owner, _ in BUILTIN_NAMESPACES)

    @property
    def python(self) -> bool:
        """Return True if the function is written in Python, and so may call other ops."""
        return isinstance(self.original, types.FunctionType)

    def __str__(self) -> str:
        return f"{self.where}.{self.attribute}"


@cached
def base_of(op: str) -> str:
    """Return the op that an unlisted `op` follows: mul for rmul, imul and mul_, softmax for special.softmax; `op` itself otherwise."""
    if op.endswith("_"):
        return op[:-1]
    if op[:1] in ("r", "i") and op[1:] in table.BINARY_DUNDERS:
        return op[1:]
    namespace, _, name = op.rpartition(".")
    if namespace in ("special", "linalg", "sparse") and name in _places() and sites_of(name):
        return name
    return op


@cached
def writes_first(op: str) -> bool:
    """Return True if every call of the op writes into its first argument: add_, iadd and setitem do."""
    return op.endswith("_") or op == "setitem" or (op[:1] == "i" and base_of(op) != op)


@cached
def synonyms(op: str) -> tuple[str, ...]:
    """Return the ids of the exact synonyms of `op`: div and divide, softmax and special.softmax."""
    namespace, _, name = op.rpartition(".")
    twin = ("special." + op) if not namespace else name if namespace == "special" else ""
    known = table.SYNONYMS.get(op, ())
    return (*known, twin) if twin in _places() and twin not in known and sites_of(twin) and sites_of(op) else known


@cached
def namesakes(op: str) -> tuple[str, ...]:
    """Return the synonyms of `op` that are the same function object: torch.dsmm is torch.mm, so lists cannot decide them differently."""
    named = {site.original for site in sites_of(op)}
    return tuple(each for each in table.SYNONYMS.get(op, ()) if any(site.original in named for site in sites_of(each)))


@cached
def ancestry(op: str) -> tuple[str, ...]:
    """Return `op` and the ops that it follows while unlisted, nearest first: its base, then the synonyms of both."""
    base = base_of(op)
    line = dict.fromkeys((op, base, base_of(base)))
    for name in tuple(line):
        line |= dict.fromkeys(synonyms(name))
    return tuple(line)


@cached
def is_view(op: str) -> bool:
    """Return True if the op computes nothing and its result is a view of its input: no list casts it."""
    return not table.VIEWS.isdisjoint(ancestry(op)) and not writes_first(op)


def op_id(attribute: str, prefix: str) -> str:
    """Return the id of the op at an attribute of the namespace with that prefix: "linalg.solve", "add" for `__add__`."""
    if attribute.startswith("__") and attribute.endswith("__"):
        bare = attribute[2:-2]
        return table.DUNDER_OPS.get(bare, bare)
    return prefix + attribute


_WRITTEN_IN_C = frozenset({types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType})


def attributes_of(owner: Any) -> dict[str, Any]:
    """Return what is in the `__dict__` of a namespace; of a module of one op that op alone."""
    attributes, only = vars(owner), torch_private.OF_ONE_OP.get(owner)
    return attributes if only is None else {only: attributes[only]}


def _lookup(owner: Any, attribute: str) -> Callable[..., Any] | None:
    """Return torch's function `owner.attribute`, or None."""
    found = attributes_of(owner).get(attribute) if isinstance(owner, types.ModuleType) else getattr(owner, attribute, None)
    if found is None and owner is torch_private.vf and attribute in torch_private.CALLED_IN_VF:
        found = getattr(torch_private.variable_functions, attribute, None)
    if type(found) in _WRITTEN_IN_C:
        return found
    if found is None or not callable(found) or isinstance(found, type):
        return None
    return _told_apart(unpatched_op(found))


def _told_apart(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `function`, if that equals another, as a proxy of wrapt's equals what it wraps: a table holds both."""
    kind: Any = type(function)
    if kind.__module__ == "builtins" or kind.__eq__ is object.__eq__:
        return function
    if id(function) not in _equal_to_others:

        @functools.wraps(function)
        def calling(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        _equal_to_others[id(function)] = calling
    return _equal_to_others[id(function)]


def as_held(function: Any) -> Any:
    """Return the object that names hold for the `original` of a site: the function itself, or the one that equals another."""
    inner = getattr(function, "__wrapped__", None)
    return inner if _equal_to_others.get(id(inner)) is function else function


_equal_to_others: dict[int, Callable[..., Any]] = {}
_clears.append(_equal_to_others.clear)


@cached
def _places() -> dict[str, list[tuple[str, Any, str]]]:
    """Return id → (where, namespace, attribute) of each name that may be an op's. Most aren't, and are looked up when asked for."""
    found: dict[str, list[tuple[str, Any, str]]] = {}
    for where, owner, prefix in NAMESPACES:
        names = dict.fromkeys(name for name in attributes_of(owner) if not name.startswith("__"))
        if owner is torch.Tensor:
            names |= dict.fromkeys((*(name for name in vars(TensorBase) if not name.startswith("__")), *table.DUNDERS))
            del names["unfold"]  # another op than F.unfold
        elif owner is torch_private.vf:
            names |= dict.fromkeys(torch_private.CALLED_IN_VF)
        for attribute in names:
            found.setdefault(op_id(attribute, prefix), []).append((where, owner, attribute))
    return found


@cached
def sites_of(op: str) -> tuple[Site, ...]:
    """Return the sites of the op with this id, without those of its reflected and in-place forms, which have ids of their own."""
    found = _as_found(op)
    return (*found, *[site for site in _by_others.values() if site.op == op]) if _by_others else found


@cached
def _as_found(op: str) -> tuple[Site, ...]:
    sites = []
    for where, owner, attribute in _places().get(op, ()):
        original = _lookup(owner, attribute)
        if original is not None:
            sites.append(Site(owner, attribute, original, where, op))
    namespace, _, name = op.rpartition(".")
    for where, owner, prefix in BUILTIN_NAMESPACES:
        for attribute in (f"{namespace}_{name}", f"_{namespace}_{name}", f"_{name}") if prefix == namespace + "." else ():
            original = _lookup(owner, attribute)
            if original is not None and any(original is site.original for site in sites):
                sites.append(Site(owner, attribute, original, where, op))
    _found.extend(sites)
    return tuple(sites)


_found: list[Site] = []  # all that `_as_found` has given
# What other code has put there while hmp had patched torch, as ZeRO-3 does with F.linear. By the owner's id and the attribute.
_by_others: dict[tuple[int, str], Site] = {}
_clears += [_found.clear, _by_others.clear]


def look_again() -> bool:
    """Add the Python functions that other code has put in the places of ops since hmp looked there. Return True if there are any."""
    before = dict(_by_others)
    for site in _found:
        found = vars(site.owner).get(site.attribute)
        place = id(site.owner), site.attribute
        known = site.original if place not in _by_others else _by_others[place].original
        if type(found) is types.FunctionType and found is not known and found is not site.original and not _is_hmps(found):
            _by_others[place] = Site(site.owner, site.attribute, found, site.where, site.op)
    if _by_others != before:
        sites_of.cache_clear()  # type: ignore[attr-defined]
        return True
    return False


def _is_hmps(function: types.FunctionType) -> bool:
    return str(function.__globals__.get("__name__")).startswith("hmp.")


@cached
def relatives(op: str) -> tuple[str, ...]:
    """Return the ids that follow `op` while unlisted: its synonyms, and the reflected, in-place and namespaced forms of all of them."""
    found, ids = [], _places()
    for name in (op, *synonyms(op)):
        if name != op and name not in found:
            found.append(name)
        derived = [name + "_", "r" + name, "i" + name, "special." + name, "linalg." + name, "sparse." + name]
        found += [d for d in derived if d in ids and d not in found and sites_of(d) and base_of(d) == name]
    return tuple(found)


@cached
def every_op() -> tuple[str, ...]:
    """Return the ids of all ops of torch that take a tensor, sorted."""
    found, aten = set[str](), aten_names()
    for op, places in _places().items():
        known_as = (op.replace(".", "_"), *table.SYNONYMS.get(op, ()))
        for _, owner, attribute in places:
            dunder = attribute in table.DUNDERS
            function = None if attribute.startswith("_") and not dunder else _lookup(owner, attribute)
            python = isinstance(function, types.FunctionType) and owner is not torch.Tensor and function.__module__ in PYTHON_OPS
            if function is not None and ("." in op or python or dunder or not aten.isdisjoint(known_as)):
                found.add(op)
    return tuple(sorted(found))


@functools.cache
def aten_names() -> frozenset[str]:
    """Return the names of ATen's ops that take a tensor."""
    schemas = (s for s in torch_private.all_schemas() if s.name.startswith("aten::"))
    return frozenset(s.name.removeprefix("aten::") for s in schemas if takes_tensor([s]))


def starred() -> Iterator[str]:
    """Yield the ids of the ops that `*` stands for: not views, dtype ops, structure, ops that create tensors, nor in-place forms."""
    left_out = table.DTYPE_OPS | table.VIEWS | table.NOT_COMPUTED | table.STRUCTURE
    for op in every_op():
        last = op.rpartition(".")[2]
        if op not in left_out and last not in left_out and not op.endswith("_") and not last.startswith(("is_", "rand", "register_")):
            yield op


def op_of(function: Any) -> str | None:
    """Return the id of the op that `function` is, torch's own or hmp's replacement of it; None for any other function."""
    function = unpatched_op(function)
    function = _equal_to_others.get(id(function), function)
    name = str(getattr(function, "__name__", ""))
    prefixes = [prefix for _, _, prefix in NAMESPACES if prefix]
    # linalg.norm is called linalg_norm
    ids = (op_id(name, ""), *(prefix + name.removeprefix(prefix.replace(".", "_")) for prefix in prefixes))
    return next((op for op in ids if any(site.original is function for site in sites_of(op))), None)


def function_site(owner: Any, attribute: str, where: str, op: str) -> Site | None:
    """Return the site of a user's function `owner.attribute`, also of a static or class method's; None if it isn't a function."""
    found = inspect.getattr_static(owner, attribute, None)
    if not isinstance(owner, (type, types.ModuleType)) and attribute not in getattr(owner, "__dict__", {}):
        found = None  # a method of an instance's class: the site is the method bound to this instance, not what all instances share
    found = getattr(owner, attribute, None) if found is None else getattr(found, "__func__", found)
    return Site(owner, attribute, unpatched_op(found), where, op) if callable(found) and not isinstance(found, type) else None


def takes_tensor(schemas: Iterable[Any]) -> bool:
    """Return True if one of these schemas of ATen has a parameter that holds tensors."""
    return any("Tensor" in str(argument.type) for schema in schemas for argument in schema.arguments)
