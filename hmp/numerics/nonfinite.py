"""detect_nonfinite(): the first op, forward or backward, that turned finite numbers into NaN or Inf."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any, Literal, NoReturn

from ..errors import HmpError, NonFiniteError
from ..observing import log
from .attribution import Attribution
from .finding import Finding
from .meant import Meant
from .ranks import Ranks, rank_of_several
from .watcher import Watcher


class Findings(list[Finding]):
    """What a region has found so far, in order; one for each op and line."""


def detect_nonfinite(
    on_find: Literal["raise", "log"] = "raise", *, ignore: Collection[str] = ()
) -> contextlib.AbstractContextManager[Findings]:
    """A region in which the first op that makes NaN or Inf out of finite arguments is found, in forward or backward, as
    NonFiniteError with `.finding`, or, with "log", as an error of the logger `hmp`; context manager and decorator.

    Works under hmp's casts, torch.autocast and neither. No findings: infinities that were written (masks, fills of sampling), memory
    that nobody wrote, what an op or its backward makes and masks in its inside (the norm of a zero), Inf that integers make (log of a
    position 0) until a NaN comes of it, and backward overflows of a scaled loss when the GradScaler skips the step. A NaN in the data or
    in a parameter is reported as what it is when an op first computes with it. A NaN that is made of written infinities alone is a
    warning. Inf in bmm is the finding, not the NaN that softmax makes of it.

    With several processes each watches its own ops, and a finding has its `rank`. All enter the region, and all raise the one that was
    first where the next step ends, or the region: until then the process that found it takes part in what all do together. A step ends
    where the optimizer steps that stepped first in the region.

    `ignore` names the ops and the modules whose Infs are meant, such as "masked_fill" and "*.mask", a glob over module paths that holds in
    the modules inside too: an Inf that they make counts as written. Their NaNs are findings.

    Ops of other threads than the one that entered, and those inside a kernel, are not seen; compiled models run uncompiled. Each op's
    results are read once, and on a GPU waited for.
    """
    if on_find not in ("raise", "log"):
        raise HmpError(f'on_find={on_find!r} is unknown; use "raise" to stop at the first finding or "log" to go on')
    if isinstance(ignore, str) or not all(isinstance(each, str) for each in ignore):
        raise HmpError(f'ignore={ignore!r}: expected a list of names of ops and of globs over module paths, such as ["*.mask", "exp"]')
    return _region(on_find, Meant(ignore))


@contextlib.contextmanager
def _region(on_find: str, meant: Meant) -> Iterator[Findings]:
    findings = Findings()
    said: set[Any] = set()
    ranks = Ranks()

    def stop(finding: Finding) -> NoReturn:
        raise NonFiniteError(str(finding), finding)

    def report(finding: Finding) -> None:
        key = (finding.kind, finding.op, finding.aten, finding.direction, finding.module, finding.file, finding.line, finding.source)
        if key in said:
            return
        said.add(key)
        rank = rank_of_several()
        finding = replace(finding, rank=rank)
        findings.append(finding)
        if on_find == "log":
            log.error("%s", finding)
        elif rank is None:
            stop(finding)
        elif len(findings) == 1:
            ranks.publish(finding)

    attribution = Attribution(call_ended=lambda result: watcher.call_ended(result))
    watcher = Watcher(attribution, report, meant)
    with ranks.watch(stop) if on_find == "raise" else contextlib.nullcontext(), attribution.watch():
        with watcher:
            yield findings
        # only where nothing was raised
        watcher.close()
