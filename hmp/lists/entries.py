"""Text becomes rules: what a list file says, line by line, names as they are spelled."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, NamedTuple

from ..errors import OpListError

ListName = Literal["bf16", "fp32", "promote"]
CASTS: tuple[ListName, ...] = ("bf16", "fp32", "promote")
EVERY_OP = "*"
# Behind an op's name: torch.autocast decides inside it.
AUTOCAST = ".autocast"

_NAME = re.compile(r"[A-Za-z_][\w:]*(\.[A-Za-z_]\w*)*")
_SCOPE = re.compile(r"[^\s@,#]+")


class ListEntry(NamedTuple):
    """One name on one list: its spelling, the list, the place it was read from (line counts from 1), and its scope: a glob over the
    paths of a model's modules, None for everywhere."""

    name: str
    cast: ListName
    path: str | None = None
    line: int | None = None
    scope: str | None = None

    @property
    def text(self) -> str:
        """The entry as list files spell it."""
        return self.name if self.scope is None else f"{self.name} @ {self.scope}"

    @property
    def is_autocasts(self) -> bool:
        """Whether it says that torch.autocast decides inside the op."""
        return self.name.endswith(AUTOCAST)

    @property
    def place(self) -> str:
        """`path:line`, what of it is known."""
        return "" if self.path is None else self.path if self.line is None else f"{self.path}:{self.line}"


def parse_list(text: str, cast: ListName, path: str | Path | None = None) -> tuple[ListEntry, ...]:
    """The rules in `text`, in order: `name` or `name @ scope` a line or between commas; `#` starts a comment, `*` is every other op.

    Raises OpListError with path and line for what cannot be an op's name or a scope.
    """
    where = None if path is None else str(path)
    rules = []
    for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), start=1):
        for word in line.split("#", 1)[0].split(","):
            if word.strip():
                rules.append(parse_entry(word, cast, where, number))
    return tuple(rules)


def parse_entry(text: str, cast: ListName, path: str | None = None, line: int | None = None) -> ListEntry:
    """The rule that one entry of a list is. OpListError for what cannot be an op's name or a scope."""
    name, at, scope = (part.strip() for part in text.partition("@"))
    if at and not name:
        raise OpListError(f"{text.strip()!r} names no op; write the op before the '@', such as 'softmax @ decoder.*'", path, line)
    if name != EVERY_OP and not _NAME.fullmatch(name):
        raise OpListError(f"{name!r} is no op name; write one name a line, such as 'linear', and put '#' before remarks", path, line)
    if at and not _SCOPE.fullmatch(scope):
        what = f"{scope!r} is no glob over module paths" if scope else "there is none"
        raise OpListError(
            f"{text.strip()!r} has a scope, and {what}; write one after the '@', without blanks, such as '{name} @ decoder.*'", path, line
        )
    return ListEntry(name, cast, path, line, scope if at else None)


def read_list(path: str | Path, cast: ListName) -> tuple[ListEntry, ...]:
    """The rules in the file at `path` (UTF-8). An empty file is an empty list; OpListError for what is no text file."""
    file = Path(path)
    if file.is_dir():
        raise OpListError(f"is a folder; name the {cast} list file inside it, or load the folder with hmp.Policy.load", file)
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        raise OpListError('no such file; give the path of a list file, or "" for the default list', file) from None
    except OSError as error:
        raise OpListError(f"cannot be read: {error.strerror or error}; check the path and its permissions", file) from error
    if b"\0" in data:
        raise OpListError("is a binary file; a list is plain text, one op name a line", file)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise OpListError("is not UTF-8 text; save the list as UTF-8", file, line) from None
    return parse_list(text, cast, file)
