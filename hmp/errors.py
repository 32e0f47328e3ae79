"""The exceptions that hmp raises. A message gives what was expected, what was found and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def to_install(extra: str) -> str:
    """Return the commands that install an extra: hmp is on no package index yet, and `hmp` on the index is another project."""
    return f"pip install -e '.[{extra}]' in hmp's checkout, or pip install 'hmp-torch[{extra}]' once it is released"


def is_interrupt(error: BaseException | None) -> bool:
    """Return True if Ctrl-C caused the error, also where a library has raised another exception from it."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False


__all__ = ["HmpError", "NonFiniteError", "OpListError", "ViolationError"]


class HmpError(Exception):
    """Base class of hmp's exceptions, itself raised for wrong arguments and for calls that are not possible now.

    Example:
        >>> try:
        ...     hmp.apply("model.pt")
        ... except hmp.HmpError as error:
        ...     print(type(error).__name__)
        HmpError
    """


class OpListError(HmpError, ValueError):
    """A list of ops that cannot be used.

    Args:
        message: What is wrong with the list.
        path: The list file, or None if the list does not come from a file. The message starts with it.
        line: The line in the file, from 1, or None if the error is not about one line.

    Attributes:
        path: The list file as a string, or None.
        line: The line, from 1, or None.

    Example:
        >>> try:
        ...     hmp.Policy.from_dict({"name": "mine", "bf16": ["linaer"]})
        ... except hmp.errors.OpListError as error:
        ...     print(error.path, error.line)
        None None
    """

    def __init__(self, message: str, path: str | Path | None = None, line: int | None = None) -> None:
        self.path = None if path is None else str(path)
        self.line = line
        where = "" if path is None else f"{path}: " if line is None else f"{path}:{line}: "
        super().__init__(where + message)


class NonFiniteError(HmpError):
    """An op computed NaN or Inf from finite inputs, or the data contained one. `hmp.detect_nonfinite()` raises it.

    Args:
        message: The op, its place, and what to try.
        finding: The same as an object.

    Attributes:
        finding: The op, its module and line, its inputs and output, and what to try.

    Example:
        >>> try:
        ...     with hmp.detect_nonfinite():
        ...         torch.log(torch.tensor([0.0]))
        ... except hmp.NonFiniteError as error:
        ...     print(error.finding.op)
        log
    """

    def __init__(self, message: str, finding: Any = None) -> None:
        self.finding = finding
        super().__init__(message)


class ViolationError(HmpError, AssertionError):
    """A call did not follow its list. `hmp.verify()` and `verify=True` of the trainers' bridges raise it.

    Args:
        message: The calls, each with its op, place and reason.
        report: The recording in which they were found.

    Attributes:
        report: The `hmp.types.Report` of the recording; `report.violations()` has the calls.

    Example:
        >>> head = torch.nn.Linear(4, 2)
        >>> head.forward = hmp.disable_casts(head.forward)
        >>> try:
        ...     report = hmp.verify(head, torch.ones(1, 4), "habana")
        ... except hmp.errors.ViolationError as error:
        ...     print(len(error.report.violations()))
        1
    """

    def __init__(self, message: str, report: Any = None) -> None:
        self.report = report
        super().__init__(message)
