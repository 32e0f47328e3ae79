"""What lists call the function that a torch function mode is handed, and the names of the positional parameters of torch's functions."""

from __future__ import annotations

import ast
import functools
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch.overrides import resolve_name

from ..torch_private import schemas_of, variable_functions
from . import op_facts, sites
from .sites import PYTHON_OPS

# What may be before an op's name, the longest first.
_OWNERS = (
    *sorted((f"{where}." for where, _, prefix in sites.NAMESPACES if not prefix), key=len, reverse=True),
    "torch.functional.",
    f"{type(variable_functions).__name__}.",
)


def name_of(function: Any) -> str:
    """Return the id of the op that `function` is; "" for anything but an op: attributes, and functions that are structure (R8)."""
    name = sites.op_of(function) or resolve_name(function) or getattr(function, "__qualname__", "")
    if name.endswith((".__get__", ".__set__", ".__delete__")):
        return ""
    for prefix in _OWNERS:
        name = name.removeprefix(prefix)
    if name.startswith("__") and name.endswith("__"):
        name = op_facts.DUNDER_OPS.get(name[2:-2], name[2:-2])
    return "" if name in op_facts.STRUCTURE else name


# --- of parameters --------------------------------------------------------------------------------------------------------------


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
    longest: tuple[str, ...] = ()
    for schema in schemas_of("aten::" + op.replace(".", "_")):
        names = tuple(a.name for a in schema.arguments if not a.kwarg_only)
        if len(names) > len(longest) and "Dimname" not in str(schema):
            longest = names
    # Python calls the first argument of a function `input` where ATen says `self`
    return tuple("input" if name == "self" else name for name in longest)
