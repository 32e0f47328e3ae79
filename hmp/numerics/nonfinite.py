"""detect_nonfinite(): the first op, forward or backward, that turned finite numbers into NaN or Inf."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal

from ..errors import HmpError, NonFiniteError
from ..observing import log
from .attribution import Attribution
from .finding import Finding
from .watcher import Watcher


class Findings(list[Finding]):
    """What a region has found so far, in order; one for each op and line."""


def detect_nonfinite(on_find: Literal["raise", "log"] = "raise") -> contextlib.AbstractContextManager[Findings]:
    """A region in which the first op that makes NaN or Inf out of finite arguments is found, in forward or backward, as
    NonFiniteError with `.finding`, or, with "log", as an error of the logger `hmp`; context manager and decorator.

    Works under hmp's casts, torch.autocast and neither. No findings: infinities that were written (masks, fills of sampling), memory
    that nobody wrote, what an op or its backward makes and masks in its inside (the norm of a zero), Inf that integers make (log of a
    position 0) until a NaN comes of it, and backward overflows of a scaled loss when the GradScaler skips the step. A NaN in the data or
    in a parameter is reported as what it is when an op first computes with it. A NaN that is made of written infinities alone is a
    warning. Inf in bmm is the finding, not the NaN that softmax makes of it.

    Ops of other threads than the one that entered, and those inside a kernel, are not seen; compiled models run uncompiled. Each op's
    results are read once, and on a GPU waited for.
    """
    if on_find not in ("raise", "log"):
        raise HmpError(f'on_find={on_find!r} is unknown; use "raise" to stop at the first finding or "log" to go on')
    return _region(on_find)


@contextlib.contextmanager
def _region(on_find: str) -> Iterator[Findings]:
    findings = Findings()
    said: set[Any] = set()

    def report(finding: Finding, later: bool = False) -> None:
        key = (finding.kind, finding.op, finding.aten, finding.direction, finding.module, finding.file, finding.line, finding.source)
        if key in said:
            return
        said.add(key)
        findings.append(finding)
        if on_find == "raise":
            raise NonFiniteError(str(finding), finding)
        log.error("%s", finding)

    attribution = Attribution(call_ended=lambda _, result: watcher.call_ended(result))
    watcher = Watcher(attribution, report)
    with attribution.watch():
        with watcher:
            yield findings
        # only where nothing was raised
        watcher.close()
