"""The exceptions that hmp raises. Every message says where the problem is, what it is, and the remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def to_install(extra: str) -> str:
    """The commands that add an extra: hmp is on no index yet, and the `hmp` that the index has is something else."""
    return f"pip install -e '.[{extra}]' in hmp's checkout, or pip install 'hmp-torch[{extra}]' once it is released"


def is_interrupt(error: BaseException | None) -> bool:
    """Whether Ctrl-C is what ended it: what was being imported or called may have made another error of it."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False


class HmpError(Exception):
    """The base class of hmp's exceptions; itself raised for wrong arguments and for calls that are not possible now."""


class OpListError(HmpError, ValueError):
    """A list of ops that cannot be used. `path` and `line` (from 1) say where; None where that is not known."""

    def __init__(self, message: str, path: str | Path | None = None, line: int | None = None) -> None:
        self.path = None if path is None else str(path)
        self.line = line
        where = "" if path is None else f"{path}: " if line is None else f"{path}:{line}: "
        super().__init__(where + message)


class NonFiniteError(HmpError):
    """An op computed NaN or Inf from finite inputs, or the data contained one. `finding` says which op, where, and what to try."""

    def __init__(self, message: str, finding: Any = None) -> None:
        self.finding = finding
        super().__init__(message)


class ViolationError(HmpError, AssertionError):
    """A call ran otherwise than the line of its list says. `report` is the recording, whose violations() the message names."""

    def __init__(self, message: str, report: Any = None) -> None:
        self.report = report
        super().__init__(message)
