"""The parts of a report that kinds of lists bring: FP8's figures of each quantised tensor, the bytes that packing saves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from ...core import lists
from ...core.observe import Listener
from ..pages.page import Section


class Recording(Listener):
    """Records one part of a report, from any thread."""

    def rows(self) -> list[Any]:
        """Return what was recorded so far, in the order of first uses."""
        raise NotImplementedError


class ReportPart(Protocol):
    """One part of a report: what `ListKind.report` makes. `report.NAME` has its rows, which are dataclasses of the kind `row`."""

    name: str
    row: type

    def recording(self) -> Recording:
        """Return what records it."""
        ...

    def merged(self, rows: Iterable[Any]) -> list[Any]:
        """Return the rows of several recordings with those that belong together as one."""
        ...

    def section(self, report: Any) -> Section | None:
        """Return its section of the page; None where it has nothing to say."""
        ...


def report_parts() -> dict[str, ReportPart]:
    """Return the parts that the kinds of lists bring, by name."""
    made = (kind.report() for kind in lists.kinds() if kind.report is not None)
    return {part.name: part for part in made}
