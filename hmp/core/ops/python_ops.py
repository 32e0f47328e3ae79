"""torch's functions: those written in Python that call other ops, which are one op each; the ids and parameters of all."""

from __future__ import annotations

import ast
import dis
import functools
import types
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch.overrides import resolve_name

from ..patching.patched_op import unpatched_op
from ..torch_private import OF_ONE_OP, schemas_of, variable_functions
from . import sites, table
from .sites import PYTHON_OPS, Site

# --- Python functions that may call a listed op ------------------------------------------------------------------------------------

# Instruction of Python's bytecode → the dunder methods of Tensor that it may call.
_DUNDERS: dict[str, tuple[str, ...]] = {
    "COMPARE_OP": ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__"),
    "UNARY_NEGATIVE": ("__neg__",),
    "BINARY_SUBSCR": ("__getitem__",),
    "STORE_SUBSCR": ("__setitem__",),
}
for _word, _op in (
    ("ADD", "add"), ("SUBTRACT", "sub"), ("MULTIPLY", "mul"), ("TRUE_DIVIDE", "truediv"), ("FLOOR_DIVIDE", "floordiv"),
    ("REMAINDER", "mod"), ("MODULO", "mod"), ("POWER", "pow"), ("MATRIX_MULTIPLY", "matmul"),
):  # fmt: skip
    _DUNDERS[f"BINARY_{_word}"] = (f"__{_op}__", f"__r{_op}__")  # 2.0 / x calls __rtruediv__
    _DUNDERS[f"INPLACE_{_word}"] = (f"__i{_op}__", f"__{_op}__")
_OPCODES = tuple(opcode for opcode, name in enumerate(dis.opname[:256]) if name == "BINARY_OP" or name in _DUNDERS)


def calling(changed: Collection[str], decided: Collection[Any]) -> Iterator[Site]:
    """Yield the sites of torch's Python functions that may call an attribute named in `changed` and are not in `decided`."""
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
        for attribute, held in sites.attributes_of(owner).items():
            if (attribute.startswith("_") and attribute not in table.DUNDERS) or attribute in table.STRUCTURE:
                continue
            function = unpatched_op(held)
            if isinstance(function, types.FunctionType) and function.__module__ in PYTHON_OPS:
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
    """Return the dunder methods of Tensor that an instruction may call."""
    name = dis.opname[opcode]
    if name == "BINARY_OP":  # Python 3.11 and later: its argument says which operator, NB_ADD or NB_INPLACE_ADD
        operator = dis._nb_ops[argument][0].removeprefix("NB_")  # type: ignore[attr-defined]
        name = operator if operator.startswith("INPLACE_") else f"BINARY_{operator}"
    return _DUNDERS.get(name, ())


# --- names of ops --------------------------------------------------------------------------------------------------------------

# What may be before an op's name, the longest first.
_OWNERS = (
    *sorted((f"{where}." for where, _, prefix in sites.NAMESPACES if not prefix), key=len, reverse=True),
    "torch.functional.",
    f"{type(variable_functions).__name__}.",
)


def name_of(function: Any) -> str:
    """Return the id of the op that `function` is; "" for anything but an op: attributes, and functions that are structure."""
    name = sites.op_of(function) or resolve_name(function) or getattr(function, "__qualname__", "")
    if name.endswith((".__get__", ".__set__", ".__delete__")):
        return ""
    for prefix in _OWNERS:
        name = name.removeprefix(prefix)
    name = sites.op_id(name, "")
    return "" if name in table.STRUCTURE else name


# --- parameters --------------------------------------------------------------------------------------------------------------


@functools.cache
def _declared_in_functional() -> dict[str, tuple[str, ...]]:
    """Return the positional parameters of each function in torch.nn.functional, by torch's source, in case it is patched."""
    tree = ast.parse(Path(F.__file__).read_text(encoding="utf-8"))
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    return {f.name: tuple(a.arg for a in (*f.args.posonlyargs, *f.args.args)) for f in functions}


def parameters(original: Callable[..., Any], op: str) -> tuple[str, ...]:
    """Return the names of the positional parameters of the torch function `original`, in order; () where they cannot be found."""
    if isinstance(original, types.FunctionType):
        code = original.__code__
        if code.co_argcount:
            return code.co_varnames[: code.co_argcount]
        if original.__module__ not in PYTHON_OPS and op in _declared_in_functional():
            return _declared_in_functional()[op]  # another library replaced torch's function with one of (*args, **kwargs)
    return _parameters_in_schemas(op)


@functools.cache
def _parameters_in_schemas(op: str) -> tuple[str, ...]:
    schemas = (schema for schema in schemas_of("aten::" + op.replace(".", "_")) if "Dimname" not in str(schema))
    longest = max((tuple(a.name for a in schema.arguments if not a.kwarg_only) for schema in schemas), key=len, default=())
    # Python calls the first argument of a function `input` where ATen says `self`
    return tuple("input" if name == "self" else name for name in longest)
