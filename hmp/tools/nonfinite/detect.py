"""detect_nonfinite(): the first op, forward or backward, that turned finite numbers into NaN or Inf."""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any, Literal

import torch

from ...core.observe import listen, log
from ...core.policy import ListEntry, resolve
from ...errors import HmpError, NonFiniteError, OpListError
from .finding import Finding
from .watcher import NonfiniteFinder


class Findings(list[Finding]):
    """What a context has found so far, in order; one for each op and line."""


def detect_nonfinite(
    on_find: Literal["raise", "log"] = "raise", *, ignore: Collection[str] = ()
) -> contextlib.AbstractContextManager[Findings]:
    """Find the first op that makes NaN or Inf out of finite arguments, in forward or backward; context manager and decorator.

    Works under hmp's casts, torch.autocast and neither. No findings: infinities that were written (masks, fills of sampling), memory
    that nobody wrote, what an op or its backward makes and masks in its inside (the norm of a zero), Inf that integers make (log of a
    position 0) until a NaN comes of it, and backward overflows of a scaled loss when the GradScaler skips the step. A NaN in the data or
    in a parameter is reported as what it is when an op first computes with it. A NaN that is made of written infinities alone is a
    warning. Inf in bmm is the finding, not the NaN that softmax makes of it.

    With several processes each watches its own ops, and a finding has its `rank`. One that raises leaves the others in the collective
    that they wait in: torchrun and torch.multiprocessing.spawn end them.

    Ops of other threads than the one that entered, and those inside a kernel, are not seen; compiled models run uncompiled. Each op's
    results are read once, and on a GPU waited for.

    Args:
        on_find: "raise" stops at the first finding, "log" goes on and logs each as an error of the logger `hmp`.
        ignore: Names of ops and globs over module paths, such as "masked_fill" and "*.mask", whose Infs are meant: they count as written.
            A glob holds in the modules inside too. NaNs are findings all the same.

    Returns:
        A context manager that gives the findings so far.

    Raises:
        NonFiniteError: With `.finding`, where the op ran.
        HmpError: For another `on_find`, and for anything but a list of names.

    Example:
        >>> x = torch.zeros(2)
        >>> with hmp.detect_nonfinite("log") as findings:
        ...     y = 1 / x
        >>> findings[0].made
        'Inf'
    """
    if on_find not in ("raise", "log"):
        raise HmpError(f'on_find= expected "raise" (stop at the first finding) or "log" (log each and continue), got {on_find!r}')
    if isinstance(ignore, str) or not all(isinstance(each, str) for each in ignore):
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
    """Return the function that says whether a finding is of an op, by one of its names, or of a module that is in `names`."""
    ops = {op for name in names for op in (name, *_synonyms(name))}

    def is_meant(finding: Finding) -> bool:
        parts = finding.module.split(".")
        paths = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
        return not ops.isdisjoint((finding.op, finding.aten)) or any(
            fnmatch.fnmatchcase(path, glob) for path in paths if path for glob in names
        )

    return is_meant


def _synonyms(name: str) -> tuple[str, ...]:
    try:
        return resolve(ListEntry(name, "fp32"))
    except OpListError:  # a module
        return ()


def _rank_of_several() -> int | None:
    """Return the rank of this process, None where there is no other."""
    group = torch.distributed
    return group.get_rank() if group.is_available() and group.is_initialized() and group.get_world_size() > 1 else None
