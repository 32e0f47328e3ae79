"""The text of a list file as entries, with names as the file spells them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...errors import OpListError
from .. import lists
from ..casting import dtype_named

ListName = str  # of a kind of list, see `core.lists`
EVERY_OP = "*"
# The suffix of a name that means: torch.autocast decides inside this op.
AUTOCAST = ".autocast"

_NAME = re.compile(r"[A-Za-z_][\w:]*(\.[A-Za-z_]\w*)*")
_SCOPE = re.compile(r"[^\s@,#]+")


class ListEntry(NamedTuple):
    """A name on a list.

    `name` is as it is spelled, `path` and `line` (from 1) where it was, and `scope` a glob over the paths of a model's modules, None for
    every module.
    """

    name: str
    list_name: ListName
    path: str | None = None
    line: int | None = None
    scope: str | None = None

    @property
    def text(self) -> str:
        """Return the entry as list files spell it."""
        return self.name if self.scope is None else f"{self.name} @ {self.scope}"

    @property
    def about(self) -> str:
        """Return what the list decides of an op: the dtype that it runs in, which one list does, or what the list adds to that."""
        return self.list_name if lists.kind_of(self.list_name).adds else "dtype"

    @property
    def is_autocasts(self) -> bool:
        """Return True if the entry says that torch.autocast decides inside the op."""
        return self.name.endswith(AUTOCAST)

    @property
    def place(self) -> str:
        """Return the place as "path:line", "path" without a line, "" without either."""
        return "" if self.path is None else self.path if self.line is None else f"{self.path}:{self.line}"

    @property
    def source(self) -> str:
        """Return the entry as list files spell it, with its place where that is known."""
        return f"{self.text} ({self.place})" if self.path else self.text


def error_at(entry: ListEntry, message: str) -> OpListError:
    """Return the error with this message, with the entry's file and line."""
    return OpListError(message, entry.path, entry.line)


def parse_list(text: str, list_name: ListName, path: str | Path | None = None) -> tuple[ListEntry, ...]:
    """Return the entries in `text`, in order, where lines and commas separate them; `#` starts a comment.

    Raises OpListError with path and line for what cannot be an op's name or a scope.
    """
    where = None if path is None else str(path)
    entries = []
    for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), start=1):
        for word in line.split("#", 1)[0].split(","):
            if word.strip():
                entries.append(parse_entry(word, list_name, where, number))
    return tuple(entries)


def list_of(word: Any, low: Iterable[torch.dtype]) -> Any:
    """Return the list that a dtype means, given or named: "fp32", or "bf16" for one of `low`; any other word itself."""
    dtype = dtype_named(word, (torch.float32, *low))
    return word if dtype is None else "fp32" if dtype is torch.float32 else "bf16"


def parse_entry(text: str, list_name: ListName, path: str | None = None, line: int | None = None) -> ListEntry:
    """Return the entry that `text`, "name" or "name @ scope", spells. Raise OpListError for what cannot be an op's name or a scope."""
    name, at, scope = (part.strip() for part in text.partition("@"))
    if at and not name:
        raise OpListError(f"expected an op before the '@', got {text.strip()!r}; write for example 'softmax @ decoder.*'", path, line)
    if name != EVERY_OP and not _NAME.fullmatch(name):
        raise OpListError(
            f"expected the name of an op, such as 'linear', got {name!r}; write one a line, and '#' before remarks", path, line
        )
    if at and not _SCOPE.fullmatch(scope):
        raise OpListError(
            f"{text.strip()!r}: expected a glob over module paths after the '@', got {scope!r}; write for example '{name} @ decoder.*'",
            path,
            line,
        )
    return ListEntry(name, list_name, path, line, scope if at else None)


def checked_names(list_name: ListName, names: Any) -> Iterable[str]:
    """Return `names`, the list `list_name` as it was given. Raise OpListError for anything but a set of names."""
    found = tuple(names) if isinstance(names, Iterable) and not isinstance(names, str) else None
    if found is None or not all(isinstance(name, str) for name in found):
        given = names if found is None else found
        raise OpListError(
            f"{list_name}= expected a set of op names, got {given!r}; give for example {{'linear'}}, or a file to Policy.from_files()"
        )
    return found


def read_list(path: str | Path, list_name: ListName) -> tuple[ListEntry, ...]:
    """Return the entries in the file at `path`.

    An empty file is an empty list. Raise OpListError if it isn't a UTF-8 text file, or isn't a list.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise OpListError(f'the path of the {list_name} list: expected a string or a path, got {path!r}; give "" for the default list')
    file = Path(path)
    return parse_list(read_text(file), list_name, file)


# Those of each list that hmp reads, and Gaudi's autocast does: the first that is set counts.
VARIABLES: dict[str, tuple[str, ...]] = {
    "bf16": ("LOWER_LIST", "PT_HPU_AUTOCAST_LOWER_PRECISION_OPS_LIST"),
    "fp32": ("FP32_LIST", "PT_HPU_AUTOCAST_FP32_OPS_LIST"),
}


def list_from_env(list_name: ListName, environ: Mapping[str, str]) -> tuple[ListEntry, ...] | None:
    """Return the entries in the file that the first of the list's variables to be set names; None where all are unset or empty."""
    for variable in VARIABLES[list_name]:
        if environ.get(variable):
            try:
                return read_list(environ[variable], list_name)
            except OpListError as error:
                error.args = (f"{error} (from the environment variable {variable})",)
                raise
    return None


def read_text(file: Path) -> str:
    """Return the text of a list file, or of another in a policy's folder. Raise OpListError if it isn't a UTF-8 text file."""
    if os.path.isdir(file):
        raise OpListError("expected a text file, got a folder; give a file, or for a folder of lists policy=", file)
    try:
        data = file.read_bytes()
    except OSError as error:
        why = error.strerror or error
        raise OpListError(f'cannot be read: {why}; give the path of a list file, or "" for the default list', file) from error
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise OpListError("is not UTF-8 text; save the list as UTF-8", file, line) from None
