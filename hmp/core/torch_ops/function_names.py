"""What lists call the function that a torch function mode is handed."""

from __future__ import annotations

from typing import Any

from torch.overrides import resolve_name

from ..torch_private import variable_functions
from . import op_facts, sites

# What may stand before an op's name, the longest first.
_OWNERS = (
    *sorted((f"{where}." for where, _, prefix in sites.NAMESPACES if not prefix), key=len, reverse=True),
    "torch.functional.",
    f"{type(variable_functions).__name__}.",
)


def name_of(function: Any) -> str:
    """The id of the op that `function` is; "" for what is no op: attributes, and functions that are structure (R8)."""
    name = sites.op_of(function) or resolve_name(function) or getattr(function, "__qualname__", "")
    if name.endswith((".__get__", ".__set__", ".__delete__")):
        return ""
    for prefix in _OWNERS:
        name = name.removeprefix(prefix)
    if name.startswith("__") and name.endswith("__"):
        name = op_facts.DUNDER_OPS.get(name[2:-2], name[2:-2])
    return "" if name in op_facts.STRUCTURE else name
