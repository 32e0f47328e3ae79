"""The page of two captures beside each other: the gap by depth, where it grows, and every module with what it computed in."""

from __future__ import annotations

from ...core.formatting import two_digits
from ..pages import charts
from ..pages.html import render
from .comparison import CaptureComparison, Gap

TABLE_ROWS = 1500
_TOP = 12


def captures_page(comparison: CaptureComparison) -> str:
    """The page, as HTML, of a comparison of two captures."""
    low = max((gap for gap in comparison.gaps if gap.relative is not None), key=lambda gap: gap.rounding, default=None)
    return render(
        "captures.html.j2",
        title=f"{comparison.a.name} beside {comparison.b.name}",
        verdict="; ".join(comparison.verdict()).replace("they", "They", 1) + ".",
        made=comparison.b.about,
        comparison=comparison,
        ends=[
            ("they part at", comparison.first),
            ("beyond one rounding at", comparison.beyond_rounding),
            ("what the model returned", comparison.last),
        ],
        rounding=low.rounding if low is not None else None,
        figure=_figure(comparison, low),
        layers=[(name, gaps) for name, gaps in comparison.layers().items() if len(gaps) > 1][:1],
        jumps=comparison.jumps()[:_TOP],
        computed_in=comparison.computed(),
        table=comparison.gaps[:TABLE_ROWS],
    )


def _figure(comparison: CaptureComparison, low: Gap | None) -> str:
    """The gap of every module's output in the order of the calls, those without modules inside as points; "" where nothing is apart."""
    known = [(at, gap) for at, gap in enumerate(comparison.gaps, 1) if gap.relative and gap.kind]
    lines = []
    layers = {id(gap) for gaps in list(comparison.layers().values())[:1] for gap in gaps}
    for name, colour, size, chosen in (
        ("modules", "--casts", 2.6, [each for each in known if each[1].is_leaf]),
        ("modules that hold others", "--other", 2.6, [each for each in known if not each[1].is_leaf and id(each[1]) not in layers]),
        ("layers", "--bfloat16", 0.0, [each for each in known if id(each[1]) in layers]),
    ):
        points = [(at, min(gap.relative or 0.0, 1.0)) for at, gap in chosen]
        if points:
            titles = [f"{gap.named}: {two_digits(gap.relative)}, {gap.a} beside {gap.b}" for _, gap in chosen]
            lines.append(charts.Line(name, colour, points, size, titles if size else ()))
    if not lines or low is None:
        return ""
    first = next((at, min(gap.relative or 0.0, 1.0), gap.named) for at, gap in known)
    dtype = max((low.a.output, low.b.output), key=lambda name: charts.variable(name) != "--float32")
    across = "modules, in the order in which they returned"
    return charts.error_by_depth(lines, low.rounding or None, f"one rounding to {dtype}", first, "depth-", across)
