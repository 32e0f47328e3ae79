"""torch functions that are written in Python and call other ops: inside them casts must be off (R8)."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Collection, Iterator
from typing import Any

from ..patching import unpatched_op
from ..torch_private import OF_ONE_OP
from . import op_facts, sites
from .sites import Site

_OPERATORS = {"+": "add", "-": "sub", "*": "mul", "/": "truediv", "//": "floordiv", "%": "mod", "**": "pow", "@": "matmul"}
_COMPARISONS = ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__")


def calling(changed: Collection[str], decided: Collection[Any]) -> Iterator[Site]:
    """Yield the sites of torch's Python functions that may call an attribute named in `changed` and are not in `decided` (R8)."""
    for site in _python_ops():
        function: Any = site.original
        is_called = site.owner in OF_ONE_OP or not names_called(function).isdisjoint(changed)  # a higher-order op calls what it is given
        if is_called and function not in decided:
            yield site


@sites.cached
def _python_ops() -> tuple[Site, ...]:
    """Return the sites of all ops that torch implements in Python."""
    found = []
    for where, owner, _ in sites.NAMESPACES:
        attributes = sites.attributes_of(owner)
        # of a module its functions alone: to look at each of its names takes ten times as long
        names = (
            sorted(n for n, v in attributes.items() if isinstance(v, types.FunctionType))
            if isinstance(owner, types.ModuleType)
            else dir(owner)
        )
        for attribute in names:
            if (attribute.startswith("_") and attribute not in op_facts.DUNDERS) or attribute in op_facts.STRUCTURE:
                continue
            here = attributes[attribute] if attribute in attributes else getattr(owner, attribute, None)
            function = unpatched_op(here)
            if isinstance(function, types.FunctionType) and function.__module__ in sites.PYTHON_OPS:
                found.append(Site(owner, attribute, function, where, attribute))
    return tuple(found)


@sites.cached
def names_called(function: types.FunctionType) -> frozenset[str]:
    """Return the names of functions and attributes that a call of `function` may look up, with the dunders of its operators: a superset.

    Those of the helpers in its own module and in its closure are included.
    """
    names: set[str] = set()
    todo = [function]
    done: set[types.FunctionType] = set()
    while todo:
        current = todo.pop()
        if current not in done:
            done.add(current)
            used, helpers = _used_by(current)
            names |= used
            todo += helpers
    return frozenset(names)


@sites.cached
def _used_by(function: types.FunctionType) -> tuple[frozenset[str], tuple[types.FunctionType, ...]]:
    """Return the names in the code of `function`, and the functions of its own module and its closure that it may call."""
    names = _names_in(function.__code__)
    found = [function.__globals__[name] for name in names & function.__globals__.keys()]
    helpers = [h for h in found if isinstance(h, types.FunctionType) and h.__globals__ is function.__globals__]
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    return names, (*helpers, *[c for c in cells if isinstance(c, types.FunctionType)])


@functools.cache
def _names_in(code: types.CodeType) -> frozenset[str]:
    names = set(code.co_names)
    instructions = code.co_code
    opcodes, arguments = instructions[::2], instructions[1::2]
    for opcode in _OPCODES:
        position = opcodes.find(opcode)
        while position >= 0:
            names.update(_dunders(opcode, arguments[position]))
            position = opcodes.find(opcode, position + 1)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names_in(constant)
    return frozenset(names)


@functools.cache
def _dunders(opcode: int, argument: int) -> tuple[str, ...]:
    """Return the dunder methods of Tensor that a bytecode instruction may call."""
    name = dis.opname[opcode]
    if name == "BINARY_OP":  # Python 3.11 and later: its argument says which operator
        symbol = dis._nb_ops[argument][1]  # type: ignore[attr-defined]
    elif name.startswith(("BINARY_", "INPLACE_")):  # Python 3.10: one instruction for each operator
        kind, _, word = name.partition("_")
        symbol = _WORDS.get(word, "") + ("=" if kind == "INPLACE" else "")
    elif name == "COMPARE_OP":
        return _COMPARISONS
    else:
        return {"UNARY_NEGATIVE": ("__neg__",), "STORE_SUBSCR": ("__setitem__",)}.get(name, ())
    if symbol.startswith("["):
        return ("__getitem__",)
    op = _OPERATORS.get(symbol.removesuffix("="))
    if op is None:
        return ()
    # 2.0 / x calls the reflected method, __rtruediv__
    return (f"__i{op}__", f"__{op}__") if symbol.endswith("=") else (f"__{op}__", f"__r{op}__")


_WORDS = {
    "ADD": "+", "SUBTRACT": "-", "MULTIPLY": "*", "TRUE_DIVIDE": "/", "FLOOR_DIVIDE": "//", "MODULO": "%", "POWER": "**",
    "MATRIX_MULTIPLY": "@", "SUBSCR": "[",
}  # fmt: skip
# The instructions for which _dunders() may return something.
_OPCODES = tuple(
    opcode
    for opcode, name in enumerate(dis.opname[:256])
    if name.startswith(("BINARY_", "INPLACE_")) or name in ("COMPARE_OP", "UNARY_NEGATIVE", "STORE_SUBSCR")
)
