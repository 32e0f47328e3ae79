"""Curves of error by depth: their medians, and those of several policies over each other."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ..report.page import charts
from .side_by_side import Beside, SideBySide

_COLOURS = ("--bfloat16", "--float16", "--float8_e4m3fn", "--float32", "--other")


def median(points: Sequence[tuple[int, float]], around: int = 4) -> list[tuple[int, float]]:
    """The points with the median of their neighbours: by-products such as a norm's statistics err more than what goes on."""
    return [(x, statistics.median(y for _, y in points[max(at - around, 0) : at + around + 1])) for at, (x, _) in enumerate(points)]


def side_by_side_figure(found: SideBySide, direction: str) -> str:
    """The accumulated error under each policy, and in red how far the others' values are from the first's, in the order of the calls."""
    rows = [row for row in found.beside if row.direction == direction]
    lines = []
    for at, (name, colour) in enumerate(_coloured(found)):
        points, titles = _points(rows, [row.accumulated[at] for row in rows], f"under {name}")
        if points:
            lines += [charts.Line(f"_{name}", colour, points, 2.0, titles), charts.Line(f"under {name}", colour, median(points), 0.0)]
    for at, name in enumerate(found.policies[1:]):
        points, titles = _points(rows, [row.apart[at] for row in rows], f"between {name} and {found.policy}")
        if points:
            lines.append(charts.Line(f"{name} from {found.policy}", "--casts", points, 3.0, titles))
    return charts.error_by_depth(lines, None, "", None, f"beside-{direction}-") if lines else ""


def _points(rows: Sequence[Beside], errors: Sequence[float | None], which: str) -> tuple[list[tuple[int, float]], list[str]]:
    """The errors above zero by their places, and what each point says."""
    # beyond 1 an error says that nothing is left of the value
    points = [(at, min(error, 1.0)) for at, error in enumerate(errors, 1) if error]
    return points, [f"{rows[at - 1].op} in {rows[at - 1].module or 'no module'}: {error:.2g} {which}" for at, error in points]


def _coloured(found: SideBySide) -> list[tuple[str, str]]:
    """The policies with a colour each: that of the lowest dtype of its results where it is free."""
    left, coloured = list(_COLOURS), []
    for each in found.comparisons:
        dtypes = {row.dtype for row in each.rows}
        low = next((name for name in ("float8_e4m3fn", "bfloat16", "float16", "float32") if name in dtypes), "other")
        colour = f"--{low}" if f"--{low}" in left else left[0] if left else "--other"
        left = [other for other in left if other != colour]
        coloured.append((each.policy, colour))
    return coloured
