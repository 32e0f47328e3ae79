"""A recording at whose end every call must have run as the line of its list says."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from ...core.formatting import some
from ...errors import HmpError, ViolationError
from .record import record
from .report import Report
from .violations import REMEDIES, in_lines

_SHOWN = 40  # names that were never called; the report has them all


@contextmanager
def verified(allow: Collection[str] = (), *, may_match_nothing: bool = False) -> Iterator[Report]:
    """A recording that raises ViolationError at its end where calls ran otherwise than their lines say.

    `allow` names kinds of violations that are no error. HmpError where no call followed a line, for then nothing was shown, unless
    `may_match_nothing`.
    """
    check_kinds(allow)
    with record() as report:
        yield report
    raise_for(report, allow, may_match_nothing=may_match_nothing)


def check_kinds(allow: Collection[str]) -> None:
    """HmpError for what is no list of kinds of violations."""
    if isinstance(allow, str) or any(kind not in REMEDIES for kind in allow):
        raise HmpError(f"allow={allow!r}: give a list of kinds of violations; there are {', '.join(map(repr, REMEDIES))}")


def raise_for(report: Report, allow: Collection[str] = (), *, may_match_nothing: bool = False) -> None:
    """Raises ViolationError where calls of the recording ran otherwise than their lines say, HmpError where no call followed a line."""
    found = [each for each in report.violations() if each.kind not in allow]
    notice = never_called(report)
    if found:
        calls = sum(each.calls for each in found)
        told = "1 call ran otherwise than the line of its list says" if calls == 1 else f"{calls} calls ran otherwise than their lines say"
        raise ViolationError(f"{told}:\n{in_lines(found)}{notice}", report)
    if not may_match_nothing and not any(row.source for row in report.rows):
        raise HmpError(
            f"nothing was verified: no call followed a line of a list. Give a policy, or call hmp.apply(model, policy) before{notice}"
        )


def never_called(report: Report) -> str:
    """A line that names what is on the lists and matched no call; "" for nothing."""
    names = report.never_called
    return f"\nnotice: on the lists, and of no call: {some(names, _SHOWN)}" if names else ""
