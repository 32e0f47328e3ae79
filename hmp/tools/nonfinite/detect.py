"""detect_nonfinite(): the first op, forward or backward, that turned finite numbers into NaN or Inf."""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any, Literal

import torch

from ...core.log import log
from ...core.observe import listen
from ...errors import HmpError, NonFiniteError
from .finding import Finding
from .watcher import NonfiniteFinder


class Findings(list[Finding]):
    """What a context has found so far, in order; one for each op and line."""


def detect_nonfinite(
    on_find: Literal["raise", "log"] = "raise", *, ignore: Collection[str] = ()
) -> contextlib.AbstractContextManager[Findings]:
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
        A context manager that gives the findings so far.

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
    return _region(on_find, _meant(ignore))


@contextlib.contextmanager
def _region(on_find: str, meant: Callable[[Finding], bool]) -> Iterator[Findings]:
    findings = Findings()
    said: set[Any] = set()

    def report(finding: Finding) -> None:
        key = (finding.kind, finding.op, finding.aten, finding.direction, finding.module, finding.file, finding.line, finding.source)
        if key in said:
            return
        said.add(key)
        finding = replace(finding, rank=_rank_of_several())
        findings.append(finding)
        if on_find == "raise":
            raise NonFiniteError(str(finding), finding)
        log.error("%s", finding)

    watcher = NonfiniteFinder(report, meant)
    with listen(watcher):
        yield findings
    # only where nothing was raised
    watcher.close()


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
