"""detect_nonfinite(): the first op, forward or backward, that turned finite numbers into NaN or Inf."""

from __future__ import annotations

import contextlib
import fnmatch
import types
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, Literal

import torch

from ...core.log import PACKAGES, log
from ...core.observe import listen
from ...errors import HmpError, NonFiniteError
from .finding import Finding
from .watcher import NonfiniteFinder


def detect_nonfinite(
    on_find: Literal["raise", "log"] = "raise", *, ignore: Collection[str] = ()
) -> contextlib.AbstractContextManager[list[Finding]]:
    """Find the first op that makes NaN or Inf out of finite arguments, in forward or backward; context manager and decorator.

    It works under hmp's casts, under torch.autocast and in plain torch. If bmm makes an Inf, and softmax a NaN out of it, bmm is the
    finding. A NaN in the data or in a parameter is reported when an op first computes with it. Not reported are:

    - infinities that the program writes (masks, fills for sampling), and uninitialised memory;
    - values that an op or its backward makes and then masks itself (the norm of zero);
    - Inf computed from integers (the log of a position 0), until it becomes a NaN;
    - overflows in backward if the GradScaler skips the step.

    A NaN that comes only from infinities that the program wrote is logged as a warning.

    Each process watches its own ops, and a finding has its `rank`. If one process raises, the others wait in their next collective until
    torchrun or torch.multiprocessing.spawn ends them.

    Only ops of the thread that entered are watched, and no values inside a kernel; compiled models run uncompiled. Each op's results are
    read once, which synchronises with a GPU.

    Args:
        on_find: "raise" stops at the first finding; "log" logs each as an error of the logger `hmp`, and continues.
        ignore: Op names, as findings have them, and globs over module paths, such as "masked_fill" and "*.mask", in which Inf is intended.
            A glob also covers the modules inside. A NaN is still reported.

    Returns:
        A context manager that gives the list of the findings so far, one for each op and line.

    Raises:
        NonFiniteError: With `.finding`, raised where the op ran.
        HmpError: `on_find` or `ignore` is invalid.

    Example:
        >>> x = torch.zeros(2)
        >>> with hmp.detect_nonfinite("log") as findings:
        ...     y = 1 / x
        >>> findings[0].made
        'Inf'
    """
    if on_find not in ("raise", "log"):
        raise HmpError(f'on_find= expected "raise" (stop at the first finding) or "log" (log each and continue), got {on_find!r}')
    if isinstance(ignore, str) or not isinstance(ignore, Collection) or not all(isinstance(each, str) for each in ignore):
        raise HmpError(f'ignore= expected a list of op names and globs over module paths, such as ["*.mask", "exp"], got {ignore!r}')
    return _Detection(on_find, _meant(ignore))


class _Detection(contextlib.ContextDecorator, contextlib.AbstractContextManager[list[Finding]]):
    """The context. Each call of a function that it decorates has one of its own."""

    def __init__(self, on_find: str, meant: Callable[[Finding], bool]) -> None:
        self._on_find, self._meant = on_find, meant

    def _recreate_cm(self) -> _Detection:
        return _Detection(self._on_find, self._meant)

    def __enter__(self) -> list[Finding]:
        self._findings: list[Finding] = []
        self._said: set[Any] = set()
        self._finder = NonfiniteFinder(self._report, self._meant)
        self._listening = listen(self._finder)
        self._listening.__enter__()
        return self._findings

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None) -> None:
        self._listening.__exit__(kind, error, trace)
        if error is None:
            self._finder.close()
        elif isinstance(error, NonFiniteError):
            error.__traceback__ = _to_users_line(trace)

    def _report(self, finding: Finding) -> None:
        key = (finding.kind, finding.op, finding.aten, finding.direction, finding.module, finding.file, finding.line, finding.source)
        if key in self._said:
            return
        self._said.add(key)
        finding = replace(finding, rank=_rank_of_several())
        self._findings.append(finding)
        if self._on_find == "raise":
            raise NonFiniteError(str(finding), finding)
        log.error("%s", finding)


def _to_users_line(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Return the traceback without hmp's frames, up to the user's last one. Python 3.10 shows all of them nevertheless."""
    frames: list[types.TracebackType] = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    shown = None
    for each in reversed(frames):
        if not each.tb_frame.f_code.co_filename.startswith(PACKAGES if shown is None else PACKAGES[0]):
            shown = types.TracebackType(shown, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return shown


def _meant(names: Collection[str]) -> Callable[[Finding], bool]:
    """Return the function that says whether a finding is of an op or of a module that is in `names`."""

    def is_meant(finding: Finding) -> bool:
        parts = finding.module.split(".")
        paths = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
        return not {finding.op, finding.aten}.isdisjoint(names) or any(
            fnmatch.fnmatchcase(path, glob) for path in paths if path for glob in names
        )

    return is_meant


def _rank_of_several() -> int | None:
    """Return the rank of this process, None where there is no other."""
    group = torch.distributed
    return group.get_rank() if group.is_available() and group.is_initialized() and group.get_world_size() > 1 else None
