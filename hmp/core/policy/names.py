"""The ids of the ops that a name means, in any of the spellings that lists, `explain()` and the command line accept."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from ...errors import OpListError
from .. import lists
from ..log import log_once
from ..ops import sites, table
from ..ops.sites import NAMESPACES, PYTHON_OPS, Site, aten_names, every_op, function_site, op_id, op_of, sites_of, takes_tensor
from ..torch_private import IN_VARIABLE_FUNCTIONS, schemas_of
from .entries import AUTOCAST, EVERY_OP, ListEntry, error_at
from .presets import home

_PREFIXES = ("torch.nn.functional.", "nn.functional.", "F.", "torch.Tensor.", "Tensor.", "torch.ops.aten.", "aten::", "aten.", "torch.")


def _user_site(name: str) -> Site | None:
    """Return the site of the user's function at a dotted path, whose module is imported; None where there is no such function."""
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:cut])
        try:
            owner: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
                continue
            raise
        for part in parts[cut:-1]:
            owner = getattr(owner, part, None)
        if any(owner is namespace for _, namespace, _ in NAMESPACES):
            return None  # torch.save: torch's, so no user's function, and no op either
        return function_site(owner, parts[-1], ".".join(parts[:-1]), name)
    return None


@sites.cached
def _known(name: str) -> tuple[str, ...]:
    """Return the ids of the ops that `name` means; () if only another release or ATen has it. Raise KeyError for an unknown name."""
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            name = name.removeprefix(prefix)
            break
    if name.startswith("__") and name.endswith("__"):
        name = op_id(name, "")
    elif name in ("idiv", "rdiv"):
        name = table.DUNDER_OPS[name]
    overloaded = name.partition(".")[0]
    for spelling in dict.fromkeys((name, overloaded)):
        itself = (spelling,) if _is_op(spelling) else ()
        if itself or spelling in table.ATEN_SPELLINGS:
            return table.ATEN_SPELLINGS.get(spelling, ()) + itself
        for prefix in filter(None, (prefix for _, _, prefix in NAMESPACES)):
            for candidate in (prefix + spelling, prefix + spelling.removeprefix(prefix.replace(".", "_"))):
                if _is_op(candidate):
                    return (candidate,)
    for spelling in (name, overloaded):
        if spelling in table.FOREIGN or spelling in aten_names() or spelling.removesuffix("_backward") in aten_names():
            return ()
    raise KeyError(name)


def _is_op(name: str) -> bool:
    """Return True if `name` is the id of an op: not all of torch's functions are, such as torch.save."""
    found = sites_of(name)
    if any(site.owner is not torch or name in IN_VARIABLE_FUNCTIONS for site in found):
        return True
    return any(site.original.__module__ in PYTHON_OPS if site.python else takes_tensor(schemas_of("aten::" + name)) for site in found)


def ops_of(entry: ListEntry) -> tuple[str, ...]:
    """Return the ids of the ops that the entry's name means: for a user's own function its dotted name, for `*` "*".

    Raises OpListError with path, line and the nearest ids for an unknown name, and for one that this kind of list can't have. For a name
    that only another release of torch, ATen or Habana's compiler has it returns () and warns once.
    """
    kind = lists.kind_of(entry.list_name)
    if entry.is_autocasts and entry.list_name != "bf16":
        name = entry.name.removesuffix(AUTOCAST)
        raise error_at(entry, f"{entry.name!r} belongs on the BF16 list, got it on the {kind.title} list; for that one write {name!r}")
    ops = (EVERY_OP,) if entry.name == EVERY_OP else _named(entry)
    if refusal := kind.refusal(entry, ops):
        raise error_at(entry, refusal)
    if not kind.takes_functions and any(op != EVERY_OP and not sites_of(op) for op in ops):
        expected = f"the {kind.title} list expected an op of torch, got your function {entry.name!r}; name the ops that it calls"
        raise error_at(entry, expected)
    return ops


def by_op(entries: Iterable[ListEntry]) -> dict[str, ListEntry]:
    """Return op id → the entry that names the op: one with the op's own name, else the first."""
    found: dict[str, ListEntry] = {}
    for entry in entries:
        for op in ops_of(entry):
            if op not in found or op == entry.name:
                found[op] = entry
    return found


def with_relatives(ops: Iterable[str]) -> Iterator[str]:
    """Yield each of the ops, and after it its synonyms and its in-place and reflected forms."""
    for op in ops:
        yield op
        yield from sites.relatives(op)


def is_op(name: str) -> bool:
    """Return True if the name is that of an op, in any of its spellings and of any release."""
    try:
        _known(name.removesuffix(AUTOCAST))
    except KeyError:
        return name == EVERY_OP
    return True


def can_be_listed(op: str) -> bool:
    """Return True if a list may hold `op` by this name, and decides by it.

    An op of torch's or a user's function, and no in-place form.
    """
    if op.endswith("_") or op in table.DTYPE_OPS or (op[:1] == "i" and op[1:] in table.BINARY_DUNDERS):
        return False
    try:
        return op in _known(op)
    except KeyError:
        return "." in op and _user_site(op) is not None


def _named(entry: ListEntry) -> tuple[str, ...]:
    try:
        ops = _known(entry.name.removesuffix(AUTOCAST))
    except KeyError:
        site = _user_site(entry.name) if "." in entry.name else None
        if site is None:
            raise _unknown(entry) from None
        own = op_of(site.original)
        if own is not None:
            raise error_at(entry, f"expected the op's own name {own!r}, got {entry.name!r}; write {own!r}") from None
        return (entry.name,)
    if not ops:
        _warn_skipped(entry.path, entry.place, entry.name)
    return ops


def user_site(name: str) -> Site:
    """Return the site of the user's function at the dotted path `name`. Raise OpListError where it cannot be found."""
    site = _user_site(name)
    if site is None:
        raise OpListError(f"the function {name!r} of a list is gone; import the module that defines it")
    return site


def _unknown(entry: ListEntry) -> OpListError:
    name = entry.name.removeprefix("torch.")
    near = difflib.get_close_matches(name.removesuffix(AUTOCAST), [op for op in every_op() if not op.endswith("_")])
    likeness = [difflib.SequenceMatcher(None, op, name).ratio() for op in near]
    near = [op for op, each in zip(near, likeness, strict=True) if each > likeness[0] - 0.1]  # others are much further
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "hmp.explain(NAME) and `python -m hmp lists` show what there is"
    what = "op or importable function" if "." in name else "op"
    return error_at(entry, f"unknown {what} {entry.name!r}; {hint}")


def _warn_skipped(path: str | None, place: str, name: str) -> None:
    if path is None or not Path(path).is_relative_to(home()):  # hmp's own lists contain the ops of every release of torch
        said = "%s%r is not an op of torch %s and is skipped; other releases or compilers know it"
        log_once(said, f"{place}: " if place else "", name, torch.__version__)
