"""Names that are on two lists: an op that one list has under one name, and another list under the same name or one of the same function."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..errors import OpListError
from ..ops import sites
from .entries import ListEntry, ListName

# An op may be on one of these only; the promote list gives way to both (R4).
RIVALS: Mapping[ListName, ListName] = {"bf16": "fp32", "fp32": "bf16"}


def same_op(ops: Iterable[str], listed: Mapping[str, ListEntry]) -> ListEntry | None:
    """The entry in `listed`, a list by its ops, for one of `ops`, under its own name or under another of the same function of torch's."""
    return next((listed[name] for op in ops for name in (op, *sites.namesakes(op)) if name in listed), None)


def refuse_both(bf16: Mapping[str, ListEntry], fp32: Mapping[str, ListEntry]) -> None:
    """OpListError for an op that is on the BF16 list and on the FP32 list."""
    for op in sorted(bf16):
        one, other = bf16[op], same_op((op,), fp32)
        if other is not None:
            also = f" ({other.place})" if other.path else ""
            spelled = f"{one.text!r}" if one.name == other.name else f"{one.text!r} and {other.text!r} are the same op, which"
            raise OpListError(f"{spelled} is on the BF16 list and on the FP32 list{also}; take it off one of them", one.path, one.line)
