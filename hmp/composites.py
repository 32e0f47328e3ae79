"""Which ops the Python code of a torch function calls: whether it needs casts off inside (R8)."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterator
from typing import Any

from . import patches

_OPERATORS = {
    "+": "add", "-": "sub", "*": "mul", "/": "truediv", "//": "floordiv", "%": "mod", "**": "pow", "@": "matmul",
    "<": "lt", "<=": "le", ">": "gt", ">=": "ge", "==": "eq", "!=": "ne",
}  # fmt: skip
_OPCODES = {
    "UNARY_NEGATIVE": "__neg__",
    "BINARY_SUBSCR": "__getitem__",
    "STORE_SUBSCR": "__setitem__",
    "BINARY_ADD": "__add__",
    "BINARY_SUBTRACT": "__sub__",
    "BINARY_MULTIPLY": "__mul__",
    "BINARY_TRUE_DIVIDE": "__truediv__",
    "BINARY_FLOOR_DIVIDE": "__floordiv__",
    "BINARY_MODULO": "__mod__",
    "BINARY_POWER": "__pow__",
    "BINARY_MATRIX_MULTIPLY": "__matmul__",
    "INPLACE_ADD": "__iadd__",
    "INPLACE_SUBTRACT": "__isub__",
    "INPLACE_MULTIPLY": "__imul__",
    "INPLACE_TRUE_DIVIDE": "__itruediv__",
}


@functools.cache
def names_called(function: types.FunctionType) -> frozenset[str]:
    """The attribute and function names, dunders of operators included, that running `function` may look up.

    Follows the helpers that it reaches by name in its own module and through its closure. Too many names rather than too few.
    """
    names: set[str] = set()
    todo: list[Any] = [function]
    done: set[types.FunctionType] = set()
    while todo:
        current = todo.pop()
        if current in done:
            continue
        done.add(current)
        for cell in current.__closure__ or ():
            if isinstance(cell.cell_contents, types.FunctionType):
                todo.append(patches.plain(cell.cell_contents))
        for code in _codes(current.__code__):
            names.update(code.co_names)
            names.update(_dunders(code))
            for name in code.co_names:
                helper: Any = current.__globals__.get(name)
                if isinstance(helper, types.FunctionType) and helper.__globals__ is current.__globals__:
                    todo.append(patches.plain(helper))
    return frozenset(names)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _dunders(code: types.CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in _OPCODES:
            yield _OPCODES[instruction.opname]
        elif instruction.opname == "BINARY_OP":  # from Python 3.11 on; from 3.14 on `x[i]` is one as well
            symbol = instruction.argrepr
            if symbol.startswith("["):
                yield "__getitem__"
            name = _OPERATORS.get(symbol.removesuffix("="), "")
            yield f"__i{name}__" if symbol.endswith("=") else f"__{name}__"
            # 2.0 / x reaches the reflected method
            yield f"__r{name}__"
        elif instruction.opname == "COMPARE_OP":
            yield f"__{_OPERATORS.get(instruction.argrepr.removeprefix('bool(').removesuffix(')'), '')}__"
