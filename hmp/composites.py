"""Which ops the Python code of a torch function calls: whether it needs casts off inside (R8)."""

from __future__ import annotations

import dis
import functools
import types
from typing import Any

from . import patches

_OPERATORS = {"+": "add", "-": "sub", "*": "mul", "/": "truediv", "//": "floordiv", "%": "mod", "**": "pow", "@": "matmul"}
_COMPARISONS = ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__")


def names_called(function: types.FunctionType) -> frozenset[str]:
    """The attribute and function names, dunders of operators included, that running `function` may look up.

    Follows the helpers that it reaches by name in its own module and through its closure. Too many names rather than too few.
    """
    names: set[str] = set()
    todo: list[Any] = [function]
    done: set[types.CodeType] = set()
    while todo:
        current = patches.plain(todo.pop())
        if current.__code__ in done:
            continue
        done.add(current.__code__)
        used = _names_in(current.__code__)
        names |= used
        todo += [cell.cell_contents for cell in current.__closure__ or () if isinstance(cell.cell_contents, types.FunctionType)]
        helpers = (current.__globals__.get(name) for name in used)
        todo += [h for h in helpers if isinstance(h, types.FunctionType) and h.__globals__ is current.__globals__]
    return frozenset(names)


@functools.cache
def _names_in(code: types.CodeType) -> frozenset[str]:
    names = set(code.co_names)
    instructions = code.co_code
    for position in range(0, len(instructions), 2):
        names.update(_dunders(instructions[position], instructions[position + 1]))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names_in(constant)
    return frozenset(names)


@functools.cache
def _dunders(opcode: int, argument: int) -> tuple[str, ...]:
    """The methods of Tensor that an instruction may call."""
    name = dis.opname[opcode]
    if name == "BINARY_OP":  # Python 3.11 and later; the argument says which operator
        symbol = dis._nb_ops[argument][1]  # type: ignore[attr-defined]
    elif name.startswith(("BINARY_", "INPLACE_")):  # Python 3.10: an instruction for each
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
    # 2.0 / x reaches the reflected method
    return (f"__i{op}__", f"__{op}__") if symbol.endswith("=") else (f"__{op}__", f"__r{op}__")


_WORDS = {
    "ADD": "+", "SUBTRACT": "-", "MULTIPLY": "*", "TRUE_DIVIDE": "/", "FLOOR_DIVIDE": "//", "MODULO": "%", "POWER": "**",
    "MATRIX_MULTIPLY": "@", "SUBSCR": "[",
}  # fmt: skip
